//! An encrypted image: formatted before its first use, opened at each.
//!
//! Only a device that is proven blank is formatted. A format takes seconds, and an agent
//! may be killed meanwhile: then a format marker is left ([`super::format_marker`]), and on
//! the device a partial header, through which no data can have been written. Such a
//! device is formatted again; without a marker only by an operator's request.

use super::{
    BoundCephImage, CephSource, FormatKind, Known, LowerDevice,
    error::CephImageError,
    library::{EncryptionMetadata, QueriedImage},
    nbd_backed,
};
use crate::{
    ceph::{
        csi_format::encryption,
        kms::{DEFAULT_KMS, Kms},
        krbd::{Monitors, mapped::MappedIds},
    },
    device::{
        AttachOptions, HeldOpen, Source,
        backend::Purpose,
        error::DeviceError,
        luks::{self, KeySlots, LuksContent, LuksError, PassphraseOrigin},
    },
    fs::fscrypt::KeySource,
    kernel::block::BlockDev,
    secret::{Secret, Secrets},
};

impl BoundCephImage<'_> {
    /// Opens the mapped image, or finds it open. cryptsetup takes a path, so the image's
    /// device is held open until there is a mapping over it.
    pub(super) fn decrypt(
        &self,
        known: &Known<'_>,
        kms: &str,
        lower: &LowerDevice,
        options: &AttachOptions,
    ) -> Result<BlockDev, DeviceError> {
        let source = Source::Rbd(CephSource {
            image: known.image.clone(),
            ..self.source.clone()
        });
        let held = HeldOpen::new(&source, &lower.clone().shown(None), None)?;
        let (under, domain) = (&lower.block, source.domain());
        let queried = known.queried(&self.images.connections)?;
        let metadata = queried.map(QueriedImage::encryption).transpose()?;
        let is_encrypted = metadata.as_ref().is_some_and(|metadata| metadata.encrypted);
        let name = luks::name_of(&options.volume_id);
        let opened = luks::find_open(under, &name, options.read_only)?;
        let over = if let Some(over) = opened {
            // A repeat of a stage needs no passphrase, and so no KMS that answers.
            over
        } else {
            let kms = self.kms(kms, queried, &options.volume_id)?;
            let passphrase = passphrase(&kms, known, metadata.as_ref(), options)?;
            let over = luks::over(under.dev)
                .map_err(luks::failed("look for what is over the mapped image"))?;
            if over.is_none() {
                let origin = match kms {
                    Kms::Secret => PassphraseOrigin::People,
                    Kms::Metadata(_) | Kms::Sealed(_) | Kms::Service(_) => PassphraseOrigin::Random,
                };
                let format = || luks::format(under, &passphrase, origin, &domain);
                self.format_once(known, under, &held, is_encrypted, options, format)?;
            }
            held.check()?;
            let open = |by: &Secret| luks::open(under, &name, by, options.read_only, &domain);
            match (open(&passphrase), passphrase.without_newline()) {
                // The volume's passphrase, by a file that an editor or `echo` wrote; or a volume
                // of earlier builds, which took such a file's text without the newline.
                (Err(LuksError::Passphrase { .. }), Some(bare)) => open(&bare)?.0,
                (opened, _) => opened?.0,
            }
        };
        if let Some(queried) = queried.filter(|_| !is_encrypted && !options.read_only) {
            // The image holds data from now on.
            queried.set_encrypted()?;
        }
        Ok(over)
    }

    /// The KMS of that id; of the volume's tenant, by its journal.
    fn kms(
        &self,
        id: &str,
        queried: Option<&QueriedImage>,
        volume_id: &str,
    ) -> Result<Kms, CephImageError> {
        let tenant = match queried {
            Some(queried) if id != DEFAULT_KMS => queried.tenant(volume_id)?,
            _ => String::new(),
        };
        Ok(self.images.kms.get(id, &tenant)?)
    }

    /// The secret of the image's files, and how it wraps their key: as a key, where the KMS
    /// keeps one for each volume, or has one for all; as a passphrase, where ceph-csi gives
    /// volumes their own for block devices alone.
    pub(super) fn secret_of_files(
        &self,
        kms_id: &str,
        volume_id: &str,
        secrets: &Secrets,
        is_new: bool,
    ) -> Result<(Secret, KeySource), CephImageError> {
        let kms = if kms_id == DEFAULT_KMS {
            self.kms(kms_id, None, volume_id)?
        } else {
            let kms = |known: &Known<'_>| {
                let queried = known.queried(&self.images.connections)?;
                self.kms(kms_id, queried, volume_id)
            };
            self.where_it_is(volume_id, secrets, kms)?.1
        };
        if is_new {
            kms.create_for_files(secrets, volume_id)?;
        }
        let source = match kms {
            Kms::Metadata(_) => KeySource::CustomPassphrase,
            Kms::Secret | Kms::Sealed(_) | Kms::Service(_) => KeySource::RawKey,
        };
        Ok((kms.load_for_files(secrets, volume_id)?, source))
    }

    /// Gives the image, which is mapped as `under`, a new passphrase.
    pub(super) fn rotate(
        &self,
        under: &BlockDev,
        kms_id: &str,
        volume_id: &str,
        secrets: &Secrets,
    ) -> Result<(), CephImageError> {
        let unreadable = |known: &Known<'_>| CephImageError::Unreadable {
            image: known.image.to_string(),
        };
        let query = |known: &Known<'_>| match known.queried(&self.images.connections)? {
            Some(queried) => refuse_another_cluster(known, queried, under, volume_id),
            None => Err(unreadable(known)),
        };
        let (known, ()) = self.where_it_is(volume_id, secrets, query)?;
        let queried = known.queried(&self.images.connections)?;
        let queried = queried.ok_or_else(|| unreadable(&known))?;
        let kms = self.kms(kms_id, Some(queried), volume_id)?;
        match kms {
            Kms::Secret => return Err(CephImageError::OnePassphrase),
            // The copy gets the new key slot only with the next mirror snapshot; until then
            // the new passphrase would not open it after a fail-over.
            Kms::Service(_) if queried.is_mirrored()? => {
                return Err(CephImageError::KeyOfMirror);
            }
            Kms::Metadata(_) | Kms::Sealed(_) | Kms::Service(_) => {}
        }
        let _lock = queried.lock_rotation(volume_id, &self.images.this_node.id)?;
        let metadata = queried.encryption()?;
        let store = |passphrase: &Secret| -> Result<(), CephImageError> {
            if let Some(sealed) = kms.store(secrets, volume_id, passphrase)? {
                queried.set_sealed(&sealed)?;
            }
            Ok(())
        };
        let old = kms.load(secrets, volume_id, metadata.sealed.as_deref())?;
        let domain = Source::Rbd(self.source.clone()).domain();
        let slots = KeySlots::new(under, &domain);
        slots.finish(&old, || store(&old))?;
        let new = encryption::generate();
        slots.replace(&old, &new, || store(&new))
    }

    /// Formats the device, unless it has a complete header.
    fn format_once(
        &self,
        known: &Known<'_>,
        under: &BlockDev,
        held: &HeldOpen,
        is_encrypted: bool,
        options: &AttachOptions,
        format: impl FnOnce() -> Result<(), LuksError>,
    ) -> Result<(), DeviceError> {
        let marker = self.marker(known, FormatKind::Luks, options)?;
        let interrupted = marker.format_in_progress(&options.volume_id)?;
        let may_be_partial = interrupted || options.purpose == Purpose::Format;
        let image = || known.image.to_string();
        let refusal = match luks::look(under)? {
            LuksContent::Header if !may_be_partial => return Ok(()),
            // An agent finished it, and died before it removed the marker.
            LuksContent::Header if luks::is_whole(under)? => return marker.clear(),
            LuksContent::Unknown(offset) if !may_be_partial => Some(
                LuksError::Foreign {
                    node: under.node.clone(),
                    what: format!("unknown data at byte {offset}"),
                }
                .into(),
            ),
            _ if is_encrypted => Some(CephImageError::Emptied { image: image() }),
            // Two nodes that format one image at once destroy each other's data.
            _ if options.read_only || options.shared => {
                Some(CephImageError::Blank { image: image() })
            }
            _ if known.source.is_tuned => Some(CephImageError::Tuned { image: image() }),
            LuksContent::Blank | LuksContent::Header | LuksContent::Unknown(_) => None,
        };
        if let Some(refusal) = refusal {
            return Err(refusal.into());
        }
        marker.set(&options.volume_id)?;
        if let Err(error) = held.check() {
            // It did not begin.
            marker.clear()?;
            return Err(error);
        }
        format()?;
        marker.clear()
    }
}

/// Refuses the device of another cluster than the image's: after a fail-over the device that
/// is mapped still has the data of the former cluster, and the image's metadata would get a
/// passphrase that only that device has.
fn refuse_another_cluster(
    known: &Known<'_>,
    queried: &QueriedImage,
    under: &BlockDev,
    volume_id: &str,
) -> Result<(), CephImageError> {
    let is_another = if let Some(ids) = MappedIds::of(under.dev) {
        ids.fsid != queried.fsid()
    } else {
        let monitors = Monitors::resolve(&known.cluster.monitors)?;
        nbd_backed::is_of_another_cluster(volume_id, &monitors)?
    };
    if is_another {
        return Err(CephImageError::AnotherCluster {
            image: known.image.to_string(),
            node: under.node.clone(),
        });
    }
    Ok(())
}

fn passphrase(
    kms: &Kms,
    known: &Known<'_>,
    metadata: Option<&EncryptionMetadata>,
    options: &AttachOptions,
) -> Result<Secret, CephImageError> {
    if matches!(kms, Kms::Metadata(_) | Kms::Sealed(_)) && metadata.is_none() {
        return Err(CephImageError::Unreadable {
            image: known.image.to_string(),
        });
    }
    let sealed = metadata.and_then(|metadata| metadata.sealed.as_deref());
    Ok(kms.load(&options.secrets, &options.volume_id, sealed)?)
}
