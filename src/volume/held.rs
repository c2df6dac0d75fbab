//! What this node holds: changes to it, and the listing for operators.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use super::{
    Error, Node,
    context::OnLane,
    error::Cause,
    places::{Places, absent_is_none},
    record::{Held, Record, Target},
    spec::Use,
    task::{UnderWay, Volume},
};
use crate::{device::Device, fs::FsType, mount::PathKind, observe::metrics};

/// One volume, as `uringctl volumes` shows it.
#[derive(Clone, Debug)]
pub struct Listed {
    /// The handle.
    pub volume_id: String,
    /// loop, nbd, rbd.
    pub backend: &'static str,
    /// The device, once attached.
    pub device: Option<Device>,
    /// ext4, xfs, btrfs or block.
    pub access: &'static str,
    /// Where it is staged.
    pub staging_path: PathBuf,
    /// Where it is published.
    pub targets: BTreeMap<PathBuf, Target>,
    /// staging, staged, unstaging, inline.
    pub state: &'static str,
    /// The call under way.
    pub under_way: Option<UnderWay>,
}

impl Node {
    /// Every volume that this node holds or works on, by handle.
    pub async fn list(self: Arc<Self>, deadline: Duration) -> Result<Vec<Listed>, Error> {
        self.taken_up("", deadline).await?;
        let mut volumes: Vec<_> = self.volumes().values().cloned().collect();
        volumes.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(volumes.iter().map(|volume| self.listed(volume)).collect())
    }

    fn listed(&self, volume: &Volume) -> Listed {
        let under_way = volume.under_way(self);
        let held = volume.held();
        let record = held.as_ref().map(|held| &held.record);
        Listed {
            volume_id: volume.id.clone(),
            backend: record.map_or("", |r| r.source.backend()),
            device: record.and_then(|r| r.device.clone()),
            access: record.map_or("", |r| match (&r.usage, r.fs) {
                (Use::Block, _) => "block",
                (Use::Mount { .. }, fs) => fs.map_or("", FsType::as_str),
            }),
            staging_path: record.map(|r| r.staging_path.clone()).unwrap_or_default(),
            targets: held.as_ref().map(|h| h.targets.clone()).unwrap_or_default(),
            state: record.map_or("", Record::state),
            under_way,
        }
    }

    /// How many volumes there are, in whatever state.
    pub(super) fn count(&self) -> usize {
        self.volumes().len()
    }
}

impl Volume {
    /// Replaces the volume's record and targets; the gauges follow.
    pub(super) fn hold(&self, held: Option<Held>) {
        self.change_held(|now| *now = held);
    }

    /// Replaces the volume's record. Its targets stay: a publish may add one meanwhile.
    fn hold_record(&self, record: Record) {
        self.change_held(|held| {
            let targets = held.take().map(|held| held.targets);
            let targets = targets.unwrap_or_default();
            *held = Some(Held { record, targets });
        });
    }

    fn change_held(&self, change: impl FnOnce(&mut Option<Held>)) {
        let state = |held: &Option<Held>| held.as_ref().map(|h| h.record.state());
        let mut held = self.held();
        let before = state(&held);
        change(&mut held);
        metrics::volume_state_changed(before, state(&held));
    }

    /// A copy of the record, if there is one.
    pub(super) fn record(&self) -> Option<Record> {
        self.held().as_ref().map(|held| held.record.clone())
    }
}

impl Record {
    /// The volume's device.
    pub(super) fn attached_device(&self) -> Result<Device, Cause> {
        self.device.clone().ok_or_else(|| {
            Cause::precondition("it has no device yet: its staging did not finish; stage it again")
        })
    }
}

impl OnLane<'_> {
    /// Writes the volume's record down, then remembers it.
    pub(super) async fn remember(self, record: &Record) -> Result<(), Cause> {
        self.change_record(record.inline.is_some(), || self.node.records.save(record))
            .await
            .map_err(Cause::io("write the volume's record"))?;
        self.volume.hold_record(record.clone());
        Ok(())
    }

    /// Forgets the volume, on disk and here.
    pub(super) async fn forget(self, is_inline: bool) -> Result<(), Cause> {
        let id = &self.volume.id;
        self.change_record(is_inline, || self.node.records.forget(id, is_inline))
            .await
            .map_err(Cause::io("remove the volume's record"))?;
        self.volume.hold(None);
        Ok(())
    }

    /// Changes the volume's record. An inline volume's is on a disk, which may hang, and
    /// with it the lane.
    async fn change_record(
        self,
        is_inline: bool,
        change: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        if !is_inline {
            return change();
        }
        let gate = &self.node.config.gates.record;
        let admission = self.wait("record", gate.enter("")).await;
        let _admission = admission.map_err(io::Error::other)?;
        self.step("record", change)
    }

    /// A target at which the volume still appears.
    pub(super) fn live_target(self) -> Option<PathBuf> {
        let record = self.volume.record()?;
        let mut targets = self.volume.targets();
        if targets.paths.is_empty() {
            return None;
        }
        let live = self.step("look", || targets.live(&self.node.places, &record));
        self.volume.forget_gone(&targets);
        live
    }
}

/// A volume's targets at one moment, for its lane to look at.
#[derive(Debug, Default)]
pub(super) struct Targets {
    paths: Vec<PathBuf>,
    /// How often the volume had been published by then.
    published: u64,
    /// The targets at which the volume no longer appears.
    gone: Vec<PathBuf>,
}

impl Targets {
    /// A target at which the volume still appears. Blocks.
    pub(super) fn live(&mut self, places: &Places, record: &Record) -> Option<PathBuf> {
        let device = record.device.as_ref()?;
        let appears = |path: &PathBuf| match places.target(path) {
            Ok(place) => match place.kind() {
                Ok(PathKind::Mount(mounted)) => record.appears_at(device, &mounted),
                Ok(_) => false,
                // An unreadable target is not proven gone.
                Err(_) => true,
            },
            Err(error) => !matches!(absent_is_none(Err(error)), Ok(None)),
        };
        let (live, gone) = self.paths.drain(..).partition(appears);
        self.paths = live;
        self.gone.extend::<Vec<_>>(gone);
        self.paths.first().cloned()
    }
}

impl Volume {
    /// Where it is published.
    pub(super) fn targets(&self) -> Targets {
        let held = self.held();
        Targets {
            paths: (held.iter())
                .flat_map(|held| held.targets.keys().cloned())
                .collect(),
            published: self.published.load(Relaxed),
            gone: Vec::new(),
        }
    }

    /// Forgets targets that others have unmounted, unless the volume was published
    /// meanwhile: then a target may be back, and a later look decides.
    pub(super) fn forget_gone(&self, targets: &Targets) {
        let mut held = self.held();
        if let Some(held) = held.as_mut()
            && targets.published == self.published.load(Relaxed)
        {
            held.targets.retain(|path, _| !targets.gone.contains(path));
        }
    }

    /// Adds a target.
    pub(super) fn set_target(&self, path: &Path, target: Target) {
        let mut held = self.held();
        self.published.fetch_add(1, Relaxed);
        if let Some(held) = held.as_mut() {
            held.targets.insert(path.to_owned(), target);
        }
    }

    /// Removes a target.
    pub(super) fn drop_target(&self, path: &Path) {
        if let Some(held) = self.held().as_mut() {
            held.targets.remove(path);
        }
    }
}
