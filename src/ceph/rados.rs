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
    ffi::{CStr, CString, c_char, c_int},
    fmt, ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::io::Errno;
use zeroize::Zeroizing;

use super::{
    CephError, Credentials,
    call::{Call, texts},
    library::{Libraries, rados as abi},
    monitor,
};

mod ioctx;
mod omap;
#[cfg(test)]
mod tests;

pub use ioctx::{IoCtx, Pool};
pub use omap::{Page, WriteOp};

/// How long a cluster may take. The library counts whole seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// To connect, from the first packet to the cluster's map.
    pub connect: Duration,
    /// To answer one request, of a monitor or an OSD.
    pub operation: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            operation: Duration::from_secs(30),
        }
    }
}

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

/// What a cluster holds, in bytes, of all pools and copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// All of its devices.
    pub total: u64,
    /// What is in use of them.
    pub used: u64,
    /// What is not.
    pub available: u64,
}

impl Cluster {
    /// Connects to the cluster of these monitors, each as `mon_host` takes it.
    ///
    /// No `ceph.conf`, keyring or environment is read. The key is handed over in
    /// memory; the library keeps it for as long as the connection lasts.
    pub fn connect(
        monitors: &[String],
        credentials: &Credentials,
        timeouts: Timeouts,
    ) -> Result<Arc<Self>, CephError> {
        let libraries = Libraries::load()?;
        // The library would only say that the time is over, not what each monitor did.
        let deadline = Instant::now() + timeouts.connect;
        monitor::answers(monitors, deadline)?;
        let timeouts = Timeouts {
            connect: deadline.saturating_duration_since(Instant::now()),
            ..timeouts
        };
        let mut cluster = Self::create(libraries, &credentials.user)?;
        cluster.configure(monitors, credentials, timeouts)?;
        let joined = || format!("the cluster at {}", monitors.join(","));
        let call = cluster.call("connect to", joined);
        // SAFETY: the handle is configured and not yet connected.
        let connected = call.check(unsafe { (libraries.rados.rados_connect)(cluster.raw) });
        connected.map_err(|error| match error.errno() {
            // There is no such user.
            Some(Errno::NOENT) => call.error(Errno::ACCESS),
            _ => error,
        })?;
        cluster.fsid = cluster.read_fsid()?;
        Ok(Arc::new(cluster))
    }

    fn create(libraries: &'static Libraries, user: &str) -> Result<Self, CephError> {
        let mut cluster = Self {
            raw: ptr::null_mut(),
            libraries,
            user: user.to_owned(),
            fsid: String::new(),
            lost: AtomicBool::new(false),
        };
        let call = cluster.call("be", || format!("client.{user}"));
        let name = call.text(&format!("client.{user}"))?;
        let mut raw = ptr::null_mut();
        // SAFETY: both names end in NUL, and `raw` outlives the call.
        let created = unsafe {
            (libraries.rados.rados_create2)(&raw mut raw, c"ceph".as_ptr(), name.as_ptr(), 0)
        };
        call.check(created)?;
        cluster.raw = raw;
        Ok(cluster)
    }

    fn configure(
        &self,
        monitors: &[String],
        credentials: &Credentials,
        timeouts: Timeouts,
    ) -> Result<(), CephError> {
        let seconds = |time: Duration| time.as_millis().div_ceil(1000).max(1).to_string();
        let operation = seconds(timeouts.operation);
        let monitors = monitors.join(",");
        let settings = [
            ("mon_host", monitors.as_str()),
            ("keyring", ""),
            ("client_mount_timeout", &seconds(timeouts.connect)),
            ("rados_mon_op_timeout", &operation),
            ("rados_osd_op_timeout", &operation),
            // What happens is told by the error; no file or socket of its own.
            ("log_to_stderr", "false"),
            ("err_to_stderr", "false"),
            ("log_file", ""),
            ("admin_socket", ""),
            // No image's data goes through here.
            ("rbd_cache", "false"),
        ];
        for (option, value) in settings {
            let call = self.call("set", || option.to_owned());
            self.set(&call.text(option)?, &call.text(value)?)?;
        }
        // A `CString` would leave a copy behind.
        let mut key = Zeroizing::new(credentials.key.reveal().as_bytes().to_vec());
        key.push(0);
        let call = self.call("set", || "key".to_owned());
        let key = CStr::from_bytes_with_nul(&key).map_err(|_| call.error(Errno::INVAL))?;
        self.set(c"key", key)
    }

    fn set(&self, option: &CStr, value: &CStr) -> Result<(), CephError> {
        let call = self.call("set", || option.to_string_lossy().into_owned());
        // SAFETY: both end in NUL and are copied by the library.
        call.check(unsafe {
            (self.libraries.rados.rados_conf_set)(self.raw, option.as_ptr(), value.as_ptr())
        })
    }

    fn read_fsid(&self) -> Result<String, CephError> {
        let call = self.call("read", || "the cluster's fsid".to_owned());
        call.string(|text, len| {
            // SAFETY: the library writes at most `len` bytes at `text`.
            unsafe { (self.libraries.rados.rados_cluster_fsid)(self.raw, text, len) }
        })
    }

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

    /// Whether a call found this connection fenced, or had no answer in time;
    /// then a new one is to be made.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// A call has shown it.
    pub(super) fn lose(&self) {
        self.lost.store(true, Ordering::Relaxed);
    }

    /// How full the cluster is.
    pub fn usage(&self) -> Result<Usage, CephError> {
        let call = self.call("read", || "the cluster's usage".to_owned());
        let mut stat = abi::ClusterStat::default();
        // SAFETY: `stat` has the library's layout.
        call.check(unsafe { (self.libraries.rados.rados_cluster_stat)(self.raw, &raw mut stat) })?;
        Ok(Usage {
            total: stat.kb * 1024,
            used: stat.kb_used * 1024,
            available: stat.kb_avail * 1024,
        })
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

    /// Asks the monitors: one command in JSON, such as
    /// `{"prefix": "df", "format": "json"}`. The answer is what the command prints.
    pub fn mon_command(&self, command: &serde_json::Value) -> Result<Vec<u8>, CephError> {
        self.command(self.libraries.rados.rados_mon_command, "monitor", command)
    }

    /// Asks the manager, as [`Self::mon_command`] asks the monitors.
    pub fn mgr_command(&self, command: &serde_json::Value) -> Result<Vec<u8>, CephError> {
        self.command(self.libraries.rados.rados_mgr_command, "manager", command)
    }

    fn command(
        &self,
        run: CommandFn,
        whose: &str,
        command: &serde_json::Value,
    ) -> Result<Vec<u8>, CephError> {
        let prefix = command["prefix"].as_str().unwrap_or_default();
        let mut said = String::new();
        let text = CString::new(command.to_string());
        let text = text.map_err(|_| self.call("run", || prefix.to_owned()).error(Errno::INVAL))?;
        let commands = [text.as_ptr()];
        let (mut output, mut output_len) = (ptr::null_mut(), 0);
        let (mut status, mut status_len) = (ptr::null_mut(), 0);
        // SAFETY: one command that ends in NUL, no input, and four places for
        // buffers that the library allocates and `take` frees.
        let (ran, output, status) = unsafe {
            let ran = run(
                self.raw,
                commands.as_ptr(),
                commands.len(),
                ptr::null(),
                0,
                &raw mut output,
                &raw mut output_len,
                &raw mut status,
                &raw mut status_len,
            );
            (
                ran,
                self.take(output, output_len),
                self.take(status, status_len),
            )
        };
        if !status.is_empty() {
            said = format!(" ({})", String::from_utf8_lossy(&status).trim());
        }
        let call = self.call("run", || format!("the {whose} command \"{prefix}\"{said}"));
        call.check(ran)?;
        Ok(output)
    }

    /// Copies a buffer of the library's and frees it.
    ///
    /// # Safety
    ///
    /// `buffer` is null or was allocated by the library, with `len` bytes.
    unsafe fn take(&self, buffer: *mut c_char, len: usize) -> Vec<u8> {
        if buffer.is_null() {
            return Vec::new();
        }
        // SAFETY: as this function asks for.
        unsafe {
            let bytes = std::slice::from_raw_parts(buffer.cast::<u8>(), len).to_vec();
            (self.libraries.rados.rados_buffer_free)(buffer);
            bytes
        }
    }

    /// A pool, by name or id, and a namespace in it; the empty one is the pool's own.
    pub fn ioctx<'a>(
        self: &Arc<Self>,
        pool: impl Into<Pool<'a>>,
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
    ) -> Call<'_, F> {
        Call::new(self, operation, object)
    }
}

/// `rados_mon_command` and those like it.
type CommandFn = unsafe extern "C" fn(
    abi::Cluster,
    *const *const c_char,
    usize,
    *const c_char,
    usize,
    *mut *mut c_char,
    *mut usize,
    *mut *mut c_char,
    *mut usize,
) -> c_int;

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
