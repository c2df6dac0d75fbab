//! Errors of Ceph's libraries, and their meaning.

use std::path::PathBuf;

use rustix::io::Errno;

use super::{library::MissingLibrary, monitor::MonitorError};

/// A call to Ceph that failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CephError {
    /// librados or librbd is missing.
    #[error(transparent)]
    Library(#[from] MissingLibrary),
    /// No monitor of the cluster can be used.
    #[error(transparent)]
    Monitors(#[from] MonitorError),
    /// Nothing was asked: the network namespace of the cluster cannot be entered.
    ///
    /// Remedy: correct netNamespaceFilePath in the file of --ceph-config, or create the namespace
    /// (`ip netns add`).
    #[error("could not enter network namespace {}", file.display())]
    NetNamespace {
        /// The namespace's file.
        file: PathBuf,
        /// Why it cannot.
        #[source]
        errno: Errno,
    },
    /// Nothing was asked: an earlier command to the manager has no answer yet, or took the
    /// time of this one. No errno, as the manager may answer any.
    #[error(
        "did not run the manager command {command}, as an earlier one, {earlier}, has no answer yet, \
         or took too long; `ceph mgr fail` replaces a manager that hangs"
    )]
    ManagerOverdue {
        /// The command's name.
        command: String,
        /// The earlier command's name.
        earlier: String,
    },
    /// A library returned an error.
    ///
    /// Remedy: look at the cluster: `ceph -s`, and the user's rights: `ceph auth get client.USER`.
    #[error("could not {operation} {object}{}", hint(*errno))]
    Failed {
        /// The operation, such as "open".
        operation: &'static str,
        /// Its object, such as "image rbd/csi-vol-1".
        object: String,
        /// The errno that the library returned.
        #[source]
        errno: Errno,
    },
}

/// Success if the object exists already.
pub fn or_exists(result: Result<(), CephError>) -> Result<(), CephError> {
    match result {
        Err(error) if error.is_exists() => Ok(()),
        result => result,
    }
}

/// Success if the object does not exist.
pub fn or_missing(result: Result<(), CephError>) -> Result<(), CephError> {
    match result {
        Err(error) if error.is_not_found() => Ok(()),
        result => result,
    }
}

/// A hint on an errno.
fn hint(errno: Errno) -> &'static str {
    match errno {
        Errno::ACCESS | Errno::PERM => {
            ", as the cluster refuses the user: check userID, userKey and the user's caps"
        }
        Errno::SHUTDOWN => ", as this client is blocklisted",
        Errno::TIMEDOUT => {
            ", as no answer came in time (the cluster may still carry the request out)"
        }
        Errno::ROFS => ", as another client holds the image's lock, or a mirror writes it",
        _ => "",
    }
}

impl CephError {
    pub(super) fn new(operation: &'static str, object: String, errno: Errno) -> Self {
        Self::Failed {
            operation,
            object,
            errno,
        }
    }

    /// The errno that the library returned; none if it was not called.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Failed { errno, .. } => Some(*errno),
            Self::Library(_)
            | Self::Monitors(_)
            | Self::NetNamespace { .. }
            | Self::ManagerOverdue { .. } => None,
        }
    }

    fn is(&self, errno: Errno) -> bool {
        self.errno() == Some(errno)
    }

    /// The object, image, snapshot, key or pool does not exist.
    pub fn is_not_found(&self) -> bool {
        self.is(Errno::NOENT)
    }

    /// The object exists already.
    pub fn is_exists(&self) -> bool {
        self.is(Errno::EXIST)
    }

    /// The object is in use, by a watcher, a snapshot or a child.
    pub fn is_busy(&self) -> bool {
        self.is(Errno::BUSY)
    }

    /// No answer came in time. A change that timed out is uncertain: it may have
    /// been made, or may be made yet.
    pub fn is_timed_out(&self) -> bool {
        matches!(self, Self::Monitors(MonitorError::Unanswered(_))) || self.is(Errno::TIMEDOUT)
    }

    /// As [`Self::is_timed_out`]; or nothing was asked, since an earlier command to the manager
    /// has no answer yet. EAGAIN is an answer: a module of the manager that is not ready
    /// refuses by it, perhaps for good.
    pub fn is_unanswered(&self) -> bool {
        self.is_timed_out() || matches!(self, Self::ManagerOverdue { .. })
    }

    /// The cluster has fenced this client; a new connection is a new client.
    pub fn is_blocklisted(&self) -> bool {
        self.is(Errno::SHUTDOWN)
    }

    /// The key is wrong, or the user's capabilities do not allow it.
    pub fn is_access_denied(&self) -> bool {
        self.is(Errno::ACCESS) || self.is(Errno::PERM)
    }

    /// The cluster, the pool or a quota has no room.
    pub fn is_full(&self) -> bool {
        self.is(Errno::NOSPC) || self.is(Errno::DQUOT)
    }

    /// A [`compare`](super::rados::WriteOp::compare) found another value, and
    /// nothing was changed.
    pub fn is_mismatch(&self) -> bool {
        self.is(Errno::CANCELED)
    }

    /// The object is in another state than expected.
    pub fn is_stale(&self) -> bool {
        self.is(Errno::STALE)
    }

    /// The library does not accept an argument.
    pub fn is_invalid(&self) -> bool {
        self.is(Errno::INVAL)
    }
}
