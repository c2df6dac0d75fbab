//! Replacing the passphrase of a LUKS2 header.
//!
//! ```text
//!  before      slot 0: old
//!  token       {"type": "uring-csi-rotation", "slots": ["0", "1"]}
//!  aside       slot 0: old    slot 1: old
//!              slot 0: -      slot 1: old
//!  new         slot 0: new    slot 1: old
//!  store       the caller stores the new one: from here on it counts
//!  after       slot 0: new    slot 1: -        and no token
//! ```
//!
//! The header opens with the stored passphrase at each of these steps. The token, which
//! cryptsetup and ceph-csi ignore, names the two slots, so that the next rotation finishes
//! one that was interrupted: of the two it keeps the slot that the stored passphrase opens.
//! It leaves all other slots alone, which are an administrator's. The passphrase ends in slot
//! 0, where ceph-csi's rotation replaces it, unless an administrator has that.
//!
//! LUKS2 On-Disk Format Specification, 3.3 and 3.4: a token may have keys of its own, and
//! belong to no slot.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};

use super::{LuksError, PassphraseOrigin, cryptsetup, derive_key, failed, run};
use crate::{crash_point, kernel::block::BlockDev, secret::Secret};

/// The type of the token of a rotation under way.
const TOKEN: &str = "uring-csi-rotation";
/// The slots of a LUKS2 header (`LUKS2_KEYSLOTS_MAX`).
const SLOTS: u32 = 32;

/// A header whose passphrase is to be replaced.
#[derive(Debug)]
pub struct KeySlots<'a> {
    node: String,
    /// Its failure domain.
    domain: &'a str,
}

/// A header's metadata (`luksDump --dump-json-metadata`).
#[derive(Debug, Deserialize)]
struct LuksHeader {
    keyslots: BTreeMap<u32, Value>,
    tokens: BTreeMap<u32, LuksToken>,
}

/// A token; `slots` is of a rotation's own.
#[derive(Debug, Deserialize)]
struct LuksToken {
    r#type: String,
    #[serde(default)]
    slots: Vec<String>,
}

impl<'a> KeySlots<'a> {
    pub fn new(under: &BlockDev, domain: &'a str) -> Self {
        Self {
            node: under.node.display().to_string(),
            domain,
        }
    }

    /// Removes what an interrupted rotation has left: of its two slots the one that the
    /// stored passphrase does not need. `settle` stores that passphrase once more, so that
    /// no late request of the interrupted one can replace it.
    pub fn finish<E: From<LuksError>>(
        &self,
        stored: &Secret,
        settle: impl Fn() -> Result<(), E>,
    ) -> Result<(), E> {
        let header = self.header()?;
        let tokens = header.tokens.iter();
        for (id, token) in tokens.filter(|(_, token)| token.r#type == TOKEN) {
            settle()?;
            let slots = token.slots.iter().filter_map(|slot| slot.parse().ok());
            let slots: Vec<u32> = slots
                .filter(|slot| header.keyslots.contains_key(slot))
                .collect();
            if let Some(kept) = self.opening(&slots, stored)? {
                for slot in slots.iter().filter(|slot| **slot != kept) {
                    self.kill(*slot, stored)?;
                }
            }
            self.remove_token(*id)?;
        }
        Ok(())
    }

    /// Replaces the passphrase. `store` stores the new one.
    pub fn replace<E: From<LuksError>>(
        &self,
        old: &Secret,
        new: &Secret,
        store: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let header = self.header()?;
        let slots: Vec<u32> = header.keyslots.keys().copied().collect();
        let node = || self.node.clone().into();
        let current = self.opening(&slots, old)?;
        let current = current.ok_or_else(|| LuksError::Passphrase { node: node() })?;
        let free = (0..SLOTS).find(|slot| !slots.contains(slot));
        let free = free.ok_or_else(|| LuksError::NoSlot { node: node() })?;
        self.add_token([current, free])?;
        crash_point();
        // The lowest free slot is 0 unless that is the current one, or an administrator's.
        let (from, to) = if current == 0 {
            self.add(free, old, old)?;
            crash_point();
            self.kill(current, old)?;
            crash_point();
            (free, current)
        } else {
            (current, free)
        };
        self.add(to, old, new)?;
        crash_point();
        if self.opening(&[to], new)?.is_none() {
            return Err(LuksError::Passphrase { node: node() }.into());
        }
        store()?;
        crash_point();
        self.kill(from, new)?;
        crash_point();
        for id in self.header()?.tokens_of_rotations() {
            self.remove_token(id)?;
        }
        Ok(())
    }

    fn header(&self) -> Result<LuksHeader, LuksError> {
        let args = ["--dump-json-metadata", &self.node];
        let dump = cryptsetup("luksDump", &args, &self.node)?;
        serde_json::from_slice(&dump)
            .map_err(|error| failed(format!("read the LUKS header of {}", self.node))(error.into()))
    }

    /// The first of these slots that the passphrase opens.
    fn opening(&self, slots: &[u32], passphrase: &Secret) -> Result<Option<u32>, LuksError> {
        for slot in slots {
            let slot_arg = format!("--key-slot={slot}");
            let args = ["--test-passphrase", &slot_arg, "--key-file=-", &self.node];
            match derive_key("open", &args, &self.node, passphrase.reveal(), self.domain) {
                Ok(_) => return Ok(Some(*slot)),
                Err(error) if error.is_no_permission() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Adds a passphrase to a free slot; cryptsetup reads both from its standard input, the
    /// old one by its length.
    fn add(&self, slot: u32, old: &Secret, new: &Secret) -> Result<(), LuksError> {
        let slot = format!("--key-slot={slot}");
        let length = format!("--keyfile-size={}", old.reveal().len());
        let fixed = [
            "--batch-mode",
            &slot,
            &length,
            "--key-file=-",
            &self.node,
            "-",
        ];
        let args = [PassphraseOrigin::Random.derivation(), &fixed].concat();
        let both = Secret::new([old.reveal(), new.reveal()].concat());
        derive_key("luksAddKey", &args, &self.node, both.reveal(), self.domain).map(drop)
    }

    /// Kills a slot. The passphrase opens another: cryptsetup, which would kill the last
    /// one, too, checks only that it opens any.
    fn kill(&self, slot: u32, remaining: &Secret) -> Result<(), LuksError> {
        let others: Vec<u32> = self
            .header()?
            .keyslots
            .into_keys()
            .filter(|other| *other != slot)
            .collect();
        if self.opening(&others, remaining)?.is_none() {
            let node = self.node.clone().into();
            return Err(LuksError::Passphrase { node });
        }
        let slot = slot.to_string();
        let args = ["--batch-mode", "--key-file=-", &self.node, &slot];
        derive_key(
            "luksKillSlot",
            &args,
            &self.node,
            remaining.reveal(),
            self.domain,
        )
        .map(drop)
    }

    fn add_token(&self, slots: [u32; 2]) -> Result<(), LuksError> {
        let slots = slots.map(|slot| slot.to_string());
        let token = json!({"type": TOKEN, "keyslots": [], "slots": slots}).to_string();
        let args = ["import", "--json-file=-", &self.node];
        run("token", &args, &self.node, token.as_bytes(), || {}).map(drop)
    }

    fn remove_token(&self, id: u32) -> Result<(), LuksError> {
        let id = format!("--token-id={id}");
        cryptsetup("token", &["remove", &id, &self.node], &self.node).map(drop)
    }
}

impl LuksHeader {
    fn tokens_of_rotations(&self) -> Vec<u32> {
        let of_rotation = |(id, token): (&u32, &LuksToken)| (token.r#type == TOKEN).then_some(*id);
        self.tokens.iter().filter_map(of_rotation).collect()
    }
}

#[cfg(test)]
mod tests;
