//! Secrets: values that are wiped when dropped, and never shown, logged or written to
//! disk.

use std::{collections::HashMap, fmt, fs, io, path::Path};

use zeroize::Zeroizing;

/// The name of a secret that is a passphrase.
pub const PASSPHRASE: &str = "encryptionPassphrase";

/// One secret value.
#[derive(Clone)]
pub struct Secret(Zeroizing<String>);

impl Secret {
    /// Takes the value, without leaving a copy.
    pub fn new(value: String) -> Self {
        Self(Zeroizing::new(value))
    }

    /// The value, for the code that passes it on.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// The same without the newlines at its end, if it has any.
    pub fn without_newline(&self) -> Option<Self> {
        let bare = self.0.trim_end_matches('\n');
        (bare.len() < self.0.len()).then(|| Self::new(bare.to_owned()))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// The secrets of a request, by name.
#[derive(Clone, Default)]
pub struct Secrets(HashMap<String, Secret>);

impl Secrets {
    /// Reads a directory in which Kubernetes mounts a Secret: one file for each key. A
    /// trailing newline, as of `echo`, is part of a passphrase alone: in a request kubelet and
    /// the sidecars give it, too, and no name, key or address ends in one.
    pub fn read_dir(dir: &Path) -> io::Result<Self> {
        let mut found = HashMap::new();
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            // Kubernetes adds directories, to replace all files atomically.
            if let Ok(name) = entry.file_name().into_string()
                && fs::metadata(entry.path())?.is_file()
            {
                let exact = Secret::new(fs::read_to_string(entry.path())?);
                let bare = (name != PASSPHRASE).then(|| exact.without_newline());
                found.insert(name, bare.flatten().unwrap_or(exact));
            }
        }
        Ok(Self(found))
    }

    /// The map of a request.
    pub fn to_wire(&self) -> HashMap<String, String> {
        let pair = |(name, secret): (&String, &Secret)| (name.clone(), secret.reveal().to_owned());
        self.0.iter().map(pair).collect()
    }

    /// The secret of that name; an empty one is none.
    pub fn get(&self, name: &str) -> Option<&Secret> {
        self.0
            .get(name)
            .filter(|secret| !secret.reveal().is_empty())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether these secrets differ, so that an authentication that failed may succeed.
    pub fn differ(&self, other: &Self) -> bool {
        let same = |(name, secret): (&String, &Secret)| {
            let other = other.0.get(name);
            other.is_some_and(|other| other.reveal() == secret.reveal())
        };
        self.0.len() != other.0.len() || !self.0.iter().all(same)
    }
}

impl From<HashMap<String, String>> for Secrets {
    fn from(map: HashMap<String, String>) -> Self {
        let secret = |(name, value)| (name, Secret::new(value));
        Self(map.into_iter().map(secret).collect())
    }
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mounted_secret_is_read() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("..2026")).unwrap();
        fs::write(dir.path().join("userID"), "csi\n").unwrap();
        fs::write(dir.path().join("userKey"), "AQ==").unwrap();
        fs::write(dir.path().join("encryptionPassphrase"), "open\n").unwrap();
        let wire = Secrets::read_dir(dir.path()).unwrap().to_wire();
        let given = [
            ("userID", "csi"),
            ("userKey", "AQ=="),
            ("encryptionPassphrase", "open\n"),
        ];
        assert_eq!(
            wire,
            given
                .map(|(name, value)| (name.into(), value.into()))
                .into()
        );
        assert!(Secrets::read_dir(&dir.path().join("none")).is_err());
    }

    #[test]
    fn a_secret_is_never_shown() {
        let given = [("userKey", "AQ=="), ("empty", "")];
        let secrets: Secrets = given
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into_iter()
            .collect::<HashMap<_, _>>()
            .into();
        assert_eq!(secrets.get("userKey").unwrap().reveal(), "AQ==");
        assert!(secrets.get("empty").is_none());
        assert!(secrets.get("other").is_none());
        let none = Secrets::default();
        assert!(secrets.differ(&none) && none.differ(&secrets));
        assert!(!secrets.differ(&secrets.clone()));
        let shown = format!("{secrets:?} {:?}", secrets.get("userKey"));
        assert!(
            shown.contains("userKey") && !shown.contains("AQ"),
            "{shown}"
        );
    }
}
