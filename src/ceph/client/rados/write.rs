//! Atomic changes to an object.

use std::ptr;

use super::{IoCtx, abi};
use crate::ceph::client::CephError;

/// Changes to one object, which the OSD applies in this order, all or none.
#[derive(Clone, Debug, Default)]
pub struct WriteOp<'a> {
    steps: Vec<WriteStep<'a>>,
    is_forced: bool,
}

#[derive(Clone, Debug)]
enum WriteStep<'a> {
    Create,
    AssertExists,
    Compare(&'a str, &'a str),
    Set(Vec<(&'a str, &'a str)>),
    Unset(Vec<&'a str>),
    Unlock(&'a str, &'a str),
    Remove,
}

impl<'a> WriteOp<'a> {
    /// Without changes.
    pub fn new() -> Self {
        Self::default()
    }

    fn then(mut self, step: WriteStep<'a>) -> Self {
        self.steps.push(step);
        self
    }

    /// Creates the object; fails if it exists ([`CephError::is_exists`]).
    #[must_use]
    pub fn create(self) -> Self {
        self.then(WriteStep::Create)
    }

    /// Fails if the object does not exist ([`CephError::is_not_found`]).
    #[must_use]
    pub fn assert_exists(self) -> Self {
        self.then(WriteStep::AssertExists)
    }

    /// Fails if the key has another value ([`CephError::is_mismatch`]), or the object does
    /// not exist ([`CephError::is_not_found`]). An absent key has the empty value.
    #[must_use]
    pub fn compare(self, key: &'a str, value: &'a str) -> Self {
        self.then(WriteStep::Compare(key, value))
    }

    /// Sets keys to values; creates the object if it does not exist.
    #[must_use]
    pub fn set(self, entries: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        self.then(WriteStep::Set(entries.into_iter().collect()))
    }

    /// Removes keys; absent ones are no error.
    #[must_use]
    pub fn unset(self, keys: impl IntoIterator<Item = &'a str>) -> Self {
        self.then(WriteStep::Unset(keys.into_iter().collect()))
    }

    /// Removes the lock of that name that this connection has by that cookie; fails if it has
    /// none ([`CephError::is_not_found`]).
    #[must_use]
    pub fn unlock(self, name: &'a str, cookie: &'a str) -> Self {
        self.then(WriteStep::Unlock(name, cookie))
    }

    /// Removes the object.
    #[must_use]
    pub fn remove(self) -> Self {
        self.then(WriteStep::Remove)
    }

    /// The OSD takes the operation also if the pool is full.
    #[must_use]
    pub fn forced(self) -> Self {
        Self {
            is_forced: true,
            ..self
        }
    }
}

impl IoCtx {
    /// Removes an object ([`CephError::is_not_found`]).
    pub fn remove(&self, object: &str) -> Result<(), CephError> {
        self.run("remove", object, &WriteOp::new().remove())
    }

    /// Applies changes to one object, all or none.
    pub fn operate(&self, object: &str, op: &WriteOp<'_>) -> Result<(), CephError> {
        self.run("change", object, op)
    }

    pub(super) fn run(
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
        let flags = if op.is_forced { abi::FULL_FORCE } else { 0 };
        // SAFETY: the operation is complete, the name ends in NUL.
        let answer = unsafe {
            let answer = (functions.rados_write_op_operate)(
                raw,
                self.raw(),
                name.as_ptr(),
                ptr::null_mut(),
                flags,
            );
            (functions.rados_release_write_op)(raw);
            answer
        };
        call.changed(answer)
    }
}

/// Adds one step to an operation of the library, which copies the arguments.
fn add(functions: &abi::Functions, op: abi::WriteOp, step: &WriteStep<'_>) {
    let pointers = |texts: &[&str]| -> (Vec<_>, Vec<_>) {
        let each = texts.iter().map(|text| (text.as_ptr().cast(), text.len()));
        each.unzip()
    };
    // SAFETY: `op` is not released, and every text comes with its length.
    unsafe {
        match step {
            WriteStep::Create => {
                (functions.rados_write_op_create)(op, abi::CREATE_EXCLUSIVE, ptr::null());
            }
            WriteStep::AssertExists => (functions.rados_write_op_assert_exists)(op),
            WriteStep::Compare(key, value) => (functions.rados_write_op_omap_cmp2)(
                op,
                key.as_ptr().cast(),
                abi::COMPARE_EQUAL,
                value.as_ptr().cast(),
                key.len(),
                value.len(),
                ptr::null_mut(),
            ),
            WriteStep::Set(entries) => {
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
            WriteStep::Unset(keys) => {
                let (keys, lens) = pointers(keys);
                (functions.rados_write_op_omap_rm_keys2)(
                    op,
                    keys.as_ptr(),
                    lens.as_ptr(),
                    lens.len(),
                );
            }
            WriteStep::Unlock(name, cookie) => {
                let input = unlock_input(name, cookie);
                (functions.rados_write_op_exec)(
                    op,
                    c"lock".as_ptr(),
                    c"unlock".as_ptr(),
                    input.as_ptr().cast(),
                    input.len(),
                    ptr::null_mut(),
                );
            }
            WriteStep::Remove => (functions.rados_write_op_remove)(op),
        }
    }
}

/// The input of the method `unlock` of the object class `lock` (`cls_lock_unlock_op` in Ceph's
/// `cls_lock_ops.h`): its version, the oldest that can read it, the length of what follows,
/// and two texts after their lengths, all little endian.
fn unlock_input(name: &str, cookie: &str) -> Vec<u8> {
    let len = |len: usize| u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes();
    let text = |text: &str| [&len(text.len()), text.as_bytes()].concat();
    let texts = [text(name), text(cookie)].concat();
    [&[1, 1], &len(texts.len())[..], &texts].concat()
}
