//! AWS KMS: a key that never leaves it, which seals passphrases.
//!
//! As ceph-csi has it (`aws-metadata`), the image's metadata has what Encrypt answered, in
//! base64; there is no encryption context, and Decrypt names no key.
//!
//! <https://docs.aws.amazon.com/kms/latest/APIReference/API_Encrypt.html>

use std::{path::PathBuf, time::SystemTime};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use prost_types::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};
use ureq::http::Uri;
use zeroize::Zeroizing;

use super::{Lookup, SealingService, http, read};
use crate::{
    ceph::csi_format::encryption::EncryptionError, error_chain, kind::Kind, secret::Secret,
};

mod signature;

use signature::Signer;

/// No answer that this driver reads is longer.
const LONGEST_ANSWER: u64 = 1 << 16;
const CONTENT_TYPE: &str = "application/x-amz-json-1.1";

/// A key of AWS KMS.
#[derive(Debug)]
pub struct AwsKms {
    /// The id of the KMS, for errors.
    id: String,
    region: String,
    /// The URI of the service.
    endpoint: String,
    /// The mounted Secret, with the keys of [`AwsKms::credential`].
    credentials: PathBuf,
}

/// A section of ceph-csi's configuration.
#[derive(Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
struct AwsSection {
    aws_region: String,
    #[serde(default = "default_secret")]
    kms_secret_name: String,
}

fn default_secret() -> String {
    "ceph-csi-aws-credentials".to_owned()
}

/// What the service answered.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct AwsAnswer {
    #[serde(default)]
    ciphertext_blob: String,
    #[serde(default)]
    plaintext: String,
}

/// An error of the service.
#[derive(Default, Deserialize)]
#[serde(default)]
struct AwsError {
    #[serde(rename = "__type")]
    kind: String,
    #[serde(alias = "Message")]
    message: String,
}

impl AwsError {
    /// Its name, which a namespace may precede.
    fn name(&self) -> &str {
        self.kind.rsplit('#').next().unwrap_or_default()
    }

    fn kind(&self, status: u16) -> Kind {
        match self.name() {
            "AccessDeniedException"
            | "ExpiredTokenException"
            | "IncompleteSignature"
            | "IncompleteSignatureException"
            | "InvalidClientTokenId"
            | "InvalidSignatureException"
            | "MissingAuthenticationToken"
            | "MissingAuthenticationTokenException"
            | "NotAuthorized"
            | "OptInRequired"
            | "UnrecognizedClientException" => Kind::Unauthenticated,
            "DependencyTimeoutException"
            | "KMSInternalException"
            | "KeyUnavailableException"
            | "RequestExpired"
            | "ThrottlingException" => Kind::Transient,
            _ if status == 400 => Kind::Precondition,
            _ => Kind::Transient,
        }
    }
}

impl AwsKms {
    /// The key of a section of ceph-csi's configuration.
    pub(super) fn of(lookup: &Lookup<'_>, section: &Value) -> Result<Self, EncryptionError> {
        let AwsSection {
            aws_region: region,
            kms_secret_name,
        } = lookup.parse(section)?;
        let is_name = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        if region.is_empty() || !region.bytes().all(is_name) {
            let why = format!("AWS_REGION: {region:?} is not the name of a region");
            return Err(lookup.invalid(why));
        }
        let domain = if region.starts_with("cn-") {
            "amazonaws.com.cn"
        } else {
            "amazonaws.com"
        };
        Ok(Self {
            id: lookup.id.to_owned(),
            endpoint: format!("https://kms.{region}.{domain}/"),
            region,
            credentials: lookup.secret("KMS_SECRET_NAME", &[&kms_secret_name])?,
        })
    }

    fn failed(&self, kind: Kind, what: String) -> EncryptionError {
        EncryptionError::Service {
            id: self.id.clone(),
            what,
            kind,
        }
    }

    /// A value of the mounted Secret: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`,
    /// `AWS_CMK_ARN`.
    fn credential(&self, key: &str) -> Result<Secret, EncryptionError> {
        read(&self.credentials.join(key))
    }

    /// `AWS_SESSION_TOKEN`, which only temporary credentials have.
    fn session_token(&self) -> Result<Option<Secret>, EncryptionError> {
        match self.credential("AWS_SESSION_TOKEN") {
            Ok(token) if token.reveal().is_empty() => Ok(None),
            Err(EncryptionError::Config { source, .. })
                if source.kind() == std::io::ErrorKind::NotFound =>
            {
                Ok(None)
            }
            token => token.map(Some),
        }
    }

    /// One request of that operation.
    fn ask(&self, operation: &str, body: &Value) -> Result<AwsAnswer, EncryptionError> {
        let failed = |error: &dyn std::error::Error| {
            let what = format!("{operation}, {}: {}", self.endpoint, error_chain(error));
            self.failed(Kind::Transient, what)
        };
        let uri: Uri = self.endpoint.parse().map_err(|error| failed(&error))?;
        let host = uri.authority().map_or("", |authority| authority.as_str());
        let body = Zeroizing::new(body.to_string());
        let target = format!("TrentService.{operation}");
        let time = basic_format(SystemTime::now());
        let token = self.session_token()?;
        let mut headers = vec![
            ("content-type", CONTENT_TYPE),
            ("host", host),
            ("x-amz-date", &time),
        ];
        if let Some(token) = &token {
            headers.push(("x-amz-security-token", token.reveal()));
        }
        headers.push(("x-amz-target", &target));
        let key_id = self.credential("AWS_ACCESS_KEY_ID")?;
        let signer = Signer {
            key_id: key_id.reveal(),
            key: &self.credential("AWS_SECRET_ACCESS_KEY")?,
            region: &self.region,
            service: "kms",
        };
        let authorization = signer.authorize(&headers, &time, &body);
        let agent = http::config().build().new_agent();
        let mut request = agent
            .post(uri.clone())
            .header("authorization", &authorization);
        for (name, value) in headers.into_iter().filter(|(name, _)| *name != "host") {
            request = request.header(name, value);
        }
        let mut response = request
            .send(body.as_str())
            .map_err(|error| failed(&error))?;
        let status = response.status().as_u16();
        let limited = response.body_mut().with_config().limit(LONGEST_ANSWER);
        let text = limited.read_to_string().map(Zeroizing::new);
        let text = text.map_err(|error| failed(&error))?;
        if status != 200 {
            let refusal: AwsError = serde_json::from_str(&text).unwrap_or_default();
            let message: String = refusal.message.chars().take(300).collect();
            let what = format!(
                "AWS KMS at {} refused {operation}, status {status}, {}: {}",
                self.endpoint,
                refusal.name(),
                message.trim().replace('\n', " ")
            );
            return Err(self.failed(refusal.kind(status), what));
        }
        // serde's error would show a part of the text.
        serde_json::from_str(&text).map_err(|_| self.no_answer(operation))
    }

    fn no_answer(&self, operation: &str) -> EncryptionError {
        let endpoint = &self.endpoint;
        let what = format!("AWS KMS at {endpoint} answered {operation} without what it asks for");
        self.failed(Kind::Transient, what)
    }
}

/// As `20150830T123600Z`.
fn basic_format(time: SystemTime) -> String {
    let mut time = Timestamp::from(time);
    time.nanos = 0;
    time.to_string().replace(['-', ':'], "")
}

impl SealingService for AwsKms {
    fn check(&self) -> Result<(), EncryptionError> {
        for key in ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_CMK_ARN"] {
            self.credential(key)?;
        }
        Ok(())
    }

    fn seal(&self, passphrase: &Secret) -> Result<String, EncryptionError> {
        let key = self.credential("AWS_CMK_ARN")?;
        let plaintext = Zeroizing::new(STANDARD.encode(passphrase.reveal()));
        let body = json!({"KeyId": key.reveal(), "Plaintext": *plaintext});
        let sealed = self.ask("Encrypt", &body)?.ciphertext_blob;
        match STANDARD.decode(&sealed) {
            Ok(bytes) if !bytes.is_empty() => Ok(sealed),
            _ => Err(self.no_answer("Encrypt")),
        }
    }

    fn open(&self, sealed: &str) -> Result<Secret, EncryptionError> {
        if sealed.is_empty() || STANDARD.decode(sealed).is_err() {
            return Err(EncryptionError::Malformed);
        }
        let answer = self.ask("Decrypt", &json!({"CiphertextBlob": sealed}))?;
        let plaintext = Zeroizing::new(answer.plaintext);
        let opened = STANDARD.decode(&*plaintext).map(Zeroizing::new);
        let opened = opened.map_err(|_| self.no_answer("Decrypt"))?;
        match str::from_utf8(&opened) {
            Ok(text) if !text.is_empty() => Ok(Secret::new(text.to_owned())),
            _ => Err(EncryptionError::Malformed),
        }
    }
}

#[cfg(test)]
mod tests;
