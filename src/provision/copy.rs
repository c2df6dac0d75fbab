//! Copies of image files: by reflink where the file system can, else of the
//! data between the holes.

use std::{fs::File, io, os::unix::fs::FileExt as _};

use rustix::{
    fs::{SeekFrom, copy_file_range, ioctl_ficlone, seek},
    io::Errno,
};

/// Makes `to` share all of the data of `from` (ioctl_ficlone(2)). Atomic: `to` shows one
/// point in time even while a process writes to `from`. False if the file system does not
/// support that, or the two are on different ones.
pub fn reflink(from: &File, to: &File) -> io::Result<bool> {
    match ioctl_ficlone(to, from) {
        Ok(()) => Ok(true),
        Err(Errno::OPNOTSUPP | Errno::XDEV | Errno::INVAL | Errno::NOTTY | Errno::NOSYS) => {
            Ok(false)
        }
        Err(errno) => Err(errno.into()),
    }
}

/// Copies `len` bytes, leaving holes where `from` has holes. `to` is an empty
/// file. The copy shows a single point in time only if nothing writes to `from` meanwhile.
/// Gives up, and returns false, once `may_continue` returns false.
pub fn sparse(
    from: &File,
    to: &File,
    len: u64,
    may_continue: impl Fn() -> io::Result<bool>,
) -> io::Result<bool> {
    to.set_len(len)?;
    let mut at = 0;
    while at < len {
        let data = match seek(from, SeekFrom::Data(at)) {
            Ok(data) if data < len => data,
            Ok(_) | Err(Errno::NXIO) => break,
            Err(errno) => return Err(errno.into()),
        };
        // Every file ends in a hole (lseek(2)).
        let hole = seek(from, SeekFrom::Hole(data))?.min(len);
        at = data;
        while at < hole {
            if !may_continue()? {
                return Ok(false);
            }
            let end = hole.min(at + CHUNK);
            extent(from, to, at, end)?;
            at = end;
        }
    }
    Ok(true)
}

fn extent(from: &File, to: &File, mut at: u64, end: u64) -> io::Result<()> {
    while at < end {
        let chunk = usize::try_from(end - at).unwrap_or(usize::MAX);
        let (mut read_at, mut write_at) = (at, at);
        let copied = copy_file_range(from, Some(&mut read_at), to, Some(&mut write_at), chunk);
        at += match copied {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(copied) => copied as u64,
            Err(Errno::XDEV | Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => {
                through_memory(from, to, at, chunk.min(BUFFER))?
            }
            Err(Errno::INTR) => 0,
            Err(errno) => return Err(errno.into()),
        };
    }
    Ok(())
}

fn through_memory(from: &File, to: &File, at: u64, len: usize) -> io::Result<u64> {
    let mut buffer = vec![0; len];
    from.read_exact_at(&mut buffer, at)?;
    // Without SEEK_DATA a file system reports everything as data.
    if buffer.iter().any(|byte| *byte != 0) {
        to.write_all_at(&buffer, at)?;
    }
    Ok(len as u64)
}

/// Bytes between two calls of `may_continue`.
const CHUNK: u64 = 128 << 20;
/// Bytes in memory at a time.
const BUFFER: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn source(dir: &std::path::Path) -> File {
        let path = dir.join("from");
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)
            .unwrap();
        file.write_all_at(b"head", 0).unwrap();
        file.write_all_at(&vec![7; 3 << 20], 20 * MIB + 4096)
            .unwrap();
        file.set_len(64 * MIB).unwrap();
        file
    }

    fn check(from: &File, to: &File) {
        let mut buffers = [vec![0; 1 << 20], vec![0; 1 << 20]];
        for at in (0..64).map(|n| n * MIB) {
            from.read_exact_at(&mut buffers[0], at).unwrap();
            to.read_exact_at(&mut buffers[1], at).unwrap();
            assert!(buffers[0] == buffers[1], "differs at {at}");
        }
    }

    #[test]
    fn a_sparse_copy_has_the_data_and_the_holes() {
        let dir = tempfile::tempdir().unwrap();
        let from = source(dir.path());
        let to = tempfile::tempfile_in(dir.path()).unwrap();
        assert!(sparse(&from, &to, 64 * MIB, || Ok(true)).unwrap());
        check(&from, &to);
        assert!(to.metadata().unwrap().blocks() * 512 < 8 * MIB);
        let stopped = tempfile::tempfile_in(dir.path()).unwrap();
        assert!(!sparse(&from, &stopped, 64 * MIB, || Ok(false)).unwrap());
    }

    #[test]
    fn another_file_system_is_reached_through_memory() {
        let dir = tempfile::tempdir().unwrap();
        let from = source(dir.path());
        let to = tempfile::tempfile_in("/dev/shm").unwrap();
        assert!(!reflink(&from, &to).unwrap());
        assert!(sparse(&from, &to, 64 * MIB, || Ok(true)).unwrap());
        for at in (0..64).map(|n| n * MIB) {
            through_memory(&from, &to, at, BUFFER).unwrap();
        }
        check(&from, &to);
    }
}
