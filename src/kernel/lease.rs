//! Leases on files (fcntl(2), "Leases"). A read lease is the kernel's guarantee that no
//! process writes to a file; that it grants a write lease shows that no other descriptor
//! of the file is open.
//!
//! The kernel grants a read lease only while no process or container of this machine has
//! the file open for writing. A process that then opens the file for writing breaks the
//! lease, and waits until the holder releases it. The kernel removes a lease that its
//! holder does not release in time (`/proc/sys/fs/lease-break-time`, 45 seconds).

use std::{fs::File, io, os::fd::AsRawFd as _};

use rustix::io::Errno;

/// Sets the signal that announces a break (`linux/fcntl.h`; libc lacks it).
const F_SETSIG: libc::c_int = 10;

/// A read lease, held until it is dropped.
#[derive(Debug)]
pub struct Lease<'f>(&'f File);

impl<'f> Lease<'f> {
    /// Requests a lease on a file that this process has open for reading only. None if a
    /// process has it open for writing. An error where the file system has no leases
    /// (EINVAL), or the file is another user's (EACCES).
    pub fn ask(file: &'f File) -> io::Result<Option<Self>> {
        Self::of_kind(file, libc::F_RDLCK)
    }

    fn of_kind(file: &'f File, kind: libc::c_int) -> io::Result<Option<Self>> {
        // The owner polls whether the lease was broken, and needs no signal. The default
        // signal, SIGIO, would end the process; SIGURG is ignored by default.
        fcntl(file, F_SETSIG, libc::SIGURG)?;
        match fcntl(file, libc::F_SETLEASE, kind) {
            Ok(_) => Ok(Some(Self(file))),
            Err(error) if error.raw_os_error() == Some(Errno::AGAIN.raw_os_error()) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether no process has opened the file for writing since the lease was granted.
    pub fn holds(&self) -> io::Result<bool> {
        Ok(fcntl(self.0, libc::F_GETLEASE, 0)? == libc::F_RDLCK)
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        // Fails if the kernel has removed the lease already.
        let _ = fcntl(self.0, libc::F_SETLEASE, libc::F_UNLCK);
    }
}

/// Whether this machine has another descriptor of the file open, be it a process's or a
/// loop device's; `O_PATH` descriptors do not count. None where the kernel grants no
/// lease: the file is another user's, or its file system has none.
pub fn is_open_elsewhere(file: &File) -> Option<bool> {
    Some(Lease::of_kind(file, libc::F_WRLCK).ok()?.is_none())
}

fn fcntl(file: &File, command: libc::c_int, argument: libc::c_int) -> io::Result<libc::c_int> {
    // SAFETY: these commands take an int and access no memory of this process.
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

        let lease = Lease::ask(&file).unwrap().expect("no writer");
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
        assert_eq!(is_open_elsewhere(&file), None);
    }

    #[test]
    fn every_other_descriptor_of_a_file_is_seen() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("file");
        let file = File::create(&path).unwrap();
        assert_eq!(is_open_elsewhere(&file), Some(false));
        for writable in [false, true] {
            let mut options = File::options();
            let other = options.read(true).write(writable).open(&path).unwrap();
            assert_eq!(is_open_elsewhere(&file), Some(true));
            assert_eq!(is_open_elsewhere(&other), Some(true));
        }
        assert_eq!(is_open_elsewhere(&file), Some(false));
        let reader = File::open(&path).unwrap();
        drop(file);
        assert_eq!(is_open_elsewhere(&reader), Some(false));
    }
}
