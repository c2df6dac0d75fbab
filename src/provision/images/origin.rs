//! The source of a new image's data, and the copy of it.

use std::{fs::File, io, path::PathBuf};

use super::{
    super::{ContentSource, ProvisionError, copy},
    ImageStore,
    capacity::refuse_beyond_room,
    catalogue::{EntryKind as _, failed},
    copies::{CopyTarget, RunningCopy},
    snapshots::SnapshotDetail,
    store::loop_device,
    volumes::VolumeDetail,
    writers::Writers,
};
use crate::{
    crash_point,
    pool::{
        Pool, PoolError, RoomPromise,
        claim::{ClaimError, ControllerClaim, Sharing},
        draft::Draft,
    },
};

/// An image to copy, opened.
pub struct SourceFile<'s> {
    pub pool: &'s Pool,
    pub file: File,
    pub bytes: u64,
    pub path: PathBuf,
    /// Its name, if it is a volume's, which may be written meanwhile.
    pub volume_image: Option<String>,
    /// Whether it may be written by nodes that claim nothing.
    pub is_exported: bool,
    /// Whether its class lets it exceed the room of the pool.
    pub overcommit: bool,
}

impl ImageStore {
    /// Opens the source of a copy.
    pub(super) fn origin(&self, source: &ContentSource) -> Result<SourceFile<'_>, ProvisionError> {
        let opened = match source {
            ContentSource::Volume(handle) => self.volume_origin(handle),
            ContentSource::Snapshot(handle) => self.snapshot_origin(handle),
        };
        opened.map_err(|error| match error {
            ProvisionError::Elsewhere(handle) => ProvisionError::SourceElsewhere(handle),
            other => other,
        })
    }

    /// Opens the image of a volume.
    pub(super) fn volume_origin(&self, handle: &str) -> Result<SourceFile<'_>, ProvisionError> {
        let (pool, entry) = self.find_volume(handle)?;
        let image = format!("{}.img", entry.id);
        let path = VolumeDetail::image(pool, entry.id);
        let file = pool
            .open_image(&image, false)
            .map_err(|error| match error {
                PoolError::NoImage { .. } => ProvisionError::Lost {
                    handle: handle.to_owned(),
                    path: path.clone(),
                },
                other => other.into(),
            })?;
        Ok(SourceFile {
            volume_image: Some(image),
            is_exported: entry.detail.is_exported(),
            overcommit: entry.detail.parameters.overcommit,
            ..SourceFile::new(pool, file, path)?
        })
    }

    fn snapshot_origin(&self, handle: &str) -> Result<SourceFile<'_>, ProvisionError> {
        let (pool, entry) = self.find_snapshot(handle)?;
        let path = SnapshotDetail::image(pool, entry.id);
        let file = File::open(&path).map_err(|e| failed("open", &path, e))?;
        SourceFile::new(pool, file, path)
    }

    /// Fills an empty draft, which becomes `target`, with the origin's data: by reflink, which
    /// is atomic, else by a copy, during which nothing may write to the origin. A copy is
    /// promised its room first, and the promise is returned.
    pub(super) fn fill(
        &self,
        draft: &Draft,
        origin: &SourceFile<'_>,
        target: CopyTarget,
        promise_room: impl FnOnce() -> Result<RoomPromise, ProvisionError>,
    ) -> Result<Option<RoomPromise>, ProvisionError> {
        let cannot = |e| failed("copy", &origin.path, e);
        if copy::reflink(&origin.file, draft.file()).map_err(cannot)? {
            return origin.refuse_resized(draft.file()).map(|()| None);
        }
        // Waits before the origin is claimed, and so withheld from nodes that would write.
        let running = self.copies.begin(target, origin.bytes)?;
        let promise = Some(promise_room()?);
        let Some(image) = &origin.volume_image else {
            let copied = copy_data(&origin.file, draft, origin.bytes, &running, &|| Ok(true));
            return copied.map(|_| promise).map_err(cannot);
        };
        // In the pool of the image, where others look for its lock.
        let claim = ControllerClaim::new(origin.pool, &self.boot_id, Sharing::Readers)?;
        let at_no_point_in_time = |holder| at_no_point_in_time(origin.pool, holder);
        match claim.take(origin.pool, image) {
            Ok(()) => {}
            Err(held @ ClaimError::OwnedBy { .. }) => return Err(at_no_point_in_time(held.into())),
            Err(error) => return Err(error.into()),
        }
        let copied = match loop_device(image, true) {
            Err(e) => Err(failed("look for a loop device over", &origin.path, e)),
            Ok(Some(holder)) => Err(at_no_point_in_time(holder)),
            Ok(None) => copy_unwritten(draft, origin, image, &running),
        };
        let released = claim.release(origin.pool, image);
        copied?;
        released.map(|()| promise).map_err(ProvisionError::from)
    }
}

/// Copies the data of a file while `may_continue`; false: it did not to the end.
fn copy_data(
    file: &File,
    draft: &Draft,
    bytes: u64,
    running: &RunningCopy,
    may_continue: &dyn Fn() -> io::Result<bool>,
) -> io::Result<bool> {
    let advanced = |bytes| running.advance(bytes);
    copy::sparse(file, draft.file(), bytes, &advanced, || {
        running.report();
        crash_point();
        may_continue()
    })
}

/// Copies a volume's image while no node has a claim to write to it.
fn copy_unwritten(
    draft: &Draft,
    origin: &SourceFile<'_>,
    image: &str,
    running: &RunningCopy,
) -> Result<(), ProvisionError> {
    let SourceFile { pool, path, .. } = origin;
    let cannot = |e| failed("copy", path, e);
    // Opened anew: NFS looks for other clients' writes only at an open.
    let file = pool.open_image(image, false)?;
    // It may have grown, and been written, while the copy waited: a part of it is no copy.
    origin.refuse_resized(&file)?;
    let copy = |may_continue: &dyn Fn() -> io::Result<bool>| {
        copy_data(&file, draft, origin.bytes, running, may_continue).map_err(cannot)
    };
    if !origin.is_exported {
        return copy(&|| Ok(true)).map(drop);
    }
    let written = || at_no_point_in_time(pool, ProvisionError::Exported(image.to_owned()));
    match Writers::of(pool, &file, path)? {
        Writers::Some => Err(written()),
        Writers::Unknown => Err(ProvisionError::WritersUnknown {
            pool: pool.name.clone(),
            image: image.to_owned(),
        }),
        Writers::None(lease) => {
            // A writer waits until the copy gives up or is done.
            let whole = copy(&|| lease.holds())? && lease.holds().map_err(cannot)?;
            whole.then_some(()).ok_or_else(written)
        }
    }
}

fn at_no_point_in_time(pool: &Pool, holder: ProvisionError) -> ProvisionError {
    ProvisionError::NoPointInTime {
        pool: pool.name.clone(),
        holder: Box::new(holder),
    }
}

impl<'s> SourceFile<'s> {
    fn new(pool: &'s Pool, file: File, path: PathBuf) -> Result<Self, ProvisionError> {
        let metadata = file.metadata();
        let bytes = metadata.map_err(|e| failed("look at", &path, e))?.len();
        Ok(Self {
            pool,
            file,
            bytes,
            path,
            volume_image: None,
            is_exported: false,
            overcommit: false,
        })
    }

    /// Promises a copy the room for its data; refuses one that would take the space that
    /// others were promised.
    pub fn promise_room(&self, draft: &Draft) -> Result<RoomPromise, ProvisionError> {
        let data = copy::data_bytes(&self.file);
        let data = data.map_err(|e| failed("look for the data of", &self.path, e))?;
        let _room = self.pool.lock_room();
        if !self.overcommit {
            refuse_beyond_room(self.pool, data)?;
        }
        Ok(self.pool.promise_room(draft, data))
    }

    /// Refuses a file of the origin's data that has not the size which the request was
    /// checked against.
    fn refuse_resized(&self, file: &File) -> Result<(), ProvisionError> {
        let found = file.metadata();
        let found = found.map_err(|e| failed("look at", &self.path, e))?;
        if found.len() == self.bytes {
            return Ok(());
        }
        Err(ProvisionError::Resized(self.path.clone()))
    }
}
