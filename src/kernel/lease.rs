//! Leases: the kernel's word that nobody writes to a file (fcntl(2), "Leases").
//!
//! A read lease is granted only while no descriptor of the file, in whatever
//! process or container of this machine, is open for writing; while it is held,
//! whoever opens the file so waits for its end, and the lease counts as broken
//! from then on. The kernel takes it away from those who do not give it back
//! (`/proc/sys/fs/lease-break-time`, 45 seconds).

use std::{fs::File, io, os::fd::AsRawFd as _};

use rustix::io::Errno;

/// Sets the signal that tells of a break (`linux/fcntl.h`; libc lacks it).
const F_SETSIG: libc::c_int = 10;

/// A read lease, held until it is dropped.
#[derive(Debug)]
pub struct Lease<'f>(&'f File);

impl<'f> Lease<'f> {
    /// Asks for one on a file that is open for reading only. None where it is
    /// open for writing somewhere. An error where the file system knows no leases
    /// (EINVAL), or the file is another user's (EACCES).
    pub fn ask(file: &'f File) -> io::Result<Option<Self>> {
        // Of a break its holder learns by asking; SIGIO, sent otherwise, would
        // end the process, SIGURG is ignored by default.
        fcntl(file, F_SETSIG, libc::SIGURG)?;
        match fcntl(file, libc::F_SETLEASE, libc::F_RDLCK) {
            Ok(_) => Ok(Some(Self(file))),
            Err(error) if error.raw_os_error() == Some(Errno::AGAIN.raw_os_error()) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether nobody has asked to write since it was granted.
    pub fn holds(&self) -> io::Result<bool> {
        Ok(fcntl(self.0, libc::F_GETLEASE, 0)? == libc::F_RDLCK)
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        // The kernel's own break may have been faster.
        let _ = fcntl(self.0, libc::F_SETLEASE, libc::F_UNLCK);
    }
}

fn fcntl(file: &File, command: libc::c_int, argument: libc::c_int) -> io::Result<libc::c_int> {
    // SAFETY: these commands take an int and touch no memory of ours.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, argument) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

#[cfg(test)]
mod tests {
    use rustix::fs::OFlags;

    use super::*;

    #[test]
    fn a_lease_is_refused_while_a_writer_has_the_file_and_broken_by_a_later_one() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("file");
        let writer = File::create(&path).unwrap();
        let file = File::open(&path).unwrap();
        assert!(Lease::ask(&file).unwrap().is_none());
        drop(writer);

        let lease = Lease::ask(&file).unwrap().expect("nobody writes");
        let reader = File::open(&path).unwrap();
        assert!(lease.holds().unwrap());
        drop(reader);
        let open = || {
            let flags = OFlags::WRONLY | OFlags::NONBLOCK;
            rustix::fs::open(&path, flags, rustix::fs::Mode::empty())
        };
        assert_eq!(open().unwrap_err(), Errno::WOULDBLOCK);
        assert!(!lease.holds().unwrap());
        drop(lease);
        open().unwrap();
    }

    #[test]
    fn a_lease_on_a_device_is_an_error() {
        let file = File::open("/dev/null").unwrap();
        Lease::ask(&file).unwrap_err();
    }
}
