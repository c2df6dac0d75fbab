//! Keys in the keyring of one thread, for the duration of one request to a driver.
//!
//! Kernel drivers that connect to servers take their secrets from the kernel's
//! keyrings (keyrings(7)): a thread adds a key by add_key(2) and names it in its request
//! to the driver; the driver looks the key up in that thread's keyrings and copies it. The
//! thread keyring is the narrowest of them. A process keyring would not do: threads that
//! existed before one of them made it do not see it, and two volumes with keys of one name
//! would overwrite each other's.

use std::{ffi::CString, io, marker::PhantomData};

const KEY_SPEC_THREAD_KEYRING: libc::c_long = -1;
const KEYCTL_REVOKE: libc::c_long = 3;
const KEYCTL_UNLINK: libc::c_long = 9;

/// A key in the calling thread's keyring. Dropping it revokes and unlinks the key.
#[derive(Debug)]
pub struct ThreadKey {
    serial: libc::c_long,
    /// Keeps the value on its thread: another thread has no access to the key.
    thread: PhantomData<*const ()>,
}

impl ThreadKey {
    /// Adds `payload` to the thread keyring as a key of that type and description.
    /// `ENODEV`: no module for that type is loaded.
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
        // First the revocation: the thread may not revoke a key that it has unlinked.
        for (operation, keyring) in [(KEYCTL_REVOKE, 0), (KEYCTL_UNLINK, KEY_SPEC_THREAD_KEYRING)] {
            // SAFETY: neither operation takes a pointer.
            let done = unsafe { libc::syscall(libc::SYS_keyctl, operation, self.serial, keyring) };
            if done < 0 {
                let error = io::Error::last_os_error();
                tracing::warn!(%error, "cannot remove a key before its thread ends");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYCTL_SEARCH: libc::c_long = 10;

    /// Searches this thread's keyrings, as the kernel does for a driver.
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
