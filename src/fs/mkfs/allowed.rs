//! The options of the three mkfs programs that a class may set.
//!
//! To allow another, look it up in the program's manual *and* its source: it must
//! name no file and no device, make nothing but the file system of this device in its
//! full size, and do so in bounded time.

use super::{FsType, MkfsOptionError};

/// The options of one mkfs program.
pub struct Grammar {
    fs: FsType,
    /// The force flag, which the driver sets itself.
    force: char,
    /// The allowed options by their letters.
    letters: &'static [(char, Form)],
    /// Long options, each with its equivalent letter.
    long: &'static [(&'static str, char)],
    /// Options and suboptions that are rejected with a reason of their own.
    refused: &'static [(&'static str, &'static str)],
}

/// The form of an option's value.
#[derive(Clone, Copy)]
enum Form {
    /// No value.
    Flag,
    /// No value, `0` or `1`.
    Switch,
    /// Digits, and a letter for the unit.
    Number,
    /// Digits, perhaps with a fraction.
    Decimal,
    /// A label of at most so many bytes.
    Label(usize),
    /// A UUID, or one of these words.
    Uuid(&'static [&'static str]),
    /// Some of these words, separated by commas, colons or blanks; `^` before a
    /// word negates it.
    Words(&'static [&'static str]),
    /// Some of these suboptions, separated by commas.
    Parts(&'static [(&'static str, Form)]),
}

use Form::{Decimal, Flag, Label, Number, Parts, Switch, Uuid, Words};

const COPIES: &str = "copies files of the node into the volume";
const READS: &str = "reads a file of the node";
const WRITES: &str = "writes a file of the node";
const ELSEWHERE: &str = "names another device, or a file or directory";
const FORMATS_NOTHING: &str = "prints something and formats nothing";
const OTHER_KIND: &str = "makes something else than the volume's file system";
const SIZE: &str = "sets a size, and the file system is as large as its volume";
const OWNER: &str = "gives the volume's root directory to a user; fsGroup is for that";
const WHOLE_DEVICE: &str = "reads the whole device";

static EXT4: Grammar = Grammar {
    fs: FsType::Ext4,
    force: 'F',
    letters: &[
        ('C', Number),
        ('D', Flag),
        (
            'E',
            Parts(&[
                ("discard", Flag),
                ("encoding", Words(&["utf8", "utf8-12.1"])),
                ("encoding_flags", Words(&["strict", "nostrict"])),
                ("hash_seed", Uuid(&[])),
                ("lazy_itable_init", Switch),
                ("lazy_journal_init", Switch),
                ("mmp_update_interval", Number),
                ("nodiscard", Flag),
                ("num_backup_sb", Number),
                ("orphan_file_size", Number),
                ("packed_meta_blocks", Switch),
                ("quotatype", Words(&["usrquota", "grpquota", "prjquota"])),
                ("resize", Number),
                ("stride", Number),
                ("stripe-width", Number),
                ("stripe_width", Number),
            ]),
        ),
        ('F', Flag),
        ('G', Number),
        ('I', Number),
        (
            'J',
            Parts(&[
                ("fast_commit_size", Number),
                ("location", Number),
                ("size", Number),
            ]),
        ),
        ('K', Flag),
        ('L', Label(16)),
        ('N', Number),
        (
            'O',
            Words(&[
                "64bit",
                "bigalloc",
                "casefold",
                "dir_index",
                "dir_nlink",
                "ea_inode",
                "encrypt",
                "ext_attr",
                "extent",
                "extents",
                "extra_isize",
                "fast_commit",
                "filetype",
                "flex_bg",
                "has_journal",
                "huge_file",
                "inline_data",
                "large_dir",
                "large_file",
                "largedir",
                "meta_bg",
                "metadata_csum",
                "metadata_csum_seed",
                "mmp",
                "none",
                "orphan_file",
                "project",
                "quota",
                "resize_inode",
                "sparse_super",
                "sparse_super2",
                "stable_inodes",
                "uninit_bg",
                "uninit_groups",
                "verity",
            ]),
        ),
        (
            'T',
            Words(&[
                "big",
                "default",
                "floppy",
                "huge",
                "largefile",
                "largefile4",
                "news",
                "small",
            ]),
        ),
        ('U', Uuid(&["clear", "random", "time"])),
        ('b', Number),
        ('e', Words(&["continue", "remount-ro"])),
        ('g', Number),
        ('i', Number),
        ('j', Flag),
        ('m', Decimal),
        ('q', Flag),
        ('v', Flag),
    ],
    long: &[],
    refused: &[
        ("-c", WHOLE_DEVICE),
        ("-d", COPIES),
        (
            "-e panic",
            "halts the node after an error of the file system",
        ),
        ("-l", READS),
        ("-n", FORMATS_NOTHING),
        ("-t", OTHER_KIND),
        ("-z", WRITES),
        (
            "-E assume_storage_prezeroed",
            "is set by the driver where it is true",
        ),
        ("-E offset", ELSEWHERE),
        ("-E root_owner", OWNER),
        ("-E root_perms", OWNER),
        ("-J device", ELSEWHERE),
        ("-O journal_dev", OTHER_KIND),
        ("-S", "rewrites superblocks and nothing else"),
        ("-V", FORMATS_NOTHING),
    ],
};

static XFS: Grammar = Grammar {
    fs: FsType::Xfs,
    force: 'f',
    letters: &[
        ('K', Flag),
        ('L', Label(12)),
        ('b', Parts(&[("size", Number)])),
        (
            'd',
            Parts(&[
                ("agcount", Number),
                ("agsize", Number),
                ("concurrency", Number),
                ("cowextsize", Number),
                ("daxinherit", Switch),
                ("extszinherit", Number),
                ("noalign", Switch),
                ("projinherit", Number),
                ("sectsize", Number),
                ("su", Number),
                ("sunit", Number),
                ("sw", Number),
                ("swidth", Number),
            ]),
        ),
        ('f', Flag),
        (
            'i',
            Parts(&[
                ("align", Switch),
                ("attr", Number),
                ("exchange", Switch),
                ("maxpct", Number),
                ("nrext64", Switch),
                ("perblock", Number),
                ("projid32bit", Switch),
                ("size", Number),
                ("sparse", Switch),
            ]),
        ),
        (
            'l',
            Parts(&[
                ("agnum", Number),
                ("concurrency", Number),
                ("internal", Switch),
                ("lazy-count", Switch),
                ("sectsize", Number),
                ("size", Number),
                ("su", Number),
                ("sunit", Number),
                ("version", Number),
            ]),
        ),
        (
            'm',
            Parts(&[
                ("autofsck", Switch),
                ("bigtime", Switch),
                ("crc", Switch),
                ("finobt", Switch),
                ("inobtcount", Switch),
                ("metadir", Switch),
                ("reflink", Switch),
                ("rmapbt", Switch),
                ("uuid", Uuid(&[])),
            ]),
        ),
        (
            'n',
            Parts(&[
                ("ftype", Switch),
                ("parent", Switch),
                ("size", Number),
                ("version", Words(&["2", "ci"])),
            ]),
        ),
        ('q', Flag),
        ('s', Parts(&[("sectsize", Number), ("size", Number)])),
    ],
    long: &[],
    refused: &[
        ("-N", FORMATS_NOTHING),
        ("-V", FORMATS_NOTHING),
        ("-c", READS),
        ("-d file", ELSEWHERE),
        ("-d name", ELSEWHERE),
        ("-d size", SIZE),
        ("-l file", ELSEWHERE),
        ("-l logdev", ELSEWHERE),
        ("-l name", ELSEWHERE),
        ("-p", COPIES),
        ("-r", "describes a realtime device, and a volume has none"),
    ],
};

static BTRFS: Grammar = Grammar {
    fs: FsType::Btrfs,
    force: 'f',
    letters: &[
        // No letter of mkfs.btrfs: it represents `--checksum` and `--csum` here.
        ('C', Words(&["blake2", "crc32c", "sha256", "xxhash"])),
        ('K', Flag),
        ('L', Label(255)),
        ('M', Flag),
        (
            'O',
            Words(&[
                "block-group-tree",
                "extref",
                "free-space-tree",
                "mixed-bg",
                "no-holes",
                "quota",
                "raid56",
                "skinny-metadata",
                "squota",
            ]),
        ),
        (
            'R',
            Words(&["block-group-tree", "free-space-tree", "quota"]),
        ),
        ('U', Uuid(&[])),
        ('d', Words(&["dup", "single"])),
        ('f', Flag),
        ('m', Words(&["dup", "single"])),
        ('n', Number),
        ('q', Flag),
        ('s', Number),
        ('v', Flag),
    ],
    long: &[
        ("checksum", 'C'),
        ("csum", 'C'),
        ("data", 'd'),
        ("features", 'O'),
        ("force", 'f'),
        ("label", 'L'),
        ("metadata", 'm'),
        ("mixed", 'M'),
        ("nodesize", 'n'),
        ("nodiscard", 'K'),
        ("quiet", 'q'),
        ("runtime-features", 'R'),
        ("sectorsize", 's'),
        ("uuid", 'U'),
        ("verbose", 'v'),
    ],
    refused: &[
        ("--byte-count", SIZE),
        ("--help", FORMATS_NOTHING),
        ("--rootdir", COPIES),
        ("--shrink", COPIES),
        ("--version", FORMATS_NOTHING),
        ("-O list-all", FORMATS_NOTHING),
        ("-R list-all", FORMATS_NOTHING),
        ("-V", FORMATS_NOTHING),
        ("-b", SIZE),
        ("-h", FORMATS_NOTHING),
        ("-r", COPIES),
    ],
};

impl Grammar {
    /// The options of this file system's mkfs.
    pub fn of(fs: FsType) -> &'static Self {
        match fs {
            FsType::Ext4 => &EXT4,
            FsType::Xfs => &XFS,
            FsType::Btrfs => &BTRFS,
        }
    }

    /// The flag that makes mkfs overwrite a device with signatures.
    pub fn force_flag(&self) -> String {
        format!("-{}", self.force)
    }

    /// The option of this letter.
    pub fn short(&'static self, letter: char) -> Result<AllowedOption, MkfsOptionError> {
        let spelling = format!("-{letter}");
        self.option(letter, &spelling)
            .ok_or_else(|| self.refuse(spelling, || self.spellings()))
    }

    /// The option of this long name; unlike getopt, it refuses an abbreviated name.
    pub fn long(&'static self, name: &str) -> Result<AllowedOption, MkfsOptionError> {
        let spelling = format!("--{name}");
        let known = self.long.iter().find(|(known, _)| *known == name);
        known
            .and_then(|(_, letter)| self.option(*letter, &spelling))
            .ok_or_else(|| self.refuse(spelling, || self.spellings()))
    }

    fn option(&'static self, letter: char, spelling: &str) -> Option<AllowedOption> {
        let (_, form) = self.letters.iter().find(|(known, _)| *known == letter)?;
        Some(AllowedOption {
            grammar: self,
            letter,
            form: *form,
            spelling: spelling.to_owned(),
        })
    }

    fn spellings(&self) -> String {
        let letters = self.letters.iter().map(|(letter, _)| format!("-{letter}"));
        let long = self.long.iter().map(|(name, _)| format!("--{name}"));
        letters.chain(long).collect::<Vec<_>>().join(" ")
    }

    /// Why this option, or a letter's suboption as `-l name`, is refused.
    fn refuse(&self, option: String, allowed: impl FnOnce() -> String) -> MkfsOptionError {
        match self.refused.iter().find(|(refused, _)| *refused == option) {
            Some((_, why)) => MkfsOptionError::Refused { option, why },
            None => MkfsOptionError::Unlisted {
                fs: self.fs,
                option,
                allowed: allowed(),
            },
        }
    }
}

/// An allowed option, as the class spelled it.
pub struct AllowedOption {
    grammar: &'static Grammar,
    letter: char,
    form: Form,
    spelling: String,
}

impl AllowedOption {
    /// Whether it takes no value.
    pub fn is_flag(&self) -> bool {
        matches!(self.form, Flag)
    }

    /// Checks the option with its value, which is `attached` or the next word, and appends
    /// both to `args`.
    pub fn take(
        self,
        attached: Option<String>,
        words: &mut impl Iterator<Item = String>,
        args: &mut Vec<String>,
    ) -> Result<(), MkfsOptionError> {
        if self.is_flag() {
            if let Some(value) = attached {
                return Err(bad(&self.spelling, &value, Flag));
            }
            if self.letter != self.grammar.force {
                args.push(self.spelling);
            }
            return Ok(());
        }
        let Some(value) = attached.or_else(|| words.next()) else {
            let option = self.spelling;
            return Err(MkfsOptionError::NoValue { option });
        };
        self.check(&value)?;
        args.extend([self.spelling, value]);
        Ok(())
    }

    fn check(&self, value: &str) -> Result<(), MkfsOptionError> {
        match self.form {
            Parts(parts) => value.split(',').try_for_each(|part| {
                let (name, value) = match part.split_once('=') {
                    Some((name, value)) => (name, Some(value)),
                    None => (part, None),
                };
                let full = format!("-{} {name}", self.letter);
                let known = parts.iter().find(|(known, _)| *known == name);
                let Some((_, form)) = known else {
                    return Err(self.refuse_one_of(full, parts.iter().map(|(name, _)| *name)));
                };
                match (form, value) {
                    (Flag | Switch, None) => Ok(()),
                    (form, None) if !form.admits("") => {
                        Err(MkfsOptionError::NoValue { option: full })
                    }
                    (form, value) if form.admits(value.unwrap_or_default()) => Ok(()),
                    (form, value) => Err(bad(&full, value.unwrap_or_default(), *form)),
                }
            }),
            Words(known) => words(value).try_for_each(|word| {
                if is_among(known, word) {
                    return Ok(());
                }
                let full = format!("-{} {word}", self.letter);
                Err(self.refuse_one_of(full, known.iter().copied()))
            }),
            form if form.admits(value) => Ok(()),
            form => Err(bad(&self.spelling, value, form)),
        }
    }

    fn refuse_one_of(
        &self,
        full: String,
        allowed: impl Iterator<Item = &'static str>,
    ) -> MkfsOptionError {
        let allowed = || allowed.collect::<Vec<_>>().join(", ");
        self.grammar.refuse(full, allowed)
    }
}

fn bad(option: &str, value: &str, form: Form) -> MkfsOptionError {
    MkfsOptionError::BadValue {
        option: option.to_owned(),
        value: value.to_owned(),
        expected: form.describe(),
    }
}

/// The words of a list, without the negating `^`.
fn words(value: &str) -> impl Iterator<Item = &str> {
    let parts = value.split([',', ':', ' ']);
    parts.map(|word| word.strip_prefix('^').unwrap_or(word))
}

fn is_among(known: &[&str], word: &str) -> bool {
    known.iter().any(|known| known.eq_ignore_ascii_case(word))
}

impl Form {
    fn admits(self, value: &str) -> bool {
        let digits = |text: &str| {
            (1..=20).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit())
        };
        match self {
            Flag => false,
            Switch => matches!(value, "0" | "1"),
            Number => digits(
                value
                    .strip_suffix(|last: char| "bsKMGTPEkmgtpe".contains(last))
                    .unwrap_or(value),
            ),
            Decimal => match value.split_once('.') {
                Some((whole, fraction)) => digits(whole) && digits(fraction),
                None => digits(value),
            },
            Label(bytes) => {
                value.len() <= bytes
                    && !value.starts_with('-')
                    && !value.contains(|c: char| c == '/' || c.is_control())
            }
            Uuid(known) => is_uuid(value) || is_among(known, value),
            Words(known) => words(value).all(|word| is_among(known, word)),
            Parts(_) => unreachable!("a suboption has none of its own"),
        }
    }

    fn describe(self) -> String {
        match self {
            Flag => "no value".to_owned(),
            Switch => "0 or 1".to_owned(),
            Number => "a number, perhaps with a unit,".to_owned(),
            Decimal => "a number".to_owned(),
            Label(bytes) => format!("a label of at most {bytes} bytes without a slash"),
            Uuid(known) => ["a UUID"]
                .iter()
                .chain(known)
                .copied()
                .collect::<Vec<_>>()
                .join(" or "),
            Words(known) => format!("one of {}", known.join(", ")),
            Parts(parts) => {
                let names: Vec<_> = parts.iter().map(|(name, _)| *name).collect();
                format!("one of {}", names.join(", "))
            }
        }
    }
}

fn is_uuid(text: &str) -> bool {
    let groups = text.split('-').map(str::len);
    groups.eq([8, 4, 4, 4, 12]) && text.bytes().all(|b| b == b'-' || b.is_ascii_hexdigit())
}
