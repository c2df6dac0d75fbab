//! The snapshots of an image.

use std::{ffi::c_int, time::SystemTime};

use super::{Image, abi, image::system_time};
use crate::ceph::client::{CephError, call::owned};

/// What made a snapshot (`rbd_snap_namespace_type_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotKind {
    /// Somebody, by name.
    User,
    /// A snapshot of the image's group.
    Group,
    /// It was removed, and lives on for the clones that it has.
    Trash,
    /// The mirror.
    Mirror,
    /// Something newer than this driver.
    Other,
}

impl From<c_int> for SnapshotKind {
    fn from(kind: c_int) -> Self {
        match kind {
            0 => Self::User,
            1 => Self::Group,
            2 => Self::Trash,
            3 => Self::Mirror,
            _ => Self::Other,
        }
    }
}

/// A snapshot of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Its number in the pool.
    pub id: u64,
    /// Its name.
    pub name: String,
    /// The size that the image had.
    pub size: u64,
    /// What made it.
    pub kind: SnapshotKind,
}

impl Image {
    /// Makes a snapshot ([`CephError::is_exists`]).
    pub fn snapshot_create(&self, name: &str) -> Result<(), CephError> {
        let call = self.call_on("create", "snapshot", name);
        let text = call.text(name)?;
        // SAFETY: the name ends in NUL.
        call.changed(unsafe { (self.functions().rbd_snap_create)(self.raw(), text.as_ptr()) })
    }

    /// Removes a snapshot. One with clones (v2) lives on in the trash, until they
    /// are gone; one that is protected is busy ([`CephError::is_busy`]).
    pub fn snapshot_remove(&self, name: &str) -> Result<(), CephError> {
        let call = self.call_on("remove", "snapshot", name);
        let text = call.text(name)?;
        // SAFETY: the name ends in NUL.
        call.changed(unsafe { (self.functions().rbd_snap_remove)(self.raw(), text.as_ptr()) })
    }

    /// Whether a snapshot is protected, as clones of the first version need it.
    pub fn snapshot_is_protected(&self, name: &str) -> Result<bool, CephError> {
        let call = self.call_on("read", "snapshot", name);
        let text = call.text(name)?;
        let mut protected = 0;
        let read = self.functions().rbd_snap_is_protected;
        // SAFETY: the name ends in NUL, `protected` outlives the call.
        call.check(unsafe { read(self.raw(), text.as_ptr(), &raw mut protected) })?;
        Ok(protected != 0)
    }

    /// Takes the protection off; a snapshot with clones of the first version is
    /// busy ([`CephError::is_busy`]).
    pub fn snapshot_unprotect(&self, name: &str) -> Result<(), CephError> {
        let call = self.call_on("unprotect", "snapshot", name);
        let text = call.text(name)?;
        // SAFETY: the name ends in NUL.
        call.check(unsafe { (self.functions().rbd_snap_unprotect)(self.raw(), text.as_ptr()) })
    }

    /// When a snapshot was made.
    pub fn snapshot_created(&self, snapshot: &Snapshot) -> Result<SystemTime, CephError> {
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let read = self.functions().rbd_snap_get_timestamp;
        // SAFETY: the image is open, `time` outlives the call.
        let answer = unsafe { read(self.raw(), snapshot.id, &raw mut time) };
        self.call_on("read the age of", "snapshot", &snapshot.name)
            .check(answer)?;
        Ok(system_time(time))
    }

    /// All snapshots, also those in the trash.
    pub fn snapshots(&self) -> Result<Vec<Snapshot>, CephError> {
        let functions = self.functions();
        let rows = self.snapshot_rows()?;
        let snapshot = |row: &abi::SnapInfo| {
            let mut kind = 0;
            let read = functions.rbd_snap_get_namespace_type;
            // SAFETY: the image is open, `kind` outlives the call; the row's text
            // ends in NUL.
            let (answer, name) =
                unsafe { (read(self.raw(), row.id, &raw mut kind), owned(row.name)) };
            self.call_on("read", "snapshot", &name).check(answer)?;
            Ok(Snapshot {
                id: row.id,
                name,
                size: row.size,
                kind: SnapshotKind::from(kind),
            })
        };
        let snapshots = rows.iter().map(snapshot).collect();
        let mut rows = rows;
        if !rows.is_empty() {
            // SAFETY: the rows are the library's own, ended by one of zeroes, and
            // not used any more.
            unsafe { (functions.rbd_snap_list_end)(rows.as_mut_ptr()) };
        }
        snapshots
    }

    /// The rows of `rbd_snap_list`, which is unlike the other lists: it answers
    /// how many there are, and ends them by a row of zeroes.
    fn snapshot_rows(&self) -> Result<Vec<abi::SnapInfo>, CephError> {
        let call = self.call("list the snapshots of");
        let list = self.functions().rbd_snap_list;
        let mut rows: Vec<abi::SnapInfo> = Vec::with_capacity(16);
        loop {
            let mut room = c_int::try_from(rows.capacity()).unwrap_or(c_int::MAX);
            // SAFETY: there is room for as many rows as are told.
            let answer = unsafe { list(self.raw(), rows.as_mut_ptr(), &raw mut room) };
            if answer == -libc::ERANGE {
                rows.reserve(usize::try_from(room).unwrap_or_default() + 1);
                continue;
            }
            let count = call.check64(answer.into())?;
            // SAFETY: the library has filled that many rows.
            unsafe { rows.set_len(usize::try_from(count).unwrap_or_default()) };
            return Ok(rows);
        }
    }
}
