//! A cluster and the objects in its pools, by librados.
//!
//! ```text
//! Cluster            a connection, as one user; shared by many threads
//!   └─ IoCtx         a pool and a namespace in it
//!        ├─ omap     keys and values of an object: ceph-csi's journal
//!        └─ Image    an open image (module rbd)
//! ```
//!
//! Each holds on to what is above it, so a connection ends when the last that
//! uses it is dropped; that may block, as every call here may, though never
//! longer than its [`Timeouts`].
//!
//! Sources: `<rados/librados.h>`; which of its calls may be made from several
//! threads at once is said at `rados_ioctx_set_namespace` and the other few that
//! change a handle, which are made here before a handle is handed out.

use std::{
    fmt, ptr,
    sync::{
        Arc,
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
mod object;
mod omap;
#[cfg(test)]
mod tests;
mod write;

pub use connect::Timeouts;
pub use ioctx::{IoCtx, PoolRef};
pub use write::WriteOp;

/// A connection to a cluster.
pub struct Cluster {
    raw: abi::Cluster,
    libraries: &'static Libraries,
    /// As which user, for errors.
    user: String,
    fsid: String,
    /// Whether a call has shown that a new connection is needed.
    lost: AtomicBool,
}

// SAFETY: a `rados_t` may be used from any thread.
unsafe impl Send for Cluster {}
// SAFETY: librados takes its own locks; every function called here takes the
// handle as const or changes what those locks guard.
unsafe impl Sync for Cluster {}

impl Cluster {
    /// The cluster's id, a UUID.
    pub fn fsid(&self) -> &str {
        &self.fsid
    }

    /// The number that this connection has in the cluster: in an image's watchers,
    /// it stands for us.
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
        self.call("tell", || "the address of this client".to_owned())
            .check(answer)?;
        // SAFETY: the library made the text, which ends in NUL, and it is not used
        // any more once it is freed.
        unsafe {
            let address = owned(text);
            (functions.rados_buffer_free)(text);
            Ok(address)
        }
    }

    /// Whether a call found this connection fenced, or had no answer in time;
    /// then a new one is to be made.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// The id of the pool of that name. A name that is not known is looked up
    /// again in the cluster's newest map.
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

    /// Looks again in the newest map where the one at hand lacks what is sought:
    /// it may have been made a moment ago.
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
            // SAFETY: the library writes at most as many bytes as there are.
            let needed =
                unsafe { (self.libraries.rados.rados_pool_list)(self.raw, space, names.len()) };
            call.check(needed)?;
            let needed = usize::try_from(needed).unwrap_or_default();
            if needed <= names.len() {
                let mut names = texts(&names[..needed]);
                // An empty one ends the list.
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

    /// What the two libraries offer.
    pub(super) fn libraries(&self) -> &'static Libraries {
        self.libraries
    }

    /// A call that is about to be made, with the words for its error.
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
        write!(f, "Cluster({} as client.{})", self.fsid, self.user)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: all that was made from this handle held on to it, and is gone.
            unsafe { (self.libraries.rados.rados_shutdown)(self.raw) };
        }
    }
}
