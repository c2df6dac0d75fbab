//! Whether the controller may keep the owners and modes of other users' files. A service
//! manager may have left it too few privileges, and a server may map root to another user.

use std::{ffi::CStr, io};

use rustix::{
    fd::OwnedFd,
    fs::{AtFlags, Gid, Mode, Uid, chownat, fchmod, fstat, mkdirat, unlinkat},
    io::Errno,
};

use super::below::{absent_is_none, open_dir};

/// In the share itself, and of the driver as `handle::DELETED`.
const PROBE: &CStr = c".deleted-owner-probe";
/// Neither root nor `nobody`, to whom servers map root.
const OTHER: u32 = 65533;
const SETGID: Mode = Mode::SGID.union(Mode::RWXU);

/// Tries with a directory of another user what copies, `mountPermissions` and deletions need.
pub fn probe(share: &OwnedFd) -> io::Result<()> {
    // One of a killed controller may be there.
    match mkdirat(share, PROBE, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(errno.into()),
    }
    let tried = try_as_other(share);
    let removed = match unlinkat(share, PROBE, AtFlags::REMOVEDIR) {
        // Another controller that starts is at it, and removes it.
        Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(()),
        removed => removed,
    };
    // Or has removed it.
    absent_is_none(tried.and(removed.map_err(io::Error::from))).map(drop)
}

fn try_as_other(share: &OwnedFd) -> io::Result<()> {
    let (user, group) = (Uid::from_raw(OTHER), Gid::from_raw(OTHER));
    chownat(
        share,
        PROBE,
        Some(user),
        Some(group),
        AtFlags::SYMLINK_NOFOLLOW,
    )?;
    let dir = open_dir(share, PROBE)?;
    fchmod(&dir, SETGID)?;
    // Without CAP_FSETID the kernel leaves out the bit of a foreign group.
    if !Mode::from_raw_mode(fstat(&dir)?.st_mode).contains(Mode::SGID) {
        return Err(Errno::PERM.into());
    }
    // One of a killed controller, or of another that starts, may be there.
    match mkdirat(&dir, "entry", Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(errno.into()),
    }
    match unlinkat(&dir, "entry", AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::opened, *};

    #[test]
    fn the_probe_leaves_nothing() {
        let dir = tempfile::tempdir().expect("a directory");
        let share = opened(dir.path());
        // Of a killed controller.
        std::fs::create_dir_all(dir.path().join(".deleted-owner-probe/entry")).expect("made");
        for _ in 0..2 {
            probe(&share).expect("root may");
            assert_eq!(std::fs::read_dir(dir.path()).expect("read").count(), 0);
        }
    }
}
