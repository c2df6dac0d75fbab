//! The Ceph user of a request.

use base64::{Engine, prelude::BASE64_STANDARD};
use zeroize::Zeroizing;

use crate::secret::{Secret, Secrets};

/// A CephX user and its key.
#[derive(Clone, Debug)]
pub struct Credentials {
    /// The user's id, without `client.`.
    pub user: String,
    /// The key as keyrings have it, in base64; its form has been checked.
    pub key: Secret,
}

/// Why the secrets of a request hold no credentials. The text never contains a key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CredentialsError {
    /// A secret is missing.
    ///
    /// Remedy: add it to the Secret: userID and userKey, of `ceph auth get client.USER`.
    #[error("the secret has no {0}")]
    Missing(&'static str),
    /// The user's id has the prefix `client.`, or characters that the line for krbd does
    /// not allow.
    #[error("the secret's {0} is no user id; use letters, digits and ._-, without \"client.\"")]
    User(&'static str),
    /// The key's form is wrong.
    #[error("the secret's {0} is no CephX key; use what `ceph auth get-key` prints")]
    Key(&'static str),
}

impl Credentials {
    /// The credentials in a request's secrets: `userID` and `userKey`, or, as
    /// older volumes have them, `adminID` and `adminKey`; or, as volumes migrated
    /// from the in-tree driver have them, `key` and perhaps `adminId`.
    pub fn from_secrets(secrets: &Secrets) -> Result<Self, CredentialsError> {
        if secrets.get("key").is_some() {
            let user = secrets.get("adminId").map_or("admin", Secret::reveal);
            return Self::new(("adminId", user), ("key", secrets.get("key")));
        }
        let older = secrets.get("userID").is_none() && secrets.get("adminID").is_some();
        let (id, key) = if older {
            ("adminID", "adminKey")
        } else {
            ("userID", "userKey")
        };
        let user = secrets.get(id).ok_or(CredentialsError::Missing(id))?;
        Self::new((id, user.reveal()), (key, secrets.get(key)))
    }

    fn new(
        (id, user): (&'static str, &str),
        (name, key): (&'static str, Option<&Secret>),
    ) -> Result<Self, CredentialsError> {
        let key = key.ok_or(CredentialsError::Missing(name))?.reveal().trim();
        // The id becomes part of the line that krbd parses at spaces and commas.
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if !user.chars().all(allowed) || user.starts_with("client.") {
            return Err(CredentialsError::User(id));
        }
        if decode(key).is_none() {
            return Err(CredentialsError::Key(name));
        }
        Ok(Self {
            user: user.to_owned(),
            key: Secret::new(key.to_owned()),
        })
    }

    /// The key in binary, as the kernel's keyring takes it.
    pub fn key_bytes(&self) -> Zeroizing<Vec<u8>> {
        decode(self.key.reveal()).unwrap_or_default()
    }
}

/// The format of a key, in base64: type (16 bits, little endian), creation time (seconds and
/// nanoseconds, 32 bits each), length (16 bits), and the key itself (`CryptoKey::encode` of
/// Ceph's `auth/Crypto.h`).
fn decode(key: &str) -> Option<Zeroizing<Vec<u8>>> {
    const HEADER: usize = 12;
    let bytes = Zeroizing::new(BASE64_STANDARD.decode(key).ok()?);
    let (header, secret) = bytes.split_at_checked(HEADER)?;
    let length = usize::from(u16::from_le_bytes([header[10], header[11]]));
    let typed = header[..2] != [0, 0];
    (typed && length == secret.len() && length >= 16).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    const SHORT: &str = "AQBRnvdlAAAAABAAdG9vIHNob3J0";

    fn good_key() -> String {
        let mut bytes = vec![1, 0];
        bytes.extend([7; 8]);
        bytes.extend([16, 0]);
        bytes.extend([9; 16]);
        BASE64_STANDARD.encode(bytes)
    }

    fn read(given: &[(&str, &str)]) -> Result<Credentials, CredentialsError> {
        let own = |&(name, value): &(&str, &str)| (name.to_owned(), value.to_owned());
        let map: HashMap<_, _> = given.iter().map(own).collect();
        Credentials::from_secrets(&map.into())
    }

    #[test]
    fn each_kind_of_secret_is_read() {
        let key = good_key();
        let user = |given: &[(&str, &str)]| read(given).unwrap().user;
        assert_eq!(user(&[("userID", "csi"), ("userKey", &key)]), "csi");
        assert_eq!(user(&[("adminID", "old"), ("adminKey", &key)]), "old");
        assert_eq!(user(&[("key", &key)]), "admin");
        assert_eq!(user(&[("key", &key), ("adminId", "kube")]), "kube");
        let with_newline = format!("{key}\n");
        let credentials = read(&[("userID", "csi"), ("userKey", &with_newline)]).unwrap();
        assert_eq!(credentials.key.reveal(), key);
        assert_eq!(credentials.key_bytes().len(), 28);
    }

    #[test]
    fn missing_or_malformed_secrets_are_named() {
        use CredentialsError::{Key, Missing, User};
        let key = good_key();
        let error = |given: &[(&str, &str)]| read(given).unwrap_err();
        assert_eq!(error(&[]), Missing("userID"));
        assert_eq!(error(&[("userID", "csi")]), Missing("userKey"));
        assert_eq!(error(&[("adminID", "a")]), Missing("adminKey"));
        for user in ["a,b", "a b", "client.csi"] {
            assert_eq!(
                error(&[("userID", user), ("userKey", &key)]),
                User("userID")
            );
        }
        // The length field differs from the length of the key.
        assert_eq!(
            error(&[("userID", "a"), ("userKey", SHORT)]),
            Key("userKey")
        );
    }

    proptest! {
        #[test]
        fn no_error_shows_a_key(key in "\\PC{1,60}") {
            if let Err(error) = read(&[("userID", "csi"), ("userKey", &key)]) {
                let shown = format!("{error} {error:?}");
                prop_assert!(key.len() < 8 || !shown.contains(&key));
            }
        }
    }
}
