//! A process of rbd-nbd: its start, its log, and its end.
//!
//! The daemon stays in the foreground, so that it is one process from the start, and
//! outlives the supervisor. It reads the key from its standard input, a file in memory that
//! no other process can open; the supervisor empties the file after that. The supervisor
//! reads the daemon's output to the end: a full pipe would stop the daemon.

use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use rustix::{
    fs::{MemfdFlags, ftruncate, memfd_create},
    io::Errno,
    pipe::{PipeFlags, pipe_with},
    process::{Pid, Signal, WaitId, WaitIdOptions, WaitIdStatus, pidfd_send_signal, waitid},
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader, unix::AsyncFd},
    net::unix::pipe,
    sync::watch,
    time::{sleep, timeout},
};

use super::{Spec, SupervisorError, error::failed, processes::DaemonProcess, spec::Verb};
use crate::{
    kernel::{
        exec,
        pidfd::{is_exiting, is_running, watched},
    },
    lane::Lanes,
    secret::Secret,
};

mod log_parser;

use log_parser::{DaemonLog, explain};

/// The longest line that is taken as one.
const LINE: u64 = 4096;
/// The longest time to list the processes.
const FOUND_WITHIN: Duration = Duration::from_secs(5);
/// The longest time until a process that serves waits for its end, and the time between
/// two looks at it.
const WAITS_WITHIN: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// The longest time to read the output of a process that has ended.
const READ_WITHIN: Duration = Duration::from_secs(2);
/// The release from which on rbd-nbd sends the driver its device's cookie with a new size,
/// without which the driver refuses that.
const RESIZES_SINCE: u32 = 17;
/// The longest time until a process ends, after SIGTERM and again after SIGKILL.
const END_WITHIN: Duration = Duration::from_secs(10);

/// A running daemon. Dropping it lets it run on.
#[derive(Debug)]
pub struct Daemon {
    pid: Pid,
    pidfd: Arc<AsyncFd<OwnedFd>>,
    /// None if another supervisor started it, which had its output.
    log: Option<watch::Receiver<DaemonLog>>,
}

#[derive(Debug)]
pub enum StartOutcome {
    /// It serves a device.
    Ready,
    /// It has ended; the reason that it logged, if any.
    Ended(SupervisorError),
    /// Neither, within the time.
    Late,
}

/// How a daemon ended that was told to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndOutcome {
    /// By SIGTERM, and so after it had closed its image.
    Asked,
    Killed,
    /// It has not ended in time.
    RunsOn,
}

impl Daemon {
    /// Starts a process, from which `unseen` is hidden.
    pub fn start(
        program: &str,
        spec: &Spec,
        verb: &Verb<'_>,
        key: &Secret,
        unseen: Option<Pid>,
    ) -> Result<Self, SupervisorError> {
        let (stdin, key) = hand_over(key).map_err(failed("hand a key to", program))?;
        let (source, sink) = pipe_with(PipeFlags::CLOEXEC)
            .and_then(|(source, sink)| {
                rustix::fs::fcntl_setfl(&source, rustix::fs::OFlags::NONBLOCK)?;
                Ok((source, sink))
            })
            .map_err(|errno| failed("make a pipe for", program)(errno.into()))?;
        let spawned = sink.try_clone().and_then(|other| {
            exec::block_server(program, &spec.arguments(verb), unseen)
                .stdin(stdin)
                .stdout(sink)
                .stderr(other)
                .spawn()
        });
        let child = spawned.map_err(|source| SupervisorError::NoProgram {
            program: program.to_owned(),
            source,
        })?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let pid = pid.expect("the kernel's process ids are positive");
        // Not reaped yet, so the id is still this child's.
        let pidfd = watched(pid).map_err(failed("watch the process", pid))?;
        let source = pipe::Receiver::from_owned_fd(source);
        let source = source.map_err(failed("read the output of process", pid))?;
        let (write, log) = watch::channel(DaemonLog::default());
        tokio::spawn(listen(source, write, pid, key));
        Ok(Self {
            pid,
            pidfd: Arc::new(pidfd),
            log: Some(log),
        })
    }

    /// The process that serves that cookie, whichever program started it.
    pub async fn find(lanes: &Lanes, cookie: &str) -> io::Result<Option<(Self, DaemonProcess)>> {
        let all = lanes.run(cookie, "processes", DaemonProcess::all);
        for (raw, server) in timeout(FOUND_WITHIN, all).await?? {
            let Some(pid) = Pid::from_raw(raw).filter(|_| server.cookie == cookie) else {
                continue;
            };
            let pidfd = match watched(pid) {
                Ok(pidfd) => pidfd,
                Err(error) if has_exited(&error) => continue,
                Err(error) => return Err(error),
            };
            let daemon = Self {
                pid,
                pidfd: Arc::new(pidfd),
                log: None,
            };
            // The id may have passed to another process before the pidfd was open.
            let again = lanes.run(cookie, "process", move || DaemonProcess::of(raw));
            if timeout(FOUND_WITHIN, again).await?.as_ref() == Some(&server) {
                return Ok(Some((daemon, server)));
            }
        }
        Ok(None)
    }

    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Whether another supervisor started it, so that its log is not read.
    pub fn is_unheard(&self) -> bool {
        self.log.is_none()
    }

    /// Whether it has logged that it serves a device.
    pub fn serves(&self) -> bool {
        let log = self.log.as_ref();
        log.is_some_and(|log| log.borrow().serves)
    }

    /// Whether it gives its device the new size itself when its image is resized.
    pub fn resizes_its_device(&self) -> bool {
        let release = self.log.as_ref().and_then(|log| log.borrow().release);
        release.is_some_and(|release| release >= RESIZES_SINCE)
    }

    /// The client ids under which it has joined the cluster so far: some only to read
    /// its configuration, one to open the image.
    pub fn clients(&self) -> Vec<i64> {
        let log = self.log.as_ref();
        log.map_or_else(Vec::new, |log| log.borrow().clients.clone())
    }

    /// Waits until it serves, or has ended.
    pub async fn ready(&mut self, spec: &Spec, within: Duration) -> StartOutcome {
        let Some(log) = &mut self.log else {
            return StartOutcome::Late;
        };
        let settled = log.wait_for(|log| log.serves || log.ended);
        let serves = match timeout(within, settled).await {
            Err(_) => return StartOutcome::Late,
            Ok(log) => log.is_ok_and(|log| log.serves),
        };
        if serves {
            self.until_it_waits().await;
            return StartOutcome::Ready;
        }
        let exit = timeout(READ_WITHIN, exited(&self.pidfd)).await;
        let exit = exit.ok().flatten();
        if exit.is_none() && timeout(READ_WITHIN, self.ended()).await.is_err() {
            StartOutcome::Late
        } else {
            StartOutcome::Ended(self.exit_error(spec, exit.as_ref()))
        }
    }

    /// Waits until a daemon that has logged that it serves waits for its end. rbd-nbd's main
    /// thread does so right after that line, on a condition that is notified only once: a
    /// SIGTERM that arrives in between is lost, and the daemon ends by SIGKILL alone, with
    /// its watch of the image left behind for half a minute.
    async fn until_it_waits(&self) {
        let waits = async {
            while is_running(self.pid) {
                sleep(LOOK_EVERY).await;
            }
        };
        if timeout(WAITS_WITHIN, waits).await.is_err() {
            tracing::debug!(pid = self.pid(), "rbd-nbd does not wait for its end yet");
        }
    }

    /// The reason of its end, from its log and the way in which it ended, if that is known.
    fn exit_error(&self, spec: &Spec, exit: Option<&WaitIdStatus>) -> SupervisorError {
        let log = self.log.as_ref();
        let tail = log.map(|log| log.borrow().tail.clone());
        explain(&tail.unwrap_or_default(), exit, spec)
    }

    /// Waits until it has ended, or serves no more: where another process reads the
    /// device, the exit of the daemon waits for that read, and the read for a successor.
    pub async fn ended(&self) {
        tokio::select! {
            _ = exited(&self.pidfd) => {}
            () = self.exiting() => {
                let pidfd = Arc::clone(&self.pidfd);
                tokio::spawn(async move { exited(&pidfd).await });
            }
        }
    }

    /// Waits until it has closed its output on its way out.
    async fn exiting(&self) {
        if let Some(log) = &self.log {
            let mut log = log.clone();
            let _ = log.wait_for(|log| log.ended).await;
            if is_exiting(self.pid) {
                return;
            }
        }
        std::future::pending::<()>().await;
    }

    /// Waits until it has found its image resized more than `known` times; returns how
    /// often.
    pub async fn resized(&self, known: usize) -> usize {
        if let Some(log) = &self.log {
            let mut log = log.clone();
            if let Ok(log) = log.wait_for(|log| log.resized > known).await {
                return log.resized;
            }
        }
        std::future::pending().await
    }

    /// Ends it, by SIGTERM first.
    pub async fn end(&self) -> EndOutcome {
        if self.end_by(Signal::TERM).await {
            EndOutcome::Asked
        } else if self.end_by(Signal::KILL).await {
            EndOutcome::Killed
        } else {
            EndOutcome::RunsOn
        }
    }

    /// Kills it, before it writes anything more. Returns whether it has ended.
    pub async fn kill(&self) -> bool {
        self.end_by(Signal::KILL).await
    }

    async fn end_by(&self, signal: Signal) -> bool {
        // It may have ended by itself.
        let _ = pidfd_send_signal(self.pidfd.get_ref(), signal);
        let has_ended = timeout(END_WITHIN, self.ended()).await.is_ok();
        if !has_ended {
            tracing::warn!(
                pid = self.pid(),
                ?signal,
                "rbd-nbd does not end after the signal"
            );
        }
        has_ended
    }

    /// Whether it ends by itself in a short time.
    pub async fn is_ending(&self) -> bool {
        timeout(END_WITHIN, self.ended()).await.is_ok()
    }
}

/// Waits until the process has ended, and reaps it. Returns how it ended, if it is a child
/// that was not reaped before.
async fn exited(pidfd: &AsyncFd<OwnedFd>) -> Option<WaitIdStatus> {
    loop {
        // A pidfd that is readable stays readable.
        match pidfd.readable().await {
            Ok(_ready) => break,
            Err(error) => {
                tracing::error!(%error, "cannot watch a process; retrying");
                sleep(READ_WITHIN).await;
            }
        }
    }
    // Init reaps the child of a supervisor that has ended.
    let id = WaitId::PidFd(pidfd.get_ref().as_fd());
    waitid(id, WaitIdOptions::EXITED | WaitIdOptions::NOHANG)
        .ok()
        .flatten()
}

fn has_exited(error: &io::Error) -> bool {
    let exited = [Errno::SRCH, Errno::INVAL];
    exited
        .iter()
        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// A file with the key, once to be read and once to be emptied. rbd-nbd opens it
/// anew by its name below /proc; from a pipe it would read nothing.
fn hand_over(key: &Secret) -> io::Result<(Stdio, OwnedFd)> {
    let file = memfd_create("key", MemfdFlags::CLOEXEC)?;
    let mut rest = key.reveal().as_bytes();
    while !rest.is_empty() {
        let count = rustix::io::write(&file, rest)?;
        rest = &rest[count..];
    }
    Ok((Stdio::from(file.try_clone()?), file))
}

/// Reads the log of a process to its end. A process that serves a device has read its key.
async fn listen(source: pipe::Receiver, write: watch::Sender<DaemonLog>, pid: Pid, key: OwnedFd) {
    let mut key = Some(key);
    let mut source = BufReader::new(source);
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = (&mut source).take(LINE).read_until(b'\n', &mut line).await;
        if !matches!(read, Ok(1..)) {
            break;
        }
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end();
        if text.starts_with("/dev/") {
            key.take().map(|key| ftruncate(key, 0));
        }
        tracing::debug!(pid = pid.as_raw_nonzero().get(), "rbd-nbd: {text}");
        write.send_modify(|log| log.take(text));
    }
    key.take().map(|key| ftruncate(key, 0));
    write.send_modify(|log| log.ended = true);
}

#[cfg(test)]
mod tests;
