//! The data of an image, and where it has changed.

use std::{
    ffi::{c_int, c_void},
    ops::Range,
    ptr,
};

use super::Image;
use crate::ceph::client::CephError;

/// Adds an extent, and whether it has data, to the list `data`.
///
/// # Safety
///
/// `data` is a `Vec<(Range<u64>, bool)>` that nobody else uses during the call.
unsafe extern "C" fn collect(offset: u64, len: usize, has_data: c_int, data: *mut c_void) -> c_int {
    // SAFETY: as this function requires.
    let found = unsafe { &mut *data.cast::<Vec<(Range<u64>, bool)>>() };
    found.push((offset..offset + len as u64, has_data != 0));
    0
}

impl Image {
    /// The extents of this part of the image that have changed since a snapshot with that
    /// name; without one, all that may have data, also in the parent. In order; an extent
    /// may hold more than has changed. Unless the image has the feature fast-diff, the time
    /// grows with the part's objects.
    pub fn changes(
        &self,
        since: Option<&str>,
        part: &Range<u64>,
    ) -> Result<Vec<Range<u64>>, CephError> {
        let call = self.call("read the changes of");
        let name = since.map(|name| call.text(name)).transpose()?;
        let name = name.as_ref().map_or(ptr::null(), |name| name.as_ptr());
        let mut found: Vec<(Range<u64>, bool)> = Vec::new();
        let data = (&raw mut found).cast();
        let (offset, len) = (part.start, part.end - part.start);
        let diff = self.functions().rbd_diff_iterate2;
        // SAFETY: the image is open, the name ends in NUL, and `found` outlives the call,
        // during which the library calls `collect`, one call at a time.
        let answer = unsafe { diff(self.raw(), name, offset, len, 1, 0, collect, data) };
        call.check(answer)?;
        if since.is_none() {
            found.retain(|(_, has_data)| *has_data);
        }
        let mut extents: Vec<_> = found.into_iter().map(|(extent, _)| extent).collect();
        extents.sort_unstable_by_key(|extent: &Range<u64>| extent.start);
        Ok(extents)
    }

    /// Reads this part of the image; what is beyond its end reads as zeros.
    pub fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), CephError> {
        let read = self.functions().rbd_read;
        // SAFETY: the image is open, and there is room for the length at the address.
        let count = unsafe { read(self.raw(), offset, data.len(), data.as_mut_ptr().cast()) };
        let count = self.call("read").check64(count as i64)?;
        let end = usize::try_from(count).unwrap_or(usize::MAX);
        let end = end.min(data.len());
        data[end..].fill(0);
        Ok(())
    }

    /// Writes this part of the image.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), CephError> {
        let write = self.functions().rbd_write;
        // SAFETY: the image is open, and the data has that length.
        let count = unsafe { write(self.raw(), offset, data.len(), data.as_ptr().cast()) };
        self.call("write to").check64(count as i64).map(drop)
    }

    /// Writes zeros, which take no space where whole objects are zeros.
    pub fn write_zeros(&self, offset: u64, len: usize) -> Result<(), CephError> {
        let write = self.functions().rbd_write_zeroes;
        // SAFETY: the image is open.
        let count = unsafe { write(self.raw(), offset, len, 0, 0) };
        self.call("write zeros to").check64(count as i64).map(drop)
    }
}
