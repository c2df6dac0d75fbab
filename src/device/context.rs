//! Reading a volume context: keys of Kubernetes' own are left alone.

use std::{borrow::Cow, collections::HashMap, ops::RangeInclusive};

use crate::parse_bool::parse_bool;

/// A volume context that names no source.
///
/// Remedy: correct the volume's attributes (`kubectl get pv NAME -o yaml`), by
/// [Parameters](parameters.md).
#[derive(Debug, thiserror::Error)]
#[error("volume_context: {key}: {why}")]
pub struct SourceError {
    /// The key at fault.
    pub key: Cow<'static, str>,
    /// What is wrong with its value.
    pub why: String,
}

/// Whether Kubernetes or one of its sidecars sets this key, by the domain before the
/// slash: `csi.storage.k8s.io/pod.name` or
/// `storage.kubernetes.io/csiProvisionerIdentity`.
pub fn set_by_kubernetes(key: &str) -> bool {
    key.split_once('/').is_some_and(|(domain, _)| {
        domain.ends_with(".k8s.io") || domain.ends_with(".kubernetes.io")
    })
}

/// The keys of every backend's volume context: of the file system, and of the controller's
/// catalogue.
const COMMON: [&str; 4] = ["fsType", "mkfsOptions", "name", "pool"];

/// A volume context, read key by key.
#[derive(Clone, Copy, Debug)]
pub struct VolumeContext<'a>(pub &'a HashMap<String, String>);

impl<'a> VolumeContext<'a> {
    /// The value, where there is one; an empty one is none.
    pub fn get(self, key: &str) -> Option<&'a str> {
        let value = self.0.get(key).map(String::as_str);
        value.filter(|value| !value.is_empty())
    }

    /// The keys other than these, sorted, without those that Kubernetes sets.
    pub fn unlisted(self, known: &[&str]) -> Vec<&'a str> {
        let listed =
            |key: &str| known.contains(&key) || COMMON.contains(&key) || set_by_kubernetes(key);
        let keys = self.0.keys().map(String::as_str);
        let mut unlisted: Vec<_> = keys.filter(|key| !listed(key)).collect();
        unlisted.sort_unstable();
        unlisted
    }

    /// Refuses every key other than these: a misspelled one would be ignored silently.
    pub fn refuse_unlisted(self, known: &[&str]) -> Result<(), SourceError> {
        match self.unlisted(known).first() {
            None => Ok(()),
            Some(key) => Err(SourceError {
                key: Cow::Owned((*key).to_owned()),
                why: format!(
                    "is unknown; there are {}, {}",
                    known.join(", "),
                    COMMON.join(", ")
                ),
            }),
        }
    }

    /// The value of a required key.
    pub fn need(self, key: &'static str) -> Result<&'a str, SourceError> {
        let missing = || SourceError {
            key: key.into(),
            why: "is required".to_owned(),
        };
        self.get(key).ok_or_else(missing)
    }

    /// `true` or `false`, or another word for it.
    pub fn switch(self, key: &'static str, default: bool) -> Result<bool, SourceError> {
        let Some(text) = self.get(key) else {
            return Ok(default);
        };
        parse_bool(text).ok_or_else(|| SourceError {
            key: key.into(),
            why: format!("{text:?} is neither true nor false"),
        })
    }

    /// A number within a range.
    pub fn number<N: TryFrom<u32>>(
        self,
        key: &'static str,
        range: RangeInclusive<u32>,
    ) -> Result<Option<N>, SourceError> {
        let Some(text) = self.get(key) else {
            return Ok(None);
        };
        let number = text.parse().ok().filter(|number| range.contains(number));
        let number = number.and_then(|number| N::try_from(number).ok());
        number.map(Some).ok_or_else(|| SourceError {
            key: key.into(),
            why: format!(
                "{text:?} is no number from {} to {}",
                range.start(),
                range.end()
            ),
        })
    }
}
