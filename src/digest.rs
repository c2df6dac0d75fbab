//! File names derived from arbitrary names.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};

/// SHA-256 in lowercase hexadecimal, 64 characters: a file name for a volume's name or
/// handle, which may hold any character but control characters, and be longer than a
/// file name.
pub fn sha256_hex(text: &str) -> String {
    Sha256::digest(text.as_bytes())
        .iter()
        .fold(String::with_capacity(64), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        })
}
