//! Which sources have a file system under way.
//!
//! An image of a pool has its note beside it ([`making`]); an export or a Ceph image
//! is out of reach, so the note is this node's, and holds only while the volume is this
//! node's: it is on a tmpfs, and goes when the volume is unstaged, before which
//! what an interrupted mkfs left is blanked out. After a reboot that may be
//! another node's by now, and is formatted again by an operator's request only.

use std::{fmt::Display, fs, io, path::PathBuf};

use super::error::DeviceError;
use crate::{
    crash_point, digest,
    pool::{Pool, making},
};

/// Where it is noted that a mkfs of one source is under way.
#[allow(missing_debug_implementations, reason = "a source is only shown")]
pub enum MkfsNote<'a> {
    /// Beside an image of a pool, for whichever node has it next.
    Pool(&'a Pool, &'a str),
    /// On this node, for as long as it has the source.
    Node(&'a Notes, &'a dyn Display),
}

impl MkfsNote<'_> {
    /// Notes durably that a mkfs is about to begin, for this volume.
    pub fn begins(&self, volume_id: &str) -> Result<(), DeviceError> {
        match self {
            Self::Pool(pool, image) => Ok(making::begins(pool, image, volume_id)?),
            Self::Node(notes, source) => Ok(notes.begins(*source, volume_id)?),
        }
    }

    /// Whether a mkfs for this volume has begun and not ended.
    pub fn was_interrupted(&self, volume_id: &str) -> Result<bool, DeviceError> {
        match self {
            Self::Pool(pool, image) => Ok(making::was_interrupted(pool, image, volume_id)?),
            Self::Node(notes, source) => Ok(notes.was_interrupted(*source, volume_id)?),
        }
    }

    /// From now on the source may hold data.
    pub fn ended(&self) -> Result<(), DeviceError> {
        match self {
            Self::Pool(pool, image) => Ok(making::ended(pool, image)?),
            Self::Node(notes, source) => Ok(notes.ended(*source)?),
        }
    }

    /// Whether it is given back with the source.
    pub fn goes_with_its_source(&self) -> bool {
        matches!(self, Self::Node(..))
    }
}

/// A note that could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what}")]
pub struct NoteError {
    what: &'static str,
    source: io::Error,
}

fn failed(what: &'static str) -> impl FnOnce(io::Error) -> NoteError {
    move |source| NoteError { what, source }
}

/// The notes of this node.
#[derive(Clone, Debug)]
pub struct Notes {
    dir: PathBuf,
}

impl Notes {
    /// In a directory on a tmpfs, made if missing.
    pub fn open(dir: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&dir)?;
        Ok(Self { dir })
    }

    fn path(&self, source: &dyn Display) -> PathBuf {
        self.dir.join(digest::hex(&source.to_string()))
    }

    /// A mkfs of the source is about to begin, for this volume.
    pub fn begins(&self, source: &dyn Display, volume_id: &str) -> Result<(), NoteError> {
        fs::write(self.path(source), volume_id).map_err(failed("note the format that begins"))?;
        crash_point();
        Ok(())
    }

    /// Whether a mkfs of the source, for this volume, has begun and not ended.
    pub fn was_interrupted(
        &self,
        source: &dyn Display,
        volume_id: &str,
    ) -> Result<bool, NoteError> {
        match fs::read(self.path(source)) {
            Ok(noted) => Ok(noted == volume_id.as_bytes()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(failed("look for a note of a format")(error)),
        }
    }

    /// The source holds, or may hold from now on, somebody's data.
    pub fn ended(&self, source: &dyn Display) -> Result<(), NoteError> {
        let removed = fs::remove_file(self.path(source));
        crash_point();
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(failed("note the format that ended")(error))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_for_one_volume_and_goes_once() {
        let dir = tempfile::tempdir().unwrap();
        let notes = Notes::open(dir.path().join("mkfs")).unwrap();
        let source = "nbd://host/x";
        assert!(!notes.was_interrupted(&source, "v").unwrap());
        notes.begins(&source, "v").unwrap();
        assert!(notes.was_interrupted(&source, "v").unwrap());
        assert!(!notes.was_interrupted(&source, "w").unwrap());
        notes.ended(&source).unwrap();
        notes.ended(&source).unwrap();
        assert!(!notes.was_interrupted(&source, "v").unwrap());
    }
}
