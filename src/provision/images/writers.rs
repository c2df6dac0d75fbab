//! The writers of an image that an NBD server exports.
//!
//! A node that attaches a loop device claims the image beside it; one that
//! attaches an export reaches no pool and claims nothing, and by the protocol a server
//! does not name its clients. But nbdkit has an image open for
//! as long as a client is connected to it, and on a file system that no other machine can
//! mount the kernel knows every open file: it grants a lease only on a file that no process
//! has open for writing ([`Lease`]). So the lease shows whether any
//! node has the volume attached, whichever node and in whichever container the server
//! runs. On a network file system there is no such lease.
//!
//! A server that misses the end of its client (a node that lost its power) has
//! the image open until it notices or is restarted.

use std::{
    fs::File,
    io,
    os::fd::OwnedFd,
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::inotify,
};

use super::{
    super::ProvisionError,
    catalogue::failed,
    file_system::{fs_type, is_local},
};
use crate::{
    kernel::{busy::retry_while_busy, lease::Lease},
    pool::{Pool, PoolError},
};

/// Whether an image has writers.
#[derive(Debug)]
pub enum Writers<'f> {
    /// It has none, as long as the lease holds.
    None(Lease<'f>),
    /// A process has it open for writing.
    Some,
    Unknown,
}

impl<'f> Writers<'f> {
    /// Looks at an image of `pool` that is open for reading only.
    pub fn of(pool: &Pool, image: &'f File, path: &Path) -> Result<Self, ProvisionError> {
        if !fs_type(pool)?.is_some_and(is_local) {
            return Ok(Self::Unknown);
        }
        let cannot = |what| move |e| failed(what, path, e);
        let ask = || retry_while_busy(|| Lease::ask(image), |lease| matches!(lease, Ok(None)));
        // A server closes an image a moment after its client has gone.
        let until = Instant::now() + CLOSED_WITHIN;
        let mut closings = None;
        loop {
            match ask() {
                Ok(Some(lease)) => return Ok(Self::None(lease)),
                Ok(None) => {}
                // The file is another user's, or leases are switched off.
                Err(e) if is_refusal(&e) => return Ok(Self::Unknown),
                Err(e) => return Err(cannot("ask for a lease on")(e)),
            }
            match &closings {
                // From here on none is missed; those before were.
                None => closings = Some(Closings::of(path).map_err(cannot("watch"))?),
                Some(closings) => {
                    let closed = closings.wait(until).map_err(cannot("watch"))?;
                    if !closed || Instant::now() >= until {
                        return Ok(Self::Some);
                    }
                }
            }
        }
    }
}

/// Reports when a process closes a file that it had open for writing (inotify(7)).
struct Closings(OwnedFd);

impl Closings {
    fn of(path: &Path) -> io::Result<Self> {
        let watch = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
        inotify::add_watch(&watch, path, inotify::WatchFlags::CLOSE_WRITE)?;
        Ok(Self(watch))
    }

    /// Waits for the next closing; false: there was none until then.
    fn wait(&self, until: Instant) -> io::Result<bool> {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        let readable = poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&left))?;
        // Several events count as one.
        let _ = rustix::io::read(&self.0, &mut [0; 4096]);
        Ok(readable > 0)
    }
}

fn is_refusal(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, PermissionDenied};
    matches!(error.kind(), InvalidInput | PermissionDenied)
}

/// Refuses to delete an image that is known to have a writer.
pub fn refuse_written(pool: &Pool, image: &str) -> Result<(), ProvisionError> {
    let file = match pool.open_image(image, false) {
        Ok(file) => file,
        // Deleted before, or lost.
        Err(PoolError::NoImage { .. }) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    match Writers::of(pool, &file, &pool.image_path(image))? {
        Writers::Some => Err(ProvisionError::Exported(image.to_owned())),
        Writers::None(_) | Writers::Unknown => Ok(()),
    }
}

const CLOSED_WITHIN: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Scope;

    fn pool(dir: &Path) -> Pool {
        Pool {
            name: "p".to_owned(),
            dir: dir.to_owned(),
            scope: Scope::Shared,
            mounted: false,
        }
    }

    #[test]
    fn open_writers_are_found_on_a_local_file_system() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let pool = pool(dir.path());
        let path = pool.image_path("i.img");
        let writer = File::create(&path).unwrap();
        let file = File::open(&path).unwrap();
        let of = || Writers::of(&pool, &file, &path).unwrap();
        assert!(matches!(of(), Writers::Some));
        let error = refuse_written(&pool, "i.img").unwrap_err();
        assert_eq!(error.kind(), crate::Kind::Precondition);
        let watching = Closings::of(&path).unwrap();
        assert!(!watching.wait(Instant::now()).unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| drop(writer));
            assert!(matches!(of(), Writers::None(_)));
        });
        assert!(watching.wait(Instant::now()).unwrap());
        assert!(!watching.wait(Instant::now()).unwrap());
        refuse_written(&pool, "i.img").unwrap();
        refuse_written(&pool, "none.img").unwrap();
    }

    #[test]
    fn open_writers_are_unknown_on_other_file_systems() {
        let pool = pool(Path::new("/proc/self"));
        let path = pool.image_path("status");
        let file = File::open(&path).unwrap();
        assert!(matches!(
            Writers::of(&pool, &file, &path),
            Ok(Writers::Unknown)
        ));
    }
}
