//! Whether a process may use io_uring, without a ring of its own.

use std::{
    io,
    os::fd::{FromRawFd as _, OwnedFd},
};

/// Makes a ring by io_uring_setup(2), and closes it: a seccomp filter may refuse what the sysctl
/// allows.
pub fn try_uring_setup() -> io::Result<()> {
    // struct io_uring_params, of 120 bytes.
    let mut params = [0_u32; 30];
    // SAFETY: the kernel reads and writes no more than `params`, which outlives the call.
    let made = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1_u32, params.as_mut_ptr()) };
    let ring = match i32::try_from(made) {
        Ok(ring) if ring >= 0 => ring,
        _ => return Err(io::Error::last_os_error()),
    };
    // SAFETY: the descriptor is new, and nothing else has it.
    drop(unsafe { OwnedFd::from_raw_fd(ring) });
    Ok(())
}
