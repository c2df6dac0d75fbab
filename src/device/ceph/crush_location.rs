//! Where this node is in the CRUSH map, for reads from the nearest copy.

use std::{collections::BTreeMap, sync::Arc};

use crate::ceph::csi_format::config::ReadAffinity;

/// This node's location: what the operator gave, else by the labels of the node in
/// Kubernetes, as ceph-csi makes it of them.
#[derive(Clone, Debug, Default)]
pub struct CrushLocation {
    /// In every cluster, such as `zone:a|rack:b`.
    pub fixed: Option<String>,
    /// The labels of the node.
    pub labels: Arc<BTreeMap<String, String>>,
    /// The names of those that tell the location, unless a cluster's configuration has some.
    pub names: Vec<String>,
}

impl CrushLocation {
    /// The location in a cluster; none if reads may go anywhere, or it is not known.
    pub fn within(&self, affinity: &ReadAffinity) -> Option<String> {
        if !affinity.enabled {
            return None;
        }
        if self.fixed.is_some() {
            return self.fixed.clone();
        }
        let names = match affinity.crush_location_labels.as_slice() {
            [] => &self.names,
            of_cluster => of_cluster,
        };
        let level = |name: &String| {
            // A label may be there without a value, and a place in the map has a name.
            let value = self.labels.get(name).filter(|value| !value.is_empty())?;
            let kind = match name.rsplit('/').next()? {
                "hostname" => "host",
                kind => kind,
            };
            // Names in the CRUSH map have no dots.
            Some(format!("{kind}:{}", value.replace('.', "-")))
        };
        let levels: Vec<String> = names.iter().filter_map(level).collect();
        Some(levels.join("|")).filter(|location| !location.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_tell_the_location_as_in_ceph_csi() {
        let labels = [
            ("topology.kubernetes.io/region", "r"),
            ("topology.kubernetes.io/zone", "z.1"),
            ("kubernetes.io/hostname", "node-a.example"),
            ("rack", "b"),
            ("row", ""),
        ];
        let own = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let mut location = CrushLocation {
            fixed: None,
            labels: Arc::new(labels.map(own).into()),
            names: names(&["kubernetes.io/hostname", "missing", "row", "rack"]),
        };
        let mut affinity = ReadAffinity::default();
        assert_eq!(location.within(&affinity), None);
        affinity.enabled = true;
        let of = |location: &CrushLocation, affinity: &ReadAffinity| location.within(affinity);
        let by_flag = of(&location, &affinity);
        assert_eq!(by_flag.as_deref(), Some("host:node-a-example|rack:b"));
        affinity.crush_location_labels = names(&[
            "topology.kubernetes.io/region",
            "topology.kubernetes.io/zone",
        ]);
        let by_cluster = of(&location, &affinity);
        assert_eq!(by_cluster.as_deref(), Some("region:r|zone:z-1"));
        affinity.crush_location_labels = names(&["missing"]);
        assert_eq!(of(&location, &affinity), None);
        location.fixed = Some("zone:given".to_owned());
        assert_eq!(of(&location, &affinity), location.fixed);
    }
}
