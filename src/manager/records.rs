//! What the manager set out to do, on disk: one file a volume below the run directory, since
//! devices and mounts die with the kernel, too. For lanes.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{applied::Applied, maps::DeviceMaps};
use crate::{
    digest,
    file::{self, FileDurability},
};

/// The records of one boot.
#[derive(Clone, Debug)]
pub struct AppliedRecords {
    dir: PathBuf,
    boot_id: String,
    maps: DeviceMaps,
}

/// Holds the id of the boot in which the volumes were parked.
const PARKED: &str = "parked";

#[derive(Serialize, Deserialize)]
struct AppliedRecord {
    handle: String,
    boot_id: String,
    applied: Applied,
}

impl AppliedRecords {
    /// Opens the store, making its directory.
    pub fn open(run_dir: &Path, boot_id: String) -> io::Result<Self> {
        let dir = run_dir.join("managed");
        fs::create_dir_all(&dir)?;
        let maps = DeviceMaps::new(run_dir);
        Ok(Self { dir, boot_id, maps })
    }

    /// Every record of this boot, by handle; removes those of earlier ones, and maps without a
    /// record. Files that cannot be read are named in the log and left alone: then their volumes
    /// and all maps are, too.
    pub fn load(&self) -> io::Result<BTreeMap<String, Applied>> {
        let (mut loaded, mut are_all_read) = (BTreeMap::<_, Applied>::new(), true);
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let parsed = fs::read(&path)
                .and_then(|bytes| serde_json::from_slice(&bytes).map_err(io::Error::from));
            match parsed {
                Ok(AppliedRecord { boot_id, .. }) if boot_id != self.boot_id => {
                    fs::remove_file(&path)?;
                }
                Ok(record) => {
                    loaded.insert(record.handle, record.applied);
                }
                Err(error) => {
                    are_all_read = false;
                    tracing::error!(path = %path.display(), %error, "cannot read a record of the volume manager; leaving its volume alone");
                }
            }
        }
        if are_all_read {
            let raw = loaded.iter().filter(|(_, applied)| applied.is_raw());
            self.maps.retain(raw.map(|(handle, _)| handle));
        }
        Ok(loaded)
    }

    /// Before a raw volume counts as published, it is mapped for its file.
    pub fn save(&self, handle: &str, applied: &Applied) -> io::Result<()> {
        if !applied.is_raw() {
            self.maps.remove(handle);
        } else if applied.has_options {
            self.maps
                .set(handle, &applied.name, &applied.desired.path)?;
        }
        let record = AppliedRecord {
            handle: handle.to_owned(),
            boot_id: self.boot_id.clone(),
            applied: applied.clone(),
        };
        let bytes = serde_json::to_vec(&record)?;
        file::replace(&self.path_of(handle), &bytes, FileDurability::Volatile)
    }

    /// Records whether the volumes are parked.
    pub fn park(&self, is_parked: bool) -> io::Result<()> {
        let path = self.dir.join(PARKED);
        if is_parked {
            file::replace(&path, self.boot_id.as_bytes(), FileDurability::Volatile)
        } else {
            file::remove(&path, FileDurability::Volatile)
        }
    }

    /// Whether the volumes were parked in this boot.
    pub fn is_parked(&self) -> io::Result<bool> {
        match fs::read(self.dir.join(PARKED)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            read => Ok(read? == self.boot_id.as_bytes()),
        }
    }

    /// Removes the map of a raw volume, before it is unpublished.
    pub fn unmap(&self, handle: &str) {
        self.maps.remove(handle);
    }

    pub fn forget(&self, handle: &str) -> io::Result<()> {
        self.maps.remove(handle);
        file::remove(&self.path_of(handle), FileDurability::Volatile)
    }

    fn path_of(&self, handle: &str) -> PathBuf {
        self.dir.join(digest::sha256_hex(handle) + ".json")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manager::desired::parse;

    #[test]
    fn records_are_of_one_boot() {
        let dir = tempfile::tempdir().unwrap();
        let applied = Applied {
            name: "data".to_owned(),
            desired: parse("data", "source = {}\nraw.path = '/x'").unwrap(),
            grown_to: Some("4Ki".parse().unwrap()),
            has_options: true,
            in_doubt: Some(vec!["sync".to_owned()]),
            refused: None,
        };
        let open = |boot: &str| AppliedRecords::open(dir.path(), boot.to_owned()).unwrap();
        open("one").save("a/b", &applied).unwrap();
        open("one").save("c", &applied).unwrap();
        open("one").forget("c").unwrap();
        open("one").forget("c").unwrap();
        let of_one = BTreeMap::from([("a/b".to_owned(), applied.clone())]);
        let mapped = || fs::read_link(dir.path().join(r"devices/a\x2fb/data")).ok();
        assert_eq!(mapped(), Some("/x".into()));
        assert_eq!(open("one").load().unwrap(), of_one);
        assert_eq!(mapped(), Some("/x".into()));
        // A volume that becomes a mounted one has no map.
        let mounted = Applied {
            desired: parse("data", "source = {}\nmount.path = '/x'").unwrap(),
            ..applied.clone()
        };
        open("one").save("a/b", &mounted).unwrap();
        assert_eq!(mapped(), None);
        open("one").save("a/b", &applied).unwrap();
        // Somebody else's.
        fs::write(dir.path().join("devices/file"), "").unwrap();
        // The map may be that of a record that cannot be read.
        let unread = dir.path().join("managed/x.json");
        fs::write(&unread, "{").unwrap();
        assert_eq!(open("one").load().unwrap(), of_one);
        assert!(open("two").load().unwrap().is_empty());
        assert_eq!(mapped(), Some("/x".into()));
        fs::remove_file(unread).unwrap();
        assert!(open("one").load().unwrap().is_empty());
        assert_eq!(mapped(), None);
    }
}
