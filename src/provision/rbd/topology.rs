//! Pools that belong to parts of the Kubernetes cluster, as ceph-csi's
//! `topologyConstrainedPools` lists them:
//!
//! ```json
//! [{"poolName": "east", "dataPool": "east-ec", "domainSegments": [
//!    {"domainLabel": "zone", "value": "east-1"}]}]
//! ```
//!
//! A domain is the last part of a topology key: `zone` stands for
//! `topology.rbd.csi.ceph.com/zone`.

use serde::Deserialize;

use super::super::{AccessibilityRequirements, ProvisionError, TopologySegments, params::bad};

/// One pool, and where it is.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Constrained {
    /// The pool of images.
    #[serde(rename = "poolName")]
    pub name: String,
    /// The pool of their data, if not the same.
    #[serde(rename = "dataPool", default)]
    pub data: Option<String>,
    #[serde(rename = "domainSegments", default)]
    domains: Vec<Domain>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct Domain {
    #[serde(rename = "domainLabel")]
    label: String,
    value: String,
}

/// Parses the parameter.
pub fn parse(text: &str) -> Result<Vec<Constrained>, ProvisionError> {
    let pools: Result<Vec<Constrained>, _> = serde_json::from_str(text);
    pools.map_err(|e| bad("topologyConstrainedPools", text, &e.to_string()))
}

/// The first pool in one of the topologies, the preferred ones first; and the topology in
/// which it is usable: the segments that the pool requires, without the node's own.
pub fn choose<'a>(
    pools: &'a [Constrained],
    accessibility: &AccessibilityRequirements,
) -> Result<(&'a Constrained, TopologySegments), ProvisionError> {
    let mut fits = accessibility.topologies().filter_map(|topology| {
        let pool = pools.iter().find(|pool| pool.is_in(topology))?;
        Some((pool, pool.part_of(topology)))
    });
    fits.next().ok_or_else(|| {
        let names: Vec<_> = pools.iter().map(|pool| pool.name.as_str()).collect();
        ProvisionError::NotHere {
            pool: names.join(", "),
            wanted: format!("{:?}", accessibility.requisite),
        }
    })
}

/// The same for the pool of that name, where a volume is already: a repeat may prefer another
/// topology. None: no pool of that name is in any of the topologies.
pub fn find<'a>(
    pools: &'a [Constrained],
    name: &str,
    accessibility: &AccessibilityRequirements,
) -> Option<(&'a Constrained, TopologySegments)> {
    let named = || pools.iter().filter(|pool| pool.name == name);
    accessibility.topologies().find_map(|topology| {
        let pool = named().find(|pool| pool.is_in(topology))?;
        Some((pool, pool.part_of(topology)))
    })
}

impl Constrained {
    /// Whether it belongs to that part of the cluster.
    pub fn is_in(&self, topology: &TopologySegments) -> bool {
        let mut domains = self.domains.iter();
        domains.all(|domain| topology.iter().any(|segment| domain.is(segment)))
    }

    fn part_of(&self, topology: &TopologySegments) -> TopologySegments {
        let wanted = |segment: &(&String, &String)| self.domains.iter().any(|one| one.is(*segment));
        let part = topology.iter().filter(wanted);
        part.map(|(key, value)| (key.clone(), value.clone()))
            .collect()
    }
}

impl Domain {
    fn is(&self, (key, value): (&String, &String)) -> bool {
        let label = key.split_once('/').map_or(key.as_str(), |(_, label)| label);
        label == self.label && *value == self.value
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const POOLS: &str = r#"[
        {"poolName": "east", "dataPool": "ec",
         "domainSegments": [{"domainLabel": "zone", "value": "e"}]},
        {"poolName": "west", "domainSegments":
         [{"domainLabel": "zone", "value": "w"}, {"domainLabel": "rack", "value": "1"}]}
    ]"#;

    fn topology(segments: &[(&str, &str)]) -> TopologySegments {
        let own = |(label, value): &(&str, &str)| (format!("t.x/{label}"), (*value).to_owned());
        segments.iter().map(own).collect()
    }

    #[test]
    fn the_first_pool_that_fits_is_chosen() {
        let pools = parse(POOLS).unwrap();
        let accessibility = AccessibilityRequirements {
            requisite: vec![
                topology(&[("zone", "e")]),
                topology(&[("zone", "w"), ("rack", "1")]),
            ],
            preferred: vec![topology(&[("zone", "w"), ("rack", "1"), ("host", "h")])],
        };
        let (pool, chosen) = choose(&pools, &accessibility).unwrap();
        // Wherever in the rack: the volume is not its host's.
        assert_eq!(
            (pool.name.as_str(), &chosen),
            ("west", &accessibility.requisite[1])
        );
        let nowhere = AccessibilityRequirements {
            requisite: vec![topology(&[("zone", "w"), ("rack", "2")])],
            preferred: vec![],
        };
        let error = choose(&pools, &nowhere).unwrap_err();
        assert_eq!(error.kind(), crate::Kind::Exhausted);
        assert!(error.to_string().contains("rack"), "{error}");
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "[\\[{\\]}:,\" a-zA-Z]{0,60}") {
            let _ = parse(&text);
        }
    }
}
