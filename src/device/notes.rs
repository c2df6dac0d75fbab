//! Which sources have a file system under way, where a note cannot be kept
//! beside the source.
//!
//! An image of a pool has its note beside it; an export or a Ceph image is out
//! of reach, so the note is this node's, and holds only while the volume is this
//! node's: it is on a tmpfs, and goes when the volume is unstaged, before which
//! what an interrupted mkfs left is blanked out. After a reboot that may be
//! another node's by now, and is formatted again by an operator's request only.

use std::{fmt::Display, fs, io, path::PathBuf};

use crate::{crash_point, digest};

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

    fn path(&self, source: &impl Display) -> PathBuf {
        self.dir.join(digest::hex(&source.to_string()))
    }

    /// A mkfs of the source is about to begin, for this volume.
    pub fn begins(&self, source: &impl Display, volume_id: &str) -> Result<(), NoteError> {
        fs::write(self.path(source), volume_id).map_err(failed("note the format that begins"))?;
        crash_point();
        Ok(())
    }

    /// Whether a mkfs of the source, for this volume, has begun and not ended.
    pub fn was_interrupted(
        &self,
        source: &impl Display,
        volume_id: &str,
    ) -> Result<bool, NoteError> {
        match fs::read(self.path(source)) {
            Ok(noted) => Ok(noted == volume_id.as_bytes()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(failed("look for a note of a format")(error)),
        }
    }

    /// The source holds, or may hold from now on, somebody's data.
    pub fn ended(&self, source: &impl Display) -> Result<(), NoteError> {
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
