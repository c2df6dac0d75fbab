//! Publish: a staged volume appears at a target path.
//!
//! What the call asks for is compared with the volume's record on the runtime thread;
//! all else happens on the volume's lane ([`Publishing`]). Of a mounted volume it
//! never touches the device, but the directories that it walks are on a disk, too. No
//! record is written: the mount at the target is the record.

use std::{
    io,
    path::{Path, PathBuf},
};

use rustix::{
    fd::{AsFd as _, OwnedFd},
    fs::{Mode, OFlags},
};

use super::{
    Outcome, already,
    context::{Context, OnLane},
    error::Cause,
    health::RESTAGE,
    nested::PathOf,
    places::at_target,
    record::{Phase, Record, Target},
    spec::{Publish, Use},
};
use crate::{
    Done,
    capability::AccessMode,
    device::{self, Device, descriptor_lock::Unlock},
    fs::fscrypt::{EncryptedDirectory, FileEncryption},
    kernel::{Dev, sysfs},
    mount::{
        Mounted, PathKind,
        attach::MountError,
        bind,
        options::MountOptions,
        path::{PathError, SafePath},
        table,
    },
};

/// `NodePublishVolume` of a staged volume.
pub(super) async fn publish(cx: Context<'_>, spec: &Publish) -> Result<Outcome, Cause> {
    let record = cx
        .volume
        .record()
        .filter(|record| record.phase == Phase::Staged)
        .ok_or_else(|| Cause::precondition("it is not staged on this node; stage it first"))?;
    cx.progress.backend(record.source.backend());
    if record.staging_path != spec.staging_path {
        return Err(Cause::precondition(format!(
            "it is staged at {}, not at {}",
            record.staging_path.display(),
            spec.staging_path.display()
        )));
    }
    cx.refuse_nested(&spec.target_path, PathOf::Target)?;
    if record.source.has_device() {
        let _: Device = record.attached_device()?;
    }
    let options = publish_options(&record, spec)?;
    let spec = spec.clone();
    cx.run_on_lane(move |cx| {
        let publishing = Publishing {
            cx,
            options: &options,
            spec: &spec,
            record: &record,
            read_only: spec.read_only || record.read_only,
        };
        cx.step("publish", || publishing.run())
    })
    .await
    .map(|()| Outcome::Done)
}

/// A publish, on the volume's lane.
#[derive(Clone, Copy)]
struct Publishing<'a> {
    cx: OnLane<'a>,
    record: &'a Record,
    spec: &'a Publish,
    /// The capability's options that apply to the target.
    options: &'a MountOptions,
    read_only: bool,
}

impl Publishing<'_> {
    fn run(self) -> Result<(), Cause> {
        let done = self.find_or_bind()?;
        // Before the lock: if that fails, the volume is at the target all the same.
        let read_only = self.read_only;
        let target = Target { read_only };
        self.cx.volume.set_target(&self.spec.target_path, target);
        self.lock()?;
        if done == Done::Now {
            tracing::info!(
                volume_id = self.record.volume_id,
                target_path = %self.spec.target_path.display(),
                read_only = self.read_only,
                "published"
            );
        }
        Ok(())
    }

    fn find_or_bind(self) -> Result<Done, Cause> {
        let place = self.cx.node.places.target(&self.spec.target_path)?;
        let path = place.path().display();
        match place.kind().map_err(Cause::io(format!("look at {path}")))? {
            PathKind::Mount(mounted) if self.record.appears_at(&mounted) => {
                self.refuse_clear(&place, &mounted)?;
                if self.spec.remount && self.record.usage != Use::Block && !mounted.shut_down {
                    self.remount(&place)?;
                }
                self.refuse_other_access(&place, &mounted)?;
                if self.record.usage == Use::Block {
                    let device = self.record.attached_device()?;
                    if !self.is_as_requested(&device)? {
                        self.mark(&device)?;
                    }
                }
                already("publish", Done::Already);
                return Ok(Done::Already);
            }
            PathKind::Mount(_) => {
                return Err(Cause::Incompatible {
                    have: format!("staged, but something else is mounted at {path}"),
                    want: "this volume there".to_owned(),
                });
            }
            _ => {}
        }
        let single = |mode| mode == AccessMode::SingleNodeSingleWriter;
        if (single(self.spec.mode) || single(self.record.mode))
            && let Some(other) = self.live_target()
        {
            return Err(Cause::precondition(format!(
                "its access mode allows one target, and it is published at {}",
                other.display()
            )));
        }
        match self.record.usage {
            Use::Mount { .. } => self.bind_mount(&place)?,
            Use::Block => {
                let device = self.record.attached_device()?;
                if !self.record.source.is_still(&device) {
                    return Err(Cause::precondition(format!(
                        "{} is not its device any more; unstage it and stage it again",
                        device.node.display()
                    )));
                }
                self.set_writable(&device)?;
                bind_node(self.cx, &device, &place, self.read_only)?;
            }
        }
        Ok(Done::Now)
    }

    /// Gives the target the attributes of the options.
    fn remount(self, place: &SafePath) -> Result<(), Cause> {
        let path = place.path().display();
        let target = place.open().map_err(Cause::io(format!("open {path}")))?;
        let look = PathKind::of(target.as_fd()).map_err(Cause::io(format!("look at {path}")))?;
        match look {
            PathKind::Mount(mounted) if self.record.appears_at(&mounted) => {
                let set = bind::set_attributes(target.as_fd(), self.options, self.read_only);
                set.map_err(Cause::io(format!("set the mount options at {path}")))
            }
            _ => Err(Cause::precondition(format!("it was unmounted from {path}"))),
        }
    }

    /// A target at which the volume appears already.
    fn live_target(self) -> Option<PathBuf> {
        let mut targets = self.cx.volume.targets();
        let live = targets.live(&self.cx.node.places, self.record);
        self.cx.volume.forget_unmounted(&targets);
        live
    }

    /// Checks that an existing target is as the call asks.
    fn refuse_other_access(self, place: &SafePath, mounted: &Mounted) -> Result<(), Cause> {
        self.refuse_other_protection(place, mounted)?;
        let failed = Cause::io(format!("look at {}", place.path().display()));
        let is_read_only = place.is_read_only(mounted).map_err(failed)?
            && (self.record.read_only || self.is_bound_read_only(place)?);
        if is_read_only == self.read_only {
            return Ok(());
        }
        Err(Cause::Incompatible {
            have: format!(
                "published {} at {}",
                access(is_read_only),
                place.path().display()
            ),
            want: access(self.read_only).to_owned(),
        })
    }

    /// Options that the call names must hold. Defaults may differ: an earlier version of
    /// the agent may have mounted the target.
    fn refuse_other_protection(self, place: &SafePath, mounted: &Mounted) -> Result<(), Cause> {
        let Use::Mount {
            options: requested, ..
        } = &self.spec.usage
        else {
            return Ok(());
        };
        if mounted.shut_down || !requested.sets_protection() {
            return Ok(());
        }
        let path = place.path().display();
        let has = place
            .open()
            .and_then(|target| mounted.protection(target.as_fd()));
        match requested.first_not_in_force(has.map_err(Cause::io(format!("look at {path}")))?) {
            None => Ok(()),
            Some(word) => Err(Cause::Incompatible {
                have: format!("published without {word} at {path}"),
                want: word.to_owned(),
            }),
        }
    }

    /// Whether a target that cannot be written was published so: a file system becomes
    /// read-only by errors, too, and kubelet repeats the calls for its pods all the same.
    fn is_bound_read_only(self, target: &SafePath) -> Result<bool, Cause> {
        let is_writable = |staged: SafePath| match staged.kind() {
            Ok(PathKind::Mount(mounted)) => staged.is_read_only(&mounted).is_ok_and(|it| !it),
            _ => false,
        };
        let staged = self.cx.node.places.staging(&self.record.mount_point());
        if self.record.usage == Use::Block || staged.is_ok_and(is_writable) {
            return Ok(true);
        }
        let entry = target
            .open()
            .and_then(|target| table::covering(target.as_fd()));
        let failed = Cause::io(format!("look at {}", target.path().display()));
        Ok(entry.map_err(failed)?.own_read_only)
    }

    fn bind_mount(self, place: &SafePath) -> Result<(), Cause> {
        let mount = self.shown()?;
        if let Some(group) = self.spec.group.filter(|_| !self.read_only) {
            let own = || group.apply(mount.as_fd());
            already("chgrp", self.cx.step("chgrp", own)?);
        }
        let made = place.make_dir(0o750).map_err(at_target)?;
        if made == Done::Already {
            place.refuse_content().map_err(at_target)?;
        }
        self.cx.step("bind", || {
            let bound = bind::bind(mount.as_fd(), true, place, self.options, self.read_only);
            undo_made(bound, place, made)
        })
    }

    /// The encrypted directory of its files, by the call where the volume was found staged.
    fn encrypted(self) -> Option<EncryptedDirectory> {
        let by_record = self.record.source.encrypted_directory();
        self.spec.encrypted.or(by_record)
    }

    /// The directory that pods see: the root of the staging mount, or its encrypted
    /// directory.
    fn shown(self) -> Result<OwnedFd, Cause> {
        let mount = open_staged(self.cx, self.record)?;
        match self.encrypted() {
            Some(names) => Ok(FileEncryption::below(mount.as_fd(), names)?.directory()?),
            None => Ok(mount),
        }
    }

    /// Refuses a target that shows the whole file system of a volume with encrypted files, in
    /// the clear.
    fn refuse_clear(self, place: &SafePath, mounted: &Mounted) -> Result<(), Cause> {
        if self.encrypted().is_none() || mounted.shut_down {
            return Ok(());
        }
        let failed = Cause::io(format!("look at {}", place.path().display()));
        let shown = rustix::fs::fstat(self.shown()?).map_err(|errno| failed(errno.into()))?;
        if shown.st_ino == mounted.ino {
            return Ok(());
        }
        Err(Cause::Incompatible {
            have: format!("published in the clear at {}", place.path().display()),
            want: "its encrypted directory there".to_owned(),
        })
    }

    /// A read-only bind of a device node does not stop a writer who opens it: the
    /// device itself has to refuse. It does so for all targets or for none.
    fn set_writable(self, device: &Device) -> Result<(), Cause> {
        if self.is_as_requested(device)? {
            return Ok(());
        }
        if let Some(other) = self.live_target() {
            return Err(Cause::precondition(format!(
                "it is published {} at {}, and a raw block device is read-only for all its targets or for none",
                access(!self.read_only),
                other.display()
            )));
        }
        self.mark(device)
    }

    /// Makes the device refuse writes, or take them.
    fn mark(self, device: &Device) -> Result<(), Cause> {
        let set = || device::read_only_mark::set(&device.block(), self.read_only);
        Ok(self.cx.step("set-ro", set)?)
    }

    /// Whether the device refuses writes or takes them, as the call asks.
    fn is_as_requested(self, device: &Device) -> Result<bool, Cause> {
        let looked =
            || sysfs::is_read_only(device.dev).map_err(Cause::io("read the device's state"));
        Ok(device.read_only || looked()? == self.read_only)
    }

    /// Takes the descriptor lock over a published device node, if configured or asked for.
    fn lock(self) -> Result<(), Cause> {
        let locks = self.spec.lock || self.cx.node.config.block_lock;
        if !locks || self.record.usage != Use::Block {
            return Ok(());
        }
        let dev = self.record.attached_device()?.dev;
        let place = self.cx.node.places.target(&self.spec.target_path)?;
        let lock = || {
            let failed = Cause::io(format!("open {}", place.path().display()));
            let target = place.open().map_err(failed)?;
            let locked = device::descriptor_lock::lock(dev, place.path(), target.as_fd());
            Ok::<_, Cause>(locked?)
        };
        already("lock", self.cx.step("lock", lock)?);
        if self.spec.lock {
            // Left over a target that was unmounted without a call; kubelet releases its own.
            let unmounted = vec![PathBuf::from("/")];
            let unlock = || device::descriptor_lock::unlock(dev, &Unlock::Over(unmounted));
            for lock in self.cx.step("unlock", unlock)? {
                tracing::info!(volume_id = self.cx.volume.id, lock = %lock.device.node.display(), "released an orphaned descriptor lock");
            }
        }
        Ok(())
    }
}

/// The staging mount. Rejects another one, and a file system that was shut down.
pub(super) fn open_staged(cx: OnLane<'_>, record: &Record) -> Result<OwnedFd, Cause> {
    let at = record.mount_point();
    let gone = || {
        let at = at.display();
        Cause::precondition(format!("its mount at {at} is gone; stage it again"))
    };
    let opened = match cx.node.places.open_staging(&at) {
        Err(Cause::Path {
            source: PathError::Io { source, .. },
            ..
        }) if source.kind() == io::ErrorKind::StaleNetworkFileHandle => {
            return Err(shut_down(&at));
        }
        opened => opened?.ok_or_else(gone)?,
    };
    let look = PathKind::of(opened.as_fd());
    match look.map_err(Cause::io(format!("look at {}", at.display())))? {
        PathKind::Mount(mounted) if mounted.shut_down => Err(shut_down(&at)),
        PathKind::Mount(mounted) if record.appears_at(&mounted) => Ok(opened),
        _ => Err(gone()),
    }
}

fn access(read_only: bool) -> &'static str {
    if read_only { "read-only" } else { "writable" }
}

/// The mount options of a target: the capability's, else the stage's, else the agent's
/// defaults, as the staging mount has none of them. Options of the superblock took effect
/// at stage; here they must be those of the stage.
fn publish_options(record: &Record, spec: &Publish) -> Result<MountOptions, Cause> {
    match (&record.usage, &spec.usage) {
        (Use::Block, Use::Block) => Ok(MountOptions::default()),
        (
            Use::Mount {
                options: staged, ..
            },
            Use::Mount { options, fs },
        ) => {
            if fs.is_some() && record.fs.is_some() && *fs != record.fs {
                return Err(Cause::precondition(format!(
                    "it is staged {}",
                    record.describe()
                )));
            }
            let options = options.for_publish();
            let unknown: Vec<_> = options
                .fs_options()
                .filter(|option| !record.found && !staged.has(option))
                .map(ToString::to_string)
                .collect();
            if unknown.is_empty() {
                let defaults = MountOptions::target_defaults(record.inline.is_some());
                Ok(options
                    .with_default_attributes(staged)
                    .with_default_attributes(&defaults))
            } else {
                Err(Cause::Invalid {
                    field: "volume_capability.mount.mount_flags",
                    why: format!(
                        "{} takes effect at stage, and the volume was staged without",
                        unknown.join(", ")
                    ),
                })
            }
        }
        _ => Err(Cause::precondition(format!("it is {}", record.describe()))),
    }
}

/// Rejects a file system that was shut down.
pub(super) fn refuse_shut_down(staging: &SafePath) -> Result<(), Cause> {
    match staging.kind() {
        Ok(PathKind::Mount(mounted)) if mounted.shut_down => Err(shut_down(staging.path())),
        _ => Ok(()),
    }
}

fn shut_down(staging: &Path) -> Cause {
    Cause::precondition(format!(
        "its file system at {} has shut down: {RESTAGE}",
        staging.display()
    ))
}

/// Removes what was made for the target of a bind that failed.
fn undo_made(bound: Result<(), MountError>, place: &SafePath, made: Done) -> Result<(), Cause> {
    if bound.is_err() && made == Done::Now {
        let _ = place.remove().map_err(at_target)?;
    }
    bound.map_err(Cause::Bind)
}

/// Binds the device's node to a file.
pub(super) fn bind_node(
    cx: OnLane<'_>,
    device: &Device,
    place: &SafePath,
    read_only: bool,
) -> Result<(), Cause> {
    let failed = || Cause::io(format!("open {}", device.node.display()));
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let source = rustix::fs::open(&device.node, flags, Mode::empty())
        .map_err(|errno| failed()(errno.into()))?;
    let found = rustix::fs::fstat(&source).map_err(|errno| failed()(errno.into()))?;
    if Dev::from_raw(found.st_rdev) != device.dev {
        return Err(failed()(io::Error::other(format!(
            "its number is {}, not {}",
            Dev::from_raw(found.st_rdev),
            device.dev
        ))));
    }
    let made = place.make_file(0o600).map_err(at_target)?;
    if made == Done::Already {
        place.refuse_content().map_err(at_target)?;
    }
    let options = MountOptions::default();
    cx.step("bind", || {
        let bound = bind::bind(source.as_fd(), false, place, &options, read_only);
        undo_made(bound, place, made)
    })
}
