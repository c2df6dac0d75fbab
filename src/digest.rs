//! SHA-256 and hexadecimal.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};

/// SHA-256 in lowercase hexadecimal, 64 characters: a file name for a volume's name or
/// handle, which may hold any character but control characters, and be longer than a
/// file name.
pub fn sha256_hex(text: &str) -> String {
    hex(&Sha256::digest(text.as_bytes()))
}

/// Bytes in lowercase hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .fold(String::with_capacity(2 * bytes.len()), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        })
}
