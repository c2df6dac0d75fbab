//! Mount options: the parser of `mount_flags`.
//!
//! A flag may hold several options, separated by commas; a value with a comma is quoted
//! (`context="a:b:c:s0:c1,c2"`), and the quotes are not part of it. An option is one of
//! four kinds:
//!
//! - one for mount(8) only (`nofail`, `_netdev`, `x-…`): dropped;
//! - an attribute of the one mount (`ro`, `nosuid`, `noatime`), for fsmount(2)
//!   and mount_setattr(2). Of contradictory ones the last wins, as in mount(8);
//! - an option of another kind of mount (`bind`, `remount`, `loop`), or one that names
//!   another device (`source=`): rejected;
//! - any other: an option of the superblock, for fsconfig(2), which knows `sync`,
//!   `lazytime` and the like as well as the file system's own options. An option of a
//!   request has to be on the allow-list ([`MountOptions::refuse_unlisted`]); those in
//!   the mount table or in the record of an earlier agent need not be.
//!
//! Two values are equal if they have the same effect, whatever their order and
//! spelling; the `Display` and serde forms are sorted. The names are those of mount(8)
//! and mount_setattr(2).

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use rustix::mount::MountAttrFlags as Flags;
use serde::{Deserialize, Serialize};

mod allowed;
mod change;

/// The parsed options of one volume: attributes of the mount, options of the superblock.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct MountOptions {
    attributes: BTreeMap<AttributeGroup, &'static Attribute>,
    superblock: BTreeSet<FsOption>,
}

/// An option of the superblock.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FsOption {
    /// The name, before `=`.
    pub key: String,
    /// The text after `=`, without quotes; `None` without a `=`.
    pub value: Option<String>,
}

/// Attributes of a mount to set and to clear, as mount_setattr(2) takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttributeChange {
    /// The attributes to set, after clearing.
    pub set: Flags,
    /// The attributes to clear.
    pub clear: Flags,
}

/// Why an option is rejected.
#[derive(Debug, thiserror::Error)]
pub enum MountOptionError {
    /// A quote that is not closed.
    ///
    /// Remedy: close the quote in the mount options of the class or PersistentVolume.
    #[error("mount option {flag:?} opens a quote that it does not close")]
    OpenQuote {
        /// The flag of the request.
        flag: String,
    },
    /// Not a valid option.
    ///
    /// Remedy: correct the mount options of the class or PersistentVolume.
    #[error("mount option {option:?} {why}")]
    Malformed {
        /// The option without its quotes.
        option: String,
        /// The defect.
        why: &'static str,
    },
    /// An option that is not on the allow-list.
    #[error(
        "mount option {option:?} is not allowed for {fs} (docs/security.md); remove it, or correct \
         its value"
    )]
    Unlisted {
        /// The option without its quotes.
        option: String,
        /// The file system.
        fs: String,
    },
    /// An option that does more than mount this volume.
    #[error("mount option {option:?} is not allowed for a CSI volume: {why}; remove it")]
    Refused {
        /// The option without its quotes.
        option: String,
        /// Its effect, or the owner of the setting.
        why: &'static str,
    },
}

impl MountOptions {
    /// Parses `flags`.
    pub fn parse<S: AsRef<str>>(flags: &[S]) -> Result<Self, MountOptionError> {
        let mut options = Self::default();
        for flag in flags {
            for word in split(flag.as_ref())? {
                options.add(word)?;
            }
        }
        Ok(options)
    }

    /// Whether `ro` is set.
    pub fn read_only(&self) -> bool {
        let writing = self.attributes.get(&AttributeGroup::Writing);
        writing.is_some_and(|attribute| attribute.word == "ro")
    }

    /// The options for the superblock, sorted.
    pub fn fs_options(&self) -> impl ExactSizeIterator<Item = &FsOption> {
        self.superblock.iter()
    }

    /// Whether this option of the superblock is among them.
    pub fn has(&self, option: &FsOption) -> bool {
        self.superblock.contains(option)
    }

    /// The attributes as a change. On a new mount only `set` matters.
    pub fn attributes(&self) -> AttributeChange {
        let mut change = AttributeChange {
            set: Flags::empty(),
            clear: Flags::empty(),
        };
        for attribute in self.attributes.values() {
            change.set |= attribute.set;
            change.clear |= attribute.clear;
        }
        change
    }

    /// The options without the attributes of a target, which it can get while it is mounted.
    #[must_use]
    pub fn without_target_attributes(mut self) -> Self {
        (self.attributes).retain(|group, _| *group == AttributeGroup::Writing);
        self
    }

    /// Adds those attributes of `defaults` that these options do not set.
    #[must_use]
    pub fn with_default_attributes(mut self, defaults: &Self) -> Self {
        for (group, attribute) in &defaults.attributes {
            self.attributes.entry(*group).or_insert(*attribute);
        }
        self
    }

    /// The default options of a target. No volume needs device nodes. Setuid programs
    /// may be a volume's purpose, but not that of an inline volume, which any author of a
    /// pod can create.
    pub fn target_defaults(inline: bool) -> Self {
        let suid = if inline { "nosuid" } else { "suid" };
        Self::parse(&["nodev", suid]).expect("words of the list")
    }

    /// Whether they set any of `nosuid`, `nodev` and `noexec`, or their opposites.
    pub fn sets_protection(&self) -> bool {
        self.protection().next().is_some()
    }

    /// These options for an inline volume of this file system, or the first of them that no
    /// author of a pod may set: `suid`, `dev`, an SELinux label, and of a remote one all that is
    /// not on its list for pods.
    pub fn for_pods(mut self, fs: Option<&str>) -> Result<Self, String> {
        (self.superblock).retain(|option| !allowed::is_left_out_for_pods(fs, option));
        let refused = self.not_for_pods(fs);
        refused.map_or(Ok(self), Err)
    }

    fn not_for_pods(&self, fs: Option<&str>) -> Option<String> {
        let mut words = self.protection().map(|it| it.word);
        let word = words.find(|word| ["suid", "dev"].contains(word));
        let mut options = self.fs_options();
        let option = options.find(|option| !allowed::is_for_pods(fs, option));
        word.map(str::to_owned)
            .or_else(|| option.map(FsOption::to_string))
    }

    /// The first of `nosuid`, `nodev`, `noexec` and their opposites that is set here and not
    /// in force on a mount with the attributes `has`.
    pub fn first_not_in_force(&self, has: Flags) -> Option<&'static str> {
        let in_force = |it: &Attribute| has.contains(it.set) && !has.intersects(it.clear);
        let mut words = self.protection();
        words.find(|it| !in_force(it)).map(|it| it.word)
    }

    fn protection(&self) -> impl Iterator<Item = &'static Attribute> {
        let kinds = [
            AttributeGroup::Setuid,
            AttributeGroup::Devices,
            AttributeGroup::Executing,
        ];
        kinds
            .into_iter()
            .filter_map(|group| self.attributes.get(&group).copied())
    }

    /// The options without the SELinux contexts, which belong to the staged superblock: a bind
    /// mount cannot have its own.
    #[must_use]
    pub fn for_publish(&self) -> Self {
        let mut options = self.clone();
        (options.superblock).retain(|option| !LABELS.contains(&option.key.as_str()));
        options
    }

    /// Adds one option, without quotes.
    fn add(&mut self, word: String) -> Result<(), MountOptionError> {
        let (key, value) = match word.split_once('=') {
            Some((key, value)) => (key, Some(value)),
            None => (word.as_str(), None),
        };
        let malformed = |why| Err(malformed(&word, why));
        if word.is_empty() || is_for_mount8(key) {
            return Ok(());
        }
        if let Some(why) = refusal(key) {
            return Err(MountOptionError::Refused { option: word, why });
        }
        if let Some(attribute) = Attribute::named(key) {
            if value.is_some() {
                return malformed("takes no value");
            }
            self.attributes.insert(attribute.group, attribute);
            return Ok(());
        }
        if key.is_empty() {
            return malformed("has no name before its '='");
        }
        if word.contains('\0') {
            return malformed("holds a NUL byte");
        }
        if key.len() > FSCONFIG_MAX || value.is_some_and(|value| value.len() > FSCONFIG_MAX) {
            return malformed("is longer than the 255 bytes that fsconfig(2) takes");
        }
        self.superblock.insert(FsOption {
            key: key.to_owned(),
            value: value.map(str::to_owned),
        });
        Ok(())
    }

    fn words(&self) -> impl Iterator<Item = String> {
        let mut words: Vec<String> = self
            .attributes
            .values()
            .map(|attribute| attribute.word.to_owned())
            .chain(self.superblock.iter().map(FsOption::to_string))
            .collect();
        words.sort_unstable();
        words.into_iter()
    }
}

impl fmt::Display for MountOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.words().collect::<Vec<_>>().join(","))
    }
}

impl fmt::Display for FsOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match &self.value {
            Some(value) => format!("{}={value}", self.key),
            None => self.key.clone(),
        };
        if text.contains(',') {
            write!(f, "\"{text}\"")
        } else {
            f.write_str(&text)
        }
    }
}

impl TryFrom<Vec<String>> for MountOptions {
    type Error = MountOptionError;

    fn try_from(words: Vec<String>) -> Result<Self, MountOptionError> {
        Self::parse(&words)
    }
}

impl From<MountOptions> for Vec<String> {
    fn from(options: MountOptions) -> Self {
        options.words().collect()
    }
}

/// Splits a flag at the commas outside quotes, and drops the quotes.
fn split(flag: &str) -> Result<Vec<String>, MountOptionError> {
    let mut words = vec![String::new()];
    let mut quoted = false;
    for letter in flag.chars() {
        match letter {
            '"' => quoted = !quoted,
            ',' if !quoted => words.push(String::new()),
            _ => words.last_mut().expect("never empty").push(letter),
        }
    }
    if quoted {
        let flag = flag.to_owned();
        return Err(MountOptionError::OpenQuote { flag });
    }
    Ok(words)
}

fn malformed(option: &str, why: &'static str) -> MountOptionError {
    let option = option.to_owned();
    MountOptionError::Malformed { option, why }
}

/// Options that only mount(8) and fstab(5) interpret. Not every `user…` is one:
/// `user_xattr` is ext4's.
fn is_for_mount8(key: &str) -> bool {
    const OWN: &[&str] = &[
        "_netdev", "auto", "comment", "defaults", "group", "loud", "noauto", "nofail", "nogroup",
        "noowner", "nouser", "nousers", "owner", "silent", "user", "users",
    ];
    OWN.contains(&key)
        || key.starts_with("x-")
        || key.starts_with("X-") && !key.starts_with("X-mount.")
}

fn refusal(key: &str) -> Option<&'static str> {
    match key {
        "bind" | "rbind" | "move" | "remount" => Some("it requests another kind of mount"),
        "shared" | "private" | "slave" | "unbindable" | "rshared" | "rprivate" | "rslave"
        | "runbindable" => Some("propagation is set by kubelet"),
        "loop" | "offset" | "sizelimit" | "encryption" => {
            Some("it requests a loop device from mount(8)")
        }
        "source" => Some("the device is the volume's"),
        _ if key.starts_with("make-") => Some("propagation is set by kubelet"),
        _ if key.starts_with("X-mount.") => Some("it makes mount(8) change more than the mount"),
        _ => None,
    }
}

/// The options that choose an SELinux label.
const LABELS: [&str; 4] = ["context", "fscontext", "defcontext", "rootcontext"];

/// fsconfig(2) copies keys and values of up to 256 bytes with their NUL.
const FSCONFIG_MAX: usize = 255;

/// An attribute of mount_setattr(2), by its option.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Attribute {
    word: &'static str,
    group: AttributeGroup,
    set: Flags,
    clear: Flags,
}

/// Options of one group exclude each other; the last one wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum AttributeGroup {
    Writing,
    Setuid,
    Devices,
    Executing,
    Symlinks,
    AccessTime,
    DirectoryAccessTime,
}

impl Attribute {
    fn named(word: &str) -> Option<&'static Self> {
        let word = match word {
            // Each of them selects the kernel's default.
            "atime" | "norelatime" | "nostrictatime" => "relatime",
            word => word,
        };
        ATTRIBUTES.iter().find(|attribute| attribute.word == word)
    }

    const fn on(word: &'static str, group: AttributeGroup, flag: Flags) -> Self {
        let clear = Flags::empty();
        Self {
            word,
            group,
            set: flag,
            clear,
        }
    }

    const fn off(word: &'static str, group: AttributeGroup, flag: Flags) -> Self {
        let set = Flags::empty();
        Self {
            word,
            group,
            set,
            clear: flag,
        }
    }

    /// An access-time policy: the kernel demands that the whole field is cleared first.
    const fn atime(word: &'static str, policy: Flags) -> Self {
        Self {
            word,
            group: AttributeGroup::AccessTime,
            set: policy,
            clear: Flags::MOUNT_ATTR__ATIME,
        }
    }
}

static ATTRIBUTES: [Attribute; 15] = [
    Attribute::on("ro", AttributeGroup::Writing, Flags::MOUNT_ATTR_RDONLY),
    Attribute::off("rw", AttributeGroup::Writing, Flags::MOUNT_ATTR_RDONLY),
    Attribute::on("nosuid", AttributeGroup::Setuid, Flags::MOUNT_ATTR_NOSUID),
    Attribute::off("suid", AttributeGroup::Setuid, Flags::MOUNT_ATTR_NOSUID),
    Attribute::on("nodev", AttributeGroup::Devices, Flags::MOUNT_ATTR_NODEV),
    Attribute::off("dev", AttributeGroup::Devices, Flags::MOUNT_ATTR_NODEV),
    Attribute::on(
        "noexec",
        AttributeGroup::Executing,
        Flags::MOUNT_ATTR_NOEXEC,
    ),
    Attribute::off("exec", AttributeGroup::Executing, Flags::MOUNT_ATTR_NOEXEC),
    Attribute::on(
        "nosymfollow",
        AttributeGroup::Symlinks,
        Flags::MOUNT_ATTR_NOSYMFOLLOW,
    ),
    Attribute::off(
        "symfollow",
        AttributeGroup::Symlinks,
        Flags::MOUNT_ATTR_NOSYMFOLLOW,
    ),
    Attribute::on(
        "nodiratime",
        AttributeGroup::DirectoryAccessTime,
        Flags::MOUNT_ATTR_NODIRATIME,
    ),
    Attribute::off(
        "diratime",
        AttributeGroup::DirectoryAccessTime,
        Flags::MOUNT_ATTR_NODIRATIME,
    ),
    Attribute::atime("relatime", Flags::MOUNT_ATTR_RELATIME),
    Attribute::atime("noatime", Flags::MOUNT_ATTR_NOATIME),
    Attribute::atime("strictatime", Flags::MOUNT_ATTR_STRICTATIME),
];

#[cfg(test)]
mod tests;
