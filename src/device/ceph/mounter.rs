//! The driver that maps an image, from the volume context.

use serde::{Deserialize, Serialize};

use crate::{
    device::{SourceError, context::VolumeContext},
    supervisor::NbdOptions,
};

/// The driver that maps an image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mounter {
    /// The kernel's driver.
    #[default]
    Krbd,
    /// The kernel's driver where it can, else rbd-nbd (`tryOtherMounters`).
    Either(RbdNbdArgs),
    /// rbd-nbd.
    RbdNbd(RbdNbdArgs),
}

/// The arguments by which rbd-nbd serves an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RbdNbdArgs {
    /// The device's cookie: the volume's handle.
    pub cookie: String,
    pub options: NbdOptions,
}

impl Mounter {
    /// Reads `mounter`, `tryOtherMounters` and `mapOptions`.
    pub fn parse(context: VolumeContext<'_>, volume_id: &str) -> Result<Self, SourceError> {
        let rbd_nbd = || {
            let given = context.get("mapOptions").unwrap_or_default();
            let options = NbdOptions::parse(given).map_err(|error| SourceError {
                key: "mapOptions".into(),
                why: error.to_string(),
            })?;
            Ok(RbdNbdArgs {
                cookie: volume_id.to_owned(),
                options,
            })
        };
        let tries_other = context.switch("tryOtherMounters", false)?;
        match context.get("mounter") {
            None | Some("rbd" | "krbd") if tries_other => rbd_nbd().map(Self::Either),
            None | Some("rbd" | "krbd") => Ok(Self::Krbd),
            Some("rbd-nbd") => rbd_nbd().map(Self::RbdNbd),
            Some(other) => Err(SourceError {
                key: "mounter".into(),
                why: format!("{other:?} is not available; `rbd` and `rbd-nbd` are"),
            }),
        }
    }

    /// The arguments of rbd-nbd, if it may serve the image.
    pub fn rbd_nbd(&self) -> Option<&RbdNbdArgs> {
        match self {
            Self::Krbd => None,
            Self::Either(rbd_nbd) | Self::RbdNbd(rbd_nbd) => Some(rbd_nbd),
        }
    }
}
