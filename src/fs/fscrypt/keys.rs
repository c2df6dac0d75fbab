//! The keys of fscrypt: how one wraps another, and how a passphrase becomes one.
//!
//! ```text
//!  passphrase ─ Argon2id ┐
//!  raw key ──────────────┴▶ wraps a protector's key ─▶ wraps a policy's key ─▶ the kernel
//! ```
//!
//! A key is wrapped by AES-256-CTR and authenticated by HMAC-SHA256, under two keys that
//! HKDF-SHA256 derives from the wrapping one.

use aes::Aes256;
use argon2::{Algorithm, Argon2, Params, Version};
use ctr::{
    Ctr128BE,
    cipher::{KeyIvInit as _, StreamCipher as _},
};
use hkdf::Hkdf;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::{Digest as _, Sha256, Sha512};
use zeroize::Zeroizing;

use super::metadata::{HashingCosts, KeySource, Protector, WrappedKey};
use crate::{
    digest::hex,
    kernel::fscrypt::{KEY_BYTES, KeyId},
    secret::Secret,
};

/// A key that wraps others.
pub type WrappingKey = Zeroizing<[u8; 32]>;
/// The key of a policy.
pub type PolicyKey = Zeroizing<[u8; KEY_BYTES]>;

/// What Argon2id costs for a new protector: as much memory as a key slot of LUKS
/// (`--pbkdf-memory`).
pub const NEW_COSTS: HashingCosts = HashingCosts {
    time: 16,
    memory: 32 << 10,
    parallelism: 1,
};
/// A file system's author chooses the costs of its protectors: no more memory than this, in
/// KiB. The program fscrypt takes 128 MiB at most.
const MOST_MEMORY: i64 = 256 << 10;
/// Nor more work: KiB in all passes.
const MOST_WORK: i64 = 32 << 20;

/// Random bytes from the kernel.
pub fn random<const N: usize>() -> Zeroizing<[u8; N]> {
    let mut bytes = Zeroizing::new([0; N]);
    getrandom::fill(&mut *bytes).expect("the kernel has random bytes");
    bytes
}

/// Wraps a key.
pub fn wrap(with: &WrappingKey, key: &[u8]) -> WrappedKey {
    let (cipher_key, mac_key) = stretch(with);
    let iv = *random::<16>();
    let mut encrypted = key.to_vec();
    apply(&cipher_key, iv, &mut encrypted);
    let tag = mac(&mac_key, &iv, &encrypted).finalize().into_bytes();
    WrappedKey {
        iv: iv.to_vec(),
        encrypted_key: encrypted,
        hmac: tag.to_vec(),
    }
}

/// Unwraps a key of that many bytes; none if another key wraps it.
pub fn unwrap<const N: usize>(
    with: &WrappingKey,
    wrapped: &WrappedKey,
) -> Option<Zeroizing<[u8; N]>> {
    let (cipher_key, mac_key) = stretch(with);
    let checked = mac(&mac_key, &wrapped.iv, &wrapped.encrypted_key);
    checked.verify_slice(&wrapped.hmac).ok()?;
    let iv = <[u8; 16]>::try_from(&wrapped.iv[..]).ok()?;
    let mut key = Zeroizing::new(<[u8; N]>::try_from(&wrapped.encrypted_key[..]).ok()?);
    apply(&cipher_key, iv, &mut *key);
    Some(key)
}

fn stretch(with: &WrappingKey) -> (WrappingKey, WrappingKey) {
    let mut both = Zeroizing::new([0; 64]);
    Hkdf::<Sha256>::new(None, &**with)
        .expand(&[], &mut *both)
        .expect("64 bytes are a valid length");
    let mut keys = (WrappingKey::default(), WrappingKey::default());
    keys.0.copy_from_slice(&both[..32]);
    keys.1.copy_from_slice(&both[32..]);
    keys
}

fn apply(key: &WrappingKey, iv: [u8; 16], data: &mut [u8]) {
    Ctr128BE::<Aes256>::new(&(**key).into(), &iv.into()).apply_keystream(data);
}

fn mac(key: &WrappingKey, iv: &[u8], data: &[u8]) -> Hmac<Sha256> {
    let mac = Hmac::<Sha256>::new_from_slice(&**key).expect("HMAC takes a key of any length");
    mac.chain_update(iv).chain_update(data)
}

/// The identifier that the kernel gives to a policy's key.
pub fn id_of(key: &PolicyKey) -> KeyId {
    let mut id = KeyId::default();
    Hkdf::<Sha512>::new(None, &**key)
        .expand(b"fscrypt\0\x01", &mut id)
        .expect("16 bytes are a valid length");
    id
}

/// The descriptor of a protector's key.
pub fn descriptor_of(key: &WrappingKey) -> String {
    hex(&Sha512::digest(Sha512::digest(**key))[..8])
}

/// The first 32 bytes of a text, or all of it and zeros.
fn cut(secret: &Secret) -> WrappingKey {
    let mut key = WrappingKey::default();
    let text = secret.reveal().as_bytes();
    let bytes = text.len().min(key.len());
    key[..bytes].copy_from_slice(&text[..bytes]);
    key
}

/// Why a protector has no key for a secret.
#[derive(Debug, PartialEq, Eq)]
pub enum ProtectorError {
    /// It wraps the protector's key with another secret.
    Wrong,
    /// The protector is not valid; the text says why.
    Invalid(&'static str),
}

/// The protector's key, by a volume's secret. As a raw key ceph-csi takes the text's first 32
/// bytes. As a passphrase it takes all of the text; until 3.11 it took 32 bytes of it, too. Earlier
/// builds of this driver took the text without a newline at its end.
pub fn open(protector: &Protector, secret: &Secret) -> Result<WrappingKey, ProtectorError> {
    let wrapped = protector.wrapped_key.as_ref();
    let wrapped = wrapped.ok_or(ProtectorError::Invalid("it has no key"))?;
    let opened = match KeySource::try_from(protector.source) {
        Ok(KeySource::RawKey) => unwrap(&cut(secret), wrapped),
        Ok(KeySource::CustomPassphrase) => {
            let by = |text: &[u8]| Ok(unwrap(&hashed(protector, text)?, wrapped));
            let mut opened = by(secret.reveal().as_bytes())?;
            if opened.is_none() {
                opened = by(&*cut(secret))?;
            }
            if opened.is_none()
                && let Some(bare) = secret.without_newline()
            {
                opened = by(bare.reveal().as_bytes())?;
            }
            opened
        }
        _ => {
            return Err(ProtectorError::Invalid(
                "it has neither a passphrase nor a raw key",
            ));
        }
    };
    opened.ok_or(ProtectorError::Wrong)
}

/// The key by which a new protector's key is wrapped.
pub fn wrapping_key(protector: &Protector, secret: &Secret) -> Result<WrappingKey, ProtectorError> {
    match protector.source() {
        KeySource::RawKey => Ok(cut(secret)),
        _ => hashed(protector, secret.reveal().as_bytes()),
    }
}

fn hashed(protector: &Protector, passphrase: &[u8]) -> Result<WrappingKey, ProtectorError> {
    let costs = protector.costs.clone().unwrap_or_default();
    let is_bearable =
        costs.memory <= MOST_MEMORY && costs.time.saturating_mul(costs.memory) <= MOST_WORK;
    let number = |number: i64| u32::try_from(number).unwrap_or(0);
    let params = Params::new(
        number(costs.memory),
        number(costs.time),
        number(costs.parallelism),
        Some(32),
    );
    let Some(params) = params.ok().filter(|_| is_bearable) else {
        return Err(ProtectorError::Invalid(
            "its costs of Argon2id are invalid, or too high",
        ));
    };
    let mut key = WrappingKey::default();
    Argon2::new(Algorithm::Argon2id, Version::V0x13, params)
        .hash_password_into(passphrase, &protector.salt, &mut *key)
        .map_err(|_| ProtectorError::Invalid("its salt is invalid"))?;
    Ok(key)
}
