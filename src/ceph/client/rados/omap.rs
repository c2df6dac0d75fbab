//! The omap of an object: its keys with their values, sorted.
//!
//! ceph-csi keeps its journal in omaps, all as text. Another program may have written a value
//! that is not UTF-8; it is read with replacement characters, so that it matches nothing.

use std::{collections::BTreeMap, ffi::CString, ptr, slice};

use super::{IoCtx, WriteOp, abi};
use crate::ceph::client::CephError;

/// The number of keys per read; OSDs return at most 1024.
const PAGE: u64 = 1000;

/// Some of an object's keys with their values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OmapPage {
    /// In the order of the keys.
    pub entries: BTreeMap<String, String>,
    /// Whether there are keys after the last of these.
    pub more: bool,
}

impl IoCtx {
    /// Sets keys to values; creates the object if it does not exist.
    pub fn omap_set(&self, object: &str, entries: &[(&str, &str)]) -> Result<(), CephError> {
        let op = WriteOp::new().set(entries.iter().copied());
        self.run("write keys of", object, &op)
    }

    /// Removes keys; absent ones are no error.
    pub fn omap_remove(&self, object: &str, keys: &[&str]) -> Result<(), CephError> {
        // Without the assertion the OSD would create a missing object.
        let op = WriteOp::new().assert_exists().unset(keys.iter().copied());
        match self.run("remove keys of", object, &op) {
            Err(error) if error.is_not_found() => Ok(()),
            result => result,
        }
    }

    /// The values of those of these keys that exist.
    pub fn omap_get(
        &self,
        object: &str,
        keys: &[&str],
    ) -> Result<BTreeMap<String, String>, CephError> {
        Ok(texts(self.omap_get_bytes(object, keys)?))
    }

    /// [`Self::omap_get`] for values that are not text, as some of Ceph's own.
    pub(in crate::ceph::client) fn omap_get_bytes(
        &self,
        object: &str,
        keys: &[&str],
    ) -> Result<BTreeMap<String, Vec<u8>>, CephError> {
        let pointers: Vec<_> = keys.iter().map(|key| key.as_ptr().cast()).collect();
        let lens: Vec<_> = keys.iter().map(|key| key.len()).collect();
        let functions = &self.cluster().libraries.rados;
        self.read_keys(object, |op, found| {
            // SAFETY: there are `keys.len()` pointers and lengths; the library copies the keys.
            unsafe {
                (functions.rados_read_op_omap_get_vals_by_keys2)(
                    op,
                    pointers.as_ptr(),
                    keys.len(),
                    lens.as_ptr(),
                    found,
                    ptr::null_mut(),
                );
            }
        })
    }

    /// The keys that begin with `prefix` and come after `after`, at most `max`.
    pub fn omap_page(
        &self,
        object: &str,
        after: &str,
        prefix: &str,
        max: u64,
    ) -> Result<OmapPage, CephError> {
        let call = self.call("read keys of", "object", object);
        let (after, prefix) = (call.text(after)?, call.text(prefix)?);
        let functions = &self.cluster().libraries.rados;
        let mut more = 0;
        let entries = self.read_keys(object, |op, found| {
            let (after, prefix) = (after.as_ptr(), prefix.as_ptr());
            // SAFETY: both texts end in NUL, the library copies them; `more` outlives the read.
            unsafe {
                (functions.rados_read_op_omap_get_vals2)(
                    op,
                    after,
                    prefix,
                    max.min(PAGE),
                    found,
                    &raw mut more,
                    ptr::null_mut(),
                );
            }
        })?;
        Ok(OmapPage {
            entries: texts(entries),
            more: more != 0,
        })
    }

    /// All keys that begin with `prefix`.
    pub fn omap_list(
        &self,
        object: &str,
        prefix: &str,
    ) -> Result<BTreeMap<String, String>, CephError> {
        let mut all = BTreeMap::new();
        loop {
            let after = all
                .last_key_value()
                .map_or("", |(key, _): (&String, _)| key);
            let OmapPage { mut entries, more } = self.omap_page(object, after, prefix, PAGE)?;
            let ended = !more || entries.is_empty();
            all.append(&mut entries);
            if ended {
                return Ok(all);
            }
        }
    }

    /// Executes one read: `add` adds it to the operation, to store its result at the pointer.
    fn read_keys(
        &self,
        object: &str,
        add: impl FnOnce(abi::ReadOp, *mut abi::OmapIter),
    ) -> Result<BTreeMap<String, Vec<u8>>, CephError> {
        let call = self.call("read keys of", "object", object);
        let name: CString = call.text(object)?;
        let functions = &self.cluster().libraries.rados;
        let mut found = ptr::null_mut();
        // SAFETY: the operation is released below, and only there.
        let op = unsafe { (functions.rados_create_read_op)() };
        add(op, &raw mut found);
        // SAFETY: the operation is complete, the name ends in NUL. `found` must be freed
        // once the read was added, and is freed whatever the result.
        unsafe {
            let answer = (functions.rados_read_op_operate)(op, self.raw(), name.as_ptr(), 0);
            (functions.rados_release_read_op)(op);
            let entries = call.check(answer).map(|()| collect(functions, found));
            (functions.rados_omap_get_end)(found);
            entries
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn texts(entries: BTreeMap<String, Vec<u8>>) -> BTreeMap<String, String> {
    let entries = entries.into_iter();
    entries.map(|(key, value)| (key, text(&value))).collect()
}

/// Copies the keys and values that a read found.
///
/// # Safety
///
/// A successful read has filled `found`.
unsafe fn collect(functions: &abi::Functions, found: abi::OmapIter) -> BTreeMap<String, Vec<u8>> {
    let bytes = |start: *mut std::ffi::c_char, len| match len {
        0 => Vec::new(),
        // SAFETY: the library has set the number of bytes.
        _ => unsafe { slice::from_raw_parts(start.cast::<u8>(), len) }.to_vec(),
    };
    let mut entries = BTreeMap::new();
    loop {
        let (mut key, mut value) = (ptr::null_mut(), ptr::null_mut());
        let (mut key_len, mut value_len) = (0, 0);
        // SAFETY: as this function requires; the four variables outlive the call.
        let answer = unsafe {
            (functions.rados_omap_get_next2)(
                found,
                &raw mut key,
                &raw mut value,
                &raw mut key_len,
                &raw mut value_len,
            )
        };
        // A null key ends the list.
        if answer < 0 || key.is_null() {
            return entries;
        }
        entries.insert(text(&bytes(key, key_len)), bytes(value, value_len));
    }
}
