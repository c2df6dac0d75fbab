//! Exclusive locks on objects, which the OSD keeps.

use std::time::Duration;

use super::{IoCtx, abi};
use crate::ceph::client::CephError;

/// Distinguishes the locks of one connection; it has one of each name.
const COOKIE: &std::ffi::CStr = c"";

/// A lock, until it is dropped or expires.
#[derive(Debug)]
pub struct ObjectLock<'a> {
    io: &'a IoCtx,
    object: &'a str,
    name: &'a str,
}

impl IoCtx {
    /// Locks an object, for at most `duration`; none if another connection has the lock of
    /// that name. A missing object is created.
    pub fn try_lock<'a>(
        &'a self,
        object: &'a str,
        name: &'a str,
        duration: Duration,
    ) -> Result<Option<ObjectLock<'a>>, CephError> {
        let call = self.call("lock", "object", object);
        let (locked, named) = (call.text(object)?, call.text(name)?);
        let mut duration = libc::timeval {
            tv_sec: libc::time_t::try_from(duration.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_usec: duration.subsec_micros().into(),
        };
        let lock = self.cluster().libraries.rados.rados_lock_exclusive;
        // SAFETY: the texts end in NUL, and the duration outlives the call.
        let answer = call.changed(unsafe {
            lock(
                self.raw(),
                locked.as_ptr(),
                named.as_ptr(),
                COOKIE.as_ptr(),
                c"".as_ptr(),
                &raw mut duration,
                abi::MAY_RENEW,
            )
        });
        match answer {
            Err(error) if error.is_busy() => Ok(None),
            answer => answer.map(|()| {
                Some(ObjectLock {
                    io: self,
                    object,
                    name,
                })
            }),
        }
    }

    fn unlock(&self, object: &str, name: &str) -> Result<(), CephError> {
        let call = self.call("unlock", "object", object);
        let (object, name) = (call.text(object)?, call.text(name)?);
        let unlock = self.cluster().libraries.rados.rados_unlock;
        // SAFETY: the texts end in NUL.
        call.changed(unsafe { unlock(self.raw(), object.as_ptr(), name.as_ptr(), COOKIE.as_ptr()) })
    }
}

impl Drop for ObjectLock<'_> {
    fn drop(&mut self) {
        // An expired lock may not exist any more; a lock that cannot be removed expires.
        let _ = self.io.unlock(self.object, self.name);
    }
}
