//! Starting child processes. A child inherits a small environment and nothing else, is in
//! a process group of its own, and is killed when the thread that started it ends
//! (prctl(2), PR_SET_PDEATHSIG). A child that is stuck in the kernel dies late, and has its
//! device open until then; the exclusive open before every probe and mkfs excludes a race
//! with it.
//!
//! Between fork and exec a child has copies of its parent's descriptors, and so keeps files
//! open that the parent closes: a device that another volume is about to detach, a mount
//! that is about to be unmounted. So the thread that forks has a descriptor table of its
//! own ([`own_descriptors`]) without them.
//!
//! When memory runs out the kernel kills such a child first, not the agent or a pod
//! (proc_pid_oom_score_adj(5)). A daemon that serves a device starts in the same way, but
//! outlives its parent, whose score it has.

use std::{
    ffi::OsStr,
    io::{self, Write as _},
    os::unix::process::CommandExt as _,
    panic::resume_unwind,
    process::{Command, Output, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use crate::crash_point;
use rustix::{
    fs::{Mode, OFlags, open},
    process::Signal,
};
#[cfg(feature = "holder")]
use rustix::{
    io::Errno,
    mount::{MountFlags, MountPropagationFlags, mount, mount_change},
    process::Pid,
    thread::{UnshareFlags, unshare_unsafe},
};
#[cfg(feature = "holder")]
use std::ffi::CString;

#[cfg(feature = "holder")]
use super::{block::BLKROSET, privileges};

/// The directories in which programs are looked up.
pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Bytes of stack of a thread that starts a child.
pub const STACK: usize = 256 << 10;

/// include/uapi/linux/prctl.h
#[cfg(feature = "holder")]
const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// A program, looked up in the system's usual directories, with its arguments. Only its
/// standard error is connected to this process's.
pub fn command<A: AsRef<OsStr>>(program: &str, args: &[A]) -> Command {
    let parent = rustix::process::getpid();
    prepared(program, args, move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // If the parent died before the prctl, the kernel sends no signal.
        if rustix::process::getppid() != Some(parent) {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        // The program also runs without procfs.
        let _ = ended_first();
        Ok(())
    })
}

/// As [`command`], for work without urgency: the program runs at a low priority for the
/// processor and for the disks (ioprio_set(2): the last of the best-effort class, as the
/// idle class gets nothing on a busy disk).
pub fn background<A: AsRef<OsStr>>(program: &str, args: &[A]) -> Command {
    const IOPRIO_WHO_PROCESS: libc::c_int = 1;
    const LAST_OF_BEST_EFFORT: libc::c_int = 2 << 13 | 7;
    const NICE: i32 = 10;
    let mut command = command(program, args);
    let yields = || {
        // These fail only if a filter refuses them; then the program runs at the usual
        // priority. An agent's own may be lower.
        let own = rustix::process::getpriority_process(None).unwrap_or(0);
        let _ = rustix::process::setpriority_process(None, own.max(NICE));
        // SAFETY: the call takes numbers only.
        let _ = unsafe {
            libc::syscall(
                libc::SYS_ioprio_set,
                IOPRIO_WHO_PROCESS,
                0,
                LAST_OF_BEST_EFFORT,
            )
        };
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes system calls alone, and allocates
    // nothing.
    unsafe { command.pre_exec(yields) };
    command
}

/// Makes the calling process the first that the kernel kills when memory runs out.
fn ended_first() -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let file = open(c"/proc/self/oom_score_adj", flags, Mode::empty())?;
    rustix::io::write(&file, b"1000")?;
    Ok(())
}

/// How often the activity of a child is read.
pub const LIFE_EVERY: Duration = Duration::from_secs(1);

/// The work of a process so far, as the kernel counts it: processor time, and bytes read
/// and written. Two answers differ unless the process is stuck. None if it has ended.
pub fn activity(pid: i32) -> Option<(String, String)> {
    let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}"));
    Some((read("stat").ok()?, read("io").unwrap_or_default()))
}

/// A program that serves a block device from user space, and outlives this
/// process. When memory is short, it must not wait for writes to its own device
/// (prctl(2), PR_SET_IO_FLUSHER, which takes CAP_SYS_RESOURCE and is inherited; the program
/// also runs without it).
///
/// The mark of a raw volume that is published read-only is the node agent's: rbd-nbd clears it
/// whenever it starts, or sets it for good on the device's number. So BLKROSET does nothing here,
/// and succeeds. The kernel has the driver's own flag for a device that is mapped read-only.
///
/// The program cannot see the process `unseen`: it has a mount namespace of its own, in
/// which a tmpfs hides that process's `/proc/PID`.
#[cfg(feature = "holder")]
pub fn block_server<A: AsRef<OsStr>>(program: &str, args: &[A], unseen: Option<Pid>) -> Command {
    let hidden = unseen.map(|pid| {
        let path = format!("/proc/{}", pid.as_raw_nonzero());
        CString::new(path).expect("a number has no NUL")
    });
    let without_mark = privileges::without_ioctl(BLKROSET);
    if let Err(error) = &without_mark {
        tracing::warn!(%error, program, "it may change whether its device takes writes");
    }
    #[expect(clippy::disallowed_methods, reason = "in a mount namespace of its own")]
    prepared(program, args, move || {
        if let Ok(filter) = &without_mark {
            // The program also runs on a kernel without filters.
            let _ = seccompiler::apply_filter(filter);
        }
        // SAFETY: the call takes numbers only.
        let _ = unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) };
        let Some(path) = &hidden else { return Ok(()) };
        // SAFETY: the process has one thread, and no descriptor changes its meaning.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
        let downstream = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
        mount_change(c"/", downstream)?;
        match mount(c"none", path, c"tmpfs", MountFlags::RDONLY, None) {
            // The process has ended meanwhile.
            Err(Errno::NOENT) => Ok(()),
            hidden => Ok(hidden?),
        }
    })
}

/// `first` is run between fork and exec: system calls only.
fn prepared<A: AsRef<OsStr>>(
    program: &str,
    args: &[A],
    first: impl Fn() -> io::Result<()> + Send + Sync + 'static,
) -> Command {
    #[expect(clippy::disallowed_methods, reason = "this is the one place")]
    let mut command = Command::new(program);
    command
        .args(args)
        .env_clear()
        .env("PATH", PATH)
        .env("LC_ALL", "C")
        .current_dir("/")
        .stdin(Stdio::null())
        .process_group(0);
    let detach = move || {
        first()?;
        // The process opens all its descriptors with CLOEXEC; inherited ones may lack it.
        close_range(libc::CLOSE_RANGE_CLOEXEC)
    };
    // SAFETY: between fork and exec the closure makes a few system calls and
    // allocates nothing.
    unsafe { command.pre_exec(detach) };
    command
}

/// Gives the calling thread a descriptor table of its own with the standard descriptors
/// only; the others are not copied even for a moment. For a new thread, which owns no
/// descriptor yet: the numbers of the process's descriptors are not valid in it, nor its
/// own in other threads. So it cannot wake the runtime, either.
///
/// Fails as close_range(2), such as for lack of memory.
pub fn own_descriptors() -> io::Result<()> {
    close_range(libc::CLOSE_RANGE_UNSHARE)
}

/// close_range(2) of all but the standard descriptors.
fn close_range(flags: libc::c_uint) -> io::Result<()> {
    // SAFETY: the call takes numbers only. With either flag it closes no descriptor that a
    // value of this process owns: it closes at exec, or in the caller's new table.
    let done = unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, flags) };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Runs a program to its end, with `input` as its standard input, and `environment` in
/// addition to the environment of every child. It blocks, and belongs on a lane. The input
/// is less than a pipe's capacity (64 KiB, pipe(7)). It calls `lives` every second in which
/// the program did some work.
pub fn run<A: AsRef<OsStr>>(
    program: &str,
    args: &[A],
    environment: &[(&str, &str)],
    input: &[u8],
    lives: impl Fn(),
) -> io::Result<Output> {
    let command = command(program, args);
    let (begun, pid) = mpsc::channel();
    let output = thread::scope(|scope| {
        let child = thread::Builder::new()
            .name("child".to_owned())
            .stack_size(STACK)
            .spawn_scoped(scope, move || {
                own_descriptors()?;
                run_here(command, environment, input, &begun)
            })?;
        if let Ok(child) = pid.recv() {
            let mut seen = activity(child);
            // Until that thread ends, which drops its sender.
            while pid.recv_timeout(LIFE_EVERY) == Err(RecvTimeoutError::Timeout) {
                let now = activity(child);
                if now != seen {
                    lives();
                    seen = now;
                }
            }
        }
        child.join().unwrap_or_else(|panic| resume_unwind(panic))
    });
    crash_point();
    output
}

/// As [`run`], on this thread. Sends the child's process id to `begun`.
fn run_here(
    mut command: Command,
    environment: &[(&str, &str)],
    input: &[u8],
    begun: &mpsc::Sender<i32>,
) -> io::Result<Output> {
    let mut child = command
        .envs(environment.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    // Fails only if the receiver was dropped.
    let _ = begun.send(child.id().cast_signed());
    let written = child
        .stdin
        .take()
        .map_or(Ok(()), |mut pipe| pipe.write_all(input));
    let output = child.wait_with_output()?;
    match written {
        // The program ended before it read all; its exit status shows the cause.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
        _ => Ok(output),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_have_the_highest_oom_score_and_background_ones_yield() {
        let script = "cat /proc/self/oom_score_adj; nice; ionice";
        let usual = run("sh", &["-c", script], &[], b"", || {}).unwrap();
        let usual = String::from_utf8(usual.stdout).unwrap();
        assert!(usual.starts_with("1000\n"), "{usual}");
        let yields = background("sh", &["-c", script]).output().unwrap();
        let yields = String::from_utf8(yields.stdout).unwrap();
        assert!(yields.starts_with("1000\n"), "{yields}");
        let nice = |said: &str| said.lines().nth(1).unwrap().parse::<i32>().unwrap();
        assert!(nice(&yields) >= 10.max(nice(&usual)), "{yields}");
        assert!(yields.contains("best-effort: prio 7"), "{yields}");
    }

    #[test]
    fn a_working_child_reports_activity() {
        let dir = tempfile::tempdir().unwrap();
        let seen = dir.path().join("seen");
        let script = format!("until [ -e {} ]; do :; done", seen.display());
        let lives = || std::fs::write(&seen, "").unwrap();
        let ended = run("sh", &["-c", &script], &[], b"", lives).unwrap();
        assert!(ended.status.success(), "{ended:?}");
    }

    #[test]
    fn a_child_before_its_exec_keeps_no_descriptor_open() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = |name: &str| {
            let path = dir.path().join(name);
            rustix::fs::mkfifoat(rustix::fs::CWD, &path, Mode::RUSR | Mode::WUSR).unwrap();
            path
        };
        let (has_forked, may_begin) = (fifo("has-forked"), fifo("may-begin"));
        // Opening a FIFO waits for the opener of its other end.
        let meet =
            |path: &std::path::Path, flags| open(path, flags | OFlags::CLOEXEC, Mode::empty());
        let (source, sink) = rustix::pipe::pipe().unwrap();
        rustix::fs::fcntl_setfl(&source, OFlags::NONBLOCK).unwrap();
        let (here, there) = (has_forked.clone(), may_begin.clone());
        let begins = thread::spawn(move || {
            own_descriptors().unwrap();
            let mut child = command("true", &[""; 0]);
            let waits = move || {
                meet(&here, OFlags::WRONLY)?;
                meet(&there, OFlags::RDONLY)?;
                Ok(())
            };
            // SAFETY: between fork and exec the closure makes system calls; rustix
            // copies paths as short as these to the stack.
            unsafe { child.pre_exec(waits) };
            child.status().unwrap()
        });
        drop(meet(&has_forked, OFlags::RDONLY).unwrap());
        drop(sink);
        let read = rustix::io::read(&source, &mut [0; 1]);
        drop(meet(&may_begin, OFlags::WRONLY).unwrap());
        assert!(begins.join().unwrap().success());
        assert_eq!(read, Ok(0), "the child has the other end");
    }

    #[test]
    fn activity_grows_while_a_process_works() {
        let mut works = command("sh", &["-c", "while :; do :; done"])
            .spawn()
            .unwrap();
        let pid = i32::try_from(works.id()).unwrap();
        let before = activity(pid).unwrap();
        while activity(pid).unwrap() == before {
            std::thread::yield_now();
        }
        works.kill().unwrap();
        works.wait().unwrap();
        assert_eq!(activity(pid), None);
    }

    #[test]
    fn a_program_reads_its_input_and_reports_its_exit() {
        let output = run(
            "sh",
            &["-c", "cat; echo no >&2; exit 3"],
            &[],
            b"some text",
            || {},
        )
        .unwrap();
        assert_eq!(output.status.code(), Some(3));
        assert_eq!(
            (&*output.stdout, &*output.stderr),
            (&b"some text"[..], &b"no\n"[..])
        );
        assert!(
            run("true", &[""; 0], &[], &vec![0; 60_000], || {})
                .unwrap()
                .status
                .success()
        );
        assert_eq!(
            run("no-such-program", &[""; 0], &[], b"", || {})
                .unwrap_err()
                .kind(),
            io::ErrorKind::NotFound
        );
    }
}
