//! A cluster and the objects in its pools, by librados.
//!
//! ```text
//! Cluster            a connection, as one user; shared by many threads
//!   └─ IoCtx         a pool and a namespace in it
//!        ├─ omap     keys and values of an object: ceph-csi's journal
//!        └─ Image    an open image (module rbd)
//! ```
//!
//! Each keeps a reference to the one above it, so a connection ends when its last user is
//! dropped. That may block, as every call here may, for at most the connection's
//! [`Timeouts`]; only a notification may block for longer.
//!
//! Source: `<rados/librados.h>`. Any thread may call a function at any time, except
//! `rados_ioctx_set_namespace` and the few others that change a handle, as the header says
//! at each; here they are called before other threads get the handle.

use std::{
    fmt, ptr,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use super::{
    CephError,
    call::{LibraryCall, owned, texts},
    library::{Libraries, rados as abi},
};

mod command;
mod connect;
mod ioctx;
mod lock;
mod manager;
mod object;
mod omap;
#[cfg(test)]
mod tests;
mod write;

use connect::Origin;
pub use connect::Timeouts;
pub use ioctx::{IoCtx, PoolRef};
pub use lock::ObjectLock;
use manager::ManagerCommands;
pub use omap::OmapPage;
pub use write::WriteOp;

/// A connection to a cluster.
pub struct Cluster {
    raw: abi::Cluster,
    libraries: &'static Libraries,
    fsid: String,
    /// Set when a call shows that a new connection is needed.
    lost: Arc<AtomicBool>,
    /// How it was made.
    origin: Arc<Origin>,
    manager: Arc<ManagerCommands>,
}

// SAFETY: a `rados_t` may be used from any thread.
unsafe impl Send for Cluster {}
// SAFETY: librados takes its own locks; every function called here takes the
// handle as const, or changes only data under those locks.
unsafe impl Sync for Cluster {}

impl Cluster {
    /// The cluster's id, a UUID.
    pub fn fsid(&self) -> &str {
        &self.fsid
    }

    /// The number of this connection in the cluster, as in the watchers of an image.
    pub fn instance_id(&self) -> u64 {
        // SAFETY: the handle is connected.
        unsafe { (self.libraries.rados.rados_get_instance_id)(self.raw) }
    }

    /// This connection's address as the cluster sees it.
    pub fn address(&self) -> Result<String, CephError> {
        let functions = &self.libraries.rados;
        let mut text = ptr::null_mut();
        // SAFETY: the handle is connected, and `text` outlives the call.
        let answer = unsafe { (functions.rados_getaddrs)(self.raw, &raw mut text) };
        self.call("read", || "the address of this client".to_owned())
            .check(answer)?;
        // SAFETY: the library made the text, which ends in NUL, and it is not used
        // any more once it is freed.
        unsafe {
            let address = owned(text);
            (functions.rados_buffer_free)(text);
            Ok(address)
        }
    }

    /// Whether a call found this connection fenced, or got no answer in time, so that a new
    /// connection is needed.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// [`Self::is_lost`] for a thread on which this connection must not end; it dies with
    /// this connection.
    pub fn lost_mark(&self) -> Weak<AtomicBool> {
        Arc::downgrade(&self.lost)
    }

    /// The id of the pool of that name. An unknown name is looked up again in the cluster's
    /// newest map.
    pub fn pool_id(&self, name: &str) -> Result<i64, CephError> {
        let call = self.call("find", || format!("pool {name}"));
        let text = call.text(name)?;
        self.in_newest_map(|| {
            // SAFETY: the name ends in NUL.
            let id = unsafe { (self.libraries.rados.rados_pool_lookup)(self.raw, text.as_ptr()) };
            call.check64(id)
        })
    }

    /// The name of the pool with that id; see [`Self::pool_id`].
    pub fn pool_name(&self, id: i64) -> Result<String, CephError> {
        let call = self.call("find", || format!("pool {id}"));
        self.in_newest_map(|| {
            call.string(|name, len| {
                // SAFETY: the library writes at most `len` bytes at `name`.
                unsafe { (self.libraries.rados.rados_pool_reverse_lookup)(self.raw, id, name, len) }
            })
        })
    }

    /// Repeats a lookup that failed in the newest map: the pool may be newer than the map of
    /// this connection.
    fn in_newest_map<T>(&self, find: impl Fn() -> Result<T, CephError>) -> Result<T, CephError> {
        match find() {
            Err(error) if error.is_not_found() => {
                let call = self.call("wait for", || "the newest map".to_owned());
                // SAFETY: the handle is connected.
                call.check(unsafe {
                    (self.libraries.rados.rados_wait_for_latest_osdmap)(self.raw)
                })?;
                find()
            }
            result => result,
        }
    }

    /// The names of all pools.
    pub fn pools(&self) -> Result<Vec<String>, CephError> {
        let call = self.call("list", || "the pools".to_owned());
        let mut names = vec![0; 1024];
        loop {
            let space = names.as_mut_ptr().cast();
            // SAFETY: the library writes at most `names.len()` bytes.
            let needed =
                unsafe { (self.libraries.rados.rados_pool_list)(self.raw, space, names.len()) };
            call.check(needed)?;
            let needed = usize::try_from(needed).unwrap_or_default();
            if needed <= names.len() {
                let mut names = texts(&names[..needed]);
                // An empty name ends the list.
                names.retain(|name| !name.is_empty());
                return Ok(names);
            }
            names.resize(needed, 0);
        }
    }

    /// A pool, by name or id, and a namespace in it; the empty one is the pool's own.
    pub fn ioctx<'a>(
        self: &Arc<Self>,
        pool: impl Into<PoolRef<'a>>,
        namespace: &str,
    ) -> Result<IoCtx, CephError> {
        IoCtx::new(self, pool.into(), namespace)
    }

    /// The functions of both libraries.
    pub(super) fn libraries(&self) -> &'static Libraries {
        self.libraries
    }

    /// A call that is about to be made; its error names `operation` and `object`.
    pub(super) fn call<F: Fn() -> String>(
        &self,
        operation: &'static str,
        object: F,
    ) -> LibraryCall<'_, F> {
        LibraryCall::new(&self.lost, operation, object)
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cluster({} as client.{})", self.fsid, self.origin.user())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: all handles made from this one kept a reference to it, and are gone.
            unsafe { (self.libraries.rados.rados_shutdown)(self.raw) };
        }
    }
}
