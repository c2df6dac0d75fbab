//! A server's announcement of an export, as settings of the kernel's driver.

use super::{
    NbdError,
    handshake::{self, ExportInfo},
};
use crate::nbd::Export;

/// Logical block sizes that the driver accepts, in bytes.
const BLOCKS: std::ops::RangeInclusive<u32> = 512..=4096;

/// The driver's default maximum request size in bytes.
const KERNELS_LARGEST: u32 = 32 << 20;

/// The driver's settings for an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub bytes: u64,
    pub block_bytes: u32,
    pub flags: u16,
    /// The largest request, where the server's limit is below the kernel's.
    pub largest_kibibytes: Option<u32>,
}

impl Shape {
    /// Whether the server supports `NBD_CMD_WRITE_ZEROES`.
    pub fn writes_zeroes(&self) -> bool {
        self.flags & handshake::flags::WRITE_ZEROES != 0
    }

    pub fn of(export: &Export, info: &ExportInfo, read_only: bool) -> Result<Self, NbdError> {
        let unsuited = |what: String| NbdError::Unsuited {
            export: export.clone(),
            what,
        };
        if !read_only && info.flags & handshake::flags::READ_ONLY != 0 {
            return Err(unsuited(
                "is served read-only; stage the volume read-only, or serve it writable".to_owned(),
            ));
        }
        // A file system on it depends on this size, which must not change with the
        // server: the smallest that the server allows.
        let block_bytes = info.minimum_block.max(*BLOCKS.start());
        if !BLOCKS.contains(&block_bytes) {
            return Err(unsuited(format!(
                "takes requests of {block_bytes} bytes at least, more than the {} of a page",
                BLOCKS.end()
            )));
        }
        if info.maximum_block < *BLOCKS.end() {
            return Err(unsuited(format!(
                "takes requests of {} bytes at most, less than the {} of a page",
                info.maximum_block,
                BLOCKS.end()
            )));
        }
        let bytes = info.bytes - info.bytes % u64::from(block_bytes);
        if bytes == 0 {
            return Err(unsuited(format!("has {} bytes, not one block", info.bytes)));
        }
        let flags = info.flags & handshake::flags::DRIVERS;
        Ok(Self {
            bytes,
            block_bytes,
            flags: if read_only {
                flags | handshake::flags::READ_ONLY
            } else {
                flags
            },
            largest_kibibytes: (info.maximum_block < KERNELS_LARGEST)
                .then_some(info.maximum_block / 1024),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INFO: ExportInfo = ExportInfo {
        bytes: 10 << 20,
        flags: 0,
        minimum_block: 1,
        maximum_block: 32 << 20,
    };

    fn shape(info: ExportInfo, read_only: bool) -> Result<Shape, String> {
        let export = "nbd://host/x".parse().unwrap();
        Shape::of(&export, &info, read_only).map_err(|error| error.to_string())
    }

    #[test]
    fn the_device_has_the_server_s_limits() {
        let plain = shape(INFO, false).unwrap();
        assert_eq!((plain.block_bytes, plain.largest_kibibytes), (512, None));
        let limited = ExportInfo {
            bytes: (10 << 20) + 4095,
            minimum_block: 4096,
            maximum_block: 1 << 20,
            // Resizing, a cache, and undefined flags.
            flags: 1 << 9 | 1 << 10 | 1 << 15,
        };
        let expected = Shape {
            bytes: 10 << 20,
            block_bytes: 4096,
            flags: handshake::flags::READ_ONLY,
            largest_kibibytes: Some(1024),
        };
        assert_eq!(shape(limited, true).unwrap(), expected);
    }

    #[test]
    fn exports_that_the_driver_cannot_serve_are_refused() {
        let read_only = ExportInfo {
            flags: handshake::flags::READ_ONLY,
            ..INFO
        };
        let coarse = ExportInfo {
            minimum_block: 8192,
            ..INFO
        };
        let fine = ExportInfo {
            maximum_block: 2048,
            ..INFO
        };
        let empty = ExportInfo { bytes: 511, ..INFO };
        for (info, why) in [
            (read_only, "served read-only"),
            (coarse, "8192 bytes at least"),
            (fine, "2048 bytes at most"),
            (empty, "511 bytes"),
        ] {
            let error = shape(info, false).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        assert!(shape(read_only, true).is_ok());
    }
}
