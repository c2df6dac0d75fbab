//! How a child process begins: with a small environment and nothing else, in a
//! process group of its own, and killed when the thread that started it ends
//! (prctl(2), PR_SET_PDEATHSIG). One that is stuck in the kernel dies late, and
//! holds its device until then: who opens that exclusively, before every probe
//! and mkfs, does not race with it.
//!
//! Where memory runs out the kernel ends such a child first, not the agent or a pod
//! (proc_pid_oom_score_adj(5)). A daemon that serves a device begins likewise, and
//! lasts; it has the score of whoever keeps it.

use std::{
    ffi::OsStr,
    io::{self, Write as _},
    os::unix::process::CommandExt as _,
    process::{Command, Output, Stdio},
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

/// Where programs are looked for.
pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// include/uapi/linux/prctl.h
#[cfg(feature = "holder")]
const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// A program, looked up in the system's usual directories, with its arguments.
/// Nothing of it is connected to this process yet but standard error.
pub fn command<A: AsRef<OsStr>>(program: &str, args: &[A]) -> Command {
    let parent = rustix::process::getpid();
    prepared(program, args, move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before; then no signal comes.
        if rustix::process::getppid() != Some(parent) {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        // Without procfs it runs as well.
        let _ = ended_first();
        Ok(())
    })
}

/// As [`command`], for work that may take its time: of the processor and the disks it
/// has what others leave (ioprio_set(2): the last of the usual class, as the idle one
/// gets nothing on a busy disk).
pub fn background<A: AsRef<OsStr>>(program: &str, args: &[A]) -> Command {
    const IOPRIO_WHO_PROCESS: libc::c_int = 1;
    const LAST_OF_BEST_EFFORT: libc::c_int = 2 << 13 | 7;
    const NICE: i32 = 10;
    let mut command = command(program, args);
    let yields = || {
        // Both fail at most where a filter refuses them; then it runs as others do.
        let _ = rustix::process::setpriority_process(None, NICE);
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
    // SAFETY: between fork and exec the closure makes two system calls and allocates
    // nothing.
    unsafe { command.pre_exec(yields) };
    command
}

/// Makes the calling process the first to go where memory runs out.
fn ended_first() -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let file = open(c"/proc/self/oom_score_adj", flags, Mode::empty())?;
    rustix::io::write(&file, b"1000")?;
    Ok(())
}

/// What a process has done so far, as the kernel counts it: processor time, and bytes
/// read and written. Two answers differ where it is not stuck. None where it has ended.
pub fn activity(pid: i32) -> Option<(String, String)> {
    let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}"));
    Some((read("stat").ok()?, read("io").unwrap_or_default()))
}

/// A program that serves a block device from user space, and outlives this
/// process. Where memory is short it must not wait for what is written to its own
/// device (prctl(2), PR_SET_IO_FLUSHER, which takes CAP_SYS_RESOURCE and is
/// inherited; without it the program runs as well).
///
/// To the program the process `unseen` is not there: it has a mount namespace of
/// its own, in which something else hides `/proc/PID`.
#[cfg(feature = "holder")]
pub fn block_server<A: AsRef<OsStr>>(program: &str, args: &[A], unseen: Option<Pid>) -> Command {
    let hidden = unseen.map(|pid| {
        let path = format!("/proc/{}", pid.as_raw_nonzero());
        CString::new(path).expect("a number has no NUL")
    });
    prepared(program, args, move || {
        // SAFETY: the call takes numbers only.
        let _ = unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) };
        let Some(path) = &hidden else { return Ok(()) };
        // SAFETY: the process has one thread, and no descriptor changes its meaning.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
        let downstream = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
        mount_change(c"/", downstream)?;
        match mount(c"none", path, c"tmpfs", MountFlags::RDONLY, None) {
            // It has ended meanwhile.
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
        // Ours are all CLOEXEC; what the agent inherited may not be.
        // SAFETY: the call takes numbers only, and closes nothing before exec.
        let closed = unsafe {
            libc::syscall(
                libc::SYS_close_range,
                3,
                libc::c_uint::MAX,
                libc::CLOSE_RANGE_CLOEXEC,
            )
        };
        if closed == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    };
    // SAFETY: between fork and exec the closure makes a few system calls and
    // allocates nothing.
    unsafe { command.pre_exec(detach) };
    command
}

/// Runs a program to its end, with `input` for it to read and `environment` beside
/// what all have: for a lane, which it blocks. The input is less than a pipe holds
/// (64 KiB, pipe(7)).
pub fn run<A: AsRef<OsStr>>(
    program: &str,
    args: &[A],
    environment: &[(&str, &str)],
    input: &[u8],
) -> io::Result<Output> {
    let mut child = command(program, args)
        .envs(environment.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let written = child
        .stdin
        .take()
        .map_or(Ok(()), |mut pipe| pipe.write_all(input));
    let output = child.wait_with_output()?;
    crash_point();
    match written {
        // It ended without reading all; how it ended says why.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
        _ => Ok(output),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_goes_first_where_memory_runs_out_and_may_yield_to_others() {
        let script = "cat /proc/self/oom_score_adj; nice; ionice";
        let usual = run("sh", &["-c", script], &[], b"").unwrap();
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
    fn a_process_that_works_shows_it_and_one_that_sleeps_does_not() {
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
    fn a_program_reads_its_input_and_says_how_it_ended() {
        let output = run("sh", &["-c", "cat; echo no >&2; exit 3"], &[], b"some text").unwrap();
        assert_eq!(output.status.code(), Some(3));
        assert_eq!(
            (&*output.stdout, &*output.stderr),
            (&b"some text"[..], &b"no\n"[..])
        );
        assert!(
            run("true", &[""; 0], &[], &vec![0; 60_000])
                .unwrap()
                .status
                .success()
        );
        assert_eq!(
            run("no-such-program", &[""; 0], &[], b"")
                .unwrap_err()
                .kind(),
            io::ErrorKind::NotFound
        );
    }
}
