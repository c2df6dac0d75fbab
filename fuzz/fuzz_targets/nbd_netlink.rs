//! A datagram of the kernel's NBD family that holds anything.

#![no_main]

use libfuzzer_sys::fuzz_target;
use uring_csi::internals::announced;

fuzz_target!(|data: &[u8]| {
    let _ = announced(data);
    // With a length that is right, what follows the header is looked at, too.
    let mut whole = data.to_vec();
    if let (Some(length), Ok(bytes)) = (whole.get_mut(..4), u32::try_from(data.len())) {
        length.copy_from_slice(&bytes.to_ne_bytes());
        let _ = announced(&whole);
    }
});
