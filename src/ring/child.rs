//! Child processes: mkfs, fsck, and other programs without a system call to replace them.
//!
//! Each child has a reaper, a task on the runtime thread, which reads the child's
//! output so that it never blocks on a full pipe, waits on its pidfd, and reaps it.
//! The reaper continues when its waiter is dropped, so the child leaves no zombie. It
//! ends with the child, not with the pipe, which a grandchild may hold open for ever.
//!
//! [`exec::background`] starts the child, which is killed when the thread that calls it
//! ends. That thread serves this child only, and ends with the child or with its reaper.

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

/// Bytes of the output that are kept: its end, which has the errors.
const OUTPUT_KEPT: usize = 4096;

/// Bytes of one read.
const CHUNK: usize = 4096;

/// The default capacity of a pipe (pipe(7)), bytes.
const PIPE: usize = 65_536;

/// The time between attempts while the kernel has no memory or descriptor left.
const RETRY: Duration = Duration::from_secs(1);

/// A running child. When this is dropped, the child keeps running, and is reaped at its
/// end.
#[derive(Debug)]
#[must_use]
pub struct Child {
    pid: Pid,
    exit: oneshot::Receiver<io::Result<Exit>>,
}

/// The exit status and output of a child.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exit {
    /// Its exit code.
    pub code: Option<i32>,
    /// The signal that killed it.
    pub signal: Option<i32>,
    /// The last 4 KiB of its stdout and stderr, in the order written.
    pub output: String,
}

impl Exit {
    /// Whether it exited with 0.
    pub fn success(&self) -> bool {
        self.code == Some(0)
    }

    /// The exit code or signal, for messages.
    pub fn describe(&self) -> String {
        match (self.code, self.signal) {
            (Some(code), _) => format!("exit code {code}"),
            (None, Some(signal)) => format!("killed by signal {signal}"),
            (None, None) => "ended".to_owned(),
        }
    }
}

impl Child {
    /// Starts `program`, looked up in the system's usual directories. The error is that of
    /// the exec, such as ENOENT.
    pub async fn spawn<A: AsRef<OsStr>>(program: &str, args: &[A]) -> io::Result<Self> {
        let args = args.iter().map(|arg| arg.as_ref().to_owned()).collect();
        let (Launched { pid, source }, parent) = launch(program.to_owned(), args).await?;
        crash_point();
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        // The child is not reaped yet, so the pid is still its own.
        let (source, pidfd) = open(&source, flags, Mode::empty())
            .and_then(|source| Ok((source, pidfd_open(pid, PidfdFlags::empty())?)))
            .inspect_err(|_| kill_and_reap(pid))?;
        let (give, exit) = oneshot::channel();
        tokio::task::spawn_local(async move {
            // Fails if the waiter was dropped.
            let _ = give.send(wait_and_reap(Rc::new(pidfd), Rc::new(source)).await);
            drop(parent);
        });
        Ok(Self { pid, exit })
    }

    /// Its process id, valid until it is reaped.
    pub fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Waits for it to end.
    pub async fn wait(self) -> io::Result<Exit> {
        self.exit.await.unwrap_or_else(|_| {
            Err(io::Error::other(
                "the runtime ended before the child process did",
            ))
        })
    }
}

/// A child that was started.
struct Launched {
    pid: Pid,
    /// The reading end of its output pipe, in procfs: the descriptor is in the table of the
    /// thread that started it.
    source: String,
}

/// Keeps the thread alive that started a child: its parent for `PR_SET_PDEATHSIG`.
type Parent = oneshot::Sender<Infallible>;

/// Forks and execs on a thread of the child's own: exec reads the program from a disk,
/// which may hang. The thread lives until its [`Parent`] is dropped. Only the child keeps
/// the pipe's writing end.
async fn launch(program: String, args: Vec<OsString>) -> io::Result<(Launched, Parent)> {
    let (parent, child_ended) = oneshot::channel::<Infallible>();
    let (started, launched) = mpsc::channel();
    on_thread(move || {
        let (launched, _source) = match fork(&program, &args) {
            Ok((pid, source)) => (Ok(Launched::new(pid, &source)), Some(source)),
            Err(error) => (Err(error), None),
        };
        if started.send(launched).is_ok() {
            let _ = child_ended.blocking_recv();
        }
    })?;
    // Waking the runtime needs a descriptor that is not in that thread's table.
    let (passed, launched_here) = oneshot::channel();
    on_thread(move || drop(passed.send(launched.recv())))?;
    let launched = launched_here.await.map_err(io::Error::other)?;
    Ok((launched.map_err(io::Error::other)??, parent))
}

fn on_thread(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = thread::Builder::new().name("child".to_owned());
    thread.stack_size(exec::STACK).spawn(work).map(drop)
}

/// Starts the child. Returns its pid and the pipe's reading end, which is in this thread's
/// own descriptor table.
fn fork(program: &str, args: &[OsString]) -> io::Result<(Pid, OwnedFd)> {
    exec::own_descriptors()?;
    let (source, sink) = pipe_with(PipeFlags::CLOEXEC)?;
    let mut command = exec::background(program, args);
    command.stdout(sink.try_clone()?).stderr(sink);
    // Dropping std's handle neither kills nor reaps the child.
    let id = command.spawn()?.id();
    let pid = i32::try_from(id).ok().and_then(Pid::from_raw);
    Ok((pid.expect("the kernel's process ids are positive"), source))
}

impl Launched {
    /// Describes a child of the calling thread.
    fn new(pid: Pid, source: &OwnedFd) -> Self {
        let (thread, number) = (gettid().as_raw_nonzero(), source.as_raw_fd());
        Self {
            pid,
            source: format!("/proc/self/task/{thread}/fd/{number}"),
        }
    }
}

/// Kills and reaps a child without its pidfd, for when the process has no descriptor left.
fn kill_and_reap(pid: Pid) {
    // The child is not reaped yet, so the pid is still its own.
    let _ = rustix::process::kill_process(pid, Signal::KILL);
    tokio::task::spawn_local(async move {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        while let Ok(None) = waitid(WaitId::Pid(pid), options) {
            tokio::time::sleep(RETRY).await;
        }
    });
}

/// Reads the output until the child ends, and reaps it.
async fn wait_and_reap(pidfd: Rc<OwnedFd>, source: Rc<OwnedFd>) -> io::Result<Exit> {
    let mut tail = OutputTail::default();
    tokio::select! {
        () = exited(&pidfd) => {}
        never = read_all(&source, &mut tail) => match never {},
    }
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    let status = waitid(WaitId::PidFd(pidfd.as_fd()), options)?
        .ok_or_else(|| io::Error::other("the pidfd is readable, but its process has not ended"))?;
    // The pipe holds the rest of the child's output by now. A grandchild may keep
    // writing, so this reads at most the capacity of a pipe.
    for _ in 0..PIPE / CHUNK {
        if !matches!(tail.read_from(&source), Ok(1..)) {
            break;
        }
    }
    Ok(Exit {
        code: status.exit_status(),
        signal: status.terminating_signal(),
        output: tail.into_text(),
    })
}

/// Waits for the process to end. It never fails, as the child has to be reaped: while the
/// kernel has no memory for a poll, it retries.
async fn exited(pidfd: &Rc<OwnedFd>) {
    while let Err(error) = poll::readable(Rc::clone(pidfd)).await {
        tracing::warn!(%error, "cannot poll a child process; retrying");
        tokio::time::sleep(RETRY).await;
    }
}

/// Reads until the end of the pipe, and is never ready.
async fn read_all(source: &Rc<OwnedFd>, tail: &mut OutputTail) -> Infallible {
    let read = async {
        let mut ready = poll::watch(Rc::clone(source), PollFlags::IN)?;
        loop {
            match tail.read_from(source) {
                Ok(0) => return Ok(()),
                // A child that writes without end must not starve other tasks.
                Ok(_) => tokio::task::yield_now().await,
                Err(Errno::AGAIN) => drop(ready.next().await?),
                Err(error) => return Err(io::Error::from(error)),
            }
        }
    };
    if let Err(error) = read.await {
        tracing::warn!(%error, "cannot read the output of a child process");
    }
    pending().await
}

/// The end of a child's output.
#[derive(Default)]
struct OutputTail(Vec<u8>);

impl OutputTail {
    /// Reads at most [`CHUNK`] bytes. Returns how many; 0 at the end of the pipe.
    fn read_from(&mut self, source: &OwnedFd) -> Result<usize, Errno> {
        let mut chunk = [0; CHUNK];
        let count = rustix::io::retry_on_intr(|| rustix::io::read(source, &mut chunk))?;
        self.0.extend_from_slice(&chunk[..count]);
        self.0.drain(..self.0.len().saturating_sub(OUTPUT_KEPT));
        Ok(count)
    }

    fn into_text(self) -> String {
        String::from_utf8_lossy(&self.0).into_owned()
    }
}

#[cfg(test)]
mod tests;
