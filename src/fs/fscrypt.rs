//! Encryption of files: a directory of the file system whose files the kernel encrypts, with
//! the key in a protector's care, in the format of the program fscrypt.
//!
//! ```text
//!  .fscrypt/protectors/DESCRIPTOR   the protector's key, wrapped by the volume's secret
//!  .fscrypt/policies/IDENTIFIER     the policy's key, wrapped by the protector's
//!  DIRECTORY                        has the policy, which names its key by the identifier
//! ```
//!
//! The kernel sets a policy only on an empty directory. This module sets one only on a file
//! system that has nothing else, because what is beside the directory is not encrypted and
//! would be hidden. The files below `.fscrypt` are on the disk before the policy is, so a
//! crash leaves at worst files that nothing names, and the next call begins anew.
//!
//! The key stays in the kernel until the file system is unmounted.

use std::{
    fmt, io,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
};

use prost::Message as _;
use rustix::{
    fs::{Dir, Mode, OFlags, ResolveFlags, fsync, mkdirat, openat2, renameat},
    io::Errno,
};

use crate::{
    Kind, crash_point,
    digest::hex,
    kernel::fscrypt::{
        AES_256_CTS, AES_256_XTS, EncryptionPolicy, PAD_32, add_key, has_key, policy, set_policy,
    },
    secret::Secret,
};

mod keys;
mod metadata;
#[cfg(test)]
mod tests;

use keys::{PolicyKey, ProtectorError};
pub use metadata::KeySource;
use metadata::{EncryptionOptions, PolicyData, Protector, WrappedPolicyKey};

const METADATA: &str = ".fscrypt";
const POLICIES: &str = ".fscrypt/policies";
const PROTECTORS: &str = ".fscrypt/protectors";
/// More than any file of metadata has.
const MOST_BYTES: usize = 64 << 10;
/// The least length of a raw key.
const RAW_KEY_BYTES: usize = 32;

/// The names of a driver's encrypted directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncryptedDirectory {
    /// In the root of the file system.
    pub name: &'static str,
    /// The name of its protector.
    pub protector: &'static str,
}

/// The state of an encrypted directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectoryState {
    /// The kernel has its key.
    Unlocked,
    /// It is encrypted, and its key is to be added.
    Locked,
    /// The file system has neither it nor anything else.
    Absent,
}

/// Why an encrypted directory could not be used. The text never has a secret.
#[derive(Debug, thiserror::Error)]
pub enum FscryptError {
    /// The kernel, or the file system, has no encryption.
    #[error(
        "its file system cannot encrypt files; it needs ext4 with the feature encrypt (tune2fs -O encrypt, while it is not mounted), and a kernel with CONFIG_FS_ENCRYPTION"
    )]
    Unsupported,
    /// There is something else.
    #[error(
        "its file system has {name:?} and no encrypted directory, so its data is not encrypted; use it without encryption, or copy its data to a new volume"
    )]
    NotEmpty { name: String },
    /// The volume was staged without encryption.
    ///
    /// Remedy: stage it with encryptionType `file`, as its class did.
    #[error(
        "its file system has no encrypted directory {name:?}: stage it with encryptionType `file`"
    )]
    NotSetUp { name: String },
    /// The directory's policy is of another version.
    ///
    /// Remedy: mount it with the program that made the directory, and copy the data to a new
    /// volume.
    #[error("its encrypted directory has a policy of another version than 2")]
    Version,
    /// A file of the metadata is missing or invalid.
    ///
    /// Remedy: restore the directory .fscrypt of its file system from a backup.
    #[error("its encryption's {file}: {why}")]
    Metadata {
        file: String,
        /// The defect.
        why: &'static str,
    },
    /// Another secret wraps the key.
    ///
    /// Remedy: correct the Secret, or what the KMS has for the volume (encryptionKMSID).
    #[error("its passphrase does not open the protector {protector:?} of its files")]
    Wrong { protector: &'static str },
    /// The secret is to be the key.
    ///
    /// Remedy: use a longer encryptionPassphrase in the Secret.
    #[error(
        "its encryptionPassphrase is to be the key of its files, and has less than {RAW_KEY_BYTES} characters"
    )]
    Short,
    /// A system call failed.
    ///
    /// Remedy: read the kernel log (`journalctl -k`); the call is repeated.
    #[error("cannot {what}")]
    Io {
        /// The operation.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
}

impl FscryptError {
    /// What the caller may do about it.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Wrong { .. } | Self::Short => Kind::Unauthenticated,
            Self::Io { .. } => Kind::Transient,
            Self::Unsupported
            | Self::NotEmpty { .. }
            | Self::NotSetUp { .. }
            | Self::Version
            | Self::Metadata { .. } => Kind::Precondition,
        }
    }
}

/// Turns the kernel's answer into an error that names the operation.
fn failed<E: Into<io::Error>>(what: impl fmt::Display) -> impl FnOnce(E) -> FscryptError {
    let what = what.to_string();
    move |source| {
        let source = source.into();
        match source.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::OPNOTSUPP | Errno::NOTTY) => FscryptError::Unsupported,
            _ => FscryptError::Io { what, source },
        }
    }
}

/// An encrypted directory in a mounted file system.
#[derive(Debug)]
pub struct FileEncryption {
    names: EncryptedDirectory,
    /// The root of the file system.
    root: OwnedFd,
}

impl FileEncryption {
    /// The directory in the file system that is mounted at `mount_root`.
    pub fn below(
        mount_root: BorrowedFd<'_>,
        names: EncryptedDirectory,
    ) -> Result<Self, FscryptError> {
        let root = open(mount_root, ".", directory_flags());
        let root = root.map_err(failed("open the root of its file system"))?;
        Ok(Self { names, root })
    }

    /// Its state; an error if the file system is used otherwise.
    pub fn state(&self) -> Result<DirectoryState, FscryptError> {
        if let Some((_, policy)) = self.find()? {
            let present = has_key(&self.root, policy.key_id);
            return Ok(if present.map_err(failed("look for its key"))? {
                DirectoryState::Unlocked
            } else {
                DirectoryState::Locked
            });
        }
        // Its root is not encrypted; the kernel says so only where it can encrypt.
        policy(&self.root).map_err(failed("read the policy of the root of its file system"))?;
        self.refuse_content()?;
        Ok(DirectoryState::Absent)
    }

    /// The directory, which must be encrypted.
    pub fn directory(&self) -> Result<OwnedFd, FscryptError> {
        match self.find()? {
            Some((directory, _)) => Ok(directory),
            None => Err(FscryptError::NotSetUp {
                name: self.names.name.to_owned(),
            }),
        }
    }

    fn find(&self) -> Result<Option<(OwnedFd, EncryptionPolicy)>, FscryptError> {
        let name = self.names.name;
        let directory = match open(self.root.as_fd(), name, directory_flags()) {
            Err(Errno::NOENT) => return Ok(None),
            opened => opened.map_err(failed(format_args!("open {name}")))?,
        };
        let found = policy(&directory).map_err(|error| match error.raw_os_error() {
            Some(errno) if Errno::from_raw_os_error(errno) != Errno::OVERFLOW => {
                failed(format_args!("read the policy of {name}"))(error)
            }
            _ => FscryptError::Version,
        });
        Ok(found?.map(|policy| (directory, policy)))
    }

    /// Refuses a file system that has anything but what a set-up leaves that a crash
    /// interrupted, and what mkfs makes.
    fn refuse_content(&self) -> Result<(), FscryptError> {
        let ours = [self.names.name, METADATA, "lost+found"];
        let name = first_of(&self.root, |name| !ours.contains(&name));
        let mut other = name.map_err(failed("list the root of its file system"))?;
        if other.is_none() && self.has_directory()? {
            let directory = open(self.root.as_fd(), self.names.name, directory_flags());
            let first = directory.and_then(|directory| first_of(&directory, |_| true));
            let first = first.map_err(failed(format_args!("list {}", self.names.name)))?;
            other = first.map(|name| format!("{}/{name}", self.names.name));
        }
        other.map_or(Ok(()), |name| Err(FscryptError::NotEmpty { name }))
    }

    fn has_directory(&self) -> Result<bool, FscryptError> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match open(self.root.as_fd(), self.names.name, flags) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(failed(format_args!("open {}", self.names.name))(errno)),
        }
    }

    /// Adds the key of the locked directory.
    pub fn unlock(&self, secret: &Secret) -> Result<(), FscryptError> {
        let Some((_, policy)) = self.find()? else {
            return Ok(());
        };
        let (id, protector) = (hex(&policy.key_id), self.names.protector);
        let file = format!("{POLICIES}/{id}");
        let data: PolicyData = self.read(&file)?;
        for wrapped in &data.wrapped_keys {
            let file = format!("{PROTECTORS}/{}", wrapped.protector);
            let found: Protector = match self.read(&file) {
                // Perhaps another one is the driver's.
                Err(FscryptError::Metadata { .. }) => continue,
                read => read?,
            };
            if found.name != protector {
                continue;
            }
            let key = keys::open(&found, secret).map_err(|refusal| match refusal {
                ProtectorError::Wrong => FscryptError::Wrong { protector },
                ProtectorError::Invalid(why) => FscryptError::Metadata { file, why },
            })?;
            let wrapped = wrapped.wrapped_key.as_ref();
            let key: Option<PolicyKey> = wrapped.and_then(|wrapped| keys::unwrap(&key, wrapped));
            let key = key.filter(|key| keys::id_of(key) == policy.key_id);
            let key = key.ok_or(FscryptError::Metadata {
                file: format!("{POLICIES}/{id}"),
                why: "it has another key than its name and protector say",
            })?;
            return add_key(&self.root, &key, policy.key_id).map_err(failed("add its key"));
        }
        let why = "no protector of it is the driver's";
        Err(FscryptError::Metadata { file, why })
    }

    /// Makes the directory, with a new key that the secret wraps, and adds the key. The file
    /// system has nothing else ([`DirectoryState::Absent`]).
    pub fn set_up(&self, secret: &Secret, source: KeySource) -> Result<(), FscryptError> {
        if source == KeySource::RawKey && secret.reveal().len() < RAW_KEY_BYTES {
            return Err(FscryptError::Short);
        }
        self.refuse_content()?;
        let name = self.names.name;
        let directories = [name, METADATA, POLICIES, PROTECTORS];
        for directory in directories {
            self.make_directory(directory)?;
            crash_point();
        }
        let directory = open(self.root.as_fd(), name, directory_flags())
            .map_err(failed(format_args!("open {name}")))?;
        let wrapping = keys::random::<32>();
        let mut protector = Protector {
            descriptor: keys::descriptor_of(&wrapping),
            source: source.into(),
            name: self.names.protector.to_owned(),
            ..Protector::default()
        };
        if source == KeySource::CustomPassphrase {
            protector.costs = Some(keys::NEW_COSTS);
            protector.salt = keys::random::<16>().to_vec();
        }
        let by = keys::wrapping_key(&protector, secret).map_err(|refusal| match refusal {
            ProtectorError::Wrong => unreachable!("a new key is wrapped by any secret"),
            ProtectorError::Invalid(why) => FscryptError::Metadata {
                file: PROTECTORS.to_owned(),
                why,
            },
        })?;
        protector.wrapped_key = Some(keys::wrap(&by, &*wrapping));
        let key: PolicyKey = keys::random();
        let id = keys::id_of(&key);
        let data = PolicyData {
            key: hex(&id),
            options: Some(EncryptionOptions {
                padding: 32,
                contents: AES_256_XTS.into(),
                filenames: AES_256_CTS.into(),
                policy_version: 2,
            }),
            wrapped_keys: vec![WrappedPolicyKey {
                protector: protector.descriptor.clone(),
                wrapped_key: Some(keys::wrap(&wrapping, &*key)),
            }],
        };
        self.write(
            PROTECTORS,
            &protector.descriptor,
            &protector.encode_to_vec(),
        )?;
        self.write(POLICIES, &data.key, &data.encode_to_vec())?;
        fsync(&self.root).map_err(failed("sync its file system"))?;
        crash_point();
        // The kernel sets no policy whose key it has not.
        add_key(&self.root, &key, id).map_err(failed("add its key"))?;
        crash_point();
        let policy = EncryptionPolicy::new((AES_256_XTS, AES_256_CTS), PAD_32, id);
        set_policy(&directory, &policy).map_err(failed(format_args!("encrypt {name}")))?;
        crash_point();
        fsync(&directory).map_err(failed(format_args!("sync {name}")))
    }

    fn make_directory(&self, path: &str) -> Result<(), FscryptError> {
        let (parent, name) = path.rsplit_once('/').unwrap_or((".", path));
        let made = open(self.root.as_fd(), parent, directory_flags())
            .and_then(|parent| mkdirat(&parent, name, Mode::from_raw_mode(0o755)));
        match made {
            Ok(()) | Err(Errno::EXIST) => Ok(()),
            Err(errno) => Err(failed(format_args!("make {path}"))(errno)),
        }
    }

    fn read<T: prost::Message + Default>(&self, file: &str) -> Result<T, FscryptError> {
        let invalid = |why| {
            let file = file.to_owned();
            Err(FscryptError::Metadata { file, why })
        };
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = match open(self.root.as_fd(), file, flags) {
            Err(Errno::NOENT) => return invalid("it is missing"),
            opened => opened.map_err(failed(format_args!("open {file}")))?,
        };
        let mut bytes = vec![0; MOST_BYTES];
        let mut read = 0;
        loop {
            match rustix::io::read(&opened, &mut bytes[read..]) {
                Ok(0) => break,
                Ok(more) => read += more,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(failed(format_args!("read {file}"))(errno)),
            }
        }
        T::decode(&bytes[..read]).or_else(|_| invalid("it is not fscrypt's"))
    }

    /// Writes a file, at once or not at all, and onto the disk.
    fn write(&self, directory: &str, name: &str, bytes: &[u8]) -> Result<(), FscryptError> {
        let write = || -> Result<(), Errno> {
            let directory = open(self.root.as_fd(), directory, directory_flags())?;
            // fscrypt passes over such names.
            let draft = format!(".tmp{name}");
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC;
            let file = openat2(
                &directory,
                &*draft,
                flags,
                Mode::from_raw_mode(0o600),
                beneath(),
            )?;
            let mut rest = bytes;
            while !rest.is_empty() {
                let written = rustix::io::write(&file, rest)?;
                rest = &rest[written..];
            }
            fsync(&file)?;
            crash_point();
            renameat(&directory, &*draft, &directory, name)?;
            crash_point();
            fsync(&directory)
        };
        write().map_err(failed(format_args!("write {directory}/{name}")))
    }
}

fn directory_flags() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC
}

fn beneath() -> ResolveFlags {
    ResolveFlags::BENEATH
        | ResolveFlags::NO_XDEV
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS
}

fn open(root: BorrowedFd<'_>, path: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
    openat2(root, path, flags, Mode::empty(), beneath())
}

/// The first name in the directory that is wanted.
fn first_of(
    directory: &OwnedFd,
    is_wanted: impl Fn(&str) -> bool,
) -> Result<Option<String>, Errno> {
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy();
        if !matches!(&*name, "." | "..") && is_wanted(&name) {
            return Ok(Some(name.into_owned()));
        }
    }
    Ok(None)
}
