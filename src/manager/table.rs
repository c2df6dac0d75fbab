//! The desired state of the world: what the files of a directory ask for.

use std::collections::{BTreeMap, BTreeSet};

use super::desired::{BadDesired, Desired};

/// A volume that a file asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedFile {
    /// The file's name, without `.toml`.
    pub name: String,
    pub desired: Desired,
}

/// What all files ask for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DesiredTable {
    /// By handle.
    pub volumes: BTreeMap<String, WantedFile>,
    /// Files that ask for no volume, by name, and why.
    pub bad: BTreeMap<String, BadDesired>,
    /// Why a volume without a file may be wanted nevertheless.
    pub incomplete: Option<String>,
}

impl DesiredTable {
    /// The table of these files. Of two files that ask for the same volume, or for two at the
    /// same path, the second is bad: the first is the one in `applied`, else the first by
    /// name.
    pub fn of(
        files: BTreeMap<String, Result<Desired, BadDesired>>,
        incomplete: Option<String>,
        applied: &BTreeSet<&str>,
    ) -> Self {
        let mut table = Self {
            incomplete,
            ..Self::default()
        };
        let mut paths = BTreeMap::new();
        let (before, new): (Vec<_>, _) =
            (files.into_iter()).partition(|(name, _)| applied.contains(&**name));
        for (name, file) in before.into_iter().chain(new) {
            let checked = file.and_then(|desired| {
                let handle = desired.handle(&name).to_owned();
                let other = (table.volumes.get(&handle)).map(|other| ("handle", &other.name));
                let other = other.or_else(|| Some(("path", paths.get(&desired.path)?)));
                match other {
                    None => Ok((handle, desired)),
                    Some((field, other)) => Err(BadDesired::whole(format!(
                        "{field}: is that of {other}.toml as well"
                    ))),
                }
            });
            match checked {
                Ok((handle, desired)) => {
                    paths.insert(desired.path.clone(), name.clone());
                    table.volumes.insert(handle, WantedFile { name, desired });
                }
                Err(error) => {
                    table.bad.insert(name, error);
                }
            }
        }
        table
    }

    /// Why a volume that the file `name` asked for, and that no file asks for now, may be
    /// wanted nevertheless. `applied`: the names of all files that were applied.
    pub fn doubt(&self, name: &str, applied: &BTreeSet<&str>) -> Option<String> {
        if let Some(why) = &self.incomplete {
            return Some(why.clone());
        }
        // A file may have been renamed and spoilt.
        let new = || self.bad.keys().find(|bad| !applied.contains(&***bad));
        let bad = self.bad.get_key_value(name).map(|(name, _)| name);
        bad.or_else(new)
            .map(|bad| format!("{bad}.toml cannot be used"))
    }
}
