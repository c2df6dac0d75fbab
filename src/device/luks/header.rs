//! The metadata of a LUKS2 header (LUKS2 On-Disk Format Specification, 3).

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::{LuksError, cryptsetup, failed};

/// cryptsetup(8): wrong parameters, such as a device without a header.
const NOT_LUKS: i32 = 1;

/// What `luksDump --dump-json-metadata` prints.
#[derive(Debug, Deserialize)]
pub(super) struct LuksHeader {
    pub keyslots: BTreeMap<u32, KeySlot>,
    /// Of each type with keys of its own.
    pub tokens: BTreeMap<u32, Value>,
    /// The areas of data.
    segments: BTreeMap<u32, DataSegment>,
}

/// An area of data. A re-encryption under way has several.
#[derive(Debug, Deserialize)]
struct DataSegment {
    #[serde(rename = "type")]
    kind: String,
    /// In bytes, as text.
    offset: String,
}

/// A key slot; that of a re-encryption under way has no key of a passphrase.
#[derive(Debug, Deserialize)]
pub(super) struct KeySlot {
    kdf: Option<KeyDerivation>,
}

/// How a passphrase becomes the key of its slot.
#[derive(Debug, Deserialize)]
struct KeyDerivation {
    /// Random, in base64.
    salt: String,
    /// Of PBKDF2 alone.
    iterations: Option<u32>,
}

impl LuksHeader {
    /// None if there is no complete one: an interrupted format writes the header's start,
    /// then its checksum, and its key last.
    pub(super) fn read(node: &str) -> Result<Option<Self>, LuksError> {
        let args = ["--dump-json-metadata", node];
        let dump = match cryptsetup("luksDump", &args, node) {
            Err(LuksError::Failed { status, .. }) if status.code() == Some(NOT_LUKS) => {
                return Ok(None);
            }
            dump => dump?,
        };
        serde_json::from_slice(&dump)
            .map(Some)
            .map_err(|error| failed(format!("read the LUKS header of {node}"))(error.into()))
    }

    /// Where the data begins, in bytes; none unless all of it is one encrypted area.
    pub(super) fn data_offset(&self) -> Option<u64> {
        let mut segments = self.segments.values();
        match (segments.next(), segments.next()) {
            (Some(only), None) if only.kind == "crypt" => only.offset.parse().ok(),
            _ => None,
        }
    }
}

impl KeySlot {
    /// The iterations of PBKDF2; none if the key is derived otherwise.
    pub(super) fn iterations(&self) -> Option<u32> {
        self.kdf.as_ref()?.iterations
    }

    /// The salt, which no other key has.
    pub(super) fn salt(&self) -> Option<&str> {
        Some(&self.kdf.as_ref()?.salt)
    }
}
