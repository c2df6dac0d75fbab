//! Replication of a volume to another cluster: what is asked for, and its state.

use std::{
    collections::HashMap,
    time::{Duration, SystemTime},
};

use super::{
    ProvisionError,
    params::{bad, yes_or_no},
};

/// A volume that another site has created, as its PersistentVolume has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeToEnter {
    pub handle: String,
    /// The name of the request that created it.
    pub name: String,
    /// The Kubernetes namespace of its claim.
    pub owner: String,
    pub context: HashMap<String, String>,
}

/// A change of a volume's replication.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplicationChange {
    /// The other cluster follows the volume from now on.
    Enable(ReplicationParameters),
    /// It ends to follow the volume; `force`: also of a volume that has lost its primary.
    Disable { force: bool },
    /// The volume becomes primary; `force`: although the other is.
    Promote {
        force: bool,
        parameters: ReplicationParameters,
    },
    /// The volume follows the other cluster's.
    Demote,
    /// The volume is made equal to the primary one; `force`: its data is replaced.
    Resync { force: bool },
}

/// The parameters of a `VolumeReplicationClass`, as ceph-csi has them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplicationParameters {
    /// `mirroringMode: journal` in place of `snapshot`.
    pub by_journal: bool,
    /// `schedulingInterval` and `schedulingStartTime` of snapshots.
    pub schedule: Option<(String, Option<String>)>,
    /// `flattenMode: force`: a volume with a parent becomes one without.
    pub flattens: bool,
}

impl ReplicationParameters {
    /// Parses them; others are passed over.
    pub fn parse(given: &HashMap<String, String>) -> Result<Self, ProvisionError> {
        let get = |name: &str| {
            given
                .get(name)
                .map(String::as_str)
                .filter(|it| !it.is_empty())
        };
        let by_journal = match get("mirroringMode") {
            None | Some("snapshot") => false,
            Some("journal") => true,
            Some(other) => {
                return Err(bad("mirroringMode", other, "it is `snapshot` or `journal`"));
            }
        };
        let flattens = match get("flattenMode") {
            None | Some("never") => false,
            Some("force") => true,
            Some(other) => return Err(bad("flattenMode", other, "it is `never` or `force`")),
        };
        let start = get("schedulingStartTime");
        let schedule = match get("schedulingInterval") {
            None if start.is_some() => {
                let why = "it needs a schedulingInterval";
                return Err(bad("schedulingStartTime", start.unwrap_or_default(), why));
            }
            None => None,
            Some(every) if is_interval(every) => Some((every.to_owned(), start.map(str::to_owned))),
            Some(other) => {
                let why = "it is a number of minutes, hours or days, as `30m`, `1h` or `2d`";
                return Err(bad("schedulingInterval", other, why));
            }
        };
        if by_journal && let Some((every, _)) = &schedule {
            return Err(bad(
                "schedulingInterval",
                every,
                "a journal has no schedule",
            ));
        }
        Ok(Self {
            by_journal,
            schedule,
            flattens,
        })
    }

    /// The parameter `force` of a disable.
    pub fn force(given: &HashMap<String, String>) -> Result<bool, ProvisionError> {
        let force = given.get("force").filter(|it| !it.is_empty());
        force.map_or(Ok(false), |value| yes_or_no("force", value))
    }
}

fn is_interval(text: &str) -> bool {
    let digits = text.strip_suffix(['m', 'h', 'd']).unwrap_or_default();
    !digits.is_empty() && digits.len() < 6 && digits.bytes().all(|byte| byte.is_ascii_digit())
}

/// Whether a change is whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replicated {
    Done,
    /// A resync goes on; asking again makes sense.
    NotYet,
}

/// How the other cluster follows a primary volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplicationInfo {
    /// The state of which it has a complete copy.
    pub synced: Option<SystemTime>,
    /// How long the last copy took.
    pub took: Option<Duration>,
    /// Bytes of the last copy.
    pub bytes: Option<u64>,
    pub health: ReplicationHealth,
    pub message: String,
}

/// What is known of a replication.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReplicationHealth {
    #[default]
    Unknown,
    Healthy,
    /// The daemon of this cluster does not run.
    Degraded,
    Failed,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(list: &[(&str, &str)]) -> Result<ReplicationParameters, String> {
        let own = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        let given = list.iter().map(own).collect();
        ReplicationParameters::parse(&given).map_err(|error| error.to_string())
    }

    #[test]
    fn parameters_are_those_of_ceph_csi() {
        assert_eq!(parse(&[]).unwrap(), ReplicationParameters::default());
        let all = [
            ("mirroringMode", "snapshot"),
            ("schedulingInterval", "1h"),
            ("schedulingStartTime", "14:00:00-05:00"),
            ("flattenMode", "force"),
            ("another", "key"),
        ];
        let all = parse(&all).unwrap();
        let schedule = ("1h".to_owned(), Some("14:00:00-05:00".to_owned()));
        assert_eq!(all.schedule, Some(schedule));
        assert!(all.flattens && !all.by_journal);
        assert!(parse(&[("mirroringMode", "journal")]).unwrap().by_journal);
    }

    #[test]
    fn invalid_parameters_are_named() {
        let cases: [&[(&str, &str)]; 8] = [
            &[("mirroringMode", "Snapshot")],
            &[("flattenMode", "yes")],
            &[("schedulingStartTime", "14:00")],
            &[("schedulingInterval", "h")],
            &[("schedulingInterval", "1s")],
            &[("schedulingInterval", "1h ")],
            &[("schedulingInterval", "123456m")],
            &[("schedulingInterval", "1m"), ("mirroringMode", "journal")],
        ];
        for given in cases {
            let refused = parse(given).unwrap_err();
            assert!(refused.contains(given[0].0), "{refused}");
        }
    }
}
