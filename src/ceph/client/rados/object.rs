//! An object: its bytes and its watchers.

use std::{
    ffi::c_int,
    ptr,
    time::{Duration, SystemTime},
};

use rustix::io::Errno;

use super::IoCtx;
use crate::ceph::client::CephError;

/// How long watchers may take to acknowledge a notification; OSDs count whole seconds.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(1);

impl IoCtx {
    /// Whether the object exists.
    pub fn exists(&self, object: &str) -> Result<bool, CephError> {
        Ok(self.modified(object)?.is_some())
    }

    /// When the object was changed, by the clock of the client that did; none if there is no
    /// such object.
    pub fn modified(&self, object: &str) -> Result<Option<SystemTime>, CephError> {
        let call = self.call("look for", "object", object);
        let name = call.text(object)?;
        let stat = self.cluster().libraries.rados.rados_stat;
        let (size, mut time) = (ptr::null_mut(), 0);
        // SAFETY: the name ends in NUL; the size is optional, `time` outlives the call.
        match call.check(unsafe { stat(self.raw(), name.as_ptr(), size, &raw mut time) }) {
            Ok(()) => {
                let since = Duration::from_secs(u64::try_from(time).unwrap_or_default());
                Ok(Some(SystemTime::UNIX_EPOCH + since))
            }
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads the first bytes of an object, at most `max` ([`CephError::is_not_found`]).
    pub fn read(&self, object: &str, max: usize) -> Result<Vec<u8>, CephError> {
        let call = self.call("read", "object", object);
        let name = call.text(object)?;
        let mut bytes = vec![0_u8; max];
        let read = self.cluster().libraries().rados.rados_read;
        // SAFETY: the name ends in NUL, and there is room for `max` bytes.
        let count = unsafe { read(self.raw(), name.as_ptr(), bytes.as_mut_ptr().cast(), max, 0) };
        let count = call.check64(count.into())?;
        bytes.truncate(usize::try_from(count).unwrap_or_default());
        Ok(bytes)
    }

    /// Calls a method of an object class, which changes the object, and ignores its output
    /// ([`CephError::is_not_found`]).
    pub(in crate::ceph::client) fn execute(
        &self,
        object: &str,
        (class, method): (&str, &str),
        input: &[u8],
    ) -> Result<(), CephError> {
        let call = self.call("change", "object", object);
        let (name, class, method) = (call.text(object)?, call.text(class)?, call.text(method)?);
        let execute = self.cluster().libraries.rados.rados_exec;
        // SAFETY: the three names end in NUL, the input has the given length, and there is
        // no output buffer.
        call.changed(unsafe {
            execute(
                self.raw(),
                name.as_ptr(),
                class.as_ptr(),
                method.as_ptr(),
                input.as_ptr().cast(),
                input.len(),
                std::ptr::null_mut(),
                0,
            )
        })
    }

    /// Notifies the watchers of an object, and returns the ids of their connections
    /// ([`Cluster::instance_id`]). Without watchers it takes one round trip, else until
    /// all have acknowledged it, at most a second: a dead client remains a watcher until the
    /// cluster ends its watch.
    ///
    /// Blocks while the OSD does not answer: the timeout for operations does not
    /// apply to notifications.
    ///
    /// [`Cluster::instance_id`]: super::Cluster::instance_id
    pub(in crate::ceph::client) fn notify(
        &self,
        object: &str,
        message: &[u8],
    ) -> Result<Vec<i64>, CephError> {
        let call = self.call("notify the watchers of", "object", object);
        let name = call.text(object)?;
        let cluster = self.cluster();
        let (mut reply, mut len) = (ptr::null_mut(), 0);
        let within = u64::try_from(ACKNOWLEDGED_WITHIN.as_millis()).unwrap_or(u64::MAX);
        let message_len = c_int::try_from(message.len()).map_err(|_| call.error(Errno::TOOBIG))?;
        // SAFETY: the name ends in NUL, the message has the given length; the library
        // allocates the reply, and `take` frees it.
        let (answer, reply) = unsafe {
            let answer = (cluster.libraries.rados.rados_notify2)(
                self.raw(),
                name.as_ptr(),
                message.as_ptr().cast(),
                message_len,
                within,
                &raw mut reply,
                &raw mut len,
            );
            (answer, cluster.take(reply, len))
        };
        // Watchers that did not acknowledge it are in the reply.
        if answer != -Errno::TIMEDOUT.raw_os_error() || reply.is_empty() {
            call.check(answer)?;
        }
        notified(&reply).ok_or_else(|| call.error(Errno::BADMSG))
    }
}

/// The notified clients in a reply of `rados_notify2` (`<rados/librados.h>`), all little
/// endian: a 32-bit count of acknowledgements, each with 64 bits of the client, 64 of its
/// watch, and a text after its 32-bit length; then a count of watchers that did not
/// acknowledge, each with client and watch.
fn notified(reply: &[u8]) -> Option<Vec<i64>> {
    let mut rest = reply;
    let mut clients = Vec::new();
    for _ in 0..number(&mut rest)? {
        clients.push(watching_client(&mut rest)?);
        let len = usize::try_from(number(&mut rest)?).ok()?;
        rest = rest.get(len..)?;
    }
    for _ in 0..number(&mut rest)? {
        clients.push(watching_client(&mut rest)?);
    }
    Some(clients)
}

fn number(rest: &mut &[u8]) -> Option<u32> {
    let (number, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(u32::from_le_bytes(*number))
}

fn watching_client(rest: &mut &[u8]) -> Option<i64> {
    let (client, after) = rest.split_first_chunk()?;
    let (_watch, after) = after.split_first_chunk::<8>()?;
    *rest = after;
    Some(i64::from_le_bytes(*client))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn all_notified_clients_are_read_from_the_reply(
            acknowledged in proptest::collection::vec((any::<i64>(), "[a-z]{0,9}"), 0..4),
            silent in proptest::collection::vec(any::<i64>(), 0..4),
            cut: proptest::sample::Index,
        ) {
            let len = |len: usize| u32::try_from(len).unwrap().to_le_bytes();
            let mut reply = len(acknowledged.len()).to_vec();
            for (client, text) in &acknowledged {
                reply.extend([client.to_le_bytes(), [7; 8]].concat());
                reply.extend(len(text.len()));
                reply.extend(text.bytes());
            }
            reply.extend(len(silent.len()));
            for client in &silent {
                reply.extend([client.to_le_bytes(), [7; 8]].concat());
            }
            let all = acknowledged.iter().map(|(client, _)| *client).chain(silent.iter().copied());
            prop_assert_eq!(notified(&reply), Some(all.collect()));
            prop_assert_eq!(notified(&reply[..cut.index(reply.len())]), None);
        }

        #[test]
        fn any_reply_is_read_or_refused(reply: Vec<u8>) {
            let _ = notified(&reply);
        }
    }
}
