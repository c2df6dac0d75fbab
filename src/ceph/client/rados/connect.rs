//! Making a connection, with its timeouts.

use std::{
    ffi::CStr,
    ptr,
    sync::{Arc, Once},
    time::{Duration, Instant},
};

use rustix::io::Errno;
use zeroize::Zeroizing;

use super::Cluster;
use crate::ceph::client::{
    CephError, Credentials,
    library::{Libraries, end_at_once},
    monitor,
};

/// The timeouts of a cluster. The library counts whole seconds.
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

/// By what a connection is made.
#[derive(Clone, Debug)]
pub(super) struct Origin {
    monitors: Vec<String>,
    credentials: Credentials,
    pub timeouts: Timeouts,
}

impl Origin {
    pub fn user(&self) -> &str {
        &self.credentials.user
    }
}

impl Cluster {
    /// Connects to the cluster of these monitors, each as `mon_host` takes it.
    ///
    /// No `ceph.conf`, keyring or environment is read. The key is passed in
    /// memory; the library keeps it as long as the connection lasts.
    pub fn connect(
        monitors: &[String],
        credentials: &Credentials,
        timeouts: Timeouts,
    ) -> Result<Arc<Self>, CephError> {
        let origin = Arc::new(Origin {
            monitors: monitors.to_vec(),
            credentials: credentials.clone(),
            timeouts,
        });
        Self::connect_as(&origin, Some(timeouts.operation))
    }

    /// Another connection of that origin, for commands to the manager.
    pub(super) fn connect_to_manager(origin: &Origin) -> Result<Arc<Self>, CephError> {
        Self::connect_as(&Arc::new(origin.clone()), None)
    }

    /// Without `command_timeout` a command waits for its answer as long as it takes.
    fn connect_as(
        origin: &Arc<Origin>,
        command_timeout: Option<Duration>,
    ) -> Result<Arc<Self>, CephError> {
        // The libraries register exit handlers also when they first connect.
        static FIRST: Once = Once::new();
        let libraries = Libraries::load()?;
        let monitors = &origin.monitors;
        // The library would only report a timeout, not the error of each monitor.
        let deadline = Instant::now() + origin.timeouts.connect;
        monitor::answers(monitors, deadline)?;
        let mut cluster = Self::create(libraries, origin)?;
        let connect = deadline.saturating_duration_since(Instant::now());
        cluster.configure(connect, command_timeout)?;
        let at_monitors = || format!("the cluster at {}", monitors.join(","));
        let call = cluster.call("connect to", at_monitors);
        // SAFETY: the handle is configured and not yet connected.
        let connected = call.check(unsafe { (libraries.rados.rados_connect)(cluster.raw) });
        connected.map_err(|error| match error.errno() {
            // The cluster has no such user.
            Some(Errno::NOENT) => call.error(Errno::ACCESS),
            _ => error,
        })?;
        FIRST.call_once(end_at_once);
        cluster.fsid = cluster.read_fsid()?;
        Ok(Arc::new(cluster))
    }

    fn create(libraries: &'static Libraries, origin: &Arc<Origin>) -> Result<Self, CephError> {
        let user = origin.user();
        let mut cluster = Self {
            raw: ptr::null_mut(),
            libraries,
            fsid: String::new(),
            lost: Arc::default(),
            origin: origin.clone(),
            manager: Arc::default(),
        };
        let call = cluster.call("create", || format!("a connection as client.{user}"));
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
        connect: Duration,
        command_timeout: Option<Duration>,
    ) -> Result<(), CephError> {
        let Origin {
            monitors,
            credentials,
            timeouts,
        } = &*self.origin;
        let seconds = |time: Duration| time.as_millis().div_ceil(1000).max(1).to_string();
        let command = command_timeout.map_or_else(|| "0".to_owned(), seconds);
        let monitors = monitors.join(",");
        let settings = [
            ("mon_host", monitors.as_str()),
            ("keyring", ""),
            ("client_mount_timeout", &seconds(connect)),
            ("rados_mon_op_timeout", &command),
            ("rados_osd_op_timeout", &seconds(timeouts.operation)),
            // Errors are returned; the library needs no log and no socket.
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
        // A `CString` would leave a copy of the key in memory.
        let mut key = Zeroizing::new(credentials.key.reveal().as_bytes().to_vec());
        key.push(0);
        let call = self.call("set", || "key".to_owned());
        let key = CStr::from_bytes_with_nul(&key).map_err(|_| call.error(Errno::INVAL))?;
        self.set(c"key", key)
    }

    fn set(&self, option: &CStr, value: &CStr) -> Result<(), CephError> {
        let call = self.call("set", || option.to_string_lossy().into_owned());
        // SAFETY: both end in NUL, and the library copies them.
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
}
