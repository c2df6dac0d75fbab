//! The ioctls of encrypted directories, those of `linux/fscrypt.h`.
//!
//! A directory has a *policy*, which names the key of its files by the key's identifier; the
//! mounted file system has the keys, until it is unmounted. Every call takes a descriptor
//! that was opened for reading (`O_PATH` does not suffice).

use std::{io, os::fd::AsFd};

use rustix::ioctl::{Opcode, Setter, Updater, ioctl, opcode};

// _IOR and _IOWR, although the first writes; the sizes are those of the structures of the
// first version.
const FS_IOC_SET_ENCRYPTION_POLICY: Opcode = opcode::read::<[u8; 12]>(b'f', 19);
const FS_IOC_GET_ENCRYPTION_POLICY_EX: Opcode = opcode::read_write::<[u8; 9]>(b'f', 22);
const FS_IOC_ADD_ENCRYPTION_KEY: Opcode = opcode::read_write::<[u8; 80]>(b'f', 23);
const FS_IOC_GET_ENCRYPTION_KEY_STATUS: Opcode = opcode::read_write::<KeyStatus>(b'f', 26);

const POLICY_V2: u8 = 2;
const KEY_SPEC_IDENTIFIER: u32 = 2;
const STATUS_PRESENT: u32 = 2;

/// AES-256-XTS, of contents.
pub const AES_256_XTS: u8 = 1;
/// AES-256-CTS, of names.
pub const AES_256_CTS: u8 = 4;
/// Names are padded to multiples of 32 bytes.
pub const PAD_32: u8 = 3;

/// The identifier of a key, by which policies name it.
pub type KeyId = [u8; 16];

/// The size of the keys that this driver adds; the kernel takes up to 64 bytes.
pub const KEY_BYTES: usize = 64;
const RAW_SIZE: u32 = 64;

/// `struct fscrypt_policy_v2`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncryptionPolicy {
    version: u8,
    /// The cipher of contents.
    pub contents: u8,
    /// The cipher of names.
    pub filenames: u8,
    /// The padding of names, and rarer options.
    pub flags: u8,
    log2_data_unit_size: u8,
    reserved: [u8; 3],
    pub key_id: KeyId,
}

impl EncryptionPolicy {
    pub fn new((contents, filenames): (u8, u8), flags: u8, key_id: KeyId) -> Self {
        Self {
            version: POLICY_V2,
            contents,
            filenames,
            flags,
            key_id,
            ..Self::default()
        }
    }
}

/// `struct fscrypt_get_policy_ex_arg`.
#[repr(C)]
struct PolicyBuffer {
    size: u64,
    policy: EncryptionPolicy,
}

/// `struct fscrypt_key_specifier`.
#[repr(C)]
#[derive(Clone, Copy)]
struct KeySpecifier {
    kind: u32,
    reserved: u32,
    id: KeyId,
    unused: [u8; 16],
}

impl KeySpecifier {
    fn of(id: KeyId) -> Self {
        Self {
            kind: KEY_SPEC_IDENTIFIER,
            reserved: 0,
            id,
            unused: [0; 16],
        }
    }
}

/// `struct fscrypt_add_key_arg`, with a key.
#[repr(C)]
struct NewKey {
    specifier: KeySpecifier,
    raw_size: u32,
    key_id: u32,
    reserved: [u32; 8],
    raw: [u8; KEY_BYTES],
}

/// `struct fscrypt_get_key_status_arg`.
#[repr(C)]
struct KeyStatus {
    specifier: KeySpecifier,
    reserved: [u32; 6],
    status: u32,
    flags: u32,
    users: u32,
    out_reserved: [u32; 13],
}

const _: () = assert!(size_of::<EncryptionPolicy>() == 24);
const _: () = assert!(size_of::<PolicyBuffer>() == 32);
const _: () = assert!(size_of::<NewKey>() == 80 + KEY_BYTES && RAW_SIZE as usize == KEY_BYTES);
const _: () = assert!(size_of::<KeyStatus>() == 128);

/// Makes an empty directory encrypted. `ENOTEMPTY` if it is not empty, `EEXIST` if it has
/// another policy, `EOPNOTSUPP` if the kernel or the file system has no encryption.
pub fn set_policy(directory: impl AsFd, policy: &EncryptionPolicy) -> io::Result<()> {
    // SAFETY: FS_IOC_SET_ENCRYPTION_POLICY reads a policy of the size of its version.
    unsafe {
        ioctl(
            directory,
            Setter::<FS_IOC_SET_ENCRYPTION_POLICY, _>::new(*policy),
        )
    }?;
    Ok(())
}

/// The policy of a directory; none if it is not encrypted. `EOVERFLOW` or `EINVAL` if the
/// policy is of another version.
pub fn policy(directory: impl AsFd) -> io::Result<Option<EncryptionPolicy>> {
    let mut buffer = PolicyBuffer {
        size: size_of::<EncryptionPolicy>() as u64,
        policy: EncryptionPolicy::default(),
    };
    // SAFETY: FS_IOC_GET_ENCRYPTION_POLICY_EX fills at most `size` bytes of the policy, of
    // which every bit pattern is valid.
    let read = unsafe {
        ioctl(
            directory,
            Updater::<FS_IOC_GET_ENCRYPTION_POLICY_EX, _>::new(&mut buffer),
        )
    };
    match read {
        Ok(()) if buffer.policy.version == POLICY_V2 => Ok(Some(buffer.policy)),
        Ok(()) => Err(io::ErrorKind::Unsupported.into()),
        Err(rustix::io::Errno::NODATA) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Gives the mounted file system a key. A key that it has already stays.
pub fn add_key(mounted: impl AsFd, key: &[u8; KEY_BYTES], id: KeyId) -> io::Result<()> {
    let mut new = zeroize::Zeroizing::new(NewKey {
        specifier: KeySpecifier::of(id),
        raw_size: RAW_SIZE,
        key_id: 0,
        reserved: [0; 8],
        raw: *key,
    });
    // SAFETY: FS_IOC_ADD_ENCRYPTION_KEY reads the structure and `raw_size` bytes behind it,
    // which are `raw`, and writes the key's identifier.
    unsafe {
        ioctl(
            mounted,
            Updater::<FS_IOC_ADD_ENCRYPTION_KEY, _>::new(&mut *new),
        )
    }?;
    if new.specifier.id != id {
        return Err(io::Error::other(
            "the kernel gave the key another identifier",
        ));
    }
    Ok(())
}

impl zeroize::Zeroize for NewKey {
    fn zeroize(&mut self) {
        self.raw.zeroize();
    }
}

/// Whether the mounted file system has the key.
pub fn has_key(mounted: impl AsFd, id: KeyId) -> io::Result<bool> {
    let mut status = KeyStatus {
        specifier: KeySpecifier::of(id),
        reserved: [0; 6],
        status: 0,
        flags: 0,
        users: 0,
        out_reserved: [0; 13],
    };
    // SAFETY: FS_IOC_GET_ENCRYPTION_KEY_STATUS reads and writes one such structure.
    unsafe {
        ioctl(
            mounted,
            Updater::<FS_IOC_GET_ENCRYPTION_KEY_STATUS, _>::new(&mut status),
        )
    }?;
    Ok(status.status == STATUS_PRESENT)
}
