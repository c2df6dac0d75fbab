//! Work in another network namespace.

use std::{io, path::Path, thread};

use rustix::{
    fd::AsFd as _,
    fs::{Mode, OFlags, open, stat},
    thread::{LinkNameSpaceType, move_into_link_name_space},
};

/// Does the work in the network namespace of that file, on a thread of its own, which ends
/// with it; without a file, here. Threads that the work starts stay in the namespace.
/// Fails if the thread cannot enter it.
pub fn within<T: Send>(file: Option<&Path>, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    let Some(file) = file else {
        return Ok(work());
    };
    // Without waiting for the writer of a FIFO.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let namespace = open(file, flags, Mode::empty())?;
    let entered = || {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
        Ok(work())
    };
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("net-namespace".into());
        let thread = thread.spawn_scoped(scope, entered)?;
        thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// The inode of the calling thread's network namespace.
pub fn current() -> io::Result<u64> {
    Ok(stat("/proc/thread-self/ns/net")?.st_ino)
}

#[cfg(test)]
mod tests {
    use rustix::thread::{UnshareFlags, unshare_unsafe};

    use super::*;

    #[test]
    fn only_the_works_thread_enters_the_namespace() {
        let outside = current().unwrap();
        // SAFETY: the thread still shares the process's descriptor table.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.expect("tests run as root");
        let inside = current().unwrap();
        assert_ne!(inside, outside);
        // The main thread is where this one was.
        let file = format!("/proc/{}/ns/net", std::process::id());
        let seen = within(Some(Path::new(&file)), || {
            let of_child = thread::spawn(current).join().unwrap().unwrap();
            (current().unwrap(), of_child)
        });
        assert_eq!(seen.unwrap(), (outside, outside));
        assert_eq!(current().unwrap(), inside);
        assert_eq!(within(None, current).unwrap().unwrap(), inside);
        within(Some(Path::new("/proc/self/ns/mnt")), || ()).unwrap_err();
        within(Some(Path::new("/nonexistent")), || ()).unwrap_err();
    }
}
