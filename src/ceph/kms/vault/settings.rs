//! ceph-csi's settings of Vault: the keys of a section.

use std::path::PathBuf;

use serde::Deserialize;
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};

use super::{KvVersion, Vault};
use crate::{
    ceph::{
        csi_format::encryption::EncryptionError,
        kms::{Lookup, read},
    },
    kind::Kind,
    parse_bool::parse_bool,
    secret::{Secret, Secrets},
};

/// A section of ceph-csi's configuration; the aliases are Vault's own names, as Rook and
/// ceph-csi's `KMS_PROVIDER` form have them.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VaultSection {
    #[serde(alias = "VAULT_ADDR")]
    vault_address: String,
    #[serde(alias = "VAULT_BACKEND")]
    vault_backend: String,
    #[serde(alias = "VAULT_BACKEND_PATH")]
    vault_backend_path: String,
    #[serde(alias = "VAULT_DESTROY_KEYS")]
    vault_destroy_keys: String,
    #[serde(alias = "VAULT_NAMESPACE")]
    vault_namespace: String,
    #[serde(alias = "VAULT_AUTH_NAMESPACE")]
    vault_auth_namespace: String,
    #[serde(alias = "VAULT_TLS_SERVER_NAME", rename = "vaultTLSServerName")]
    vault_tls_server_name: String,
    #[serde(alias = "VAULT_CACERT", rename = "vaultCAFromSecret")]
    vault_ca_from_secret: String,
    #[serde(rename = "vaultCAVerify")]
    vault_ca_verify: String,
    #[serde(rename = "VAULT_SKIP_VERIFY")]
    skip_verify: String,
    #[serde(alias = "VAULT_CLIENT_CERT")]
    vault_client_cert_from_secret: String,
    #[serde(alias = "VAULT_CLIENT_KEY")]
    vault_client_cert_key_from_secret: String,
    /// Of the types `vault` and `vaulttenantsa`.
    vault_auth_path: String,
    vault_role: String,
    /// Of the type `vault`.
    vault_passphrase_root: String,
    vault_passphrase_path: String,
    /// Of the type `vaulttokens`.
    tenant_token_name: String,
    /// Of the type `vaulttenantsa`.
    #[serde(rename = "tenantSAName")]
    tenant_sa_name: String,
    /// Of the types `vaulttokens` and `vaulttenantsa`.
    tenant_config_name: String,
}

impl Default for VaultSection {
    /// ceph-csi's.
    fn default() -> Self {
        let empty = String::new;
        Self {
            vault_address: empty(),
            vault_backend: empty(),
            vault_backend_path: "secret/".to_owned(),
            vault_destroy_keys: "true".to_owned(),
            vault_namespace: empty(),
            vault_auth_namespace: empty(),
            vault_tls_server_name: empty(),
            vault_ca_from_secret: empty(),
            vault_ca_verify: "true".to_owned(),
            skip_verify: empty(),
            vault_client_cert_from_secret: empty(),
            vault_client_cert_key_from_secret: empty(),
            vault_auth_path: "/v1/auth/kubernetes/login".to_owned(),
            vault_role: "csi-kubernetes".to_owned(),
            vault_passphrase_root: empty(),
            vault_passphrase_path: empty(),
            tenant_token_name: "ceph-csi-kms-token".to_owned(),
            tenant_sa_name: "ceph-csi-vault-sa".to_owned(),
            tenant_config_name: "ceph-csi-kms-config".to_owned(),
        }
    }
}

/// How Vault knows this client.
#[derive(Debug)]
pub enum Login {
    /// By the token in this file.
    Token(PathBuf),
    /// By a JSON web token of Kubernetes.
    Role {
        /// The path of the login, as `auth/kubernetes/login`.
        path: String,
        role: String,
        /// The file with the web token.
        token: PathBuf,
    },
}

/// How this client knows Vault.
#[derive(Debug)]
pub struct Tls {
    pub server_name: Option<String>,
    verifies: bool,
    authority: Authority,
    /// The files of a client's certificate and its key.
    client: Option<(PathBuf, PathBuf)>,
}

/// The certificates that sign Vault's.
#[derive(Debug)]
enum Authority {
    /// Those of the public authorities.
    Public,
    /// A key of the request's secrets.
    OfRequest(String),
    File(PathBuf),
}

impl VaultSection {
    /// The store that the section describes.
    pub fn vault(mut self, lookup: &Lookup<'_>, kind: &str) -> Result<Vault, EncryptionError> {
        if kind != "vault" {
            let config = lookup.config_of_tenant(&self.tenant_config_name)?;
            self.replace_by(&config);
        }
        let address = self.address(lookup)?;
        let version = match self.vault_backend.as_str() {
            "" => None,
            "kv" => Some(KvVersion::One),
            "kv-v2" => Some(KvVersion::Two),
            _ => return Err(lookup.invalid("vaultBackend must be kv or kv-v2".to_owned())),
        };
        let (login, tls, backend, folder) = match kind {
            "vault" => (
                self.login_by_role(lookup, lookup.config.token.clone())?,
                self.tls(lookup)?,
                self.root(),
                self.vault_passphrase_path.trim_matches('/'),
            ),
            kind => (
                self.login_of_tenant(lookup, kind)?,
                self.tls_of_tenant(lookup)?,
                self.vault_backend_path.as_str(),
                "",
            ),
        };
        let namespace = match self.vault_auth_namespace.as_str() {
            "" => &self.vault_namespace,
            namespace => namespace,
        };
        Ok(Vault {
            id: lookup.id.to_owned(),
            address,
            store_namespace: self.vault_namespace.trim_matches('/').to_owned(),
            mount: backend.trim_matches('/').to_owned(),
            version,
            folder: folder.to_owned(),
            destroys: truth(lookup, "vaultDestroyKeys", &self.vault_destroy_keys)?,
            namespace: namespace.trim_matches('/').to_owned(),
            login,
            tls,
        })
    }

    /// Replaces what a tenant's ConfigMap has.
    fn replace_by(&mut self, config: &Secrets) {
        if self.vault_auth_namespace == self.vault_namespace {
            // It stays that of the store.
            self.vault_auth_namespace.clear();
        }
        if config.get("vaultCAVerify").is_some() {
            self.skip_verify.clear();
        }
        for (key, field) in [
            ("vaultAddress", &mut self.vault_address),
            ("vaultBackend", &mut self.vault_backend),
            ("vaultBackendPath", &mut self.vault_backend_path),
            ("vaultDestroyKeys", &mut self.vault_destroy_keys),
            ("vaultNamespace", &mut self.vault_namespace),
            ("vaultAuthNamespace", &mut self.vault_auth_namespace),
            ("vaultTLSServerName", &mut self.vault_tls_server_name),
            ("vaultCAFromSecret", &mut self.vault_ca_from_secret),
            ("vaultCAVerify", &mut self.vault_ca_verify),
            ("tenantSAName", &mut self.tenant_sa_name),
            ("vaultAuthPath", &mut self.vault_auth_path),
            ("vaultRole", &mut self.vault_role),
        ] {
            if let Some(value) = config.get(key) {
                value.reveal().trim().clone_into(field);
            }
        }
    }

    fn address(&self, lookup: &Lookup<'_>) -> Result<String, EncryptionError> {
        let address = self.vault_address.trim_end_matches('/');
        let https = address.starts_with("https://");
        if !https && !address.starts_with("http://") {
            let why = "vaultAddress must be https://HOST[:PORT] or http://HOST[:PORT]";
            return Err(lookup.invalid(why.to_owned()));
        }
        if !https && !self.vault_tls_server_name.is_empty() {
            let why = "vaultTLSServerName needs a vaultAddress of https";
            return Err(lookup.invalid(why.to_owned()));
        }
        Ok(address.to_owned())
    }

    /// The mount of the store, of the type `vault`.
    fn root(&self) -> &str {
        let root = self.vault_passphrase_root.trim_start_matches('/');
        match root.strip_prefix("v1/").unwrap_or(root) {
            "" => &self.vault_backend_path,
            root => root,
        }
    }

    fn login_by_role(&self, lookup: &Lookup<'_>, token: PathBuf) -> Result<Login, EncryptionError> {
        let path = self.vault_auth_path.trim_start_matches('/');
        let path = path.strip_prefix("v1/").unwrap_or(path);
        if !(path.starts_with("auth/") && path.ends_with("/login")) {
            let why = "vaultAuthPath must be /v1/auth/MOUNT/login";
            return Err(lookup.invalid(why.to_owned()));
        }
        Ok(Login::Role {
            path: path.to_owned(),
            role: self.vault_role.clone(),
            token,
        })
    }

    /// By what the tenant's Secret has: a token of Vault, or one of a service account.
    fn login_of_tenant(&self, lookup: &Lookup<'_>, kind: &str) -> Result<Login, EncryptionError> {
        let file = |key: &str, name: &str| lookup.secret(key, &[lookup.tenant()?, name, "token"]);
        match kind {
            "vaulttokens" => file("tenantTokenName", &self.tenant_token_name).map(Login::Token),
            _ => self.login_by_role(lookup, file("tenantSAName", &self.tenant_sa_name)?),
        }
    }

    fn tls(&self, lookup: &Lookup<'_>) -> Result<Tls, EncryptionError> {
        let authority = match self.vault_ca_from_secret.as_str() {
            "" => Authority::Public,
            key => Authority::OfRequest(key.to_owned()),
        };
        self.tls_with(lookup, authority, None)
    }

    /// Of a tenant: its certificates are in Secrets of its own, or of the driver's.
    fn tls_of_tenant(&self, lookup: &Lookup<'_>) -> Result<Tls, EncryptionError> {
        let file = |setting: &str, name: &str, key: &str| match name {
            "" => Ok(None),
            name => {
                let of_tenant = lookup.secret(setting, &[lookup.tenant()?, name, key])?;
                let of_driver = lookup.secret(setting, &[name, key])?;
                let is_of_driver = !of_tenant.exists() && of_driver.exists();
                Ok(Some(if is_of_driver { of_driver } else { of_tenant }))
            }
        };
        let authority = file("vaultCAFromSecret", &self.vault_ca_from_secret, "cert")?;
        let certificate = &self.vault_client_cert_from_secret;
        let certificate = file("vaultClientCertFromSecret", certificate, "cert")?;
        let key = &self.vault_client_cert_key_from_secret;
        let key = file("vaultClientCertKeyFromSecret", key, "key")?;
        let authority = authority.map_or(Authority::Public, Authority::File);
        self.tls_with(lookup, authority, certificate.zip(key))
    }

    fn tls_with(
        &self,
        lookup: &Lookup<'_>,
        authority: Authority,
        client: Option<(PathBuf, PathBuf)>,
    ) -> Result<Tls, EncryptionError> {
        let name = &self.vault_tls_server_name;
        Ok(Tls {
            server_name: (!name.is_empty()).then(|| name.clone()),
            verifies: match self.skip_verify.as_str() {
                "" => truth(lookup, "vaultCAVerify", &self.vault_ca_verify)?,
                skip => !truth(lookup, "VAULT_SKIP_VERIFY", skip)?,
            },
            authority,
            client,
        })
    }
}

fn truth(lookup: &Lookup<'_>, key: &str, value: &str) -> Result<bool, EncryptionError> {
    parse_bool(value).ok_or_else(|| lookup.invalid(format!("{key} must be \"true\" or \"false\"")))
}

impl Tls {
    /// The client's configuration, for a request with these secrets; `id` is that of the
    /// KMS.
    pub fn config(&self, id: &str, secrets: &Secrets) -> Result<TlsConfig, EncryptionError> {
        let failed = |what: String| EncryptionError::Service {
            id: id.to_owned(),
            what,
            kind: Kind::Precondition,
        };
        let mut config = TlsConfig::builder().disable_verification(!self.verifies);
        let (pem, place) = match &self.authority {
            Authority::Public => (None, String::new()),
            Authority::OfRequest(key) => {
                let pem = secrets.get(key).ok_or_else(|| {
                    failed(format!(
                        "the secret has no {key}, which vaultCAFromSecret names"
                    ))
                })?;
                (Some(pem.clone()), format!("{key} of the secret"))
            }
            Authority::File(file) => (Some(read(file)?), file.display().to_string()),
        };
        if let Some(pem) = pem {
            let certificates = certificates(&pem);
            if certificates.is_empty() {
                return Err(failed(format!("{place} has no certificate in PEM")));
            }
            config = config.root_certs(RootCerts::new_with_certs(&certificates));
        }
        if let Some((certificate, key)) = &self.client {
            let chain = certificates(&read(certificate)?);
            let key_text = read(key)?;
            let Ok(own) = PrivateKey::from_pem(key_text.reveal().as_bytes()) else {
                return Err(failed(format!(
                    "{} has no private key in PEM",
                    key.display()
                )));
            };
            config = config.client_cert(Some(ClientCert::new_with_certs(&chain, own)));
        }
        Ok(config.build())
    }
}

fn certificates(pem: &Secret) -> Vec<Certificate<'static>> {
    let items = parse_pem(pem.reveal().as_bytes());
    let certificate = |item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(certificate),
        _ => None,
    };
    items.filter_map(certificate).collect()
}
