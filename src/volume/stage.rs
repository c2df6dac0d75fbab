//! Stage: from a source to a device, and for file systems to a mount.

use std::{
    io,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use super::{
    Outcome, already,
    attach::{Before, attach_source, known_device, purpose_of},
    context::{Context, OnLane},
    error::Cause,
    layout, mounted,
    nested::PathOf,
    places::{absent_is_none, at_staging},
    prepare::{self, OpenDevice, Prepared},
    publish,
    record::{Phase, Record},
    remote,
    spec::{RootAccess, Stage, Use},
    unstage::{self, forget},
};
use crate::{
    Done,
    admission::Permit,
    device::{Attachment, Device, DeviceError, Fencing, ready},
    fs::{
        FsType,
        fscrypt::{DirectoryState, EncryptedDirectory},
        grow::{self, GrowError},
        probe::FsInfo,
    },
    kernel::{Dev, sysfs},
    mount::{
        PathKind,
        attach::{self, NewMount},
        options::MountOptions,
        path::SafePath,
    },
    observe::logs,
};

/// A device is ready within microseconds of its attach, or something is wrong.
const READY_WITHIN: Duration = Duration::from_secs(30);

/// `NodeStageVolume`.
pub(super) async fn stage(cx: Context<'_>, spec: &Stage) -> Result<Outcome, Cause> {
    cx.progress.backend(spec.source.backend());
    let limit = cx.node.config.max_volumes;
    // Before the first wait: calls that are about to be refused would count, too.
    if cx.volume.record().is_none()
        && limit > 0
        && cx.node.count() > usize::try_from(limit).unwrap_or(usize::MAX)
    {
        return Err(Cause::Full { limit });
    }
    if spec.source.encrypted_directory().is_some()
        && !matches!(
            spec.usage,
            Use::Mount {
                fs: None | Some(FsType::Ext4),
                ..
            }
        )
    {
        return Err(Cause::Invalid {
            field: "volume_capability",
            why: "the files of the volume are encrypted, so it is mounted, as ext4".to_owned(),
        });
    }
    cx.refuse_nested(&spec.staging_path, PathOf::staging(&spec.usage))?;
    let (spec, looking) = (spec.clone(), cx.admit_look(&spec.source).await?);
    cx.on_lane(|cx| Box::pin(on_lane(cx, spec, looking))).await
}

/// A stage from its first look to its last step, on the volume's lane.
async fn on_lane(cx: OnLane<'_>, mut spec: Stage, looking: Permit) -> Result<Outcome, Cause> {
    let (mut place, mut before) = cx.step("look", || look(cx, &mut spec))?;
    drop(looking);
    if let Some(record) = cx.volume.record() {
        match record.phase {
            // Found without a record: this call says how it is to be staged.
            Phase::Staged if record.found && record.may_satisfy(&spec) => {}
            _ if !record.satisfies(&spec) && must_stay(cx, &record) => {
                return Err(Cause::Incompatible {
                    have: record.describe(),
                    want: Record::begin(&cx.volume.id, "", &spec).describe(),
                });
            }
            Phase::Staged if before.is_staged => {
                let usable = cx.step("look", || publish::refuse_shut_down(&place));
                usable.map_err(kept)?;
                // A volume that is published again registers this node again: while the
                // node was cut off, the controller may have removed it.
                if let Some(device) = &record.device
                    && (spec.fencing == Fencing::On
                        || cx.node.backends.bind(&record.source).wants_secrets(device))
                {
                    attach_source(cx, &spec, purpose_of(&spec.usage), before)
                        .await
                        .map_err(kept)?;
                }
                already("stage", Done::Already);
                return Ok(Outcome::Done);
            }
            // A call with other arguments began it, or an unstage, and has ended.
            _ if !record.satisfies(&spec) => {
                unstage::tear_down(cx, &record).await?;
                (place, before) = cx.step("look", || look(cx, &mut spec))?;
            }
            _ => {}
        }
    }
    let staging = Staging {
        cx,
        spec: &spec,
        place: &place,
    };
    staging.bring_up(before).await?;
    Ok(Outcome::Done)
}

/// Makes the directory to mount at, and looks at what is there. A file of the operator's
/// completes the source on the way.
fn look(cx: OnLane<'_>, spec: &mut Stage) -> Result<(SafePath, Before), Cause> {
    spec.source = cx.node.backends.canonical(&spec.source);
    let place = layout::make_place(&cx.node.places, &cx.volume.id, spec)?;
    let record = cx.volume.record();
    let staged = record.as_ref().filter(|it| it.phase == Phase::Staged);
    let kind = place.kind();
    // Where the look fails, the later ones say why.
    let is_mounted = matches!(kind, Ok(PathKind::Mount(_)) | Err(_));
    let before = Before {
        is_staged: staged.is_some_and(|record| is_still_there(record, kind.as_ref().ok())),
        device: (spec.source.has_device())
            .then(|| known_device(&place, is_mounted, record.as_ref(), &spec.usage))
            .flatten(),
        is_mounted,
    };
    Ok((place, before))
}

/// Whether a call with other arguments must leave the volume as it is: pods may use it, or
/// have written to the image of an inline volume, which its unpublish alone deletes.
fn must_stay(cx: OnLane<'_>, record: &Record) -> bool {
    record.outlives_reboot()
        || cx.live_target().is_some()
        || record.phase == Phase::Staged && is_in_place(cx, record)
}

/// Whether a volume that its record calls staged is mounted, or attached if it is raw: an
/// agent may have been killed while it unstaged it. If a look fails, it is.
fn is_in_place(cx: OnLane<'_>, record: &Record) -> bool {
    let staged = || {
        let place = absent_is_none(cx.node.places.staging(&record.mount_point())).ok()?;
        let kind = place.map_or(Ok(PathKind::Absent), |place| place.kind());
        Some(is_still_there(record, Some(&kind.ok()?)))
    };
    cx.step("look", staged).unwrap_or(true)
}

/// Whether a staged volume is where its record says. Asks the kernel, not the device.
fn is_still_there(record: &Record, found: Option<&PathKind>) -> bool {
    match &record.device {
        Some(device) if !record.mounts() => record.source.is_still(device),
        _ => matches!(found, Some(PathKind::Mount(mounted)) if record.appears_at(mounted)),
    }
}

/// The line of a volume's life that says when it was formatted.
fn log_staged(record: &Record, formatted: bool, took: Duration) {
    let fs = match record.usage {
        Use::Block => "block",
        Use::Mount { .. } => record.fs.map_or(record.source.backend(), FsType::as_str),
    };
    let device = record.device.as_ref().map(|device| device.node.display());
    tracing::info!(
        volume_id = record.volume_id,
        source = %record.source,
        fs,
        formatted,
        device = device.map(tracing::field::display),
        micros = logs::micros(took),
        "staged"
    );
}

/// A volume that is being staged.
#[derive(Clone, Copy)]
struct Staging<'a> {
    cx: OnLane<'a>,
    spec: &'a Stage,
    /// Where it is to be mounted.
    place: &'a SafePath,
}

impl Staging<'_> {
    /// The part of stage that changes something, and is undone if it fails.
    async fn bring_up(self, known: Before) -> Result<(), Cause> {
        let Self { cx, spec, .. } = self;
        let begun = Instant::now();
        let before = cx.volume.record();
        let mut record = Record::begin(&cx.volume.id, cx.node.backends.boot_id(), spec);
        if let Some(before) = &before {
            record.device.clone_from(&before.device);
            (record.root_dev, record.root_ino) = (before.root_dev, before.root_ino);
            record.fs = before.fs;
        }
        let mut is_mounted = true;
        let attached = match cx.claim(&record) {
            Ok(()) => {
                if let Err(cause) = cx.remember(&record).await {
                    match before {
                        Some(before) => cx.volume.hold_record(before),
                        None => cx.volume.hold(None),
                    }
                    return Err(cause);
                }
                is_mounted = known.is_mounted;
                if spec.source.has_device() {
                    let attaching = attach_source(cx, spec, purpose_of(&spec.usage), known);
                    attaching.await.map(Some)
                } else {
                    Ok(None)
                }
            }
            Err(cause) if before.is_none() => return Err(cause),
            Err(cause) => Err(cause),
        };
        let cause = match attached {
            Ok(attached) => {
                let done = if let Some(mut attached) = attached {
                    record.device = Some(attached.device.clone());
                    let exclusive = attached.exclusive.take();
                    self.steps(&mut record, &attached, exclusive, is_mounted)
                        .await
                } else {
                    self.mount_remote(&mut record, is_mounted).await
                };
                match done {
                    Ok(formatted) => {
                        log_staged(&record, formatted, begun.elapsed());
                        return Ok(());
                    }
                    Err(cause) => cause,
                }
            }
            // If the source is attached, this call did not attach it.
            Err(cause) if before.is_none() => {
                return match forget(cx, &record).await {
                    Ok(()) => Err(cause),
                    Err(undo) => Err(cause.not_undone(undo)),
                };
            }
            Err(cause) => cause,
        };
        if cx.live_target().is_some() {
            // Pods use it.
            return Err(kept(cause));
        }
        if before.is_some() && record.outlives_reboot() {
            // The image is an earlier call's, and may hold what a pod wrote before a reboot.
            return Err(kept(cause));
        }
        match unstage::tear_down(cx, &record).await {
            Ok(()) => Err(cause),
            Err(undo) => Err(cause.not_undone(undo)),
        }
    }

    /// `is_mounted`: whether something was mounted there before the attach. A mount that
    /// another process has made since is refused, by the step that mounts. Returns whether
    /// the file system was made.
    async fn steps(
        self,
        record: &mut Record,
        attached: &Attachment,
        exclusive: Option<OwnedFd>,
        is_mounted: bool,
    ) -> Result<bool, Cause> {
        let Self { cx, spec, .. } = self;
        let mut formatted = false;
        let device = &attached.device;
        if !attached.is_ready {
            self.wait_until_ready(device).await?;
        }
        if record.mounts() {
            // Recorded before anything is mounted: after a crash the next agent must know
            // which device to look for.
            cx.remember(record).await?;
        }
        if let Use::Mount { options, .. } = &spec.usage {
            let mounted = if is_mounted {
                self.at_place("look", |place| mounted::fs_of(place, device))?
            } else {
                None
            };
            if let Some((fs, root_dev)) = mounted {
                already("mount", Done::Already);
                (record.fs, record.root_dev) = (Some(fs), Some(root_dev));
                if !spec.read_only {
                    // The agent that mounted it may have died before it grew it.
                    self.grow_to_device(record, device, fs)?;
                }
            } else {
                let (prepared, held) =
                    prepare::prepare(cx, record, attached, exclusive, &spec.mkfs_options).await?;
                let root_dev = self.mount(options, device, &prepared, held).await?;
                (record.fs, record.root_dev) = (Some(prepared.fs), Some(root_dev));
                formatted = prepared.found.is_none();
                let larger = |info: &FsInfo| grow::needed(info, prepared.device_bytes);
                if !spec.read_only && prepared.found.as_ref().is_some_and(larger) {
                    self.grow_to_device(record, device, prepared.fs)?;
                }
            }
            if let Some(names) = spec.source.encrypted_directory() {
                self.unlock(names, device).await?;
            }
            if !spec.read_only {
                self.set_root(spec.root)?;
            }
            if let Some(group) = spec.group.filter(|_| !spec.read_only) {
                self.at_place("chgrp", |place| mounted::own(place, &spec.source, group))?;
            }
        } else if record.mounts() {
            self.bind_node(device)?;
        }
        layout::write_stage_file(cx, record)?;
        record.phase = Phase::Staged;
        cx.remember(record).await?;
        Ok(formatted)
    }

    /// Mounts a source without a block device; parameters and result as of [`Self::steps`].
    async fn mount_remote(self, record: &mut Record, is_mounted: bool) -> Result<bool, Cause> {
        let Self { cx, spec, place } = self;
        let Use::Mount { options, .. } = &spec.usage else {
            return Err(DeviceError::NoDevice.into());
        };
        let found = if is_mounted {
            self.at_place("look", |place| remote::mounted(&spec.source, place))?
        } else {
            None
        };
        let mounted = if let Some(mounted) = found {
            already("mount", Done::Already);
            mounted
        } else {
            // Its mount is what waits for a server, as the attach of others, and is begun
            // with nothing in hand: so a flood of calls is refused here.
            let gate = &cx.node.config.gates.attach;
            let mut domain = spec.source.domain();
            if spec.inline.is_some() {
                // Pods choose the server's port: theirs delay no claim of the server.
                domain.insert_str(0, "inline volumes of ");
            }
            let _admission = cx.admit_as(gate, &domain).await?;
            cx.step("mount", || {
                make_room(place)?;
                let mounted = spec.source.mount(options, spec.read_only, place);
                mounted.map_err(Cause::Mount)
            })?
        };
        (record.root_dev, record.root_ino) = (Some(mounted.dev), Some(mounted.ino));
        if !spec.read_only {
            self.set_root(RootAccess {
                mode: spec.root.mode.or(spec.source.root_mode()),
                ..spec.root
            })?;
            if let Some(group) = spec.group {
                self.at_place("chgrp", |place| mounted::own(place, &spec.source, group))?;
            }
        }
        record.phase = Phase::Staged;
        cx.remember(record).await?;
        Ok(false)
    }

    async fn wait_until_ready(self, device: &Device) -> Result<(), Cause> {
        let cx = self.cx;
        let ready = async {
            if ready::look(&self.spec.source, device)?.is_some() {
                return Ok(());
            }
            let (node, of, on) = (cx.node.clone(), self.spec.source.clone(), device.clone());
            let wait = move || async move {
                let ready = ready::ready(&node.uevents, &of, &on);
                tokio::time::timeout(READY_WITHIN, ready).await
            };
            let waited = cx.node.on_runtime(wait).await;
            waited
                .map_err(|elapsed| io::Error::new(io::ErrorKind::TimedOut, elapsed))?
                .map(drop)
        };
        let waited = cx.wait("ready", ready).await;
        waited.map_err(Cause::io(format!("wait for {}", device.node.display())))
    }

    async fn mount(
        self,
        options: &MountOptions,
        device: &Device,
        prepared: &Prepared,
        held: OpenDevice<'_>,
    ) -> Result<Dev, Cause> {
        let Self { cx, spec, place } = self;
        let gate = &cx.node.config.gates.mount;
        let _admission = cx.admit(gate, &spec.source).await?;
        let root_dev = cx.step("mount", || {
            make_room(place)?;
            held.check()?;
            let new = NewMount {
                fs_type: prepared.fs.as_str(),
                source: &device.node,
                options,
                extra: &extra_options(prepared, spec.read_only, options),
                read_only: spec.read_only,
            };
            let root_dev = match prepared.fs {
                // Their superblocks have the number of the device.
                FsType::Ext4 | FsType::Xfs => {
                    attach::mount_directory(&new, place).map(|()| device.dev)
                }
                FsType::Btrfs => attach::mount(&new, place).map(|mounted| mounted.dev),
            };
            root_dev.map_err(Cause::Mount)
        })?;
        tracing::debug!(volume_id = cx.volume.id, %root_dev, "mounted");
        Ok(root_dev)
    }

    /// Gives the kernel the key of the volume's files, which are encrypted; makes their
    /// directory before the first use. To derive a key from a passphrase takes memory and a
    /// processor, as cryptsetup does.
    async fn unlock(self, names: EncryptedDirectory, device: &Device) -> Result<(), Cause> {
        let Self { cx, spec, .. } = self;
        let (directory, state) = self.at_place("look", |place| {
            let directory = mounted::encrypted(place, names)?;
            let state = directory.state()?;
            Ok((directory, state))
        })?;
        let is_new = match state {
            // A repeat of a stage needs no secret, and so no KMS that answers.
            DirectoryState::Unlocked => return Ok(()),
            DirectoryState::Locked => false,
            DirectoryState::Absent if spec.read_only => {
                return Err(Cause::precondition(
                    "its files are to be encrypted, and it is read-only: stage it writable once",
                ));
            }
            DirectoryState::Absent => true,
        };
        let (secret, source) = cx.step("key", || {
            let bound = cx.node.backends.bind(&spec.source);
            bound.files_secret(device, &cx.volume.id, cx.secrets, is_new)
        })?;
        let _admission = cx
            .admit(&cx.node.config.gates.cryptsetup, &spec.source)
            .await?;
        cx.step("unlock", || {
            let unlocked = if is_new {
                directory.set_up(&secret, source)
            } else {
                directory.unlock(&secret)
            };
            Ok(unlocked?)
        })
    }

    /// Runs a step at the mount point.
    fn at_place<T>(
        self,
        step: &'static str,
        work: impl FnOnce(&SafePath) -> Result<T, Cause>,
    ) -> Result<T, Cause> {
        self.cx.step(step, || work(self.place))
    }

    fn set_root(self, root: RootAccess) -> Result<(), Cause> {
        if root == RootAccess::default() {
            return Ok(());
        }
        let source = &self.spec.source;
        self.at_place("chmod", |place| mounted::set_root(place, source, root))
    }

    /// Binds the device's node, unless something is mounted there.
    fn bind_node(self, device: &Device) -> Result<(), Cause> {
        self.at_place("look", |place| {
            if matches!(place.kind(), Ok(PathKind::Mount(_))) {
                return Ok(());
            }
            publish::bind_node(self.cx, device, place, self.spec.read_only)
        })
    }

    /// A clone may be larger than the file system that it was cloned from.
    fn grow_to_device(self, record: &Record, device: &Device, fs: FsType) -> Result<(), Cause> {
        let cx = self.cx;
        let size = sysfs::size_bytes(device.dev).map_err(Cause::io("read the device's size"))?;
        match mounted::grow(cx, record, fs, size) {
            Err(Cause::Grow(
                error @ (GrowError::NeedsCapability { .. } | GrowError::TooSmall { .. }),
            )) => {
                // Smaller than its device, but intact.
                tracing::warn!(volume_id = cx.volume.id, %error, "the file system stays smaller than its device");
                Ok(())
            }
            other => other.map(|_| ()),
        }
    }
}

/// Makes the mount point, at which nothing else may be mounted.
fn make_room(place: &SafePath) -> Result<(), Cause> {
    let done = match place.kind() {
        Ok(PathKind::Mount(_)) => {
            return Err(Cause::precondition(format!(
                "something else is mounted at the staging path {}; unmount it first",
                place.path().display()
            )));
        }
        Ok(PathKind::Dir) => Done::Already,
        _ => place.make_dir(0o750).map_err(at_staging)?,
    };
    already("make the staging directory", done);
    Ok(())
}

/// The failure of a call that leaves the volume as it was before the call.
pub(super) fn kept(cause: Cause) -> Cause {
    Cause::Kept(Box::new(cause))
}

/// What each file system needs besides the caller's options. XFS refuses a
/// second mount of one UUID, so clones need `nouuid`; a read-only device cannot
/// replay its log. An ext4 superblock says what happens after an error, and the author
/// of an image may have chosen a panic of the node; so the mount always says it.
fn extra_options(
    prepared: &Prepared,
    read_only: bool,
    requested: &MountOptions,
) -> Vec<&'static str> {
    let replay = prepared
        .found
        .as_ref()
        .is_some_and(|info| info.needs_recovery);
    let mut extra = match (prepared.fs, read_only) {
        (FsType::Xfs, false) => vec!["nouuid"],
        (FsType::Xfs, true) => vec!["nouuid", "norecovery"],
        (FsType::Ext4, true) if replay => vec!["noload"],
        (FsType::Btrfs, true) if replay => vec!["rescue=nologreplay"],
        _ => Vec::new(),
    };
    if prepared.fs == FsType::Ext4 && !requested.fs_options().any(|option| option.key == "errors") {
        extra.push("errors=remount-ro");
    }
    extra
}
