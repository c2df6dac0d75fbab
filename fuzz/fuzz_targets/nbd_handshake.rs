//! An NBD server that says anything.
//!
//! A random stream hardly ever greets as a server does. So the first byte tells
//! how far the server behaves before it goes astray: not at all, through its
//! greeting, or up to the payload of its answers.

#![no_main]

use std::io::{self, Cursor, Read, Write};

use libfuzzer_sys::fuzz_target;
use uring_csi::internals::handshake;

const GREETING: &[u8] = b"NBDMAGICIHAVEOPT\0\x03";
const REPLY_MAGIC: [u8; 8] = 0x0003_e889_0455_65a9_u64.to_be_bytes();
const OPT_GO: u32 = 7;

/// A server that has said all it will say, and listens to nothing.
struct Script(Cursor<Vec<u8>>);

impl Read for Script {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for Script {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Replies to `NBD_OPT_GO`, each a type and a payload of up to 15 bytes.
fn replies(mut data: &[u8]) -> Vec<u8> {
    let mut says = GREETING.to_vec();
    while let [kind, length, rest @ ..] = data {
        let (payload, rest) = rest.split_at(usize::from(length % 16).min(rest.len()));
        // ACK and INFO are 1 and 3, errors have the highest bit.
        let kind = u32::from(kind & 0x7f) | (u32::from(kind & 0x80) << 24);
        says.extend(REPLY_MAGIC);
        says.extend(OPT_GO.to_be_bytes());
        says.extend(kind.to_be_bytes());
        says.extend((payload.len() as u32).to_be_bytes());
        says.extend(payload);
        data = rest;
    }
    says
}

fuzz_target!(|data: &[u8]| {
    let Some((how, data)) = data.split_first() else {
        return;
    };
    let says = match how % 3 {
        0 => data.to_vec(),
        1 => [GREETING, data].concat(),
        _ => replies(data),
    };
    if let Ok(info) = handshake::go(&mut Script(Cursor::new(says.clone())), "disk") {
        assert!(info.minimum_block.is_power_of_two());
        assert!(info.minimum_block <= info.maximum_block);
        assert!(i64::try_from(info.bytes).is_ok());
    }
    let _ = handshake::query(&mut Script(Cursor::new(says)), "disk");
});
