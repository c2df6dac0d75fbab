//! Making file systems: the command lines, and which options a storage class
//! may add to them.
//!
//! Our own options leave out what costs time in proportion to the device: the
//! discard of all of it, and on ext4 the zeroing of inode tables, which the
//! kernel does in the background. On a device that reads as zeros ext4 needs no
//! zeroing at all. mke2fs(8), mkfs.xfs(8) and mkfs.btrfs(8) have the options.
//!
//! `mkfsOptions` of a class takes the place of all of these but the force flag:
//! the caller has seen that the device is blank, and a mkfs that was killed may
//! have left some of its work. mkfs runs as root in the agent's mount namespace,
//! and each of these programs has options that name another device or read and
//! write files. So the text is split as a shell does, read as the program's own
//! getopt would read it, and compared with a list of the options, the suboptions
//! and the forms of values that are allowed (`allowed`). An option that the
//! list does not have is an error, whatever it does. No allowed value can name a
//! file: none holds a slash, and no allowed option takes a file's name.

mod allowed;

use std::path::Path;

use super::{CommandLine, FsType};
use allowed::Grammar;

/// Why `mkfsOptions` is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    /// A quote without its end.
    #[error("mkfsOptions {text:?}: a quote or a backslash at the end is left open")]
    Unterminated {
        /// The whole text.
        text: String,
    },
    /// A word that is no option: mkfs would take it for a device or a size.
    #[error("mkfsOptions: {word:?} is no option; device and size are the driver's to give")]
    Operand {
        /// The word.
        word: String,
    },
    /// An option that is not on the list.
    #[error("mkfsOptions: {option} is not among the options that are allowed for {fs}: {allowed}")]
    Unlisted {
        /// Whose mkfs.
        fs: FsType,
        /// The option, with its suboption where it has some.
        option: String,
        /// Those that are, in its place.
        allowed: String,
    },
    /// An option whose reason to be refused is worth telling.
    #[error("mkfsOptions: {option} is not allowed: it {why}")]
    Refused {
        /// The option, with its suboption where it has some.
        option: String,
        /// What it does.
        why: &'static str,
    },
    /// The option's value is missing.
    #[error("mkfsOptions: the option {option} lacks its value")]
    NoValue {
        /// The option.
        option: String,
    },
    /// The option's value has a form that is not allowed.
    #[error("mkfsOptions: {option} {value:?}: {expected} is expected")]
    BadValue {
        /// The option, with its suboption where it has some.
        option: String,
        /// Its value.
        value: String,
        /// The form that is.
        expected: String,
    },
}

/// The command line that makes a file system. `options` are those of
/// [`parse_options`]; none: our own. `reads_as_zero` says that every block of
/// the device that nobody wrote reads as zeros, and that nobody wrote any.
pub fn command(fs: FsType, device: &Path, options: &[String], reads_as_zero: bool) -> CommandLine {
    let (program, ours): (_, &[&str]) = match (fs, reads_as_zero) {
        (FsType::Ext4, true) => (
            "mkfs.ext4",
            &[
                "-m",
                "0",
                "-E",
                "nodiscard,lazy_itable_init=1,lazy_journal_init=1,assume_storage_prezeroed=1",
            ],
        ),
        (FsType::Ext4, false) => (
            "mkfs.ext4",
            &["-m", "0", "-E", "nodiscard,lazy_itable_init=1"],
        ),
        (FsType::Xfs, _) => ("mkfs.xfs", &["-K"]),
        (FsType::Btrfs, _) => ("mkfs.btrfs", &["-K"]),
    };
    let mut args = vec![Grammar::of(fs).force_flag(), "-q".to_owned()];
    if options.is_empty() {
        args.extend(ours.iter().map(|&option| option.to_owned()));
    } else {
        args.extend_from_slice(options);
    }
    args.push(device.display().to_string());
    CommandLine { program, args }
}

/// `mkfsOptions` as arguments for [`command`]: split, every option a word of its
/// own with its value behind it, the force flag left out.
pub fn parse_options(fs: FsType, text: &str) -> Result<Vec<String>, OptionError> {
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
            return Err(OptionError::Operand { word });
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

/// Splits at blanks outside quotes, as a shell does: `'…'` is literal, within
/// `"…"` and outside quotes a backslash makes the next character literal.
fn split_options(text: &str) -> Result<Vec<String>, OptionError> {
    let mut words = Vec::new();
    // None between words; an empty pair of quotes is a word.
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
                    return Err(OptionError::Unterminated { text: text.into() });
                };
                word.get_or_insert_default().push(literal);
            }
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    if quote.is_some() {
        return Err(OptionError::Unterminated { text: text.into() });
    }
    words.extend(word);
    Ok(words)
}

#[cfg(test)]
mod tests;
