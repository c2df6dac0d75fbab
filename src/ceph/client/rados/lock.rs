//! Exclusive locks on objects, which the OSD keeps.

use std::{ffi::c_int, time::Duration};

use super::{IoCtx, abi, write::WriteOp};
use crate::ceph::client::{CephError, call::texts};

/// The space for the texts of a lock's owner.
const TEXT: usize = 4096;

/// A lock, until it is dropped or expires.
#[derive(Debug)]
pub struct ObjectLock<'a> {
    io: &'a IoCtx,
    object: String,
    name: String,
    cookie: String,
    removes_object: bool,
}

impl ObjectLock<'_> {
    /// Has the object removed together with the lock.
    #[must_use]
    pub fn with_object(mut self) -> Self {
        self.removes_object = true;
        self
    }
}

impl IoCtx {
    /// Locks an object, for at most `duration`; none if another connection has the lock of
    /// that name, or this one by another cookie. A missing object is created.
    pub fn try_lock(
        &self,
        object: &str,
        name: &str,
        cookie: &str,
        duration: Duration,
    ) -> Result<Option<ObjectLock<'_>>, CephError> {
        let call = self.call("lock", "object", object);
        let texts = (call.text(object)?, call.text(name)?, call.text(cookie)?);
        let mut duration = libc::timeval {
            tv_sec: libc::time_t::try_from(duration.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_usec: duration.subsec_micros().into(),
        };
        let lock = self.cluster().libraries.rados.rados_lock_exclusive;
        // SAFETY: the texts end in NUL, and the duration outlives the call.
        let answer = call.changed(unsafe {
            lock(
                self.raw(),
                texts.0.as_ptr(),
                texts.1.as_ptr(),
                texts.2.as_ptr(),
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
                    object: object.to_owned(),
                    name: name.to_owned(),
                    cookie: cookie.to_owned(),
                    removes_object: false,
                })
            }),
        }
    }

    /// Removes the lock that a connection has by that cookie, if there is one.
    pub fn break_lock(&self, object: &str, name: &str, cookie: &str) -> Result<(), CephError> {
        let Some(client) = self.client_with_lock(object, name, cookie)? else {
            return Ok(());
        };
        let call = self.call("break the lock of", "object", object);
        let (object, name) = (call.text(object)?, call.text(name)?);
        let (client, cookie) = (call.text(&client)?, call.text(cookie)?);
        let break_lock = self.cluster().libraries.rados.rados_break_lock;
        // SAFETY: the texts end in NUL.
        let broken = call.changed(unsafe {
            break_lock(
                self.raw(),
                object.as_ptr(),
                name.as_ptr(),
                client.as_ptr(),
                cookie.as_ptr(),
            )
        });
        match broken {
            // It has expired.
            Err(error) if error.is_not_found() => Ok(()),
            broken => broken,
        }
    }

    /// The client that has an exclusive lock by that cookie.
    fn client_with_lock(
        &self,
        object: &str,
        name: &str,
        cookie: &str,
    ) -> Result<Option<String>, CephError> {
        let call = self.call("list the locks of", "object", object);
        let (object, name) = (call.text(object)?, call.text(name)?);
        let mut is_exclusive: c_int = 0;
        let mut buffers = [[0_u8; TEXT]; 4];
        let mut lengths = [TEXT; 4];
        let [tag, clients, cookies, addresses] = &mut buffers;
        let [tag_len, clients_len, cookies_len, addresses_len] = &mut lengths;
        let list = self.cluster().libraries.rados.rados_list_lockers;
        // SAFETY: the texts end in NUL, and the library writes at most the lengths.
        let answer = unsafe {
            list(
                self.raw(),
                object.as_ptr(),
                name.as_ptr(),
                &raw mut is_exclusive,
                tag.as_mut_ptr().cast(),
                &raw mut *tag_len,
                clients.as_mut_ptr().cast(),
                &raw mut *clients_len,
                cookies.as_mut_ptr().cast(),
                &raw mut *cookies_len,
                addresses.as_mut_ptr().cast(),
                &raw mut *addresses_len,
            )
        };
        match call.check64(answer as i64) {
            Err(error) if error.is_not_found() => return Ok(None),
            // An exclusive lock has one owner at most.
            Ok(0) => return Ok(None),
            answer => answer?,
        };
        let of = |buffer: &[u8], length: usize| {
            let first = texts(&buffer[..length.min(TEXT)]).into_iter().next();
            first.unwrap_or_default()
        };
        let is_its = of(cookies, *cookies_len) == cookie;
        Ok(is_its.then(|| of(clients, *clients_len)))
    }
}

impl Drop for ObjectLock<'_> {
    fn drop(&mut self) {
        let mut op = WriteOp::new().unlock(&self.name, &self.cookie);
        // In one step, and only while this connection has the lock: once it has expired,
        // another may have it, and the object is that one's.
        if self.removes_object {
            op = op.remove();
        }
        // A lock that cannot be removed expires.
        let _ = self.io.run("unlock", &self.object, &op);
    }
}
