//! The options of rbd-nbd that a volume may set.
//!
//! Source: rbd-nbd(8). It passes options that it does not know to librbd, and that to
//! librados, where an option may name a file to load or another cluster.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{NBD, OptionError, is_text, part_for};

/// Seconds that I/O waits for a new daemon before it fails: the default, as in ceph-csi.
const REATTACH_WITHIN: &str = "300";

/// The options of rbd-nbd in a volume's class.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct NbdOptions(Vec<NbdOption>);

#[derive(Clone, PartialEq, Eq)]
struct NbdOption {
    /// With underscores; the program takes either.
    name: String,
    value: Option<String>,
}

const IO_TIMEOUT: &str = "io_timeout";

/// The options that are set if the class does not set them.
const DEFAULTS: [(&str, &str); 2] = [("reattach_timeout", REATTACH_WITHIN), (IO_TIMEOUT, "0")];

impl NbdOptions {
    /// Reads the part for rbd-nbd of `mapOptions`: `krbd:a,b;nbd:c`.
    pub fn parse(text: &str) -> Result<Self, OptionError> {
        let list = part_for(NBD, text)?;
        let words = list.split(',').map(str::trim);
        Self::of(words.filter(|word| !word.is_empty()))
    }

    /// Each as `name` or `name=value`.
    pub fn of<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<Self, OptionError> {
        let mut read = Vec::new();
        for word in words {
            let option = NbdOption::parse(word)?;
            // Always set, so it is no setting.
            if option.name != "try_netlink" {
                read.push(option);
            }
        }
        Ok(Self(read))
    }

    /// Each as `name` or `name=value`.
    pub fn words(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(ToString::to_string)
    }

    /// Whether the kernel closes a connection on which a request takes longer than a time.
    pub fn has_io_timeout(&self) -> bool {
        let is_set = |option: &NbdOption| {
            let value = option.value.as_deref().unwrap_or_default();
            option.name == IO_TIMEOUT && value.bytes().any(|digit| digit != b'0')
        };
        self.0.iter().any(is_set)
    }

    /// All of them and the defaults, as command-line arguments.
    pub fn arguments(&self) -> impl Iterator<Item = String> {
        let given = |name: &str| self.0.iter().any(|option| option.name == name);
        let ours = DEFAULTS.into_iter().filter(move |(name, _)| !given(name));
        let ours = ours.map(|(name, value)| format!("{name}={value}"));
        // With dashes: rbd-nbd does not recognise its own options otherwise.
        ours.chain(self.words())
            .map(|word| match word.split_once('=') {
                Some((name, value)) => format!("--{}={value}", name.replace('_', "-")),
                None => format!("--{}", word.replace('_', "-")),
            })
    }
}

impl NbdOption {
    fn parse(word: &str) -> Result<Self, OptionError> {
        let malformed = || OptionError::Malformed(word.to_owned());
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (word, None),
        };
        let name = name.replace('-', "_");
        let is_of_name =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        if !name.bytes().all(is_of_name) || name.starts_with('_') {
            return Err(malformed());
        }
        let takes = match &*name {
            "exclusive" | "try_netlink" => None,
            IO_TIMEOUT | "reattach_timeout" => {
                value
                    .and_then(|value| value.parse::<u32>().ok())
                    .ok_or_else(malformed)?;
                value
            }
            _ if is_of_libraries(&name) => {
                let good = |value: &&str| is_text(value) && !value.contains([' ', ',']);
                Some(value.filter(good).ok_or_else(malformed)?)
            }
            _ => {
                return Err(OptionError::Refused {
                    name,
                    why: "of rbd-nbd's options a volume may set exclusive, io-timeout, reattach-timeout, rbd_… and debug_…",
                });
            }
        };
        if takes.is_none() && value.is_some() {
            return Err(malformed());
        }
        Ok(Self {
            name,
            value: value.map(str::to_owned),
        })
    }
}

/// Whether librbd reads the option. Plugins are code.
fn is_of_libraries(name: &str) -> bool {
    (name.starts_with("rbd_") || name.starts_with("debug_")) && name != "rbd_plugins"
}

impl fmt::Display for NbdOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Some(value) => write!(f, "{}={value}", self.name),
            None => f.write_str(&self.name),
        }
    }
}

impl fmt::Debug for NbdOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl TryFrom<Vec<String>> for NbdOptions {
    type Error = OptionError;

    fn try_from(words: Vec<String>) -> Result<Self, OptionError> {
        Self::of(words.iter().map(String::as_str))
    }
}

impl From<NbdOptions> for Vec<String> {
    fn from(options: NbdOptions) -> Self {
        options.words().collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn options_of_files_users_and_plugins_are_refused_by_name() {
        for (given, word) in [
            ("nbd:quiesce-hook=/bin/sh", "quiesce_hook"),
            ("nbd:rbd_plugins=evil", "rbd_plugins"),
            ("nbd:id=admin", "id"),
            ("nbd:keyfile=/x", "keyfile"),
            ("nbd:mon_host=h", "mon_host"),
            ("nbd:io-timeout=soon", "io-timeout"),
            ("nbd:io-timeout", "io-timeout"),
            ("nbd:exclusive=1", "exclusive"),
            ("nbd:rbd_cache", "rbd_cache"),
            ("nbd:--conf=/x", "--conf"),
        ] {
            let error = NbdOptions::parse(given).unwrap_err().to_string();
            assert!(error.contains(word), "{given}: {error}");
        }
        let options = NbdOptions::parse("a,b;nbd:rbd-cache=false,debug_rbd=20/20").unwrap();
        let arguments: Vec<_> = options.arguments().collect();
        assert_eq!(arguments[2..], ["--rbd-cache=false", "--debug-rbd=20/20"]);
        for (given, has) in [
            ("", false),
            ("io-timeout=00", false),
            ("io-timeout=10", true),
        ] {
            let options = NbdOptions::parse(&format!("nbd:{given}")).unwrap();
            assert_eq!(options.has_io_timeout(), has, "{given}");
        }
    }

    proptest! {
        #[test]
        fn any_text_yields_allowed_arguments_only(text in "nbd:[\\PC\\s,;=:_-]{0,60}") {
            if let Ok(options) = NbdOptions::parse(&text) {
                for argument in options.arguments() {
                    let name = argument.trim_start_matches("--").split('=').next().unwrap();
                    let name = name.replace('-', "_");
                    prop_assert!(
                        ["exclusive", "io_timeout", "reattach_timeout"].contains(&&*name)
                            || is_of_libraries(&name),
                        "{}", argument
                    );
                }
            }
        }
    }
}
