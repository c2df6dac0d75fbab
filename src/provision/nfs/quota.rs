//! Quotas: the size of a volume as the limit of a project, where the share's file system
//! enforces these.
//!
//! A volume's directory has a project of its own, which all that is made in it inherits. The
//! directory itself is the record of its project: a new project has its limit before the
//! directory joins it, and keeps it until the directory is removed or leaves. A project that
//! no file has is free.
//!
//! Nothing can be moved into a directory whose entries inherit another project than theirs
//! (EXDEV). So a directory joins the project of the place that it is moved to, unless that
//! has none to inherit; and a volume in the directory of another has no project of its own.

use std::{io, str::FromStr};

use rustix::{fd::OwnedFd, fs::Dir, io::Errno};

use super::below::{self, next_name, open_dir};
use crate::{
    crash_point, digest,
    kernel::project::{self, Project},
};

/// Whether new volumes get quotas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuotaPolicy {
    /// Where the share's file system enforces them.
    Auto,
    /// Where they cannot have one, none is made.
    Required,
    /// They do not.
    Off,
}

impl FromStr for QuotaPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "required" => Ok(Self::Required),
            "off" => Ok(Self::Off),
            _ => Err("it is auto, required or off".to_owned()),
        }
    }
}

const NOT_ENFORCED: &str =
    "the share's file system enforces no project quotas; XFS and ext4 do, mounted with prjquota";
const NO_PRIVILEGE: &str = "the controller lacks CAP_SYS_ADMIN";
const NESTED: &str = "what is in the directory above it counts in the quota of that";
const IN_ANOTHER: &str = "an administrator has given it a project";
const HAS_FILES: &str = "it was there before, with files that count in no quota";

/// Why the volume of a path could not have a quota, if it could not.
pub fn obstacle(root: &OwnedFd, path: &str) -> io::Result<Option<&'static str>> {
    let (at, is_there) = below::deepest(root, path)?;
    let read = || -> io::Result<bool> {
        let is_enforced = project::is_enforced(&at)?;
        if is_enforced {
            let _ = project::quota(&at, FIRST_ID)?;
        }
        Ok(is_enforced)
    };
    match read() {
        // A container's profile may forbid the first call, too.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Ok(Some(NO_PRIVILEGE));
        }
        Ok(false) => return Ok(Some(NOT_ENFORCED)),
        Ok(true) => {}
        Err(error) => return Err(error),
    }
    if !is_there {
        return Ok(of(&at)?.is_inherited.then_some(NESTED));
    }
    let above = below::walk(root, below::split(path).0)?;
    Ok(if own(&above, &at)?.is_some() {
        None
    } else if of(&above)?.is_inherited {
        Some(NESTED)
    } else if of(&at)?.is_inherited {
        Some(IN_ANOTHER)
    } else {
        (!is_empty(&at)?).then_some(HAS_FILES)
    })
}

/// Gives a directory at least so many bytes, in a project of its own; 0: no limit. The name
/// makes a clash of two controllers unlikely. Returns its limit, which is durable; 0: none, as
/// the directory has files or another's project.
pub fn give(above: &OwnedFd, dir: &OwnedFd, name: &str, bytes: u64) -> io::Result<u64> {
    if let Some(id) = own(above, dir)? {
        return grow(dir, id, bytes);
    }
    if of(dir)?.is_inherited || !is_empty(dir)? {
        return Ok(0);
    }
    for id in ids(name) {
        // A limit that is left is that of a killed call.
        if project::quota(dir, id)?.inodes > 0 {
            continue;
        }
        project::set_limit(dir, id, bytes)?;
        crash_point();
        join(dir, own_project(id))?;
        if project::quota(dir, id)?.inodes == 1 {
            below::sync(dir)?;
            return Ok(project::quota(dir, id)?.limit);
        }
        // Another controller has taken it at the same time.
        join(dir, Project::default())?;
    }
    Err(io::Error::other("every project of the driver's is in use"))
}

/// Raises the limit of a directory that has a quota to so many bytes; returns it. None if it
/// has no limit; why, if its limit cannot be changed: the next mount may enforce it again.
pub fn expand(
    above: &OwnedFd,
    dir: &OwnedFd,
    bytes: u64,
) -> io::Result<Result<Option<u64>, &'static str>> {
    let Some(id) = own(above, dir)? else {
        return Ok(Ok(None));
    };
    match grow(dir, id, bytes) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(Err(NO_PRIVILEGE)),
        Err(error) if is_unavailable(&error) => Ok(Err(NOT_ENFORCED)),
        grown => Ok(Ok(Some(grown?).filter(|limit| *limit > 0))),
    }
}

fn grow(dir: &OwnedFd, id: u32, bytes: u64) -> io::Result<u64> {
    let limit = project::quota(dir, id)?.limit;
    // One without a limit may have more than that already.
    if limit != 0 && limit < bytes {
        project::set_limit(dir, id, bytes)?;
    }
    crash_point();
    // It changes the directory, so its sync makes the limit durable, too.
    join(dir, own_project(id))?;
    below::sync(dir)?;
    Ok(project::quota(dir, id)?.limit)
}

/// The limit of a directory; 0: none that is its own, or that the controller can read.
pub fn limit(above: &OwnedFd, dir: &OwnedFd) -> io::Result<u64> {
    let Some(id) = own(above, dir)? else {
        return Ok(0);
    };
    match project::quota(dir, id) {
        Err(error) if is_unavailable(&error) => Ok(0),
        read => Ok(read?.limit),
    }
}

/// Ends the quota of a directory, if it has one. What is in it stays in its project, which is
/// not free before that is removed.
pub fn end(above: &OwnedFd, dir: &OwnedFd) -> io::Result<()> {
    if let Some(id) = own(above, dir)? {
        clear(dir, id)?;
        crash_point();
        leave(dir)?;
    }
    Ok(())
}

/// Ends the quota of a directory that is to be removed, and lets anything be moved into it.
pub fn end_for_removal(above: &OwnedFd, dir: &OwnedFd) -> io::Result<()> {
    end(above, dir)?;
    leave(dir)
}

/// Lets a directory be moved into `place`. Where that has no project, the directory leaves one
/// of the driver's, which is that of a directory above it, and keeps an administrator's.
pub fn follow(dir: &OwnedFd, place: &OwnedFd) -> io::Result<()> {
    let (project, place) = (of(dir)?, of(place)?);
    if !place.is_inherited {
        return if is_ours(project) { leave(dir) } else { Ok(()) };
    }
    if project != place {
        join(dir, place)?;
    }
    Ok(())
}

/// Lets a directory have no project.
pub fn leave(dir: &OwnedFd) -> io::Result<()> {
    if of(dir)?.is_inherited {
        join(dir, Project::default())?;
    }
    Ok(())
}

/// Ends the limit of a project. Where that cannot be, it stays, and limits no new volume.
pub fn clear(share: &OwnedFd, project: u32) -> io::Result<()> {
    match project::set_limit(share, project, 0) {
        Err(error) if is_unavailable(&error) => {
            tracing::warn!(project, %error, "the limit of a deleted volume's project stays");
            Ok(())
        }
        done => done,
    }
}

/// Whether the controller has no privilege for quotas, or the file system is mounted without
/// them by now.
fn is_unavailable(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::PERM | Errno::NOSYS | Errno::SRCH | Errno::OPNOTSUPP)
    )
}

/// The project of the driver's that is the directory's own.
pub fn own(above: &OwnedFd, dir: &OwnedFd) -> io::Result<Option<u32>> {
    let project = of(dir)?;
    let has_one = is_ours(project) && !of(above)?.is_inherited;
    Ok(has_one.then_some(project.id))
}

/// Whether an administrator has given the directory a project.
pub fn is_administrators(above: &OwnedFd, dir: &OwnedFd) -> io::Result<bool> {
    let project = of(dir)?;
    Ok(project.is_inherited && !is_ours(project) && project != of(above)?)
}

fn is_ours(project: Project) -> bool {
    project.is_inherited && (FIRST_ID..FIRST_ID + IDS).contains(&project.id)
}

fn own_project(id: u32) -> Project {
    Project {
        id,
        is_inherited: true,
    }
}

fn of(dir: &OwnedFd) -> io::Result<Project> {
    project::of(open_dir(dir, c".")?)
}

fn join(dir: &OwnedFd, project: Project) -> io::Result<()> {
    project::set(open_dir(dir, c".")?, project)
}

fn is_empty(dir: &OwnedFd) -> io::Result<bool> {
    let mut entries = Dir::new(open_dir(dir, c".")?)?;
    Ok(next_name(&mut entries)?.is_none())
}

/// The least project of the driver's; administrators number theirs from 1.
const FIRST_ID: u32 = 1 << 30;
/// The number of the driver's projects.
const IDS: u32 = 1 << 30;
/// How many projects may be in use by others.
const MOST_IDS: u32 = 1000;

/// The projects to try for a directory.
fn ids(name: &str) -> impl Iterator<Item = u32> {
    let digest = digest::sha256_hex(name);
    let first = u32::from_str_radix(&digest[..8], 16).expect("hexadecimal");
    (0..MOST_IDS).map(move |next| FIRST_ID + first.wrapping_add(next) % IDS)
}
