//! Removes a directory with all that is in it.
//!
//! A pod may nest directories deeper than a thread has stack or a process descriptors. So
//! no directory is entered from the one above it: those found in a directory are first
//! moved up, below the one that is being removed. A killed removal is simply begun anew.

use std::{
    ffi::{CStr, CString},
    io,
};

use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    fs::{AtFlags, Dir, Mode, fchmod, fstat, renameat, unlinkat},
    io::Errno,
    path::Arg,
};

use super::below::{absent_is_none, next_name, open_dir};
use crate::{Done, crash_point};

/// Removes the directory of that name with its content; follows no symlink.
pub fn remove(at: &OwnedFd, name: impl Arg) -> io::Result<Done> {
    let name = name.into_c_str()?;
    let opened = open_dir(at, &name).map_err(io::Error::from);
    let Some(dir) = absent_is_none(opened)? else {
        return Ok(Done::Already);
    };
    unstick(&dir);
    let mut removal = DirectoryRemoval {
        dir,
        moved: Vec::new(),
        next: 0,
    };
    for _ in 0..MOST_PASSES {
        removal.pass()?;
        match unlinkat(at, &*name, AtFlags::REMOVEDIR) {
            Ok(()) => return Ok(Done::Now),
            Err(Errno::NOENT) => return Ok(Done::Already),
            // Some file systems leave out entries of a directory that changes while it is
            // read; or a pod still writes.
            Err(Errno::NOTEMPTY | Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Err(Errno::NOTEMPTY.into())
}

/// How often the entries of the directory are read.
const MOST_PASSES: usize = 10;

struct DirectoryRemoval {
    dir: OwnedFd,
    /// The names of the directories that were moved into `dir` and are not removed yet.
    moved: Vec<u64>,
    /// The name of the next one.
    next: u64,
}

impl DirectoryRemoval {
    /// Removes all entries of the directory.
    fn pass(&mut self) -> io::Result<()> {
        let mut entries = Dir::new(open_dir(&self.dir, c".")?)?;
        while let Some(name) = next_name(&mut entries)? {
            if !unlink_file(&self.dir, &name)? {
                self.directory(&name)?;
            }
            while let Some(number) = self.moved.pop() {
                self.directory(&CString::new(number.to_string())?)?;
            }
        }
        Ok(())
    }

    /// Removes a directory of `dir`, once the directories in it are in `dir`.
    fn directory(&mut self, name: &CStr) -> io::Result<()> {
        crash_point();
        let opened = open_dir(&self.dir, name).map_err(io::Error::from);
        if let Some(opened) = absent_is_none(opened)? {
            unstick(&opened);
            let mut entries = Dir::new(opened)?;
            while let Some(below) = next_name(&mut entries)? {
                let from = entries.fd()?;
                if !unlink_file(from, &below)? {
                    self.move_up(from, &below)?;
                }
            }
        }
        match unlinkat(&self.dir, name, AtFlags::REMOVEDIR) {
            // The latter two: the next pass finds it.
            Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY | Errno::EXIST) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    fn move_up(&mut self, from: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
        // An empty one needs no right to write to it.
        if unlinkat(from, name, AtFlags::REMOVEDIR).is_ok() {
            return Ok(());
        }
        loop {
            let moved = self.next;
            self.next += 1;
            match renameat(from, name, &self.dir, moved.to_string()) {
                Ok(()) => {
                    self.moved.push(moved);
                    return Ok(());
                }
                Err(Errno::NOENT) => return Ok(()),
                // An entry of the directory has that name.
                Err(Errno::NOTEMPTY | Errno::EXIST | Errno::NOTDIR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

/// Without `CAP_FOWNER`, entries of another user's directory cannot be removed while it has
/// the sticky bit. That of a share which is mounted here can be changed: its server decides.
fn unstick(dir: &OwnedFd) {
    let mode = fstat(dir).map(|stat| Mode::from_raw_mode(stat.st_mode));
    if let Ok(mode) = mode
        && mode.contains(Mode::SVTX)
    {
        // If it fails, so does the removal.
        let _ = fchmod(dir, mode.difference(Mode::SVTX));
    }
}

/// Unlinks an entry; false if it is a directory, which stays.
fn unlink_file(at: impl AsFd, name: &CStr) -> io::Result<bool> {
    match unlinkat(at, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::ISDIR) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink, path::Path};

    use rustix::{
        fs::{Mode, mkdirat},
        io::Errno,
    };

    use super::*;

    fn removed(dir: &Path) -> io::Result<Done> {
        let above = dir.parent().expect("it is below one");
        let above = fs::File::open(above).expect("opened");
        remove(&above.into(), dir.file_name().expect("it has a name"))
    }

    #[test]
    fn a_directory_of_any_depth_is_removed() {
        let top = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let dir = top.path().join("dir");
        fs::create_dir(&dir).expect("made");
        // More than a thread has stack for, and longer than a path may be.
        let mut at: OwnedFd = fs::File::open(&dir).expect("opened").into();
        for _ in 0..20_000 {
            mkdirat(&at, "d", Mode::RWXU).expect("made");
            at = open_dir(&at, c"d").expect("opened");
        }
        assert_eq!(removed(&dir).expect("removed"), Done::Now);
        assert!(!dir.exists());
        assert_eq!(removed(&dir).expect("nothing to do"), Done::Already);
    }

    #[test]
    fn everything_in_it_is_removed_and_nothing_else() {
        let top = tempfile::tempdir().expect("a directory");
        let (dir, kept) = (top.path().join("dir"), top.path().join("kept"));
        fs::create_dir_all(kept.join("below")).expect("made");
        fs::write(kept.join("below/file"), "text").expect("written");
        // The names that the removal itself gives, of each kind.
        for name in ["0", "2/1", "2/3/4", "a/b/c", "a/d", "a/0"] {
            fs::create_dir_all(dir.join(name)).expect("made");
        }
        for name in ["1", "a/2", "a/b/c/0", "0/file", "2/3/4/5"] {
            fs::write(dir.join(name), "text").expect("written");
        }
        for wide in 0..300 {
            fs::create_dir_all(dir.join(format!("wide/{wide}/x"))).expect("made");
        }
        for link in ["link", "a/link", "2/3/link"] {
            symlink(&kept, dir.join(link)).expect("linked");
        }
        assert_eq!(removed(&dir).expect("removed"), Done::Now);
        assert!(!dir.exists());
        assert_eq!(fs::read(kept.join("below/file")).expect("read"), b"text");
    }

    #[test]
    fn a_file_is_not_removed() {
        let top = tempfile::tempdir().expect("a directory");
        let file = top.path().join("file");
        fs::write(&file, "text").expect("written");
        let error = removed(&file).expect_err("it is a file");
        assert_eq!(Errno::from_io_error(&error), Some(Errno::NOTDIR));
        let absent = remove(
            &fs::File::open(top.path()).expect("opened").into(),
            "absent",
        );
        assert_eq!(absent.expect("nothing to do"), Done::Already);
    }
}
