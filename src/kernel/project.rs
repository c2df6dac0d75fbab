//! Projects of a file system's directories, and their quotas (`linux/fs.h`,
//! `linux/quota.h`, `linux/dqblk_xfs.h`).
//!
//! The kernel takes the same commands of quotactl(2) for XFS and ext4.

use std::{
    io,
    os::fd::{AsFd, AsRawFd as _},
};

use rustix::{
    io::Errno,
    ioctl::{Getter, Opcode, Setter, ioctl, opcode},
};

const FS_IOC_FSGETXATTR: Opcode = opcode::read::<FsXattr>(b'X', 31);
const FS_IOC_FSSETXATTR: Opcode = opcode::write::<FsXattr>(b'X', 32);
const FS_XFLAG_PROJINHERIT: u32 = 0x200;

const PRJQUOTA: u32 = 2;
const Q_GETQUOTA: u32 = 0x0080_0007;
const Q_SETQUOTA: u32 = 0x0080_0008;
const Q_XGETQSTATV: u32 = 0x5808;
const FS_QSTATV_VERSION1: i8 = 1;
const FS_QUOTA_PDQ_ENFD: u16 = 1 << 5;
const QIF_BLIMITS: u32 = 1;
/// What the limits of space are counted in.
const QIF_DQBLKSIZE: u64 = 1024;

/// `struct fsxattr`.
#[repr(C)]
#[derive(Clone, Copy)]
struct FsXattr {
    xflags: u32,
    extsize: u32,
    nextents: u32,
    projid: u32,
    cowextsize: u32,
    pad: [u8; 8],
}

/// `struct fs_quota_statv`, with the unused fields as padding.
#[repr(C)]
struct FsQuotaStatv {
    version: i8,
    pad: u8,
    flags: u16,
    incore_dquots: u32,
    rest: [u64; 19],
}

/// `struct if_dqblk`.
#[repr(C)]
#[derive(Default)]
struct IfDqblk {
    hard_blocks: u64,
    soft_blocks: u64,
    bytes: u64,
    hard_inodes: u64,
    soft_inodes: u64,
    inodes: u64,
    blocks_time: u64,
    inodes_time: u64,
    valid: u32,
}

const _: () = assert!(
    size_of::<FsXattr>() == 28 && size_of::<FsQuotaStatv>() == 160 && size_of::<IfDqblk>() == 72
);

/// The project of a directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Project {
    pub id: u32,
    /// Whether what is made in the directory gets the project.
    pub is_inherited: bool,
}

/// The project of a directory that is opened for reading; that of a file system without
/// projects is the default one.
pub fn of(dir: impl AsFd) -> io::Result<Project> {
    let read = match get(dir) {
        Err(Errno::NOTTY | Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => {
            return Ok(Project::default());
        }
        read => read?,
    };
    Ok(Project {
        id: read.projid,
        is_inherited: read.xflags & FS_XFLAG_PROJINHERIT != 0,
    })
}

/// Changes the project of a directory, not of what is in it.
pub fn set(dir: impl AsFd, project: Project) -> io::Result<()> {
    let mut changed = get(dir.as_fd())?;
    changed.projid = project.id;
    changed.xflags &= !FS_XFLAG_PROJINHERIT;
    if project.is_inherited {
        changed.xflags |= FS_XFLAG_PROJINHERIT;
    }
    // SAFETY: FS_IOC_FSSETXATTR reads one struct fsxattr.
    unsafe { ioctl(dir, Setter::<FS_IOC_FSSETXATTR, _>::new(changed)) }?;
    Ok(())
}

fn get(dir: impl AsFd) -> rustix::io::Result<FsXattr> {
    // SAFETY: FS_IOC_FSGETXATTR fills one struct fsxattr, of which every bit pattern is valid.
    unsafe { ioctl(dir, Getter::<FS_IOC_FSGETXATTR, _>::new()) }
}

/// Whether the file system enforces the limits of projects.
pub fn is_enforced(file_system: impl AsFd) -> io::Result<bool> {
    let mut state = FsQuotaStatv {
        version: FS_QSTATV_VERSION1,
        pad: 0,
        flags: 0,
        incore_dquots: 0,
        rest: [0; 19],
    };
    // SAFETY: Q_XGETQSTATV reads and fills one struct fs_quota_statv.
    match unsafe { quotactl(file_system, Q_XGETQSTATV, 0, &mut state) } {
        Ok(()) => Ok(state.flags & FS_QUOTA_PDQ_ENFD != 0),
        // Also a kernel without the call, before 5.14.
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The quota of a project.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// The most bytes; 0: any number.
    pub limit: u64,
    /// The bytes that its files take.
    pub bytes: u64,
    /// Its files and directories.
    pub inodes: u64,
}

/// The quota of a project. Needs `CAP_SYS_ADMIN`.
pub fn quota(file_system: impl AsFd, id: u32) -> io::Result<Quota> {
    let mut read = IfDqblk::default();
    // SAFETY: Q_GETQUOTA fills one struct if_dqblk.
    match unsafe { quotactl(file_system, Q_GETQUOTA, id, &mut read) } {
        // XFS has no record of a project without files and limits.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
        done => done?,
    }
    Ok(Quota {
        limit: read.hard_blocks.saturating_mul(QIF_DQBLKSIZE),
        bytes: read.bytes,
        inodes: read.inodes,
    })
}

/// Limits the space of a project to so many bytes; 0: to any number. Needs `CAP_SYS_ADMIN`.
pub fn set_limit(file_system: impl AsFd, id: u32, bytes: u64) -> io::Result<()> {
    let mut changed = IfDqblk {
        hard_blocks: bytes.div_ceil(QIF_DQBLKSIZE),
        valid: QIF_BLIMITS,
        ..IfDqblk::default()
    };
    // SAFETY: Q_SETQUOTA reads one struct if_dqblk.
    unsafe { quotactl(file_system, Q_SETQUOTA, id, &mut changed) }
}

/// quotactl_fd(2) for projects; it takes any descriptor, also one of `O_PATH`.
///
/// # Safety
///
/// `argument` is what the command reads or fills.
unsafe fn quotactl<T>(
    file_system: impl AsFd,
    command: u32,
    id: u32,
    argument: &mut T,
) -> io::Result<()> {
    let descriptor = file_system.as_fd().as_raw_fd();
    let command = command << 8 | PRJQUOTA;
    // SAFETY: the caller's; the argument outlives the call.
    let done = unsafe {
        libc::syscall(
            libc::SYS_quotactl_fd,
            descriptor,
            command,
            id,
            &raw mut *argument,
        )
    };
    match done {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
