//! Copies of image files: by reflink where the file system can, else of the data.
//!
//! A copy of the data leaves holes where the source has holes, and where it has whole blocks
//! of zeros. Several threads each take the next *piece* of data and copy it in steps of a
//! buffer, so that a disk or a server has several requests at once. The page cache, which the
//! pods of the node use, keeps what it has and gets nothing of the copy, so that a large one
//! neither evicts it nor leaves much to the final fsync:
//!
//! - what is in the cache is read from there, all else by direct I/O (`O_DIRECT`), which
//!   costs a fraction of the processor's time of a read through the cache;
//! - a thread starts to write a piece back as soon as it is copied, and a few pieces later
//!   waits for that, and drops it from the cache.

use std::{
    collections::VecDeque,
    fs::File,
    io,
    num::NonZero,
    ops::Range,
    os::{
        fd::AsRawFd as _,
        unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _},
    },
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
};

use rustix::{
    fs::{Advice, OFlags, SeekFrom, fadvise, ioctl_ficlone, seek},
    io::Errno,
};

use crate::kernel::{page_cache, writeback};

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

/// The bytes of a file that [`sparse`] copies at most: those of its data, without the blocks
/// that are allocated and not written.
pub fn data_bytes(file: &File) -> io::Result<u64> {
    let found = file.metadata()?;
    let (mut at, mut bytes) = (0, 0);
    while at < found.len() {
        match seek(file, SeekFrom::Data(at)) {
            Ok(data) => {
                at = seek(file, SeekFrom::Hole(data))?;
                bytes += at - data;
            }
            Err(Errno::NXIO) => break,
            Err(errno) => return Err(errno.into()),
        }
    }
    // A file system without holes takes all for data; st_blocks counts 512 bytes each.
    Ok(bytes.min(found.blocks() * 512))
}

/// Copies `len` bytes, but for holes and zeros. `to` is an empty file. The copy shows a
/// single point in time only if nothing writes to `from` meanwhile.
///
/// Reports to `advanced` how many more bytes of the image are done, holes included. Gives
/// up, and returns false, once `may_continue` returns false; the calling thread alone calls
/// that, before each of its pieces.
pub fn sparse(
    from: &File,
    to: &File,
    len: u64,
    advanced: &(dyn Fn(u64) + Sync),
    may_continue: impl Fn() -> io::Result<bool>,
) -> io::Result<bool> {
    to.set_len(len)?;
    let copy = SparseCopy {
        from,
        direct: open_directly(from),
        to,
        cursor: Mutex::new(Cursor {
            at: 0,
            hole: 0,
            end: len,
        }),
        stopped: AtomicBool::new(false),
        advanced,
    };
    let pieces = usize::try_from(len.div_ceil(PIECE)).unwrap_or(usize::MAX);
    let others = pieces.min(THREADS).saturating_sub(1);
    thread::scope(|scope| {
        let others: Vec<_> = (0..others)
            // Without a further thread the copy is slower.
            .map_while(|_| {
                let thread = thread::Builder::new().name("copy".to_owned());
                thread.spawn_scoped(scope, || copy.pieces(|| Ok(true))).ok()
            })
            .collect();
        let mut done = copy.pieces(may_continue);
        for other in others {
            let other = other.join();
            let other = other.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            done = done.and_then(|done| Ok(other? && done));
        }
        done
    })
}

/// A copy under way, as its threads share it.
struct SparseCopy<'c> {
    from: &'c File,
    /// The source for direct I/O, where its file system has that.
    direct: Option<File>,
    to: &'c File,
    cursor: Mutex<Cursor>,
    /// A thread has failed or given up.
    stopped: AtomicBool,
    advanced: &'c (dyn Fn(u64) + Sync),
}

/// Where the next piece begins.
struct Cursor {
    at: u64,
    /// The end of the data at `at`.
    hole: u64,
    end: u64,
}

impl SparseCopy<'_> {
    /// Copies pieces until none is left.
    fn pieces(&self, may_continue: impl Fn() -> io::Result<bool>) -> io::Result<bool> {
        let done = self.pieces_until_stopped(may_continue);
        if !matches!(done, Ok(true)) {
            self.stopped.store(true, Relaxed);
        }
        done
    }

    fn pieces_until_stopped(
        &self,
        may_continue: impl Fn() -> io::Result<bool>,
    ) -> io::Result<bool> {
        let mut buffer = vec![0; STEP + BLOCK];
        let aligned = buffer.as_ptr().align_offset(BLOCK);
        let buffer = &mut buffer[aligned..aligned + STEP];
        let mut written = VecDeque::new();
        while let Some(piece) = self.next_piece()? {
            // The thread that failed says why.
            if self.stopped.load(Relaxed) {
                return Ok(true);
            }
            if !may_continue()? {
                return Ok(false);
            }
            if self.copy(&piece, buffer)? {
                writeback::start(self.to, &piece)?;
                written.push_back(piece);
            }
            if written.len() >= IN_WRITEBACK {
                self.finish(written.pop_front())?;
            }
        }
        while let Some(piece) = written.pop_front() {
            self.finish(Some(piece))?;
        }
        Ok(true)
    }

    /// The next data to copy, at most [`PIECE`] bytes.
    fn next_piece(&self) -> io::Result<Option<Range<u64>>> {
        let mut cursor = self.cursor();
        let begin = cursor.at;
        if cursor.at >= cursor.hole && cursor.at < cursor.end {
            let data = match seek(self.from, SeekFrom::Data(cursor.at)) {
                Ok(data) => data.min(cursor.end),
                Err(Errno::NXIO) => cursor.end,
                Err(errno) => return Err(errno.into()),
            };
            cursor.at = data;
            if data < cursor.end {
                // Every file ends in a hole (lseek(2)).
                cursor.hole = seek(self.from, SeekFrom::Hole(data))?.min(cursor.end);
            }
        }
        (self.advanced)(cursor.at - begin);
        if cursor.at >= cursor.end {
            return Ok(None);
        }
        let piece = cursor.at..next_multiple(cursor.at, PIECE).min(cursor.hole);
        cursor.at = piece.end;
        Ok(Some(piece))
    }

    /// Copies a piece; returns whether it has anything but zeros.
    fn copy(&self, piece: &Range<u64>, buffer: &mut [u8]) -> io::Result<bool> {
        let mut has_data = false;
        for step in parts(piece, STEP as u64) {
            self.read(&step, buffer)?;
            let data = &buffer[..length(&step)];
            has_data |= self.write(data, step.start)?;
            (self.advanced)(data.len() as u64);
        }
        Ok(has_data)
    }

    /// Reads a step to the start of the buffer.
    fn read(&self, step: &Range<u64>, buffer: &mut [u8]) -> io::Result<()> {
        if page_cache::has(self.from, step) {
            return self
                .from
                .read_exact_at(&mut buffer[..length(step)], step.start);
        }
        // Only whole blocks are read directly; the end of a file ends the last one.
        let whole = length(step).next_multiple_of(BLOCK);
        let direct = self.direct.as_ref();
        let direct =
            direct.and_then(|direct| direct.read_at(&mut buffer[..whole], step.start).ok());
        let data = &mut buffer[..length(step)];
        if direct.is_some_and(|read| read >= data.len()) {
            return Ok(());
        }
        self.from.read_exact_at(data, step.start)?;
        advise(self.from, step, Advice::DontNeed);
        Ok(())
    }

    /// Writes what is not zero; returns whether anything is.
    fn write(&self, data: &[u8], at: u64) -> io::Result<bool> {
        let all = at..at + data.len() as u64;
        let part = |range: &Range<u64>| {
            let begin = length(&(at..range.start));
            &data[begin..begin + length(range)]
        };
        let mut run = at..at;
        let mut has_data = false;
        for block in parts(&all, BLOCK as u64) {
            if is_zero(part(&block)) {
                has_data |= !run.is_empty();
                self.to.write_all_at(part(&run), run.start)?;
                run = block.end..block.end;
            } else {
                run.end = block.end;
            }
        }
        has_data |= !run.is_empty();
        self.to.write_all_at(part(&run), run.start)?;
        Ok(has_data)
    }

    /// Waits for the writeback of a piece, and drops it from the page cache.
    fn finish(&self, piece: Option<Range<u64>>) -> io::Result<()> {
        let Some(piece) = piece else { return Ok(()) };
        writeback::finish(self.to, &piece)?;
        advise(self.to, &piece, Advice::DontNeed);
        Ok(())
    }

    /// No code of other modules that panics runs under this lock.
    fn cursor(&self) -> MutexGuard<'_, Cursor> {
        self.cursor.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens a file once more, for direct I/O.
fn open_directly(file: &File) -> Option<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = i32::try_from(OFlags::DIRECT.bits()).ok()?;
    File::options()
        .read(true)
        .custom_flags(flags)
        .open(path)
        .ok()
}

/// The kernel may ignore advice.
fn advise(file: &File, range: &Range<u64>, advice: Advice) {
    let _ = fadvise(
        file,
        range.start,
        NonZero::new(range.end - range.start),
        advice,
    );
}

/// A range cut at the multiples of `size`.
fn parts(range: &Range<u64>, size: u64) -> impl Iterator<Item = Range<u64>> + use<> {
    let Range { mut start, end } = *range;
    std::iter::from_fn(move || {
        let part = start..next_multiple(start, size).min(end);
        start = part.end;
        (!part.is_empty()).then_some(part)
    })
}

/// The least multiple of `size` that is more than `at`.
fn next_multiple(at: u64, size: u64) -> u64 {
    (at / size + 1).saturating_mul(size)
}

/// Of a part of a buffer.
fn length(range: &Range<u64>) -> usize {
    usize::try_from(range.end - range.start).unwrap_or(usize::MAX)
}

fn is_zero(block: &[u8]) -> bool {
    static ZEROS: [u8; BLOCK] = [0; BLOCK];
    // A comparison of memory, which is several times faster than a loop over bytes.
    ZEROS[..block.len()] == *block
}

/// The threads of a copy, each of which reads or writes.
const THREADS: usize = 4;
/// The data that a thread takes at a time.
const PIECE: u64 = 4 << 20;
/// The pieces of a thread that are written back while it continues.
const IN_WRITEBACK: usize = 4;
/// The memory of a thread, and the size of its requests.
const STEP: usize = 1 << 20;
/// What may become a hole: the block size of most file systems, and what any disk reads
/// directly.
const BLOCK: usize = 4096;

#[cfg(test)]
mod tests;
