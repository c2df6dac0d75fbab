//! One call of a library's, around the call itself: its arguments made to what C
//! takes, its answer to what Rust does, its failure to an error with words.

use std::{
    ffi::{CStr, CString, c_char, c_int},
    sync::atomic::{AtomicBool, Ordering},
};

use rustix::io::Errno;

use super::CephError;
use crate::crash_point;

/// A call about to be made. `object` says on what, where the call fails.
pub(super) struct LibraryCall<'a, F> {
    lost: &'a AtomicBool,
    operation: &'static str,
    object: F,
}

impl<'a, F: Fn() -> String> LibraryCall<'a, F> {
    /// `lost` is set where the call shows that its connection is.
    pub fn new(lost: &'a AtomicBool, operation: &'static str, object: F) -> Self {
        Self {
            lost,
            operation,
            object,
        }
    }

    /// The error that this call answered `errno`.
    pub fn error(&self, errno: Errno) -> CephError {
        if matches!(errno, Errno::SHUTDOWN | Errno::TIMEDOUT | Errno::NOTCONN) {
            self.lost.store(true, Ordering::Relaxed);
        }
        CephError::new(self.operation, (self.object)(), errno)
    }

    /// The text as C takes it; one with a NUL in it is invalid.
    pub fn text(&self, text: &str) -> Result<CString, CephError> {
        CString::new(text).map_err(|_| self.error(Errno::INVAL))
    }

    /// What the call answered: an error where negative.
    pub fn check(&self, answer: c_int) -> Result<(), CephError> {
        self.check64(answer.into()).map(drop)
    }

    /// The same of a change: where a crash may come, it comes after it.
    pub fn changed(&self, answer: c_int) -> Result<(), CephError> {
        crash_point();
        self.check(answer)
    }

    /// The same where the answer is a value, too.
    pub fn check64(&self, answer: i64) -> Result<i64, CephError> {
        if answer >= 0 {
            return Ok(answer);
        }
        let errno = i32::try_from(-answer).unwrap_or(libc::EIO);
        Err(self.error(Errno::from_raw_os_error(errno)))
    }

    /// Has a text written into a buffer, which grows while it is too small
    /// (`-ERANGE`).
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
            // The last byte is a NUL in any case.
            buffer.push(0);
            let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
            return Ok(text.to_string_lossy().into_owned());
        }
    }

    /// Has rows written into a buffer, which grows while it is too small: the
    /// library then answers `-ERANGE` and how many there are. The rows are the
    /// caller's to clean up.
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

/// No name or value in Ceph is near as long.
const MAX_TEXT: usize = 1 << 20;

/// The texts in a buffer that holds one after the other, each ended by a NUL.
pub(super) fn texts(buffer: &[u8]) -> Vec<String> {
    let parts = buffer.split_inclusive(|byte| *byte == 0);
    let text = |part: &[u8]| String::from_utf8_lossy(&part[..part.len() - 1]).into_owned();
    parts.map(text).collect()
}

/// A text of the library's; null is the empty one.
///
/// # Safety
///
/// `text` is null, or ends in NUL and lives through the call.
pub(super) unsafe fn owned(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: as this function asks for.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().into_owned()
}
