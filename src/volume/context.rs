//! A call under way, as the steps of its verb see it.
//!
//! A verb begins on the runtime thread with what needs no disk, such as a look at the
//! volume's record. The rest is one function on the volume's lane, from its first to its
//! last step ([`Context::on_lane`]): its steps block, and it has no thread while it waits
//! for a permit for a step, an event or a child. Only [`OnLane`] has steps.

use std::{
    future::Future,
    io,
    ops::Deref,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use futures_util::future::BoxFuture;
use tracing::Instrument as _;

use super::{
    Node,
    error::Cause,
    held::Volume,
    progress::{Progress, StepResult},
    record::{Phase, Record, RecordFile},
};
use crate::{
    admission::{Entry, Gate, Permit},
    device::Source,
    secret::Secrets,
};

/// A call under way on a volume of this node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Context<'a> {
    pub(super) node: &'a Arc<Node>,
    pub(super) volume: &'a Arc<Volume>,
    pub(super) progress: &'a Progress,
    pub(super) secrets: &'a Secrets,
}

/// A call under way, on its volume's lane.
#[derive(Clone, Copy, Debug)]
pub(super) struct OnLane<'a> {
    cx: Context<'a>,
    /// The record's, while this call changes it.
    file: &'a Mutex<RecordFile>,
}

impl Context<'_> {
    /// The record of the volume, which must be staged.
    pub(super) fn staged(self) -> Result<Record, Cause> {
        let record = self.volume.record();
        let record = record
            .filter(|record| record.phase == Phase::Staged)
            .ok_or_else(|| Cause::NotFound("it is not staged on this node".to_owned()))?;
        self.progress.backend(record.source.backend());
        Ok(record)
    }

    /// Fails unless the volume is staged or published at the path; an empty one says nothing.
    pub(super) fn expect_at(self, path: &Path) -> Result<(), Cause> {
        if path.as_os_str().is_empty() || self.volume.is_at(path) {
            return Ok(());
        }
        let at = path.display();
        Err(Cause::NotFound(format!("it is not at {at} on this node")))
    }

    /// Runs the blocking part of a verb on the volume's lane.
    pub(super) async fn on_lane<T, F>(self, work: F) -> T
    where
        T: Send + 'static,
        F: for<'b> FnOnce(OnLane<'b>) -> BoxFuture<'b, T> + Send + 'static,
    {
        let (node, volume) = (Arc::clone(self.node), Arc::clone(self.volume));
        let (progress, secrets) = (self.progress.clone(), self.secrets.clone());
        let work = async move {
            let cx = Context {
                node: &node,
                volume: &volume,
                progress: &progress,
                secrets: &secrets,
            };
            let file = Mutex::default();
            work(OnLane { cx, file: &file }).await
        };
        let id = &self.volume.id;
        self.node.lanes.drive(id, work.in_current_span()).await
    }

    /// As [`Context::on_lane`], where nothing is waited for.
    pub(super) async fn run_on_lane<T: Send + 'static>(
        self,
        work: impl for<'b> FnOnce(OnLane<'b>) -> T + Send + 'static,
    ) -> T {
        self.on_lane(|cx| Box::pin(async move { work(cx) })).await
    }

    /// Waits for a permit to look at the volume: of many calls at once, each would take a
    /// thread.
    pub(super) async fn admit_look(self, source: &Source) -> Result<Permit, Cause> {
        self.admit(&self.node.config.gates.look, source).await
    }

    /// Waits for `event` in a step of its own.
    pub(super) async fn wait<T: StepResult>(
        self,
        step: &'static str,
        event: impl Future<Output = T>,
    ) -> T {
        self.progress.wait(step, event).await
    }

    /// Waits for a permit for a step, unless one is free.
    pub(super) async fn admit(self, gate: &Gate, source: &Source) -> Result<Permit, Cause> {
        self.admit_as(gate, &source.domain()).await
    }

    /// The same as one of a failure domain.
    pub(super) async fn admit_as(self, gate: &Gate, domain: &str) -> Result<Permit, Cause> {
        let turn = match gate.ask(domain) {
            Ok(Entry::Admitted(permit)) => return Ok(permit),
            Ok(Entry::Waits(turn)) => turn,
            Err(full) => return Err(Cause::Overloaded(full)),
        };
        let waiting = async {
            self.progress.waits_for(gate.describe());
            turn.await
        };
        let place = self.wait("queue", waiting).await;
        Ok(place.unwrap_or_else(|_| unreachable!("a gate forgets nobody")))
    }
}

impl<'a> Deref for OnLane<'a> {
    type Target = Context<'a>;

    fn deref(&self) -> &Context<'a> {
        &self.cx
    }
}

impl OnLane<'_> {
    /// Runs one step, which may block: it is named while it runs and counted when it ends.
    pub(super) fn step<T: StepResult>(self, name: &'static str, work: impl FnOnce() -> T) -> T {
        self.node.heartbeat.wait();
        self.progress.step(name, work)
    }
}

impl OnLane<'_> {
    /// Writes the volume's record, then holds it in memory.
    pub(super) async fn remember(self, record: &Record) -> Result<(), Cause> {
        let save = || self.node.records.save(record, &mut self.file());
        self.change_record(record, save)
            .await
            .map_err(Cause::io("write the volume's record"))?;
        self.volume.hold_record(record.clone());
        Ok(())
    }

    /// Forgets the volume, on disk and here.
    pub(super) async fn forget(self, record: &Record) -> Result<(), Cause> {
        let forget = || {
            *self.file() = RecordFile::default();
            self.node.records.forget(record)
        };
        self.change_record(record, forget)
            .await
            .map_err(Cause::io("remove the volume's record"))?;
        self.volume.hold(None);
        Ok(())
    }

    fn file(&self) -> MutexGuard<'_, RecordFile> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the volume's record. That of an inline volume's image is on a disk, which may
    /// hang, and with it the lane.
    async fn change_record(
        self,
        record: &Record,
        change: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        if !record.outlives_reboot() {
            self.node.heartbeat.wait();
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
        self.volume.forget_unmounted(&targets);
        live
    }
}
