//! HashiCorp Vault or OpenBao: its key-value store, version 1 or 2, over HTTP.
//!
//! As ceph-csi has it, a passphrase is at
//! `<vaultBackendPath>/[data/]<vaultPassphrasePath>/<handle>`, as
//! `{"data": {"passphrase": …}}`; `data/` with version 2. A call that logs in revokes its
//! token at its end, because Vault keeps each one until it expires.
//!
//! <https://openbao.org/api-docs/secret/kv/kv-v2/>,
//! <https://openbao.org/api-docs/auth/kubernetes/>

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use serde_json::{Value, json};
use ureq::{
    Agent,
    config::Config,
    http::{Method, Request, Uri},
    unversioned::{
        resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver},
        transport::{DefaultConnector, NextTimeout},
    },
};
use zeroize::Zeroizing;

use super::{Existing, KeyService, Lookup, http, read};
use crate::{
    ceph::csi_format::encryption::EncryptionError,
    error_chain,
    kind::Kind,
    secret::{Secret, Secrets},
};

mod settings;

use settings::{Login, Tls, VaultSection};

/// No answer that this driver reads is longer.
const LONGEST_ANSWER: u64 = 1 << 20;

/// A store of passphrases in Vault.
#[derive(Debug)]
pub struct Vault {
    /// The id of the KMS, for errors.
    id: String,
    /// `http[s]://HOST[:PORT]`.
    address: String,
    /// The namespace of the store, which precedes its mount in paths; may be empty.
    store_namespace: String,
    /// The mount of the store.
    mount: String,
    version: Option<KvVersion>,
    /// The path of passphrases below the mount.
    folder: String,
    /// Whether a removal destroys all versions.
    destroys: bool,
    /// The namespace of logins and of the look-up of the mount.
    namespace: String,
    login: Login,
    tls: Tls,
}

/// The version of the key-value store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KvVersion {
    One,
    Two,
}

/// A passphrase in the store, and the version number of its path, which a write must name.
struct Stored {
    passphrase: Option<Secret>,
    /// 0 if nothing was ever there.
    version: u64,
}

impl Vault {
    /// The store of a section of ceph-csi's configuration.
    pub(super) fn of(
        lookup: &Lookup<'_>,
        kind: &str,
        section: &Value,
    ) -> Result<Self, EncryptionError> {
        lookup.parse::<VaultSection>(section)?.vault(lookup, kind)
    }

    fn failed(&self, kind: Kind, what: String) -> EncryptionError {
        EncryptionError::Service {
            id: self.id.clone(),
            what,
            kind,
        }
    }

    fn session(&self, secrets: &Secrets) -> Result<Session<'_>, EncryptionError> {
        let config = http::config()
            .tls_config(self.tls.config(&self.id, secrets)?)
            .build();
        let (agent, base) = self.agent(config)?;
        let mut session = Session {
            vault: self,
            agent,
            base,
            token: None,
            version: self.version,
        };
        let (token, revokes) = match &self.login {
            Login::Token(file) => (read(file)?, false),
            Login::Role { path, role, token } => (session.log_in(path, role, &read(token)?)?, true),
        };
        session.token = Some((token, revokes));
        Ok(session)
    }

    /// The client, and the beginning of its URIs. Their host is the name that the server's
    /// certificate must have; the connection goes to the configured address.
    fn agent(&self, config: Config) -> Result<(Agent, String), EncryptionError> {
        let Some(name) = &self.tls.server_name else {
            return Ok((config.new_agent(), self.address.clone()));
        };
        let bad = |error: &dyn std::error::Error| {
            let what = format!("vaultAddress {:?}: {}", self.address, error_chain(error));
            self.failed(Kind::Precondition, what)
        };
        let address: Uri = self.address.parse().map_err(|error| bad(&error))?;
        let port = address.port_u16().unwrap_or(443);
        let agent = Agent::with_parts(config, DefaultConnector::default(), FixedHost(address));
        Ok((agent, format!("https://{name}:{port}")))
    }
}

/// Resolves the host of this URI, whichever is asked for.
#[derive(Debug)]
struct FixedHost(Uri);

impl Resolver for FixedHost {
    fn resolve(
        &self,
        _: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        DefaultResolver::default().resolve(&self.0, config, timeout)
    }
}

impl KeyService for Vault {
    fn check(&self, secrets: &Secrets) -> Result<(), EncryptionError> {
        self.tls.config(&self.id, secrets).map(drop)
    }

    fn load(&self, secrets: &Secrets, handle: &str) -> Result<Secret, EncryptionError> {
        let mut session = self.session(secrets)?;
        let found = session.read(handle)?.passphrase;
        found.ok_or_else(|| {
            let what = format!("Vault has no passphrase at {}", self.shown(handle));
            self.failed(Kind::Precondition, what)
        })
    }

    fn store(
        &self,
        secrets: &Secrets,
        handle: &str,
        passphrase: &Secret,
        existing: Existing,
    ) -> Result<(), EncryptionError> {
        let mut session = self.session(secrets)?;
        let there = session.read(handle)?;
        if there.passphrase.is_some() && existing == Existing::Keep {
            return Ok(());
        }
        // Also if they are equal: a late write of another call fails then.
        session.write(handle, passphrase, there.version)
    }

    fn remove(&self, secrets: &Secrets, handle: &str) -> Result<(), EncryptionError> {
        let mut session = self.session(secrets)?;
        let part = if self.destroys { "metadata" } else { "data" };
        let path = session.path(part, handle)?;
        let answer = session.ask(&Method::DELETE, &path, None)?;
        match answer.status {
            200 | 204 | 404 => Ok(()),
            _ => Err(self.refused("remove", handle, &answer)),
        }
    }
}

impl Vault {
    /// The place of a passphrase, as an operator names it.
    fn shown(&self, handle: &str) -> String {
        let (address, mount, folder) = (&self.address, &self.mount, &self.folder);
        match folder.as_str() {
            "" => format!("{address}, {mount}/{handle}"),
            folder => format!("{address}, {mount}/{folder}/{handle}"),
        }
    }

    fn refused(&self, verb: &str, handle: &str, answer: &Answer) -> EncryptionError {
        let place = self.shown(handle);
        let what = format!("Vault did not {verb} the passphrase at {place}: {answer}");
        self.failed(answer.kind(), what)
    }
}

/// A login at Vault, for one call.
struct Session<'a> {
    vault: &'a Vault,
    agent: Agent,
    base: String,
    /// And whether it is this session's own.
    token: Option<(Secret, bool)>,
    version: Option<KvVersion>,
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        if let Some((_, true)) = self.token {
            // Vault revokes it when it expires, too.
            _ = self.ask(&Method::POST, "auth/token/revoke-self", None);
        }
    }
}

impl Session<'_> {
    fn log_in(&self, path: &str, role: &str, jwt: &Secret) -> Result<Secret, EncryptionError> {
        #[derive(Deserialize)]
        struct LoggedIn {
            auth: ClientToken,
        }
        #[derive(Deserialize)]
        struct ClientToken {
            client_token: String,
        }
        let body = json!({"role": role, "jwt": jwt.reveal()});
        let answer = self.ask(&Method::POST, path, Some(body))?;
        let (vault, address) = (self.vault, &self.vault.address);
        if answer.status != 200 {
            let what = format!("Vault at {address} refused the login as role {role:?}: {answer}");
            // Vault answers 400 to a token or role that it does not accept.
            let kind = match answer.kind() {
                Kind::Precondition => Kind::Unauthenticated,
                kind => kind,
            };
            return Err(vault.failed(kind, what));
        }
        let logged_in: LoggedIn = answer.parse(vault)?;
        Ok(Secret::new(logged_in.auth.client_token))
    }

    /// The version of the store: that of the configuration, or of the mount.
    fn version(&mut self) -> Result<KvVersion, EncryptionError> {
        #[derive(Deserialize)]
        struct StoreMount {
            data: StoreData,
        }
        #[derive(Deserialize)]
        struct StoreData {
            options: Option<StoreOptions>,
        }
        #[derive(Deserialize)]
        struct StoreOptions {
            version: Option<String>,
        }
        if let Some(version) = self.version {
            return Ok(version);
        }
        let (vault, mount) = (self.vault, &self.vault.mount);
        let path = format!("sys/internal/ui/mounts/{}", segments(mount));
        let answer = self.ask(&Method::GET, &path, None)?;
        if answer.status != 200 {
            let what = format!(
                "Vault at {} does not show the version of the store {mount}, which vaultBackend (kv or kv-v2) may name: {answer}",
                vault.address
            );
            return Err(vault.failed(answer.kind(), what));
        }
        let found: StoreMount = answer.parse(vault)?;
        let version = found.data.options.and_then(|options| options.version);
        let version = match version.as_deref() {
            Some("2") => KvVersion::Two,
            _ => KvVersion::One,
        };
        self.version = Some(version);
        Ok(version)
    }

    /// The path of a passphrase; `part` is that of version 2.
    fn path(&mut self, part: &str, handle: &str) -> Result<String, EncryptionError> {
        let part = match self.version()? {
            KvVersion::One => String::new(),
            KvVersion::Two => format!("{part}/"),
        };
        let Vault {
            mount,
            folder,
            store_namespace,
            ..
        } = self.vault;
        let namespace = match store_namespace.as_str() {
            "" => String::new(),
            namespace => format!("{}/", segments(namespace)),
        };
        let folder = match folder.as_str() {
            "" => String::new(),
            folder => format!("{}/", segments(folder)),
        };
        Ok(format!(
            "{namespace}{}/{part}{folder}{}",
            segments(mount),
            segment(handle)
        ))
    }

    fn read(&mut self, handle: &str) -> Result<Stored, EncryptionError> {
        #[derive(Deserialize)]
        struct Found {
            data: Value,
        }
        let path = self.path("data", handle)?;
        let answer = self.ask(&Method::GET, &path, None)?;
        let mut stored = Stored {
            passphrase: None,
            version: 0,
        };
        // Version 2 answers 404 with metadata where a version was deleted.
        if !matches!(answer.status, 200 | 404) {
            return Err(self.vault.refused("read", handle, &answer));
        }
        let mut data = match answer.parse::<Found>(self.vault) {
            Ok(found) => found.data,
            Err(_) if answer.status == 404 => return Ok(stored),
            Err(error) => return Err(error),
        };
        if self.version()? == KvVersion::Two {
            let version = data.pointer("/metadata/version").and_then(Value::as_u64);
            stored.version = version.unwrap_or(0);
            data = data["data"].take();
        }
        stored.passphrase = match data.pointer_mut("/data/passphrase").map(Value::take) {
            Some(Value::String(text)) if !text.is_empty() => Some(Secret::new(text)),
            _ if answer.status == 404 => None,
            _ => {
                let place = self.vault.shown(handle);
                let what = format!("what Vault has at {place} is no passphrase");
                return Err(self.vault.failed(Kind::Precondition, what));
            }
        };
        Ok(stored)
    }

    /// Writes a passphrase, in place of that version.
    fn write(
        &mut self,
        handle: &str,
        passphrase: &Secret,
        version: u64,
    ) -> Result<(), EncryptionError> {
        let mut body = json!({"data": {"passphrase": passphrase.reveal()}});
        if self.version()? == KvVersion::Two {
            // Vault refuses it if another has written meanwhile.
            body = json!({"options": {"cas": version}, "data": body});
        }
        let path = self.path("data", handle)?;
        let answer = self.ask(&Method::POST, &path, Some(body))?;
        match answer.status {
            200 | 204 => Ok(()),
            _ => Err(self.vault.refused("store", handle, &answer)),
        }
    }

    /// One request, and its answer, whichever its status.
    fn ask(
        &self,
        method: &Method,
        path: &str,
        body: Option<Value>,
    ) -> Result<Answer, EncryptionError> {
        let vault = self.vault;
        let uri = format!("{}/v1/{path}", self.base);
        let failed = |error: &dyn std::error::Error| {
            let what = format!(
                "{method} {}/v1/{path}: {}",
                vault.address,
                error_chain(error)
            );
            vault.failed(Kind::Transient, what)
        };
        let mut request = Request::builder().method(method).uri(uri);
        if let Some((token, _)) = &self.token {
            request = request.header("X-Vault-Token", token.reveal());
        }
        if !vault.namespace.is_empty() && (path.starts_with("auth/") || path.starts_with("sys/")) {
            request = request.header("X-Vault-Namespace", &vault.namespace);
        }
        let sent = match body {
            Some(body) => {
                let text = Zeroizing::new(body.to_string());
                let request = request.header("Content-Type", "application/json");
                let request = request
                    .body(text.as_str())
                    .map_err(|error| failed(&error))?;
                self.agent.run(request)
            }
            None => self
                .agent
                .run(request.body(()).map_err(|error| failed(&error))?),
        };
        let mut response = sent.map_err(|error| failed(&error))?;
        let limited = response.body_mut().with_config().limit(LONGEST_ANSWER);
        let text = limited.read_to_string().map_err(|error| failed(&error))?;
        Ok(Answer {
            status: response.status().as_u16(),
            text: Zeroizing::new(text),
        })
    }
}

/// What Vault answered. Shown are its status and the errors that it names.
struct Answer {
    status: u16,
    text: Zeroizing<String>,
}

impl Answer {
    fn kind(&self) -> Kind {
        match self.status {
            401 | 403 => Kind::Unauthenticated,
            // Another has written meanwhile, too: the next attempt reads that.
            400 if self.text.contains("check-and-set") => Kind::Transient,
            400..=428 => Kind::Precondition,
            // Sealed, in standby, or too busy: a redirect, 429, 472, 473, 5xx.
            _ => Kind::Transient,
        }
    }

    fn parse<T: for<'de> Deserialize<'de>>(&self, vault: &Vault) -> Result<T, EncryptionError> {
        // serde's error would show a part of the text.
        serde_json::from_str(&self.text).map_err(|error| {
            let (line, column) = (error.line(), error.column());
            let what = format!(
                "Vault at {} answered {} with no such JSON: line {line}, column {column}",
                vault.address, self.status
            );
            vault.failed(Kind::Transient, what)
        })
    }
}

impl std::fmt::Display for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        #[derive(Deserialize)]
        struct Errors {
            errors: Vec<String>,
        }
        write!(f, "status {}", self.status)?;
        match serde_json::from_str::<Errors>(&self.text) {
            Ok(named) if !named.errors.is_empty() => {
                let text: String = named.errors.join("; ").chars().take(300).collect();
                write!(f, ", {}", text.trim().replace('\n', " "))
            }
            _ => Ok(()),
        }
    }
}

/// All that has a meaning in a URI.
const IN_SEGMENT: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');

fn segment(text: &str) -> String {
    utf8_percent_encode(text, IN_SEGMENT).to_string()
}

/// The same of each segment of a path.
fn segments(path: &str) -> String {
    let list: Vec<String> = path.split('/').map(segment).collect();
    list.join("/")
}

#[cfg(test)]
mod tests;
