//! The format marker of an image: its metadata record that a mkfs or luksFormat is
//! under way. The next node that has the image may repeat the format of a killed one.
//!
//! ```text
//! marker ─ durable ─▶ mkfs ─▶ marker removed ─▶ mounted, or given out raw
//! ```
//!
//! While it stands, no node that reads markers has let a pod write. So a partial format,
//! and nothing else, may be formatted again, by a node that has the image alone:
//!
//! - Other drivers, such as ceph-csi, neither read the marker nor remove it. A complete
//!   format of theirs outweighs it; a node that finds one removes the marker. A device with
//!   recognisable content other than a partial format is not touched either
//!   ([`Content::is_partial_format`](crate::fs::probe::Content::is_partial_format)). A
//!   volume is a raw device for all its life or never, so a marked one has no raw data. One
//!   case remains: another driver's file system whose beginning was destroyed before a node
//!   that reads markers has seen it complete.
//! - The agent never formats again an image whose metadata say that it is encrypted, also
//!   where it has a marker.
//! - Clones and copies have their source's metadata. The marker does not count there,
//!   because it names the image by its id. Nor does it count in another cluster, where a
//!   mirrored copy has an id of its own.
//! - A rollback changes no metadata: an image that is rolled back to a partial format has no
//!   marker.
//! - The marker names the format, so that one of a mkfs inside a LUKS volume does not apply
//!   to its header; and the volume.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use super::{BoundCephImage, CephImageError, Known};
use crate::{
    ceph::client::{CephError, rbd::Header},
    crash_point,
    device::{AttachOptions, DeviceError, backend::FormatMarker, format_markers::NodeFormatMarker},
};

/// The marker's key in the image's metadata; stored, so it keeps its name.
pub const KEY: &str = "uring-csi/making";

/// The format that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FormatKind {
    /// A file system, maybe on an encrypted device.
    FileSystem,
    /// A LUKS header.
    Luks,
}

impl FormatKind {
    fn as_str(self) -> &'static str {
        match self {
            Self::FileSystem => "mkfs",
            Self::Luks => "luksFormat",
        }
    }
}

#[derive(Debug)]
pub struct ImageFormatMarker {
    header: Header,
    image_id: String,
    /// The image had a marker when the agent read it, or may have got one since.
    may_be_set: AtomicBool,
}

impl ImageFormatMarker {
    /// The marker of an image; `stands`: it has one now. None where no id distinguishes the
    /// image from its copies.
    pub fn of(header: &Header, stands: bool) -> Option<Arc<Self>> {
        let image_id = header.id()?.to_owned();
        Some(Arc::new(Self {
            header: header.clone(),
            image_id,
            may_be_set: stands.into(),
        }))
    }

    /// Discards what was read: another client may have set the marker since.
    pub fn invalidate(&self) {
        self.may_be_set.store(true, Relaxed);
    }

    /// Sets the marker, for this volume. Durable when it returns.
    pub fn set(&self, format: FormatKind, volume_id: &str) -> Result<(), CephError> {
        self.may_be_set.store(true, Relaxed);
        self.header
            .metadata_set(KEY, &self.text(format, volume_id))?;
        crash_point();
        Ok(())
    }

    /// Whether the marker says that this format began for this volume and did not end.
    /// Asks the cluster only where there may be a marker.
    pub fn format_in_progress(
        &self,
        format: FormatKind,
        volume_id: &str,
    ) -> Result<bool, CephError> {
        if !self.may_be_set.load(Relaxed) {
            return Ok(false);
        }
        let value = self.header.metadata_get(KEY)?;
        Ok(value.is_some_and(|value| value == self.text(format, volume_id)))
    }

    /// Removes the marker: the image holds data, or may from now on.
    pub fn clear(&self) -> Result<(), CephError> {
        if self.may_be_set.load(Relaxed) {
            self.header.metadata_remove(KEY)?;
            crash_point();
            self.may_be_set.store(false, Relaxed);
        }
        Ok(())
    }

    fn text(&self, format: FormatKind, volume_id: &str) -> String {
        format!("{} {} {volume_id}", format.as_str(), self.image_id)
    }
}

/// The marker of one kind of format in the image's metadata.
#[derive(Debug)]
struct MarkerInImage(Arc<ImageFormatMarker>, FormatKind);

impl FormatMarker for MarkerInImage {
    fn set(&self, volume_id: &str) -> Result<(), DeviceError> {
        Ok(self.0.set(self.1, volume_id)?)
    }

    fn format_in_progress(&self, volume_id: &str) -> Result<bool, DeviceError> {
        Ok(self.0.format_in_progress(self.1, volume_id)?)
    }

    fn clear(&self) -> Result<(), DeviceError> {
        Ok(self.0.clear()?)
    }
}

impl BoundCephImage<'_> {
    /// The format marker of the image: in its metadata, for a node that may write it,
    /// where librados is installed. A staged image is not being formatted, so the agent
    /// does not query the cluster.
    pub(super) fn marker(
        &self,
        known: &Known<'_>,
        format: FormatKind,
        options: &AttachOptions,
    ) -> Result<Arc<dyn FormatMarker>, CephImageError> {
        if !options.read_only
            && !options.staged
            && let Some(queried) = known.queried(&self.images.connections)?
            && let Some(marker) = &queried.format_marker
        {
            return Ok(Arc::new(MarkerInImage(Arc::clone(marker), format)));
        }
        Ok(Arc::new(self.node_marker(format)))
    }

    /// The marker on this node.
    pub(super) fn node_marker(&self, format: FormatKind) -> NodeFormatMarker {
        let what = match format {
            FormatKind::FileSystem => self.source.to_string(),
            FormatKind::Luks => format!("LUKS of {}", self.source),
        };
        self.images.format_markers.of(what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ceph::{
        client::{
            rados::IoCtx,
            rbd::{self, Features, Image, ImageOptions, OpenMode},
        },
        testing::TestPool,
    };

    const MIB: u64 = 1 << 20;

    /// As a node finds it that has the image now.
    fn marker(io: &IoCtx, image: &str) -> Arc<ImageFormatMarker> {
        let header = Header::of(io, image).unwrap();
        let (_, value) = header.features_and(KEY).unwrap();
        ImageFormatMarker::of(&header, value.is_some()).unwrap()
    }

    fn plain() -> ImageOptions {
        ImageOptions {
            features: Some(Features::LAYERING),
            ..ImageOptions::default()
        }
    }

    #[test]
    fn a_format_marker_is_seen_by_every_node() {
        use FormatKind::{FileSystem, Luks};
        let Some(pool) = TestPool::new() else {
            return;
        };
        let io = &pool.io;
        rbd::create(io, "image", MIB, &plain()).unwrap();
        let one = marker(io, "image");
        assert!(!one.format_in_progress(FileSystem, "v").unwrap());
        one.set(FileSystem, "v").unwrap();
        let early = marker(io, "image");
        for node in [&one, &early] {
            assert!(node.format_in_progress(FileSystem, "v").unwrap());
            assert!(!node.format_in_progress(FileSystem, "w").unwrap());
            assert!(!node.format_in_progress(Luks, "v").unwrap());
        }
        one.clear().unwrap();
        // It looked before that was over.
        assert!(!early.format_in_progress(FileSystem, "v").unwrap());
        early.clear().unwrap();
        let late = marker(io, "image");
        assert!(!late.format_in_progress(FileSystem, "v").unwrap());
        // As a node that waits until the other has released the image.
        one.set(Luks, "v").unwrap();
        assert!(!late.format_in_progress(Luks, "v").unwrap());
        late.invalidate();
        assert!(late.format_in_progress(Luks, "v").unwrap());
        late.clear().unwrap();
        assert_eq!(late.header.metadata_get(KEY).unwrap(), None);
        // In the words of Ceph's own program.
        late.set(FileSystem, "v").unwrap();
        let image = Image::open(io, "image", OpenMode::ReadOnly).unwrap();
        let said = image.metadata_list().unwrap();
        let id = image.id().unwrap();
        assert_eq!(
            said.into_iter().next(),
            Some((KEY.to_owned(), format!("mkfs {id} v")))
        );
    }

    #[test]
    fn a_format_marker_copied_by_a_clone_is_ignored() {
        let Some(pool) = TestPool::new() else {
            return;
        };
        let io = &pool.io;
        rbd::create(io, "image", MIB, &plain()).unwrap();
        marker(io, "image")
            .set(FormatKind::FileSystem, "v")
            .unwrap();
        let image = Image::open(io, "image", OpenMode::ReadWrite).unwrap();
        image.snapshot_create("half").unwrap();
        rbd::clone_snapshot(io, "image", "half", io, "clone", &plain()).unwrap();
        let clone = marker(io, "clone");
        assert!(clone.may_be_set.load(Relaxed), "a clone has its parent's");
        assert!(
            !clone
                .format_in_progress(FormatKind::FileSystem, "v")
                .unwrap()
        );
        // One of its own takes its place, and the parent keeps its.
        clone.set(FormatKind::FileSystem, "v").unwrap();
        assert!(
            clone
                .format_in_progress(FormatKind::FileSystem, "v")
                .unwrap()
        );
        clone.clear().unwrap();
        let parent = marker(io, "image");
        assert!(
            parent
                .format_in_progress(FormatKind::FileSystem, "v")
                .unwrap()
        );
    }
}
