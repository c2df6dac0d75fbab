//! Mount options: what kubelet passes as `mount_flags`, told apart once.
//!
//! A flag may hold several options, parted by commas; quotes keep a comma inside
//! a value (`context="a:b:c:s0:c1,c2"`) and are not part of it. An option is one
//! of four things:
//!
//! - mount(8)'s own (`nofail`, `_netdev`, `x-…`): it says nothing to the kernel
//!   and is dropped;
//! - an attribute of the one mount (`ro`, `nosuid`, `noatime`), for fsmount(2)
//!   and mount_setattr(2). Contradictory ones: the last wins, as in mount(8);
//! - something that would make another kind of mount (`bind`, `remount`, `loop`)
//!   or name another device (`source=`): refused;
//! - all else belongs to the superblock and goes to fsconfig(2), which knows
//!   `sync`, `lazytime` and the like as well as the file system's own options.
//!   What a caller asks for has to be on a list ([`MountOptions::refuse_unlisted`]);
//!   what the kernel shows, and what an earlier agent recorded, need not be.
//!
//! Two values are equal where they ask for the same, whatever the order and the
//! spelling; the `Display` and serde forms are sorted. mount(8) and
//! mount_setattr(2) are the words' source.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use rustix::mount::MountAttrFlags as Flags;
use serde::{Deserialize, Serialize};

mod allowed;

/// The options of one volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct MountOptions {
    attributes: BTreeMap<Decides, &'static Attribute>,
    superblock: BTreeSet<FsOption>,
}

/// An option of the superblock.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FsOption {
    /// The name, before `=`.
    pub key: String,
    /// What stands behind `=`, without quotes; none where there is no `=`.
    pub value: Option<String>,
}

/// Attributes of a mount to set and to clear, as mount_setattr(2) takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttributeChange {
    /// To set, after clearing.
    pub set: Flags,
    /// To clear.
    pub clear: Flags,
}

/// Why an option was not taken.
#[derive(Debug, thiserror::Error)]
pub enum MountOptionError {
    /// A quote that nothing closes.
    #[error("mount option {flag:?} opens a quote that it does not close")]
    OpenQuote {
        /// The flag as it came.
        flag: String,
    },
    /// Not an option at all.
    #[error("mount option {option:?} {why}")]
    Malformed {
        /// The option without its quotes.
        option: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// An option that is not on the list.
    #[error(
        "mount option {option:?} is not among those that are allowed for {fs} (docs/security.md); \
         remove it, or correct its value"
    )]
    Unlisted {
        /// The option without its quotes.
        option: String,
        /// Which file system's list.
        fs: String,
    },
    /// An option that would do something other than mount this volume.
    #[error("mount option {option:?} is not allowed for a CSI volume: {why}; remove it")]
    Refused {
        /// The option without its quotes.
        option: String,
        /// What it would do.
        why: &'static str,
    },
}

impl MountOptions {
    /// Takes `flags` apart.
    pub fn parse<S: AsRef<str>>(flags: &[S]) -> Result<Self, MountOptionError> {
        let mut options = Self::default();
        for flag in flags {
            for word in split(flag.as_ref())? {
                options.add(word)?;
            }
        }
        Ok(options)
    }

    /// Whether `ro` was asked for.
    pub fn read_only(&self) -> bool {
        let writing = self.attributes.get(&Decides::Writing);
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

    /// What the attributes change. On a new mount only `set` matters.
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

    /// With the attributes of `others` that these options leave open.
    #[must_use]
    pub fn with_default_attributes(mut self, others: &Self) -> Self {
        for (decides, attribute) in &others.attributes {
            self.attributes.entry(*decides).or_insert(*attribute);
        }
        self
    }

    /// What a target has whose options say nothing of it. Nobody needs device nodes on a
    /// volume. Programs that set the user id may be what a volume is for, but not one
    /// that a pod's author asks for in the pod itself (`inline`).
    pub fn target_defaults(inline: bool) -> Self {
        let suid = if inline { "nosuid" } else { "suid" };
        Self::parse(&["nodev", suid]).expect("words of the list")
    }

    /// Whether they say anything of `nosuid`, `nodev` or `noexec`.
    pub fn sets_protection(&self) -> bool {
        self.protection().next().is_some()
    }

    /// Which word on `nosuid`, `nodev` or `noexec` is not so on a mount that `has` these.
    pub fn first_not_in_force(&self, has: Flags) -> Option<&'static str> {
        let is_so = |it: &Attribute| has.contains(it.set) && !has.intersects(it.clear);
        let mut words = self.protection();
        words.find(|it| !is_so(it)).map(|it| it.word)
    }

    fn protection(&self) -> impl Iterator<Item = &'static Attribute> {
        let kinds = [Decides::Setuid, Decides::Devices, Decides::Executing];
        kinds
            .into_iter()
            .filter_map(|decides| self.attributes.get(&decides).copied())
    }

    /// Without the SELinux contexts: those belong to the superblock, which is
    /// staged; a bind mount can't have its own.
    #[must_use]
    pub fn for_publish(&self) -> Self {
        let mut options = self.clone();
        options.superblock.retain(|option| {
            !["context", "fscontext", "defcontext", "rootcontext"].contains(&option.key.as_str())
        });
        options
    }

    /// Takes one option in, without quotes.
    fn add(&mut self, word: String) -> Result<(), MountOptionError> {
        let (key, value) = match word.split_once('=') {
            Some((key, value)) => (key, Some(value)),
            None => (word.as_str(), None),
        };
        let malformed = |why| Err(malformed(&word, why));
        if word.is_empty() || is_mount8s_own(key) {
            return Ok(());
        }
        if let Some(why) = refusal(key) {
            return Err(MountOptionError::Refused { option: word, why });
        }
        if let Some(attribute) = Attribute::named(key) {
            if value.is_some() {
                return malformed("takes no value");
            }
            self.attributes.insert(attribute.decides, attribute);
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

/// Parts a flag at the commas outside quotes, and drops the quotes.
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

/// Words for mount(8) and fstab(5). Not every `user…` is one: `user_xattr` is
/// ext4's.
fn is_mount8s_own(key: &str) -> bool {
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
        "bind" | "rbind" | "move" | "remount" => Some("it asks for another kind of mount"),
        "shared" | "private" | "slave" | "unbindable" | "rshared" | "rprivate" | "rslave"
        | "runbindable" => Some("propagation is set by kubelet"),
        "loop" | "offset" | "sizelimit" | "encryption" => {
            Some("it asks mount(8) for a loop device of its own")
        }
        "source" => Some("the device is the volume's"),
        _ if key.starts_with("make-") => Some("propagation is set by kubelet"),
        _ if key.starts_with("X-mount.") => Some("it asks mount(8) to change more than the mount"),
        _ => None,
    }
}

/// fsconfig(2) copies keys and values of up to 256 bytes with their NUL.
const FSCONFIG_MAX: usize = 255;

/// A word for mount_setattr(2).
#[derive(Debug, PartialEq, Eq, Hash)]
struct Attribute {
    word: &'static str,
    decides: Decides,
    set: Flags,
    clear: Flags,
}

/// What a word decides; the last word on it wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Decides {
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
            // All of them mean the kernel's default.
            "atime" | "norelatime" | "nostrictatime" => "relatime",
            word => word,
        };
        ATTRIBUTES.iter().find(|attribute| attribute.word == word)
    }

    const fn on(word: &'static str, decides: Decides, flag: Flags) -> Self {
        let clear = Flags::empty();
        Self {
            word,
            decides,
            set: flag,
            clear,
        }
    }

    const fn off(word: &'static str, decides: Decides, flag: Flags) -> Self {
        let set = Flags::empty();
        Self {
            word,
            decides,
            set,
            clear: flag,
        }
    }

    /// An access-time policy: the kernel wants the whole field cleared first.
    const fn atime(word: &'static str, policy: Flags) -> Self {
        Self {
            word,
            decides: Decides::AccessTime,
            set: policy,
            clear: Flags::MOUNT_ATTR__ATIME,
        }
    }
}

static ATTRIBUTES: [Attribute; 15] = [
    Attribute::on("ro", Decides::Writing, Flags::MOUNT_ATTR_RDONLY),
    Attribute::off("rw", Decides::Writing, Flags::MOUNT_ATTR_RDONLY),
    Attribute::on("nosuid", Decides::Setuid, Flags::MOUNT_ATTR_NOSUID),
    Attribute::off("suid", Decides::Setuid, Flags::MOUNT_ATTR_NOSUID),
    Attribute::on("nodev", Decides::Devices, Flags::MOUNT_ATTR_NODEV),
    Attribute::off("dev", Decides::Devices, Flags::MOUNT_ATTR_NODEV),
    Attribute::on("noexec", Decides::Executing, Flags::MOUNT_ATTR_NOEXEC),
    Attribute::off("exec", Decides::Executing, Flags::MOUNT_ATTR_NOEXEC),
    Attribute::on(
        "nosymfollow",
        Decides::Symlinks,
        Flags::MOUNT_ATTR_NOSYMFOLLOW,
    ),
    Attribute::off(
        "symfollow",
        Decides::Symlinks,
        Flags::MOUNT_ATTR_NOSYMFOLLOW,
    ),
    Attribute::on(
        "nodiratime",
        Decides::DirectoryAccessTime,
        Flags::MOUNT_ATTR_NODIRATIME,
    ),
    Attribute::off(
        "diratime",
        Decides::DirectoryAccessTime,
        Flags::MOUNT_ATTR_NODIRATIME,
    ),
    Attribute::atime("relatime", Flags::MOUNT_ATTR_RELATIME),
    Attribute::atime("noatime", Flags::MOUNT_ATTR_NOATIME),
    Attribute::atime("strictatime", Flags::MOUNT_ATTR_STRICTATIME),
];

#[cfg(test)]
mod tests;
