//! Maps of raw volumes, as kubelet makes them: for each volume a directory, and in it for each
//! user a symbolic link to the device's node that is published for it. The user is the file that
//! asks for the volume. For lanes.

use std::{
    ffi::OsString,
    fmt::Write as _,
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use crate::{
    crash_point, digest,
    file::{self, FileDurability},
};

/// Their directory.
#[derive(Clone, Debug)]
pub struct DeviceMaps(PathBuf);

/// The link until it has its name; no file of a volume has one that begins with a dot.
const DRAFT: &str = ".new";

/// The longest name of a directory, in bytes (NAME_MAX).
const LONGEST: usize = 255;

impl DeviceMaps {
    /// The maps below a run directory.
    pub fn new(run_dir: &Path) -> Self {
        Self(run_dir.join("devices"))
    }

    /// Maps the volume to this node, for this user alone. The error names the path.
    pub fn set(&self, handle: &str, user: &str, node: &Path) -> io::Result<()> {
        let dir = self.of(handle);
        map(&dir, user, node).map_err(|error| {
            let dir = dir.display();
            io::Error::new(
                error.kind(),
                format!("cannot map the device in {dir}: {error}"),
            )
        })
    }

    /// Removes the maps of a volume; does nothing if there are none. The log has what cannot be
    /// removed: it keeps no volume from being unpublished.
    pub fn remove(&self, handle: &str) {
        remove(&self.of(handle));
    }

    /// Removes the maps of all volumes but these.
    pub fn retain<'h>(&self, handles: impl Iterator<Item = &'h String>) {
        let kept: Vec<_> = handles.map(|handle| self.of(handle)).collect();
        let found = entries(&self.0).unwrap_or_else(|error| {
            let path = self.0.display();
            tracing::error!(%path, %error, "cannot list the maps of raw volumes");
            Vec::new()
        });
        let dirs = found.into_iter().map(|name| self.0.join(name));
        for dir in dirs.filter(|dir| !kept.contains(dir)) {
            remove(&dir);
        }
    }

    fn of(&self, handle: &str) -> PathBuf {
        self.0.join(encoded(handle))
    }
}

/// The handle as a name of a directory, other bytes as udev writes them in /dev/disk/by-id.
fn encoded(handle: &str) -> String {
    let mut name = String::new();
    for (at, byte) in handle.bytes().enumerate() {
        let is_plain =
            byte.is_ascii_alphanumeric() || b"#+-:=@_".contains(&byte) || (byte == b'.' && at != 0);
        if is_plain {
            name.push(byte.into());
        } else {
            write!(name, "\\x{byte:02x}").expect("a text takes any");
        }
    }
    if name.len() > LONGEST {
        return digest::sha256_hex(handle);
    }
    name
}

/// Makes the link for this user before it removes the others.
fn map(dir: &Path, user: &str, node: &Path) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    let link = dir.join(user);
    if fs::read_link(&link).is_ok_and(|it| it == node) {
        return empty(dir, Some(user));
    }
    let draft = dir.join(DRAFT);
    file::remove(&draft, FileDurability::Volatile)?;
    symlink(node, &draft)?;
    crash_point();
    fs::rename(draft, link)?;
    empty(dir, Some(user))
}

fn remove(dir: &Path) {
    let removed = empty(dir, None).and_then(|()| fs::remove_dir(dir));
    if let Err(error) = removed
        && error.kind() != io::ErrorKind::NotFound
    {
        let path = dir.display();
        tracing::error!(%path, %error, "cannot remove the map of a raw volume");
    }
}

/// Removes all links of a directory but one.
fn empty(dir: &Path, kept: Option<&str>) -> io::Result<()> {
    for name in entries(dir)? {
        if kept.is_none_or(|kept| name != *kept) {
            crash_point();
            fs::remove_file(dir.join(name))?;
        }
    }
    Ok(())
}

/// The names in a directory; none if it is not there.
fn entries(dir: &Path) -> io::Result<Vec<OsString>> {
    match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        entries => entries?.map(|entry| Ok(entry?.file_name())).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_volume_is_mapped_for_its_user() {
        let dir = tempfile::tempdir().unwrap();
        let maps = DeviceMaps::new(dir.path());
        let links = || {
            let mut found = BTreeMap::new();
            for volume in entries(&dir.path().join("devices")).unwrap() {
                let of = dir.path().join("devices").join(&volume);
                for user in entries(&of).unwrap() {
                    let node = fs::read_link(of.join(&user)).unwrap();
                    let name = Path::new(&volume).join(user);
                    found.insert(name.display().to_string(), node.display().to_string());
                }
            }
            found
        };
        let expect = |expected: &[(&str, &str)]| {
            let owned = |(name, node): &(&str, &str)| ((*name).to_owned(), (*node).to_owned());
            assert_eq!(links(), expected.iter().map(owned).collect());
        };
        maps.remove("v");
        for _ in 0..2 {
            maps.set("v", "data", Path::new("/srv/one")).unwrap();
        }
        expect(&[("v/data", "/srv/one")]);
        maps.set("v", "data", Path::new("/srv/two")).unwrap();
        expect(&[("v/data", "/srv/two")]);
        // As a maker that was killed leaves it.
        let draft = dir.path().join("devices/v").join(DRAFT);
        symlink("/srv/three", draft).unwrap();
        maps.set("v", "renamed", Path::new("/srv/two")).unwrap();
        maps.set("../x/1", "x", Path::new("/x")).unwrap();
        maps.set(&"/".repeat(300), "long", Path::new("/l")).unwrap();
        let long = format!("{}/long", digest::sha256_hex(&"/".repeat(300)));
        expect(&[
            (r"\x2e.\x2fx\x2f1/x", "/x"),
            (&long, "/l"),
            ("v/renamed", "/srv/two"),
        ]);
        maps.retain(["v".to_owned()].iter());
        expect(&[("v/renamed", "/srv/two")]);
        maps.remove("v");
        expect(&[]);
        assert!(!dir.path().join("devices/v").exists());
    }
}
