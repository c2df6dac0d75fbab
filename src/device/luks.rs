//! LUKS2 over a device, as ceph-csi sets it up, by `cryptsetup`.
//!
//! ```text
//!  /dev/rbd0 ──▶ luksFormat (once, where it is proven blank)
//!            └─▶ luksOpen ──▶ /dev/mapper/luks-rbd-HANDLE ──▶ mkfs, mount
//! ```
//!
//! The passphrase goes through a pipe, never into an argument. The volume's key
//! stays out of the kernel's keyring (`--disable-keyring`), so that a mapping
//! can be resized without the passphrase. Before anything is written the
//! device's content is read: only a blank device is formatted, or one that the caller
//! knows to hold an interrupted format of its own.
//!
//! All of this blocks: call it on a lane. The `domain` of a call is the device's
//! failure domain ([`crate::device::Source::domain`]), for which the number of programs
//! that may hang is limited.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use rustix::fs::OFlags;

use crate::{
    Done, Kind,
    admission::{Gate, Permit},
    digest,
    fs::probe::{self, Content},
    kernel::{
        Dev,
        block::{self, BlockDev},
        exec, sysfs,
    },
    secret::Secret,
};

mod header;
mod key_slots;

use header::LuksHeader;
pub use key_slots::KeySlots;

/// Why a device could not be encrypted, opened, resized or closed. The text
/// never has a passphrase.
#[derive(Debug, thiserror::Error)]
pub enum LuksError {
    /// Neither LUKS nor blank.
    ///
    /// Remedy: if its content may be lost: `uringctl format VOLUME --fs TYPE --confirm VOLUME`.
    #[error("{} holds {what}, not LUKS; the agent does not change it", node.display())]
    Foreign {
        node: PathBuf,
        /// Its content.
        what: String,
    },
    /// No key slot opens with it.
    ///
    /// Remedy: correct the Secret, or what the KMS has for the volume (encryptionKMSID).
    #[error("the passphrase does not open {}", node.display())]
    Passphrase { node: PathBuf },
    /// The header is incomplete.
    ///
    /// Remedy: restore the header from a backup; if the content may be lost: `uringctl format
    /// VOLUME --fs TYPE --confirm VOLUME`.
    #[error(
        "the LUKS header on {} is incomplete: its format was interrupted, or it was damaged, or its keys were erased; if all data on it may be lost: uringctl format",
        node.display()
    )]
    Unfinished { node: PathBuf },
    /// There is no free key slot.
    #[error("the LUKS header on {} has no free key slot; remove one (cryptsetup luksKillSlot)", node.display())]
    NoSlot { node: PathBuf },
    /// The mapping is in use.
    ///
    /// Remedy: `dmsetup info` and `lsof` show who uses it; end that.
    #[error("the mapping {name} is in use")]
    Busy { name: String },
    /// A mapping of this name is over another device.
    #[error("the mapping {name} is over another device than {}; close it first (cryptsetup close {name})", node.display())]
    Other {
        name: String,
        /// The device that it should be over.
        node: PathBuf,
    },
    /// The mapping refuses writes. cryptsetup would make it read-only for good by a resize.
    #[error(
        "the mapping {name} refuses writes, as a volume that is published read-only does; grow it after that"
    )]
    ReadOnly { name: String },
    /// cryptsetup or dmsetup failed otherwise.
    ///
    /// Remedy: read the program's own words in the message; `modprobe dm_crypt` where the kernel
    /// lacks the target.
    #[error("{program} {action} of {what} failed ({status}): {said}")]
    Failed {
        program: &'static str,
        action: &'static str,
        /// Its subject.
        what: String,
        /// Its exit status.
        status: std::process::ExitStatus,
        /// Its output.
        said: String,
    },
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

impl LuksError {
    /// The kind of the error.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Passphrase { .. } => Kind::Unauthenticated,
            Self::Foreign { .. }
            | Self::Unfinished { .. }
            | Self::NoSlot { .. }
            | Self::ReadOnly { .. }
            | Self::Other { .. } => Kind::Precondition,
            Self::Busy { .. } | Self::Failed { .. } | Self::Io { .. } => Kind::Transient,
        }
    }

    /// Whether cryptsetup reports that no key slot opens with the passphrase.
    fn is_no_permission(&self) -> bool {
        matches!(self, Self::Failed { status, .. } if status.code() == Some(NO_PERMISSION))
    }

    /// Whether cryptsetup reports that the mapping is in use, or of the same name as another.
    fn is_in_use(&self) -> bool {
        matches!(self, Self::Failed { status, .. } if status.code() == Some(IN_USE))
    }
}

/// Turns the kernel's answer into an error that names the operation.
pub fn failed<W: Into<String>>(what: W) -> impl FnOnce(io::Error) -> LuksError {
    let what = what.into();
    move |source| LuksError::Io { what, source }
}

/// The longest name of a mapping: with its NUL, `DM_NAME_LEN` (include/uapi/linux/dm-ioctl.h).
const LONGEST_NAME: usize = 127;

/// The name of a volume's mapping, as ceph-csi has it. A handle may be too long for that, or
/// have characters that libdevmapper escapes: then the name has its digest.
pub fn name_of(volume_id: &str) -> String {
    let name = format!("luks-rbd-{volume_id}");
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"#+-.:=@_".contains(&byte);
    if name.len() <= LONGEST_NAME && name.bytes().all(is_plain) {
        return name;
    }
    format!("luks-rbd-{}", digest::sha256_hex(volume_id))
}

/// The content of a device that is to hold a LUKS volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LuksContent {
    /// It is proven blank.
    Blank,
    /// A LUKS header.
    Header,
    /// Unknown data at that byte.
    Unknown(u64),
}

/// Reads the content of a device that no other process uses.
pub fn look(under: &BlockDev) -> Result<LuksContent, LuksError> {
    // udevd opens it, too, after each write.
    let read = block::open_exclusive(&under.node, under.dev, OFlags::RDONLY)
        .map(File::from)
        .and_then(|file| probe::content_of(&file, sysfs::size_bytes(under.dev)?));
    let content = read.map_err(failed(format!("read {}", under.node.display())))?;
    let what = match content {
        Content::Blank => return Ok(LuksContent::Blank),
        Content::Foreign { what } if what == probe::LUKS => return Ok(LuksContent::Header),
        Content::Foreign { what } => what.to_owned(),
        Content::Fs(info) => format!("{} with data", info.fs.as_str()),
        Content::Unknown { offset } => return Ok(LuksContent::Unknown(offset)),
    };
    Err(LuksError::Foreign {
        node: under.node.clone(),
        what,
    })
}

/// The origin of a passphrase, which decides how costly a guess must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassphraseOrigin {
    /// A person chose it: each guess must cost seconds of CPU time.
    People,
    /// It has more random bits than can be tried: a guess may be cheap, and so is each
    /// opening.
    Random,
}

impl PassphraseOrigin {
    /// The derivation of the key (cryptsetup(8), "NOTES ON PASSPHRASES"). By default Argon2
    /// takes a gigabyte at each opening: sixteen at once would end the agent.
    fn derivation(self) -> &'static [&'static str] {
        match self {
            Self::People => &["--pbkdf=argon2id", "--pbkdf-memory=32768"],
            Self::Random => &["--pbkdf=pbkdf2", "--pbkdf-force-iterations=1000"],
        }
    }
}

/// Writes a LUKS header, which destroys the device's content. The caller has proven it
/// blank, or knows it to hold an interrupted format of its own.
pub fn format(
    under: &BlockDev,
    passphrase: &Secret,
    origin: PassphraseOrigin,
    domain: &str,
) -> Result<(), LuksError> {
    let node = under.node.to_string_lossy();
    let fixed = ["--batch-mode", "--type=luks2", "--hash=sha256"];
    let args = [&fixed, origin.derivation(), &["--key-file=-", &node]].concat();
    derive_key("luksFormat", &args, &node, passphrase.reveal(), domain).map(drop)
}

/// The mapping of that name over the device, if it is open.
pub fn find_open(
    under: &BlockDev,
    name: &str,
    read_only: bool,
) -> Result<Option<BlockDev>, LuksError> {
    let found = find(name).map_err(failed("list the device mapper's devices"))?;
    let Some(mapping) = found else {
        return Ok(None);
    };
    if mapping.under != under.dev {
        return Err(LuksError::Other {
            name: name.to_owned(),
            node: under.node.clone(),
        });
    }
    if remove_if_incomplete(&mapping)? == Done::Now {
        return Ok(None);
    }
    // The device below may have grown since a killed agent opened it.
    if !read_only {
        match resize(name) {
            Ok(_) | Err(LuksError::ReadOnly { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    let over = BlockDev::of(mapping.over).map_err(failed(format!("find the mapping {name}")))?;
    Ok(Some(over))
}

/// Opens the device under that name, or finds it open.
pub fn open(
    under: &BlockDev,
    name: &str,
    passphrase: &Secret,
    read_only: bool,
    domain: &str,
) -> Result<(BlockDev, Done), LuksError> {
    if let Some(over) = find_open(under, name, read_only)? {
        return Ok((over, Done::Already));
    }
    let node = under.node.to_string_lossy();
    let mut args = vec!["--disable-keyring", "--key-file=-", &*node, name];
    if read_only {
        args.insert(0, "--readonly");
    }
    let luks_open = || derive_key("luksOpen", &args, &node, passphrase.reveal(), domain);
    let opened = match luks_open() {
        // It may have left the name: without a table a mapping is not in sysfs.
        Err(error) if error.is_in_use() && !is_name_in_sysfs(name) => {
            remove_incomplete(name).map_err(|_| error)?;
            luks_open()
        }
        opened => opened,
    };
    opened.map_err(|error| why_not_opened(under, error))?;
    let mapping = find(name).and_then(|found| {
        found.ok_or_else(|| io::Error::other("it is not there after it was opened"))
    });
    let over = mapping.and_then(|mapping| BlockDev::of(mapping.over));
    let over = over.map_err(failed(format!("find the mapping {name}")))?;
    Ok((over, Done::Now))
}

fn why_not_opened(under: &BlockDev, error: LuksError) -> LuksError {
    let node = under.node.clone();
    match error {
        LuksError::Failed { .. } if is_whole(under).is_ok_and(|is| !is) => {
            LuksError::Unfinished { node }
        }
        error if error.is_no_permission() => LuksError::Passphrase { node },
        other => other,
    }
}

/// Closes the mapping. One that is not there is closed.
pub fn close(name: &str) -> Result<Done, LuksError> {
    let found = find(name).map_err(failed("list the device mapper's devices"))?;
    let Some(mapping) = found else {
        return Ok(Done::Already);
    };
    if remove_if_incomplete(&mapping)? == Done::Now {
        return Ok(Done::Now);
    }
    match cryptsetup("luksClose", &[name], name) {
        Ok(_) => Ok(Done::Now),
        Err(error) if error.is_in_use() => Err(LuksError::Busy {
            name: name.to_owned(),
        }),
        Err(error) => Err(error),
    }
}

/// Removes the mapping if it has no table in force: cryptsetup was killed while it opened it.
fn remove_if_incomplete(mapping: &Mapping) -> Result<Done, LuksError> {
    let bytes = sysfs::size_bytes(mapping.over);
    let bytes = bytes.map_err(failed(format!("look at the mapping {}", mapping.name)))?;
    if bytes != 0 {
        return Ok(Done::Already);
    }
    remove_incomplete(&mapping.name)?;
    Ok(Done::Now)
}

/// Whether a device of device-mapper with a table has the name, whatever it is.
fn is_name_in_sysfs(name: &str) -> bool {
    let has_name = |device: io::Result<fs::DirEntry>| {
        let text = device.and_then(|it| fs::read_to_string(it.path().join("dm/name")));
        text.is_ok_and(|text| text.trim_end() == name)
    };
    // Where sysfs cannot be read, nothing is removed.
    fs::read_dir("/sys/block").map_or(true, |mut devices| devices.any(has_name))
}

/// Removes a mapping without a table in force, which cryptsetup neither opens nor closes. The
/// kernel refuses to remove one that is open.
fn remove_incomplete(name: &str) -> Result<(), LuksError> {
    run_program("dmsetup", "remove", &[name], name, b"", || {})?;
    tracing::warn!(name, "removed the mapping of an interrupted luksOpen");
    Ok(())
}

/// Grows the mapping to the size of the device below. Returns its size in bytes.
pub fn resize(name: &str) -> Result<u64, LuksError> {
    let over = || {
        let found = find(name)?.map(|mapping| mapping.over);
        found.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
    };
    let look = || failed(format!("look at the mapping {name}"));
    if over().and_then(sysfs::is_read_only).map_err(look())? {
        return Err(LuksError::ReadOnly {
            name: name.to_owned(),
        });
    }
    cryptsetup("resize", &[name], name)?;
    over().and_then(sysfs::size_bytes).map_err(look())
}

/// Whether a LUKS header is complete and has a key.
pub fn is_whole(under: &BlockDev) -> Result<bool, LuksError> {
    let header = LuksHeader::read(&under.node.to_string_lossy())?;
    Ok(header.is_some_and(|header| !header.keyslots.is_empty()))
}

/// Where the data of an encrypted device begins, in bytes, by its header; none if that is
/// incomplete, or a re-encryption is under way.
pub fn data_offset(under: &BlockDev) -> Result<Option<u64>, LuksError> {
    let header = LuksHeader::read(&under.node.to_string_lossy())?;
    Ok(header.and_then(|header| header.data_offset()))
}

/// A mapping, and the device below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    pub name: String,
    /// The mapping's device.
    pub over: Dev,
    /// The encrypted one.
    pub under: Dev,
}

/// The mapping of that name, by sysfs: never waits for a device.
pub fn find(name: &str) -> io::Result<Option<Mapping>> {
    let mut mappings = mappings(Path::new("/sys/block"))?;
    mappings.retain(|mapping| mapping.name == name);
    Ok(mappings.pop())
}

/// The mapping that the device is, if it is one.
pub fn mapping_of(dev: Dev) -> Option<Mapping> {
    read(&PathBuf::from(format!("/sys/dev/block/{dev}"))).ok()?
}

/// The mapping that is open over the device.
pub fn over(dev: Dev) -> io::Result<Option<BlockDev>> {
    let mut mappings = mappings(Path::new(&format!("/sys/dev/block/{dev}/holders")))?;
    mappings
        .pop()
        .map(|mapping| BlockDev::of(mapping.over))
        .transpose()
}

/// The mappings among the devices that sysfs lists in a directory.
fn mappings(directory: &Path) -> io::Result<Vec<Mapping>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        found.extend(read(&entry?.path())?);
    }
    Ok(found)
}

/// Reads a device's directory of sysfs (Documentation/ABI/testing/sysfs-block-dm).
/// None if it is no mapping, or is being removed.
fn read(device: &Path) -> io::Result<Option<Mapping>> {
    match read_if_there(device) {
        // The kernel empties the directory of a mapping before it removes it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read,
    }
}

fn read_if_there(device: &Path) -> io::Result<Option<Mapping>> {
    let text = |name: &str| fs::read_to_string(device.join(name));
    let (Ok(uuid), Ok(name)) = (text("dm/uuid"), text("dm/name")) else {
        return Ok(None);
    };
    if !uuid.starts_with("CRYPT-LUKS") {
        return Ok(None);
    }
    let number = |path: &Path| {
        let text = fs::read_to_string(path.join("dev"))?;
        text.parse().map_err(io::Error::other)
    };
    let Some(below) = fs::read_dir(device.join("slaves"))?.next() else {
        return Ok(None);
    };
    Ok(Some(Mapping {
        name: name.trim_end().to_owned(),
        over: number(device)?,
        under: number(&below?.path())?,
    }))
}

/// cryptsetup(8): wrong passphrase.
const NO_PERMISSION: i32 = 2;
/// cryptsetup(8): the device exists already, or is busy.
const IN_USE: i32 = 5;

/// Bounds how many derive a key at once, from [`bound`] on.
static GATE: OnceLock<Gate> = OnceLock::new();

/// Bounds how many cryptsetup of this process derive a key at once.
pub fn bound(gate: Gate) {
    // One process has one bound: the first.
    let _ = GATE.set(gate);
}

/// Runs an action that derives a key from the passphrase, which locks memory and takes a
/// processor for seconds. So it waits for a permit; other actions do not, and a mapping can
/// be closed while any number of them hang.
fn derive_key(
    action: &'static str,
    args: &[&str],
    what: &str,
    input: &str,
    domain: &str,
) -> Result<Vec<u8>, LuksError> {
    // Its queue has no limit.
    let permit = GATE.get().and_then(|gate| gate.enter_on_lane(domain).ok());
    let lives = || permit.iter().for_each(Permit::renew);
    run(action, args, what, input.as_bytes(), lives)
}

fn cryptsetup(action: &'static str, args: &[&str], what: &str) -> Result<Vec<u8>, LuksError> {
    run(action, args, what, b"", || {})
}

fn run(
    action: &'static str,
    args: &[&str],
    what: &str,
    input: &[u8],
    lives: impl Fn(),
) -> Result<Vec<u8>, LuksError> {
    run_program("cryptsetup", action, args, what, input, lives)
}

fn run_program(
    program: &'static str,
    action: &'static str,
    args: &[&str],
    what: &str,
    input: &[u8],
    lives: impl Fn(),
) -> Result<Vec<u8>, LuksError> {
    let args: Vec<_> = std::iter::once(&action).chain(args).collect();
    // Its library would wait for udevd by a semaphore that the host's udevd does not
    // see from a container, nor raise without its rules.
    let environment = [("DM_DISABLE_UDEV", "1")];
    let output = exec::run(program, &args, &environment, input, lives)
        .map_err(failed(format!("run {program}")))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(LuksError::Failed {
        program,
        action,
        what: what.to_owned(),
        status: output.status,
        said: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

#[cfg(test)]
mod tests;
