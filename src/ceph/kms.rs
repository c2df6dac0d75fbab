//! Key management systems: where the passphrases of encrypted volumes are kept.
//!
//! ```text
//!  default       one passphrase for all volumes: the request's secret has it
//!  metadata      the volume's own, sealed, in the image's metadata
//!  kmip          the same, sealed by a server
//!  aws-metadata  the same, sealed by AWS KMS
//!  vault         the volume's own, in HashiCorp Vault or OpenBao, under the volume's
//!  vaulttokens   handle; one login for all volumes, or a token, or a service account,
//!  vaulttenantsa for each tenant
//! ```
//!
//! The StorageClass names one by `encryptionKMSID`, a section of ceph-csi's configuration.
//! The Secrets and ConfigMaps of Kubernetes that the section names, ceph-csi reads by the API;
//! this driver has no access to the API, and reads a directory in which they are mounted.
//!
//! A tenant is the namespace of the volume's claim, in the journal's `csi.volume.owner`.

use std::{
    collections::HashMap,
    fmt, fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::Deserialize;
use serde_json::Value;

use super::csi_format::encryption::{
    EncryptionError, generate, generate_for_files, open, passphrase, seal,
};
use crate::secret::{PASSPHRASE, Secret, Secrets};

#[cfg(feature = "kms")]
mod aws;
#[cfg(feature = "kms")]
mod http;
#[cfg(feature = "kms")]
mod kmip;
#[cfg(feature = "kms")]
mod vault;

/// The id of the key management system that needs no configuration.
pub const DEFAULT_KMS: &str = "default";

/// The place of a volume's passphrase.
#[derive(Clone, Debug)]
pub enum Kms {
    /// The request's secret.
    Secret,
    /// The image's metadata, sealed with the passphrase of this file; none: with the
    /// request's.
    Metadata(Option<PathBuf>),
    /// The image's metadata, sealed by a service.
    Sealed(Arc<dyn SealingService>),
    /// A service, under the volume's handle.
    Service(Arc<dyn KeyService>),
}

/// A service that seals passphrases with a key that it has. Its calls block.
pub trait SealingService: fmt::Debug + Send + Sync {
    /// Refuses credentials with which no call can succeed; asks no server.
    fn check(&self) -> Result<(), EncryptionError>;

    /// Seals a passphrase, for the image's metadata.
    fn seal(&self, passphrase: &Secret) -> Result<String, EncryptionError>;

    /// Opens what it sealed.
    fn open(&self, sealed: &str) -> Result<Secret, EncryptionError>;
}

/// A service that keeps passphrases, each under its volume's handle. Its calls block.
pub trait KeyService: fmt::Debug + Send + Sync {
    /// Refuses secrets of a request with which no call can succeed; asks no server.
    fn check(&self, secrets: &Secrets) -> Result<(), EncryptionError>;

    /// The passphrase under the handle.
    fn load(&self, secrets: &Secrets, handle: &str) -> Result<Secret, EncryptionError>;

    /// Stores a passphrase under the handle.
    fn store(
        &self,
        secrets: &Secrets,
        handle: &str,
        passphrase: &Secret,
        existing: Existing,
    ) -> Result<(), EncryptionError>;

    /// Removes the passphrase under the handle, if there is one.
    fn remove(&self, secrets: &Secrets, handle: &str) -> Result<(), EncryptionError>;
}

/// What becomes of a passphrase that is under the handle already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// It stays.
    Keep,
    /// The new one replaces it.
    Replace,
}

impl Kms {
    /// Refuses secrets of a request with which the KMS cannot work.
    pub fn check(&self, secrets: &Secrets) -> Result<(), EncryptionError> {
        match self {
            Self::Secret | Self::Metadata(None) => passphrase(secrets).map(drop),
            Self::Metadata(Some(file)) => read_exactly(file).map(drop),
            Self::Sealed(service) => service.check(),
            Self::Service(service) => service.check(secrets),
        }
    }

    /// The passphrase of the volume with that handle; `sealed` is the one of its image's
    /// metadata.
    pub fn load(
        &self,
        secrets: &Secrets,
        handle: &str,
        sealed: Option<&str>,
    ) -> Result<Secret, EncryptionError> {
        match self {
            Self::Secret => passphrase(secrets).cloned(),
            Self::Metadata(file) => {
                let with = sealing(file.as_deref(), secrets)?;
                let open = |with: &Secret| open(with, handle, sealed.unwrap_or_default());
                match (open(&with), with.without_newline()) {
                    // Earlier builds sealed without it.
                    (Err(EncryptionError::Wrong), Some(with)) => open(&with),
                    (opened, _) => opened,
                }
            }
            Self::Sealed(service) => service.open(sealed.unwrap_or_default()),
            Self::Service(service) => service.load(secrets, handle),
        }
    }

    /// Makes the passphrase of a new volume, unless its service has one. Returns what the
    /// image's metadata must have.
    pub fn create(
        &self,
        secrets: &Secrets,
        handle: &str,
    ) -> Result<Option<String>, EncryptionError> {
        self.keep(secrets, handle, Existing::Keep, generate)
    }

    /// Stores the passphrase of a copy. Returns what the image's metadata must have.
    pub fn store(
        &self,
        secrets: &Secrets,
        handle: &str,
        own: &Secret,
    ) -> Result<Option<String>, EncryptionError> {
        self.keep(secrets, handle, Existing::Replace, || own.clone())
    }

    fn keep(
        &self,
        secrets: &Secrets,
        handle: &str,
        existing: Existing,
        own: impl FnOnce() -> Secret,
    ) -> Result<Option<String>, EncryptionError> {
        match self {
            Self::Secret => Ok(None),
            Self::Metadata(file) => {
                let with = sealing(file.as_deref(), secrets)?;
                Ok(Some(seal(&with, handle, &own())))
            }
            Self::Sealed(service) => Ok(Some(service.seal(&own())?)),
            Self::Service(service) => {
                service.store(secrets, handle, &own(), existing)?;
                Ok(None)
            }
        }
    }

    /// The secret of a volume whose files are encrypted. Where others have the secret of one
    /// volume alone, ceph-csi gives no volume its own: the metadata holds none.
    pub fn load_for_files(
        &self,
        secrets: &Secrets,
        handle: &str,
    ) -> Result<Secret, EncryptionError> {
        match self {
            Self::Secret => passphrase(secrets).cloned(),
            Self::Metadata(file) => sealing(file.as_deref(), secrets),
            Self::Sealed(_) => Err(EncryptionError::NotForFiles),
            Self::Service(service) => service.load(secrets, handle),
        }
    }

    /// Makes the secret of a new volume whose files are encrypted, unless its service has one.
    pub fn create_for_files(&self, secrets: &Secrets, handle: &str) -> Result<(), EncryptionError> {
        match self {
            Self::Service(service) => {
                service.store(secrets, handle, &generate_for_files(), Existing::Keep)
            }
            _ => self.load_for_files(secrets, handle).map(drop),
        }
    }

    /// Stores the secret of a copy, if its KMS keeps one for each volume.
    pub fn store_for_files(
        &self,
        secrets: &Secrets,
        handle: &str,
        own: &Secret,
    ) -> Result<(), EncryptionError> {
        match self {
            Self::Service(service) => service.store(secrets, handle, own, Existing::Replace),
            _ => Ok(()),
        }
    }

    /// Removes the passphrase of a deleted image. What is in its metadata went with it.
    pub fn remove(&self, secrets: &Secrets, handle: &str) -> Result<(), EncryptionError> {
        match self {
            Self::Secret | Self::Metadata(_) | Self::Sealed(_) => Ok(()),
            Self::Service(service) => service.remove(secrets, handle),
        }
    }
}

/// The passphrase that seals those of volumes.
fn sealing(file: Option<&Path>, secrets: &Secrets) -> Result<Secret, EncryptionError> {
    match file {
        None => passphrase(secrets).cloned(),
        Some(file) => read_exactly(file),
    }
}

/// A value of a mounted Secret, to its last byte: a newline, as of `echo`, is part of a
/// passphrase for ceph-csi.
fn read_exactly(path: &Path) -> Result<Secret, EncryptionError> {
    let text = fs::read_to_string(path);
    text.map(Secret::new)
        .map_err(|source| EncryptionError::Config {
            path: path.to_owned(),
            source,
        })
}

/// A token, a certificate, or an id, of which a newline at the end is no part.
fn read(path: &Path) -> Result<Secret, EncryptionError> {
    let exact = read_exactly(path)?;
    Ok(exact.without_newline().unwrap_or(exact))
}

/// The key management systems, by id, and the files that they need.
#[derive(Clone, Debug)]
pub struct KmsConfig {
    /// ceph-csi's `ceph-csi-encryption-kms-config`: JSON, an object of sections. Or a
    /// directory of one file a section, as which `csi-kms-connection-details` is mounted.
    pub config: PathBuf,
    /// The mounted Secrets and ConfigMaps: `NAMESPACE/NAME/KEY`; those of the driver's own
    /// namespace: `NAME/KEY`.
    pub secrets: PathBuf,
    /// The token of this pod's service account, for a login at Vault.
    pub token: PathBuf,
}

/// The keys of a section that are not of one service alone. Of [`KmsConfig`].
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Section {
    #[serde(rename = "encryptionKMSType", alias = "KMS_PROVIDER")]
    kind: String,
    secret_name: Option<String>,
    secret_namespace: Option<String>,
}

/// A section by its id, for a volume of a tenant.
struct Lookup<'a> {
    config: &'a KmsConfig,
    id: &'a str,
    /// Empty if the volume has none.
    tenant: &'a str,
}

impl KmsConfig {
    /// The key management system of an id, for a volume of that tenant; of an empty id, the
    /// default. The configuration is read anew by each call.
    pub fn get(&self, id: &str, tenant: &str) -> Result<Kms, EncryptionError> {
        if id.is_empty() || id == DEFAULT_KMS {
            return Ok(Kms::Secret);
        }
        let config = self;
        Lookup { config, id, tenant }.kms()
    }

    fn section(&self, id: &str) -> io::Result<Option<Value>> {
        if !self.config.is_dir() {
            let mut sections: HashMap<String, Value> =
                serde_json::from_slice(&fs::read(&self.config)?)?;
            return Ok(sections.remove(id));
        }
        if !is_name(id) {
            return Ok(None);
        }
        match fs::read(self.config.join(id)) {
            Ok(text) => Ok(Some(serde_json::from_slice(&text)?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound && has_keys(&self.config)? => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

impl Lookup<'_> {
    fn kms(&self) -> Result<Kms, EncryptionError> {
        let (id, path) = (self.id.to_owned(), self.config.config.clone());
        let value = match self.config.section(self.id) {
            Ok(Some(value)) => value,
            Ok(None) => return Err(EncryptionError::Unknown { id, path }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(EncryptionError::NoFile { id, path });
            }
            Err(source) => return Err(EncryptionError::Config { path, source }),
        };
        let section: Section = self.parse(&value)?;
        match section.kind.as_str() {
            "metadata" => match &section.secret_name {
                None => Ok(Kms::Metadata(None)),
                Some(name) => {
                    let of_tenant = || self.tenant().map(str::to_owned);
                    let namespace = section.secret_namespace.map_or_else(of_tenant, Ok)?;
                    let file = self.secret("secretNamespace", &[&namespace, name, PASSPHRASE])?;
                    Ok(Kms::Metadata(Some(file)))
                }
            },
            #[cfg(feature = "kms")]
            "vault" | "vaulttokens" | "vaulttenantsa" => Ok(Kms::Service(Arc::new(
                vault::Vault::of(self, &section.kind, &value)?,
            ))),
            #[cfg(feature = "kms")]
            "kmip" => Ok(Kms::Sealed(Arc::new(kmip::Kmip::of(self, &value)?))),
            #[cfg(feature = "kms")]
            "aws-metadata" => Ok(Kms::Sealed(Arc::new(aws::AwsKms::of(self, &value)?))),
            kind => Err(EncryptionError::Unsupported {
                id,
                what: format!("type {kind:?}"),
            }),
        }
    }

    fn parse<T: for<'de> Deserialize<'de>>(&self, section: &Value) -> Result<T, EncryptionError> {
        T::deserialize(section).map_err(|error| self.invalid(error.to_string()))
    }

    fn invalid(&self, why: String) -> EncryptionError {
        EncryptionError::Section {
            id: self.id.to_owned(),
            path: self.config.config.clone(),
            why,
        }
    }

    fn tenant(&self) -> Result<&str, EncryptionError> {
        match self.tenant {
            "" => Err(EncryptionError::NoTenant {
                id: self.id.to_owned(),
            }),
            tenant => Ok(tenant),
        }
    }

    /// What the tenant's ConfigMap of that name has, if it is mounted.
    #[cfg(feature = "kms")]
    fn config_of_tenant(&self, name: &str) -> Result<Secrets, EncryptionError> {
        let path = self.secret("tenantConfigName", &[self.tenant()?, name])?;
        match Secrets::read_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Secrets::default()),
            read => read.map_err(|source| EncryptionError::Config { path, source }),
        }
    }

    /// The file of a mounted Secret's value, by the names of the directories and the file.
    fn secret(&self, key: &str, names: &[&str]) -> Result<PathBuf, EncryptionError> {
        let mut path = self.config.secrets.clone();
        for name in names {
            if !is_name(name) {
                return Err(self.invalid(format!("{key}: {name:?} is not a name of Kubernetes")));
            }
            path.push(name);
        }
        Ok(path)
    }
}

/// Whether it may be the name of an object of Kubernetes, or of a Secret's key: such a name
/// leads to no other directory.
fn is_name(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    (1..=253).contains(&text.len()) && !text.starts_with('.') && text.bytes().all(allowed)
}

/// Whether a directory has a key of a ConfigMap. Of a missing one kubelet mounts a directory with
/// no more than `..data`, which leads to an empty directory.
fn has_keys(dir: &Path) -> io::Result<bool> {
    for entry in dir.read_dir()? {
        if entry?.file_name().to_str().is_some_and(is_name) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests;
