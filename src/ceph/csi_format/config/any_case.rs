//! JSON objects as Go reads them into structures: keys have any case, and `null` is no value.
//!
//! So ceph-csi takes the keys of Rook (`ClusterIDMapping`) and of ceph-csi-operator
//! (`clusterIdMapping`) for its own (`clusterIDMapping`).

use std::collections::BTreeMap;

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error as _},
};
use serde_json::Value;

/// An object; its type gives the keys in lower case.
#[derive(Clone, Debug, Default)]
pub struct AnyCase<T>(pub T);

impl<'de, T: Default + DeserializeOwned> Deserialize<'de> for AnyCase<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let Some(object) = Option::<BTreeMap<String, Value>>::deserialize(from)? else {
            return Ok(Self::default());
        };
        let pairs = object.into_iter();
        let lower: Value = pairs
            .map(|(key, value)| (key.to_ascii_lowercase(), value))
            .collect();
        T::deserialize(lower).map(Self).map_err(D::Error::custom)
    }
}
