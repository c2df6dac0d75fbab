//! An encrypted image: formatted before its first use, opened at each.
//!
//! Formatted is only what is proven blank. A format takes seconds, and an agent
//! may be killed meanwhile: then there is a note of this node's that one was
//! under way, and on the device either scraps, or a header without a key, which
//! nobody can have written anything through. Both are formatted again.

use super::{
    CephImages, CephSource, Known,
    error::CephImageError,
    library::{Asked, Notes},
};
use crate::{
    ceph::encryption::{self, Kms},
    device::{
        How, blank,
        luks::{self, Holds, LuksError, Origin},
        notes::Notes as MkfsNotes,
    },
    secret::Secret,
};

/// Opens the mapped image, or finds it open.
pub fn open(
    images: &CephImages,
    known: &Known<'_>,
    kms: &str,
    under: &luks::Node,
    how: &How,
) -> Result<luks::Node, CephImageError> {
    let asked = known.asked(&images.connections)?;
    let notes = asked.map(Asked::notes).transpose()?;
    let kms = images.kms.get(kms)?;
    let passphrase = passphrase(kms, known, notes.as_ref(), how)?;
    let is_noted = notes.is_some_and(|notes| notes.encrypted);
    if luks::over(under.dev)
        .map_err(luks::failed("look for what is over the mapped image"))?
        .is_none()
    {
        let origin = match kms {
            Kms::Secret => Origin::People,
            Kms::Metadata => Origin::Random,
        };
        let format = || luks::format(under, &passphrase, origin);
        format_once(images, known, under, is_noted, how, format)?;
    }
    let name = luks::name_of(&how.volume_id);
    let (over, _) = luks::open(under, &name, &passphrase, how.read_only)?;
    if let Some(asked) = asked.filter(|_| !is_noted && !how.read_only) {
        // It holds data from now on.
        asked.note_encrypted()?;
    }
    Ok(over)
}

fn passphrase(
    kms: Kms,
    known: &Known<'_>,
    notes: Option<&Notes>,
    how: &How,
) -> Result<Secret, CephImageError> {
    let with = encryption::passphrase(&how.secrets)?;
    match (kms, notes) {
        (Kms::Secret, _) => Ok(with.clone()),
        (Kms::Metadata, None) => Err(CephImageError::Unreadable {
            image: known.image.to_string(),
        }),
        (Kms::Metadata, Some(notes)) => {
            let sealed = notes.sealed.as_deref().unwrap_or_default();
            Ok(encryption::open(with, &how.volume_id, sealed)?)
        }
    }
}

/// What notes a format that is under way.
pub fn note_of(source: &CephSource) -> String {
    format!("LUKS of {source}")
}

/// Blanks out what an interrupted format of late left, as the device and the note
/// go: on the next node it would be taken for data. `is_it` says whether the device
/// is the one that is meant.
pub fn unmake(
    notes: &MkfsNotes,
    source: &CephSource,
    under: &luks::Node,
    volume_id: &str,
    is_it: impl FnOnce() -> bool,
) -> Result<(), CephImageError> {
    let note = note_of(source);
    if !notes.is_fresh(&note, volume_id)? {
        return Ok(());
    }
    // What is blank already stays as it is.
    let is_whole = luks::look(under)? == Holds::Luks && luks::has_key(under)?;
    let failed = luks::failed(format!("blank out {}", under.path.display()));
    if !is_whole && blank(under, is_it).map_err(failed)? {
        tracing::warn!(volume_id, device = %under.path.display(), "a luksFormat of this volume was interrupted; what it left is blanked out");
    }
    Ok(notes.ended(&note)?)
}

/// Formats the device where that was never finished.
fn format_once(
    images: &CephImages,
    known: &Known<'_>,
    under: &luks::Node,
    is_noted: bool,
    how: &How,
    format: impl FnOnce() -> Result<(), LuksError>,
) -> Result<(), CephImageError> {
    let note = note_of(known.source);
    let interrupted = images.notes.was_interrupted(&note, &how.volume_id)?;
    let image = || known.image.to_string();
    match luks::look(under)? {
        Holds::Luks if !interrupted || luks::has_key(under)? => return Ok(()),
        Holds::Unknown(offset) if !interrupted => {
            return Err(LuksError::Foreign {
                node: under.path.clone(),
                what: format!("unknown data at byte {offset}"),
            }
            .into());
        }
        _ if is_noted => return Err(CephImageError::Emptied { image: image() }),
        // Two nodes that format one image at once destroy what either writes.
        _ if how.read_only || how.shared => return Err(CephImageError::Blank { image: image() }),
        Holds::Nothing | Holds::Luks | Holds::Unknown(_) => {}
    }
    images.notes.begins(&note, &how.volume_id)?;
    format()?;
    Ok(images.notes.ended(&note)?)
}
