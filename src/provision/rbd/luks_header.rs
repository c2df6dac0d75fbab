//! Where the data of an encrypted image begins: its device on a node is what follows the LUKS2
//! header (LUKS2 On-Disk Format Specification, 2 and 3). The image encrypts each sector for
//! itself, in place, so what has changed in the image has changed in the device.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::error::RbdError;
use crate::ceph::client::rbd::Image;

const MAGIC: &[u8] = b"LUKS\xba\xbe\0\x02";
/// The size of the binary header, which the JSON area follows.
const BINARY: usize = 4096;
/// The largest size of both.
const LARGEST: u64 = 4 << 20;

#[derive(Debug, Deserialize)]
struct Areas {
    segments: BTreeMap<u32, LuksSegment>,
}

#[derive(Debug, Deserialize)]
struct LuksSegment {
    /// In bytes, as text.
    offset: String,
    size: String,
}

/// The offset of the device's first byte in the image. An image that no node has formatted has
/// no header, and no data.
pub fn data_offset(image: &Image) -> Result<u64, RbdError> {
    let refused = |why| RbdError::NoDataOffset {
        image: image.to_string(),
        why,
    };
    let mut binary = vec![0; BINARY];
    image.read(0, &mut binary)?;
    if binary.iter().all(|byte| *byte == 0) {
        return Ok(0);
    }
    let size = header_size(&binary).ok_or_else(|| refused("it has no header of LUKS2"))?;
    let mut json = vec![0; size - BINARY];
    image.read(BINARY as u64, &mut json)?;
    parse(&json)
        .filter(|offset| *offset >= size as u64)
        .ok_or_else(|| refused("its LUKS2 header has not one segment of data to the image's end"))
}

/// The size of binary header and JSON area.
fn header_size(binary: &[u8]) -> Option<usize> {
    let size = binary.strip_prefix(MAGIC)?.first_chunk()?;
    let size = Some(u64::from_be_bytes(*size)).filter(|size| *size <= LARGEST)?;
    usize::try_from(size).ok().filter(|size| *size > BINARY)
}

/// The offset of the only segment; a re-encryption under way has several.
fn parse(json: &[u8]) -> Option<u64> {
    let text = json.split(|byte| *byte == 0).next()?;
    let areas: Areas = serde_json::from_slice(text).ok()?;
    let mut segments = areas.segments.into_values();
    let only = segments.next().filter(|only| only.size == "dynamic")?;
    let offset = only.offset.parse().ok()?;
    segments.next().is_none().then_some(offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_header_of_luks2_with_one_segment_is_read() {
        let mut binary = vec![0; BINARY];
        binary[..8].copy_from_slice(MAGIC);
        for (size, read) in [(16384, Some(16384)), (4096, None), (LARGEST + 1, None)] {
            binary[8..16].copy_from_slice(&u64::to_be_bytes(size));
            assert_eq!(header_size(&binary), read, "{size}");
        }
        assert_eq!(header_size(&[0; 3]), None);
        let segment = r#"{"type":"crypt","offset":"16777216","size":"dynamic"}"#;
        let with = |segments: &str| format!("{{\"segments\":{{{segments}}},\"tokens\":{{}}}}\0\0x");
        let one = with(&format!("\"0\":{segment}"));
        assert_eq!(parse(one.as_bytes()), Some(16 << 20));
        let two = with(&format!("\"0\":{segment},\"1\":{segment}"));
        for bad in [&*two, &with(""), "", "{}", &one.replace("dynamic", "512")] {
            assert_eq!(parse(bad.as_bytes()), None, "{bad}");
        }
    }
}
