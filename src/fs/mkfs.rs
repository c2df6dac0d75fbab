//! Making file systems: the command lines, and the options that a storage class may add
//! to them.
//!
//! The default options avoid work proportional to the size of the device: discarding
//! all of it, and on ext4 zeroing the inode tables, which the kernel does in the
//! background. On a device that reads as zeros ext4 needs no zeroing at all. See
//! mke2fs(8), mkfs.xfs(8) and mkfs.btrfs(8).
//!
//! `mkfsOptions` of a class replaces all of these but the force flag, which the driver
//! always sets: the caller has verified that the device is blank, or that only a killed
//! mkfs wrote to it. The features are the same with every release of the programs, so that
//! a volume can move to a node with an older kernel or older tools, unless `mkfsOptions`
//! sets others. mkfs runs as root in the agent's mount namespace, and each of these
//! programs has options that name another device or read and write files. So
//! [`parse_options`] splits the text as a shell does, parses it as the program's own getopt
//! would, and compares it with an allow-list of options, suboptions and forms of values
//! (`allowed`). Any other option is an error. No allowed value can name a file: none holds
//! a slash, and no allowed option takes a file name.

mod allowed;

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::{CommandLine, FsType};
use allowed::Grammar;

/// Why `mkfsOptions` is rejected.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum MkfsOptionError {
    /// A quote that is not closed.
    ///
    /// Remedy: close the quote in mkfsOptions of the class.
    #[error("mkfsOptions {text:?}: a quote is not closed, or a backslash ends the text")]
    Unterminated { text: String },
    /// A word that is no option: mkfs would parse it as a device or a size.
    ///
    /// Remedy: remove the word from mkfsOptions of the class.
    #[error("mkfsOptions: {word:?} is no option; the driver sets device and size itself")]
    Operand { word: String },
    /// An option that is not on the allow-list.
    ///
    /// Remedy: remove the option from mkfsOptions of the class.
    #[error("mkfsOptions: {option} is not allowed for {fs}; allowed are: {allowed}")]
    Unlisted {
        fs: FsType,
        /// The option, with its suboption where it has some.
        option: String,
        allowed: String,
    },
    /// An option that is rejected with a reason of its own.
    ///
    /// Remedy: remove the option from mkfsOptions of the class.
    #[error("mkfsOptions: {option} is not allowed: it {why}")]
    Refused {
        /// The option, with its suboption where it has some.
        option: String,
        why: &'static str,
    },
    /// The option's value is missing.
    ///
    /// Remedy: give the option its value in mkfsOptions of the class.
    #[error("mkfsOptions: option {option} lacks its value")]
    NoValue { option: String },
    /// The option's value is malformed.
    ///
    /// Remedy: correct the value in mkfsOptions of the class.
    #[error("mkfsOptions: {option} {value:?}: {expected} is expected")]
    BadValue {
        /// The option, with its suboption where it has some.
        option: String,
        value: String,
        expected: String,
    },
}

/// All features of a new ext4. mke2fs 1.47 adds orphan_file, which Linux before 5.15
/// does not mount, and metadata_csum_seed; and a distribution's mke2fs.conf may have others.
const EXT4_FEATURES: &str = "none,has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,flex_bg,sparse_super,large_file,huge_file,dir_nlink,extra_isize,metadata_csum";
/// The options of the features that mkfs.xfs has turned on since 6.1, with a release that knows
/// them. Linux before 5.19 does not mount nrext64, nor Linux before 6.10 exchange and parent.
const XFS_LATER_FEATURES: [(&str, &str, Release); 4] = [
    ("-i", "nrext64", (5, 19)),
    ("-m", "rmapbt", (0, 0)),
    ("-i", "exchange", (6, 13)),
    ("-n", "parent", (6, 13)),
];

/// The release of a program: its first two numbers.
pub type Release = (u32, u32);

/// The releases that [`release_command`] told.
static RELEASES: Mutex<BTreeMap<&'static str, Release>> = Mutex::new(BTreeMap::new());

/// The command that tells the release of the program that makes this file system, for
/// [`note_release`]; `None` where it is known, or makes no difference.
pub fn release_command(fs: FsType) -> Option<CommandLine> {
    let program = program(fs);
    let args = vec!["-V".to_owned()];
    (fs != FsType::Ext4 && !releases().contains_key(program))
        .then_some(CommandLine { program, args })
}

fn program(fs: FsType) -> &'static str {
    match fs {
        FsType::Ext4 => "mkfs.ext4",
        FsType::Xfs => "mkfs.xfs",
        FsType::Btrfs => "mkfs.btrfs",
    }
}

/// Takes the release from the output of [`release_command`], such as
/// `mkfs.xfs version 6.1.0` or `mkfs.btrfs, part of btrfs-progs v6.2`.
pub fn note_release(program: &'static str, output: &str) {
    if let Some(release) = output.split_whitespace().find_map(parse_release) {
        releases().insert(program, release);
    }
}

fn parse_release(word: &str) -> Option<Release> {
    let mut numbers = word.trim_start_matches('v').split('.');
    let number = |text: &str| text.parse().ok();
    Some((
        numbers.next().and_then(number)?,
        numbers.next().and_then(number)?,
    ))
}

fn releases() -> MutexGuard<'static, BTreeMap<&'static str, Release>> {
    RELEASES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The command line that makes a file system. `options` come from [`parse_options`]; if
/// there are none, the defaults apply. `reads_as_zero`: every block of the device reads
/// as zeros. `encrypts_files`: its files are to be encrypted, which takes a feature of ext4.
pub fn command(
    fs: FsType,
    device: &Path,
    options: &[String],
    reads_as_zero: bool,
    encrypts_files: bool,
) -> CommandLine {
    let defaults: &[&str] = match (fs, reads_as_zero) {
        (FsType::Ext4, true) => &[
            "-m",
            "0",
            "-E",
            "nodiscard,lazy_itable_init=1,lazy_journal_init=1,assume_storage_prezeroed=1",
        ],
        (FsType::Ext4, false) => &["-m", "0", "-E", "nodiscard,lazy_itable_init=1"],
        (FsType::Xfs | FsType::Btrfs, _) => &["-K"],
    };
    let mut args = vec![Grammar::of(fs).force_flag(), "-q".to_owned()];
    args.extend(features(fs, options));
    if options.is_empty() {
        args.extend(defaults.iter().map(|&option| option.to_owned()));
    } else {
        args.extend_from_slice(options);
    }
    if encrypts_files && fs == FsType::Ext4 {
        args.extend(["-O", "encrypt"].map(str::to_owned));
    }
    args.push(device.display().to_string());
    CommandLine {
        program: program(fs),
        args,
    }
}

/// The options that set the features, as far as `options` does not.
fn features(fs: FsType, options: &[String]) -> Vec<String> {
    match fs {
        // A later -O adds to these, or takes from them.
        FsType::Ext4 => ["-O", EXT4_FEATURES].map(str::to_owned).into(),
        // mkfs.xfs refuses a suboption that is given twice, and one that it does not know.
        FsType::Xfs => XFS_LATER_FEATURES
            .iter()
            .filter(|(option, part, since)| {
                is_since(fs, *since) && !has_part(options, option, part)
            })
            .flat_map(|(option, part, _)| [(*option).to_owned(), format!("{part}=0")])
            .collect(),
        // On by default since 6.19; Linux before 6.1 mounts it read-only. A later -O adds it.
        FsType::Btrfs if is_since(fs, (6, 14)) => {
            ["-O", "^block-group-tree"].map(str::to_owned).into()
        }
        FsType::Btrfs => Vec::new(),
    }
}

fn is_since(fs: FsType, since: Release) -> bool {
    let release = releases().get(program(fs)).copied();
    release.unwrap_or_default() >= since
}

/// Whether the options, of [`parse_options`], have that suboption.
fn has_part(options: &[String], option: &str, part: &str) -> bool {
    let is_named = |value: &str| {
        let mut parts = value.split(',');
        parts.any(|one| one.split('=').next() == Some(part))
    };
    options
        .windows(2)
        .any(|pair| pair[0] == option && is_named(&pair[1]))
}

/// Parses `mkfsOptions` into arguments for [`command`]: each option a word of its own,
/// followed by its value; without the force flag.
pub fn parse_options(fs: FsType, text: &str) -> Result<Vec<String>, MkfsOptionError> {
    let grammar = Grammar::of(fs);
    let mut args = Vec::new();
    let mut words = split_options(text)?.into_iter();
    while let Some(word) = words.next() {
        if let Some(long) = word.strip_prefix("--") {
            let (name, attached) = match long.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (long, None),
            };
            let option = grammar.long(name)?;
            option.take(attached, &mut words, &mut args)?;
            continue;
        }
        let Some(letters) = word.strip_prefix('-').filter(|rest| !rest.is_empty()) else {
            return Err(MkfsOptionError::Operand { word });
        };
        let mut rest = letters.chars();
        while let Some(letter) = rest.next() {
            let option = grammar.short(letter)?;
            if option.is_flag() {
                option.take(None, &mut words, &mut args)?;
            } else {
                let attached = Some(rest.as_str().to_owned()).filter(|value| !value.is_empty());
                option.take(attached, &mut words, &mut args)?;
                break;
            }
        }
    }
    Ok(args)
}

/// What mkfs says, without the usage that it adds to an error in its options.
pub fn message(output: &str) -> &str {
    let is_usage = |line: &&str| line.to_ascii_lowercase().starts_with("usage:");
    let usage = output
        .split_inclusive('\n')
        .take_while(|line| !is_usage(line));
    let before: usize = usage.map(str::len).sum();
    match output[..before].trim() {
        "" => output.trim(),
        message => message,
    }
}

/// Splits at blanks outside quotes, as a shell does: `'…'` is literal, within
/// `"…"` and outside quotes a backslash makes the next character literal.
fn split_options(text: &str) -> Result<Vec<String>, MkfsOptionError> {
    let mut words = Vec::new();
    // `None` between words; an empty pair of quotes is a word.
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (Some(open), c) if c == open => quote = None,
            (None | Some('"'), '\\') => {
                let Some(literal) = chars.next() else {
                    return Err(MkfsOptionError::Unterminated { text: text.into() });
                };
                word.get_or_insert_default().push(literal);
            }
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    if quote.is_some() {
        return Err(MkfsOptionError::Unterminated { text: text.into() });
    }
    words.extend(word);
    Ok(words)
}

#[cfg(test)]
mod tests;
