//! The entries of a journal: the keys of its omaps and the forms of their values, letter
//! for letter as ceph-csi has them.

use std::{collections::BTreeMap, fmt, str::FromStr};

use uuid::Uuid;

/// The kind of a journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JournalKind {
    /// Volumes, by ceph-csi's default in images `csi-vol-<uuid>`.
    Volume,
    /// Snapshots, by ceph-csi's default in images `csi-snap-<uuid>`.
    Snapshot,
    /// Groups of snapshots, which have no image.
    Group,
}

impl JournalKind {
    /// What it has.
    pub fn noun(self) -> &'static str {
        match self {
            Self::Volume => "volume",
            Self::Snapshot => "snapshot",
            Self::Group => "group snapshot",
        }
    }

    /// The name of the image or group of `uuid`.
    pub fn image(self, prefix: Option<&str>, uuid: Uuid) -> String {
        let default = match self {
            Self::Volume => "csi-vol-",
            Self::Snapshot => "csi-snap-",
            Self::Group => "csi-vol-group-",
        };
        format!("{}{uuid}", prefix.unwrap_or(default))
    }

    /// The prefix of the directory's keys, and of the names of entries' objects.
    pub(super) fn prefix(self) -> &'static str {
        match self {
            Self::Volume => "csi.volume.",
            Self::Snapshot => "csi.snap.",
            Self::Group => "csi.volume.group.",
        }
    }

    pub(super) fn name_key(self) -> &'static str {
        match self {
            Self::Volume | Self::Group => "csi.volname",
            Self::Snapshot => "csi.snapname",
        }
    }
}

/// The end of the name of the image between a volume and its copy.
pub const TEMPORARY: &str = "-temp";

/// The value of a name in the directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NameEntry {
    /// The uuid in the name of the image and of its entry.
    pub uuid: Uuid,
    /// The image's pool, where it is not the journal's.
    pub pool_id: Option<i64>,
}

impl fmt::Display for NameEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pool_id {
            Some(id) => write!(f, "{id:016x}/{}", self.uuid),
            None => self.uuid.fmt(f),
        }
    }
}

impl FromStr for NameEntry {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (pool_id, uuid) = match text.split_once('/') {
            Some((pool_id, uuid)) => (Some(parse_pool(pool_id).ok_or(())?), uuid),
            None => (None, text),
        };
        let uuid = Uuid::try_parse(uuid).map_err(drop)?;
        Ok(Self { uuid, pool_id })
    }
}

/// A pool's id as values have it: 16 hex digits.
fn parse_pool(text: &str) -> Option<i64> {
    let digits = text.len() == 16 && text.bytes().all(|b| b.is_ascii_hexdigit());
    let id = u64::from_str_radix(text, 16).ok().filter(|_| digits)?;
    Some(id.cast_signed())
}

/// The entry of an image. An empty value: not recorded, or not applicable.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JournalEntry {
    /// The name of the request; empty where a create was interrupted.
    pub name: String,
    /// The image's name; empty where a release of ceph-csi before 2.1 created it.
    pub image: String,
    /// The image's id; empty until the image exists.
    pub image_id: String,
    /// The pool of the directory, where it is not the image's.
    pub journal_pool: Option<i64>,
    /// The KMS of its passphrase, if it is encrypted.
    pub kms: String,
    /// `block` or `file`, if it is encrypted.
    pub encryption: String,
    /// The Kubernetes namespace of its claim.
    pub owner: String,
    /// The handle of its group.
    pub group: String,
    /// Of a snapshot: the name of its source's image.
    pub source: String,
    /// Of a copy: its source; a key of this driver, which ceph-csi ignores.
    pub origin: String,
    /// The state of this driver's create; a key of this driver, too.
    pub state: CreateState,
    /// Whether a delete removes the image, or has; a key of this driver, too.
    pub is_deleting: bool,
}

/// The state of a create. The caller gets the handle only once it is complete.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CreateState {
    /// Complete, or not this driver's.
    #[default]
    None,
    /// Begun: the image may be incomplete.
    UnderWay,
    /// Never to be completed, or of a group being deleted: its remains are to be removed.
    Abandoned,
}

impl CreateState {
    pub(super) fn value(self) -> &'static str {
        match self {
            Self::None => "",
            Self::UnderWay => "1",
            Self::Abandoned => "0",
        }
    }

    pub(super) fn of(value: &str) -> Self {
        match value {
            "" => Self::None,
            "0" => Self::Abandoned,
            _ => Self::UnderWay,
        }
    }
}

impl JournalEntry {
    /// Whether its image is complete.
    pub fn is_complete(&self) -> bool {
        !self.image_id.is_empty()
    }
}

impl JournalEntry {
    pub(super) fn to_keys(&self, kind: JournalKind) -> Vec<(&'static str, String)> {
        let Self {
            name,
            image,
            image_id,
            journal_pool,
            kms,
            encryption,
            owner,
            group,
            source,
            origin,
            state,
            is_deleting,
        } = self;
        let state = state.value().to_owned();
        let deleting = if *is_deleting { "1" } else { "" }.to_owned();
        let pool = journal_pool.map(|id| format!("{id:016x}"));
        let keys = [
            (kind.name_key(), name),
            (IMAGE, image),
            (IMAGE_ID, image_id),
            (JOURNAL_POOL, &pool.unwrap_or_default()),
            (KMS, kms),
            (ENCRYPTION, encryption),
            (OWNER, owner),
            (GROUP, group),
            (SOURCE, source),
            (ORIGIN, origin),
            (CREATE_STATE, &state),
            (DELETING, &deleting),
        ];
        let full = keys.into_iter().filter(|(_, value)| !value.is_empty());
        full.map(|(key, value)| (key, value.clone())).collect()
    }

    /// On failure: the key whose value is invalid.
    pub(super) fn from_keys(
        kind: JournalKind,
        mut keys: BTreeMap<String, String>,
    ) -> Result<Self, (&'static str, String)> {
        let mut take = |key: &str| keys.remove(key).unwrap_or_default();
        let pool = take(JOURNAL_POOL);
        let journal_pool = match pool.as_str() {
            "" => None,
            text => Some(parse_pool(text).ok_or((JOURNAL_POOL, pool))?),
        };
        let group = match take(GROUP) {
            none if none.is_empty() => take(OLD_GROUP),
            group => group,
        };
        Ok(Self {
            name: take(kind.name_key()),
            image: take(IMAGE),
            image_id: take(IMAGE_ID),
            journal_pool,
            kms: take(KMS),
            encryption: take(ENCRYPTION),
            owner: take(OWNER),
            group,
            source: take(SOURCE),
            origin: take(ORIGIN),
            state: CreateState::of(&take(CREATE_STATE)),
            is_deleting: !take(DELETING).is_empty(),
        })
    }
}

const IMAGE: &str = "csi.imagename";
pub(super) const IMAGE_ID: &str = "csi.imageid";
const JOURNAL_POOL: &str = "csi.journalpool";
const KMS: &str = "csi.volume.encryptKMS";
const ENCRYPTION: &str = "csi.volume.encryptionType";
const OWNER: &str = "csi.volume.owner";
const GROUP: &str = "csi.groupid";
/// The key that older releases of ceph-csi wrote by mistake.
const OLD_GROUP: &str = "csi.csi.groupid";
const SOURCE: &str = "csi.source";
const ORIGIN: &str = "uring-csi.origin";
pub(super) const CREATE_STATE: &str = "uring-csi.making";
pub(super) const DELETING: &str = "uring-csi.deleting";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UUID: &str = "36eaa70e-eb63-11ea-8e79-246e96907f74";

    fn keys(list: &[(&str, &str)]) -> BTreeMap<String, String> {
        let own = |&(key, value): &(&str, &str)| (key.to_owned(), value.to_owned());
        list.iter().map(own).collect()
    }

    #[test]
    fn a_name_leads_to_a_uuid_and_maybe_another_pool() {
        let elsewhere: NameEntry = format!("000000000000000a/{UUID}").parse().unwrap();
        assert_eq!(elsewhere.pool_id, Some(10));
        let here: NameEntry = UUID.parse().unwrap();
        assert_eq!((here.uuid, here.pool_id), (elsewhere.uuid, None));
        for bad in [
            "",
            "a",
            "0a/36eaa70e",
            &format!("a/{UUID}"),
            &format!("{UUID}/"),
        ] {
            assert!(bad.parse::<NameEntry>().is_err(), "{bad}");
        }
    }

    #[test]
    fn an_entry_has_the_keys_of_ceph_csi() {
        let there = keys(&[
            ("csi.volname", "pvc-1"),
            ("csi.imagename", "csi-vol-x"),
            ("csi.imageid", "1fa1"),
            ("csi.journalpool", "0000000000000003"),
            ("csi.volume.encryptKMS", "user-secret"),
            ("csi.volume.encryptionType", "block"),
            ("csi.volume.owner", "tenant"),
            ("csi.csi.groupid", "group"),
            ("csi.later", "unknown"),
        ]);
        let entry = JournalEntry::from_keys(JournalKind::Volume, there).unwrap();
        assert_eq!(entry.journal_pool, Some(3));
        assert_eq!(
            (entry.name.as_str(), entry.group.as_str()),
            ("pvc-1", "group")
        );
        assert_eq!(
            (entry.owner.as_str(), entry.kms.as_str()),
            ("tenant", "user-secret")
        );
        let bad = keys(&[("csi.journalpool", "3")]);
        assert!(JournalEntry::from_keys(JournalKind::Volume, bad).is_err());
        let unfinished = JournalEntry::from_keys(JournalKind::Snapshot, BTreeMap::new()).unwrap();
        assert_eq!(unfinished, JournalEntry::default());
    }

    proptest! {
        #[test]
        fn a_written_entry_reads_back(
            texts in proptest::collection::vec(".{0,9}", 9), pool: Option<i64>, id: u128, snap: bool,
            state in prop_oneof![Just(CreateState::None), Just(CreateState::UnderWay), Just(CreateState::Abandoned)],
            is_deleting: bool,
        ) {
            let kind = if snap { JournalKind::Snapshot } else { JournalKind::Volume };
            let [name, image, image_id, kms, encryption, owner, group, source, origin] =
                texts.try_into().unwrap();
            let entry = JournalEntry {
                name, image, image_id, journal_pool: pool, kms, encryption, owner, group, source,
                origin, state, is_deleting,
            };
            let keys = entry.to_keys(kind).into_iter().map(|(k, v)| (k.to_owned(), v));
            prop_assert_eq!(JournalEntry::from_keys(kind, keys.collect()), Ok(entry));
            let reserved = NameEntry { uuid: Uuid::from_u128(id), pool_id: pool };
            prop_assert_eq!(reserved.to_string().parse(), Ok(reserved));
        }

        #[test]
        fn any_value_is_read_or_refused(text in "[0-9a-f/-]{0,60}|.{0,60}") {
            let _ = text.parse::<NameEntry>();
        }
    }
}
