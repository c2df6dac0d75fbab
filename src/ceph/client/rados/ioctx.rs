//! A pool, and a namespace in it.

use std::{fmt, ptr, sync::Arc};

use super::{Cluster, abi};
use crate::ceph::client::{CephError, call::LibraryCall};

/// A pool, by its name or its id.
#[derive(Clone, Copy, Debug)]
pub enum PoolRef<'a> {
    /// The name, which may be given to another pool later.
    Name(&'a str),
    /// The id, which stays when the pool is renamed.
    Id(i64),
}

impl<'a> From<&'a str> for PoolRef<'a> {
    fn from(name: &'a str) -> Self {
        Self::Name(name)
    }
}

impl<'a> From<&'a String> for PoolRef<'a> {
    fn from(name: &'a String) -> Self {
        Self::Name(name)
    }
}

impl From<i64> for PoolRef<'_> {
    fn from(id: i64) -> Self {
        Self::Id(id)
    }
}

/// A pool and a namespace in it. Clones share one handle; shown as
/// `pool[/namespace]`.
#[derive(Clone)]
pub struct IoCtx(Arc<Inner>);

struct Inner {
    raw: abi::IoCtx,
    pool_id: i64,
    pool: String,
    namespace: String,
    /// The connection must outlive the handle.
    cluster: Arc<Cluster>,
}

// SAFETY: a `rados_ioctx_t` may be used from any thread.
unsafe impl Send for Inner {}
// SAFETY: several threads may use it at once as long as none changes its namespace,
// snapshot or locator; the namespace is set before it is shared, the others never.
unsafe impl Sync for Inner {}

impl IoCtx {
    pub(super) fn new(
        cluster: &Arc<Cluster>,
        pool: PoolRef<'_>,
        namespace: &str,
    ) -> Result<Self, CephError> {
        let (pool_id, pool) = match pool {
            PoolRef::Name(name) => (cluster.pool_id(name)?, name.to_owned()),
            PoolRef::Id(id) => (id, cluster.pool_name(id)?),
        };
        let call = cluster.call("use", || format!("pool {pool}"));
        let name = call.text(namespace)?;
        let mut raw = ptr::null_mut();
        let functions = &cluster.libraries.rados;
        // SAFETY: the cluster is connected, and `raw` outlives the call.
        call.check(unsafe { (functions.rados_ioctx_create2)(cluster.raw, pool_id, &raw mut raw) })?;
        // SAFETY: no other thread has the handle yet; the library copies the name.
        unsafe { (functions.rados_ioctx_set_namespace)(raw, name.as_ptr()) };
        // While the pool or the cluster is full, writes would wait for room until they time
        // out, and so would a delete, which makes it. With this flag the OSD carries out what
        // needs no room, and refuses the rest at once ([`CephError::is_full`]). Images that
        // are opened by this handle inherit it.
        if let Ok(try_full) = functions.rados_set_pool_full_try() {
            // SAFETY: no other thread has the handle yet.
            unsafe { try_full(raw) };
        }
        Ok(Self(Arc::new(Inner {
            raw,
            pool_id,
            pool,
            namespace: namespace.to_owned(),
            cluster: cluster.clone(),
        })))
    }

    /// The pool's number, which stays when the pool is renamed.
    pub fn pool_id(&self) -> i64 {
        self.0.pool_id
    }

    /// The pool's name, as it was when this handle was created.
    pub fn pool(&self) -> &str {
        &self.0.pool
    }

    /// The namespace; empty is the pool's own.
    pub fn namespace(&self) -> &str {
        &self.0.namespace
    }

    /// The connection by which it was created.
    pub fn cluster(&self) -> &Arc<Cluster> {
        &self.0.cluster
    }

    pub(in crate::ceph::client) fn raw(&self) -> abi::IoCtx {
        self.0.raw
    }

    /// Waits until the callbacks of the library that have begun have returned. A connection
    /// runs its callbacks one after the other, so the callback of a flush comes after them.
    /// The flush itself waits for nothing: it is for asynchronous writes, of which this
    /// handle has none.
    pub(in crate::ceph::client) fn wait_for_callbacks(&self) {
        let functions = &self.0.cluster.libraries.rados;
        let mut flushed = ptr::null_mut();
        // SAFETY: the handle is valid; the completion is released once, and not used later.
        unsafe {
            if (functions.rados_aio_create_completion2)(ptr::null_mut(), None, &raw mut flushed) < 0
            {
                return;
            }
            if (functions.rados_aio_flush_async)(self.0.raw, flushed) >= 0 {
                (functions.rados_aio_wait_for_complete)(flushed);
            }
            (functions.rados_aio_release)(flushed);
        }
    }

    /// A call on an object of this pool and namespace, by its kind and name.
    pub(in crate::ceph::client) fn call(
        &self,
        operation: &'static str,
        kind: &'static str,
        name: &str,
    ) -> LibraryCall<'_, impl Fn() -> String> {
        let object = move || format!("{kind} {self}/{name}");
        self.0.cluster.call(operation, object)
    }
}

impl fmt::Display for IoCtx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.pool)?;
        match self.0.namespace.as_str() {
            "" => Ok(()),
            namespace => write!(f, "/{namespace}"),
        }
    }
}

impl fmt::Debug for IoCtx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IoCtx({self})")
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: the last user of the handle is gone.
        unsafe { (self.cluster.libraries.rados.rados_ioctx_destroy)(self.raw) };
    }
}
