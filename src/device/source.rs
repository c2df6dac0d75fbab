//! What a volume context says about where a volume's bytes are.

use std::{collections::HashMap, fmt};

use serde::{Deserialize, Serialize};

use super::sysfs;
use crate::kernel::Dev;

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
}

const DEFAULT_SECTOR: u32 = 512;

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
        }
    }
}

impl Source {
    /// Reads the keys `backend`, `pool`, `image`, `directIO`, `sectorSize` and
    /// `preallocate`.
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
            other => Err(SourceError {
                key: "backend",
                why: format!("{other:?} is unknown; this node has: loop"),
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
        let Self::Loop { image, .. } = self;
        let shown = sysfs::backing_file(dev).ok();
        shown.is_some_and(|path| {
            let name = path.file_name().map(|name| name.to_string_lossy());
            name.is_some_and(|name| name.strip_suffix(" (deleted)").unwrap_or(&name) == image)
        })
    }

    /// Whether both name the same bytes, however attached.
    pub fn is_same(&self, other: &Self) -> bool {
        let Self::Loop { pool, image, .. } = self;
        let Self::Loop {
            pool: other_pool,
            image: other_image,
            ..
        } = other;
        (pool, image) == (other_pool, other_image)
    }

    /// The backend's name, as metrics and listings show it.
    pub fn backend(&self) -> &'static str {
        match self {
            Self::Loop { .. } => "loop",
        }
    }
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
}
