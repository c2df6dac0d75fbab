//! Claims: files beside an image that record the node that has it attached.
//!
//! A file lock does not suffice: it ends with the process, while a loop device and
//! its mount outlive the agent. So each node writes a small file of its own,
//! `claims/IMAGE/<hash of the node>.json`, in three steps:
//!
//! ```text
//! 1. write its own as `asking`  (atomically: temporary file, link or rename)
//! 2. read all others            a conflict: undo its own, name the owner
//! 3. make its own `held`        before it opens the image for a device
//! ```
//!
//! Of two nodes that ask at once, each reads the other's claim, as both write before they
//! read; so at most one gets to `held`, perhaps neither, and a retry decides.
//! A node that holds its claim already need not read again. A claim is valid only for the
//! boot in which it was made: a node replaces its own claim of another boot, which is
//! stale; in a local pool, which has one node only, it ignores every claim of another
//! boot. Hence no node fsyncs its claim.
//!
//! A controller claims an image in the same way while it copies or deletes it, by a
//! [`ControllerClaim`], which ends with its process.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs::{self, File},
    io::{self, Read as _},
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::{ffi::OsStrExt as _, fs::FileExt as _},
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rustix::{
    fs::{CWD, Dir, DirEntry, Mode, OFlags},
    io::Errno,
};
use serde::{Deserialize, Serialize};

use super::{
    Pool, PoolError, Scope,
    draft::{self, Durability::Volatile},
    file_stamp::FileStamp,
    handle::NodeHash,
    spares::SPARE_DIR,
};
use crate::{
    Done, Kind, crash_point,
    kernel::{BOOT_ID, boot_id},
};

mod controller;

pub use controller::ControllerClaim;

/// The other claims that a claim allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sharing {
    /// None.
    Exclusive,
    /// Shared ones.
    Shared,
    /// Read-only ones.
    Readers,
}

impl Sharing {
    fn excludes(self, other: &Claim) -> bool {
        match self {
            Self::Exclusive => true,
            Self::Shared => false,
            Self::Readers => !other.read_only,
        }
    }

    /// The one that allows less.
    fn stricter(self, other: Self) -> Self {
        match (self, other) {
            (Self::Exclusive, _) | (_, Self::Exclusive) => Self::Exclusive,
            (Self::Readers, _) | (_, Self::Readers) => Self::Readers,
            (Self::Shared, Self::Shared) => Self::Shared,
        }
    }
}

/// A node's claim of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The node's id; for a controller, a name that [`ControllerClaim`] makes.
    pub node_id: String,
    /// The boot id of its kernel: [`crate::kernel::boot_id`].
    pub boot_id: String,
    /// The volume's handle, to find the image of a volume whose record is lost; empty for a
    /// controller.
    #[serde(default)]
    pub volume_id: String,
    /// The other claims that it allows.
    pub access: Sharing,
    /// The node never writes to it.
    pub read_only: bool,
}

impl Claim {
    /// The id of the draft that a controller's claim depends on.
    fn token(&self) -> Option<&str> {
        self.node_id.strip_prefix(CONTROLLER)
    }

    /// This claim, which conflicts with all that `held` conflicts with.
    fn keeping(&self, held: &Self) -> Self {
        Self {
            access: self.access.stricter(held.access),
            read_only: self.read_only && held.read_only,
            ..self.clone()
        }
    }

    fn conflicts_with(&self, other: &Self) -> bool {
        self.access.excludes(other) || other.access.excludes(self)
    }
}

/// The file of a claim.
#[derive(Debug, Serialize, Deserialize)]
struct Marker {
    #[serde(flatten)]
    claim: Claim,
    state: ClaimState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ClaimState {
    Asking,
    Held,
}

/// Why an image could not be claimed.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// Another node has a conflicting claim.
    ///
    /// Remedy: unpublish and unstage it there; for a node that is gone for good see [A node that
    /// died](../images.md#a-node-that-died).
    #[error(
        "image {image} in pool {pool:?} is in use by {node:?}; unpublish and unstage it there \
         first: `uringctl volumes` on that node says where it is mounted{}",
        .how_to_release
    )]
    OwnedBy {
        pool: String,
        image: String,
        /// The node that owns the claim.
        node: String,
        /// How to release the claim of a node that is down for good; empty where the owner
        /// is this boot.
        how_to_release: String,
    },
    /// A controller is deleting or copying the image.
    #[error("a controller is copying or deleting image {image} in pool {pool:?}; retry")]
    UsedByController { pool: String, image: String },
    /// The file of a claim is malformed.
    ///
    /// Remedy: look at the file; once no node uses the image (`uringctl volumes` on each), remove
    /// it.
    #[error("cannot parse claim {}; the owner of the image is unknown", path.display())]
    Corrupt {
        path: PathBuf,
        source: serde_json::Error,
    },
    /// A failure of the pool.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

impl ClaimError {
    /// What the caller on a node may do about it.
    pub fn kind(&self) -> Kind {
        match self {
            Self::OwnedBy { .. } => Kind::Precondition,
            Self::UsedByController { .. } | Self::Corrupt { .. } => Kind::Transient,
            Self::Pool(error) => error.kind(),
        }
    }
}

/// How to release the claim of a node that is down for good: a command that only lists, as
/// an operator may paste it without reading. Empty where the owner is this boot.
fn how_to_release(owner: &Claim, pool: &Pool, boot_id: &str) -> String {
    if owner.boot_id == boot_id {
        return String::new();
    }
    format!(
        " (where that node is off and stays off, `uringctl release --pool {}={} --node {}` lists \
         its claims and how to release them)",
        pool.name,
        pool.dir.display(),
        owner.node_id
    )
}

/// The claims that this process has made, by their files, which are as they were written while
/// their stamps are: no process changes the file of another's claim in place.
static MADE: Mutex<BTreeMap<PathBuf, (FileStamp, Claim)>> = Mutex::new(BTreeMap::new());

fn made() -> MutexGuard<'static, BTreeMap<PathBuf, (FileStamp, Claim)>> {
    MADE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A node's claim of an image, of any boot.
pub fn own(pool: &Pool, image: &str, node_id: &str) -> Result<Option<Claim>, ClaimError> {
    let path = marker_path(pool, image, node_id);
    let mine = made().get(&path).cloned();
    if let Some((stamp, claim)) = mine {
        if FileStamp::of(CWD, &path) == Ok(stamp) {
            return Ok(Some(claim));
        }
        made().remove(&path);
    }
    let marker = read(pool, &path)?;
    Ok(marker.map(|marker| marker.claim))
}

/// Releases a node's claim if it is of another boot than `boot_id`, or malformed, as after
/// a power loss.
pub fn release_stale(
    pool: &Pool,
    image: &str,
    node_id: &str,
    boot_id: &str,
) -> Result<Done, ClaimError> {
    let lock = process_lock(pool);
    let _locked = lock.lock().unwrap_or_else(PoisonError::into_inner);
    match own(pool, image, node_id) {
        Ok(Some(claim)) if claim.boot_id == boot_id => Ok(Done::Already),
        Ok(Some(_)) | Err(ClaimError::Corrupt { .. }) => release(pool, image, node_id),
        Ok(None) => Ok(Done::Already),
        Err(error) => Err(error),
    }
}

/// The lock for this process's changes of claims, one for each pool, so that a pool that
/// hangs blocks no other.
fn process_lock(pool: &Pool) -> Arc<Mutex<()>> {
    static LOCKS: Mutex<BTreeMap<PathBuf, Arc<Mutex<()>>>> = Mutex::new(BTreeMap::new());
    let mut locks = LOCKS.lock().unwrap_or_else(PoisonError::into_inner);
    locks.entry(pool.dir.clone()).or_default().clone()
}

/// [`claim_in`] the pool's directory, which it opens.
#[cfg(test)]
pub fn claim(pool: &Pool, image: &str, claim: &Claim) -> Result<Done, ClaimError> {
    let (done, _) = claim_in(pool, pool.open_dir()?.as_fd(), image, claim)?;
    Ok(done)
}

/// Claims an image for a node, in the pool's directory `dir`, which is open.
/// [`Done::Already`]: the node holds the claim; else the claim that it held before is
/// returned, for [`put_back`].
///
/// The image may be attached by the claim that the node holds, as this one is made before
/// anything is looked at. So it still excludes all that the held one does.
pub fn claim_in(
    pool: &Pool,
    dir: BorrowedFd<'_>,
    image: &str,
    claim: &Claim,
) -> Result<(Done, Option<Claim>), ClaimError> {
    let lock = process_lock(pool);
    let _locked = lock.lock().unwrap_or_else(PoisonError::into_inner);
    pool.initialize_at(dir)?;
    let mine = marker_path(pool, image, &claim.node_id);
    let before = match create_dir(pool, &claims_dir(pool, image))? {
        // Mostly it is the first claim on the image.
        Done::Now => None,
        Done::Already => match read(pool, &mine) {
            // A power loss leaves this node's own claim malformed.
            Err(ClaimError::Corrupt { .. }) => None,
            before => {
                before?.filter(|m| m.claim.boot_id == claim.boot_id && m.state == ClaimState::Held)
            }
        },
    };
    let claim = match &before {
        Some(held) => &claim.keeping(&held.claim),
        None => claim,
    };
    if before.as_ref().is_some_and(|held| held.claim == *claim) {
        return Ok((Done::Already, None));
    }
    let written = write(pool, &mine, claim, ClaimState::Asking)?;
    crash_point();
    if let Err(error) = refuse_conflict(pool, image, &mine, claim) {
        restore(pool, image, &mine, before)?;
        return Err(error);
    }
    let held = text_of(claim, ClaimState::Held);
    let rewritten = written.write_all_at(&held, 0).and_then(|()| {
        let stamp = FileStamp::of(written.as_fd(), Path::new(""))?;
        match stamp.links {
            0 => Err(io::Error::other("it was removed meanwhile")),
            _ => Ok(stamp),
        }
    });
    match rewritten {
        Ok(stamp) => made().insert(mine, (stamp, claim.clone())),
        Err(error) => {
            restore(pool, image, &mine, before)?;
            return Err(pool.io("write", &mine, error).into());
        }
    };
    crash_point();
    Ok((Done::Now, before.map(|held| held.claim)))
}

/// Undoes a claim of the node that [`claim_in`] made, where nothing was attached by it:
/// `before` is the claim that the node held, and holds again.
pub fn put_back(
    pool: &Pool,
    image: &str,
    node_id: &str,
    before: Option<Claim>,
) -> Result<(), ClaimError> {
    let lock = process_lock(pool);
    let _locked = lock.lock().unwrap_or_else(PoisonError::into_inner);
    let state = ClaimState::Held;
    let before = before.map(|claim| Marker { claim, state });
    restore(pool, image, &marker_path(pool, image, node_id), before)
}

/// Fails where there is a claim besides `mine` that conflicts with this one.
fn refuse_conflict(pool: &Pool, image: &str, mine: &Path, claim: &Claim) -> Result<(), ClaimError> {
    let mut others = others(pool, image, mine, &claim.boot_id)?.into_iter();
    let Some((_, owner)) = others.find(|(_, other)| claim.conflicts_with(other)) else {
        return Ok(());
    };
    let how_to_release = how_to_release(&owner, pool, &claim.boot_id);
    let (pool, image) = (pool.name.clone(), image.to_owned());
    Err(if owner.token().is_some() {
        ClaimError::UsedByController { pool, image }
    } else {
        ClaimError::OwnedBy {
            pool,
            image,
            node: owner.node_id,
            how_to_release,
        }
    })
}

/// Releases a node's claim.
pub fn release(pool: &Pool, image: &str, node_id: &str) -> Result<Done, ClaimError> {
    remove(pool, image, &marker_path(pool, image, node_id))
}

/// The claims of nodes on the image, held or requested. In a shared pool they include stale
/// ones of other nodes: only a node itself knows that it has rebooted.
pub fn owners(pool: &Pool, image: &str) -> Result<Vec<Claim>, ClaimError> {
    let boot_id = boot_id().map_err(|e| pool.io("read", Path::new(BOOT_ID), e))?;
    let found = others(pool, image, Path::new(""), &boot_id)?;
    let claims = found.into_iter().map(|(_, claim)| claim);
    Ok(claims.filter(|claim| claim.token().is_none()).collect())
}

/// Removes the claims of a deleted image. Their directory may have been a spare one.
pub fn forget(pool: &Pool, image: &str) -> Result<(), ClaimError> {
    let dir = claims_dir(pool, image);
    for path in list(pool, &dir)? {
        let _: Done = unlink(pool, &path)?;
    }
    if pool.spares().give_back_dir(&dir).is_err() {
        // Fails where it is gone.
        let _ = fs::remove_dir(&dir);
    }
    Ok(())
}

/// Removes the claims of dead controllers. A node's stale claim is left to that node, which
/// may be replacing it.
pub fn sweep(pool: &Pool) -> Result<(), ClaimError> {
    let tmp = pool.meta_path("tmp");
    for dir in list(pool, &pool.meta_path(CLAIMS))? {
        let claims = list(pool, &dir)?;
        if is_spare_dir(&dir) {
            // Entered while the directory of a deleted image became a spare one.
            for path in claims {
                let _: Done = unlink(pool, &path)?;
            }
            continue;
        }
        for path in claims {
            // The next claim of that image reports the malformed file.
            let Ok(Some(Marker { claim, .. })) = read(pool, &path) else {
                continue;
            };
            if let Some(token) = claim.token()
                && !draft::is_live(&tmp, token)
                    .map_err(|e| pool.io("look at a lock in", &tmp, e))?
            {
                let _: Done = unlink(pool, &path)?;
            }
        }
        // Fails while another claim is in the directory.
        let _ = fs::remove_dir(&dir);
    }
    Ok(())
}

/// The images that a node has claimed; after a restart the node releases stale claims.
pub fn claimed_by(pool: &Pool, node_id: &str) -> Result<Vec<String>, ClaimError> {
    let mut images = Vec::new();
    for dir in list(pool, &pool.meta_path(CLAIMS))? {
        if is_spare_dir(&dir) {
            continue;
        }
        if let Some(image) = dir.file_name().and_then(|name| name.to_str()) {
            let marker = marker_path(pool, image, node_id);
            if marker
                .try_exists()
                .map_err(|e| pool.io("look at", &marker, e))?
            {
                images.push(image.to_owned());
            }
        }
    }
    Ok(images)
}

fn is_spare_dir(dir: &Path) -> bool {
    let name = dir.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name.starts_with(SPARE_DIR))
}

/// The file of a node's claim of an image.
fn marker_path(pool: &Pool, image: &str, node_id: &str) -> PathBuf {
    claims_dir(pool, image).join(format!("{}.json", NodeHash::of(node_id)))
}

fn claims_dir(pool: &Pool, image: &str) -> PathBuf {
    pool.meta_path(CLAIMS).join(image)
}

fn restore(
    pool: &Pool,
    image: &str,
    mine: &Path,
    before: Option<Marker>,
) -> Result<(), ClaimError> {
    match before {
        Some(marker) => write(pool, mine, &marker.claim, marker.state).map(drop),
        None => remove(pool, image, mine).map(drop),
    }
}

fn others(
    pool: &Pool,
    image: &str,
    mine: &Path,
    boot_id: &str,
) -> Result<Vec<(PathBuf, Claim)>, ClaimError> {
    let mut found = Vec::new();
    for path in list(pool, &claims_dir(pool, image))? {
        if path != mine
            && let Some(Marker { claim, .. }) = read(pool, &path)?
            && !is_stale(pool, &claim, boot_id)?
        {
            found.push((path, claim));
        }
    }
    Ok(found)
}

fn is_stale(pool: &Pool, claim: &Claim, boot_id: &str) -> Result<bool, PoolError> {
    if pool.scope == Scope::Local && claim.boot_id != boot_id {
        return Ok(true);
    }
    let Some(token) = claim.token() else {
        return Ok(false);
    };
    let tmp = pool.meta_path("tmp");
    let live = draft::is_live(&tmp, token).map_err(|e| pool.io("look at a lock in", &tmp, e))?;
    Ok(!live)
}

fn list(pool: &Pool, dir: &Path) -> Result<Vec<PathBuf>, PoolError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let entries = rustix::fs::open(dir, flags, Mode::empty())
        .and_then(|opened| Dir::new(opened)?.collect::<Result<Vec<_>, _>>());
    let entries = match entries {
        Ok(entries) => entries,
        Err(Errno::NOENT) => return Ok(Vec::new()),
        Err(errno) => return Err(pool.io("list", dir, errno)),
    };
    let names = entries.iter().map(DirEntry::file_name);
    let names = names.filter(|name| *name != c"." && *name != c"..");
    Ok(names
        .map(|name| dir.join(OsStr::from_bytes(name.to_bytes())))
        .collect())
}

fn read(pool: &Pool, path: &Path) -> Result<Option<Marker>, ClaimError> {
    let mut last = None;
    loop {
        let bytes = match read_bytes(path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(pool.io("read", path, e).into()),
        };
        // The file was written whole: only a power loss empties it, and ends the claim of
        // the one node of a local pool.
        if bytes.is_empty() && pool.scope == Scope::Local {
            return Ok(None);
        }
        match serde_json::from_slice(&bytes) {
            Ok(marker) => return Ok(Some(marker)),
            // Half of it may be of the state that its owner has just overwritten.
            Err(_) if last.as_ref() != Some(&bytes) => last = Some(bytes),
            Err(source) => {
                let path = path.to_owned();
                return Err(ClaimError::Corrupt { path, source });
            }
        }
    }
}

fn read_bytes(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; MARKER];
    let mut file = File::open(path)?;
    let length = file.read(&mut bytes)?;
    bytes.truncate(length);
    // A read of a file returns less than was asked for only at the end.
    if length == MARKER {
        file.take(LONGEST).read_to_end(&mut bytes)?;
    }
    Ok(bytes)
}

/// Writes a claim; returns its file, to change the state in place.
fn write(pool: &Pool, path: &Path, claim: &Claim, state: ClaimState) -> Result<File, ClaimError> {
    let bytes = text_of(claim, state);
    let dir = path.parent().expect("a marker is in a directory");
    let tmp = pool.meta_path("tmp");
    loop {
        match draft::replace(&tmp, path, &bytes, Volatile) {
            Ok(file) => return Ok(file),
            // Another node released the last claim, and removed the directory.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                pool.meta_dir("tmp")?;
                let _ = create_dir(pool, dir)?;
            }
            Err(e) => return Err(pool.io("write", path, e).into()),
        }
    }
}

/// The content of a claim's file. Its length does not depend on the state, and the state is
/// in its last bytes: so overwriting it changes nothing else.
fn text_of(claim: &Claim, state: ClaimState) -> Vec<u8> {
    let text = |state| {
        let claim = claim.clone();
        serde_json::to_vec(&Marker { claim, state }).expect("a claim is plain strings")
    };
    let mut bytes = text(state);
    bytes.resize(text(ClaimState::Asking).len(), b' ');
    bytes
}

/// Makes the directory of an image's claims, if it is missing.
fn create_dir(pool: &Pool, dir: &Path) -> Result<Done, PoolError> {
    loop {
        match fs::create_dir(dir) {
            Ok(()) => return Ok(Done::Now),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Ok(Done::Already),
            Err(e) if e.kind() == io::ErrorKind::NotFound => pool.meta_dir(CLAIMS).map(drop)?,
            Err(e) => return Err(pool.io("make directory", dir, e)),
        }
    }
}

/// Removes a claim's file, and not the directory of the image's claims.
fn unlink(pool: &Pool, path: &Path) -> Result<Done, ClaimError> {
    made().remove(path);
    Ok(draft::remove(path, Volatile).map_err(|e| pool.io("remove", path, e))?)
}

fn remove(pool: &Pool, image: &str, path: &Path) -> Result<Done, ClaimError> {
    let done = unlink(pool, path)?;
    // Fails while another claim is in the directory.
    let _ = fs::remove_dir(claims_dir(pool, image));
    Ok(done)
}

const CLAIMS: &str = "claims";
/// Bytes of a marker, about.
const MARKER: usize = 512;
/// Bytes of a marker at most.
const LONGEST: u64 = 64 << 10;
/// No node id begins so: node names of Kubernetes have no slash.
const CONTROLLER: &str = "controller/";

#[cfg(test)]
mod tests;
