//! The superblocks of ext, XFS and btrfs.
//!
//! A reader returns `None` without its magic number, the content of a valid
//! superblock, and otherwise a description of the defect.
//! Layouts: `Documentation/filesystems/ext4/super.rst`, XFS Algorithms & Data
//! Structures ("Superblocks"), `linux/btrfs_tree.h`.

use super::{Disk, FsInfo, FsType, GIB, KIB, MIB};

type Reader = fn(&Disk<'_>) -> Option<Result<FsInfo, &'static str>>;

pub(super) const READERS: [Reader; 3] = [ext, xfs, btrfs];

/// The states in which a killed mkfs may leave a device.
pub(super) const PARTIAL_FORMATS: [&str; 4] = [
    EXT_HEADLESS,
    XFS_UNFINISHED,
    BTRFS_UNFINISHED,
    BTRFS_HEADLESS,
];

const EXT_HEADLESS: &str = "an ext file system whose first superblock is missing";
const XFS_UNFINISHED: &str = "an XFS file system whose mkfs did not end";
const BTRFS_UNFINISHED: &str = "a btrfs file system whose mkfs did not end";
const BTRFS_HEADLESS: &str = "a btrfs file system whose first superblock is missing";

/// A structure on disk, read field by field. A field beyond its end is zero;
/// none of the readers below reads one.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn bytes<const N: usize>(&self, at: usize) -> [u8; N] {
        self.0.get(at..at + N).map_or([0; N], |bytes| {
            bytes.try_into().expect("the slice has N bytes")
        })
    }

    fn le16(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.bytes(at))
    }

    fn le32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.bytes(at))
    }

    fn le64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.bytes(at))
    }

    fn be16(&self, at: usize) -> u16 {
        u16::from_be_bytes(self.bytes(at))
    }

    fn be32(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.bytes(at))
    }

    fn be64(&self, at: usize) -> u64 {
        u64::from_be_bytes(self.bytes(at))
    }
}

/// Where ext's superblock is, bytes from the device's start.
pub(in crate::fs) const EXT_OFFSET: u64 = KIB;
/// Its length in bytes.
pub(in crate::fs) const EXT_LEN: usize = 1024;
const EXT_MAGIC: (usize, [u8; 2]) = (0x38, [0x53, 0xEF]);
const EXT_VALID: u16 = 1;
const EXT_ERRORS: u16 = 2;
const EXT_HAS_JOURNAL: u32 = 0x4;
const EXT_JOURNAL_UUID: usize = 0xD0;
const EXT_JOURNAL_INODE: usize = 0xE0;
const EXT_JOURNAL_DEVICE: usize = 0xE4;
/// The first byte of `s_mount_opts`, a text.
const EXT_MOUNT_OPTIONS: usize = 0x200;
const EXT_RECOVER: u32 = 0x4;
const EXT_JOURNAL_DEV: u32 = 0x8;
const EXT_64BIT: u32 = 0x80;
const EXT_METADATA_CSUM: u32 = 0x400;
/// `EXT4_FEATURE_INCOMPAT_SUPP`: filetype, recover, `meta_bg`, extents, 64bit,
/// mmp, `flex_bg`, `ea_inode`, `csum_seed`, largedir, `inline_data`, encrypt,
/// casefold.
const EXT_MOUNTABLE: u32 = 0x3_E7D6;

fn ext(disk: &Disk<'_>) -> Option<Result<FsInfo, &'static str>> {
    let raw = disk.slice(EXT_OFFSET, EXT_LEN)?;
    if !raw[EXT_MAGIC.0..].starts_with(&EXT_MAGIC.1) {
        return None;
    }
    let sb = Fields(raw);
    let incompatible = sb.le32(0x60);
    if incompatible & EXT_JOURNAL_DEV != 0 {
        return Some(Err("an external journal of an ext4 file system"));
    }
    let checksummed = sb.le32(0x64) & EXT_METADATA_CSUM != 0;
    let Some(size) = ext_size(raw) else {
        return Some(Err("an ext file system whose superblock is invalid"));
    };
    // ext4 stores it without the final complement.
    if checksummed && crc32c(!0, &raw[..0x3FC]) != sb.le32(0x3FC) {
        return Some(Err("an ext4 file system whose superblock is damaged"));
    }
    // The kernel and e2fsck would search the node's devices for the journal: e2fsck even
    // without has_journal, or with a journal inode. For an internal journal, or none,
    // mke2fs and tune2fs write zeros to these fields.
    let names_device = sb.bytes(EXT_JOURNAL_UUID) != [0; 16] || sb.le32(EXT_JOURNAL_DEVICE) != 0;
    let has_journal = sb.le32(0x5C) & EXT_HAS_JOURNAL != 0;
    if names_device || has_journal && sb.le32(EXT_JOURNAL_INODE) == 0 {
        return Some(Err(
            "an ext4 file system whose superblock names a journal device (where it has none, debugfs -w -R 'ssv journal_uuid clear' clears that)",
        ));
    }
    // The options may also name another device, or make the node panic after an error.
    if raw[EXT_MOUNT_OPTIONS] != 0 {
        return Some(Err(
            "an ext4 file system with mount options in its superblock (tune2fs -E mount_opts= clears them)",
        ));
    }
    if incompatible & !EXT_MOUNTABLE != 0 {
        return Some(Err(
            "an ext file system with features that ext4's driver does not mount",
        ));
    }
    let state = sb.le16(0x3A);
    Some(Ok(FsInfo {
        fs: FsType::Ext4,
        uuid: sb.bytes(0x68),
        bytes: size.bytes(),
        dirty: state & EXT_ERRORS != 0 || state & EXT_VALID == 0,
        needs_recovery: incompatible & EXT_RECOVER != 0,
    }))
}

/// The size of an ext file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::fs) struct ExtSize {
    /// Bytes of a block.
    pub block_size: u64,
    /// Blocks; their bytes fit into 64 bits.
    pub blocks: u64,
}

impl ExtSize {
    pub fn bytes(self) -> u64 {
        self.block_size * self.blocks
    }
}

/// The size in a superblock. It may be that of a mounted file system, whose checksum is
/// stale.
pub(in crate::fs) fn ext_size(superblock: &[u8]) -> Option<ExtSize> {
    let sb = Fields(superblock);
    let high = if sb.le32(0x60) & EXT_64BIT == 0 {
        0
    } else {
        u64::from(sb.le32(0x150)) << 32
    };
    let blocks = u64::from(sb.le32(0x4)) | high;
    // A block has 1 to 64 KiB; a group has at least one block.
    let (log_block_size @ 0..=6, 1..) = (sb.le32(0x18), sb.le32(0x20)) else {
        return None;
    };
    let block_size = KIB << log_block_size;
    let bytes = blocks.checked_mul(block_size)?;
    (bytes > 0).then_some(ExtSize { block_size, blocks })
}

const XFS_MAGIC: &[u8] = b"XFSB";
const XFS_NEEDS_REPAIR: u32 = 0x10;
const XFS_CRC_AT: usize = 224;

fn xfs(disk: &Disk<'_>) -> Option<Result<FsInfo, &'static str>> {
    let head = disk.slice(0, 512)?;
    if !head.starts_with(XFS_MAGIC) {
        return None;
    }
    let sb = Fields(head);
    let (block_size, sector_size) = (sb.be32(4), sb.be16(102));
    let version = sb.be16(100) & 0xF;
    let sane = block_size.is_power_of_two()
        && (512..=65536).contains(&block_size)
        && sector_size.is_power_of_two()
        && (512..=32768).contains(&sector_size)
        && (4..=5).contains(&version);
    let bytes = sb.be64(8).checked_mul(block_size.into());
    let (true, Some(bytes @ 1..)) = (sane, bytes) else {
        return Some(Err("an XFS file system whose superblock is invalid"));
    };
    if head[126] != 0 {
        return Some(Err(XFS_UNFINISHED));
    }
    let mut dirty = false;
    if version == 5 {
        let whole = disk.slice(0, sector_size.into())?;
        let crc = crc32c(!0, &whole[..XFS_CRC_AT]);
        let crc = crc32c(crc, &[0; 4]);
        let crc = crc32c(crc, &whole[XFS_CRC_AT + 4..]);
        if !crc != sb.le32(XFS_CRC_AT) {
            return Some(Err("an XFS file system whose superblock is damaged"));
        }
        dirty = sb.be32(216) & XFS_NEEDS_REPAIR != 0;
    }
    Some(Ok(FsInfo {
        fs: FsType::Xfs,
        uuid: sb.bytes(32),
        bytes,
        dirty,
        needs_recovery: false,
    }))
}

const BTRFS_OFFSET: u64 = 64 * KIB;
const BTRFS_LEN: usize = 4096;
const BTRFS_MAGIC: (u64, &[u8]) = (0x40, b"_BHRfS_M");
/// `BTRFS_MAGIC_TEMPORARY` of btrfs-progs.
const BTRFS_TEMPORARY: &[u8] = b"!BHRfS_M";

fn btrfs(disk: &Disk<'_>) -> Option<Result<FsInfo, &'static str>> {
    let magic_at = BTRFS_OFFSET + BTRFS_MAGIC.0;
    if disk.has(magic_at, BTRFS_TEMPORARY) {
        return Some(Err(BTRFS_UNFINISHED));
    }
    if !disk.has(magic_at, BTRFS_MAGIC.1) {
        return None;
    }
    let raw = disk.slice(BTRFS_OFFSET, BTRFS_LEN)?;
    let sb = Fields(raw);
    // The kernel verifies the other checksums (xxhash, sha256, blake2b).
    let crc32c_used = sb.le16(196) == 0;
    if crc32c_used && !crc32c(!0, &raw[32..]) != sb.le32(0) {
        return Some(Err("a btrfs file system whose superblock is damaged"));
    }
    let (devices, bytes) = (sb.le64(136), sb.le64(209));
    if sb.le64(48) != BTRFS_OFFSET || devices == 0 || bytes == 0 {
        return Some(Err("a btrfs file system whose superblock is invalid"));
    }
    if devices > 1 {
        return Some(Err("one device of a btrfs file system that has several"));
    }
    Some(Ok(FsInfo {
        fs: FsType::Btrfs,
        uuid: sb.bytes(32),
        bytes,
        dirty: false,
        needs_recovery: sb.le64(96) != 0,
    }))
}

/// A file system without its primary superblock, recognised by a backup superblock.
pub(super) fn backup(disk: &Disk<'_>) -> Option<&'static str> {
    // ext: at the start of block group 1, one KiB further with blocks of 1 KiB.
    let ext = [8 * MIB + KIB, 32 * MIB, 128 * MIB];
    if ext
        .iter()
        .any(|at| disk.has(at + EXT_MAGIC.0 as u64, &EXT_MAGIC.1))
    {
        return Some(EXT_HEADLESS);
    }
    let btrfs = [64 * MIB, 256 * GIB, 1024 * 1024 * GIB];
    if btrfs
        .iter()
        .any(|at| disk.has(at + BTRFS_MAGIC.0, BTRFS_MAGIC.1))
    {
        return Some(BTRFS_HEADLESS);
    }
    None
}

/// CRC-32C (Castagnoli), bits reflected, without the final complement.
fn crc32c(seed: u32, data: &[u8]) -> u32 {
    data.iter().fold(seed, |crc, byte| {
        CRC32C[usize::from(crc.to_le_bytes()[0] ^ byte)] ^ (crc >> 8)
    })
}

const CRC32C: [u32; 256] = crc32c_table();

const fn crc32c_table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut byte = 0_u8;
    loop {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = (crc >> 1) ^ (0x82F6_3B78 * (crc & 1));
            bit += 1;
        }
        table[byte as usize] = crc;
        if byte == u8::MAX {
            return table;
        }
        byte += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc32c_has_its_check_value() {
        // The check value of CRC-32/ISCSI in the catalogue of CRC algorithms.
        assert_eq!(!crc32c(!0, b"123456789"), 0xE306_9283);
    }
}
