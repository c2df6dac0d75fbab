//! The addresses of NBD exports, as a StorageClass and a volume context have them, and by
//! which a node recognises the devices that it has attached.
//!
//! The form is that of the NBD project's own document (doc/uri.md):
//! `nbd://host:port/export` and `nbd+unix:///export?socket=/path`. An address is parsed
//! into one canonical spelling, so that equal addresses have equal texts.

use std::{fmt, ops::RangeInclusive, str::FromStr};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use serde::{Deserialize, Serialize};

/// NBD's port at IANA.
const DEFAULT_PORT: u16 = 10809;

/// How many connections a device may have.
pub const CONNECTIONS: RangeInclusive<u32> = 1..=16;

/// How many seconds a request may go without an answer.
pub const REQUEST_SECONDS: RangeInclusive<u32> = 1..=3600;

/// How many seconds requests wait for a server that is away. At least one: a device has no
/// live connection for a moment while it grows.
pub const DEAD_SECONDS: RangeInclusive<u32> = 1..=86400;

/// The maximum length of a canonical address in bytes. The kernel shows it in one page of
/// sysfs, and the protocol limits names to 4096 bytes.
const LONGEST: usize = 2048;

/// The characters of a path that are not percent-encoded (RFC 3986), beside letters and
/// digits. The comma is encoded: it separates mount options and lists.
const PATH: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~')
    .remove(b'/')
    .remove(b':')
    .remove(b'@')
    .remove(b'+')
    .remove(b'=');

/// A server of exports. Its text is an NBD URI without an export; a plain `host` or
/// `host:port` is parsed as well.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Server {
    /// Over TCP.
    Tcp {
        /// A name or an address; without the brackets of IPv6.
        host: String,
        /// The TCP port.
        port: u16,
    },
    /// Over a unix socket of this machine.
    Unix {
        /// The socket's absolute path.
        socket: String,
    },
}

/// An export of a server. Its text, by [`fmt::Display`] and [`FromStr`], is an
/// NBD URI.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Export {
    server: Server,
    name: String,
}

/// The error of an invalid address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadExport {
    /// The address requires TLS.
    #[error(
        "{0:?} requires TLS, which the kernel's NBD driver does not support; run `nbdkit -U SOCKET nbd hostname=HOST export=NAME tls=require` on each node and use nbd+unix:///NAME?socket=SOCKET, or use nbd:// if you trust the network"
    )]
    Tls(String),
    /// The text is malformed.
    ///
    /// Remedy: write nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH.
    #[error("{text:?} is no address of an NBD export: {why}")]
    Malformed {
        text: String,
        /// The reason.
        why: &'static str,
    },
}

impl Server {
    /// A server on a host.
    pub fn tcp(host: &str, port: Option<u16>) -> Result<Self, BadExport> {
        let bad = |why| malformed(host, why);
        if host.is_empty() {
            return Err(bad("it names no host"));
        }
        if host.len() > 253 {
            return Err(bad("a host's name has 253 bytes at most"));
        }
        if !host.bytes().all(is_of_host) {
            return Err(bad("a host has letters, digits, dots, colons and hyphens"));
        }
        Ok(Self::Tcp {
            host: host.to_ascii_lowercase(),
            port: match port {
                Some(0) => return Err(bad("there is no port 0")),
                port => port.unwrap_or(DEFAULT_PORT),
            },
        })
    }

    /// A server on a unix socket.
    pub fn unix(socket: &str) -> Result<Self, BadExport> {
        if !socket.starts_with('/') || socket.contains('\0') {
            return Err(malformed(socket, "the socket's path must be absolute"));
        }
        // unix(7): sun_path, which ends with a NUL.
        if socket.len() > 107 {
            return Err(malformed(socket, "a socket's path has 107 bytes at most"));
        }
        Ok(Self::Unix {
            socket: socket.to_owned(),
        })
    }

    /// Formats the address of one of its exports.
    fn write(&self, export: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = utf8_percent_encode(export, PATH);
        match self {
            Self::Tcp { host, port } if host.contains(':') => {
                write!(f, "nbd://[{host}]:{port}/{name}")
            }
            Self::Tcp { host, port } => write!(f, "nbd://{host}:{port}/{name}"),
            Self::Unix { socket } => {
                let socket = utf8_percent_encode(socket, PATH);
                write!(f, "nbd+unix:///{name}?socket={socket}")
            }
        }
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write("", f)
    }
}

impl FromStr for Server {
    type Err = BadExport;

    fn from_str(text: &str) -> Result<Self, BadExport> {
        let bad = |why| malformed(text, why);
        if text.contains("://") {
            let export: Export = text.parse()?;
            return if export.name.is_empty() {
                Ok(export.server)
            } else {
                Err(bad("it names an export; a server's address has none"))
            };
        }
        let (host, port) = split_port(text)
            .ok_or_else(|| bad("the port is no number (an IPv6 address stands in brackets)"))?;
        Self::tcp(host, port)
    }
}

impl TryFrom<String> for Server {
    type Error = BadExport;

    fn try_from(text: String) -> Result<Self, BadExport> {
        text.parse()
    }
}

impl From<Server> for String {
    fn from(server: Server) -> Self {
        server.to_string()
    }
}

/// A zone of an IPv6 address (`%eth0`) means another link on each node.
fn is_of_host(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_' | b':')
}

impl Export {
    /// The export `name` of a server; the empty name is the server's default.
    pub fn new(server: Server, name: &str) -> Result<Self, BadExport> {
        let export = Self {
            server,
            name: name.to_owned(),
        };
        if name.contains('\0') {
            return Err(malformed(name, "an export's name holds no NUL"));
        }
        if export.to_string().len() > LONGEST {
            return Err(malformed(name, "it has more than 2048 bytes"));
        }
        Ok(export)
    }

    /// The server that exports it.
    pub fn server(&self) -> &Server {
        &self.server
    }

    /// Its name at the server.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Display for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.server.write(&self.name, f)
    }
}

impl FromStr for Export {
    type Err = BadExport;

    fn from_str(text: &str) -> Result<Self, BadExport> {
        let bad = |why| malformed(text, why);
        let (scheme, rest) = text
            .split_once("://")
            .ok_or_else(|| bad("it begins with nbd:// or nbd+unix://"))?;
        let (rest, query) = match rest.split_once('?') {
            Some((rest, query)) => (rest, Some(query)),
            None => (rest, None),
        };
        if rest.contains('#') || query.is_some_and(|query| query.contains('#')) {
            return Err(bad("an address has no fragment (#)"));
        }
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let name = decode(path).ok_or_else(|| bad("the export's name is not UTF-8"))?;
        let server = match scheme {
            "nbds" | "nbds+unix" | "nbds+vsock" => return Err(BadExport::Tls(text.to_owned())),
            "nbd" if query.is_some() => {
                return Err(bad("nbd:// takes no parameters (?)"));
            }
            "nbd" => {
                let (host, port) =
                    split_port(authority).ok_or_else(|| bad("the port is no number"))?;
                Server::tcp(host, port)
            }
            "nbd+unix" if !authority.is_empty() => {
                return Err(bad("nbd+unix:/// names no host"));
            }
            "nbd+unix" => {
                let socket = query
                    .and_then(|query| query.strip_prefix("socket="))
                    .filter(|socket| !socket.contains('&'))
                    .ok_or_else(|| bad("nbd+unix:// takes ?socket=/path, and nothing more"))?;
                let socket = decode(socket).ok_or_else(|| bad("the path is not UTF-8"))?;
                Server::unix(&socket)
            }
            _ => return Err(bad("it begins with nbd:// or nbd+unix://")),
        };
        let server = server.map_err(|error| match error {
            BadExport::Malformed { why, .. } => bad(why),
            tls @ BadExport::Tls(_) => tls,
        })?;
        Self::new(server, &name)
    }
}

impl TryFrom<String> for Export {
    type Error = BadExport;

    fn try_from(text: String) -> Result<Self, BadExport> {
        text.parse()
    }
}

impl From<Export> for String {
    fn from(export: Export) -> Self {
        export.to_string()
    }
}

fn malformed(text: &str, why: &'static str) -> BadExport {
    BadExport::Malformed {
        text: text.to_owned(),
        why,
    }
}

fn decode(text: &str) -> Option<String> {
    let decoded = percent_decode_str(text).decode_utf8();
    decoded.ok().map(std::borrow::Cow::into_owned)
}

/// Splits `host`, `host:port`, `[v6]` and `[v6]:port`.
fn split_port(authority: &str) -> Option<(&str, Option<u16>)> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']')?;
            match rest.strip_prefix(':') {
                Some(port) => (host, Some(port)),
                None if rest.is_empty() => (host, None),
                None => return None,
            }
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    match port {
        Some("") | None => Some((host, None)),
        Some(port) if port.bytes().all(|byte| byte.is_ascii_digit()) => {
            Some((host, Some(port.parse().ok()?)))
        }
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests;
