//! KMIP: a server with a key that never leaves it, which seals passphrases.
//!
//! As ceph-csi has it, the server encrypts a passphrase by AES-CBC with PKCS #5 padding; the
//! image's metadata has the result and the initialization vector. Each call is one request,
//! of KMIP 1.4, on a connection of its own, by TLS with a certificate of the client.
//!
//! <https://docs.oasis-open.org/kmip/spec/v1.4/os/kmip-spec-v1.4-os.html>

use std::{
    io::{self, Read as _, Write as _},
    net::{TcpStream, ToSocketAddrs as _},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
};
use serde::Deserialize;
use serde_json::Value;
use zeroize::Zeroizing;

use super::{Lookup, SealingService, read};
use crate::{
    ceph::csi_format::encryption::{EncryptionError, Sealed, random},
    error_chain,
    kind::Kind,
    secret::Secret,
};

mod ttlv;

use ttlv::Item;

/// The longest it takes to connect. A look-up of a name ends by the resolver's own timeouts,
/// on the calling thread.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// No answer to a request of this driver is longer.
const LONGEST_ANSWER: usize = 1 << 16;

/// A server that seals passphrases.
#[derive(Debug)]
pub struct Kmip {
    /// The id of the KMS, for errors.
    id: String,
    /// `HOST:PORT`.
    endpoint: String,
    /// The name that the server's certificate must have.
    server_name: ServerName<'static>,
    read_timeout: Duration,
    write_timeout: Duration,
    /// The mounted Secret, with the keys of [`Kmip::credential`].
    credentials: PathBuf,
}

/// A section of ceph-csi's configuration.
#[derive(Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
struct KmipSection {
    kmip_endpoint: String,
    #[serde(default)]
    tls_server_name: String,
    #[serde(default)]
    read_timeout: Seconds,
    #[serde(default)]
    write_timeout: Seconds,
    #[serde(default = "default_secret")]
    kmip_secret_name: String,
}

fn default_secret() -> String {
    "ceph-csi-kmip-credentials".to_owned()
}

/// A timeout; ceph-csi's default.
#[derive(Deserialize)]
#[serde(untagged)]
enum Seconds {
    Number(u32),
    Text(String),
}

impl Default for Seconds {
    fn default() -> Self {
        Self::Number(10)
    }
}

impl Seconds {
    fn duration(&self, lookup: &Lookup<'_>, key: &str) -> Result<Duration, EncryptionError> {
        let number = match self {
            Self::Number(number) => Some(*number),
            Self::Text(text) => text.parse().ok(),
        };
        let whole = number.filter(|number| *number > 0);
        let whole = whole.ok_or_else(|| lookup.invalid(format!("{key} must be whole seconds")))?;
        Ok(Duration::from_secs(whole.into()))
    }
}

/// The operations that seal and open (KMIP 1.4, 9.1.3.2.27).
#[derive(Clone, Copy, Debug)]
enum KmipOperation {
    Encrypt = 0x1F,
    Decrypt = 0x20,
}

/// KMIP 1.4, 9.1.3.1.
mod tag {
    pub const BATCH_COUNT: u32 = 0x42_000D;
    pub const BATCH_ITEM: u32 = 0x42_000F;
    pub const BLOCK_CIPHER_MODE: u32 = 0x42_0011;
    pub const CRYPTOGRAPHIC_ALGORITHM: u32 = 0x42_0028;
    pub const CRYPTOGRAPHIC_PARAMETERS: u32 = 0x42_002B;
    pub const IV_COUNTER_NONCE: u32 = 0x42_003D;
    pub const OPERATION: u32 = 0x42_005C;
    pub const PADDING_METHOD: u32 = 0x42_005F;
    pub const PROTOCOL_VERSION: u32 = 0x42_0069;
    pub const PROTOCOL_VERSION_MAJOR: u32 = 0x42_006A;
    pub const PROTOCOL_VERSION_MINOR: u32 = 0x42_006B;
    pub const REQUEST_HEADER: u32 = 0x42_0077;
    pub const REQUEST_MESSAGE: u32 = 0x42_0078;
    pub const REQUEST_PAYLOAD: u32 = 0x42_0079;
    pub const RESPONSE_MESSAGE: u32 = 0x42_007B;
    pub const RESPONSE_PAYLOAD: u32 = 0x42_007C;
    pub const RESULT_MESSAGE: u32 = 0x42_007D;
    pub const RESULT_REASON: u32 = 0x42_007E;
    pub const RESULT_STATUS: u32 = 0x42_007F;
    pub const UNIQUE_IDENTIFIER: u32 = 0x42_0094;
    pub const DATA: u32 = 0x42_00C2;
}

const CBC: u32 = 1;
const PKCS5: u32 = 3;
const AES: u32 = 3;
const SUCCESS: u32 = 0;

/// Result reasons (KMIP 1.4, 9.1.3.2.29).
mod reason {
    pub const AUTHENTICATION_NOT_SUCCESSFUL: u32 = 3;
    pub const PERMISSION_DENIED: u32 = 0xC;
    pub const GENERAL_FAILURE: u32 = 0x100;
}

impl Kmip {
    /// The server of a section of ceph-csi's configuration.
    pub(super) fn of(lookup: &Lookup<'_>, section: &Value) -> Result<Self, EncryptionError> {
        let section: KmipSection = lookup.parse(section)?;
        let bad_endpoint = || lookup.invalid("KMIP_ENDPOINT must be HOST:PORT".to_owned());
        let (host, port) = section
            .kmip_endpoint
            .rsplit_once(':')
            .ok_or_else(bad_endpoint)?;
        port.parse::<u16>().map_err(|_| bad_endpoint())?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let (key, name) = match section.tls_server_name.as_str() {
            "" => ("KMIP_ENDPOINT", host),
            name => ("TLS_SERVER_NAME", name),
        };
        let server_name = ServerName::try_from(name.to_owned()).map_err(|_| {
            lookup.invalid(format!(
                "{key}: {name:?} is not a name of a host, or an address"
            ))
        })?;
        Ok(Self {
            id: lookup.id.to_owned(),
            server_name,
            read_timeout: section.read_timeout.duration(lookup, "READ_TIMEOUT")?,
            write_timeout: section.write_timeout.duration(lookup, "WRITE_TIMEOUT")?,
            credentials: lookup.secret("KMIP_SECRET_NAME", &[&section.kmip_secret_name])?,
            endpoint: section.kmip_endpoint,
        })
    }

    fn failed(&self, kind: Kind, what: String) -> EncryptionError {
        EncryptionError::Service {
            id: self.id.clone(),
            what,
            kind,
        }
    }

    /// A value of the mounted Secret: `CA_CERT`, `CLIENT_CERT`, `CLIENT_KEY`,
    /// `UNIQUE_IDENTIFIER`.
    fn credential(&self, key: &str) -> Result<Secret, EncryptionError> {
        read(&self.credentials.join(key))
    }

    fn tls(&self) -> Result<ClientConfig, EncryptionError> {
        let bad = |key: &str, what: &str| {
            let place = self.credentials.join(key);
            let what = format!("{} has no {what} in PEM", place.display());
            self.failed(Kind::Precondition, what)
        };
        let certificates = |key: &str| {
            let pem = self.credential(key)?;
            let list: Result<Vec<_>, _> =
                CertificateDer::pem_slice_iter(pem.reveal().as_bytes()).collect();
            let list = list.ok().filter(|list| !list.is_empty());
            list.ok_or_else(|| bad(key, "certificate"))
        };
        let mut authorities = RootCertStore::empty();
        for certificate in certificates("CA_CERT")? {
            let added = authorities.add(certificate);
            added.map_err(|_| bad("CA_CERT", "valid certificate"))?;
        }
        let own = certificates("CLIENT_CERT")?;
        let key = self.credential("CLIENT_KEY")?;
        let key = PrivateKeyDer::from_pem_slice(key.reveal().as_bytes())
            .map_err(|_| bad("CLIENT_KEY", "private key"))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("the provider has ciphers of TLS 1.2 and 1.3")
            .with_root_certificates(authorities)
            .with_client_auth_cert(own, key)
            .map_err(|_| bad("CLIENT_KEY", "key of CLIENT_CERT"))
    }

    fn connect(&self) -> Result<StreamOwned<ClientConnection, TcpStream>, EncryptionError> {
        let tls = Arc::new(self.tls()?);
        let connected = self.endpoint.to_socket_addrs().and_then(|addresses| {
            let mut last = io::ErrorKind::NotFound.into();
            for address in addresses {
                match TcpStream::connect_timeout(&address, CONNECT_TIMEOUT) {
                    Ok(socket) => return Ok(socket),
                    Err(error) => last = error,
                }
            }
            Err(last)
        });
        let socket = connected.and_then(|socket| {
            socket.set_read_timeout(Some(self.read_timeout))?;
            socket.set_write_timeout(Some(self.write_timeout))?;
            Ok(socket)
        });
        let socket = socket.map_err(|error| self.unreachable("connect", &error))?;
        let client = ClientConnection::new(tls, self.server_name.clone());
        let client = client.map_err(|error| self.unreachable("connect", &error))?;
        Ok(StreamOwned::new(client, socket))
    }

    fn unreachable(&self, step: &str, error: &dyn std::error::Error) -> EncryptionError {
        let what = format!("KMIP, {step}, {}: {}", self.endpoint, error_chain(error));
        self.failed(Kind::Transient, what)
    }

    /// The server's answer to data and an initialization vector.
    fn ask(
        &self,
        operation: KmipOperation,
        data: &[u8],
        iv: &[u8],
    ) -> Result<Zeroizing<Vec<u8>>, EncryptionError> {
        let key = self.credential("UNIQUE_IDENTIFIER")?;
        let mut stream = self.connect()?;
        let exchanged = exchange(&mut stream, &request(operation, key.reveal(), data, iv));
        let answer = exchanged.map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                let (read, write) = (self.read_timeout, self.write_timeout);
                let what = format!(
                    "KMIP at {} did not answer in time (READ_TIMEOUT {read:?}, WRITE_TIMEOUT {write:?})",
                    self.endpoint
                );
                self.failed(Kind::Transient, what)
            }
            _ => self.unreachable("request", &error),
        })?;
        let item = answer.get(tag::BATCH_ITEM);
        if let Some(status) = item.and_then(|item| item.enumeration_of(tag::RESULT_STATUS))
            && status != SUCCESS
        {
            return Err(self.refused(operation, item.expect("it has a status")));
        }
        let payload = item.and_then(|item| item.get(tag::RESPONSE_PAYLOAD));
        let data = payload.and_then(|payload| payload.bytes_of(tag::DATA));
        let data = data.ok_or_else(|| {
            let what = format!(
                "KMIP at {} answered {operation:?} without data",
                self.endpoint
            );
            self.failed(Kind::Transient, what)
        })?;
        Ok(Zeroizing::new(data.to_vec()))
    }

    fn refused(&self, operation: KmipOperation, item: &Item) -> EncryptionError {
        let reason = item.enumeration_of(tag::RESULT_REASON);
        let kind = match reason {
            Some(reason::AUTHENTICATION_NOT_SUCCESSFUL | reason::PERMISSION_DENIED) => {
                Kind::Unauthenticated
            }
            None | Some(reason::GENERAL_FAILURE) => Kind::Transient,
            Some(_) => Kind::Precondition,
        };
        let message = item.text_of(tag::RESULT_MESSAGE).unwrap_or_default();
        let message: String = message.chars().take(300).collect();
        let what = format!(
            "KMIP at {} refused {operation:?}, reason {:#x}: {}",
            self.endpoint,
            reason.unwrap_or_default(),
            message.trim().replace('\n', " ")
        );
        self.failed(kind, what)
    }
}

/// Sends one request, and reads the answer.
fn exchange(
    stream: &mut StreamOwned<ClientConnection, TcpStream>,
    request: &Item,
) -> io::Result<Item> {
    stream.write_all(&request.encode())?;
    stream.flush()?;
    let mut header = [0; ttlv::HEADER];
    stream.read_exact(&mut header)?;
    let malformed = || {
        io::Error::new(
            io::ErrorKind::InvalidData,
            "the answer is no message of KMIP",
        )
    };
    let rest = ttlv::rest_of(header);
    if rest > LONGEST_ANSWER {
        return Err(malformed());
    }
    let mut answer = Zeroizing::new(vec![0; ttlv::HEADER + rest]);
    answer[..ttlv::HEADER].copy_from_slice(&header);
    stream.read_exact(&mut answer[ttlv::HEADER..])?;
    let answer = Item::decode(&answer).ok_or_else(malformed)?;
    match answer.tag {
        tag::RESPONSE_MESSAGE => Ok(answer),
        _ => Err(malformed()),
    }
}

fn request(operation: KmipOperation, key: &str, data: &[u8], iv: &[u8]) -> Item {
    let version = vec![
        Item::integer(tag::PROTOCOL_VERSION_MAJOR, 1),
        Item::integer(tag::PROTOCOL_VERSION_MINOR, 4),
    ];
    let header = vec![
        Item::structure(tag::PROTOCOL_VERSION, version),
        Item::integer(tag::BATCH_COUNT, 1),
    ];
    let cipher = vec![
        Item::enumeration(tag::BLOCK_CIPHER_MODE, CBC),
        Item::enumeration(tag::PADDING_METHOD, PKCS5),
        Item::enumeration(tag::CRYPTOGRAPHIC_ALGORITHM, AES),
    ];
    let payload = vec![
        Item::text(tag::UNIQUE_IDENTIFIER, key),
        Item::structure(tag::CRYPTOGRAPHIC_PARAMETERS, cipher),
        Item::bytes(tag::DATA, data),
        Item::bytes(tag::IV_COUNTER_NONCE, iv),
    ];
    let item = vec![
        Item::enumeration(tag::OPERATION, operation as u32),
        Item::structure(tag::REQUEST_PAYLOAD, payload),
    ];
    let message = vec![
        Item::structure(tag::REQUEST_HEADER, header),
        Item::structure(tag::BATCH_ITEM, item),
    ];
    Item::structure(tag::REQUEST_MESSAGE, message)
}

impl SealingService for Kmip {
    fn check(&self) -> Result<(), EncryptionError> {
        self.credential("UNIQUE_IDENTIFIER")?;
        self.tls().map(drop)
    }

    fn seal(&self, passphrase: &Secret) -> Result<String, EncryptionError> {
        let iv = random::<16>();
        let sealed = self.ask(KmipOperation::Encrypt, passphrase.reveal().as_bytes(), &iv)?;
        Ok(Sealed::new(&sealed, &iv).to_json())
    }

    fn open(&self, sealed: &str) -> Result<Secret, EncryptionError> {
        let (sealed, iv) = Sealed::bytes_of(sealed)?;
        let opened = self.ask(KmipOperation::Decrypt, &sealed, &iv)?;
        let text = str::from_utf8(&opened).map_err(|_| EncryptionError::Malformed)?;
        Ok(Secret::new(text.to_owned()))
    }
}

#[cfg(test)]
mod tests;
