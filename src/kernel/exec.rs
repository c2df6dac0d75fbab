//! How a child process begins: with a small environment and nothing else, in a
//! process group of its own, and killed when the thread that started it ends
//! (prctl(2), PR_SET_PDEATHSIG). One that is stuck in the kernel dies late, and
//! holds its device until then: who opens that exclusively, before every probe
//! and mkfs, does not race with it.

use std::{
    ffi::OsStr,
    io::{self, Write as _},
    os::unix::process::CommandExt as _,
    process::{Command, Output, Stdio},
};

use rustix::process::Signal;

/// Where programs are looked for.
pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A program, looked up in the system's usual directories, with its arguments.
/// Nothing of it is connected to this process yet but standard error.
pub fn command<A: AsRef<OsStr>>(program: &str, args: &[A]) -> Command {
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
    let parent = rustix::process::getpid();
    let detach = move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before; then no signal comes.
        if rustix::process::getppid() != Some(parent) {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
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
    // SAFETY: between fork and exec the closure makes three system calls and
    // allocates nothing.
    unsafe { command.pre_exec(detach) };
    command
}

/// Runs a program to its end, with `input` for it to read: for a lane, which it
/// blocks. The input is less than a pipe holds (64 KiB, pipe(7)).
pub fn run<A: AsRef<OsStr>>(program: &str, args: &[A], input: &[u8]) -> io::Result<Output> {
    let mut child = command(program, args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let written = child
        .stdin
        .take()
        .map_or(Ok(()), |mut pipe| pipe.write_all(input));
    let output = child.wait_with_output()?;
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
    fn a_program_reads_its_input_and_says_how_it_ended() {
        let output = run("sh", &["-c", "cat; echo no >&2; exit 3"], b"some text").unwrap();
        assert_eq!(output.status.code(), Some(3));
        assert_eq!(
            (&*output.stdout, &*output.stderr),
            (&b"some text"[..], &b"no\n"[..])
        );
        assert!(
            run("true", &[""; 0], &vec![0; 60_000])
                .unwrap()
                .status
                .success()
        );
        assert_eq!(
            run("no-such-program", &[""; 0], b"").unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
    }
}
