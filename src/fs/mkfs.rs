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
//! have left some of its work. The text is split as a shell does and then read
//! as the program's own getopt would, in order to refuse what turns mkfs into
//! something else: another device, a file of the node copied into the volume, a
//! dry run, or a version number and success.

use std::path::Path;

use super::{CommandLine, FsType};

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
    /// The program has no such option.
    #[error("mkfsOptions: {fs}'s mkfs has no option {option}")]
    Unknown {
        /// Whose mkfs.
        fs: FsType,
        /// The option.
        option: String,
    },
    /// The option's value is missing.
    #[error("mkfsOptions: the option {option} lacks its value")]
    NoValue {
        /// The option.
        option: String,
    },
    /// An option that would do something else than format the volume.
    #[error("mkfsOptions: {option} is not allowed: it {why}")]
    Refused {
        /// The option, with its value's part where that is why.
        option: String,
        /// What it does.
        why: &'static str,
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
    let mut args = vec![grammar(fs).force.to_owned(), "-q".to_owned()];
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
    let grammar = grammar(fs);
    let mut args = Vec::new();
    let mut words = split_options(text)?.into_iter();
    while let Some(word) = words.next() {
        if let Some(long) = word.strip_prefix("--").filter(|long| !long.is_empty()) {
            let (name, attached) = match long.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (long, None),
            };
            let known = grammar.long.iter().find(|(known, _)| *known == name);
            let option = format!("--{name}");
            let Some((_, letter)) = known else {
                return Err(OptionError::Unknown { fs, option });
            };
            grammar.take(*letter, option, attached, &mut words, &mut args)?;
            continue;
        }
        let Some(letters) = word.strip_prefix('-').filter(|rest| !rest.is_empty()) else {
            return Err(OptionError::Operand { word });
        };
        let mut rest = letters.chars();
        while let Some(letter) = rest.next() {
            let option = format!("-{letter}");
            if grammar.with_value.contains(letter) {
                let attached = Some(rest.as_str().to_owned()).filter(|value| !value.is_empty());
                grammar.take(letter, option, attached, &mut words, &mut args)?;
                break;
            }
            if !grammar.flags.contains(letter) {
                return Err(OptionError::Unknown { fs, option });
            }
            grammar.take(letter, option, None, &mut words, &mut args)?;
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

/// A mkfs program's options.
struct Grammar {
    force: &'static str,
    /// Letters with a value.
    with_value: &'static str,
    /// Letters without.
    flags: &'static str,
    /// Long options, and the letter that each one is as good as.
    long: &'static [(&'static str, char)],
    /// Letters that do something else than format, and what.
    refused: &'static [(char, &'static str)],
    /// Parts of a letter's value that do.
    refused_parts: &'static [(char, &'static str, &'static str)],
}

const COPIES: &str = "copies files of the node into the volume";
const READS: &str = "reads a file of the node";
const WRITES: &str = "writes a file of the node";
const ELSEWHERE: &str = "names another device or another place";
const FORMATS_NOTHING: &str = "prints something and formats nothing";
const OTHER_KIND: &str = "makes something else than the volume's file system";

fn grammar(fs: FsType) -> &'static Grammar {
    match fs {
        FsType::Ext4 => &EXT4,
        FsType::Xfs => &XFS,
        FsType::Btrfs => &BTRFS,
    }
}

static EXT4: Grammar = Grammar {
    force: "-F",
    with_value: "CEGIJLMNOTUbdegilmortz",
    flags: "DFKSVcjnqv",
    long: &[],
    refused: &[
        ('d', COPIES),
        ('l', READS),
        ('z', WRITES),
        ('n', FORMATS_NOTHING),
        ('V', FORMATS_NOTHING),
        ('S', "rewrites superblocks and nothing else"),
        ('t', OTHER_KIND),
    ],
    refused_parts: &[
        ('E', "offset", ELSEWHERE),
        ('J', "device", ELSEWHERE),
        ('O', "journal_dev", OTHER_KIND),
    ],
};

static XFS: Grammar = Grammar {
    force: "-f",
    with_value: "Lbcdilmnprs",
    flags: "KNVfq",
    long: &[],
    refused: &[
        ('c', READS),
        ('p', COPIES),
        ('N', FORMATS_NOTHING),
        ('V', FORMATS_NOTHING),
    ],
    refused_parts: &[
        ('d', "name", ELSEWHERE),
        ('d', "file", ELSEWHERE),
        ('l', "logdev", ELSEWHERE),
        ('r', "rtdev", ELSEWHERE),
    ],
};

static BTRFS: Grammar = Grammar {
    force: "-f",
    // C and S stand for long options without a letter.
    with_value: "CLORUbdlmnrs",
    flags: "KMSVfhqv",
    long: &[
        ("data", 'd'),
        ("metadata", 'm'),
        ("mixed", 'M'),
        ("csum", 'C'),
        ("checksum", 'C'),
        ("nodesize", 'n'),
        ("leafsize", 'l'),
        ("sectorsize", 's'),
        ("features", 'O'),
        ("runtime-features", 'R'),
        ("label", 'L'),
        ("uuid", 'U'),
        ("byte-count", 'b'),
        ("rootdir", 'r'),
        ("shrink", 'S'),
        ("nodiscard", 'K'),
        ("force", 'f'),
        ("quiet", 'q'),
        ("verbose", 'v'),
        ("version", 'V'),
        ("help", 'h'),
    ],
    refused: &[
        ('r', COPIES),
        ('S', COPIES),
        ('V', FORMATS_NOTHING),
        ('h', FORMATS_NOTHING),
    ],
    refused_parts: &[
        ('O', "list-all", FORMATS_NOTHING),
        ('R', "list-all", FORMATS_NOTHING),
    ],
};

impl Grammar {
    /// Takes one option, as it was spelt, with its value.
    fn take(
        &self,
        letter: char,
        option: String,
        attached: Option<String>,
        words: &mut impl Iterator<Item = String>,
        args: &mut Vec<String>,
    ) -> Result<(), OptionError> {
        if let Some((_, why)) = self.refused.iter().find(|(refused, _)| *refused == letter) {
            return Err(OptionError::Refused { option, why });
        }
        if !self.with_value.contains(letter) {
            if !self.force.ends_with(letter) {
                args.push(option);
            }
            return Ok(());
        }
        let Some(value) = attached.or_else(|| words.next()) else {
            return Err(OptionError::NoValue { option });
        };
        let parts = || {
            value
                .split(',')
                .map(|part| part.split('=').next().unwrap_or(part).trim())
        };
        for (of, refused, why) in self.refused_parts {
            if *of == letter && parts().any(|part| part == *refused) {
                let option = format!("{option} {refused}");
                return Err(OptionError::Refused { option, why });
            }
        }
        args.extend([option, value]);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
