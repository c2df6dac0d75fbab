//! The users of `--ceph-secret`, for calls without secrets: ListVolumes,
//! ControllerGetVolume and GetCapacity have none, nor has the controller at its start.
//!
//! Each is a directory with files `userID` and `userKey`, as Kubernetes mounts a Secret.
//! They are read at each use, because a mounted Secret changes.

use std::{
    path::{Path, PathBuf},
    str::FromStr,
};

use super::error::RbdError;
use crate::{ceph::client::Credentials, secret::Secrets};

/// `DIR`, for every cluster, or `CLUSTERID=DIR`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretDir {
    cluster_id: Option<String>,
    dir: PathBuf,
}

impl FromStr for SecretDir {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (cluster_id, dir) = match text.split_once('=') {
            Some((id, dir)) => (Some(id.to_owned()), dir),
            None => (None, text),
        };
        if dir.is_empty() || cluster_id.as_deref() == Some("") {
            return Err("DIR or CLUSTERID=DIR is expected".to_owned());
        }
        Ok(Self {
            cluster_id,
            dir: dir.into(),
        })
    }
}

/// The users by cluster.
#[derive(Clone, Debug, Default)]
pub struct Operators(Vec<SecretDir>);

impl Operators {
    /// The first that fits a cluster is its user.
    pub fn new(dirs: Vec<SecretDir>) -> Self {
        Self(dirs)
    }

    /// Whether there are any.
    pub fn any(&self) -> bool {
        !self.0.is_empty()
    }

    fn dir(&self, cluster_id: &str) -> Option<&PathBuf> {
        let fits = |dir: &&SecretDir| dir.cluster_id.as_deref().is_none_or(|id| id == cluster_id);
        self.0.iter().find(fits).map(|found| &found.dir)
    }

    /// Whether a cluster has a user.
    pub fn has(&self, cluster_id: &str) -> bool {
        self.dir(cluster_id).is_some()
    }

    /// The user of a cluster.
    pub fn credentials(&self, cluster_id: &str) -> Result<Credentials, RbdError> {
        Ok(self.read(cluster_id)?.0)
    }

    /// All that is in the directory of a cluster's user, as a request's secrets.
    pub fn secrets(&self, cluster_id: &str) -> Result<Secrets, RbdError> {
        Ok(self.read(cluster_id)?.1)
    }

    fn read(&self, cluster_id: &str) -> Result<(Credentials, Secrets), RbdError> {
        match self.dir(cluster_id) {
            Some(dir) => read(dir),
            None => Err(RbdError::NoSecrets(cluster_id.to_owned())),
        }
    }

    /// Fails with the first directory that has no user.
    pub fn check(&self) -> Result<(), RbdError> {
        self.0.iter().try_for_each(|it| read(&it.dir).map(drop))
    }
}

fn read(dir: &Path) -> Result<(Credentials, Secrets), RbdError> {
    let unusable = |source| RbdError::OwnSecrets {
        path: dir.to_owned(),
        source,
    };
    let secrets = Secrets::read_dir(dir).map_err(|e| unusable(e.into()))?;
    let credentials = Credentials::from_secrets(&secrets).map_err(|e| unusable(e.into()))?;
    Ok((credentials, secrets))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn each_cluster_has_its_user() {
        let home = tempfile::tempdir().unwrap();
        let key = "AQDeFvVfAAAAABAAAAAAAAAAAAAAAAAAAAAAAA==";
        for (dir, user) in [("one", "first"), ("any", "second\n")] {
            let dir = home.path().join(dir);
            fs::create_dir(&dir).unwrap();
            fs::write(dir.join("userID"), user).unwrap();
            fs::write(dir.join("userKey"), key).unwrap();
        }
        let at = |name: &str| home.path().join(name).display().to_string();
        let dirs = [
            format!("a={}", at("one")),
            at("any"),
            format!("b={}", at("none")),
        ];
        let operators = Operators::new(dirs.map(|dir| dir.parse().unwrap()).into());
        assert_eq!(operators.credentials("a").unwrap().user, "first");
        assert_eq!(operators.credentials("b").unwrap().user, "second");
        let said = operators.check().unwrap_err().to_string();
        assert!(said.contains("none"), "{said}");
        let there = Operators::new(vec![at("any").parse().unwrap()]);
        there.check().unwrap();
        let missing = Operators::new(vec![at("none").parse().unwrap()]);
        let error = missing.credentials("a").unwrap_err();
        assert!(error.to_string().contains("none"), "{error}");
        assert!(matches!(
            Operators::default().credentials("a"),
            Err(RbdError::NoSecrets(_))
        ));
        assert!("=x".parse::<SecretDir>().is_err() && "x=".parse::<SecretDir>().is_err());
    }
}
