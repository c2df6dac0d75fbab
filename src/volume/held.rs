//! What this node holds: changes to it, and the listing for operators.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    rc::Rc,
    time::Duration,
};

use super::{
    Error, Node,
    context::Context,
    error::Cause,
    places::{Places, absent_is_none},
    record::{Held, Record, Records, Target},
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
    pub async fn list(self: Rc<Self>, deadline: Duration) -> Result<Vec<Listed>, Error> {
        self.taken_up("", deadline).await?;
        let mut volumes: Vec<Rc<Volume>> = self.volumes.borrow().values().cloned().collect();
        volumes.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(volumes.iter().map(|volume| self.listed(volume)).collect())
    }

    fn listed(&self, volume: &Volume) -> Listed {
        let held = volume.held.borrow();
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
            under_way: volume.under_way(self),
        }
    }

    /// How many volumes there are, in whatever state.
    pub(super) fn count(&self) -> usize {
        self.volumes.borrow().len()
    }
}

impl Volume {
    /// Replaces the volume's record and targets; the gauges follow.
    pub(super) fn hold(&self, held: Option<Held>) {
        let state = |held: &Option<Held>| held.as_ref().map(|h| h.record.state());
        let now = state(&held);
        let before = state(&self.held.replace(held));
        metrics::volume_state_changed(before, now);
    }

    /// A copy of the record, if there is one.
    pub(super) fn record(&self) -> Option<Record> {
        self.held.borrow().as_ref().map(|held| held.record.clone())
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

impl Context<'_> {
    /// Writes the volume's record down, then remembers it.
    pub(super) async fn remember(self, record: Record) -> Result<(), Cause> {
        let saved = if record.inline.is_some() {
            let record = record.clone();
            self.in_state_dir(move |records| records.save_inline(&record))
                .await
        } else {
            self.node.records.save(&record).await
        };
        saved.map_err(Cause::io("write the volume's record"))?;
        let targets = (self.volume.held.borrow().as_ref()).map(|held| held.targets.clone());
        self.volume.hold(Some(Held {
            record,
            targets: targets.unwrap_or_default(),
        }));
        Ok(())
    }

    /// Forgets the volume, on disk and here.
    pub(super) async fn forget(self, inline: bool) -> Result<(), Cause> {
        let id = self.volume.id.clone();
        let forgotten = if inline {
            self.in_state_dir(move |records| records.forget_inline(&id))
                .await
        } else {
            self.node.records.forget(&id).await
        };
        forgotten.map_err(Cause::io("remove the volume's record"))?;
        self.volume.hold(None);
        Ok(())
    }

    /// Changes an inline volume's record. The directory's disk may hang, and with it
    /// the volume's lane.
    async fn in_state_dir(
        self,
        change: impl FnOnce(&Records) -> io::Result<()> + Send + 'static,
    ) -> io::Result<()> {
        let gate = &self.node.config.gates.record;
        let admission = self.step("record", gate.enter("")).await;
        let admission = admission.map_err(io::Error::other)?;
        let records = self.node.records.clone();
        let change = move || {
            let _admission = admission;
            change(&records)
        };
        self.lane("record", change).await
    }

    /// A target at which the volume still appears.
    pub(super) async fn live_target(self) -> Option<PathBuf> {
        let record = self.volume.record()?;
        let mut targets = self.volume.targets();
        if targets.paths.is_empty() {
            return None;
        }
        let places = self.node.places.clone();
        let look = move || (targets.live(&places, &record), targets);
        let (live, targets) = self.lane("look", look).await;
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
    /// Without this target.
    #[must_use]
    pub(super) fn but(mut self, target: &Path) -> Self {
        self.paths.retain(|path| path != target);
        self
    }

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
        let held = self.held.borrow();
        Targets {
            paths: (held.iter())
                .flat_map(|held| held.targets.keys().cloned())
                .collect(),
            published: self.published.get(),
            gone: Vec::new(),
        }
    }

    /// Forgets targets that others have unmounted, unless the volume was published
    /// meanwhile: then a target may be back, and a later look decides.
    pub(super) fn forget_gone(&self, targets: &Targets) {
        if targets.published == self.published.get() {
            targets.gone.iter().for_each(|path| self.drop_target(path));
        }
    }

    /// Adds a target.
    pub(super) fn set_target(&self, path: &Path, target: Target) {
        self.published.update(|times| times + 1);
        if let Some(held) = self.held.borrow_mut().as_mut() {
            held.targets.insert(path.to_owned(), target);
        }
    }

    /// Removes a target.
    pub(super) fn drop_target(&self, path: &Path) {
        if let Some(held) = self.held.borrow_mut().as_mut() {
            held.targets.remove(path);
        }
    }
}
