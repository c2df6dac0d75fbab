//! The layout of a new image.

use std::ptr;

use super::{Features, abi};
use crate::ceph::client::{CephError, library::Libraries, rados::IoCtx};

/// The layout of a new image; the cluster's configuration gives the rest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageOptions {
    /// The features; librbd adds those that the other options need.
    pub features: Option<Features>,
    /// Bytes of an object, a power of two between 4 KiB and 32 MiB.
    pub object_size: Option<u64>,
    /// The stripe unit in bytes, and the stripe count, in objects.
    pub striping: Option<(u64, u64)>,
    /// The pool for the data.
    pub data_pool: Option<String>,
}

impl ImageOptions {
    pub(super) fn for_create(&self, io: &IoCtx) -> Result<RawOptions, CephError> {
        let raw = RawOptions::new(io.cluster().libraries());
        let call = io
            .cluster()
            .call("set", || "an option of the new image".to_owned());
        let numbers = [
            (
                abi::option::FEATURES,
                self.features.map(|features| features.0),
            ),
            // A size that is no power of two becomes an order that the library
            // refuses.
            (
                abi::option::ORDER,
                self.object_size.map(|size| u64::from(order(size))),
            ),
            (
                abi::option::STRIPE_UNIT,
                self.striping.map(|(unit, _)| unit),
            ),
            (
                abi::option::STRIPE_COUNT,
                self.striping.map(|(_, count)| count),
            ),
        ];
        let functions = &raw.libraries.rbd;
        for (option, value) in numbers {
            let Some(value) = value else { continue };
            // SAFETY: the options are open.
            call.check(unsafe {
                (functions.rbd_image_options_set_uint64)(raw.raw, option, value)
            })?;
        }
        if let Some(pool) = &self.data_pool {
            let (option, name) = (abi::option::DATA_POOL, call.text(pool)?);
            // SAFETY: the options are open, the name ends in NUL and is copied.
            let set =
                unsafe { (functions.rbd_image_options_set_string)(raw.raw, option, name.as_ptr()) };
            call.check(set)?;
        }
        Ok(raw)
    }

    pub(super) fn for_clone(&self, io: &IoCtx) -> Result<RawOptions, CephError> {
        const V2: u64 = 2;
        let raw = self.for_create(io)?;
        let call = io.cluster().call("set", || "the clone's format".to_owned());
        let set = raw.libraries.rbd.rbd_image_options_set_uint64;
        // SAFETY: the options are open.
        call.check(unsafe { set(raw.raw, abi::option::CLONE_FORMAT, V2) })?;
        Ok(raw)
    }
}

/// The size as a power of two; for any other size, an order that librbd refuses.
fn order(size: u64) -> u32 {
    if size.is_power_of_two() {
        size.ilog2()
    } else {
        u32::MAX
    }
}

/// Options in the library's form.
pub(super) struct RawOptions {
    raw: abi::Options,
    libraries: &'static Libraries,
}

impl RawOptions {
    fn new(libraries: &'static Libraries) -> Self {
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` outlives the call.
        unsafe { (libraries.rbd.rbd_image_options_create)(&raw mut raw) };
        Self { raw, libraries }
    }

    pub fn raw(&self) -> abi::Options {
        self.raw
    }
}

impl Drop for RawOptions {
    fn drop(&mut self) {
        // SAFETY: the options are open, and not used any more.
        unsafe { (self.libraries.rbd.rbd_image_options_destroy)(self.raw) };
    }
}
