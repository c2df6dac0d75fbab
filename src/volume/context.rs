//! A call under way, as the steps of its verb see it.

use std::future::Future;

use tracing::Span;

use super::{
    Node,
    error::Cause,
    task::{Progress, Volume},
};
use crate::{
    admission::{Asked, Gate, Place as Admission},
    device::Source,
    hold_point,
    secret::Secrets,
};

/// A call under way on a volume of this node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Context<'a> {
    pub(super) node: &'a Node,
    pub(super) volume: &'a Volume,
    pub(super) progress: &'a Progress,
    pub(super) secrets: &'a Secrets,
}

impl Context<'_> {
    /// Runs one step: it is named while it runs and counted when it ends.
    pub(super) async fn step<T>(self, name: &'static str, work: impl Future<Output = T>) -> T {
        self.progress.step(name, work).await
    }

    /// Runs one step on the volume's lane.
    pub(super) async fn lane<T: Send + 'static>(
        self,
        step: &'static str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        let (span, id) = (Span::current(), self.volume.id.clone());
        let work = move || {
            hold_point(step, &id);
            span.in_scope(work)
        };
        // The job begins at once, and may report steps of its own: not before this one.
        let run = async { self.node.lanes.run(&self.volume.id, step, work).await };
        self.step(step, run).await
    }

    /// As [`Context::lane`], for a look at the volume's paths, once the gate admits it:
    /// of many calls at once, each would take a thread.
    pub(super) async fn look<T: Send + 'static>(
        self,
        source: &Source,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Cause> {
        let admission = self.admit(&self.node.config.gates.look, source).await?;
        let work = move || {
            let _admission = admission;
            work()
        };
        Ok(self.lane("look", work).await)
    }

    /// Waits for a place in a step, unless one is free.
    pub(super) async fn admit(self, gate: &Gate, source: &Source) -> Result<Admission, Cause> {
        let turn = match gate.ask(&source.domain()) {
            Ok(Asked::Admitted(place)) => return Ok(place),
            Ok(Asked::Waits(turn)) => turn,
            Err(full) => return Err(Cause::Overloaded(full)),
        };
        let waiting = async {
            self.progress.waits_for(gate.describe());
            turn.await
        };
        let place = self.step("queue", waiting).await;
        Ok(place.unwrap_or_else(|_| unreachable!("a gate forgets nobody")))
    }
}
