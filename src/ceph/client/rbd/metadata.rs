//! The metadata of an image: keys and values of text.

use std::collections::BTreeMap;

use super::Image;
use crate::ceph::client::{CephError, call::texts};

/// The number of keys per read.
const PAGE: u64 = 64;

impl Image {
    /// Sets a key to a value.
    pub fn metadata_set(&self, key: &str, value: &str) -> Result<(), CephError> {
        let call = self.call_on("write", "metadata", key);
        let (name, value) = (call.text(key)?, call.text(value)?);
        let set = self.functions().rbd_metadata_set;
        // SAFETY: both texts end in NUL.
        call.changed(unsafe { set(self.raw(), name.as_ptr(), value.as_ptr()) })
    }

    /// Removes a key, if it is set.
    pub fn metadata_remove(&self, key: &str) -> Result<(), CephError> {
        let call = self.call_on("remove", "metadata", key);
        let name = call.text(key)?;
        let remove = self.functions().rbd_metadata_remove;
        // SAFETY: the key ends in NUL.
        match call.changed(unsafe { remove(self.raw(), name.as_ptr()) }) {
            Err(error) if error.is_not_found() => Ok(()),
            result => result,
        }
    }

    /// All keys with their values.
    pub fn metadata_list(&self) -> Result<BTreeMap<String, String>, CephError> {
        let mut all = BTreeMap::new();
        loop {
            let after = all
                .last_key_value()
                .map_or("", |(key, _): (&String, _)| key);
            let page = self.metadata_page(after)?;
            if page.is_empty() {
                return Ok(all);
            }
            all.extend(page);
        }
    }

    fn metadata_page(&self, after: &str) -> Result<Vec<(String, String)>, CephError> {
        let call = self.call("list the metadata of");
        let after = call.text(after)?;
        let (mut keys, mut values) = (vec![0_u8; 4096], vec![0_u8; 4096]);
        loop {
            let (mut keys_len, mut values_len) = (keys.len(), values.len());
            let (keys_at, values_at) = (keys.as_mut_ptr().cast(), values.as_mut_ptr().cast());
            // SAFETY: the library writes at most `keys_len` and `values_len` bytes.
            let answer = unsafe {
                (self.functions().rbd_metadata_list)(
                    self.raw(),
                    after.as_ptr(),
                    PAGE,
                    keys_at,
                    &raw mut keys_len,
                    values_at,
                    &raw mut values_len,
                )
            };
            if answer == -libc::ERANGE && (keys_len > keys.len() || values_len > values.len()) {
                keys.resize(keys_len.max(keys.len()), 0);
                values.resize(values_len.max(values.len()), 0);
                continue;
            }
            call.check(answer)?;
            let (keys, values) = (texts(&keys[..keys_len]), texts(&values[..values_len]));
            return Ok(keys.into_iter().zip(values).collect());
        }
    }
}
