//! Signatures of formats other than the supported file systems.
//!
//! Offsets and magic numbers are from the specification of each format and from
//! util-linux' libblkid.

use super::{ALIGN, Disk, KIB, MIB, TAIL};

/// An offset, the magic bytes there, and the name of the format.
type Signature = (u64, &'static [u8], &'static str);

/// The name of a device with a LUKS header.
pub const LUKS: &str = "a LUKS volume";
const LVM: &str = "an LVM physical volume";
const MD: &str = "a member of an md array";
const ZFS: &str = "a member of a ZFS pool";
const GPT: &str = "a GPT partition table";
const DRBD: &str = "a DRBD device";

/// Signatures at offsets where a supported file system writes data of its own: a signature
/// beside its superblock is newer than the file system.
const AT_START: &[Signature] = &[
    (0, b"LUKS\xBA\xBE", LUKS),
    (0x4000, b"SKUL\xBA\xBE", LUKS),
    (0, b"LABELONE", LVM),
    (512, b"LABELONE", LVM),
    (1024, b"LABELONE", LVM),
    (1536, b"LABELONE", LVM),
    (0, b"\xFC\x4E\x2B\xA9", MD),
    (4096, b"\xFC\x4E\x2B\xA9", MD),
    (4096 + 24, BCACHE, "a bcache device"),
    (4096 + 24, BCACHEFS, "a bcachefs file system"),
    (0, b"bluestore block device", "a Ceph BlueStore device"),
    (0, b"integrt\0", "a dm-integrity device"),
    (0, b"verity\0\0", "a dm-verity hash device"),
    (0, b"dmvdo001", "a VDO device"),
    (3, b"-FVE-FS-", "a BitLocker volume"),
    (512 + 4, b"!Stra0tis\x86\xFF\x02^\x41rh", "a Stratis device"),
    (512, b"EFI PART", GPT),
    (4096, b"EFI PART", GPT),
];

const BCACHE: &[u8] = b"\xC6\x85\x73\xF6\x4E\x1A\x45\xCA\x82\x65\xF5\x7F\x48\xBA\x6D\x81";
const BCACHEFS: &[u8] = b"\xC6\x85\x73\xF6\x66\xCE\x90\xA9\xD9\x6A\x60\xCF\x80\x3D\xF7\xEF";

/// Signatures that may be stale, or file data, on a supported file system.
const ANYWHERE: &[Signature] = &[
    (4096 - 10, b"SWAPSPACE2", SWAP),
    (4096 - 10, b"SWAP-SPACE", SWAP),
    (4096 - 10, b"S1SUSPEND\0", HIBERNATION),
    (16384 - 10, b"SWAPSPACE2", SWAP),
    (65536 - 10, b"SWAPSPACE2", SWAP),
    (3, b"NTFS    ", "an NTFS file system"),
    (3, b"EXFAT   ", "an exFAT file system"),
    (54, b"FAT12   ", FAT),
    (54, b"FAT16   ", FAT),
    (82, b"FAT32   ", FAT),
    (32 * KIB + 1, b"CD001", "an ISO 9660 file system"),
    (32 * KIB + 1, b"BEA01", "a UDF file system"),
    (32 * KIB + 1, b"NSR0", "a UDF file system"),
    (1024, b"\x10\x20\xF5\xF2", "an F2FS file system"),
    (1024, b"\xE2\xE1\xF5\xE0", "an EROFS file system"),
    (1024 + 6, b"\x34\x34", "a NILFS2 file system"),
    (1024, b"H+\0\x04", "an HFS+ file system"),
    (1024, b"HX\0\x05", "an HFS+ file system"),
    (0, b"hsqs", "a squashfs file system"),
    (0, b"-rom1fs-", "a romfs file system"),
    (0, b"\x45\x3D\xCD\x28", "a cramfs file system"),
    (32 * KIB, b"JFS1", "a JFS file system"),
    (64 * KIB + 52, b"ReIsEr", "a ReiserFS file system"),
    (8 * KIB + 52, b"ReIsEr", "a ReiserFS file system"),
    (64 * KIB, b"ReIsEr4", "a Reiser4 file system"),
    (64 * KIB, b"\x01\x16\x19\x70", "a GFS2 file system"),
    (1024, b"OCFSV2", OCFS2),
    (2048, b"OCFSV2", OCFS2),
    (4096, b"OCFSV2", OCFS2),
    (8192, b"OCFSV2", OCFS2),
    (MIB, b"\x0D\xD0\x01\xC0", "a VMFS volume"),
    (32, b"ORCLDISK", "an Oracle ASM disk"),
    (0, b"UBI#", "a UBI volume"),
    (0, b"QFI\xFB", "an image in qcow2 format"),
    (0, b"KDMV", "an image in VMDK format"),
    (0, b"vhdxfile", "an image in VHDX format"),
    (0, b"conectix", "an image in VHD format"),
];

const SWAP: &str = "swap space";
const HIBERNATION: &str = "a hibernation image";
const FAT: &str = "a FAT file system";
const OCFS2: &str = "an OCFS2 file system";

fn find(disk: &Disk<'_>, signatures: &[Signature]) -> Option<&'static str> {
    signatures
        .iter()
        .find(|(offset, magic, _)| disk.has(*offset, magic))
        .map(|(_, _, what)| *what)
}

/// A format that the start of the device identifies for certain.
pub(super) fn at_start(disk: &Disk<'_>) -> Option<&'static str> {
    find(disk, AT_START)
        .or_else(|| zfs_label(disk, 0).then_some(ZFS))
        .or_else(|| partition_table(disk).then_some("a partition table"))
}

/// A format that the end of the device identifies, beyond its first `claimed` bytes.
pub(super) fn at_end(disk: &Disk<'_>, claimed: u64) -> Option<&'static str> {
    let from_end = |bytes: u64| disk.size.checked_sub(bytes);
    let aligned = |bytes: u64, align: u64| (disk.size / align * align).checked_sub(bytes);
    let signatures: [(Option<u64>, &[u8], &str); 9] = [
        (from_end(512), b"EFI PART", GPT),
        (from_end(4096), b"EFI PART", GPT),
        // md's format 1.0, then 0.90 of either byte order.
        (aligned(8 * KIB, ALIGN), b"\xFC\x4E\x2B\xA9", MD),
        (aligned(64 * KIB, 64 * KIB), b"\xFC\x4E\x2B\xA9", MD),
        (aligned(64 * KIB, 64 * KIB), b"\xA9\x2B\x4E\xFC", MD),
        // The formats of DRBD 8 (clean, unclean) and 9.
        (from_end(4096 - 60), b"\x83\x74\x02\x6B", DRBD),
        (from_end(4096 - 60), b"\x83\x74\x02\x6C", DRBD),
        (from_end(4096 - 60), b"\x83\x74\x02\x6D", DRBD),
        (from_end(512), b"conectix", "an image in VHD format"),
    ];
    let found = signatures.iter().find(|(offset, magic, _)| {
        offset.is_some_and(|offset| offset >= claimed && disk.has(offset, magic))
    });
    if let Some((_, _, what)) = found {
        return Some(what);
    }
    [TAIL, TAIL / 2]
        .into_iter()
        .filter_map(|bytes| aligned(bytes, 256 * KIB))
        .any(|label| label >= claimed && zfs_label(disk, label))
        .then_some(ZFS)
}

/// Any other format, on a device without a supported file system.
pub(super) fn anywhere(disk: &Disk<'_>) -> Option<&'static str> {
    find(disk, ANYWHERE)
}

/// A ZFS label: name-value pairs (in XDR) 16 KiB into it, and an uberblock of
/// either byte order in the ring of its second half.
fn zfs_label(disk: &Disk<'_>, label: u64) -> bool {
    const UBERBLOCK: u64 = 0x00BA_B10C;
    let uberblock = |slot: u64| {
        disk.array(label + 128 * KIB + slot * KIB)
            .is_some_and(|magic| {
                u64::from_le_bytes(magic) == UBERBLOCK || u64::from_be_bytes(magic) == UBERBLOCK
            })
    };
    disk.has(label + 16 * KIB, &[1]) && (0..128).any(uberblock)
}

/// An MBR partition table. Boot sectors of file systems end with the same two bytes, so
/// every entry has to be valid and one in use.
fn partition_table(disk: &Disk<'_>) -> bool {
    let Some(sector) = disk.array::<512>(0) else {
        return false;
    };
    let entries = || sector[446..510].chunks_exact(16);
    let used = |entry: &[u8]| entry[4] != 0 && entry[12..16] != [0; 4];
    sector[510..] == [0x55, 0xAA]
        && entries().all(|entry| matches!(entry[0], 0 | 0x80))
        && entries().any(used)
}
