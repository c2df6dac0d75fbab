//! The agent's own files on a tmpfs: records.
//!
//! Only those: their operations run on the runtime's ring and, where they may sleep,
//! on its few kernel workers, which a dead device must never occupy.
//!
//! A file is replaced as a whole: written as the draft `.NAME.new` in the same
//! directory, and renamed. So a reader sees the old bytes or the new, and a crash
//! leaves at worst a `.NAME.new` that the next replacement overwrites; listings
//! of records skip names that begin with a dot. Each path has one writer at a time.

use std::{
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use tokio_uring::fs::{OpenOptions, remove_file, rename};

use crate::{Done, crash_point};

/// Replaces the content of `path` atomically, also where the future is dropped meanwhile.
/// The file is readable by its owner only, and outlives a crash of the process.
pub async fn replace(path: &Path, bytes: Vec<u8>) -> io::Result<()> {
    let (_, new) = directory_and_draft(path)?;
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)
        .await?;
    let (written, _) = file.write_all_at(bytes, 0).await;
    file.close().await?;
    written?;
    crash_point();
    rename(&new, path).await?;
    crash_point();
    Ok(())
}

/// Removes `path`.
pub async fn remove(path: &Path) -> io::Result<Done> {
    let removed = remove_file(path).await;
    crash_point();
    match removed {
        Ok(()) => Ok(Done::Now),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Done::Already),
        Err(error) => Err(error),
    }
}

/// The directory of `path`, and the path of its draft.
pub fn directory_and_draft(path: &Path) -> io::Result<(&Path, PathBuf)> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{} is not the path of a file", path.display()),
        ));
    };
    let mut new = std::ffi::OsString::from(".");
    new.push(name);
    new.push(".new");
    let directory = if directory.as_os_str().is_empty() {
        Path::new(".")
    } else {
        directory
    };
    Ok((directory, directory.join(new)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::ring;

    #[test]
    fn a_replaced_file_reads_back_and_leaves_no_draft() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pvc-1.json");
        ring::start(async {
            for length in [0, 1, 4095, 4096, 12_295] {
                let bytes = vec![b'x'; length];
                replace(&path, bytes.clone()).await.unwrap();
                assert!(std::fs::read(&path).unwrap() == bytes, "{length} bytes");
            }
        })
        .unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1);
    }

    #[test]
    fn a_leftover_of_a_crash_does_no_harm() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record");
        std::fs::write(dir.path().join(".record.new"), "half a rec, and longer").unwrap();
        ring::start(replace(&path, b"whole".to_vec()))
            .unwrap()
            .unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"whole");
        assert!(!dir.path().join(".record.new").exists());
    }

    #[test]
    fn removal_is_idempotent() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record");
        std::fs::write(&path, "x").unwrap();
        let nowhere = dir.path().join("no/such/record");
        ring::start(async {
            assert_eq!(remove(&path).await.unwrap(), Done::Now);
            assert_eq!(remove(&path).await.unwrap(), Done::Already);
            assert_eq!(remove(&nowhere).await.unwrap(), Done::Already);
        })
        .unwrap();
    }
}
