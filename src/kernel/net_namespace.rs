//! Work in another network namespace.

use std::{fs::File, io, path::Path, thread};

use rustix::{
    fd::AsFd as _,
    thread::{LinkNameSpaceType, move_into_link_name_space},
};

/// Does the work in the network namespace of that file, on a thread of its own, which ends
/// with it; without a file, here. Threads that the work starts stay in the namespace.
/// Fails if the thread cannot enter it.
pub fn within<T: Send>(file: Option<&Path>, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    let Some(file) = file else {
        return Ok(work());
    };
    let namespace = File::open(file)?;
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

#[cfg(test)]
mod tests {
    use rustix::thread::{UnshareFlags, unshare_unsafe};

    use super::*;

    fn current() -> std::path::PathBuf {
        std::fs::read_link("/proc/thread-self/ns/net").unwrap()
    }

    #[test]
    fn only_the_works_thread_enters_the_namespace() {
        let outside = current();
        // SAFETY: the thread still shares the process's descriptor table.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.expect("tests run as root");
        let inside = current();
        assert_ne!(inside, outside);
        // The main thread is where this one was.
        let file = format!("/proc/{}/ns/net", std::process::id());
        let seen = within(Some(Path::new(&file)), || {
            let of_child = thread::spawn(current).join().unwrap();
            (current(), of_child)
        });
        assert_eq!(seen.unwrap(), (outside.clone(), outside));
        assert_eq!(current(), inside);
        assert_eq!(within(None, current).unwrap(), inside);
        within(Some(Path::new("/proc/self/ns/mnt")), || ()).unwrap_err();
        within(Some(Path::new("/nonexistent")), || ()).unwrap_err();
    }
}
