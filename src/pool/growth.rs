//! Growth of images that others may grow at the same time: never makes a file smaller.
//!
//! ftruncate(2) sets a size, whatever the file's size has become since the caller looked. A
//! call that stalls before it, as on NFS, would cut off what another controller or node has
//! added meanwhile, and the file system in it. fallocate(2) with mode 0 compares and extends
//! in one step, in the kernel or at the server of NFS 4.2. It allocates the last block, which
//! then counts as taken and no longer as promised. A write of one byte at the end would also
//! extend the file, but could overwrite what is there by then; a hole punched afterwards, too.

use std::{fs::File, io};

use rustix::{
    fs::{FallocateFlags, fallocate},
    io::Errno,
};

/// Makes a file `bytes` large, unless it is that large already.
pub fn grow(file: &File, bytes: u64) -> io::Result<()> {
    if file.metadata()?.len() >= bytes {
        return Ok(());
    }
    match fallocate(file, FallocateFlags::empty(), bytes - 1, 1) {
        Ok(()) => Ok(()),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => set_larger(file, bytes),
        Err(errno) => Err(errno.into()),
    }
}

/// The same where the file system has no fallocate(2), as NFS before 4.2: another growth
/// between the look and the change is lost.
fn set_larger(file: &File, bytes: u64) -> io::Result<()> {
    if file.metadata()?.len() < bytes {
        file.set_len(bytes)?;
    }
    Ok(())
}

/// Allocates the blocks of a file up to `bytes`, without changing its size. What a failed
/// call has allocated beyond the end is freed.
pub fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    let before = file.metadata()?.len();
    let Err(errno) = fallocate(file, FallocateFlags::KEEP_SIZE, 0, bytes) else {
        return Ok(());
    };
    // Another call may have grown it: then the blocks are that one's.
    if file.metadata()?.len() == before {
        file.set_len(before)?;
    }
    Err(errno.into())
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::MetadataExt as _,
        sync::atomic::{AtomicBool, Ordering::Relaxed},
        thread,
    };

    use super::*;

    #[test]
    fn concurrent_growth_never_makes_a_file_smaller() {
        for dir in ["/dev/shm", "/var/tmp"] {
            let file = tempfile::tempfile_in(dir).unwrap();
            let (largest, done) = (1000 << 20, AtomicBool::new(false));
            let size = || file.metadata().unwrap().len();
            thread::scope(|scope| {
                let watcher = scope.spawn(|| {
                    let mut last = 0;
                    while !done.load(Relaxed) {
                        let now = size();
                        assert!(now >= last, "{last} became {now}");
                        last = now;
                    }
                });
                let growers: Vec<_> = (1..=4_u64)
                    .map(|seed| {
                        let file = &file;
                        scope.spawn(move || {
                            for round in 1..=2000 {
                                // Mostly more than before, in no order.
                                let random = (seed * 7919 + round * 104_729) % 1000;
                                let bytes = (round * 500_000 + random * 4096).min(largest);
                                grow(file, bytes).unwrap();
                                assert!(file.metadata().unwrap().len() >= bytes);
                            }
                        })
                    })
                    .collect();
                // All of them end before the watcher does, also if one fails.
                let ended: Vec<_> = growers
                    .into_iter()
                    .map(thread::ScopedJoinHandle::join)
                    .collect();
                done.store(true, Relaxed);
                watcher.join().unwrap();
                assert!(ended.iter().all(Result::is_ok));
            });
        }
    }

    #[test]
    fn a_growth_takes_one_block_and_keeps_the_data() {
        use std::os::unix::fs::FileExt as _;
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.write_all_at(b"data", 4092).unwrap();
        for bytes in [4097, 8192, 1 << 30, 5] {
            grow(&file, bytes).unwrap();
        }
        let found = file.metadata().unwrap();
        assert_eq!(found.len(), 1 << 30);
        assert!(found.blocks() * 512 <= 4 << 12, "{}", found.blocks());
        let mut data = [0; 4];
        file.read_exact_at(&mut data, 4092).unwrap();
        assert_eq!(&data, b"data");
    }

    #[test]
    fn a_failed_allocation_leaves_no_blocks() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(1 << 20).unwrap();
        allocate(&file, 1 << 50).unwrap_err();
        let found = file.metadata().unwrap();
        assert_eq!((found.len(), found.blocks()), (1 << 20, 0));
    }
}
