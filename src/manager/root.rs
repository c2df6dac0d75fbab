//! The owner and the permission bits of a mounted volume's root directory, as files have them.

use serde::{Deserialize, Serialize};

/// A user and a group, by their numbers: `999:999`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RootOwner {
    pub uid: u32,
    pub gid: u32,
}

/// Permission bits, octal: `0750`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RootMode(pub u32);

impl TryFrom<String> for RootOwner {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        // The highest number means "unchanged" to chown(2).
        let number = |text: &str| text.parse().ok().filter(|number| *number != u32::MAX);
        let parsed = text.split_once(':').and_then(|(uid, gid)| {
            let (uid, gid) = (number(uid)?, number(gid)?);
            Some(Self { uid, gid })
        });
        parsed.ok_or_else(|| format!("owner {text:?} is not UID:GID, two numbers"))
    }
}

impl From<RootOwner> for String {
    fn from(owner: RootOwner) -> Self {
        format!("{}:{}", owner.uid, owner.gid)
    }
}

impl TryFrom<String> for RootMode {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let is_octal = text.len() <= 4 && text.bytes().all(|digit| (b'0'..=b'7').contains(&digit));
        let bits = is_octal
            .then(|| u32::from_str_radix(&text, 8).ok())
            .flatten();
        bits.map(Self)
            .ok_or_else(|| format!("mode {text:?} is not up to four octal digits, such as 0750"))
    }
}

impl From<RootMode> for String {
    fn from(mode: RootMode) -> Self {
        format!("{:04o}", mode.0)
    }
}
