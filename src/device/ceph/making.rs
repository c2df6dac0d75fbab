//! The note that a mkfs or luksFormat of an image is under way, in the image's
//! metadata: whichever node has the image next may finish what a killed one began.
//!
//! ```text
//! note ─ durable ─▶ mkfs ─▶ note removed ─▶ mounted, or given out raw
//! ```
//!
//! While it stands, no node that knows of it has let anybody write. So what looks half
//! made, and nothing else, may be made again, by a node that has the image alone:
//!
//! - Others, such as ceph-csi, neither know the note nor remove it. What they make is
//!   whole, and outweighs it; whoever finds something whole removes it. A device that
//!   is recognisably something else than a mkfs leaves is not touched either
//!   ([`Content::is_partial_format`](crate::fs::probe::Content::is_partial_format)). A volume is a raw
//!   device for all its life or never, so nobody has put bytes there that look like
//!   nothing. What remains is a file system of others whose beginning was destroyed
//!   before any node that knows of the note has seen it whole.
//! - An image that is noted to be encrypted is formatted no more, whatever else is
//!   noted.
//! - Clones and copies have their source's metadata. They do not count there: the note
//!   names the image by its id. Nor do they in another cluster, where a mirrored copy
//!   has an id of its own.
//! - To roll an image back changes no metadata: back to a half-made file system, there
//!   is no note of it any more.
//! - The note says what was under way, so that one of a mkfs inside a LUKS volume says
//!   nothing of its header; and for which volume.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use super::{BoundCephImage, CephImageError, Known};
use crate::{
    ceph::client::{CephError, rbd::Header},
    crash_point,
    device::{How, MkfsNote},
};

/// Under which key of the image's metadata.
pub const KEY: &str = "uring-csi/making";

/// What is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Making {
    /// A file system, maybe on an encrypted device.
    FileSystem,
    /// A LUKS header.
    Luks,
}

impl Making {
    fn as_str(self) -> &'static str {
        match self {
            Self::FileSystem => "mkfs",
            Self::Luks => "luksFormat",
        }
    }
}

/// An image's note.
#[derive(Debug)]
pub struct ImageNote {
    header: Header,
    image_id: String,
    /// One was there when the image was asked for it, or may have come since.
    may_stand: AtomicBool,
}

impl ImageNote {
    /// Of an image of which it is known whether it has one. None where nothing tells
    /// the image from its copies.
    pub fn of(header: &Header, stands: bool) -> Option<Arc<Self>> {
        let image_id = header.id()?.to_owned();
        Some(Arc::new(Self {
            header: header.clone(),
            image_id,
            may_stand: stands.into(),
        }))
    }

    /// Somebody else had the image since it was asked for its note.
    pub fn may_have_come(&self) {
        self.may_stand.store(true, Relaxed);
    }

    /// Notes that it is about to begin, for this volume. Durable when it returns.
    pub fn begins(&self, making: Making, volume_id: &str) -> Result<(), CephError> {
        self.may_stand.store(true, Relaxed);
        self.header
            .metadata_set(KEY, &self.text(making, volume_id))?;
        crash_point();
        Ok(())
    }

    /// Whether it has begun for this volume, and not ended. Only where there may be
    /// such a note is the cluster asked.
    pub fn was_interrupted(&self, making: Making, volume_id: &str) -> Result<bool, CephError> {
        if !self.may_stand.load(Relaxed) {
            return Ok(false);
        }
        let noted = self.header.metadata_get(KEY)?;
        Ok(noted.is_some_and(|noted| noted == self.text(making, volume_id)))
    }

    /// The image holds, or may hold from now on, somebody's data.
    pub fn ended(&self) -> Result<(), CephError> {
        if self.may_stand.load(Relaxed) {
            self.header.metadata_remove(KEY)?;
            crash_point();
            self.may_stand.store(false, Relaxed);
        }
        Ok(())
    }

    fn text(&self, making: Making, volume_id: &str) -> String {
        format!("{} {} {volume_id}", making.as_str(), self.image_id)
    }
}

impl BoundCephImage<'_> {
    /// Where it is noted that something is being made on the image: with the image, for
    /// who may write it, where that can be. Nothing is being made on one that is staged,
    /// and the cluster is not asked.
    pub(super) fn note(
        &self,
        known: &Known<'_>,
        making: Making,
        how: &How,
    ) -> Result<MkfsNote, CephImageError> {
        if !how.read_only
            && !how.staged
            && let Some(asked) = known.asked(&self.images.connections)?
            && let Some(note) = &asked.making
        {
            return Ok(MkfsNote::Image(Arc::clone(note), making));
        }
        Ok(self.node_note(making))
    }

    /// The same on this node.
    pub(super) fn node_note(&self, making: Making) -> MkfsNote {
        let what = match making {
            Making::FileSystem => self.source.to_string(),
            Making::Luks => format!("LUKS of {}", self.source),
        };
        MkfsNote::Node(self.images.notes.clone(), what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ceph::{
        client::{
            rados::IoCtx,
            rbd::{self, Access, Features, Image, ImageOptions},
        },
        testing::Place,
    };

    const MIB: u64 = 1 << 20;

    /// As a node finds it that has the image now.
    fn note(io: &IoCtx, image: &str) -> Arc<ImageNote> {
        let header = Header::of(io, image).unwrap();
        let (_, noted) = header.features_and(KEY).unwrap();
        ImageNote::of(&header, noted.is_some()).unwrap()
    }

    fn plain() -> ImageOptions {
        ImageOptions {
            features: Some(Features::LAYERING),
            ..ImageOptions::default()
        }
    }

    #[test]
    fn every_node_knows_what_another_has_begun() {
        use Making::{FileSystem, Luks};
        let Some(Place { io, cluster: _test }) = Place::new() else {
            return;
        };
        rbd::create(&io, "image", MIB, &plain()).unwrap();
        let one = note(&io, "image");
        assert!(!one.was_interrupted(FileSystem, "v").unwrap());
        one.begins(FileSystem, "v").unwrap();
        let early = note(&io, "image");
        for node in [&one, &early] {
            assert!(node.was_interrupted(FileSystem, "v").unwrap());
            assert!(!node.was_interrupted(FileSystem, "w").unwrap());
            assert!(!node.was_interrupted(Luks, "v").unwrap());
        }
        one.ended().unwrap();
        // It looked before that was over.
        assert!(!early.was_interrupted(FileSystem, "v").unwrap());
        early.ended().unwrap();
        let late = note(&io, "image");
        assert!(!late.was_interrupted(FileSystem, "v").unwrap());
        // As one that waits for whoever has the image.
        one.begins(Luks, "v").unwrap();
        assert!(!late.was_interrupted(Luks, "v").unwrap());
        late.may_have_come();
        assert!(late.was_interrupted(Luks, "v").unwrap());
        late.ended().unwrap();
        assert_eq!(late.header.metadata_get(KEY).unwrap(), None);
        // In the words of Ceph's own program.
        late.begins(FileSystem, "v").unwrap();
        let image = Image::open(&io, "image", Access::ReadOnly).unwrap();
        let said = image.metadata_list().unwrap();
        let id = image.id().unwrap();
        assert_eq!(
            said.into_iter().next(),
            Some((KEY.to_owned(), format!("mkfs {id} v")))
        );
    }

    #[test]
    fn a_copy_s_note_is_none() {
        let Some(Place { io, cluster: _test }) = Place::new() else {
            return;
        };
        rbd::create(&io, "image", MIB, &plain()).unwrap();
        note(&io, "image").begins(Making::FileSystem, "v").unwrap();
        let image = Image::open(&io, "image", Access::ReadWrite).unwrap();
        image.snapshot_create("half").unwrap();
        rbd::clone_snapshot(&io, "image", "half", &io, "clone", &plain()).unwrap();
        let clone = note(&io, "clone");
        assert!(clone.may_stand.load(Relaxed), "a clone has its parent's");
        assert!(!clone.was_interrupted(Making::FileSystem, "v").unwrap());
        // One of its own takes its place, and the parent keeps its.
        clone.begins(Making::FileSystem, "v").unwrap();
        assert!(clone.was_interrupted(Making::FileSystem, "v").unwrap());
        clone.ended().unwrap();
        let parent = note(&io, "image");
        assert!(parent.was_interrupted(Making::FileSystem, "v").unwrap());
    }
}
