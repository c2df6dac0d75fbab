//! The mount calls that rustix lacks: mount_setattr(2), statmount(2) and
//! listmount(2).
//!
//! mount_setattr (Linux 5.12) exists on every supported kernel. statmount and listmount
//! came with 6.8, and later kernels added fields; before 6.8 they answer `ENOSYS`, and the
//! caller reads mountinfo instead. The numbers and layouts are those of `linux/mount.h`;
//! the call numbers are the same on every architecture that Kubernetes runs on.

use std::{
    ffi::OsStr,
    io,
    os::{
        fd::{AsRawFd, BorrowedFd},
        unix::ffi::OsStrExt,
    },
};

use rustix::mount::MountAttrFlags;

use super::Dev;

const SYS_STATMOUNT: libc::c_long = 457;
const SYS_LISTMOUNT: libc::c_long = 458;

/// `LSMT_ROOT`: list from the root of the caller's mount namespace.
const LSMT_ROOT: u64 = u64::MAX;

/// `STATMOUNT_*`: the fields that a call of statmount(2) requests, or that it returned.
pub mod wants {
    /// The superblock's device, and whether it is read-only.
    pub const SB_BASIC: u64 = 0x1;
    /// The mount's ids, attributes and propagation.
    pub const MNT_BASIC: u64 = 0x2;
    /// The directory of the file system that is the mount's root.
    pub const MNT_ROOT: u64 = 0x8;
    /// The mount point, relative to the caller's root directory.
    pub const MNT_POINT: u64 = 0x10;
    /// The file system's type.
    pub const FS_TYPE: u64 = 0x20;
    /// The type's second part, as in `fuse.sshfs` (6.13).
    pub const FS_SUBTYPE: u64 = 0x100;
    /// The device or other source (6.13).
    pub const SB_SOURCE: u64 = 0x200;
    /// The set of these fields that the kernel supports (6.16).
    pub const SUPPORTED_MASK: u64 = 0x1000;
}

/// The size of version 0 of `struct mnt_id_req`.
const MNT_ID_REQ_SIZE_VER0: u32 = 24;

/// `struct mnt_id_req`, version 0.
#[repr(C)]
struct MntIdReq {
    size: u32,
    spare: u32,
    mnt_id: u64,
    param: u64,
}

impl MntIdReq {
    fn new(mnt_id: u64, param: u64) -> Self {
        Self {
            size: MNT_ID_REQ_SIZE_VER0,
            spare: 0,
            mnt_id,
            param,
        }
    }
}

/// `struct statmount`: the fixed part. Texts follow it; the fields marked `text` are their
/// offsets in them.
#[repr(C)]
#[derive(Clone, Copy)]
struct Fixed {
    size: u32,
    mnt_opts: u32,
    mask: u64,
    sb_dev_major: u32,
    sb_dev_minor: u32,
    sb_magic: u64,
    sb_flags: u32,
    fs_type: u32, // text
    mnt_id: u64,
    mnt_parent_id: u64,
    mnt_id_old: u32,
    mnt_parent_id_old: u32,
    mnt_attr: u64,
    mnt_propagation: u64,
    mnt_peer_group: u64,
    mnt_master: u64,
    propagate_from: u64,
    mnt_root: u32,  // text
    mnt_point: u32, // text
    mnt_ns_id: u64,
    fs_subtype: u32, // text
    sb_source: u32,  // text
    opt_num: u32,
    opt_array: u32,
    opt_sec_num: u32,
    opt_sec_array: u32,
    supported_mask: u64,
    spare: [u64; 45],
}

const _: () = assert!(size_of::<MntIdReq>() == MNT_ID_REQ_SIZE_VER0 as usize);
const _: () = assert!(size_of::<Fixed>() == 512);

/// Changes a mount's own attributes, mount_setattr(2): clears `clear`, then sets `set`. An
/// access-time policy is set only together with clearing `MOUNT_ATTR__ATIME`.
pub fn mount_setattr(
    mount: BorrowedFd<'_>,
    set: MountAttrFlags,
    clear: MountAttrFlags,
) -> io::Result<()> {
    let attr = libc::mount_attr {
        attr_set: set.bits().into(),
        attr_clr: clear.bits().into(),
        propagation: 0,
        userns_fd: 0,
    };
    // SAFETY: the path is a C string, `attr` outlives the call, and its size is
    // passed with it.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attr,
            size_of_val(&attr),
        )
    };
    checked(result).map(drop)
}

/// The answer of statmount(2) about one mount.
pub struct StatMount {
    fixed: Fixed,
    texts: Vec<u8>,
}

impl StatMount {
    /// Requests the fields `mask` (of [`wants`]) of the mount with this unique id. `ENOENT`
    /// if it is unmounted, `ENOSYS` before Linux 6.8.
    pub fn read(unique_id: u64, mask: u64) -> io::Result<Self> {
        let request = MntIdReq::new(unique_id, mask);
        // A vector of u64, so that the fixed part is aligned.
        let mut words = vec![0u64; 256];
        loop {
            // SAFETY: the request is complete and names its size; the kernel
            // writes no more than the length passed with the buffer.
            let result = unsafe {
                libc::syscall(
                    SYS_STATMOUNT,
                    &raw const request,
                    words.as_mut_ptr(),
                    words.len() * size_of::<u64>(),
                    0,
                )
            };
            match checked(result) {
                Ok(_) => break,
                // The buffer is too small for the texts.
                Err(error) if error.raw_os_error() == Some(libc::EOVERFLOW) => {
                    words.resize(words.len() * 4, 0);
                }
                Err(error) => return Err(error),
            }
        }
        // SAFETY: the buffer is longer than `Fixed`, aligned for it, and any
        // bytes make a valid one: it holds integers only.
        let fixed = unsafe { words.as_ptr().cast::<Fixed>().read() };
        let texts = words[size_of::<Fixed>() / size_of::<u64>()..]
            .iter()
            .flat_map(|word| word.to_ne_bytes())
            .collect();
        Ok(Self { fixed, texts })
    }

    /// The set of [`wants`] that this kernel supports, as far as it reports it.
    pub fn supported(&self) -> u64 {
        if self.has(wants::SUPPORTED_MASK) {
            self.fixed.supported_mask
        } else {
            self.fixed.mask
        }
    }

    /// The superblock's device.
    pub fn dev(&self) -> Dev {
        Dev {
            major: self.fixed.sb_dev_major,
            minor: self.fixed.sb_dev_minor,
        }
    }

    /// The id in mountinfo; another mount may get it after this one is unmounted.
    pub fn id(&self) -> u32 {
        self.fixed.mnt_id_old
    }

    /// The parent's id in mountinfo.
    pub fn parent(&self) -> u32 {
        self.fixed.mnt_parent_id_old
    }

    /// Whether the mount or the superblock is read-only.
    pub fn read_only(&self) -> bool {
        self.own_read_only() || u64::from(self.fixed.sb_flags) & libc::MS_RDONLY != 0
    }

    /// Whether the mount itself is read-only.
    pub fn own_read_only(&self) -> bool {
        self.attributes()
            .contains(MountAttrFlags::MOUNT_ATTR_RDONLY)
    }

    /// The mount's own attributes.
    pub fn attributes(&self) -> MountAttrFlags {
        // All attributes are bits of the lower half.
        let bits = self.fixed.mnt_attr & u64::from(u32::MAX);
        MountAttrFlags::from_bits_retain(u32::try_from(bits).expect("32 bits"))
    }

    /// The group of the mounts that mounts below it propagate to.
    pub fn peer_group(&self) -> Option<u32> {
        let group = u32::try_from(self.fixed.mnt_peer_group).ok();
        group.filter(|group| *group != 0)
    }

    /// [`wants::MNT_ROOT`].
    pub fn root(&self) -> Option<&OsStr> {
        self.text(wants::MNT_ROOT, self.fixed.mnt_root)
    }

    /// [`wants::MNT_POINT`].
    pub fn mount_point(&self) -> Option<&OsStr> {
        self.text(wants::MNT_POINT, self.fixed.mnt_point)
    }

    /// [`wants::FS_TYPE`].
    pub fn fs_type(&self) -> Option<&OsStr> {
        self.text(wants::FS_TYPE, self.fixed.fs_type)
    }

    /// [`wants::FS_SUBTYPE`].
    pub fn fs_subtype(&self) -> Option<&OsStr> {
        self.text(wants::FS_SUBTYPE, self.fixed.fs_subtype)
    }

    /// [`wants::SB_SOURCE`].
    pub fn source(&self) -> Option<&OsStr> {
        self.text(wants::SB_SOURCE, self.fixed.sb_source)
    }

    fn has(&self, what: u64) -> bool {
        self.fixed.mask & what != 0
    }

    fn text(&self, what: u64, offset: u32) -> Option<&OsStr> {
        let rest = self
            .has(what)
            .then(|| self.texts.get(offset as usize..))??;
        let end = rest.iter().position(|byte| *byte == 0)?;
        Some(OsStr::from_bytes(&rest[..end]))
    }
}

/// The unique ids of every mount in the caller's namespace, listmount(2).
/// `ENOSYS` before Linux 6.8.
pub fn listmount() -> io::Result<Vec<u64>> {
    let mut ids = Vec::new();
    let mut some = [0u64; 512];
    loop {
        let last = ids.last().copied().unwrap_or(0);
        let request = MntIdReq::new(LSMT_ROOT, last);
        // SAFETY: the request is complete and names its size; the kernel writes
        // no more ids than the length passed with the buffer.
        let result = unsafe {
            libc::syscall(
                SYS_LISTMOUNT,
                &raw const request,
                some.as_mut_ptr(),
                some.len(),
                0,
            )
        };
        let count = checked(result)?;
        ids.extend_from_slice(&some[..count]);
        if count < some.len() {
            return Ok(ids);
        }
    }
}

fn checked(result: libc::c_long) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Gives the calling thread a mount namespace of its own without propagation, so that a
/// test's mounts end with its thread.
#[cfg(test)]
pub(crate) fn private_namespace() {
    use rustix::{
        mount::{MountPropagationFlags, mount_change},
        thread::{UnshareFlags, unshare_unsafe},
    };
    // SAFETY: the thread still shares the process's descriptor table.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.expect("tests of mounts run as root");
    let everything = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change("/", everything).expect("/ becomes private");
}
