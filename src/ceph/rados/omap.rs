//! Objects, and the keys and values they hold.
//!
//! The omap of an object is a sorted map. ceph-csi keeps its journal in some, all
//! as text; what is not UTF-8 was written by someone else, and is shown with
//! replacement characters, so that it matches nothing.

use std::{collections::BTreeMap, ffi::CString, ptr, slice};

use super::{IoCtx, abi};
use crate::ceph::CephError;

/// How many keys are read at once: the OSDs answer no more than 1024.
const PAGE: u64 = 1000;

/// Some of an object's keys with their values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// In the order of the keys.
    pub entries: BTreeMap<String, String>,
    /// Whether there are keys behind the last of these.
    pub more: bool,
}

/// Changes to one object, made together or not at all, in this order.
#[derive(Clone, Debug, Default)]
pub struct WriteOp<'a> {
    steps: Vec<Step<'a>>,
}

#[derive(Clone, Debug)]
enum Step<'a> {
    Create,
    AssertExists,
    Compare(&'a str, &'a str),
    Set(Vec<(&'a str, &'a str)>),
    Unset(Vec<&'a str>),
    Remove,
}

impl<'a> WriteOp<'a> {
    /// No change yet.
    pub fn new() -> Self {
        Self::default()
    }

    fn then(mut self, step: Step<'a>) -> Self {
        self.steps.push(step);
        self
    }

    /// Makes the object; where it exists, the whole fails
    /// ([`CephError::is_exists`]).
    #[must_use]
    pub fn create(self) -> Self {
        self.then(Step::Create)
    }

    /// Fails where the object does not exist ([`CephError::is_not_found`]).
    #[must_use]
    pub fn assert_exists(self) -> Self {
        self.then(Step::AssertExists)
    }

    /// Fails where the key has another value ([`CephError::is_mismatch`]), the
    /// empty one where it is absent; and where the object does not exist
    /// ([`CephError::is_not_found`]).
    #[must_use]
    pub fn compare(self, key: &'a str, value: &'a str) -> Self {
        self.then(Step::Compare(key, value))
    }

    /// Sets keys to values; makes the object where it does not exist.
    #[must_use]
    pub fn set(self, entries: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        self.then(Step::Set(entries.into_iter().collect()))
    }

    /// Removes keys, as far as they exist.
    #[must_use]
    pub fn unset(self, keys: impl IntoIterator<Item = &'a str>) -> Self {
        self.then(Step::Unset(keys.into_iter().collect()))
    }

    /// Removes the object.
    #[must_use]
    pub fn remove(self) -> Self {
        self.then(Step::Remove)
    }
}

impl IoCtx {
    /// Makes an object that must not exist ([`CephError::is_exists`]).
    pub fn create_exclusive(&self, object: &str) -> Result<(), CephError> {
        self.run("create", object, &WriteOp::new().create())
    }

    /// Removes an object ([`CephError::is_not_found`]).
    pub fn remove(&self, object: &str) -> Result<(), CephError> {
        self.run("remove", object, &WriteOp::new().remove())
    }

    /// Whether the object exists.
    pub fn exists(&self, object: &str) -> Result<bool, CephError> {
        let call = self.call("look for", "object", object);
        let name = call.text(object)?;
        let stat = self.cluster().libraries.rados.rados_stat;
        let (size, time) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the name ends in NUL; size and time are optional.
        match call.check(unsafe { stat(self.raw(), name.as_ptr(), size, time) }) {
            Ok(()) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The first bytes of an object, at most `max` ([`CephError::is_not_found`]).
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

    /// Sets keys to values; makes the object where it does not exist.
    pub fn omap_set(&self, object: &str, entries: &[(&str, &str)]) -> Result<(), CephError> {
        let op = WriteOp::new().set(entries.iter().copied());
        self.run("write keys of", object, &op)
    }

    /// Removes keys, as far as they exist.
    pub fn omap_remove(&self, object: &str, keys: &[&str]) -> Result<(), CephError> {
        // Else the object would be made to remove nothing from it.
        let op = WriteOp::new().assert_exists().unset(keys.iter().copied());
        match self.run("remove keys of", object, &op) {
            Err(error) if error.is_not_found() => Ok(()),
            result => result,
        }
    }

    /// Makes changes to one object, all or none.
    pub fn operate(&self, object: &str, op: &WriteOp<'_>) -> Result<(), CephError> {
        self.run("change", object, op)
    }

    fn run(
        &self,
        operation: &'static str,
        object: &str,
        op: &WriteOp<'_>,
    ) -> Result<(), CephError> {
        let call = self.call(operation, "object", object);
        let name = call.text(object)?;
        let functions = &self.cluster().libraries.rados;
        // SAFETY: the operation is released below, and only there.
        let raw = unsafe { (functions.rados_create_write_op)() };
        for step in &op.steps {
            add(functions, raw, step);
        }
        // SAFETY: the operation is whole, the name ends in NUL.
        let answer = unsafe {
            let answer = (functions.rados_write_op_operate)(
                raw,
                self.raw(),
                name.as_ptr(),
                ptr::null_mut(),
                0,
            );
            (functions.rados_release_write_op)(raw);
            answer
        };
        call.changed(answer)
    }

    /// The values of these keys, as far as they exist.
    pub fn omap_get(
        &self,
        object: &str,
        keys: &[&str],
    ) -> Result<BTreeMap<String, String>, CephError> {
        let pointers: Vec<_> = keys.iter().map(|key| key.as_ptr().cast()).collect();
        let lens: Vec<_> = keys.iter().map(|key| key.len()).collect();
        let functions = &self.cluster().libraries.rados;
        self.read_keys(object, |op, found| {
            // SAFETY: pointers and lengths of as many keys, which are copied.
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
    ) -> Result<Page, CephError> {
        let call = self.call("read keys of", "object", object);
        let (after, prefix) = (call.text(after)?, call.text(prefix)?);
        let functions = &self.cluster().libraries.rados;
        let mut more = 0;
        let entries = self.read_keys(object, |op, found| {
            let (after, prefix) = (after.as_ptr(), prefix.as_ptr());
            // SAFETY: both texts end in NUL and are copied; `more` outlives the read.
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
        Ok(Page {
            entries,
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
            let Page { mut entries, more } = self.omap_page(object, after, prefix, PAGE)?;
            let ended = !more || entries.is_empty();
            all.append(&mut entries);
            if ended {
                return Ok(all);
            }
        }
    }

    /// One read, which `ask` adds to the operation, with a place for what it finds.
    fn read_keys(
        &self,
        object: &str,
        ask: impl FnOnce(abi::ReadOp, *mut abi::OmapIter),
    ) -> Result<BTreeMap<String, String>, CephError> {
        let call = self.call("read keys of", "object", object);
        let name: CString = call.text(object)?;
        let functions = &self.cluster().libraries.rados;
        let mut found = ptr::null_mut();
        // SAFETY: the operation is released below, and only there.
        let op = unsafe { (functions.rados_create_read_op)() };
        ask(op, &raw mut found);
        // SAFETY: the operation is whole, the name ends in NUL. What is found
        // belongs to us from the time it was asked for, and is freed in any case.
        unsafe {
            let answer = (functions.rados_read_op_operate)(op, self.raw(), name.as_ptr(), 0);
            (functions.rados_release_read_op)(op);
            let entries = call.check(answer).map(|()| collect(functions, found));
            (functions.rados_omap_get_end)(found);
            entries
        }
    }
}

/// Adds one step to an operation of the library's, which copies what it is given.
fn add(functions: &abi::Functions, op: abi::WriteOp, step: &Step<'_>) {
    let pointers = |texts: &[&str]| -> (Vec<_>, Vec<_>) {
        let each = texts.iter().map(|text| (text.as_ptr().cast(), text.len()));
        each.unzip()
    };
    // SAFETY: `op` is open, and every text is given with its length.
    unsafe {
        match step {
            Step::Create => {
                (functions.rados_write_op_create)(op, abi::CREATE_EXCLUSIVE, ptr::null());
            }
            Step::AssertExists => (functions.rados_write_op_assert_exists)(op),
            Step::Compare(key, value) => (functions.rados_write_op_omap_cmp2)(
                op,
                key.as_ptr().cast(),
                abi::COMPARE_EQUAL,
                value.as_ptr().cast(),
                key.len(),
                value.len(),
                ptr::null_mut(),
            ),
            Step::Set(entries) => {
                let (keys, values): (Vec<_>, Vec<_>) = entries.iter().copied().unzip();
                let ((keys, key_lens), (values, value_lens)) = (pointers(&keys), pointers(&values));
                (functions.rados_write_op_omap_set2)(
                    op,
                    keys.as_ptr(),
                    values.as_ptr(),
                    key_lens.as_ptr(),
                    value_lens.as_ptr(),
                    entries.len(),
                );
            }
            Step::Unset(keys) => {
                let (keys, lens) = pointers(keys);
                (functions.rados_write_op_omap_rm_keys2)(
                    op,
                    keys.as_ptr(),
                    lens.as_ptr(),
                    lens.len(),
                );
            }
            Step::Remove => (functions.rados_write_op_remove)(op),
        }
    }
}

/// Copies what a read found.
///
/// # Safety
///
/// `found` is what a read that succeeded has filled.
unsafe fn collect(functions: &abi::Functions, found: abi::OmapIter) -> BTreeMap<String, String> {
    let text = |start: *mut _, len| {
        // SAFETY: the library says how many bytes there are.
        let bytes = unsafe { slice::from_raw_parts(start, len) };
        String::from_utf8_lossy(bytes).into_owned()
    };
    let mut entries = BTreeMap::new();
    loop {
        let (mut key, mut value) = (ptr::null_mut(), ptr::null_mut());
        let (mut key_len, mut value_len) = (0, 0);
        // SAFETY: as this function asks for; the four places outlive the call.
        let answer = unsafe {
            (functions.rados_omap_get_next2)(
                found,
                &raw mut key,
                &raw mut value,
                &raw mut key_len,
                &raw mut value_len,
            )
        };
        // It ends with a key of null.
        if answer < 0 || key.is_null() {
            return entries;
        }
        let key = text(key.cast::<u8>(), key_len);
        let value = match value_len {
            0 => String::new(),
            len => text(value.cast(), len),
        };
        entries.insert(key, value);
    }
}
