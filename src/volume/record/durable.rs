//! Files that outlive a crash of the machine. Each call waits for their disk, and
//! belongs on a lane.
//!
//! A file is replaced as a whole, as by [`crate::ring::file`], which never waits for a
//! disk.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use crate::{crash_point, ring::file::directory_and_draft};

/// Makes `bytes` the content of `path`, at once or not at all. The file is readable by
/// its owner alone.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let (directory, new) = directory_and_draft(path)?;
    let mut file = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    crash_point();
    fs::rename(&new, path)?;
    crash_point();
    File::open(directory)?.sync_all()
}

/// Removes `path`. Its directory is synced even where the file was gone: the call that
/// removed it may have died before it synced.
pub fn remove(path: &Path) -> io::Result<()> {
    let is_missing = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    match fs::remove_file(path) {
        Err(error) if !is_missing(&error) => return Err(error),
        _ => {}
    }
    crash_point();
    let (directory, _) = directory_and_draft(path)?;
    match File::open(directory).and_then(|directory| directory.sync_all()) {
        Err(error) if is_missing(&error) => Ok(()),
        synced => synced,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn what_is_written_is_read_and_removed_and_nothing_else_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record.json");
        fs::write(
            dir.path().join(".record.json.new"),
            "half a rec, and longer",
        )
        .unwrap();
        for bytes in [&b"first"[..], b"", b"second"] {
            replace(&path, bytes).unwrap();
            assert_eq!(fs::read(&path).unwrap(), bytes);
        }
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
        for path in [&path, &path, &dir.path().join("no/such/record")] {
            remove(path).unwrap();
        }
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    }
}
