//! Classifies the content of a device by its superblocks and signatures.
//!
//! The result decides whether a device may be formatted. So [`regions`] covers the
//! supported superblocks and every place where another format keeps a signature, backups
//! included, and [`classify`] calls a device blank only if all of these were read and hold
//! nothing but zeros. `classify` does no I/O and cannot fail: content that it does not
//! recognise is [`Content::Unknown`], which is never formatted.
//!
//! A signature within the area of a file system may be data of a file, such as a disk
//! image. A signature at the start of the device cannot, and takes precedence over a stale
//! superblock that an array or an encryption layer did not overwrite.

use std::{fs::File, io, os::unix::fs::FileExt as _};

use serde::{Deserialize, Serialize};

use super::FsType;
pub use crate::ring::probe::{Block, Region};

mod foreign;
mod superblock;

pub use foreign::LUKS;
pub(super) use superblock::{EXT_LEN, EXT_OFFSET, ExtSize, ext_size};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// `O_DIRECT` demands that offsets and lengths are multiples of this.
const ALIGN: u64 = 4 * KIB;
/// The head of the device holds: partition tables, LUKS, LVM, md, bcache, ext, XFS, btrfs, ZFS.
const HEAD: u64 = 256 * KIB;
/// The tail of the device holds: GPT's second table, md, DRBD, ZFS.
const TAIL: u64 = 512 * KIB;
/// Offsets of one block each: the start of the first partition, with VMFS' signature;
/// ext's second superblock with blocks of 1, 2 and 4 KiB; btrfs' second to fourth.
const BETWEEN: [u64; 7] = [
    MIB,
    8 * MIB,
    32 * MIB,
    64 * MIB,
    128 * MIB,
    256 * GIB,
    1024 * 1024 * GIB,
];

/// The content of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Zeros in every region: it may be formatted.
    Blank,
    /// A supported file system.
    Fs(FsInfo),
    /// Another format, which is never overwritten.
    Foreign {
        /// A noun phrase.
        what: &'static str,
    },
    /// Data of an unknown format, or a region that was not read.
    Unknown {
        /// Offset of the first such byte.
        offset: u64,
    },
}

impl Content {
    /// Whether a killed mkfs of a blank device may have left this: each mkfs writes the
    /// primary superblock last, after its copies, or marks it incomplete until then.
    pub fn is_partial_format(&self) -> bool {
        match self {
            Self::Unknown { .. } => true,
            Self::Foreign { what } => superblock::PARTIAL_FORMATS.contains(what),
            Self::Blank | Self::Fs(_) => false,
        }
    }
}

/// The properties of a file system by its superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsInfo {
    /// The type.
    pub fs: FsType,
    /// The UUID in the superblock.
    pub uuid: [u8; 16],
    /// Its size in bytes.
    pub bytes: u64,
    /// It recorded errors, or was not unmounted cleanly and has no journal: it needs a
    /// check before it is mounted.
    pub dirty: bool,
    /// The next mount replays a journal. Always false for XFS, whose superblock does not
    /// record it.
    pub needs_recovery: bool,
}

/// The regions that classify a device of `size` bytes, by offset and without overlap.
pub fn regions(size: u64) -> Vec<Region> {
    let mut regions: Vec<Region> = Vec::with_capacity(BETWEEN.len() + 2);
    let mut done = 0;
    let tail = size.saturating_sub(TAIL) / ALIGN * ALIGN;
    let between = BETWEEN.map(|offset| (offset, offset + ALIGN));
    let wanted = [(0, HEAD)].into_iter().chain(between);
    for (start, end) in wanted.filter(|(start, _)| *start < tail) {
        regions.push(region(start, end.min(tail)));
        done = end.min(tail);
    }
    let start = tail.max(done);
    if start < size {
        regions.push(region(start, size));
    }
    regions
}

fn region(start: u64, end: u64) -> Region {
    Region {
        offset: start,
        len: usize::try_from(end - start).expect("no region is larger than a megabyte"),
    }
}

/// Reads and classifies an open device of `size` bytes. Blocks as long as the device
/// does: call it on a lane.
pub fn content_of(file: &File, size: u64) -> io::Result<Content> {
    let read = |region: Region| {
        let mut data = vec![0; region.len];
        file.read_exact_at(&mut data, region.offset)?;
        let offset = region.offset;
        Ok(Block { offset, data })
    };
    let blocks: io::Result<Vec<_>> = regions(size).into_iter().map(read).collect();
    Ok(classify(size, &blocks?))
}

/// Classifies a device of `size` bytes by its [`regions`].
pub fn classify(size: u64, blocks: &[Block]) -> Content {
    let disk = Disk { size, blocks };
    if let Some(what) = foreign::at_start(&disk) {
        return Content::Foreign { what };
    }
    let found: Vec<_> = superblock::READERS
        .iter()
        .filter_map(|read| read(&disk))
        .collect();
    match found[..] {
        [Ok(info)] => {
            return match foreign::at_end(&disk, info.bytes) {
                Some(what) => Content::Foreign { what },
                None => Content::Fs(info),
            };
        }
        [Err(what)] => return Content::Foreign { what },
        [_, _, ..] => {
            return Content::Foreign {
                what: "superblocks of more than one file system",
            };
        }
        [] => {}
    }
    let foreign = foreign::at_end(&disk, 0)
        .or_else(|| foreign::anywhere(&disk))
        .or_else(|| superblock::backup(&disk));
    if let Some(what) = foreign {
        return Content::Foreign { what };
    }
    match disk.first_unproven() {
        None => Content::Blank,
        Some(offset) => Content::Unknown { offset },
    }
}

/// The regions of a device that were read.
struct Disk<'a> {
    size: u64,
    blocks: &'a [Block],
}

impl Disk<'_> {
    /// The bytes at an offset; `None` where they were not read.
    fn slice(&self, offset: u64, len: usize) -> Option<&[u8]> {
        self.blocks.iter().find_map(|block| {
            let start = usize::try_from(offset.checked_sub(block.offset)?).ok()?;
            block.data.get(start..start.checked_add(len)?)
        })
    }

    fn array<const N: usize>(&self, offset: u64) -> Option<[u8; N]> {
        self.slice(offset, N)?.try_into().ok()
    }

    fn has(&self, offset: u64, magic: &[u8]) -> bool {
        self.slice(offset, magic.len()) == Some(magic)
    }

    /// The first byte that is not known to be zero.
    fn first_unproven(&self) -> Option<u64> {
        if self.size == 0 {
            return Some(0);
        }
        regions(self.size).iter().find_map(|region| {
            let Some(data) = self.slice(region.offset, region.len) else {
                return Some(region.offset);
            };
            let at = data.iter().position(|byte| *byte != 0)?;
            Some(region.offset + at as u64)
        })
    }
}

#[cfg(test)]
mod tests;
