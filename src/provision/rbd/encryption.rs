//! Volumes that the node encrypts, in ceph-csi's format: the block device (LUKS), or the
//! files (fscrypt).
//!
//! The journal names the KMS of the passphrase and says what is encrypted. Of a volume whose
//! files are, the image's metadata has nothing: its secret is in a service, under the handle,
//! or is that of the request or of a Secret.
//!
//! Of one whose block device is encrypted, the image's metadata has the state, [`PREPARED`] until the first stage has
//! formatted the image, then `encrypted`, and the passphrase if it is the volume's own. A
//! copy has its source's data, so it has the same passphrase, sealed anew under its own
//! handle; its KMS may be another.

use std::collections::{BTreeMap, HashMap};

use super::{
    super::{
        ProvisionError, VolumeUse,
        params::{bad, yes_or_no},
    },
    error::RbdError,
};
use crate::{
    ceph::{
        client::rbd::Image,
        csi_format::{
            encryption::{
                EncryptionError, PREPARED, RAW_KEY_BYTES, SEALED_KEY, STATE_KEY, passphrase,
                value_of,
            },
            journal::JournalEntry,
        },
        kms::{DEFAULT_KMS, Kms, KmsConfig},
    },
    error_chain,
    kind::Kind,
    secret::{Secret, Secrets},
};

/// The encryption of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encryption {
    /// `encryptionKMSID`: the KMS of the passphrase.
    pub kms: String,
    /// The namespace of its claim; empty if it is unknown.
    pub tenant: String,
    /// `encryptionType`.
    pub what: EncryptionType,
}

/// What is encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncryptionType {
    Block,
    Files,
}

impl EncryptionType {
    /// By the word of a class, or of the journal; ceph-csi before 3.8 writes none.
    fn by_word(word: &str) -> Option<Self> {
        match word {
            "" | "block" => Some(Self::Block),
            "file" => Some(Self::Files),
            _ => None,
        }
    }

    /// The journal's word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Block => "block",
            Self::Files => "file",
        }
    }
}

impl Encryption {
    /// The encryption of a class, for a volume of that tenant.
    pub fn of_class(
        given: &HashMap<String, String>,
        tenant: &str,
    ) -> Result<Option<Self>, ProvisionError> {
        let get = |name: &str| given.get(name).map(String::as_str).unwrap_or_default();
        let encrypted = get("encrypted");
        if encrypted.is_empty() || !yes_or_no("encrypted", encrypted)? {
            return Ok(None);
        }
        let word = get("encryptionType");
        let what = EncryptionType::by_word(word)
            .ok_or_else(|| bad("encryptionType", word, "it is `block` or `file`"))?;
        let kms = match get("encryptionKMSID") {
            "" => DEFAULT_KMS,
            id => id,
        };
        Ok(Some(Self {
            kms: kms.to_owned(),
            tenant: tenant.to_owned(),
            what,
        }))
    }

    /// The encryption of a volume, by the journal.
    pub fn of_journal(entry: &JournalEntry) -> Result<Option<Self>, RbdError> {
        let (kms, tenant) = (entry.kms.clone(), entry.owner.clone());
        match EncryptionType::by_word(&entry.encryption) {
            _ if kms.is_empty() => Ok(None),
            Some(what) => Ok(Some(Self { kms, tenant, what })),
            None => Err(RbdError::EncryptedOtherwise {
                image: entry.image.clone(),
                how: entry.encryption.clone(),
            }),
        }
    }

    /// Refuses uses of a volume whose files are to be encrypted; `file_systems` are those of
    /// its mounts.
    pub fn check_uses(
        &self,
        uses: &[VolumeUse],
        file_systems: &[&str],
    ) -> Result<(), ProvisionError> {
        let is_raw = uses.iter().any(|volume_use| volume_use.fs_type.is_none());
        if self.what == EncryptionType::Files
            && (is_raw || file_systems.iter().any(|fs| *fs != "ext4"))
        {
            return Err(ProvisionError::UnsupportedUse(
                "with encryptionType `file` a volume is mounted, as ext4".to_owned(),
            ));
        }
        Ok(())
    }
}

/// The KMS configuration and a request's secrets, which open and seal passphrases.
#[derive(Debug)]
pub struct PassphraseStore<'a> {
    pub config: &'a KmsConfig,
    pub secrets: &'a Secrets,
}

/// What opens the source of a copy, as it was before it was copied.
#[derive(Debug)]
pub struct SourceKey {
    passphrase: Secret,
    /// The state in its metadata, if any.
    state: Option<String>,
}

impl SourceKey {
    /// Forgets the state.
    pub fn forget_state(&mut self) {
        self.state = None;
    }
}

/// An image by its handle, with which its passphrase is sealed.
pub type Handled<'a> = (&'a str, &'a Image);

/// The keys of an image's metadata.
type ImageMetadata = BTreeMap<String, String>;

impl PassphraseStore<'_> {
    fn kms(&self, encryption: &Encryption) -> Result<Kms, EncryptionError> {
        self.config.get(&encryption.kms, &encryption.tenant)
    }

    /// Refuses a passphrase that the KMS cannot store, before there is an image.
    pub fn check(&self, encryption: &Encryption) -> Result<(), EncryptionError> {
        let kms = self.kms(encryption)?;
        if encryption.what == EncryptionType::Files && matches!(kms, Kms::Sealed(_)) {
            return Err(EncryptionError::NotForFiles);
        }
        kms.check(self.secrets)
    }

    /// Refuses a passphrase of a request's secrets that nodes could not take for a key.
    pub fn check_length(&self, encryption: &Encryption) -> Result<(), EncryptionError> {
        let is_key = encryption.what == EncryptionType::Files && encryption.kms == DEFAULT_KMS;
        if is_key && passphrase(self.secrets)?.reveal().len() < RAW_KEY_BYTES {
            return Err(EncryptionError::Short);
        }
        Ok(())
    }

    /// Records in a blank image's metadata that it is to be encrypted, and stores its
    /// passphrase.
    pub fn prepare(&self, encryption: &Encryption, of: Handled<'_>) -> Result<(), RbdError> {
        let (handle, image) = of;
        if encryption.what == EncryptionType::Files {
            let kms = self.kms(encryption)?;
            return Ok(kms.create_for_files(self.secrets, handle)?);
        }
        if value_of(&image.metadata_list()?, STATE_KEY).is_some() {
            return Ok(());
        }
        if let Some(sealed) = self.kms(encryption)?.create(self.secrets, handle)? {
            image.metadata_set(SEALED_KEY, &sealed)?;
        }
        Ok(image.metadata_set(STATE_KEY, PREPARED)?)
    }

    /// What opens the source of a copy, before it is copied. Refuses a copy
    /// whose KMS cannot store it: the KMS of a secret is for volumes with the secret's
    /// passphrase. `kept` is the KMS of the source and that of the copy.
    pub fn of_source(
        &self,
        kept: (&Encryption, &Encryption),
        source: Handled<'_>,
    ) -> Result<SourceKey, RbdError> {
        let to = self.kms(kept.1)?;
        to.check(self.secrets)?;
        let metadata = source.1.metadata_list()?;
        let own = self.own(kept.0, source, &metadata)?;
        let has_one = match (kept.1.what, &to) {
            (_, Kms::Secret) | (EncryptionType::Files, Kms::Metadata(_)) => true,
            (_, Kms::Metadata(_) | Kms::Sealed(_) | Kms::Service(_)) => false,
        };
        if has_one {
            let with = to.load_for_files(self.secrets, source.0)?;
            if own.reveal() != with.reveal() {
                return Err(RbdError::OwnPassphrase(kept.1.kms.clone()));
            }
        }
        Ok(SourceKey {
            passphrase: own,
            state: value_of(&metadata, STATE_KEY).map(str::to_owned),
        })
    }

    /// Stores the passphrase of the source for a copy, and copies the state. `before` has both
    /// as they were before the copy ([`Self::of_source`]), whose header has no other passphrase.
    /// The state may be older than the copy: a node takes a formatted image that is marked as
    /// [`PREPARED`], but not a blank one that is marked as formatted.
    pub fn copy(
        &self,
        kept: (&Encryption, &Encryption),
        source: Handled<'_>,
        copy: Handled<'_>,
        before: &SourceKey,
    ) -> Result<(), RbdError> {
        let metadata = source.1.metadata_list()?;
        let SourceKey { passphrase, state } = before;
        if self.own(kept.0, source, &metadata)?.reveal() != passphrase.reveal() {
            return Err(RbdError::KeyRotated(source.0.to_owned()));
        }
        if kept.1.what == EncryptionType::Files {
            let kms = self.kms(kept.1)?;
            return Ok(kms.store_for_files(self.secrets, copy.0, passphrase)?);
        }
        if let Some(sealed) = self.kms(kept.1)?.store(self.secrets, copy.0, passphrase)? {
            copy.1.metadata_set(SEALED_KEY, &sealed)?;
        }
        let state = state.as_deref().unwrap_or(PREPARED);
        Ok(copy.1.metadata_set(STATE_KEY, state)?)
    }

    /// The passphrase of the volume.
    fn own(
        &self,
        encryption: &Encryption,
        (handle, _): Handled<'_>,
        metadata: &ImageMetadata,
    ) -> Result<Secret, EncryptionError> {
        let kms = self.kms(encryption)?;
        match encryption.what {
            EncryptionType::Block => kms.load(self.secrets, handle, value_of(metadata, SEALED_KEY)),
            EncryptionType::Files => kms.load_for_files(self.secrets, handle),
        }
    }

    /// Removes the passphrase of a deleted image from its KMS. If that may succeed later,
    /// fails; else logs that the passphrase may be left.
    pub fn remove(&self, entry: &JournalEntry, handle: &str) -> Result<(), RbdError> {
        if entry.kms.is_empty() {
            return Ok(());
        }
        let kms = self.config.get(&entry.kms, &entry.owner);
        let Err(error) = kms.and_then(|kms| kms.remove(self.secrets, handle)) else {
            return Ok(());
        };
        if let EncryptionError::NoFile { .. } = error {
            return Err(RbdError::KeyStays {
                handle: handle.to_owned(),
                why: error,
            });
        }
        let error = RbdError::from(error);
        // Not only of a server: a configuration may be edited at this moment, and a Secret not
        // be mounted yet.
        if error.kind() == Kind::Transient {
            return Err(error);
        }
        tracing::warn!(
            handle,
            kms = entry.kms,
            error = error_chain(&error),
            "the passphrase of a deleted image may be left in its KMS, under the handle"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(list: &[(&str, &str)]) -> Result<Option<Encryption>, ProvisionError> {
        let own = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        Encryption::of_class(&list.iter().map(own).collect(), "tenant")
    }

    #[test]
    fn the_journal_says_what_is_encrypted() {
        let of = |kms: &str, how: &str| {
            let (kms, encryption) = (kms.to_owned(), how.to_owned());
            Encryption::of_journal(&JournalEntry {
                kms,
                encryption,
                ..JournalEntry::default()
            })
        };
        assert_eq!(of("", "").unwrap(), None);
        for how in ["", "block"] {
            let read = of("k", how).unwrap().unwrap();
            assert_eq!((&*read.kms, read.what), ("k", EncryptionType::Block));
        }
        let files = of("k", "file").unwrap().unwrap();
        assert_eq!(files.what, EncryptionType::Files);
        assert!(of("k", "disk").unwrap_err().to_string().contains("disk"));
    }

    #[test]
    fn a_class_asks_for_encryption_or_not() {
        assert_eq!(parse(&[]).unwrap(), None);
        let not = [("encrypted", "false"), ("encryptionKMSID", "x")];
        assert_eq!(parse(&not).unwrap(), None);
        let plain = parse(&[("encrypted", "true")]).unwrap().unwrap();
        assert_eq!(plain.kms, "default");
        let own = [("encrypted", "true"), ("encryptionKMSID", "meta")];
        assert_eq!(parse(&own).unwrap().unwrap().kms, "meta");
        let typed = |word| parse(&[("encrypted", "true"), ("encryptionType", word)]);
        assert!(
            typed("disk")
                .unwrap_err()
                .to_string()
                .contains("encryptionType")
        );
        let files = typed("file").unwrap().unwrap();
        let mounted = |fs: &str| {
            let uses = [VolumeUse {
                fs_type: Some(fs.to_owned()),
                many_nodes_write: false,
            }];
            files.check_uses(&uses, &[fs])
        };
        mounted("ext4").unwrap();
        mounted("xfs").unwrap_err();
        let raw = [VolumeUse {
            fs_type: None,
            many_nodes_write: false,
        }];
        files.check_uses(&raw, &[]).unwrap_err();
        let block = typed("block").unwrap().unwrap();
        block.check_uses(&raw, &[]).unwrap();
    }
}
