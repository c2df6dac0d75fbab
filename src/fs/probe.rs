//! What a device holds, told from its superblocks.
//!
//! The question behind all of this is whether a device may be formatted. So
//! [`regions`] names not only the places of the superblocks that are looked for
//! but every place where one of somebody else's would be, their backups
//! included, and [`classify`] calls a device blank only when all of these were
//! read and hold nothing but zeros. It reads nothing itself and cannot fail:
//! what it can't make sense of is [`Content::Unknown`], and nobody formats that.
//!
//! A signature within the area that a file system claims may be data of its
//! files (the image of a disk, say). One at the device's start cannot, and wins
//! over a file system's superblock that an array or an encryption left behind.

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
/// Offsets and lengths are multiples of it, as `O_DIRECT` demands.
const ALIGN: u64 = 4 * KIB;
/// Up to here: partition tables, LUKS, LVM, md, bcache, ext, XFS, btrfs, ZFS.
const HEAD: u64 = 256 * KIB;
/// From here to the end: GPT's second table, md, DRBD, ZFS.
const TAIL: u64 = 512 * KIB;
/// One block each: where the first partition starts and VMFS has its mark;
/// ext's second superblock with blocks of 1, 2 and 4 KiB; btrfs' second to
/// fourth.
const BETWEEN: [u64; 7] = [
    MIB,
    8 * MIB,
    32 * MIB,
    64 * MIB,
    128 * MIB,
    256 * GIB,
    1024 * 1024 * GIB,
];

/// What a device holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Zeros wherever anything could be told from: it may be formatted.
    Blank,
    /// A file system that volumes may carry.
    Fs(FsInfo),
    /// Something that is not ours to touch.
    Foreign {
        /// A noun phrase.
        what: &'static str,
    },
    /// Data of no known kind, or a place that could not be read.
    Unknown {
        /// The first such byte, from the device's start.
        offset: u64,
    },
}

impl Content {
    /// Whether a mkfs of a blank device, if it is killed, may leave this: each writes
    /// what makes a file system whole at last, after its copies, or a mark that says so.
    pub fn is_scrap(&self) -> bool {
        match self {
            Self::Unknown { .. } => true,
            Self::Foreign { what } => superblock::SCRAPS.contains(what),
            Self::Blank | Self::Fs(_) => false,
        }
    }
}

/// What a superblock says of its file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsInfo {
    /// Its kind.
    pub fs: FsType,
    /// Its identity.
    pub uuid: [u8; 16],
    /// Bytes that it claims of the device.
    pub bytes: u64,
    /// Errors were seen, or it was not unmounted and has no journal: to be
    /// checked before it is mounted.
    pub dirty: bool,
    /// The next mount replays a journal. XFS' superblock does not tell, its
    /// mount finds out by itself.
    pub needs_recovery: bool,
}

/// The pieces of a device of `size` bytes that tell what it holds, in the order
/// of their offsets and without overlap.
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

/// Reads what an open device of `size` bytes holds. It blocks for as long as the
/// device does: for a lane.
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

/// Tells what a device of `size` bytes holds from its [`regions`].
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

/// What was read of a device.
struct Disk<'a> {
    size: u64,
    blocks: &'a [Block],
}

impl Disk<'_> {
    /// Bytes as they are on the device, where they were read.
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
