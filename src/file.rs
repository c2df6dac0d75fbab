//! Files that are replaced as a whole, or overwritten within a page.
//!
//! A file is written as the draft `.NAME.new` in the same directory, and renamed. So a
//! reader sees the old bytes or the new, and a crash leaves at worst a draft that the
//! next replacement overwrites; listings skip names that begin with a dot.
//! Each path has one writer at a time. A [`PageFile`] is renamed once, and then overwritten
//! in place: it is read only by the writer's successor, as a read beside a write may see half
//! of each.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use crate::crash_point;

/// What a change outlives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileDurability {
    /// A crash of the process.
    Volatile,
    /// A crash of the machine: the call waits for the disk.
    Durable,
}

/// Makes `bytes` the content of `path`, at once or not at all. The file is readable by
/// its owner alone.
pub fn replace(path: &Path, bytes: &[u8], durability: FileDurability) -> io::Result<()> {
    rename_over(path, bytes, durability).map(drop)
}

/// [`replace`]; returns the file.
fn rename_over(path: &Path, bytes: &[u8], durability: FileDurability) -> io::Result<File> {
    let (directory, new) = directory_and_draft(path)?;
    let mut file = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)?;
    file.write_all(bytes)?;
    if durability == FileDurability::Durable {
        file.sync_all()?;
    }
    crash_point();
    fs::rename(&new, path)?;
    crash_point();
    if durability == FileDurability::Durable {
        File::open(directory)?.sync_all()?;
    }
    Ok(file)
}

/// A file of text that outlives a crash of the process, and is written several times. While
/// it fits into a page it is padded to one with spaces, so that it can be overwritten in
/// place: the kernel copies the bytes of one page between two looks for a signal
/// (`generic_perform_write`), so a killed process leaves the old ones or the new. To rename a
/// draft each time takes three calls more and an inode.
#[derive(Debug)]
pub struct PageFile {
    path: PathBuf,
    /// Open, while it is one page.
    page: Option<File>,
}

impl PageFile {
    /// The file at `path`, which is neither opened nor made yet.
    pub const fn new(path: PathBuf) -> Self {
        Self { path, page: None }
    }

    /// Makes `bytes`, and spaces after them, its content.
    pub fn write(&mut self, mut bytes: Vec<u8>) -> io::Result<()> {
        let fits = bytes.len() <= PAGE;
        if fits {
            bytes.resize(PAGE, b' ');
        }
        if let Some(page) = self.page.as_ref().filter(|_| fits) {
            page.write_all_at(&bytes, 0)?;
            crash_point();
            return Ok(());
        }
        let file = rename_over(&self.path, &bytes, FileDurability::Volatile)?;
        self.page = fits.then_some(file);
        Ok(())
    }
}

/// Bytes of a page, on every architecture at least.
const PAGE: usize = 4096;

/// Removes `path`. Where that is to be durable its directory is synced even if the file
/// was gone: the call that removed it may have died before it synced.
pub fn remove(path: &Path, durability: FileDurability) -> io::Result<()> {
    let is_missing = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    match fs::remove_file(path) {
        Err(error) if !is_missing(&error) => return Err(error),
        _ => {}
    }
    crash_point();
    if durability == FileDurability::Volatile {
        return Ok(());
    }
    let (directory, _) = directory_and_draft(path)?;
    match File::open(directory).and_then(|directory| directory.sync_all()) {
        Err(error) if is_missing(&error) => Ok(()),
        synced => synced,
    }
}

/// The directory of `path`, and the path of its draft.
fn directory_and_draft(path: &Path) -> io::Result<(&Path, PathBuf)> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{} is not the path of a file", path.display()),
        ));
    };
    let mut new = std::ffi::OsString::from(".");
    new.push(name);
    new.push(".new");
    Ok((directory, directory.join(new)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    use super::*;

    #[test]
    fn a_page_is_overwritten_in_place_and_a_longer_file_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record.json");
        let inode = || fs::metadata(&path).unwrap().ino();
        let mut file = PageFile::new(path.clone());
        let mut write = |length: usize| {
            file.write(vec![b'x'; length]).unwrap();
            let text = fs::read_to_string(&path).unwrap();
            assert_eq!(text.trim_end_matches(' ').len(), length);
            assert_eq!(text.len(), length.max(4096));
            inode()
        };
        let first = write(605);
        assert_eq!([write(4096), write(1)], [first, first]);
        let long = write(4097);
        let again = write(20);
        assert_ne!(first, long);
        assert_ne!(long, again);
        assert_eq!(write(21), again);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
    }

    #[test]
    fn a_replaced_file_reads_back_and_leaves_no_draft() {
        for durability in [FileDurability::Volatile, FileDurability::Durable] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("record.json");
            let draft = dir.path().join(".record.json.new");
            fs::write(draft, "half a rec, and longer").unwrap();
            for bytes in [&b"first"[..], b"", b"second", &[b'x'; 12_295]] {
                replace(&path, bytes, durability).unwrap();
                assert_eq!(fs::read(&path).unwrap(), bytes);
            }
            let mode = fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
            assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
            for path in [&path, &path, &dir.path().join("no/such/record")] {
                remove(path, durability).unwrap();
            }
            assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
            let missing = dir.path().join("no/such/record");
            replace(&missing, b"", durability).unwrap_err();
            replace(Path::new("/"), b"", durability).unwrap_err();
        }
    }
}
