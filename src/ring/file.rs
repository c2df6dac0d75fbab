//! Files of our own: records on tmpfs, and the few under the state directory.
//!
//! Only such files: their operations run on the runtime's ring and, where they
//! may sleep, on its few kernel workers, which a dead device must never hold.
//!
//! A file is replaced as a whole: written beside its path as `.NAME.new`, and
//! renamed over it. So a reader sees the old bytes or the new, and a crash
//! leaves at worst a `.NAME.new` that the next replacement overwrites; listings
//! of records skip names that begin with a dot. One writer a path at a time.

use std::{
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use tokio_uring::fs::{File, OpenOptions, remove_file, rename};

use crate::{Done, crash_point};

/// How much a read asks for at least; records are smaller.
const CHUNK: usize = 4096;

/// What a change is to outlive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// A crash of the process.
    Volatile,
    /// A crash of the machine, too: the file and its directory are synced.
    Durable,
}

/// The whole of a file.
pub async fn read(path: &Path) -> io::Result<Vec<u8>> {
    let file = File::open(path).await?;
    let mut bytes = Vec::with_capacity(CHUNK);
    let end = loop {
        let at = bytes.len();
        bytes.reserve(CHUNK);
        // Into the vector's spare capacity: the crate reads up to it.
        let part = tokio_uring::buf::BoundedBuf::slice(bytes, at..);
        let (count, part) = file.read_at(part, at as u64).await;
        bytes = part.into_inner();
        match count {
            Ok(0) => break Ok(bytes),
            Ok(_) => {}
            Err(error) => break Err(error),
        }
    };
    file.close().await?;
    end
}

/// Makes `bytes` the content of `path`, at once or not at all. The file is
/// readable by its owner alone.
///
/// When the future is dropped meanwhile, either has happened.
pub async fn replace(path: &Path, bytes: Vec<u8>, durability: Durability) -> io::Result<()> {
    let (directory, new) = beside(path)?;
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)
        .await?;
    let (written, _) = file.write_all_at(bytes, 0).await;
    let synced = match (&written, durability) {
        (Ok(()), Durability::Durable) => file.sync_all().await,
        _ => Ok(()),
    };
    file.close().await?;
    written?;
    synced?;
    crash_point();
    rename(&new, path).await?;
    crash_point();
    sync_directory(directory, durability).await
}

/// Removes `path`. Its directory is synced even where the file was gone: the
/// call that removed it may have died before it synced.
pub async fn remove(path: &Path, durability: Durability) -> io::Result<Done> {
    let removed = remove_file(path).await;
    crash_point();
    let done = match removed {
        Ok(()) => Done::Now,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Done::Already,
        Err(error) => return Err(error),
    };
    let (directory, _) = beside(path)?;
    match sync_directory(directory, durability).await {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Done::Already),
        synced => synced.map(|()| done),
    }
}

async fn sync_directory(directory: &Path, durability: Durability) -> io::Result<()> {
    if durability == Durability::Volatile {
        return Ok(());
    }
    let directory = File::open(directory).await?;
    let synced = directory.sync_all().await;
    directory.close().await?;
    synced
}

/// The directory of `path`, and the name under which its next content is made.
fn beside(path: &Path) -> io::Result<(&Path, PathBuf)> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{} names no file", path.display()),
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
    fn what_is_written_is_read_and_nothing_else_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pvc-1.json");
        ring::start(async {
            for durability in [Durability::Volatile, Durability::Durable] {
                for length in [0, 1, CHUNK - 1, CHUNK, 3 * CHUNK + 7] {
                    let bytes = vec![b'x'; length];
                    replace(&path, bytes.clone(), durability).await.unwrap();
                    assert!(read(&path).await.unwrap() == bytes, "{length} bytes");
                }
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
        ring::start(replace(&path, b"whole".to_vec(), Durability::Volatile))
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
            for durability in [Durability::Durable, Durability::Volatile] {
                std::fs::write(&path, "x").unwrap();
                assert_eq!(remove(&path, durability).await.unwrap(), Done::Now);
                assert_eq!(remove(&path, durability).await.unwrap(), Done::Already);
                assert_eq!(remove(&nowhere, durability).await.unwrap(), Done::Already);
            }
            let missing = read(&path).await.unwrap_err();
            assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        })
        .unwrap();
    }
}
