//! The directory of the files. Everything here blocks, and is for lanes and uringctl.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, OpenOptions},
    io::{self, Read as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use super::desired::{self, BadDesired, Desired};
use crate::file::{self, FileDurability};

/// The file that a directory must have for a volume without a file to be undone: if the
/// directory is a mount point, and nothing is mounted there, it is empty.
pub const MARKER: &str = ".uring-csi-volumes";

/// How a file's name ends.
const EXTENSION: &str = "toml";

/// The longest file that is read, in bytes.
const MAX_BYTES: u64 = 64 << 10;

/// The directory.
#[derive(Clone, Debug)]
pub struct VolumesDir(PathBuf);

/// What is in it at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryContent {
    /// The texts of its files by name, or why one cannot be read.
    files: BTreeMap<String, Result<String, String>>,
    /// Whether it has the marker.
    pub has_marker: bool,
}

impl VolumesDir {
    pub fn new(path: PathBuf) -> Self {
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Reads every file. Names that begin with a dot or end otherwise are not files of
    /// volumes: editors leave such.
    pub fn read(&self) -> io::Result<DirectoryContent> {
        let mut content = DirectoryContent {
            files: BTreeMap::new(),
            has_marker: false,
        };
        for entry in fs::read_dir(&self.0)? {
            let path = entry?.path();
            let file_name = path.file_name().unwrap_or_default().to_string_lossy();
            if file_name == MARKER {
                content.has_marker = true;
            } else if let Some(name) = name_of(&path) {
                match read_text(&path) {
                    // Renamed or removed since the directory was listed; but the target of a
                    // link may come back.
                    Err(error)
                        if error.kind() == io::ErrorKind::NotFound
                            && fs::symlink_metadata(&path).is_err() => {}
                    text => {
                        let text = text.map_err(|error| format!("cannot be read: {error}"));
                        content.files.insert(name, text);
                    }
                }
            }
        }
        Ok(content)
    }

    /// Makes the directory, with the marker.
    pub fn make(&self) -> io::Result<()> {
        fs::create_dir_all(&self.0)?;
        file::replace(&self.0.join(MARKER), b"", FileDurability::Durable)
    }

    /// Writes the file of this name, all of it at once. A directory without a marker may be a
    /// mount point on which nothing is mounted.
    pub fn write(&self, name: &str, text: &str) -> io::Result<()> {
        if !self.0.join(MARKER).exists() {
            return Err(io::Error::other(format!(
                "it has no file {MARKER}; make one, if it is the directory of the volumes"
            )));
        }
        file::replace(
            &self.path_of(name),
            text.as_bytes(),
            FileDurability::Durable,
        )
    }

    /// Fails if there is no file of this name.
    pub fn require(&self, name: &str) -> io::Result<()> {
        fs::symlink_metadata(self.path_of(name)).map(drop)
    }

    /// Removes the file of this name; fails if there is none.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        self.require(name)?;
        file::remove(&self.path_of(name), FileDurability::Durable)
    }

    fn path_of(&self, name: &str) -> PathBuf {
        self.0.join(format!("{name}.{EXTENSION}"))
    }
}

impl DirectoryContent {
    /// The names whose files are others than in `before`, or are in one of the two only.
    pub fn changed_since(&self, before: &Self) -> BTreeSet<String> {
        let names = self.files.keys().chain(before.files.keys());
        let differs = |name: &&String| self.files.get(*name) != before.files.get(*name);
        names.filter(differs).cloned().collect()
    }

    /// What is here without what differs from `earlier`, read shortly before: that is as in
    /// `passed`, the content that was used last.
    pub fn stable(mut self, earlier: &Self, passed: Option<&Self>) -> Self {
        for name in self.changed_since(earlier) {
            let before = passed.and_then(|passed| passed.files.get(&name).cloned());
            // Without a text, so that what may be a renamed file takes no volume away.
            let text = before.unwrap_or_else(|| Err("changes all the time".to_owned()));
            self.files.insert(name, text);
        }
        if self.has_marker != earlier.has_marker {
            self.has_marker = passed.is_some_and(|passed| passed.has_marker);
        }
        self
    }

    /// Takes this text as that of the file of this name.
    pub fn replace(&mut self, name: String, text: String) {
        self.files.insert(name, Ok(text));
    }

    /// What the files ask for, by name.
    pub fn parse(&self) -> BTreeMap<String, Result<Desired, BadDesired>> {
        let parse = |(name, text): (&String, &Result<String, String>)| {
            let parsed = match text {
                Ok(text) => desired::parse(name, text),
                Err(why) => Err(BadDesired::whole(why)),
            };
            (name.clone(), parsed)
        };
        self.files.iter().map(parse).collect()
    }
}

/// The name of the volume's file at a path, if it is one.
pub fn name_of(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let name = file.strip_suffix(EXTENSION)?.strip_suffix('.')?;
    (!file.starts_with('.')).then(|| name.to_owned())
}

fn read_text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    // A FIFO has no writer to wait for.
    let file = (OpenOptions::new().read(true))
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a file"));
    }
    let read = file.take(MAX_BYTES + 1).read_to_string(&mut text)?;
    if read as u64 > MAX_BYTES {
        return Err(io::Error::other("it is longer than 64 KiB"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAW: &str = "source = {}\nraw.path = '/x'\n";

    #[test]
    fn what_editors_leave_is_no_file_of_a_volume() {
        let dir = tempfile::tempdir().unwrap();
        let directory = VolumesDir::new(dir.path().join("volumes"));
        assert!(directory.read().is_err());
        assert!(directory.write("data", RAW).is_err(), "it is not made");
        directory.make().unwrap();
        directory.write("data", RAW).unwrap();
        let at = |name: &str| directory.path().join(name);
        for name in [
            ".data.toml.swp",
            ".data.toml",
            ".toml",
            "data.toml~",
            "4913",
            "x.tomlx",
            "toml",
        ] {
            fs::write(at(name), RAW).unwrap();
        }
        fs::create_dir(at("directory.toml")).unwrap();
        fs::write(at("binary.toml"), [0xff]).unwrap();
        fs::write(at("long.toml"), "x".repeat(70_000)).unwrap();
        fs::write(at("half.toml"), &RAW[..20]).unwrap();
        std::os::unix::fs::symlink(at("data.toml"), at("link.toml")).unwrap();
        std::os::unix::fs::symlink(at("none"), at("dangling.toml")).unwrap();
        let mode = rustix::fs::Mode::RUSR;
        let fifo = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, at("fifo.toml"), fifo, mode, 0).unwrap();
        let content = directory.read().unwrap();
        assert!(content.has_marker);
        let parsed = content.parse();
        let good: Vec<_> = (parsed.iter().filter(|(_, file)| file.is_ok()))
            .map(|(name, _)| &**name)
            .collect();
        assert_eq!(good, ["data", "link"]);
        let bad: Vec<_> = (parsed.iter().filter(|(_, file)| file.is_err()))
            .map(|(name, _)| &**name)
            .collect();
        assert_eq!(
            bad,
            ["binary", "dangling", "directory", "fifo", "half", "long"]
        );
    }

    #[test]
    fn a_file_is_replaced_and_removed_as_a_whole() {
        let dir = tempfile::tempdir().unwrap();
        let directory = VolumesDir::new(dir.path().to_owned());
        assert!(!directory.read().unwrap().has_marker);
        assert!(directory.write("data", RAW).is_err());
        let directory = VolumesDir::new(dir.path().join("volumes"));
        directory.make().unwrap();
        for path in ["/a", "/b"] {
            let text = RAW.replace("/x", path);
            directory.write("data", &text).unwrap();
            let parsed = directory.read().unwrap().parse();
            assert_eq!(parsed["data"].as_ref().unwrap().path, Path::new(path));
        }
        let before = directory.read().unwrap();
        assert!(before.changed_since(&before).is_empty());
        directory.write("new", RAW).unwrap();
        directory.remove("data").unwrap();
        let changed: Vec<_> = directory
            .read()
            .unwrap()
            .changed_since(&before)
            .into_iter()
            .collect();
        assert_eq!(changed, ["data", "new"]);
        directory.remove("new").unwrap();
        let error = directory.remove("data").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        let content = directory.read().unwrap();
        assert!(content.has_marker && content.parse().is_empty());
    }
}
