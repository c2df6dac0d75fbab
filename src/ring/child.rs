//! Child processes: mkfs, fsck, and nothing that a system call can do.
//!
//! Each child has a keeper, a task on the runtime thread, which reads what the
//! child writes so that it never blocks on a full pipe, waits on its pidfd, and
//! reaps it. The keeper goes on when nobody waits any more, so a child whose
//! waiter gave up leaves no zombie. It ends with the child, not with the pipe: a
//! grandchild that inherited the pipe may hold it open for ever.
//!
//! How a child begins, and that it dies with the thread that began it, is
//! [`exec::background`]'s. That thread is the child's own, and ends with the child or
//! with its keeper.

use std::{
    convert::Infallible,
    ffi::{OsStr, OsString},
    future::pending,
    io,
    os::fd::{AsFd, AsRawFd as _, OwnedFd},
    rc::Rc,
    sync::mpsc,
    thread,
    time::Duration,
};

use rustix::{
    event::PollFlags,
    fs::{Mode, OFlags, open},
    io::Errno,
    pipe::{PipeFlags, pipe_with},
    process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, waitid},
    thread::gettid,
};
use tokio::sync::oneshot;

use super::poll;
use crate::{crash_point, kernel::exec};

/// How much of the output is kept, bytes; the end, for there is the error.
const KEPT: usize = 4096;

/// Bytes of one read.
const CHUNK: usize = 4096;

/// What a pipe holds unless told otherwise (pipe(7)), bytes.
const PIPE: usize = 65_536;

/// How long to wait where the kernel had no memory or no descriptor to wait with.
const RETRY: Duration = Duration::from_secs(1);

/// A running child. Dropping it lets it run on; it is reaped all the same.
#[derive(Debug)]
#[must_use]
pub struct Child {
    pid: Pid,
    exit: oneshot::Receiver<io::Result<Exit>>,
}

/// How a child ended: by `code` or by `signal`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exit {
    /// What it gave to exit(3).
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// The last 4 KiB of what it wrote to either output, in the order written.
    pub output: String,
}

impl Exit {
    /// It exited with 0.
    pub fn success(&self) -> bool {
        self.code == Some(0)
    }

    /// How it ended, in words.
    pub fn describe(&self) -> String {
        match (self.code, self.signal) {
            (Some(code), _) => format!("exit code {code}"),
            (None, Some(signal)) => format!("killed by signal {signal}"),
            (None, None) => "ended".to_owned(),
        }
    }
}

impl Child {
    /// Starts `program`, looked up in the system's usual directories.
    ///
    /// The error is that of the exec, such as ENOENT.
    pub async fn spawn<A: AsRef<OsStr>>(program: &str, args: &[A]) -> io::Result<Self> {
        let args = args.iter().map(|arg| arg.as_ref().to_owned()).collect();
        let (Launched { pid, source }, parent) = launch(program.to_owned(), args).await?;
        crash_point();
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        // Not reaped yet, so the id is still this child's.
        let (source, pidfd) = open(&source, flags, Mode::empty())
            .and_then(|source| Ok((source, pidfd_open(pid, PidfdFlags::empty())?)))
            .inspect_err(|_| give_up(pid))?;
        let (give, exit) = oneshot::channel();
        tokio::task::spawn_local(async move {
            // Nobody waits any more where this fails.
            let _ = give.send(keep(Rc::new(pidfd), Rc::new(source)).await);
            drop(parent);
        });
        Ok(Self { pid, exit })
    }

    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Waits for its end.
    pub async fn wait(self) -> io::Result<Exit> {
        self.exit.await.unwrap_or_else(|_| {
            Err(io::Error::other(
                "the runtime ended before the child process did",
            ))
        })
    }
}

/// A child that has begun.
struct Launched {
    pid: Pid,
    /// The reading end of the pipe that it writes to, in procfs: the descriptor is in
    /// the table of the thread that began it.
    source: String,
}

/// Keeps the thread that a child was begun by, and which it dies with.
type Parent = oneshot::Sender<Infallible>;

/// Forks and execs on a thread of the child's own: to exec is to read the program
/// from a disk, which may not answer. The thread lasts until its [`Parent`] is
/// dropped. The pipe's writing end stays with the child alone.
async fn launch(program: String, args: Vec<OsString>) -> io::Result<(Launched, Parent)> {
    let (parent, child_ended) = oneshot::channel::<Infallible>();
    let (begun, launched) = mpsc::channel();
    on_thread(move || {
        let (launched, _source) = match fork(&program, &args) {
            Ok((pid, source)) => (Ok(Launched::new(pid, &source)), Some(source)),
            Err(error) => (Err(error), None),
        };
        if begun.send(launched).is_ok() {
            let _ = child_ended.blocking_recv();
        }
    })?;
    // The runtime is woken through a descriptor, of which that thread knows nothing.
    let (passed, launched_here) = oneshot::channel();
    on_thread(move || drop(passed.send(launched.recv())))?;
    let launched = launched_here.await.map_err(io::Error::other)?;
    Ok((launched.map_err(io::Error::other)??, parent))
}

fn on_thread(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = thread::Builder::new().name("child".to_owned());
    thread.stack_size(exec::STACK).spawn(work).map(drop)
}

/// The child, and the reading end of its pipe, in the thread's own table.
fn fork(program: &str, args: &[OsString]) -> io::Result<(Pid, OwnedFd)> {
    exec::own_descriptors()?;
    let (source, sink) = pipe_with(PipeFlags::CLOEXEC)?;
    let mut command = exec::background(program, args);
    command.stdout(sink.try_clone()?).stderr(sink);
    // std's handle is dropped: it neither kills nor reaps.
    let id = command.spawn()?.id();
    let pid = i32::try_from(id).ok().and_then(Pid::from_raw);
    Ok((pid.expect("the kernel's process ids are positive"), source))
}

impl Launched {
    /// Of this thread.
    fn new(pid: Pid, source: &OwnedFd) -> Self {
        let (thread, number) = (gettid().as_raw_nonzero(), source.as_raw_fd());
        Self {
            pid,
            source: format!("/proc/self/task/{thread}/fd/{number}"),
        }
    }
}

/// Kills and reaps a child that cannot be kept, as when no descriptor is left.
fn give_up(pid: Pid) {
    // It is ours and not reaped, so it is there to be killed.
    let _ = rustix::process::kill_process(pid, Signal::KILL);
    tokio::task::spawn_local(async move {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        while let Ok(None) = waitid(WaitId::Pid(pid), options) {
            tokio::time::sleep(RETRY).await;
        }
    });
}

/// Reads and waits until the child has ended, and reaps it.
async fn keep(pidfd: Rc<OwnedFd>, source: Rc<OwnedFd>) -> io::Result<Exit> {
    let mut tail = Tail::default();
    tokio::select! {
        () = ended(&pidfd) => {}
        never = read_all(&source, &mut tail) => match never {},
    }
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    let status = waitid(WaitId::PidFd(pidfd.as_fd()), options)?
        .ok_or_else(|| io::Error::other("the pidfd is readable and its process has not ended"))?;
    // What the child itself wrote is in the pipe by now. A grandchild may go on
    // writing, so this takes what a pipe holds, and no more.
    for _ in 0..PIPE / CHUNK {
        if !matches!(tail.take_from(&source), Ok(1..)) {
            break;
        }
    }
    Ok(Exit {
        code: status.exit_status(),
        signal: status.terminating_signal(),
        output: tail.into_text(),
    })
}

/// Waits for the end of the process. It does not fail, for the child is to be
/// reaped: where the kernel has no memory for a poll, it is asked again.
async fn ended(pidfd: &Rc<OwnedFd>) {
    while let Err(error) = poll::readable(Rc::clone(pidfd)).await {
        tracing::warn!(%error, "a child process cannot be polled; trying again");
        tokio::time::sleep(RETRY).await;
    }
}

/// Reads until the pipe's end, and then waits to be dropped.
async fn read_all(source: &Rc<OwnedFd>, tail: &mut Tail) -> Infallible {
    let read = async {
        let mut ready = poll::watch(Rc::clone(source), PollFlags::IN)?;
        loop {
            match tail.take_from(source) {
                Ok(0) => return Ok(()),
                // A child that writes without end leaves turns to others.
                Ok(_) => tokio::task::yield_now().await,
                Err(Errno::AGAIN) => drop(ready.next().await?),
                Err(error) => return Err(io::Error::from(error)),
            }
        }
    };
    if let Err(error) = read.await {
        tracing::warn!(%error, "a child process's output is lost");
    }
    pending().await
}

/// The end of what a child wrote.
#[derive(Default)]
struct Tail(Vec<u8>);

impl Tail {
    /// One read of at most [`CHUNK`]; how many bytes, 0 being the pipe's end.
    fn take_from(&mut self, source: &OwnedFd) -> Result<usize, Errno> {
        let mut chunk = [0; CHUNK];
        let count = rustix::io::retry_on_intr(|| rustix::io::read(source, &mut chunk))?;
        self.0.extend_from_slice(&chunk[..count]);
        self.0.drain(..self.0.len().saturating_sub(KEPT));
        Ok(count)
    }

    fn into_text(self) -> String {
        String::from_utf8_lossy(&self.0).into_owned()
    }
}

#[cfg(test)]
mod tests;
