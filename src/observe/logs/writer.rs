//! Writes log lines to stderr without waiting for it.
//!
//! stderr is a pipe to the container runtime. While it is not read, a write to a full
//! pipe blocks the writing thread. So the caller writes its line where the pipe takes it at
//! once (`RWF_NOWAIT`, pwritev2(2); pipes since Linux 6.4). Else the line goes into a buffer
//! in memory, which a thread of its own writes out. A line that does not fit is dropped and
//! counted; once the pipe takes lines again, one line in their place says how many are
//! missing.

use std::{
    cell::Cell,
    io::{self, IoSlice, Write},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    fd::{AsFd, BorrowedFd, OwnedFd},
    io::{Errno, ReadWriteFlags, pwritev2},
};
use tracing_subscriber::fmt::MakeWriter;

use crate::observe::metrics;

/// Bytes of the buffer: some 4,000 lines.
const LIMIT: usize = 1 << 20;

/// Bytes of capacity that an empty buffer keeps.
const KEPT_CAPACITY: usize = 64 << 10;

/// Bytes of the writing thread's stack; the supervisor locks its memory.
const STACK: usize = 256 << 10;

thread_local! {
    /// Whether this is a writer thread. Its own lines, the counts of dropped ones, are never
    /// dropped.
    static IS_WRITER: Cell<bool> = const { Cell::new(false) };
}

/// Takes log lines without blocking. Clones share the buffer.
#[derive(Clone, Debug)]
pub struct LineWriter {
    buffer: Arc<LogBuffer>,
}

#[derive(Debug)]
struct LogBuffer {
    sink: OwnedFd,
    limit: usize,
    queue: Mutex<PendingLines>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct PendingLines {
    /// Whole lines.
    lines: Vec<u8>,
    /// Lines dropped since `lines` was last taken.
    dropped: u64,
    /// Whether the thread is writing a batch.
    writing: bool,
    /// Whether the thread waits for lines: then all before are written.
    is_idle: bool,
    /// Whether a write to the sink may wait in any case: a terminal, an older kernel's pipe.
    cannot_nowait: bool,
    /// How many threads wait until all are written: a wake-up is a system call, also where
    /// nobody waits.
    flushing: usize,
}

impl LineWriter {
    /// Starts the thread that writes to `sink`.
    pub fn start(sink: OwnedFd) -> io::Result<Self> {
        Self::with_limit(sink, LIMIT)
    }

    pub(super) fn with_limit(sink: OwnedFd, limit: usize) -> io::Result<Self> {
        let buffer = Arc::new(LogBuffer {
            sink,
            limit,
            queue: Mutex::default(),
            changed: Condvar::new(),
        });
        let written = Arc::clone(&buffer);
        thread::Builder::new()
            .name("log-writer".to_owned())
            .stack_size(STACK)
            .spawn(move || written.write_out())?;
        Ok(Self { buffer })
    }

    /// Waits until everything is written, at most `timeout`: stderr may never be read.
    pub fn flush(&self, timeout: Duration) {
        let busy = |queue: &mut PendingLines| queue.writing || !queue.lines.is_empty();
        let mut queue = self.buffer.lock();
        queue.flushing += 1;
        let waited = self.buffer.changed.wait_timeout_while(queue, timeout, busy);
        let (mut queue, _) = waited.unwrap_or_else(PoisonError::into_inner);
        queue.flushing -= 1;
    }
}

impl LogBuffer {
    /// Only bytes are copied under this lock, so the queue is sound even after a panic.
    fn lock(&self) -> MutexGuard<'_, PendingLines> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The body of the writer thread.
    fn write_out(&self) {
        IS_WRITER.set(true);
        let mut batch = Vec::new();
        loop {
            let nothing = |queue: &mut PendingLines| {
                queue.is_idle = queue.lines.is_empty();
                queue.is_idle
            };
            let queue = self.changed.wait_while(self.lock(), nothing);
            let mut queue = queue.unwrap_or_else(PoisonError::into_inner);
            std::mem::swap(&mut batch, &mut queue.lines);
            let dropped = std::mem::take(&mut queue.dropped);
            queue.writing = true;
            drop(queue);
            if dropped > 0 {
                // After this batch and before later lines: in place of the dropped ones.
                tracing::error!("{dropped} log lines dropped: stderr was not read");
            }
            metrics::log_lines_dropped(write_all(self.sink.as_fd(), &batch));
            batch.clear();
            batch.shrink_to(KEPT_CAPACITY);
            let mut queue = self.lock();
            queue.writing = false;
            let is_awaited = queue.flushing > 0;
            drop(queue);
            if is_awaited {
                self.changed.notify_all();
            }
        }
    }
}

/// Writes as much as the sink takes at once.
fn write_at_once(sink: BorrowedFd<'_>, line: &[u8]) -> Result<usize, Errno> {
    // At the file's own position (pwritev2(2)).
    const CURRENT: u64 = u64::MAX;
    pwritev2(sink, &[IoSlice::new(line)], CURRENT, ReadWriteFlags::NOWAIT)
}

/// Returns how many lines were lost, as when the pipe has no reader.
fn write_all(sink: BorrowedFd<'_>, mut bytes: &[u8]) -> u64 {
    while !bytes.is_empty() {
        match rustix::io::write(sink, bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::INTR) => {}
            // Another process made it non-blocking.
            Err(Errno::AGAIN) => {
                let mut ready = [PollFd::new(&sink, PollFlags::OUT)];
                if poll(&mut ready, None).is_err_and(|error| error != Errno::INTR) {
                    break;
                }
            }
            Err(_) => break,
        }
    }
    bytes.iter().map(|byte| u64::from(*byte == b'\n')).sum()
}

impl<'a> MakeWriter<'a> for LineWriter {
    type Writer = &'a Self;

    fn make_writer(&'a self) -> &'a Self {
        self
    }
}

/// The formatter passes whole lines.
impl Write for &LineWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut queue = self.buffer.lock();
        // Under the lock, so that no other line comes between its parts.
        let mut rest = line;
        if queue.is_idle && !queue.cannot_nowait {
            match write_at_once(self.buffer.sink.as_fd(), line) {
                Ok(written) => rest = &line[written..],
                Err(errno) => queue.cannot_nowait = errno == Errno::OPNOTSUPP,
            }
        }
        if rest.is_empty() {
            return Ok(line.len());
        }
        // What the sink has a part of is written to its end.
        let is_begun = rest.len() < line.len();
        let fits = is_begun || queue.lines.len() + rest.len() <= self.buffer.limit;
        if !fits && !IS_WRITER.get() {
            queue.dropped += 1;
            drop(queue);
            metrics::log_lines_dropped(1);
            return Ok(line.len());
        }
        queue.lines.extend_from_slice(rest);
        let is_awaited = std::mem::take(&mut queue.is_idle);
        drop(queue);
        if is_awaited {
            self.buffer.changed.notify_all();
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io::Read as _, time::Instant};

    use rustix::pipe::pipe;

    use super::*;

    /// A writer, and the reading end of the pipe that it writes to.
    fn piped(limit: usize) -> (LineWriter, File) {
        let (source, sink) = pipe().unwrap();
        (
            LineWriter::with_limit(sink, limit).unwrap(),
            File::from(source),
        )
    }

    #[test]
    fn a_flush_writes_all_lines_logged_before_it() {
        let (writer, mut source) = piped(LIMIT);
        for line in ["one\n", "two\n"] {
            (&writer).write_all(line.as_bytes()).unwrap();
        }
        writer.flush(Duration::MAX);
        let mut read = [0; 8];
        source.read_exact(&mut read).unwrap();
        assert_eq!(&read, b"one\ntwo\n");
    }

    #[test]
    fn unread_lines_are_dropped_and_counted() {
        let (writer, mut source) = piped(1000);
        let lines = writer.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || &*Box::leak(Box::new(lines.clone())))
            .finish();
        // The writing thread logs, too.
        tracing::subscriber::set_global_default(subscriber).unwrap();
        let line = [b"x".repeat(99), b"\n".to_vec()].concat();
        // More than the pipe and the buffer hold.
        let logged = 2000;
        for _ in 0..logged {
            (&writer).write_all(&line).unwrap();
        }
        let begun = Instant::now();
        writer.flush(Duration::from_millis(1));
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "flush is bounded"
        );

        let reader = thread::spawn(move || {
            let mut text = String::new();
            let mut chunk = [0; 4096];
            let said = |text: &str| {
                let omitted = text.lines().filter_map(|line| {
                    let (before, _) = line.split_once(" log lines dropped")?;
                    before.rsplit(' ').next()?.parse::<usize>().ok()
                });
                omitted.sum::<usize>() + text.lines().filter(|line| line.starts_with('x')).count()
            };
            // Each line is either there or counted as dropped.
            while said(&text) < logged {
                let count = source.read(&mut chunk).unwrap();
                text.push_str(std::str::from_utf8(&chunk[..count]).unwrap());
            }
            said(&text)
        });
        assert_eq!(reader.join().unwrap(), logged);
    }

    #[test]
    fn lines_keep_their_order() {
        let (writer, mut source) = piped(64 << 20);
        let line = |thread: usize, n: usize| {
            // Some are longer than the pipe.
            let bytes = if n % 16 == 5 { 100_000 } else { n };
            format!("{thread} {n} {}\n", "x".repeat(bytes))
        };
        let (threads, lines) = (4, 64);
        let all = (0..threads).flat_map(|thread| (0..lines).map(move |n| line(thread, n)));
        let mut read = vec![0; all.map(|line| line.len()).sum()];
        let read = thread::spawn(move || {
            source.read_exact(&mut read).unwrap();
            String::from_utf8(read).unwrap()
        });
        thread::scope(|scope| {
            for thread in 0..threads {
                let mut writer = &writer;
                scope.spawn(move || {
                    for n in 0..lines {
                        writer.write_all(line(thread, n).as_bytes()).unwrap();
                    }
                });
            }
        });
        let read = read.join().unwrap();
        for thread in 0..threads {
            let of_thread = read.split_inclusive('\n');
            let of_thread = of_thread.filter(|it| it.starts_with(&format!("{thread} ")));
            let expected: Vec<_> = (0..lines).map(|n| line(thread, n)).collect();
            assert_eq!(of_thread.collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn a_broken_pipe_blocks_nothing() {
        let (writer, source) = piped(LIMIT);
        drop(source);
        (&writer).write_all(b"lost\n").unwrap();
        writer.flush(Duration::MAX);
    }
}
