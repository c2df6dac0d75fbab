//! QoS limits of a volume's clients.
//!
//! They are keys of the image's metadata, `conf_rbd_qos_…`, which librbd and rbd-nbd apply
//! and krbd ignores. A class names them as ceph-csi does, and may let them grow with the
//! volume; a modification names them as Ceph does.
//!
//! | of a class, with its part for each GiB above `BaseVolSizeBytes` | the limit |
//! | --- | --- |
//! | `BaseIops`, `IopsPerGiB` | `rbd_qos_iops_limit` |
//! | `BaseReadIops`, `ReadIopsPerGiB` | `rbd_qos_read_iops_limit` |
//! | `BaseWriteIops`, `WriteIopsPerGiB` | `rbd_qos_write_iops_limit` |
//! | `BaseBytesPerSecond`, `BpsPerGiB` | `rbd_qos_bps_limit` |
//! | `BaseReadBytesPerSecond`, `ReadBpsPerGiB` | `rbd_qos_read_bps_limit` |
//! | `BaseWriteBytesPerSecond`, `WriteBpsPerGiB` | `rbd_qos_write_bps_limit` |
//!
//! A class's parameters are kept in the metadata as well, so that a volume that grows gets
//! larger limits, whichever driver grows it. Those of a modification are not, so they stay
//! as they are.

use std::collections::{BTreeMap, HashMap};

use super::super::{ProvisionError, params::bad};

/// One limit, by all its names.
struct Limit {
    base: &'static str,
    per_gib: &'static str,
    name: &'static str,
    /// The metadata keys that keep the class's parameters.
    base_key: &'static str,
    per_gib_key: &'static str,
}

const LIMITS: [Limit; 6] = [
    Limit {
        base: "BaseIops",
        per_gib: "IopsPerGiB",
        name: "rbd_qos_iops_limit",
        base_key: "rbd_base_qos_iops_limit",
        per_gib_key: "rbd_iops_per_gib_limit",
    },
    Limit {
        base: "BaseReadIops",
        per_gib: "ReadIopsPerGiB",
        name: "rbd_qos_read_iops_limit",
        base_key: "rbd_base_qos_read_iops_limit",
        per_gib_key: "rbd_read_iops_per_gib_limit",
    },
    Limit {
        base: "BaseWriteIops",
        per_gib: "WriteIopsPerGiB",
        name: "rbd_qos_write_iops_limit",
        base_key: "rbd_base_qos_write_iops_limit",
        per_gib_key: "rbd_write_iops_per_gib_limit",
    },
    Limit {
        base: "BaseBytesPerSecond",
        per_gib: "BpsPerGiB",
        name: "rbd_qos_bps_limit",
        base_key: "rbd_base_qos_bps_limit",
        per_gib_key: "rbd_bps_per_gib_limit",
    },
    Limit {
        base: "BaseReadBytesPerSecond",
        per_gib: "ReadBpsPerGiB",
        name: "rbd_qos_read_bps_limit",
        base_key: "rbd_base_qos_read_bps_limit",
        per_gib_key: "rbd_read_bps_per_gib_limit",
    },
    Limit {
        base: "BaseWriteBytesPerSecond",
        per_gib: "WriteBpsPerGiB",
        name: "rbd_qos_write_bps_limit",
        base_key: "rbd_base_qos_write_bps_limit",
        per_gib_key: "rbd_write_bps_per_gib_limit",
    },
];
/// The size up to which a limit is its base.
const BASE_SIZE: &str = "BaseVolSizeBytes";
const BASE_SIZE_KEY: &str = "rbd_base_qos_vol_size";
/// The prefix of the metadata keys that librbd reads as options.
const OPTION: &str = "conf_";

/// The limits of a class, by the metadata keys that keep them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QosLimits(BTreeMap<&'static str, u64>);

impl QosLimits {
    /// Whether a class may have a parameter of this name.
    pub fn is_of_class(name: &str) -> bool {
        key_of(name).is_some()
    }

    /// The limits of a class.
    pub fn of_class(given: &HashMap<String, String>) -> Result<Self, ProvisionError> {
        let mut limits = BTreeMap::new();
        for (name, value) in given.iter().filter(|(_, value)| !value.is_empty()) {
            if let Some((known, key)) = key_of(name) {
                limits.insert(key, natural(known, value)?);
            }
        }
        Ok(Self(limits))
    }

    /// The limits that an image's metadata keeps.
    pub fn of_metadata(metadata: &BTreeMap<String, String>) -> Self {
        let known = LIMITS.iter().flat_map(|l| [l.base_key, l.per_gib_key]);
        let found = known.chain([BASE_SIZE_KEY]).filter_map(|key| {
            let value = metadata.get(key)?.parse().ok()?;
            Some((key, value))
        });
        Self(found.collect())
    }

    /// Whether an image of `bytes` with this metadata has the limits that it keeps.
    pub fn are_set(metadata: &BTreeMap<String, String>, bytes: u64) -> bool {
        let wanted = Self::of_metadata(metadata).metadata(bytes);
        wanted
            .iter()
            .all(|(key, value)| metadata.get(key) == Some(value))
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The metadata of an image of `bytes`.
    pub fn metadata(&self, bytes: u64) -> Vec<(String, String)> {
        let mut metadata: Vec<_> = self
            .0
            .iter()
            .map(|(key, value)| ((*key).to_owned(), value.to_string()))
            .collect();
        for limit in &LIMITS {
            let Some(base) = self.0.get(limit.base_key) else {
                continue;
            };
            let more = match (self.0.get(limit.per_gib_key), self.0.get(BASE_SIZE_KEY)) {
                (Some(each), Some(size)) => {
                    (bytes.saturating_sub(*size) >> 30).saturating_mul(*each)
                }
                _ => 0,
            };
            let value = base.saturating_add(more).to_string();
            metadata.push((format!("{OPTION}{}", limit.name), value));
        }
        metadata
    }
}

/// The metadata keys of a modification; none: the key is removed.
pub fn modified(
    mutable: &HashMap<String, String>,
) -> Result<Vec<(String, Option<String>)>, ProvisionError> {
    let mut metadata = Vec::new();
    for (name, value) in mutable.iter().collect::<BTreeMap<_, _>>() {
        let Some(known) = MODIFIABLE.iter().find(|known| *known == name) else {
            return Err(ProvisionError::UnknownParameter {
                name: name.clone(),
                known: MODIFIABLE.join(", "),
            });
        };
        let value = match value.as_str() {
            "" => None,
            value => Some(natural(known, value)?.to_string()),
        };
        metadata.push((format!("{OPTION}{known}"), value));
        if let Some(limit) = LIMITS.iter().find(|limit| limit.name == *known) {
            let forgotten = [limit.base_key, limit.per_gib_key];
            metadata.extend(forgotten.map(|key| (key.to_owned(), None)));
        }
    }
    Ok(metadata)
}

/// Whether a metadata key is one of a limit.
pub fn is_of_limits(key: &str) -> bool {
    let option = key.strip_prefix(OPTION);
    option.is_some_and(|option| MODIFIABLE.contains(&option))
        || key == BASE_SIZE_KEY
        || LIMITS
            .iter()
            .any(|limit| key == limit.base_key || key == limit.per_gib_key)
}

/// Ceph's options for limits (`rbd config image`, section Quality of Service).
const MODIFIABLE: [&str; 12] = [
    "rbd_qos_iops_limit",
    "rbd_qos_iops_burst",
    "rbd_qos_bps_limit",
    "rbd_qos_bps_burst",
    "rbd_qos_read_iops_limit",
    "rbd_qos_read_iops_burst",
    "rbd_qos_write_iops_limit",
    "rbd_qos_write_iops_burst",
    "rbd_qos_read_bps_limit",
    "rbd_qos_read_bps_burst",
    "rbd_qos_write_bps_limit",
    "rbd_qos_write_bps_burst",
];

fn key_of(name: &str) -> Option<(&'static str, &'static str)> {
    let of = |limit: &Limit| {
        [
            (limit.base, limit.base_key),
            (limit.per_gib, limit.per_gib_key),
        ]
    };
    let all = LIMITS
        .iter()
        .flat_map(of)
        .chain([(BASE_SIZE, BASE_SIZE_KEY)]);
    all.into_iter().find(|(known, _)| *known == name)
}

fn natural(name: &'static str, value: &str) -> Result<u64, ProvisionError> {
    let parsed = value.parse();
    parsed.map_err(|_| bad(name, value, "it is a number, without a unit"))
}

#[cfg(test)]
mod tests {
    use proptest::{collection, prelude::*, sample::select};

    use super::*;

    fn map(list: &[(&str, &str)]) -> HashMap<String, String> {
        let own = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        list.iter().map(own).collect()
    }

    #[test]
    fn limits_grow_with_the_volume() {
        let class = map(&[
            ("BaseReadIops", "100"),
            ("ReadIopsPerGiB", "10"),
            ("BaseVolSizeBytes", "1073741824"),
            ("BaseBytesPerSecond", "7"),
        ]);
        let limits = QosLimits::of_class(&class).unwrap();
        let metadata: BTreeMap<_, _> = limits.metadata(5 << 30).into_iter().collect();
        assert_eq!(metadata["conf_rbd_qos_read_iops_limit"], "140");
        assert_eq!(metadata["conf_rbd_qos_bps_limit"], "7");
        assert_eq!(QosLimits::of_metadata(&metadata), limits);
        assert!(QosLimits::are_set(&metadata, 5 << 30));
        assert!(!QosLimits::are_set(&metadata, 6 << 30));
        assert!(QosLimits::are_set(&BTreeMap::new(), 6 << 30));
        assert!(metadata.keys().all(|key| is_of_limits(key)));
        assert!(!is_of_limits("conf_rbd_cache"));
        let small: BTreeMap<_, _> = limits.metadata(1 << 20).into_iter().collect();
        assert_eq!(small["conf_rbd_qos_read_iops_limit"], "100");
        assert!(QosLimits::of_class(&map(&[("BaseIops", "x")])).is_err());
    }

    #[test]
    fn qos_changes_only_limits_that_rbd_can_change() {
        let wanted = map(&[("rbd_qos_iops_limit", "50"), ("rbd_qos_bps_limit", "")]);
        let metadata = modified(&wanted).unwrap();
        let name = |name: &str| format!("conf_rbd_{name}");
        assert_eq!(
            metadata,
            [
                (name("qos_bps_limit"), None),
                ("rbd_base_qos_bps_limit".to_owned(), None),
                ("rbd_bps_per_gib_limit".to_owned(), None),
                (name("qos_iops_limit"), Some("50".to_owned())),
                ("rbd_base_qos_iops_limit".to_owned(), None),
                ("rbd_iops_per_gib_limit".to_owned(), None),
            ]
        );
        for (key, value) in [("size", "1"), ("rbd_qos_iops_limit", "many")] {
            let error = modified(&map(&[(key, value)])).unwrap_err();
            assert!(error.to_string().contains(key), "{error}");
        }
    }

    /// Parameters of classes as an attacker writes them: other options of librbd, other keys
    /// of an image's metadata, limits that are no numbers.
    fn hostile() -> impl Strategy<Value = HashMap<String, String>> {
        let names = select([&MODIFIABLE[..], &LIMITS.each_ref().map(|limit| limit.base)].concat());
        let bad_names = select(vec![
            "",
            "BaseVolSizeBytes",
            "conf_rbd_cache",
            "conf_rbd_qos_iops_limit",
            "pool",
            "rbd_base_qos_iops_limit",
            "rbd_default_data_pool",
            "rbd_qos_iops_limit ",
            "rbd_qos_schedule_tick_min",
            "RBD_QOS_IOPS_LIMIT",
            "uring-csi/making",
            ".rbd",
        ]);
        let name = prop_oneof![
            6 => names.prop_map(str::to_owned),
            2 => bad_names.prop_map(str::to_owned),
            1 => ".{0,9}",
        ];
        let value = prop_oneof![
            4 => any::<u64>().prop_map(|number| number.to_string()),
            4 => select(vec![
                "", "0", "-1", "+1", "007", "1k", "1Gi", "1e3", " 1", "1\n", "1\0", "0x10", "٣",
                "18446744073709551615", "18446744073709551616",
            ]).prop_map(str::to_owned),
            1 => ".{0,9}",
        ];
        collection::hash_map(name, value, 0..5)
    }

    /// Canonical: librbd reads it as the number that it is here.
    fn is_number(text: &str) -> bool {
        text.parse::<u64>()
            .is_ok_and(|number| number.to_string() == text)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn a_modification_sets_limits_to_numbers_or_is_refused_by_name(mutable in hostile()) {
            match modified(&mutable) {
                Ok(metadata) => {
                    for (key, value) in &metadata {
                        prop_assert!(is_of_limits(key), "{}", key);
                        let is_set = value.as_deref().is_none_or(is_number);
                        prop_assert!(is_set, "{}: {:?}", key, value);
                    }
                    for (name, value) in &mutable {
                        prop_assert!(name.starts_with("rbd_qos_"), "{}", name);
                        let key = format!("conf_{name}");
                        let set = metadata.iter().find(|(it, _)| *it == key);
                        let number = set.map(|(_, value)| value.clone().unwrap_or_default());
                        let given = value.trim_start_matches(['+', '0']);
                        let number = number.map(|it| it.trim_start_matches('0').to_owned());
                        prop_assert_eq!(number.as_deref(), Some(given), "{}", name);
                    }
                }
                Err(error) => {
                    let message = error.to_string();
                    let names = |name: &String| {
                        message.contains(name.as_str()) || message.contains(&format!("{name:?}"))
                    };
                    prop_assert!(mutable.keys().any(names), "{}", message);
                }
            }
        }

        #[test]
        fn a_class_sets_limits_to_numbers_or_is_refused_by_name(
            class in hostile(),
            bytes in any::<u64>(),
        ) {
            match QosLimits::of_class(&class) {
                Ok(limits) => for (key, value) in limits.metadata(bytes) {
                    prop_assert!(is_of_limits(&key) && is_number(&value), "{}={}", key, value);
                },
                Err(error) => {
                    let message = error.to_string();
                    prop_assert!(class.keys().any(|name| message.contains(name)), "{}", message);
                }
            }
        }
    }
}
