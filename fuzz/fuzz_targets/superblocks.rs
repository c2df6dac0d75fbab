//! A device that holds anything at the places where superblocks are.

#![no_main]

use libfuzzer_sys::fuzz_target;
use uring_csi::internals::{Block, classify, regions};

fuzz_target!(|data: &[u8]| {
    let size = 64 << 20;
    let blocks: Vec<_> = regions(size)
        .iter()
        .map(|region| {
            let mut bytes = vec![0; region.len];
            let taken = data.len().min(bytes.len());
            bytes[..taken].copy_from_slice(&data[..taken]);
            Block {
                offset: region.offset,
                data: bytes,
            }
        })
        .collect();
    let _ = classify(size, &blocks);
});
