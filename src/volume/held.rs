//! What this node holds: changes to it, and the listing for operators.

use std::{collections::BTreeMap, path::PathBuf, rc::Rc, time::Duration};

use super::{
    Error, Node,
    record::{Held, Record, Target},
    spec::Use,
    task::{UnderWay, Volume},
};
use crate::{device::Device, fs::FsType, observe::metrics};

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
    pub fn count(&self) -> usize {
        self.volumes.borrow().len()
    }
}

impl Volume {
    /// Replaces what is known of the volume; the gauges follow.
    pub fn hold(&self, held: Option<Held>) {
        let state = |held: &Option<Held>| held.as_ref().map(|h| h.record.state());
        let now = state(&held);
        let before = state(&self.held.replace(held));
        metrics::volume_moved(before, now);
    }

    /// A copy of the record, if there is one.
    pub fn record(&self) -> Option<Record> {
        self.held.borrow().as_ref().map(|held| held.record.clone())
    }

    /// The record and the device of a volume that has one.
    pub fn device_of(&self, record: &Record) -> Result<Device, Error> {
        record.device.clone().ok_or_else(|| {
            self.precondition("it has no device yet: its staging did not finish; stage it again")
        })
    }
}

impl Node {
    /// Writes the volume's record down, then remembers it.
    pub async fn remember(&self, volume: &Volume, record: Record) -> Result<(), Error> {
        self.records
            .save(&record)
            .await
            .map_err(volume.io("write the volume's record"))?;
        let targets = volume.held.borrow().as_ref().map(|h| h.targets.clone());
        volume.hold(Some(Held {
            record,
            targets: targets.unwrap_or_default(),
        }));
        Ok(())
    }

    /// Forgets the volume, on disk and here.
    pub async fn forget(&self, volume: &Volume, inline: bool) -> Result<(), Error> {
        self.records
            .forget(&volume.id, inline)
            .await
            .map_err(volume.io("remove the volume's record"))?;
        volume.hold(None);
        Ok(())
    }
}
