//! The records by which a supervisor recovers the volumes of its predecessor: one file a
//! volume on a tmpfs, never with a key.
//!
//! A file is replaced as a whole. A record of an earlier boot, should the directory
//! outlive it, is ignored: its device is gone.

use std::{
    fs,
    io::{self, ErrorKind, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::PathBuf,
};

use serde::{Deserialize, Serialize};

use super::Spec;
use crate::digest;

#[derive(Clone, Debug)]
pub struct SpecRecords {
    dir: PathBuf,
    boot_id: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct SpecRecord {
    boot_id: String,
    spec: Spec,
}

impl SpecRecords {
    /// Opens the records in a directory, which is created if missing.
    pub fn open(dir: PathBuf, boot_id: String) -> io::Result<Self> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)?;
        Ok(Self { dir, boot_id })
    }

    /// Every volume on record.
    pub fn all(&self) -> io::Result<Vec<Spec>> {
        let mut specs = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            match serde_json::from_slice::<SpecRecord>(&fs::read(&path)?) {
                Ok(record) if record.boot_id == self.boot_id => specs.push(record.spec),
                Ok(_) => fs::remove_file(&path)?,
                // Left for the operator. A daemon is found without it, too, when its
                // volume is staged again.
                Err(error) => {
                    tracing::error!(%error, path = %path.display(), "cannot read a record");
                }
            }
        }
        Ok(specs)
    }

    /// Writes a record.
    pub fn keep(&self, spec: &Spec) -> io::Result<()> {
        let record = SpecRecord {
            boot_id: self.boot_id.clone(),
            spec: spec.clone(),
        };
        let path = self.path(&spec.volume_id);
        let new = path.with_extension("new");
        let mut options = fs::OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        options
            .open(&new)?
            .write_all(&serde_json::to_vec(&record)?)?;
        fs::rename(new, path)
    }

    /// Removes a record, if there is one.
    pub fn forget(&self, volume_id: &str) -> io::Result<()> {
        match fs::remove_file(self.path(volume_id)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn path(&self, volume_id: &str) -> PathBuf {
        self.dir
            .join(digest::sha256_hex(volume_id))
            .with_extension("json")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{ceph::krbd::ImageSpec, supervisor::NbdOptions};

    fn spec(volume_id: &str) -> Spec {
        Spec {
            volume_id: volume_id.to_owned(),
            image: ImageSpec {
                cluster_id: "c".to_owned(),
                pool: "p".to_owned(),
                namespace: String::new(),
                name: "i".to_owned(),
                snapshot: None,
            },
            monitors: vec!["h".to_owned()],
            user: "csi".to_owned(),
            options: NbdOptions::parse("nbd:exclusive,io-timeout=7").unwrap(),
            read_only: true,
            fencing: None,
        }
    }

    #[test]
    fn records_are_of_one_boot_and_unreadable_ones_stay() {
        let dir = tempfile::tempdir().unwrap();
        let records =
            |boot: &str| SpecRecords::open(dir.path().join("r"), boot.to_owned()).unwrap();
        let here = records("this");
        here.keep(&spec("a/b\n")).unwrap();
        here.keep(&spec("a/b\n")).unwrap();
        here.keep(&spec("c")).unwrap();
        fs::write(dir.path().join("r/torn.json"), "{").unwrap();
        fs::write(dir.path().join("r/x.new"), "{").unwrap();
        let mut ids: Vec<_> = here
            .all()
            .unwrap()
            .into_iter()
            .map(|spec| spec.volume_id)
            .collect();
        ids.sort();
        assert_eq!(ids, ["a/b\n", "c"]);
        here.forget("c").unwrap();
        here.forget("c").unwrap();
        assert_eq!(here.all().unwrap(), [spec("a/b\n")]);
        assert_eq!(records("next").all().unwrap(), []);
        assert_eq!(here.all().unwrap(), []);
        assert!(dir.path().join("r/torn.json").exists());
    }

    proptest! {
        #[test]
        fn any_record_is_read_or_refused(text: String, options: Vec<String>) {
            let _ = serde_json::from_str::<SpecRecord>(&text);
            let mut value = serde_json::to_value(spec("v")).unwrap();
            value["options"] = options.into();
            let _ = serde_json::from_value::<Spec>(value);
        }
    }
}
