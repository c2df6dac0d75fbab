//! Volume and snapshot handles of pools.
//!
//! ```text
//! vol.shared.POOL.UUID               a volume in a shared pool
//! vol.local-NODEHASH.POOL.UUID       a volume in that node's own pool
//! snap.….UUID                        the same for snapshots
//! group.….UUID                       the same for group snapshots
//! ```
//!
//! A handle locates its image without a catalogue: it has the pool's name, the image's
//! uuid, and for local pools the first 12 hex digits of the SHA-256 of the node's id. A
//! text of any other form is no handle of this driver.

use std::{fmt, str::FromStr};

use uuid::Uuid;

use super::{Pool, Scope, spec::is_name};
use crate::digest;

/// The longest handle: 5 + 1 + 18 + 1 + 63 + 1 + 36 = 125 bytes, within
/// the 128 that the CSI specification allows a string.
const _: () = assert!(5 + 1 + "local-".len() + 12 + 1 + 63 + 1 + 36 <= 128);

/// The node that a local pool belongs to, by the hash of its id.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeHash(String);

impl NodeHash {
    /// The first 12 hex digits of the SHA-256 of a node's id.
    pub fn of(node_id: &str) -> Self {
        let mut digits = digest::sha256_hex(node_id);
        digits.truncate(12);
        Self(digits)
    }

    fn parse(text: &str) -> Option<Self> {
        let digit = |b: u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
        (text.len() == 12 && text.bytes().all(digit)).then(|| Self(text.to_owned()))
    }
}

impl fmt::Display for NodeHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The parts of a handle.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Parts {
    node: Option<NodeHash>,
    pool: String,
    id: Uuid,
}

impl Parts {
    fn parse(kind: &str, text: &str) -> Option<Self> {
        let mut fields = text.split('.');
        let mut next = || fields.next();
        let (kind_field, place, pool, id) = (next()?, next()?, next()?, next()?);
        if kind_field != kind || next().is_some() || !is_name(pool) {
            return None;
        }
        let node = match place.strip_prefix("local-") {
            Some(hash) => Some(NodeHash::parse(hash)?),
            None if place == "shared" => None,
            None => return None,
        };
        let uuid = Uuid::try_parse(id).ok()?;
        // Only the canonical spelling, or a volume would have several handles.
        (uuid.hyphenated().to_string() == id).then(|| Self {
            node,
            pool: pool.to_owned(),
            id: uuid,
        })
    }

    /// The pool's name.
    pub fn pool(&self) -> &str {
        &self.pool
    }

    /// Whether the handle names a node's local pool.
    pub fn is_local(&self) -> bool {
        self.node.is_some()
    }

    /// Whether this node can reach the pool: it is shared, or this node's local pool.
    pub fn is_reachable_from(&self, node_id: Option<&str>) -> bool {
        match &self.node {
            None => true,
            Some(hash) => node_id.is_some_and(|id| *hash == NodeHash::of(id)),
        }
    }

    fn write(&self, kind: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, pool, id } = self;
        match node {
            Some(hash) => write!(f, "{kind}.local-{hash}.{pool}.{id}"),
            None => write!(f, "{kind}.shared.{pool}.{id}"),
        }
    }
}

/// The text is no handle of this driver.
///
/// Remedy: use the volumeHandle that `uringctl list` shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a handle made by this driver")]
pub struct ForeignHandle;

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident, $kind:literal) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash)]
        pub struct $name(Parts);

        impl $name {
            /// A handle in `pool`; `node` is the node's id, used for local pools.
            pub fn new(pool: &Pool, node: Option<&str>, id: Uuid) -> Self {
                let node = match pool.scope {
                    Scope::Local => Some(NodeHash::of(node.unwrap_or_default())),
                    Scope::Shared => None,
                };
                Self(Parts { node, pool: pool.name.clone(), id })
            }

            /// Its parts, whatever it is a handle of.
            pub fn parts(&self) -> &Parts {
                &self.0
            }

            /// The uuid, which names the image.
            pub fn id(&self) -> Uuid {
                self.0.id
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.write($kind, f)
            }
        }

        impl FromStr for $name {
            type Err = ForeignHandle;

            fn from_str(text: &str) -> Result<Self, ForeignHandle> {
                Parts::parse($kind, text).map(Self).ok_or(ForeignHandle)
            }
        }
    };
}

handle! {
    /// The handle of a volume whose image is in a pool.
    VolumeHandle, "vol"
}

impl VolumeHandle {
    /// The file name of its image.
    pub fn image(&self) -> String {
        format!("{}.img", self.0.id)
    }
}

handle! {
    /// The handle of a snapshot whose image is in a pool.
    SnapshotHandle, "snap"
}

handle! {
    /// The handle of a group snapshot whose images are in a pool.
    GroupHandle, "group"
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pool(name: &str, scope: Scope) -> Pool {
        Pool {
            name: name.to_owned(),
            dir: "/pool".into(),
            scope,
            mounted: false,
        }
    }

    #[test]
    fn handles_say_pool_image_and_node() {
        let id = Uuid::from_u128(0x6f1c);
        let shared = VolumeHandle::new(&pool("fast", Scope::Shared), Some("n1"), id);
        assert_eq!(
            shared.to_string(),
            "vol.shared.fast.00000000-0000-0000-0000-000000006f1c"
        );
        assert_eq!(shared.image(), "00000000-0000-0000-0000-000000006f1c.img");
        assert!(shared.parts().is_reachable_from(None));

        let local = SnapshotHandle::new(&pool("fast", Scope::Local), Some("n1"), id);
        assert!(local.parts().is_reachable_from(Some("n1")));
        assert!(
            !local.parts().is_reachable_from(Some("n2")) && !local.parts().is_reachable_from(None)
        );
        assert_eq!(local.to_string().parse(), Ok(local));
    }

    #[test]
    fn only_canonical_handles_are_parsed() {
        for text in [
            "",
            "vol.shared.fast",
            "snap.shared.fast.00000000-0000-0000-0000-000000006f1c",
            "vol.shared.fast.00000000-0000-0000-0000-000000006F1C",
            "vol.shared.fast.00000000000000000000000000006f1c",
            "vol.shared.fast.00000000-0000-0000-0000-000000006f1c.x",
            "vol.shared.-fast.00000000-0000-0000-0000-000000006f1c",
            "vol.local-12.fast.00000000-0000-0000-0000-000000006f1c",
            "vol.local-0123456789AB.fast.00000000-0000-0000-0000-000000006f1c",
        ] {
            assert_eq!(text.parse::<VolumeHandle>(), Err(ForeignHandle), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_handle_reads_back(
            name in "[a-zA-Z0-9][a-zA-Z0-9_-]{0,62}", id: u128, node in ".{0,40}", local: bool,
        ) {
            let scope = if local { Scope::Local } else { Scope::Shared };
            let handle = VolumeHandle::new(&pool(&name, scope), Some(&node), Uuid::from_u128(id));
            let text = handle.to_string();
            prop_assert!(text.len() <= 128);
            prop_assert_eq!(text.parse(), Ok(handle));
        }

        #[test]
        fn any_text_is_a_canonical_handle_or_foreign(text in "(vol|snap)?[.a-z0-9/-]{0,80}|.{0,80}") {
            if let Ok(handle) = text.parse::<VolumeHandle>() {
                prop_assert_eq!(handle.to_string(), text);
            }
        }
    }
}
