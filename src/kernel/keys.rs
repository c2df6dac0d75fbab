//! A key that exists for one thread, for as long as it is needed.
//!
//! Kernel drivers that speak to servers take their secrets from the kernel's
//! keyrings (keyrings(7)): the thread hands a key over by add_key(2), names it
//! in what it asks of the driver, and the driver looks it up in that thread's
//! keyrings and copies it. The thread keyring is the narrowest of them. A
//! process keyring that one thread made is not seen by threads that exist
//! already, and two volumes with keys of one name would overwrite each other.

use std::{ffi::CString, io, marker::PhantomData};

const KEY_SPEC_THREAD_KEYRING: libc::c_long = -1;
const KEYCTL_REVOKE: libc::c_long = 3;
const KEYCTL_UNLINK: libc::c_long = 9;

/// A key in the calling thread's keyring. Dropped, it is revoked and unlinked.
#[derive(Debug)]
pub struct ThreadKey {
    serial: libc::c_long,
    /// Another thread does not have it, and must not drop it.
    thread: PhantomData<*const ()>,
}

impl ThreadKey {
    /// Hands `payload` to the kernel as a key of that type and description.
    /// `ENODEV`: no module of that type is loaded.
    pub fn add(key_type: &str, description: &str, payload: &[u8]) -> io::Result<Self> {
        let (key_type, description) = (CString::new(key_type)?, CString::new(description)?);
        // SAFETY: both texts end in NUL, the payload has that many bytes, and the
        // kernel keeps none of the three pointers.
        let serial = unsafe {
            libc::syscall(
                libc::SYS_add_key,
                key_type.as_ptr(),
                description.as_ptr(),
                payload.as_ptr(),
                payload.len(),
                KEY_SPEC_THREAD_KEYRING,
            )
        };
        if serial < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            serial,
            thread: PhantomData,
        })
    }
}

impl Drop for ThreadKey {
    fn drop(&mut self) {
        // First revoked: what is not linked any more is no longer ours to revoke.
        for (operation, keyring) in [(KEYCTL_REVOKE, 0), (KEYCTL_UNLINK, KEY_SPEC_THREAD_KEYRING)] {
            // SAFETY: neither operation takes a pointer.
            let done = unsafe { libc::syscall(libc::SYS_keyctl, operation, self.serial, keyring) };
            if done < 0 {
                let error = io::Error::last_os_error();
                tracing::warn!(%error, "a key stays until its thread ends");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYCTL_SEARCH: libc::c_long = 10;

    /// Looks where the kernel looks for a driver: in this thread's keyrings.
    fn is_found(description: &str) -> bool {
        let description = CString::new(description).unwrap();
        // SAFETY: both texts end in NUL and are only read.
        let found = unsafe {
            libc::syscall(
                libc::SYS_keyctl,
                KEYCTL_SEARCH,
                KEY_SPEC_THREAD_KEYRING,
                c"user".as_ptr(),
                description.as_ptr(),
                0,
            )
        };
        found > 0
    }

    #[test]
    fn a_key_is_visible_to_its_thread_only_and_removed_on_drop() {
        let key = ThreadKey::add("user", "uring-csi-test", b"payload").unwrap();
        assert!(is_found("uring-csi-test"));
        assert!(
            !std::thread::spawn(|| is_found("uring-csi-test"))
                .join()
                .unwrap()
        );
        drop(key);
        assert!(!is_found("uring-csi-test"));
        let error = ThreadKey::add("no such type", "x", b"x").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
    }
}
