//! Replacing the passphrase of a LUKS2 header.
//!
//! ```text
//!  before      slot 0: old
//!  token       {"type": "uring-csi-rotation", "slots": [0, 31], "iterations": N, "replaces": S}
//!  aside       slot 0: old    slot 31: old
//!              slot 0: -      slot 31: old
//!  new         slot 0: new    slot 31: old
//!  store       the caller stores the new one: from here on it counts
//!  after       slot 0: new    slot 31: -        and no token
//! ```
//!
//! The header opens with the stored passphrase at each of these steps. The token, which
//! cryptsetup and ceph-csi ignore, names the slots of the rotation, so that the next one
//! finishes one that was interrupted: of these slots it keeps one that the stored passphrase
//! opens. Meanwhile an administrator may have added a key to one of them. So the rotation
//! derives its keys by PBKDF2 with a random number of iterations, which the token has before
//! there is a key: a slot with another number is none of its own, and stays. The key that it
//! replaces it knows again by the salt: a killed luksKillSlot has wiped that key, but the
//! header still has the slot, which no passphrase opens.
//! The passphrase ends in slot 0, where ceph-csi's rotation replaces it, unless an
//! administrator has that.
//!
//! LUKS2 On-Disk Format Specification, 3.3 and 3.4: a token may have keys of its own, and
//! belong to no slot.

use serde::Deserialize;
use serde_json::json;

use super::{LuksError, cryptsetup, derive_key, header::LuksHeader, run};
use crate::{crash_point, kernel::block::BlockDev, secret::Secret};

/// The type of the token of a rotation under way.
const TOKEN: &str = "uring-csi-rotation";
/// The slots of a LUKS2 header (`LUKS2_KEYSLOTS_MAX`).
const SLOTS: u32 = 32;
/// The least that cryptsetup takes.
const LEAST_ITERATIONS: u32 = 1000;

/// What the token of a rotation under way tells.
#[derive(Debug, Default, Deserialize)]
struct Rotation {
    slots: Vec<u32>,
    /// Of the keys that it adds.
    iterations: u32,
    /// The salt of the key that it replaces; empty in tokens of older versions.
    #[serde(default)]
    replaces: String,
}

/// A header whose passphrase is to be replaced.
#[derive(Debug)]
pub struct KeySlots<'a> {
    node: String,
    /// Its failure domain.
    domain: &'a str,
}

impl<'a> KeySlots<'a> {
    pub fn new(under: &BlockDev, domain: &'a str) -> Self {
        Self {
            node: under.node.display().to_string(),
            domain,
        }
    }

    /// Removes what an interrupted rotation has left: of its key slots those that the stored
    /// passphrase does not need. `settle` stores that passphrase once more, so that no late
    /// request of the interrupted one can replace it.
    pub fn finish<E: From<LuksError>>(
        &self,
        stored: &Secret,
        settle: impl Fn() -> Result<(), E>,
    ) -> Result<(), E> {
        let header = self.header()?;
        for (id, rotation) in header.rotations() {
            settle()?;
            let slots = rotation.slots.iter().copied();
            let slots: Vec<u32> = slots
                .filter(|slot| header.keyslots.contains_key(slot))
                .collect();
            if let Some(kept) = self.opening(&slots, stored)? {
                for slot in slots.into_iter().filter(|slot| *slot != kept) {
                    if header.may_remove(&rotation, slot) {
                        self.kill(slot, stored)?;
                    }
                }
            }
            self.remove_token(id)?;
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
        let aside = (0..SLOTS).rfind(|slot| !slots.contains(slot));
        let aside = aside.ok_or_else(|| LuksError::NoSlot { node: node() })?;
        let is_free = |slot: &u32| !slots.contains(slot) && *slot != aside;
        let to = (0..current).find(is_free).unwrap_or(current);
        let iterations = header.unused_iterations();
        // `finish` prefers the first, and never removes the current key.
        let named = [current, aside, to];
        let named = if to == current { &named[..2] } else { &named };
        let replaces = header.keyslots[&current].salt().unwrap_or_default();
        self.add_token(named, iterations, replaces)?;
        crash_point();
        self.add((aside, iterations), old, old)?;
        crash_point();
        self.kill(current, old)?;
        crash_point();
        self.add((to, iterations), old, new)?;
        crash_point();
        if self.opening(&[to], new)?.is_none() {
            return Err(LuksError::Passphrase { node: node() }.into());
        }
        store()?;
        crash_point();
        self.kill(aside, new)?;
        crash_point();
        for (id, _) in self.header()?.rotations() {
            self.remove_token(id)?;
        }
        Ok(())
    }

    fn header(&self) -> Result<LuksHeader, LuksError> {
        LuksHeader::read(&self.node)?.ok_or_else(|| {
            let node = self.node.clone().into();
            LuksError::Unfinished { node }
        })
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

    /// Adds a passphrase to a free slot, whose key is derived with that many iterations;
    /// cryptsetup reads both passphrases from its standard input, the old one by its length.
    fn add(
        &self,
        (slot, iterations): (u32, u32),
        old: &Secret,
        new: &Secret,
    ) -> Result<(), LuksError> {
        let slot = format!("--key-slot={slot}");
        let iterations = format!("--pbkdf-force-iterations={iterations}");
        let length = format!("--keyfile-size={}", old.reveal().len());
        let args = [
            "--batch-mode",
            "--pbkdf=pbkdf2",
            &iterations,
            &slot,
            &length,
            "--key-file=-",
            &self.node,
            "-",
        ];
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

    fn add_token(&self, slots: &[u32], iterations: u32, replaces: &str) -> Result<(), LuksError> {
        let token = json!({
            "type": TOKEN,
            "keyslots": [],
            "slots": slots,
            "iterations": iterations,
            "replaces": replaces,
        });
        let token = token.to_string();
        let args = ["import", "--json-file=-", &self.node];
        run("token", &args, &self.node, token.as_bytes(), || {}).map(drop)
    }

    fn remove_token(&self, id: u32) -> Result<(), LuksError> {
        let id = format!("--token-id={id}");
        cryptsetup("token", &["remove", &id, &self.node], &self.node).map(drop)
    }
}

impl LuksHeader {
    /// A random number of iterations that no slot has. It is small: the passphrase is random,
    /// so a guess may be cheap ([`super::PassphraseOrigin::Random`]).
    fn unused_iterations(&self) -> u32 {
        let mut bytes = [0; 2];
        getrandom::fill(&mut bytes).expect("the kernel has random bytes");
        let from = LEAST_ITERATIONS + u32::from(u16::from_le_bytes(bytes));
        let is_used = |number| (self.keyslots.values()).any(|slot| slot.iterations() == number);
        let unused = (from..=u32::MAX).find(|number| !is_used(Some(*number)));
        unused.expect("there are fewer slots than numbers")
    }

    /// The tokens of rotations under way.
    fn rotations(&self) -> impl Iterator<Item = (u32, Rotation)> {
        let tokens = self.tokens.iter();
        let rotations = tokens.filter(|(_, token)| token["type"] == TOKEN);
        // Of one that does not tell its slots, none may be removed.
        rotations.map(|(id, token)| (*id, Rotation::deserialize(token).unwrap_or_default()))
    }

    /// Whether the rotation has added the key in the slot, or was to replace it.
    fn may_remove(&self, rotation: &Rotation, slot: u32) -> bool {
        let Some(slot) = self.keyslots.get(&slot) else {
            return false;
        };
        let is_replaced = !rotation.replaces.is_empty() && slot.salt() == Some(&rotation.replaces);
        slot.iterations() == Some(rotation.iterations) || is_replaced
    }
}

#[cfg(test)]
mod tests;
