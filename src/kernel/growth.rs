//! The ioctls that grow a mounted file system.
//!
//! Numbers and structures are those of `fs/ext4/ext4.h`, `xfs/libxfs/xfs_fs.h`
//! and `linux/btrfs.h`. Every call takes a descriptor of any file or directory
//! of the file system that was opened for reading (`O_PATH` does not suffice).

use std::{io, os::fd::AsFd};

use rustix::ioctl::{Getter, Opcode, Setter, Updater, ioctl, opcode};

const EXT4_IOC_RESIZE_FS: Opcode = opcode::write::<u64>(b'f', 16);
const XFS_IOC_FSGROWFSDATA: Opcode = opcode::write::<XfsGrowfsData>(b'X', 110);
const XFS_IOC_FSGEOMETRY_V4: Opcode = opcode::read::<XfsGeometry>(b'X', 124);
const BTRFS_IOC_RESIZE: Opcode = opcode::write::<BtrfsVolArgs>(0x94, 3);
const BTRFS_IOC_DEV_INFO: Opcode = opcode::read_write::<BtrfsDevInfo>(0x94, 30);
const BTRFS_IOC_FS_INFO: Opcode = opcode::read::<BtrfsFsInfo>(0x94, 31);

/// Grows a mounted ext4 to `blocks` of its blocks. The kernel demands
/// `CAP_SYS_RESOURCE` before it checks anything else.
pub fn ext4_resize(mounted: impl AsFd, blocks: u64) -> io::Result<()> {
    // SAFETY: EXT4_IOC_RESIZE_FS reads one u64.
    unsafe { ioctl(mounted, Setter::<EXT4_IOC_RESIZE_FS, _>::new(blocks)) }?;
    Ok(())
}

/// `struct xfs_fsop_geom_v4`: the layout of an XFS.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct XfsGeometry {
    /// Bytes of a block.
    pub block_size: u32,
    rt_extent_size: u32,
    /// Blocks of an allocation group.
    pub ag_blocks: u32,
    /// Allocation groups.
    pub ag_count: u32,
    log_blocks: u32,
    sector_size: u32,
    inode_size: u32,
    /// The share of the space that inodes may take, in per cent.
    pub inode_max_percent: u32,
    /// Blocks of the data section.
    pub data_blocks: u64,
    rt_blocks: u64,
    rt_extents: u64,
    log_start: u64,
    uuid: [u8; 16],
    stripe_unit: u32,
    stripe_width: u32,
    version: i32,
    flags: u32,
    log_sector_size: u32,
    rt_sector_size: u32,
    dir_block_size: u32,
    log_stripe_unit: u32,
}

/// `struct xfs_growfs_data`.
#[repr(C)]
struct XfsGrowfsData {
    new_blocks: u64,
    inode_max_percent: u32,
}

/// A mounted XFS's geometry.
pub fn xfs_geometry(mounted: impl AsFd) -> io::Result<XfsGeometry> {
    // SAFETY: XFS_IOC_FSGEOMETRY_V4 fills one struct xfs_fsop_geom_v4, of
    // which every bit pattern is valid.
    Ok(unsafe { ioctl(mounted, Getter::<XFS_IOC_FSGEOMETRY_V4, _>::new()) }?)
}

/// Grows the data section of a mounted XFS to `blocks` of its blocks. The call also sets
/// the inodes' share, so the caller passes that of the geometry.
pub fn xfs_grow(mounted: impl AsFd, blocks: u64, inode_max_percent: u32) -> io::Result<()> {
    let args = XfsGrowfsData {
        new_blocks: blocks,
        inode_max_percent,
    };
    // SAFETY: XFS_IOC_FSGROWFSDATA reads one struct xfs_growfs_data.
    unsafe { ioctl(mounted, Setter::<XFS_IOC_FSGROWFSDATA, _>::new(args)) }?;
    Ok(())
}

/// `struct btrfs_ioctl_vol_args`.
#[repr(C)]
struct BtrfsVolArgs {
    fd: i64,
    name: [u8; 4088],
}

/// `struct btrfs_ioctl_fs_info_args`, with the unused fields as padding.
#[repr(C)]
struct BtrfsFsInfo {
    max_id: u64,
    num_devices: u64,
    fsid: [u8; 16],
    node_size: u32,
    sector_size: u32,
    rest: [u8; 984],
}

/// `struct btrfs_ioctl_dev_info_args`, with the unused fields as padding.
#[repr(C)]
struct BtrfsDevInfo {
    devid: u64,
    uuid: [u8; 16],
    bytes_used: u64,
    total_bytes: u64,
    rest: [u8; 4056],
}

const _: () = assert!(
    size_of::<XfsGeometry>() == 112
        && size_of::<XfsGrowfsData>() == 16
        && size_of::<BtrfsVolArgs>() == 4096
        && size_of::<BtrfsFsInfo>() == 1024
        && size_of::<BtrfsDevInfo>() == 4096
);

/// One device of a mounted btrfs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BtrfsDevice {
    /// Its number within the file system.
    pub id: u64,
    /// Bytes of the device that the file system uses.
    pub bytes: u64,
    /// Bytes of a sector, of which sizes are multiples.
    pub sector_size: u32,
}

/// The devices of a mounted btrfs.
pub fn btrfs_devices(mounted: impl AsFd) -> io::Result<Vec<BtrfsDevice>> {
    let mounted = mounted.as_fd();
    // SAFETY: BTRFS_IOC_FS_INFO fills one struct btrfs_ioctl_fs_info_args, of
    // which every bit pattern is valid.
    let fs: BtrfsFsInfo = unsafe { ioctl(mounted, Getter::<BTRFS_IOC_FS_INFO, _>::new()) }?;
    let mut devices = Vec::new();
    // Numbers of devices that were removed stay unused.
    for id in 1..=fs.max_id {
        let mut device = BtrfsDevInfo {
            devid: id,
            uuid: [0; 16],
            bytes_used: 0,
            total_bytes: 0,
            rest: [0; 4056],
        };
        // SAFETY: BTRFS_IOC_DEV_INFO reads and fills one struct
        // btrfs_ioctl_dev_info_args.
        match unsafe { ioctl(mounted, Updater::<BTRFS_IOC_DEV_INFO, _>::new(&mut device)) } {
            Ok(()) => devices.push(BtrfsDevice {
                id,
                bytes: device.total_bytes,
                sector_size: fs.sector_size,
            }),
            Err(rustix::io::Errno::NODEV) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(devices)
}

/// Makes a mounted btrfs use `bytes` of its device `id`.
pub fn btrfs_resize(mounted: impl AsFd, id: u64, bytes: u64) -> io::Result<()> {
    let text = format!("{id}:{bytes}");
    let mut name = [0; 4088];
    name[..text.len()].copy_from_slice(text.as_bytes());
    let args = BtrfsVolArgs { fd: 0, name };
    // SAFETY: BTRFS_IOC_RESIZE reads one struct btrfs_ioctl_vol_args whose
    // name ends with a zero.
    unsafe { ioctl(mounted, Setter::<BTRFS_IOC_RESIZE, _>::new(args)) }?;
    Ok(())
}
