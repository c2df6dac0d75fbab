//! The parameters of a storage class for RBD volumes, as ceph-csi has them.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    str::FromStr,
    sync::{Mutex, PoisonError},
};

use super::{
    super::{
        AccessibilityRequirements, Parameters, ProvisionError, TopologySegments, VolumeUse,
        params::{bad, check_mkfs_options, yes_or_no},
    },
    encryption::Encryption,
    qos::QosLimits,
    topology::{self, Constrained},
};
use crate::ceph::{
    client::rbd::{Features, ImageOptions},
    csi_format::map_options::{KRBD, MapOptions, NbdOptions, OptionError, is_image_name, part_for},
};

/// A parsed storage class.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Class {
    /// `clusterID`: the cluster in the configuration.
    pub cluster_id: String,
    /// `pool`: the image's, unless `topologyConstrainedPools` names another; empty if that names all
    /// pools.
    pub pool: String,
    /// `journalPool`: that of the journal's directory; by default `pool`, or else the
    /// image's.
    pub journal_pool: Option<String>,
    /// `dataPool`, `imageFeatures`, `objectSize`, `stripeUnit`, `stripeCount`.
    pub options: ImageOptions,
    /// `volumeNamePrefix`: the prefix of the image's name.
    pub name_prefix: Option<String>,
    /// `encrypted`, `encryptionKMSID`, `encryptionType`.
    pub encryption: Option<Encryption>,
    /// `BaseReadIops` and the like.
    pub limits: QosLimits,
    /// The Kubernetes namespace of the claim.
    pub owner: String,
    /// `topologyConstrainedPools`.
    constrained: Vec<Constrained>,
    /// The part of the volume context that comes from the class.
    context: BTreeMap<String, String>,
}

/// The pools of one volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CephPools {
    /// Of the journal's directory.
    pub journal: String,
    pub image: String,
    /// Of the image's data, if not the same.
    pub data: Option<String>,
    /// The topology from which the volume is reachable; empty: from anywhere.
    pub topology: TopologySegments,
}

impl Class {
    /// Parses a storage class' parameters.
    pub fn parse(given: &HashMap<String, String>) -> Result<Self, ProvisionError> {
        let mut class = Self::default();
        let (mut features, mut mounter) = (None, "rbd");
        let (mut unit, mut count) = (None, None);
        // Sorted, so that of two mistakes the error always names the same one.
        for (name, value) in given.iter().collect::<BTreeMap<_, _>>() {
            match name.as_str() {
                OWNER => class.owner.clone_from(value),
                reserved if reserved.starts_with("csi.storage.k8s.io/") => continue,
                "backend" if value == "rbd" => continue,
                "backend" => return Err(bad("backend", value, "clusterID is for `rbd`")),
                "clusterID" => class.cluster_id = full("clusterID", value)?,
                "pool" => class.pool = full("pool", value)?,
                "journalPool" => class.journal_pool = Some(full("journalPool", value)?),
                "dataPool" => class.options.data_pool = Some(full("dataPool", value)?),
                "imageFeatures" => features = Some(full("imageFeatures", value)?),
                "objectSize" => class.options.object_size = Some(object_size(value)?),
                "stripeUnit" => unit = Some(number("stripeUnit", value)?),
                "stripeCount" => count = Some(number("stripeCount", value)?),
                "volumeNamePrefix" => {
                    check_name_prefix("volumeNamePrefix", value)?;
                    class.name_prefix = Some(value.clone());
                }
                "topologyConstrainedPools" => class.constrained = topology::parse(value)?,
                "imageFormat" if value != "2" => {
                    let why = "images of format 1 are made no more: it is `2`";
                    return Err(bad("imageFormat", value, why));
                }
                "thickProvision" if yes_or_no("thickProvision", value)? => {
                    return Err(bad(
                        "thickProvision",
                        value,
                        "images are thin: it is `false`",
                    ));
                }
                "imageFormat" | "thickProvision" => {}
                "mounter" => mounter = mounter_named(value)?,
                limit if QosLimits::is_of_class(limit) => {}
                _ if FOR_THE_NODE.contains(&name.as_str()) => {}
                _ => match UNSUPPORTED.iter().find(|key| *key == name) {
                    Some(key) => return Err(bad(key, value, "this driver does not support it")),
                    None => pass_over("StorageClass", name),
                },
            }
            if name != OWNER {
                class.context.insert(name.clone(), value.clone());
            }
        }
        full("clusterID", &class.cluster_id)?;
        // Each topology may have a pool of its own, and no other.
        if class.constrained.is_empty() {
            full("pool", &class.pool)?;
        }
        if let Some(list) = features {
            class.options.features = Some(checked_features(&list, mounter)?);
        }
        class.options.striping = striping(unit, count, class.options.object_size)?;
        class.check_mapping(mounter)?;
        class.limits = QosLimits::of_class(given)?;
        class.encryption = Encryption::of_class(given, &class.owner)?;
        Ok(class)
    }

    /// Refuses uses that would destroy data; returns the file systems that the volume may hold.
    pub fn file_systems(uses: &[VolumeUse]) -> Result<Vec<&'static str>, ProvisionError> {
        let several = uses.iter().find(|volume_use| volume_use.many_nodes_write);
        if several.is_some_and(|volume_use| volume_use.fs_type.is_some()) {
            return Err(ProvisionError::UnsupportedUse(
                "ext4, xfs and btrfs are for one node at a time: several nodes with a writer \
                 among them destroy the file system; request a block volume, or read-only access"
                    .to_owned(),
            ));
        }
        Parameters::default().file_systems(uses)
    }

    fn parameter(&self, name: &str) -> &str {
        self.context.get(name).map_or("", String::as_str)
    }

    /// Refuses map options that the node refuses.
    fn check_mapping(&self, mounter: &str) -> Result<(), ProvisionError> {
        let (mapping, unmapping) = (self.parameter("mapOptions"), self.parameter("unmapOptions"));
        let refused = |name, value| move |error: OptionError| bad(name, value, &error.to_string());
        MapOptions::parse(mapping).map_err(refused("mapOptions", mapping))?;
        part_for(KRBD, unmapping).map_err(refused("unmapOptions", unmapping))?;
        let name = "tryOtherMounters";
        let tries = match self.parameter(name) {
            "" => false,
            text => yes_or_no(name, text)?,
        };
        if tries || mounter == "rbd-nbd" {
            NbdOptions::parse(mapping).map_err(refused("mapOptions", mapping))?;
        }
        Ok(())
    }

    /// Refuses mkfs options that the node refuses for these file systems.
    pub fn check_mkfs(&self, file_systems: &[&'static str]) -> Result<(), ProvisionError> {
        check_mkfs_options(self.parameter("mkfsOptions"), file_systems)
    }

    /// The pools for a volume with these requirements.
    pub fn pools(
        &self,
        accessibility: &AccessibilityRequirements,
    ) -> Result<CephPools, ProvisionError> {
        if self.constrained.is_empty() || *accessibility == AccessibilityRequirements::default() {
            let journal = self.journal_pool.as_ref().unwrap_or(&self.pool);
            return Ok(CephPools {
                journal: journal.clone(),
                image: full("pool", &self.pool)?,
                data: self.options.data_pool.clone(),
                topology: TopologySegments::new(),
            });
        }
        let (pool, topology) = topology::choose(&self.constrained, accessibility)?;
        Ok(self.constrained_pools(pool, topology))
    }

    fn constrained_pools(&self, pool: &Constrained, topology: TopologySegments) -> CephPools {
        let journal = self.journal_pool.as_ref().unwrap_or(&self.pool);
        let journal = Some(journal).filter(|name| !name.is_empty());
        CephPools {
            journal: journal.unwrap_or(&pool.name).clone(),
            image: pool.name.clone(),
            data: pool.data.clone(),
            topology,
        }
    }

    /// The pools of a volume that is in pool `image` already, if the class and these
    /// requirements allow it there.
    pub fn pools_with(
        &self,
        image: &str,
        accessibility: &AccessibilityRequirements,
    ) -> Option<CephPools> {
        let chosen = self.pools(accessibility).ok();
        chosen.filter(|pools| pools.image == image).or_else(|| {
            let (pool, topology) = topology::find(&self.constrained, image, accessibility)?;
            Some(self.constrained_pools(pool, topology))
        })
    }

    /// The pools whose journals may have a volume of this class, besides that which
    /// [`pools`](Self::pools) chooses: a create with other requirements chose another.
    pub fn other_journals<'a>(&'a self, chosen: &'a CephPools) -> impl Iterator<Item = &'a str> {
        let is_fixed = self.journal_pool.is_some() || !self.pool.is_empty();
        let all = self.constrained.iter().filter(move |_| !is_fixed);
        let names = all.map(|pool| pool.name.as_str());
        names.filter(|name| *name != chosen.journal)
    }

    /// The keys of the volume context beside those that name the image.
    pub fn context(&self) -> &BTreeMap<String, String> {
        &self.context
    }
}

const OWNER: &str = "csi.storage.k8s.io/pvc/namespace";
/// Keys of ceph-csi that change how the data is stored: without them the volume would be
/// another than its class promises.
const UNSUPPORTED: [&str; 4] = [
    "encryptionCipher",
    "encryptionKeySize",
    "encryptionSectorSize",
    "integrityMode",
];
/// The keys that the node, or another module, reads.
const FOR_THE_NODE: &[&str] = &[
    "tryOtherMounters",
    "mapOptions",
    "unmapOptions",
    "mkfsOptions",
    "encrypted",
    "encryptionKMSID",
    "encryptionType",
    "cephLogDir",
    "cephLogStrategy",
    "cephLogFileEnabled",
];

/// Logs an unknown parameter, once for each name: ceph-csi passes over them, so that a class in
/// use may have any.
pub fn pass_over(kind: &str, name: &str) {
    static NAMED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    /// No caller fills the memory.
    const MOST: usize = 1000;
    let mut named = NAMED.lock().unwrap_or_else(PoisonError::into_inner);
    if named.len() < MOST && named.insert(format!("{kind} {name}")) {
        tracing::warn!(
            kind,
            parameter = name,
            "ignored an unknown parameter; is it misspelt?"
        );
    }
}

/// The features that a class may request, each with those that it depends on.
fn checked_features(list: &str, mounter: &str) -> Result<Features, ProvisionError> {
    let refuse = |why: String| Err(bad("imageFeatures", list, &why));
    let features = match Features::from_str(list) {
        Ok(features) => features,
        Err(error) => return refuse(error.to_string()),
    };
    let needs = [
        (Features::OBJECT_MAP, Features::EXCLUSIVE_LOCK),
        (Features::FAST_DIFF, Features::OBJECT_MAP),
        (Features::JOURNALING, Features::EXCLUSIVE_LOCK),
    ];
    for (feature, needed) in needs {
        if features.contains(feature) && !features.contains(needed) {
            return refuse(format!("{feature} needs {needed}"));
        }
    }
    if features.contains(Features::JOURNALING) && mounter != "rbd-nbd" {
        return refuse("the kernel has no journaling: it needs mounter = rbd-nbd".to_owned());
    }
    let askable = Features::LAYERING
        | Features::EXCLUSIVE_LOCK
        | Features::OBJECT_MAP
        | Features::FAST_DIFF
        | Features::DEEP_FLATTEN
        | Features::JOURNALING;
    match features.without(askable) {
        none if none == Features::default() => Ok(features),
        others => refuse(format!("a class cannot request {others}")),
    }
}

fn mounter_named(value: &str) -> Result<&'static str, ProvisionError> {
    let known = ["rbd", "rbd-nbd"].into_iter().find(|known| *known == value);
    known.ok_or_else(|| bad("mounter", value, "it is rbd or rbd-nbd"))
}

fn full(name: &'static str, value: &str) -> Result<String, ProvisionError> {
    match value {
        "" => Err(bad(name, value, "it is required, and must not be empty")),
        value => Ok(value.to_owned()),
    }
}

/// Refuses a prefix of names that nodes could not map.
pub fn check_name_prefix(name: &'static str, value: &str) -> Result<(), ProvisionError> {
    if is_image_name(value) {
        return Ok(());
    }
    let why = "it must not be empty, begin with `-`, or have `/`, `@`, blanks or control \
               characters: nodes could not map the image";
    Err(bad(name, value, why))
}

/// librbd's object sizes: powers of two, of an `order` from 12 to 25.
fn object_size(value: &str) -> Result<u64, ProvisionError> {
    match number("objectSize", value)? {
        bytes if bytes.is_power_of_two() && (1 << 12..=1 << 25).contains(&bytes) => Ok(bytes),
        _ => Err(bad(
            "objectSize",
            value,
            "it is a power of two from 4K to 32M",
        )),
    }
}

/// The striping of an image over its objects (of 4 MiB by default).
fn striping(
    unit: Option<u64>,
    count: Option<u64>,
    object_size: Option<u64>,
) -> Result<Option<(u64, u64)>, ProvisionError> {
    let refuse = |unit: u64, why| Err(bad("stripeUnit", &unit.to_string(), why));
    match (unit, count) {
        (None, None) => Ok(None),
        (Some(unit), Some(_)) if !object_size.unwrap_or(4 << 20).is_multiple_of(unit) => {
            refuse(unit, "it must divide objectSize, which is 4M if not given")
        }
        (Some(unit), Some(count)) => Ok(Some((unit, count))),
        (unit, _) => refuse(
            unit.or(count).unwrap_or_default(),
            "stripeUnit and stripeCount require each other",
        ),
    }
}

/// A number of bytes, or of anything: decimal, or with Ceph's K, M, G (powers of
/// 1024).
fn number(name: &'static str, value: &str) -> Result<u64, ProvisionError> {
    let digits = value.trim_end_matches("iB").trim_end_matches('B');
    let (digits, shift) = match digits.char_indices().last() {
        Some((end, 'K' | 'k')) => (&digits[..end], 10),
        Some((end, 'M' | 'm')) => (&digits[..end], 20),
        Some((end, 'G' | 'g')) => (&digits[..end], 30),
        _ => (digits, 0),
    };
    let parsed: Option<u64> = digits.parse().ok();
    let bytes = parsed.and_then(|number| number.checked_mul(1 << shift));
    let bytes = bytes.filter(|bytes| *bytes > 0);
    bytes.ok_or_else(|| bad(name, value, "it is a number, such as 4194304 or 4M"))
}

#[cfg(test)]
mod tests;
