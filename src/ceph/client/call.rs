//! One call of a library: converts its arguments to C's types, its result to Rust's, and
//! its failure to a [`CephError`].

use std::{
    ffi::{CStr, CString, c_char, c_int},
    sync::atomic::{AtomicBool, Ordering},
};

use rustix::io::Errno;

use super::CephError;
use crate::crash_point;

/// A call that is about to be made; its error names `operation` and `object`.
pub(super) struct LibraryCall<'a, F> {
    lost: &'a AtomicBool,
    operation: &'static str,
    object: F,
}

impl<'a, F: Fn() -> String> LibraryCall<'a, F> {
    /// Sets `lost` if the call shows that its connection is lost.
    pub fn new(lost: &'a AtomicBool, operation: &'static str, object: F) -> Self {
        Self {
            lost,
            operation,
            object,
        }
    }

    /// The error of this call for `errno`. Sets `lost` if the connection is fenced or does
    /// not answer.
    pub fn error(&self, errno: Errno) -> CephError {
        if matches!(errno, Errno::SHUTDOWN | Errno::TIMEDOUT | Errno::NOTCONN) {
            self.lost.store(true, Ordering::Relaxed);
        }
        CephError::new(self.operation, (self.object)(), errno)
    }

    /// A text for C; one that contains a NUL is an invalid argument.
    pub fn text(&self, text: &str) -> Result<CString, CephError> {
        CString::new(text).map_err(|_| self.error(Errno::INVAL))
    }

    /// Turns a negative result into an error.
    pub fn check(&self, answer: c_int) -> Result<(), CephError> {
        self.check64(answer.into()).map(drop)
    }

    /// [`Self::check`] for a call that makes a change, after which tests crash the process.
    pub fn changed(&self, answer: c_int) -> Result<(), CephError> {
        crash_point();
        self.check(answer)
    }

    /// [`Self::check`] for a call whose result is a value.
    pub fn check64(&self, answer: i64) -> Result<i64, CephError> {
        if answer >= 0 {
            return Ok(answer);
        }
        let errno = i32::try_from(-answer).unwrap_or(libc::EIO);
        Err(self.error(Errno::from_raw_os_error(errno)))
    }

    /// Calls `write` with a buffer for a text, and with a larger one while the result is
    /// `-ERANGE`.
    pub fn string(
        &self,
        mut write: impl FnMut(*mut c_char, usize) -> c_int,
    ) -> Result<String, CephError> {
        let mut buffer = vec![0_u8; 128];
        loop {
            let answer = write(buffer.as_mut_ptr().cast(), buffer.len());
            if answer == -libc::ERANGE && buffer.len() < MAX_TEXT {
                buffer.resize(buffer.len() * 4, 0);
                continue;
            }
            self.check(answer)?;
            // The text ends even if the library wrote no NUL.
            buffer.push(0);
            let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
            return Ok(text.to_string_lossy().into_owned());
        }
    }

    /// Calls `write` with a buffer for rows, and with a larger one while the result is
    /// `-ERANGE`; the library then sets the number of rows. The caller frees the rows by
    /// the library's function for that.
    pub fn rows<T>(
        &self,
        mut write: impl FnMut(*mut T, *mut usize) -> c_int,
    ) -> Result<Vec<T>, CephError> {
        let mut rows = Vec::with_capacity(16);
        loop {
            let mut count = rows.capacity();
            let answer = write(rows.as_mut_ptr(), &raw mut count);
            if answer == -libc::ERANGE && count > rows.capacity() {
                rows.reserve(count);
                continue;
            }
            self.check(answer)?;
            // SAFETY: the library has filled that many rows.
            unsafe { rows.set_len(count.min(rows.capacity())) };
            return Ok(rows);
        }
    }
}

/// Bytes; far more than any name or value in Ceph has.
const MAX_TEXT: usize = 1 << 20;

/// The texts in a buffer that holds one after the other, each ended by a NUL.
pub(super) fn texts(buffer: &[u8]) -> Vec<String> {
    let parts = buffer.split_inclusive(|byte| *byte == 0);
    let text = |part: &[u8]| String::from_utf8_lossy(&part[..part.len() - 1]).into_owned();
    parts.map(text).collect()
}

/// Copies a text of the library; null becomes the empty text.
///
/// # Safety
///
/// `text` is null, or ends in NUL and lives through the call.
pub(super) unsafe fn owned(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: as this function requires.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().into_owned()
}
