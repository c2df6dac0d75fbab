//! Who maps an image, as a volume context says it.

use serde::{Deserialize, Serialize};

use crate::{
    device::{SourceError, context::Context},
    supervisor::NbdOptions,
};

/// Who maps an image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mounter {
    /// The kernel's driver.
    #[default]
    Krbd,
    /// The kernel's driver where it can, else rbd-nbd (`tryOtherMounters`).
    Either(Served),
    /// rbd-nbd.
    RbdNbd(Served),
}

/// How rbd-nbd serves an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Served {
    /// The device's cookie: the volume's handle.
    pub cookie: String,
    /// What rbd-nbd is told.
    pub options: NbdOptions,
}

impl Mounter {
    /// Reads `mounter`, `tryOtherMounters` and `mapOptions`.
    pub fn parse(context: Context<'_>, volume_id: &str) -> Result<Self, SourceError> {
        let served = || {
            let given = context.get("mapOptions").unwrap_or_default();
            let options = NbdOptions::parse(given).map_err(|error| SourceError {
                key: "mapOptions".into(),
                why: error.to_string(),
            })?;
            Ok(Served {
                cookie: volume_id.to_owned(),
                options,
            })
        };
        let tries_other = context.switch("tryOtherMounters", false)?;
        match context.get("mounter") {
            None | Some("rbd" | "krbd") if tries_other => served().map(Self::Either),
            None | Some("rbd" | "krbd") => Ok(Self::Krbd),
            Some("rbd-nbd") => served().map(Self::RbdNbd),
            Some(other) => Err(SourceError {
                key: "mounter".into(),
                why: format!("{other:?} is not available; `rbd` and `rbd-nbd` are"),
            }),
        }
    }

    /// How rbd-nbd serves the image, where it may.
    pub fn served(&self) -> Option<&Served> {
        match self {
            Self::Krbd => None,
            Self::Either(served) | Self::RbdNbd(served) => Some(served),
        }
    }
}
