//! Commands to the daemons that run a cluster, as `ceph` sends them.

use std::{
    ffi::{CString, c_char, c_int},
    ptr,
};

use rustix::io::Errno;

use super::{Cluster, abi};
use crate::ceph::client::CephError;

/// The type of `rados_mon_command` and `rados_mgr_command`.
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

impl Cluster {
    /// Sends the monitors one command in JSON, such as
    /// `{"prefix": "df", "format": "json"}`, and returns its output.
    pub fn mon_command(&self, command: &serde_json::Value) -> Result<Vec<u8>, CephError> {
        self.command(self.libraries.rados.rados_mon_command, "monitor", command)
    }

    /// Sends the manager a command, on a connection without timeout.
    pub(super) fn ask_manager(&self, command: &serde_json::Value) -> Result<Vec<u8>, CephError> {
        self.command(self.libraries.rados.rados_mgr_command, "manager", command)
    }

    fn command(
        &self,
        run: CommandFn,
        daemon: &str,
        command: &serde_json::Value,
    ) -> Result<Vec<u8>, CephError> {
        let prefix = command["prefix"].as_str().unwrap_or_default();
        let mut explained = String::new();
        let text = CString::new(command.to_string());
        let text = text.map_err(|_| self.call("run", || prefix.to_owned()).error(Errno::INVAL))?;
        let commands = [text.as_ptr()];
        let (mut output, mut output_len) = (ptr::null_mut(), 0);
        let (mut status, mut status_len) = (ptr::null_mut(), 0);
        // SAFETY: one command that ends in NUL, no input, and four variables for
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
            explained = format!(" ({})", String::from_utf8_lossy(&status).trim());
        }
        let call = self.call("run", || {
            format!("the {daemon} command \"{prefix}\"{explained}")
        });
        call.check(ran)?;
        Ok(output)
    }

    /// Copies a buffer that the library allocated, and frees it.
    ///
    /// # Safety
    ///
    /// `buffer` is null or was allocated by the library, with `len` bytes.
    pub(super) unsafe fn take(&self, buffer: *mut c_char, len: usize) -> Vec<u8> {
        if buffer.is_null() {
            return Vec::new();
        }
        // SAFETY: as this function requires.
        unsafe {
            let bytes = std::slice::from_raw_parts(buffer.cast::<u8>(), len).to_vec();
            (self.libraries.rados.rados_buffer_free)(buffer);
            bytes
        }
    }
}
