//! What a volume context says about where a volume's bytes are.

use std::{collections::HashMap, fmt, ops::RangeInclusive};

use serde::{Deserialize, Serialize};

use super::{nbd, sysfs};
use crate::{
    kernel::Dev,
    nbd::{BadExport, Export, Server},
};

/// A volume's source, as the volume context names it. Two sources are equal
/// where they name the same bytes, attached in the same way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "backend", rename_all = "lowercase")]
pub enum Source {
    /// An image file in a pool, attached as a loop device.
    Loop {
        /// The pool's name.
        pool: String,
        /// The image's path within the pool.
        image: String,
        /// Bypass the page cache of the pool's file system where it can.
        direct_io: bool,
        /// The device's logical block size in bytes. Part of the volume: a file
        /// system that was made on 512 does not mount on 4096, which the kernel
        /// by itself would choose by the image file's state (Linux 6.11).
        sector_size: u32,
        /// The image's space is reserved, also of what it grows by.
        preallocate: bool,
    },
    /// An export of an NBD server, attached by the kernel's NBD driver.
    Nbd {
        /// The export's address.
        export: Export,
        /// How it is attached.
        #[serde(flatten)]
        options: nbd::Options,
    },
}

const DEFAULT_SECTOR: u32 = 512;

/// What NBD sources are attached with unless they say otherwise. A busy disk
/// behind the server takes seconds to answer at times; a server takes minutes
/// to be moved to another machine.
const NBD_OPTIONS: nbd::Options = nbd::Options {
    connections: 2,
    request_seconds: 30,
    dead_seconds: 300,
};

/// A volume context that names no source.
#[derive(Debug, thiserror::Error)]
#[error("volume_context: {key}: {why}")]
pub struct SourceError {
    key: &'static str,
    why: String,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loop { pool, image, .. } => write!(f, "image {image} of pool {pool}"),
            Self::Nbd { export, .. } => write!(f, "export {export}"),
        }
    }
}

impl Source {
    /// Reads the key `backend`, and `pool`, `image`, `directIO`, `sectorSize` and
    /// `preallocate` of loop sources; of NBD sources `uri`, or `host`, `port` and
    /// `export`, or `socket` and `export`, and `connections`, `requestTimeout`
    /// and `deadConnectionTimeout` in seconds.
    /// Keys that belong to somebody else are left alone.
    pub fn parse(context: &HashMap<String, String>) -> Result<Self, SourceError> {
        let get = |key: &str| {
            context
                .get(key)
                .map(String::as_str)
                .filter(|v| !v.is_empty())
        };
        let need = |key: &'static str| {
            get(key).ok_or_else(|| SourceError {
                key,
                why: "is required".to_owned(),
            })
        };
        let switch = |key: &'static str, default| match get(key) {
            None => Ok(default),
            Some("true") => Ok(true),
            Some("false") => Ok(false),
            Some(other) => Err(SourceError {
                key,
                why: format!("{other:?} is neither true nor false"),
            }),
        };
        match need("backend")? {
            "loop" => Ok(Self::Loop {
                pool: need("pool")?.to_owned(),
                image: need("image")?.to_owned(),
                direct_io: switch("directIO", true)?,
                preallocate: switch("preallocate", false)?,
                sector_size: match get("sectorSize") {
                    None => DEFAULT_SECTOR,
                    Some(text) => match text.parse() {
                        Ok(size @ (512 | 1024 | 2048 | 4096)) => size,
                        _ => {
                            return Err(SourceError {
                                key: "sectorSize",
                                why: format!("{text:?} is none of 512, 1024, 2048, 4096"),
                            });
                        }
                    },
                },
            }),
            "nbd" => Ok(Self::Nbd {
                export: export(get)?,
                options: nbd::Options {
                    connections: number(get("connections"), "connections", 1..=16)?
                        .unwrap_or(NBD_OPTIONS.connections),
                    request_seconds: number(get("requestTimeout"), "requestTimeout", 1..=3600)?
                        .unwrap_or(NBD_OPTIONS.request_seconds),
                    // At least one: a device that grows has no live connection
                    // for a moment.
                    dead_seconds: number(
                        get("deadConnectionTimeout"),
                        "deadConnectionTimeout",
                        1..=86400,
                    )?
                    .unwrap_or(NBD_OPTIONS.dead_seconds),
                },
            }),
            other => Err(SourceError {
                key: "backend",
                why: format!("{other:?} is unknown; this node has: loop, nbd"),
            }),
        }
    }

    /// An image of a pool with nothing special about it.
    pub fn image(pool: &str, image: &str) -> Self {
        Self::Loop {
            pool: pool.to_owned(),
            image: image.to_owned(),
            direct_io: true,
            sector_size: DEFAULT_SECTOR,
            preallocate: false,
        }
    }

    /// Whether this is what the kernel shows behind the device: its number may
    /// have gone to another image meanwhile. Never waits for the device.
    pub fn is_behind(&self, dev: Dev) -> bool {
        let image = match self {
            Self::Loop { image, .. } => image,
            Self::Nbd { export, .. } => return nbd::is_behind(dev, export),
        };
        let shown = sysfs::backing_file(dev).ok();
        shown.is_some_and(|path| {
            let name = path.file_name().map(|name| name.to_string_lossy());
            name.is_some_and(|name| name.strip_suffix(" (deleted)").unwrap_or(&name) == image)
        })
    }

    /// Whether both name the same bytes, however attached.
    pub fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (
                Self::Loop { pool, image, .. },
                Self::Loop {
                    pool: other_pool,
                    image: other_image,
                    ..
                },
            ) => (pool, image) == (other_pool, other_image),
            (Self::Nbd { export, .. }, Self::Nbd { export: other, .. }) => export == other,
            _ => false,
        }
    }

    /// An export with nothing special about how it is attached.
    pub fn export(export: Export) -> Self {
        Self::Nbd {
            export,
            options: NBD_OPTIONS,
        }
    }

    /// The backend's name, as metrics and listings show it.
    pub fn backend(&self) -> &'static str {
        match self {
            Self::Loop { .. } => "loop",
            Self::Nbd { .. } => "nbd",
        }
    }
}

/// Where an NBD source is: one of three ways to say it, and one only.
fn export<'a>(get: impl Fn(&str) -> Option<&'a str>) -> Result<Export, SourceError> {
    let bad = |key: &'static str| {
        move |error: BadExport| SourceError {
            key,
            why: error.to_string(),
        }
    };
    let clash = |why: &str| SourceError {
        key: "uri",
        why: why.to_owned(),
    };
    let name = get("export").unwrap_or_default();
    match (get("uri"), get("host"), get("socket")) {
        (Some(_), None, None) if !name.is_empty() || get("port").is_some() => {
            Err(clash("names the export and the port itself"))
        }
        (Some(uri), None, None) => uri.parse().map_err(bad("uri")),
        (None, Some(host), None) => {
            let port = number(get("port"), "port", 1..=65535)?;
            let server = Server::tcp(host, port).map_err(bad("host"))?;
            Export::new(server, name).map_err(bad("export"))
        }
        (None, None, Some(socket)) => {
            let server = Server::unix(socket).map_err(bad("socket"))?;
            Export::new(server, name).map_err(bad("export"))
        }
        (None, None, None) => Err(clash("is required, or host, or socket")),
        _ => Err(clash("uri, host and socket exclude each other")),
    }
}

fn number<N>(
    text: Option<&str>,
    key: &'static str,
    range: RangeInclusive<u32>,
) -> Result<Option<N>, SourceError>
where
    N: TryFrom<u32>,
{
    text.map(|text| {
        let number = text.parse().ok().filter(|number| range.contains(number));
        number
            .and_then(|number| N::try_from(number).ok())
            .ok_or_else(|| SourceError {
                key,
                why: format!(
                    "{text:?} is no number from {} to {}",
                    range.start(),
                    range.end()
                ),
            })
    })
    .transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        pairs
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect()
    }

    #[test]
    fn a_loop_source_is_a_pool_and_an_image() {
        let base = [("backend", "loop"), ("pool", "p"), ("image", "i.img")];
        let parsed = Source::parse(&context(&base)).unwrap();
        assert_eq!(parsed, Source::image("p", "i.img"));
        for (key, value) in [
            ("backend", "tape"),
            ("backend", ""),
            ("pool", ""),
            ("image", ""),
            ("directIO", "maybe"),
            ("preallocate", "yes"),
            ("sectorSize", "513"),
        ] {
            let mut bad = context(&base);
            bad.insert(key.to_owned(), value.to_owned());
            let message = Source::parse(&bad).unwrap_err().to_string();
            assert!(message.contains(key), "{message}");
        }
    }

    #[test]
    fn an_nbd_source_is_an_address() {
        let by_uri = |uri| Source::parse(&context(&[("backend", "nbd"), ("uri", uri)]));
        let host = [("backend", "nbd"), ("host", "h"), ("export", "a b")];
        let by_host = Source::parse(&context(&host)).unwrap();
        assert_eq!(by_host, by_uri("nbd://H/a%20b").unwrap());
        let socket = [("backend", "nbd"), ("socket", "/s"), ("connections", "1")];
        let by_socket = Source::parse(&context(&socket)).unwrap();
        assert!(by_socket.is_same(&by_uri("nbd+unix:///?socket=/s").unwrap()));
        assert_ne!(by_socket, by_uri("nbd+unix:///?socket=/s").unwrap());
        let json = serde_json::to_string(&by_host).unwrap();
        assert_eq!(serde_json::from_str::<Source>(&json).unwrap(), by_host);
        for (key, value) in [
            ("uri", "nbds://h/x"),
            ("uri", "nbd://h/x"),
            ("port", "0"),
            ("port", "65536"),
            ("host", "a/b"),
            ("connections", "0"),
            ("requestTimeout", "none"),
            ("deadConnectionTimeout", "0"),
        ] {
            let mut bad = context(&host);
            bad.insert(key.to_owned(), value.to_owned());
            let message = Source::parse(&bad).unwrap_err().to_string();
            assert!(message.contains(key), "{message}");
        }
        let message = by_uri("nbds://h/x").unwrap_err().to_string();
        assert!(message.contains("TLS"), "{message}");
    }
}
