//! Volume and snapshot handles, letter for letter as ceph-csi has them.
//!
//! ```text
//! 0001-0024-0bba3be9-0a1c-41db-a619-26ffea20161e-0000000000000004-36eaa70e-eb63-11ea-8e79-246e96907f74
//! version, length of the cluster id and the id, pool id, uuid; numbers in hex
//!
//! mig_mons-7982de6a23b77bce50b1ba9f2e879cce_image-e0b45b52-7e09-47d3-8f1b-806995fa4412_706f6f6c
//! an in-tree volume that Kubernetes migrated: hash of the monitors, which is
//! the cluster id too, the rest of the image's name, and the pool's name in hex
//! ```
//!
//! A snapshot's handle has the form of a volume's: the call decides which of the two it is. A
//! text of any other form is no handle of a Ceph volume.

use std::{fmt, str::FromStr};

use uuid::Uuid;

/// Bytes of a cluster id: the other fields of a [`Handle`] take 64 of the 128
/// that the CSI specification allows a string.
pub const MAX_CLUSTER_ID: usize = 64;

/// The prefix of ceph-csi's handles.
const VERSION: &str = "0001";

/// Whether a text is the handle of a Ceph volume or snapshot.
pub fn is_ours(text: &str) -> bool {
    text.parse::<CephVolumeHandle>().is_ok()
}

/// The text is no handle of a Ceph volume.
///
/// Remedy: use the volumeHandle that `uringctl list` shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a handle of a Ceph volume")]
pub struct NotOurs;

/// A volume's handle, of either form.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum CephVolumeHandle {
    /// Its names are in the journal.
    Journaled(Handle),
    /// Its names are in the handle itself.
    Migrated(Migrated),
}

impl CephVolumeHandle {
    /// The `clusterID` of the configuration that its cluster is under.
    pub fn cluster_id(&self) -> &str {
        match self {
            Self::Journaled(handle) => &handle.cluster_id,
            Self::Migrated(handle) => &handle.cluster_id,
        }
    }
}

impl FromStr for CephVolumeHandle {
    type Err = NotOurs;

    fn from_str(text: &str) -> Result<Self, NotOurs> {
        text.parse()
            .map(Self::Journaled)
            .or_else(|NotOurs| text.parse().map(Self::Migrated))
    }
}

/// The handle of a volume or snapshot with an entry in the journal.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Handle {
    cluster_id: String,
    pool_id: i64,
    uuid: Uuid,
}

impl Handle {
    /// None where the cluster id is empty or longer than [`MAX_CLUSTER_ID`].
    pub fn new(cluster_id: &str, pool_id: i64, uuid: Uuid) -> Option<Self> {
        (1..=MAX_CLUSTER_ID)
            .contains(&cluster_id.len())
            .then(|| Self {
                cluster_id: cluster_id.to_owned(),
                pool_id,
                uuid,
            })
    }

    /// The `clusterID` of the configuration that its cluster is under.
    pub fn cluster_id(&self) -> &str {
        &self.cluster_id
    }

    /// The pool of its image.
    pub fn pool_id(&self) -> i64 {
        self.pool_id
    }

    /// Its uuid, unique in its pool.
    pub fn uuid(&self) -> Uuid {
        self.uuid
    }

    fn parse(text: &str) -> Option<Self> {
        let rest = text.strip_prefix(VERSION)?.strip_prefix('-')?;
        let (length, rest) = rest.split_at_checked(4)?;
        let length = usize::from_str_radix(length, 16).ok()?;
        let (cluster_id, rest) = rest.strip_prefix('-')?.split_at_checked(length)?;
        let (pool_id, uuid) = rest.strip_prefix('-')?.split_at_checked(16)?;
        let pool_id = u64::from_str_radix(pool_id, 16).ok()?.cast_signed();
        let uuid = Uuid::try_parse(uuid.strip_prefix('-')?).ok()?;
        let handle = Self::new(cluster_id, pool_id, uuid)?;
        // One spelling only, or a volume would have many handles.
        (handle.to_string() == text).then_some(handle)
    }
}

impl fmt::Display for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            cluster_id,
            pool_id,
            uuid,
        } = self;
        let length = cluster_id.len();
        write!(
            f,
            "{VERSION}-{length:04x}-{cluster_id}-{pool_id:016x}-{uuid}"
        )
    }
}

impl FromStr for Handle {
    type Err = NotOurs;

    fn from_str(text: &str) -> Result<Self, NotOurs> {
        Self::parse(text).ok_or(NotOurs)
    }
}

/// The handle of a volume of Kubernetes' own RBD plugin, which had neither
/// driver nor journal.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Migrated {
    cluster_id: String,
    pool: String,
    image: String,
}

impl Migrated {
    /// The MD5 of the monitors' addresses, under which the administrator has
    /// put the cluster into the configuration.
    pub fn cluster_id(&self) -> &str {
        &self.cluster_id
    }

    /// The name of the image's pool.
    pub fn pool(&self) -> &str {
        &self.pool
    }

    /// The image's name.
    pub fn image(&self) -> &str {
        &self.image
    }

    fn parse(text: &str) -> Option<Self> {
        let mut fields = text.strip_prefix("mig_")?.splitn(3, '_');
        let cluster_id = fields.next()?.strip_prefix("mons-")?;
        let image = fields.next()?.strip_prefix("image-")?;
        let pool = unhex(fields.next()?)?;
        let is_whole = !(cluster_id.is_empty() || image.is_empty() || pool.is_empty());
        is_whole.then(|| Self {
            cluster_id: cluster_id.to_owned(),
            pool,
            image: format!("kubernetes-dynamic-pvc-{image}"),
        })
    }
}

impl FromStr for Migrated {
    type Err = NotOurs;

    fn from_str(text: &str) -> Result<Self, NotOurs> {
        Self::parse(text).ok_or(NotOurs)
    }
}

/// Decodes a text from hex digits, two a byte.
fn unhex(digits: &str) -> Option<String> {
    let nibble = |digit: u8| char::from(digit).to_digit(16);
    let byte = |pair: &[u8]| match pair {
        [high, low] => u8::try_from(nibble(*high)? << 4 | nibble(*low)?).ok(),
        _ => None,
    };
    let bytes: Option<Vec<u8>> = digits.as_bytes().chunks(2).map(byte).collect();
    String::from_utf8(bytes?).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The example of ceph-csi's documentation.
    const EXAMPLE: &str = "0001-0024-0bba3be9-0a1c-41db-a619-26ffea20161e-0000000000000004-\
                           36eaa70e-eb63-11ea-8e79-246e96907f74";

    #[test]
    fn a_handle_names_cluster_pool_and_uuid() {
        let handle: Handle = EXAMPLE.parse().unwrap();
        assert_eq!(handle.cluster_id(), "0bba3be9-0a1c-41db-a619-26ffea20161e");
        assert_eq!(handle.pool_id(), 4);
        assert_eq!(
            handle.uuid().to_string(),
            "36eaa70e-eb63-11ea-8e79-246e96907f74"
        );
        assert_eq!(handle.to_string(), EXAMPLE);
        assert!(Handle::new("", 4, handle.uuid()).is_none());
        assert!(Handle::new(&"x".repeat(65), 4, handle.uuid()).is_none());
    }

    #[test]
    fn a_migrated_handle_names_cluster_pool_and_image() {
        // A pool's name may hold what separates the fields.
        let text = "mig_mons-b7f67366bb43f32e07d8a261a7840da9_\
                    image-e0b45b52-7e09-47d3-8f1b-806995fa4412_\
                    706f6f6c5f7265706c6963615f706f6f6c";
        let handle: Migrated = text.parse().unwrap();
        assert_eq!(handle.cluster_id(), "b7f67366bb43f32e07d8a261a7840da9");
        assert_eq!(handle.pool(), "pool_replica_pool");
        assert_eq!(
            handle.image(),
            "kubernetes-dynamic-pvc-e0b45b52-7e09-47d3-8f1b-806995fa4412"
        );
        let either: CephVolumeHandle = text.parse().unwrap();
        assert_eq!(either.cluster_id(), handle.cluster_id());
    }

    #[test]
    fn a_handle_has_one_spelling() {
        assert!(is_ours(EXAMPLE));
        for text in [
            "",
            "vol.shared.fast.00000000-0000-0000-0000-000000006f1c",
            &EXAMPLE.to_uppercase(),
            &EXAMPLE.replacen("0001", "0002", 1),
            &EXAMPLE.replacen("0024", "0023", 1),
            &EXAMPLE.replacen("0024", "+024", 1),
            &EXAMPLE.replacen("-000000", "-00000", 1),
            &format!("{EXAMPLE}0"),
            &EXAMPLE[..EXAMPLE.len() - 1],
            "mig_mons-b7_image-e0",
            "mig_mons-b7_image-e0_706",
            "mig_mons-b7_image-e0_7x",
            "mig_mons-_image-e0_70",
            "mig_mons-b7_image-_70",
            "mig_mons-b7_image-e0_",
        ] {
            assert!(!is_ours(text), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_handle_reads_back(cluster_id in "[^\\x00-\\x1f]{1,24}", pool_id: i64, id: u128) {
            if let Some(handle) = Handle::new(&cluster_id, pool_id, Uuid::from_u128(id)) {
                let text = handle.to_string();
                prop_assert!(text.len() <= 128);
                prop_assert_eq!(text.parse(), Ok(handle));
            }
        }

        #[test]
        fn any_text_is_a_handle_or_is_not_ours(
            text in "0001-00[0-9a-f]{2}-.{0,40}-[0-9a-f-]{0,54}|mig_mons-.{0,9}_image-.{0,9}_.{0,9}|.{0,80}"
        ) {
            match text.parse::<CephVolumeHandle>() {
                Ok(CephVolumeHandle::Journaled(handle)) => prop_assert_eq!(handle.to_string(), text),
                Ok(CephVolumeHandle::Migrated(handle)) => prop_assert!(!handle.pool().is_empty()),
                Err(NotOurs) => {}
            }
        }
    }
}
