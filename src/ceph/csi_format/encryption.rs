//! The passphrases of encrypted volumes, in ceph-csi's format.
//!
//! A passphrase of the KMS type `metadata` is sealed by AES-256-GCM, under a key that scrypt
//! (N 32768, r 8, p 1) derives from a Secret's passphrase, salted with the volume's handle;
//! the result is JSON, `{"dek": …, "nonce": …}`, both in base64. So a copy of a volume, whose
//! handle is another, is sealed anew.

use std::{collections::BTreeMap, io, path::PathBuf};

use aes_gcm::{Aes256Gcm, Key, KeyInit as _, Nonce, aead::Aead as _};
use base64::{
    Engine as _,
    prelude::{BASE64_STANDARD, BASE64_URL_SAFE},
};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::{
    kind::Kind,
    secret::{PASSPHRASE, Secret, Secrets},
};

/// The image's metadata key for a sealed passphrase.
pub const SEALED_KEY: &str = "rbd.csi.ceph.com/dek";
/// The image's metadata key for the state of the encryption: [`PREPARED`], then
/// [`ENCRYPTED`].
pub const STATE_KEY: &str = "rbd.csi.ceph.com/encrypted";
/// Its passphrase is stored; the image is to be encrypted before its first use.
pub const PREPARED: &str = "encryptionPrepared";
/// The image is encrypted.
pub const ENCRYPTED: &str = "encrypted";

/// The value of a key of an image's metadata. Older releases put a dot before the key.
pub fn value_of<'a>(metadata: &'a BTreeMap<String, String>, key: &str) -> Option<&'a str> {
    let found = metadata
        .get(key)
        .or_else(|| metadata.get(&format!(".{key}")))?;
    Some(found.trim()).filter(|value| !value.is_empty())
}

/// The least length of a passphrase that is itself the key of encrypted files.
pub const RAW_KEY_BYTES: usize = 32;

/// Why there is no passphrase. The text never has one.
#[derive(Debug, thiserror::Error)]
pub enum EncryptionError {
    /// The secret has no passphrase.
    ///
    /// Remedy: add encryptionPassphrase to the Secret.
    #[error("the secret has no encryptionPassphrase")]
    Missing,
    /// Its passphrase cannot be a key.
    ///
    /// Remedy: use a longer encryptionPassphrase in the Secret.
    #[error(
        "the secret's encryptionPassphrase has less than {RAW_KEY_BYTES} characters, which encryptionType `file` needs for a key"
    )]
    Short,
    /// No such key management system is configured.
    ///
    /// Remedy: add the section to the file, in Kubernetes the ConfigMap of the KMS, or correct
    /// encryptionKMSID.
    #[error("encryptionKMSID {id:?} is not in {}", path.display())]
    Unknown {
        id: String,
        /// The file with the configuration.
        path: PathBuf,
    },
    /// There is no configuration.
    ///
    /// Remedy: give the file by --kms-config: [Encryption](../ceph.md#encrypted-volumes).
    #[error(
        "encryptionKMSID {id:?} cannot be looked up: there is no file {}",
        path.display()
    )]
    NoFile {
        id: String,
        /// The file that would have it (`--kms-config`).
        path: PathBuf,
    },
    /// The driver does not support this key management system.
    ///
    /// Remedy: choose one of these in the class.
    #[error(
        "encryptionKMSID {id:?}: {what} is not supported; supported are the types \"metadata\", \"vault\", \"vaulttokens\", \"vaulttenantsa\", \"kmip\" and \"aws-metadata\", and, without an id, the passphrase of the volume's secret"
    )]
    Unsupported {
        id: String,
        /// Its type, or the option that it needs.
        what: String,
    },
    /// The key management system only seals passphrases.
    ///
    /// Remedy: choose a KMS that stores passphrases, such as `vault`, or encryptionType `block`.
    #[error(
        "encryptionType `file` takes no KMS that seals passphrases (`kmip`, `aws-metadata`): ceph-csi has no form for that"
    )]
    NotForFiles,
    /// The configuration of the key management system is not valid.
    ///
    /// Remedy: correct the section: [Encryption](../ceph.md#encrypted-volumes).
    #[error("encryptionKMSID {id:?} in {}: {why}", path.display())]
    Section {
        id: String,
        /// The file with the configuration.
        path: PathBuf,
        /// The key, and the defect.
        why: String,
    },
    /// The volume has no tenant, which its key management system needs.
    ///
    /// Remedy: start the provisioner with --extra-create-metadata, and create the volume anew.
    #[error(
        "encryptionKMSID {id:?} keeps passphrases by tenant, and the volume has none: its journal has no csi.volume.owner, which the provisioner's --extra-create-metadata gives"
    )]
    NoTenant { id: String },
    /// The key management system did not do its part.
    ///
    /// Remedy: look at the key management system: its address, its log, and the driver's token or
    /// key.
    #[error("encryptionKMSID {id:?}: {what}")]
    Service {
        id: String,
        /// The request and its error.
        what: String,
        kind: Kind,
    },
    /// The configuration, or a Secret or token that it names, cannot be read.
    ///
    /// Remedy: mount the file, and let the program read it (`ls -l`).
    #[error("cannot read {}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The error of the read.
        source: io::Error,
    },
    /// The stored passphrase is not a sealed one.
    ///
    /// Remedy: restore the image's metadata (`rbd image-meta get POOL/IMAGE KEY`); without it the
    /// data cannot be read.
    #[error("the image's metadata {SEALED_KEY} holds no sealed passphrase")]
    Malformed,
    /// It was sealed with another passphrase, or for another volume.
    ///
    /// Remedy: pass the encryptionPassphrase with which the volume was created.
    #[error(
        "the secret's encryptionPassphrase does not open the passphrase in the image's metadata {SEALED_KEY}"
    )]
    Wrong,
}

/// A sealed passphrase, as stored.
#[derive(Serialize, Deserialize)]
pub struct Sealed {
    dek: String,
    nonce: String,
}

impl Sealed {
    pub fn new(dek: &[u8], nonce: &[u8]) -> Self {
        Self {
            dek: BASE64_STANDARD.encode(dek),
            nonce: BASE64_STANDARD.encode(nonce),
        }
    }

    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("two strings are JSON")
    }

    /// The encrypted passphrase, and the nonce.
    pub fn bytes_of(json: &str) -> Result<(Vec<u8>, Vec<u8>), EncryptionError> {
        let bytes = |text: &str| BASE64_STANDARD.decode(text).ok();
        serde_json::from_str::<Self>(json)
            .ok()
            .and_then(|sealed| Some((bytes(&sealed.dek)?, bytes(&sealed.nonce)?)))
            .ok_or(EncryptionError::Malformed)
    }
}

/// The passphrase of a request's secrets.
pub fn passphrase(secrets: &Secrets) -> Result<&Secret, EncryptionError> {
    secrets.get(PASSPHRASE).ok_or(EncryptionError::Missing)
}

/// A new passphrase for one volume: 160 random bits.
pub fn generate() -> Secret {
    let bytes = Zeroizing::new(random::<20>());
    Secret::new(BASE64_URL_SAFE.encode(*bytes))
}

/// A new secret for the files of one volume: 512 random bits.
pub fn generate_for_files() -> Secret {
    let bytes = Zeroizing::new(random::<64>());
    Secret::new(BASE64_URL_SAFE.encode(*bytes))
}

/// Seals a volume's passphrase, with the secret's, for the volume of that handle.
pub fn seal(with: &Secret, handle: &str, passphrase: &Secret) -> String {
    let nonce = Nonce::from(random());
    let dek = cipher(with, handle)
        .encrypt(&nonce, passphrase.reveal().as_bytes())
        .expect("a passphrase is shorter than the 64 GiB of a message");
    Sealed::new(&dek, &nonce).to_json()
}

/// Random bytes from the kernel.
pub fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("the kernel has random bytes");
    bytes
}

/// Opens a passphrase that [`seal`] sealed.
pub fn open(with: &Secret, handle: &str, sealed: &str) -> Result<Secret, EncryptionError> {
    let (dek, nonce) = Sealed::bytes_of(sealed)?;
    let nonce = Nonce::try_from(&nonce[..]).map_err(|_| EncryptionError::Malformed)?;
    let opened = cipher(with, handle).decrypt(&nonce, &*dek);
    let opened = opened.map_err(|_| EncryptionError::Wrong)?;
    let text = String::from_utf8(opened).map_err(|_| EncryptionError::Malformed)?;
    Ok(Secret::new(text))
}

/// scrypt's cost: 32 MiB of memory, some 50 ms.
const LOG_N: u8 = 15;

fn cipher(passphrase: &Secret, salt: &str) -> Aes256Gcm {
    let mut key = Zeroizing::new([0; 32]);
    let params = scrypt::Params::new(LOG_N, 8, 1).expect("these parameters are valid");
    scrypt::scrypt(
        passphrase.reveal().as_bytes(),
        salt.as_bytes(),
        &params,
        &mut *key,
    )
    .expect("32 bytes are a valid length");
    Aes256Gcm::new(&Key::<Aes256Gcm>::from(*key))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(text: &str) -> Secret {
        Secret::new(text.to_owned())
    }

    #[test]
    fn a_sealed_passphrase_opens_only_with_its_key_and_handle() {
        let (with, dek) = (secret("test_passphrase"), generate());
        let sealed = seal(&with, "0001-a", &dek);
        assert!(!sealed.contains(dek.reveal()));
        let opened = open(&with, "0001-a", &sealed).unwrap();
        assert_eq!(opened.reveal(), dek.reveal());
        assert_eq!(dek.reveal().len(), 28);
        for (with, handle) in [("test_passphrase", "0001-b"), ("other", "0001-a")] {
            let refused = open(&secret(with), handle, &sealed);
            assert!(matches!(refused, Err(EncryptionError::Wrong)));
        }
        for text in [
            "",
            "{}",
            r#"{"dek":"?","nonce":"AAAA"}"#,
            r#"{"dek":"AAAA","nonce":"AAAA"}"#,
        ] {
            let refused = open(&with, "0001-a", text);
            assert!(matches!(refused, Err(EncryptionError::Malformed)), "{text}");
        }
    }

    #[test]
    fn a_passphrase_sealed_by_another_implementation_opens() {
        // Made by Python's hashlib.scrypt and cryptography's AESGCM.
        let sealed = include_str!("encryption/sealed.json");
        let opened = open(
            &secret("test_passphrase"),
            "0001-0004-test-0000000000000001-volume",
            sealed,
        );
        assert_eq!(opened.unwrap().reveal(), "dGhlIHZvbHVtZSdzIG93biBvbmU=");
    }

    #[test]
    fn the_older_metadata_key_is_read() {
        let note = |key: &str| BTreeMap::from([(key.to_owned(), " encrypted\n".to_owned())]);
        for key in ["rbd.csi.ceph.com/encrypted", ".rbd.csi.ceph.com/encrypted"] {
            assert_eq!(value_of(&note(key), STATE_KEY), Some("encrypted"));
        }
        assert_eq!(value_of(&note("other"), STATE_KEY), None);
    }
}
