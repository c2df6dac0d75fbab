//! Which exports have a file system under way.
//!
//! An image of a pool has its note beside it; an export is out of reach, so the
//! note is this node's, and holds only while the volume is this node's: it is
//! on a tmpfs, and goes when the volume is unstaged. After that, or after a
//! reboot, what an interrupted mkfs left may be another node's by now, and is
//! formatted again by an operator's request only.

use std::{fs, io, path::PathBuf};

use crate::{digest, nbd::Export};

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

    fn path(&self, export: &Export) -> PathBuf {
        self.dir.join(digest::hex(&export.to_string()))
    }

    /// A mkfs of the export is about to begin, for this volume.
    pub fn begins(&self, export: &Export, volume_id: &str) -> io::Result<()> {
        fs::write(self.path(export), volume_id)
    }

    /// Whether a mkfs of the export, for this volume, has begun and not ended.
    pub fn was_interrupted(&self, export: &Export, volume_id: &str) -> io::Result<bool> {
        match fs::read(self.path(export)) {
            Ok(noted) => Ok(noted == volume_id.as_bytes()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The export holds, or may hold from now on, somebody's data.
    pub fn ended(&self, export: &Export) -> io::Result<()> {
        match fs::remove_file(self.path(export)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
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
        let export = "nbd://host/x".parse().unwrap();
        assert!(!notes.was_interrupted(&export, "v").unwrap());
        notes.begins(&export, "v").unwrap();
        assert!(notes.was_interrupted(&export, "v").unwrap());
        assert!(!notes.was_interrupted(&export, "w").unwrap());
        notes.ended(&export).unwrap();
        notes.ended(&export).unwrap();
        assert!(!notes.was_interrupted(&export, "v").unwrap());
    }
}
