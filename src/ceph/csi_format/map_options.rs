//! The map options of a volume's class and context: the controller refuses those that the
//! node would refuse.
//!
//! The options become part of one line of text, which the driver splits at blanks and
//! commas. So an option with these is refused, and one that decides the key or the image.
//!
//! Sources: rbd(8), "KERNEL RBD (KRBD) OPTIONS"; drivers/block/rbd.c,
//! `rbd_parse_options`; net/ceph/ceph_common.c, `ceph_parse_param`.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

mod nbd;

pub use nbd::NbdOptions;

/// The option by which an image gets a client of its own.
pub const NOSHARE: &str = "noshare";

/// One option of the driver, `name` or `name=value`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MapOption {
    name: String,
    value: Option<String>,
}

/// The options of a mounter, as `mapOptions` has them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MapOptions(Vec<MapOption>);

/// An option that a volume may not set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    /// It does not have the driver's form.
    #[error(
        "{0:?} is no option; write name or name=value, without blanks, commas or control characters"
    )]
    Malformed(String),
    /// Another setting decides it.
    ///
    /// Remedy: remove the option from mapOptions of the class.
    #[error("the option {name} is refused: {why}")]
    Refused {
        /// The option's name.
        name: String,
        /// The setting that decides it.
        why: &'static str,
    },
    /// It names an unknown mounter.
    #[error("{0:?} is no mounter; write krbd:a,b;nbd:c, or a,b for krbd alone")]
    Mounter(String),
}

/// Options that decide the user, the key, the namespace or the access mode.
const REFUSED: &[(&str, &str)] = &[
    ("name", "the user comes from the volume's secret"),
    ("key", "the key comes from the volume's secret"),
    ("secret", "the key comes from the volume's secret"),
    (
        "_pool_ns",
        "the RADOS namespace comes from the cluster's configuration",
    ),
    ("ro", READ_ONLY),
    ("read_only", READ_ONLY),
    ("rw", READ_ONLY),
    ("read_write", READ_ONLY),
];

const READ_ONLY: &str = "the access mode decides whether the volume is writable";

/// Options of the program `rbd`, not of the driver: whether it waits for udevd. This
/// driver never does.
const OF_THE_PROGRAM: &[&str] = &["udev", "noudev"];

/// The mounter whose options have no prefix.
pub const KRBD: &str = "krbd";
/// The prefix of rbd-nbd's.
pub const NBD: &str = "nbd";

impl MapOption {
    /// An option that this driver sets.
    pub fn new(name: &str, value: &str) -> Result<Self, OptionError> {
        format!("{name}={value}").parse()
    }
}

impl FromStr for MapOption {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Self, OptionError> {
        let malformed = || OptionError::Malformed(text.to_owned());
        let (name, value) = match text.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (text, None),
        };
        let is_of_name =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        if name.is_empty() || !name.bytes().all(is_of_name) {
            return Err(malformed());
        }
        if value.is_some_and(|value| !is_word(value) || value.contains(',')) {
            return Err(malformed());
        }
        Ok(Self {
            name: name.to_owned(),
            value: value.map(str::to_owned),
        })
    }
}

/// Whether the driver takes the text as one word of its line.
pub fn is_word(text: &str) -> bool {
    !text.is_empty() && !text.chars().any(|c| c.is_whitespace() || c.is_control())
}

/// Whether a program takes the text as one of its arguments.
pub fn is_text(text: &str) -> bool {
    !text.is_empty() && !text.chars().any(char::is_control)
}

/// Whether a spec, `POOL/NAMESPACE/IMAGE@SNAPSHOT`, takes the text as one of its names.
pub fn is_spec_part(text: &str) -> bool {
    is_text(text) && !text.starts_with('-') && !text.contains(['/', '@'])
}

/// Whether krbd and rbd-nbd both map an image of this name.
pub fn is_image_name(text: &str) -> bool {
    is_spec_part(text) && is_word(text)
}

impl fmt::Display for MapOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Some(value) => write!(f, "{}={value}", self.name),
            None => f.write_str(&self.name),
        }
    }
}

impl TryFrom<String> for MapOption {
    type Error = OptionError;

    fn try_from(text: String) -> Result<Self, OptionError> {
        text.parse()
    }
}

impl From<MapOption> for String {
    fn from(option: MapOption) -> Self {
        option.to_string()
    }
}

impl MapOptions {
    /// Reads krbd's part of `mapOptions`: `krbd:a,b;nbd:c`, or `a,b`.
    pub fn parse(text: &str) -> Result<Self, OptionError> {
        list_of(part_for(KRBD, text)?).map(Self)
    }

    /// The value of an option that is given.
    pub fn get(&self, name: &str) -> Option<&str> {
        let mut given = self.0.iter().rev();
        given.find(|option| option.name == name)?.value.as_deref()
    }

    /// The same with a client of its own for the image.
    #[must_use]
    pub fn alone(&self) -> Self {
        let noshare = MapOption {
            name: NOSHARE.to_owned(),
            value: None,
        };
        Self(self.0.iter().cloned().chain([noshare]).collect())
    }

    /// The options in their order.
    pub fn iter(&self) -> impl Iterator<Item = &MapOption> {
        self.0.iter()
    }
}

/// The list that `mapOptions` has for a mounter; of two lists the later.
pub fn part_for<'a>(mounter: &str, text: &'a str) -> Result<&'a str, OptionError> {
    let mut found = "";
    for part in text
        .split(';')
        .map(str::trim)
        .filter(|part| !part.is_empty())
    {
        let (whose, list) = match part.split_once(':') {
            // A value may have a colon: crush_location=zone:z1.
            Some((before, _)) if before.contains(['=', ',']) => (KRBD, part),
            Some((whose, list)) => (whose.trim(), list),
            None => (KRBD, part),
        };
        if ![KRBD, NBD]
            .iter()
            .any(|known| whose.eq_ignore_ascii_case(known))
        {
            return Err(OptionError::Mounter(whose.to_owned()));
        }
        if whose.eq_ignore_ascii_case(mounter) {
            found = list;
        }
    }
    Ok(found.trim())
}

fn list_of(list: &str) -> Result<Vec<MapOption>, OptionError> {
    let mut options = Vec::new();
    for text in list
        .split(',')
        .map(str::trim)
        .filter(|text| !text.is_empty())
    {
        let option: MapOption = text.parse()?;
        if let Some((_, why)) = REFUSED.iter().find(|(name, _)| *name == option.name) {
            return Err(OptionError::Refused {
                name: option.name,
                why,
            });
        }
        if !OF_THE_PROGRAM.contains(&&*option.name) {
            options.push(option);
        }
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn texts(given: &str) -> Vec<String> {
        let options = MapOptions::parse(given).unwrap();
        options.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn each_mounter_has_its_options() {
        for (given, krbd) in [
            ("", &[][..]),
            (
                "lock_on_read,queue_depth=1024",
                &["lock_on_read", "queue_depth=1024"],
            ),
            ("krbd: noshare , ;nbd:try-netlink", &["noshare"]),
            ("nbd:a b c", &[]),
            ("KRBD:noudev,ms_mode=secure", &["ms_mode=secure"]),
            (
                "read_from_replica=localize,crush_location=zone:a|host:b",
                &["read_from_replica=localize", "crush_location=zone:a|host:b"],
            ),
            ("alloc_size=4096;krbd:notrim", &["notrim"]),
        ] {
            assert_eq!(texts(given), krbd, "{given}");
        }
        let options = MapOptions::parse("ms_mode=crc,notrim,ms_mode=secure").unwrap();
        assert_eq!(options.get("ms_mode"), Some("secure"));
        assert_eq!(options.get("notrim"), None);
        let alone = options.alone();
        assert_eq!(alone.iter().last().unwrap().to_string(), "noshare");
        let json = serde_json::to_string(&options).unwrap();
        assert_eq!(serde_json::from_str::<MapOptions>(&json).unwrap(), options);
    }

    #[test]
    fn options_that_select_user_image_or_access_are_refused_by_name() {
        for (given, word) in [
            ("secret=AQ==", "secret"),
            ("krbd:name=admin", "name"),
            ("key=other", "key"),
            ("_pool_ns=other", "namespace"),
            ("ro", "access mode"),
            ("notrim,rw", "access mode"),
            ("alloc_size=4096 secret=x", "no option"),
            ("crush_location=a:b\nrbd", "no option"),
            ("=x", "no option"),
            ("Queue-Depth=1", "no option"),
            ("tcmu:a", "mounter"),
        ] {
            let error = MapOptions::parse(given).unwrap_err().to_string();
            assert!(error.contains(word), "{given}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_yields_allowed_map_options_only(text in "(krbd:)?[\\PC\\s,;=:]{0,60}") {
            if let Ok(options) = MapOptions::parse(&text) {
                for option in options.iter() {
                    let text = option.to_string();
                    prop_assert!(is_word(&text) && !text.contains(','));
                    prop_assert!(REFUSED.iter().all(|(name, _)| *name != option.name));
                }
            }
        }
    }
}
