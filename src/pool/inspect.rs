//! Whether a pool can be used, by trying what agents do in it.

use std::os::fd::AsFd as _;

use rustix::{
    fs::{Access, AtFlags, accessat},
    io::Errno,
};

use super::{Pool, PoolError, Room, draft};
use crate::{error_chain, finding::Finding, size::human_bytes};

/// The step of [`draft::try_out`].
const TRIAL: &str = "write, lock and link a file in";

impl Pool {
    /// Whether it is there, can be written to, locks files, and has room. Of a pool that was
    /// used before it writes, locks and links a file, and removes it.
    pub fn inspect(&self) -> Finding {
        let subject = format!("pool {}", self.name);
        match self.try_out() {
            Ok(room) if room.available() == 0 => Finding::faulty(
                subject,
                format!("no room for new volumes: {}", describe(room)),
                "delete volumes or snapshots, or grow its file system; classes with overcommit ignore this",
            ),
            Ok(room) => Finding::usable(subject, format!("writable, {}", describe(room))),
            Err(error) => Finding::faulty(subject, error_chain(&error), remedy(&error)),
        }
    }

    fn try_out(&self) -> Result<Room, PoolError> {
        let dir = self.open_dir()?;
        self.check_scope()?;
        if self.is_initialized()? {
            let tmp = self.meta_dir("tmp")?;
            draft::try_out(&tmp).map_err(|error| self.io(TRIAL, &tmp, error))?;
        } else {
            // A pool gets its first file with its first volume.
            accessat(dir.as_fd(), ".", Access::WRITE_OK, AtFlags::EACCESS)
                .map_err(|errno| self.io("write to", &self.dir, errno))?;
        }
        self.room()
    }
}

fn describe(room: Room) -> String {
    format!(
        "{} of {} free, {} of it promised to images",
        human_bytes(room.free),
        human_bytes(room.size),
        human_bytes(room.promised)
    )
}

fn remedy(error: &PoolError) -> &'static str {
    match error {
        PoolError::NotReady { .. }
        | PoolError::NotMounted { .. }
        | PoolError::Uninitialized { .. } => {
            "mount it there, or correct --pool; agents in containers see mounts made before their start, or with mountPropagation"
        }
        PoolError::OtherScope { .. } => "give --pool the scope that the pool has",
        PoolError::Io {
            step: TRIAL,
            source,
            ..
        } if source.raw_os_error().is_none() => "mount it with locks",
        PoolError::Io { source, .. } => match source.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::ROFS) => "mount it writable",
            Some(Errno::ACCESS | Errno::PERM) => {
                "let the user of the agents write there; of NFS, export it with no_root_squash"
            }
            Some(Errno::NOSPC | Errno::DQUOT) => {
                "delete volumes or snapshots, or grow its file system"
            }
            Some(Errno::NOLCK | Errno::OPNOTSUPP) => {
                "use a file system with locks and hard links; of NFS, version 4"
            }
            _ => "look at its disk or server, and at the kernel's log (dmesg)",
        },
        _ => "correct --pool",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Scope;

    #[test]
    fn a_pool_is_tried_out_and_left_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let pool = Pool {
            name: "p".to_owned(),
            dir: dir.path().to_owned(),
            scope: Scope::Local,
            mounted: false,
        };
        let found = pool.inspect().state.unwrap();
        assert!(found.starts_with("writable, "), "{found}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);

        pool.initialize().unwrap();
        let found = pool.inspect().state.unwrap();
        assert!(found.starts_with("writable, "), "{found}");
        let tmp = pool.meta_path("tmp");
        assert_eq!(std::fs::read_dir(&tmp).unwrap().count(), 0);

        // Where its files belong is a file: nothing can be written there.
        std::fs::remove_dir(&tmp).unwrap();
        std::fs::write(&tmp, "").unwrap();
        let fault = pool.inspect().state.unwrap_err();
        assert!(fault.what.contains("tmp"), "{fault:?}");

        let scoped = Pool {
            scope: Scope::Shared,
            ..pool.clone()
        };
        let fault = scoped.inspect().state.unwrap_err();
        assert!(fault.remedy.contains("scope"), "{fault:?}");
        let unmounted = Pool {
            mounted: true,
            ..pool
        };
        let fault = unmounted.inspect().state.unwrap_err();
        assert!(fault.remedy.contains("mount it"), "{fault:?}");
    }
}
