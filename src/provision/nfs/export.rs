//! A share as the controller reaches it: as a directory of its own machine.
//!
//! Every path is walked below the directory without symlinks ([`below`]), and each change
//! is made by the descriptor of the parent.

use std::{
    ffi::OsStr,
    io,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    str::FromStr,
};

use rustix::{
    fd::OwnedFd,
    fs::{
        Access, AtFlags, CWD, Mode, OFlags, StatVfs, StatxAttributes, StatxFlags, accessat, fchmod,
        fstatvfs, openat, statx, unlinkat,
    },
    io::Errno,
};

use super::{
    below::{self, absent_is_none, split, walk},
    handle::ARCHIVED,
    quota, removal,
};
use crate::{Done, crash_point, finding::Finding, nfs::Directory, size::human_bytes};

/// `--nfs-export`: `SERVER:/SHARE=DIR[,mounted]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NfsExport {
    /// The share that nodes mount.
    pub share: Directory,
    /// Where it is on this machine.
    dir: PathBuf,
    /// Whether the directory has to be a mount point.
    mounted: bool,
}

/// How many parents of a removed directory are removed where they are empty.
const MOST_PARENTS: usize = 10;

impl FromStr for NfsExport {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form = || format!("{text:?} is not SERVER:/SHARE=DIR[,mounted]");
        let (remote, local) = text.split_once("=/").ok_or_else(form)?;
        let (dir, mounted) = match local.split_once(',') {
            None => (local, false),
            Some((dir, "mounted")) => (dir, true),
            Some(_) => return Err(form()),
        };
        Ok(Self {
            share: remote.parse()?,
            dir: format!("/{dir}").into(),
            mounted,
        })
    }
}

impl NfsExport {
    /// Opens the share's directory.
    pub fn open(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = openat(CWD, &self.dir, flags, Mode::empty())?;
        if self.mounted {
            let looked = statx(&root, "", AtFlags::EMPTY_PATH, StatxFlags::empty())?;
            if !looked.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
                let why = format!("nothing is mounted at {}", self.dir.display());
                return Err(io::Error::new(io::ErrorKind::NotFound, why));
            }
        }
        Ok(root)
    }

    /// Whether the share is there and can be written to, and its room.
    pub fn inspect(&self) -> Finding {
        let subject = format!("share {}", self.share);
        let tried = self.open().and_then(|root| {
            accessat(&root, ".", Access::WRITE_OK, AtFlags::EACCESS)?;
            Ok(fstatvfs(root)?)
        });
        let human = |blocks: u64, fs: &StatVfs| human_bytes(blocks.saturating_mul(fs.f_frsize));
        match tried {
            Ok(fs) => Finding::usable(
                subject,
                format!(
                    "writable, {} of {} free",
                    human(fs.f_bavail, &fs),
                    human(fs.f_blocks, &fs)
                ),
            ),
            Err(error) => Finding::faulty(
                subject,
                format!("{}: {error}", self.dir.display()),
                "mount the share there, writable for the controller, or correct --nfs-export",
            ),
        }
    }

    /// The room of the share.
    pub fn room(&self) -> io::Result<StatVfs> {
        Ok(fstatvfs(self.open()?)?)
    }

    /// Whether the directory is there.
    pub fn has(&self, sub_dir: &str) -> io::Result<bool> {
        below::has(&self.open()?, sub_dir)
    }

    /// Makes the directory and those above it, where they are missing, with these
    /// permission bits if any are given, and opens it.
    pub fn make(&self, sub_dir: &str, mode: Option<u32>) -> io::Result<OwnedFd> {
        let at = below::make(&self.open()?, sub_dir, 0o777)?;
        if let Some(mode) = mode {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let opened = openat(&at, ".", flags, Mode::empty())?;
            fchmod(opened, Mode::from_raw_mode(mode))?;
        }
        Ok(at)
    }

    /// Renames the directory to `aside`, in the share itself, and removes those above it
    /// that are empty then, but for those that an administrator has given a project. Nothing happens if an earlier call has set it aside: what has its
    /// path by now is another volume's, as none of the same handle is made before `aside` is
    /// removed. A directory above it for which `is_kept` stays, though it is empty.
    pub fn set_aside(
        &self,
        sub_dir: &str,
        aside: &str,
        is_kept: impl Fn(&str) -> bool,
    ) -> io::Result<Done> {
        let root = self.open()?;
        let (parent, name) = split(sub_dir);
        let Some(above) = absent_is_none(walk(&root, parent))? else {
            return Ok(Done::Already);
        };
        if walk(&root, aside).is_ok() || absent_is_none(walk(&above, name))?.is_none() {
            return Ok(Done::Already);
        }
        let dir = walk(&above, name)?;
        // It keeps its own until it is removed: the rename may fail.
        if quota::own(&above, &dir)?.is_none() {
            quota::follow(&dir, &root)?;
        }
        below::rename(&above, name, &root, aside)?;
        let mut path = parent;
        for _ in 0..MOST_PARENTS {
            if path.is_empty() || is_kept(path) {
                break;
            }
            let (parent, name) = split(path);
            let above = walk(&root, parent)?;
            // Of a deleted volume in whose directory others were.
            let quota = match absent_is_none(walk(&above, name))? {
                Some(dir) if quota::is_administrators(&above, &dir)? => break,
                Some(dir) => quota::own(&above, &dir)?,
                None => None,
            };
            match unlinkat(&above, name, AtFlags::REMOVEDIR) {
                Ok(()) => {
                    quota.map_or(Ok(()), |project| quota::clear(&root, project))?;
                    path = parent;
                }
                Err(Errno::NOENT) => path = parent,
                // Another volume's directory is in it.
                Err(Errno::NOTEMPTY | Errno::EXIST) => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Done::Now)
    }

    /// Renames what a directory has, but for those directories in it and what they are in, into
    /// `aside`.
    pub fn set_own_files_aside(
        &self,
        sub_dir: &str,
        aside: &str,
        inner: &[String],
    ) -> io::Result<()> {
        let root = self.open()?;
        let aside = below::make(&root, aside, 0o700)?;
        // Above the names of what a killed call has moved: where a rename replaces, that of a
        // file to a link of itself does nothing.
        let taken = below::names(&aside)?.into_iter();
        let taken = taken.filter_map(|name| name.to_str().ok()?.parse::<u32>().ok());
        let mut number = taken.max().map_or(0, |last| u64::from(last) + 1);
        let mut to_look = vec![PathBuf::from(sub_dir)];
        while let Some(path) = to_look.pop() {
            let dir = match walk(&root, &path) {
                // The second and third: a pod has put it there, and it stays.
                Err(error)
                    if matches!(
                        Errno::from_io_error(&error),
                        Some(Errno::NOENT | Errno::LOOP | Errno::NOTDIR)
                    ) =>
                {
                    continue;
                }
                walked => walked?,
            };
            for name in below::names(&dir)? {
                let entry = path.join(OsStr::from_bytes(name.to_bytes()));
                if inner.iter().any(|it| *it == entry) {
                    continue;
                }
                if inner.iter().any(|it| Path::new(it).starts_with(&entry)) {
                    to_look.push(entry);
                    continue;
                }
                crash_point();
                loop {
                    use io::ErrorKind as E;
                    let moved = below::rename(&dir, &*name, &aside, &number.to_string());
                    number += 1;
                    match moved.map_err(|error| (error.kind(), error)) {
                        Ok(()) | Err((E::NotFound, _)) => break,
                        // Moved by an earlier call.
                        Err((
                            E::AlreadyExists
                            | E::DirectoryNotEmpty
                            | E::IsADirectory
                            | E::NotADirectory,
                            _,
                        )) => {}
                        Err((_, error)) => return Err(error),
                    }
                }
            }
        }
        Ok(())
    }

    /// Removes what was set aside, with its content and its quota.
    pub fn remove(&self, aside: &str) -> io::Result<Done> {
        let root = self.open()?;
        if let Some(dir) = absent_is_none(walk(&root, aside))? {
            quota::end_for_removal(&root, &dir)?;
        }
        removal::remove(&root, aside)
    }

    /// Renames the directory to `archived-…`. `AlreadyExists` if that is there.
    pub fn archive(&self, sub_dir: &str) -> io::Result<Done> {
        let root = self.open()?;
        let (parent, name) = split(sub_dir);
        let archived = archived(sub_dir);
        let (new_parent, new_name) = split(&archived);
        let Some(above) = absent_is_none(walk(&root, parent))? else {
            return Ok(Done::Already);
        };
        if absent_is_none(walk(&above, name))?.is_none() {
            return Ok(Done::Already);
        }
        let new_above = below::make(&root, new_parent, 0o777)?;
        if walk(&new_above, new_name).is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let dir = walk(&above, name)?;
        quota::end(&above, &dir)?;
        quota::follow(&dir, &new_above)?;
        below::rename(&above, name, &new_above, new_name)?;
        Ok(Done::Now)
    }
}

/// Where a directory is archived.
pub fn archived(sub_dir: &str) -> String {
    format!("{ARCHIVED}{sub_dir}")
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{PermissionsExt as _, symlink},
    };

    use super::*;

    fn export(dir: &std::path::Path) -> NfsExport {
        let text = format!("srv:/share={}", dir.display());
        text.parse().expect("an export")
    }

    /// A whole removal; `Already` if there was nothing to set aside.
    fn remove(export: &NfsExport, sub_dir: &str) -> io::Result<Done> {
        let done = export.set_aside(sub_dir, ".deleted-x", |_| false)?;
        let _ = export.remove(".deleted-x")?;
        Ok(done)
    }

    #[test]
    fn what_has_the_path_of_a_removed_directory_is_kept() {
        let dir = tempfile::tempdir().expect("a directory");
        let export = export(dir.path());
        export.make("ns/a", None).expect("made");
        fs::write(dir.path().join("ns/a/old"), "x").expect("written");
        let set_aside = || export.set_aside("ns/a", ".deleted-1", |_| false);
        assert_eq!(set_aside().expect("set aside"), Done::Now);
        // A new volume, while the old one's files are being removed.
        export.make("ns/a", None).expect("made");
        fs::write(dir.path().join("ns/a/new"), "x").expect("written");
        assert_eq!(set_aside().expect("looked"), Done::Already);
        assert_eq!(export.remove(".deleted-1").expect("removed"), Done::Now);
        let left = fs::read_dir(dir.path().join("ns/a")).expect("read");
        let left: Vec<_> = left.map(|one| one.expect("read").file_name()).collect();
        assert_eq!(left, ["new"]);
        assert_eq!(export.remove(".deleted-1").expect("removed"), Done::Already);
    }

    #[test]
    fn an_export_is_a_share_and_a_directory() {
        let parse = |text: &str| text.parse::<NfsExport>();
        let export = parse("[fd00::1]:/a=b=/mnt/x,mounted").expect("an export");
        assert_eq!(export.share.to_string(), "[fd00::1]:/a=b");
        assert_eq!((export.dir, export.mounted), ("/mnt/x".into(), true));
        for bad in [
            "",
            "srv:/a",
            "srv=/mnt",
            "srv:/a=mnt",
            "srv:/a=/mnt,shared",
            "a b:/a=/mnt",
        ] {
            parse(bad).expect_err(bad);
        }
    }

    #[test]
    fn directories_are_made_removed_and_archived() {
        let dir = tempfile::tempdir().expect("a directory");
        let export = export(dir.path());
        let at = |path: &str| dir.path().join(path);
        for _ in 0..2 {
            export.make("ns/a", Some(0o2750)).expect("made");
            export.make("ns/b", None).expect("made");
        }
        let mode = at("ns/a").metadata().expect("there").permissions().mode();
        assert_eq!(mode & 0o7777, 0o2750);
        fs::create_dir(at("ns/a/sub")).expect("made");
        fs::write(at("ns/a/sub/file"), "x").expect("written");
        assert_eq!(remove(&export, "ns/a").expect("removed"), Done::Now);
        assert_eq!(remove(&export, "ns/a").expect("removed"), Done::Already);
        assert!(at("ns/b").exists() && !at("ns/a").exists());

        fs::write(at("ns/b/file"), "x").expect("written");
        assert_eq!(export.archive("ns/b").expect("archived"), Done::Now);
        assert_eq!(export.archive("ns/b").expect("archived"), Done::Already);
        assert_eq!(
            fs::read_to_string(at("archived-ns/b/file")).expect("kept"),
            "x"
        );
        export.make("ns/b", None).expect("made");
        let error = export.archive("ns/b").expect_err("refused");
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert!(export.has("ns/b").expect("looked") && !export.has("ns/c").expect("looked"));

        assert_eq!(remove(&export, "ns/b").expect("removed"), Done::Now);
        assert!(!at("ns").exists(), "an empty parent");
        assert_eq!(remove(&export, "ns/b").expect("removed"), Done::Already);
        assert!(dir.path().exists());
    }

    #[test]
    fn a_symlink_of_a_pod_is_not_followed() {
        let dir = tempfile::tempdir().expect("a directory");
        let outside = tempfile::tempdir().expect("a directory");
        let kept = outside.path().join("kept");
        fs::create_dir(&kept).expect("made");
        fs::write(kept.join("file"), "x").expect("written");
        symlink(outside.path(), dir.path().join("ns")).expect("linked");
        symlink(&kept, dir.path().join("v")).expect("linked");
        let export = export(dir.path());
        export.make("ns/new", None).expect_err("a symlink");
        remove(&export, "ns/kept").expect_err("a symlink");
        export.archive("ns/kept").expect_err("a symlink");
        export.make("v", Some(0o700)).expect_err("a symlink");
        // Only the symlink itself.
        let _ = remove(&export, "v");
        export.make("w", None).expect("made");
        symlink(&kept, dir.path().join("w/link")).expect("linked");
        assert_eq!(remove(&export, "w").expect("removed"), Done::Now);
        assert_eq!(fs::read_to_string(kept.join("file")).expect("kept"), "x");
        assert_eq!(fs::read_dir(outside.path()).expect("read").count(), 1);
    }

    #[test]
    fn a_directory_that_must_be_a_mount_is_not_used_without() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut export = export(dir.path());
        export.mounted = true;
        let error = export.make("v", None).expect_err("no mount");
        assert!(error.to_string().contains("nothing is mounted"), "{error}");
    }
}
