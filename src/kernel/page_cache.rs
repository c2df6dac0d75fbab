//! What the page cache has of a file (mincore(2)). A read that must not wait
//! (`RWF_NOWAIT`) would start to read what is missing.

use std::{fs::File, ops::Range, os::fd::AsRawFd as _, ptr};

/// Whether the cache has all of a range. False where the kernel does not say.
pub fn has(file: &File, range: &Range<u64>) -> bool {
    let page = rustix::param::page_size();
    let start = range.start - range.start % page as u64;
    let (Ok(len), Ok(offset)) = (
        usize::try_from(range.end - start),
        libc::off_t::try_from(start),
    ) else {
        return false;
    };
    // SAFETY: a new mapping, which nothing reads.
    let at = unsafe {
        libc::mmap(
            ptr::null_mut(),
            len,
            libc::PROT_READ,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            offset,
        )
    };
    if at == libc::MAP_FAILED {
        return false;
    }
    let mut pages = vec![0; len.div_ceil(page)];
    // SAFETY: it writes one byte for each page of the mapping.
    let told = unsafe { libc::mincore(at, len, pages.as_mut_ptr()) } == 0;
    // SAFETY: the mapping of above, which nothing refers to.
    unsafe { libc::munmap(at, len) };
    told && pages.iter().all(|page| page & 1 == 1)
}
