//! The files below `.fscrypt`, in the format of the program fscrypt: its
//! `metadata/metadata.proto`.

use prost::Message;

/// How the key of a protector is obtained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum KeySource {
    None = 0,
    PamPassphrase = 1,
    /// By Argon2id from a passphrase.
    CustomPassphrase = 2,
    /// The secret is the key.
    RawKey = 3,
}

/// The costs of Argon2id.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct HashingCosts {
    #[prost(int64, tag = "2")]
    pub time: i64,
    /// In KiB.
    #[prost(int64, tag = "3")]
    pub memory: i64,
    #[prost(int64, tag = "4")]
    pub parallelism: i64,
}

/// A key that another one wraps.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct WrappedKey {
    #[prost(bytes = "vec", tag = "1")]
    pub iv: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub encrypted_key: Vec<u8>,
    #[prost(bytes = "vec", tag = "3")]
    pub hmac: Vec<u8>,
}

/// A key that wraps those of policies, and is wrapped by a secret from elsewhere.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Protector {
    #[prost(string, tag = "1")]
    pub descriptor: String,
    #[prost(enumeration = "KeySource", tag = "2")]
    pub source: i32,
    #[prost(string, tag = "3")]
    pub name: String,
    #[prost(message, optional, tag = "4")]
    pub costs: Option<HashingCosts>,
    #[prost(bytes = "vec", tag = "5")]
    pub salt: Vec<u8>,
    #[prost(message, optional, tag = "7")]
    pub wrapped_key: Option<WrappedKey>,
}

/// The ciphers of a policy, by their numbers in the kernel.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct EncryptionOptions {
    /// Names are padded to multiples of so many bytes.
    #[prost(int64, tag = "1")]
    pub padding: i64,
    #[prost(int32, tag = "2")]
    pub contents: i32,
    #[prost(int32, tag = "3")]
    pub filenames: i32,
    #[prost(int64, tag = "4")]
    pub policy_version: i64,
}

/// A policy's key, wrapped by a protector's.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct WrappedPolicyKey {
    #[prost(string, tag = "1")]
    pub protector: String,
    #[prost(message, optional, tag = "2")]
    pub wrapped_key: Option<WrappedKey>,
}

/// The policy of a directory.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PolicyData {
    /// The key's identifier, in hexadecimal digits.
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(message, optional, tag = "2")]
    pub options: Option<EncryptionOptions>,
    #[prost(message, repeated, tag = "3")]
    pub wrapped_keys: Vec<WrappedPolicyKey>,
}
