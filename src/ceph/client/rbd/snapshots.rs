//! The snapshots of an image.

use std::ffi::c_int;

use super::{Image, abi};
use crate::ceph::client::{CephError, call::owned};

/// The origin of a snapshot (`rbd_snap_namespace_type_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotKind {
    /// A client, by name.
    User,
    /// A snapshot of the image's group.
    Group,
    /// It was removed, and stays in the trash for its clones.
    Trash,
    Mirror,
    /// A release of Ceph newer than this driver.
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
    pub name: String,
    /// The size of the image at that time, in bytes.
    pub size: u64,
    /// Its origin.
    pub kind: SnapshotKind,
}

impl Image {
    /// Creates a snapshot ([`CephError::is_exists`]).
    pub fn snapshot_create(&self, name: &str) -> Result<(), CephError> {
        let call = self.call_on("create", "snapshot", name);
        let text = call.text(name)?;
        // SAFETY: the name ends in NUL.
        call.changed(unsafe { (self.functions().rbd_snap_create)(self.raw(), text.as_ptr()) })
    }

    /// Removes a snapshot. One with clones (v2) stays in the trash until they are
    /// removed; a protected one is busy ([`CephError::is_busy`]).
    pub fn snapshot_remove(&self, name: &str) -> Result<(), CephError> {
        let call = self.call_on("remove", "snapshot", name);
        let text = call.text(name)?;
        // SAFETY: the name ends in NUL.
        call.changed(unsafe { (self.functions().rbd_snap_remove)(self.raw(), text.as_ptr()) })
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
            // SAFETY: the library filled the rows and the row of zeroes after them, and
            // they are not used any more.
            unsafe { (functions.rbd_snap_list_end)(rows.as_mut_ptr()) };
        }
        snapshots
    }

    /// The rows of `rbd_snap_list`, which unlike other functions returns their number, and
    /// writes a row of zeroes after the last.
    fn snapshot_rows(&self) -> Result<Vec<abi::SnapInfo>, CephError> {
        let call = self.call("list the snapshots of");
        let list = self.functions().rbd_snap_list;
        let mut rows: Vec<abi::SnapInfo> = Vec::with_capacity(16);
        loop {
            let mut room = c_int::try_from(rows.capacity()).unwrap_or(c_int::MAX);
            // SAFETY: there is room for `room` rows.
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
