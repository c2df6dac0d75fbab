//! Directories of NFS servers, as a StorageClass, a volume context and a handle have them:
//! a server, a share of it, and a directory below the share.
//!
//! The keys and their meaning are csi-driver-nfs', so that its classes and volumes can be
//! taken over.

use std::{fmt, net::IpAddr, str::FromStr};

use serde::{Deserialize, Serialize};

/// The maximum length of a directory's text: fsconfig(2) takes no longer source.
pub const LONGEST: usize = 255;

/// A directory of a server. Its text is the source of its mount.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Directory {
    /// A name or an address; without the brackets of IPv6.
    server: String,
    /// The exported path, without slashes at its ends.
    share: String,
    /// The path below the share, without slashes at its ends; empty: the share itself.
    #[serde(rename = "subDir")]
    sub_dir: String,
}

/// Why a text is no part of a directory's address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} {why}")]
pub struct BadDirectory {
    /// The part's name, as in the volume context.
    pub key: &'static str,
    text: String,
    why: &'static str,
}

impl Directory {
    /// The directory `sub_dir` of a share. Slashes at the ends of the paths make no
    /// difference.
    pub fn new(server: &str, share: &str, sub_dir: &str) -> Result<Self, BadDirectory> {
        let directory = Self {
            server: host(server)?,
            share: path("share", share)?,
            sub_dir: path("subDir", sub_dir)?,
        };
        let text = directory.to_string();
        if text.len() > LONGEST {
            let why = "is longer than the 255 bytes that the kernel takes";
            let key = if sub_dir.is_empty() {
                "share"
            } else {
                "subDir"
            };
            return Err(BadDirectory { key, text, why });
        }
        Ok(directory)
    }

    /// The server's name or address, without the brackets of IPv6.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// The exported path, without slashes at its ends.
    pub fn share(&self) -> &str {
        &self.share
    }

    /// The path below the share, without slashes at its ends.
    pub fn sub_dir(&self) -> &str {
        &self.sub_dir
    }
}

impl FromStr for Directory {
    type Err = String;

    /// A share: `SERVER:/SHARE`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (server, share) =
            (text.rsplit_once(":/")).ok_or_else(|| format!("{text:?} is not SERVER:/SHARE"))?;
        Self::new(server, share, "").map_err(|error| error.to_string())
    }
}

impl fmt::Display for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.server.contains(':') {
            write!(f, "[{}]:/{}", self.server, self.share)?;
        } else {
            write!(f, "{}:/{}", self.server, self.share)?;
        }
        match (&self.share[..], &self.sub_dir[..]) {
            (_, "") => Ok(()),
            ("", sub_dir) => f.write_str(sub_dir),
            (_, sub_dir) => write!(f, "/{sub_dir}"),
        }
    }
}

/// A share that pods may name as inline volumes. The port is the administrator's: on a node's
/// address other ports can be any pod's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InlineShare {
    /// The share itself.
    pub share: Directory,
    /// The port of its server, unless it is the usual one.
    pub port: Option<u16>,
}

impl FromStr for InlineShare {
    type Err = String;

    /// `SERVER[:PORT]:/SHARE`, with an IPv6 address before a port in brackets.
    fn from_str(text: &str) -> Result<Self, String> {
        let of_server = text.rsplit_once(":/").map_or(text, |(server, _)| server);
        let with_port = (of_server.rsplit_once(':'))
            .filter(|(host, _)| host.ends_with(']') || !host.contains(':'));
        let Some((host, port)) = with_port else {
            let share = text.parse()?;
            return Ok(Self { share, port: None });
        };
        let number = port.parse().ok().filter(|number| *number != 0);
        let number = number.ok_or_else(|| format!("{text:?}: {port:?} is no port"))?;
        let share = format!("{host}{}", &text[of_server.len()..]).parse()?;
        Ok(Self {
            share,
            port: Some(number),
        })
    }
}

/// Parses `mountPermissions`: octal permission bits; 0 leaves them as they are.
pub fn parse_mode(text: &str) -> Result<Option<u32>, String> {
    let mode = u32::from_str_radix(text, 8).ok();
    let mode = mode.filter(|mode| *mode <= 0o7777 && text.bytes().all(|b| b.is_ascii_digit()));
    let mode = mode.ok_or_else(|| format!("{text:?} is no octal number from 0 to 7777"))?;
    Ok(Some(mode).filter(|mode| *mode != 0))
}

fn bad(key: &'static str, text: &str, why: &'static str) -> BadDirectory {
    let text = text.to_owned();
    BadDirectory { key, text, why }
}

fn host(text: &str) -> Result<String, BadDirectory> {
    let text = text.trim_matches('/');
    let bad = |why| Err(bad("server", text, why));
    let bare = text.strip_prefix('[').and_then(|it| it.strip_suffix(']'));
    let bare = bare.unwrap_or(text);
    if bare.contains(':') && bare.parse::<IpAddr>().is_err() {
        return bad("is no IPv6 address, and a host's name has no colon");
    }
    let of_name = |b: u8| b.is_ascii_alphanumeric() || b"-._:".contains(&b);
    if !bare.bytes().all(of_name) {
        return bad("is no host: it has letters, digits, dots, hyphens, or is an address");
    }
    match bare.len() {
        0 => bad("names no host"),
        1..=253 => Ok(bare.to_ascii_lowercase()),
        _ => bad("is longer than a host's name can be"),
    }
}

fn path(key: &'static str, text: &str) -> Result<String, BadDirectory> {
    let bad = |why| Err(bad(key, text, why));
    if text.chars().any(char::is_control) {
        return bad("has a control character");
    }
    // csi-driver-nfs takes a backslash for a slash here.
    if text.split(['/', '\\']).any(|part| part == "..") {
        return bad("must not lead out of the share: it has the part \"..\"");
    }
    let parts = text.split('/').filter(|part| !["", "."].contains(part));
    Ok(parts.collect::<Vec<_>>().join("/"))
}

#[cfg(test)]
mod tests {
    use std::path::{Component, Path};

    use proptest::prelude::*;

    use super::*;

    fn text(server: &str, share: &str, sub_dir: &str) -> String {
        let directory = Directory::new(server, share, sub_dir);
        directory.expect("a directory").to_string()
    }

    #[test]
    fn spellings_of_one_directory_have_one_text() {
        for (server, share, sub_dir) in [
            ("srv", "/export/a", "pvc-1"),
            ("SRV", "export/a/", "/pvc-1/"),
            ("srv", "/export//a/.", "./pvc-1"),
        ] {
            assert_eq!(text(server, share, sub_dir), "srv:/export/a/pvc-1");
        }
        assert_eq!(text("10.0.0.1", "/", "x"), "10.0.0.1:/x");
        assert_eq!(text("10.0.0.1", "/", ""), "10.0.0.1:/");
        assert_eq!(text("srv", "a", ""), "srv:/a");
        for address in ["fd00::1", "[fd00::1]"] {
            assert_eq!(text(address, "a", "b"), "[fd00::1]:/a/b");
        }
    }

    #[test]
    fn what_is_no_directory_is_refused_by_its_key() {
        let long = "x".repeat(255);
        for (key, server, share, sub_dir) in [
            ("server", "", "/a", ""),
            ("server", "a b", "/a", ""),
            ("server", "a,b", "/a", ""),
            ("server", "a:b", "/a", ""),
            ("server", "h/../x", "/a", ""),
            ("share", "h", "/a/../b", ""),
            ("share", "h", "a\nb", ""),
            ("share", "h", &long, ""),
            ("subDir", "h", "/a", "../b"),
            ("subDir", "h", "/a", "b\\..\\c"),
            ("subDir", "h", "/a", "b\0"),
            ("subDir", "h", "/a", &long),
        ] {
            let error = Directory::new(server, share, sub_dir).expect_err("refused");
            assert_eq!(error.key, key, "{error}");
        }
    }

    #[test]
    fn the_port_of_an_inline_share_is_between_its_server_and_its_path() {
        for (text, share, port) in [
            ("srv:/a", "srv:/a", None),
            ("srv:2050:/a", "srv:/a", Some(2050)),
            ("10.0.0.1:2050:/", "10.0.0.1:/", Some(2050)),
            ("[fd00::1]:/a", "[fd00::1]:/a", None),
            ("[fd00::1]:2050:/a", "[fd00::1]:/a", Some(2050)),
            ("fd00::1:/a", "[fd00::1]:/a", None),
        ] {
            let parsed: InlineShare = text.parse().expect(text);
            assert_eq!((&*parsed.share.to_string(), parsed.port), (share, port));
        }
        for bad in [
            "srv",
            "/a",
            "srv:0:/a",
            "srv:65536:/a",
            "srv::/a",
            "srv:x:/a",
        ] {
            let error = bad.parse::<InlineShare>().expect_err(bad);
            assert!(error.contains(bad), "{error}");
        }
    }

    proptest! {
        #[test]
        fn a_directory_stays_below_its_share(
            server in "[a-z.:\\[\\]/ ]{0,9}",
            share in "[a./\\\\]{0,9}",
            sub_dir in "[a./\\\\\n]{0,9}",
        ) {
            let Ok(directory) = Directory::new(&server, &share, &sub_dir) else {
                return Ok(());
            };
            for path in [&directory.share, &directory.sub_dir] {
                let plain = |part| matches!(part, Component::Normal(_));
                prop_assert!(Path::new(path).components().all(plain), "{}", path);
            }
            let again = Directory::new(
                &directory.server,
                &directory.share,
                &directory.sub_dir,
            );
            prop_assert_eq!(again, Ok(directory));
        }
    }
}
