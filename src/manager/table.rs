//! The desired state of the world: what the files of a directory ask for.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

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
    /// same path, or at one below the other, the second is bad. The first is the one that was
    /// applied with this handle and path, else one that was applied, else the first by name.
    /// `applied`: the name, handle and path of each file that was applied.
    pub fn of(
        files: BTreeMap<String, Result<Desired, BadDesired>>,
        incomplete: Option<String>,
        applied: &BTreeSet<(&str, &str, &Path)>,
    ) -> Self {
        let mut table = Self {
            incomplete,
            ..Self::default()
        };
        let mut files: Vec<_> = files.into_iter().collect();
        files.sort_by_key(|(name, file)| {
            let mut before = applied.iter().filter(|(of, ..)| of == name).peekable();
            let was_applied = before.peek().is_some();
            let is_same = file.as_ref().is_ok_and(|now| {
                before.any(|(_, handle, path)| *handle == now.handle(name) && *path == now.path)
            });
            (!is_same, !was_applied)
        });
        for (name, file) in files {
            let checked = file.and_then(|desired| {
                let handle = desired.handle(&name).to_owned();
                let taken = match table.volumes.get(&handle) {
                    Some(other) => Some(format!("handle: is that of {}.toml as well", other.name)),
                    None => conflict(&table, &desired.path),
                };
                match taken {
                    None => Ok((handle, desired)),
                    Some(why) => Err(BadDesired::whole(why)),
                }
            });
            match checked {
                Ok((handle, desired)) => {
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

/// Why a volume cannot be at this path beside those of the table. Of two volumes, one below
/// the other, it would depend on the order of the mounts which of them is to be seen.
fn conflict(table: &DesiredTable, path: &Path) -> Option<String> {
    let others = table.volumes.values();
    let mut conflicts = others.filter_map(|WantedFile { name, desired }| {
        if desired.path == path {
            return Some(format!("path: is that of {name}.toml as well"));
        }
        let is_nested = desired.path.starts_with(path) || path.starts_with(&desired.path);
        is_nested.then(|| format!("path: is above or below that of {name}.toml"))
    });
    conflicts.next()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manager::desired::parse;

    #[test]
    fn a_file_that_takes_anothers_handle_or_path_is_bad() {
        let file = |handle: &str, path: &str| {
            let text = format!("handle = '{handle}'\nsource = {{}}\nraw.path = '{path}'");
            parse("x", &text)
        };
        let applied = [("a", "a", Path::new("/a")), ("b", "b", Path::new("/b"))].into();
        for (handle, path) in [("b", "/a"), ("a", "/b"), ("b", "/b")] {
            let files = [("a", file(handle, path)), ("b", file("b", "/b"))];
            let files = files.map(|(name, file)| (name.to_owned(), file)).into();
            let table = DesiredTable::of(files, None, &applied);
            assert_eq!(table.volumes["b"].name, "b");
            assert_eq!(table.volumes.len(), 1);
            assert!(table.bad.contains_key("a"));
            let names = ["a", "b"].into();
            assert!(table.doubt("a", &names).is_some(), "its volume stays");
        }
        for path in ["/b/sub", "/b/sub/c", "/"] {
            let files = [("a", file("a", path)), ("b", file("b", "/b"))];
            let files = files.map(|(name, file)| (name.to_owned(), file)).into();
            let table = DesiredTable::of(files, None, &applied);
            let why = &table.bad["a"].why;
            assert_eq!(why, "path: is above or below that of b.toml", "{path}");
        }
        let files = [("a", file("a", "/bb")), ("b", file("b", "/b"))];
        let files = files.map(|(name, file)| (name.to_owned(), file)).into();
        assert!(DesiredTable::of(files, None, &applied).bad.is_empty());
        let files = [("a", file("a", "/b")), ("b", file("b", "/a"))];
        let files = files.map(|(name, file)| (name.to_owned(), file)).into();
        let swapped = DesiredTable::of(files, None, &applied);
        assert!(swapped.bad.is_empty());
    }
}
