//! A caller: cycles of calls on its own volumes, with kubelet's habits.
//!
//! Kubelet makes a connection for each call, and asks for the driver's capabilities, on a
//! connection of its own, before each call that is optional for a driver. (It makes
//! NodeUnpublishVolume without asking.)

use std::{
    cell::Cell,
    path::Path,
    pin::Pin,
    rc::Rc,
    time::{Duration, Instant},
};

use tonic::{Code, Request, Status, transport::Channel};

use super::{
    samples::{Call, Samples},
    volumes::BenchVolume,
};
use crate::{
    endpoint::Endpoint,
    proto::csi::{
        NodeGetCapabilitiesRequest, NodeGetVolumeStatsRequest, NodePublishVolumeRequest,
        NodeStageVolumeRequest, NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest,
        node_client::NodeClient,
    },
};

/// Kubelet's first pause before it repeats a call.
const PAUSE: Duration = Duration::from_millis(500);

/// After so many failed cycles, one after another, a caller ends.
const MAX_FAILURES: u32 = 3;

/// What all callers have in common.
pub struct Load {
    pub endpoint: Endpoint,
    /// Each call's.
    pub timeout: Duration,
    pub keeps_connection: bool,
    /// Whether the driver has NodeStageVolume and NodeUnstageVolume.
    pub stages: bool,
    /// Whether it has NodeGetVolumeStats.
    pub has_stats: bool,
    /// The cycles of each caller.
    pub cycles: u32,
    /// No cycle begins later than that after the first.
    pub duration: Option<Duration>,
    /// Set by the first signal.
    pub is_interrupted: Rc<Cell<bool>>,
}

/// One caller.
pub struct Caller<'a> {
    load: &'a Load,
    kept: Option<Channel>,
    pub samples: Samples,
    pub failed_cycles: u64,
}

/// A call: boxed, or each would have code of its own for all that is around it.
type Work = Pin<Box<dyn Future<Output = Result<(), Status>>>>;

/// How far the first half of a cycle came.
enum Up {
    Whole,
    Interrupted,
}

impl<'a> Caller<'a> {
    pub fn new(load: &'a Load) -> Self {
        Self {
            load,
            kept: load.keeps_connection.then(|| load.endpoint.channel()),
            samples: Samples::default(),
            failed_cycles: 0,
        }
    }

    /// Makes its cycles, each on the next of `volumes`. Afterwards the volumes say what
    /// may be left of them on the node.
    pub async fn run(&mut self, volumes: &mut [BenchVolume]) {
        let load = self.load;
        let until = load.duration.map(|duration| Instant::now() + duration);
        let mut failures = 0;
        let count = volumes.len();
        for number in 0..load.cycles as usize {
            let is_over = until.is_some_and(|until| Instant::now() >= until);
            if is_over || load.is_interrupted.get() {
                return;
            }
            let volume = &mut volumes[number % count];
            let begun = Instant::now();
            let up = self.up(volume).await;
            let first_try = self.down_once(volume).await;
            match (&up, &first_try) {
                (Ok(Up::Whole), Ok(())) => {
                    self.samples.succeeded(Call::Cycle, begun.elapsed());
                    failures = 0;
                    continue;
                }
                (Ok(Up::Interrupted), Ok(())) => return,
                _ => {}
            }
            self.failed_cycles += 1;
            failures += 1;
            if first_try.is_err() && self.down(volume).await.is_err() || failures == MAX_FAILURES {
                return;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Stages and publishes the volume, and asks for its statistics.
    async fn up(&mut self, volume: &mut BenchVolume) -> Result<Up, Status> {
        volume
            .paths
            .make()
            .map_err(|error| Status::internal(format!("cannot make the directories: {error}")))
            .inspect_err(|status| self.samples.failed(Call::NodeStageVolume, status))?;
        if self.load.stages {
            self.ask_capabilities().await?;
            self.stage(volume).await?;
            if self.load.is_interrupted.get() {
                return Ok(Up::Interrupted);
            }
        }
        self.ask_capabilities().await?;
        self.publish(volume).await?;
        if self.load.is_interrupted.get() {
            return Ok(Up::Interrupted);
        }
        if self.load.has_stats {
            self.ask_capabilities().await?;
            self.ask_stats(volume).await?;
        }
        Ok(Up::Whole)
    }

    /// Unpublishes and unstages the volume, so far as it may be either, and repeats what is
    /// answered with a code that kubelet repeats.
    pub async fn down(&mut self, volume: &mut BenchVolume) -> Result<(), Status> {
        let until = Instant::now() + self.load.timeout;
        let mut pause = PAUSE;
        loop {
            match self.down_once(volume).await {
                Err(status) if is_uncertain(&status) && Instant::now() + pause < until => {
                    tokio::time::sleep(pause).await;
                    pause *= 2;
                }
                done => return done,
            }
        }
    }

    async fn down_once(&mut self, volume: &mut BenchVolume) -> Result<(), Status> {
        if volume.may_be.published {
            let message = NodeUnpublishVolumeRequest {
                volume_id: volume.handle.clone(),
                target_path: text(&volume.paths.target),
            };
            let (mut node, request) = (self.client(), self.request(message));
            let work = Box::pin(async move { node.node_unpublish_volume(request).await.map(drop) });
            self.call(Call::NodeUnpublishVolume, work).await?;
            volume.may_be.published = false;
        }
        if volume.may_be.staged {
            self.ask_capabilities().await?;
            let message = NodeUnstageVolumeRequest {
                volume_id: volume.handle.clone(),
                staging_target_path: text(&volume.paths.staging),
            };
            let (mut node, request) = (self.client(), self.request(message));
            let work = Box::pin(async move { node.node_unstage_volume(request).await.map(drop) });
            self.call(Call::NodeUnstageVolume, work).await?;
            volume.may_be.staged = false;
        }
        Ok(())
    }

    async fn ask_capabilities(&mut self) -> Result<(), Status> {
        let message = NodeGetCapabilitiesRequest {};
        let (mut node, request) = (self.client(), self.request(message));
        let work = Box::pin(async move { node.node_get_capabilities(request).await.map(drop) });
        self.call(Call::NodeGetCapabilities, work).await
    }

    async fn stage(&mut self, volume: &mut BenchVolume) -> Result<(), Status> {
        let message = NodeStageVolumeRequest {
            volume_id: volume.handle.clone(),
            publish_context: volume.publish_context.clone(),
            staging_target_path: text(&volume.paths.staging),
            volume_capability: Some(volume.capability.clone()),
            secrets: volume.secrets.to_wire(),
            volume_context: volume.volume_context.clone(),
        };
        let (mut node, request) = (self.client(), self.request(message));
        let work = Box::pin(async move { node.node_stage_volume(request).await.map(drop) });
        volume.may_be.staged = true;
        let staged = self.call(Call::NodeStageVolume, work).await;
        match &staged {
            Ok(()) => volume.was_staged = true,
            // After a final code nothing is staged, and kubelet does not unstage either:
            // the volume may be another's, whom an unstage could harm.
            Err(status) if !is_uncertain(status) && !volume.was_staged => {
                volume.may_be.staged = volume.paths.is_staging_mounted();
            }
            Err(_) => {}
        }
        staged
    }

    async fn publish(&mut self, volume: &mut BenchVolume) -> Result<(), Status> {
        let staging = self.load.stages.then(|| text(&volume.paths.staging));
        let message = NodePublishVolumeRequest {
            volume_id: volume.handle.clone(),
            publish_context: volume.publish_context.clone(),
            staging_target_path: staging.unwrap_or_default(),
            target_path: text(&volume.paths.target),
            volume_capability: Some(volume.capability.clone()),
            readonly: false,
            secrets: volume.secrets.to_wire(),
            volume_context: volume.volume_context.clone(),
        };
        let (mut node, request) = (self.client(), self.request(message));
        let work = Box::pin(async move { node.node_publish_volume(request).await.map(drop) });
        volume.may_be.published = true;
        self.call(Call::NodePublishVolume, work).await
    }

    async fn ask_stats(&mut self, volume: &BenchVolume) -> Result<(), Status> {
        let staging = self.load.stages.then(|| text(&volume.paths.staging));
        let message = NodeGetVolumeStatsRequest {
            volume_id: volume.handle.clone(),
            volume_path: text(&volume.paths.target),
            staging_target_path: staging.unwrap_or_default(),
        };
        let (mut node, request) = (self.client(), self.request(message));
        let work = Box::pin(async move { node.node_get_volume_stats(request).await.map(drop) });
        self.call(Call::NodeGetVolumeStats, work).await
    }

    /// A client on a connection of its own, unless the caller keeps one.
    fn client(&self) -> NodeClient<Channel> {
        let channel = self.kept.clone();
        NodeClient::new(channel.unwrap_or_else(|| self.load.endpoint.channel()))
    }

    fn request<Q>(&self, message: Q) -> Request<Q> {
        let mut request = Request::new(message);
        request.set_timeout(self.load.timeout);
        request
    }

    /// Makes one call and takes its time, with that of the connection, which is made when
    /// `work` is first polled.
    async fn call(&mut self, call: Call, work: Work) -> Result<(), Status> {
        // The second is for an answer that says what the driver waited for.
        let timeout = self.load.timeout + Duration::from_secs(1);
        let begun = Instant::now();
        let answer = tokio::time::timeout(timeout, work).await;
        let took = begun.elapsed();
        match answer.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer"))) {
            Ok(()) => {
                self.samples.succeeded(call, took);
                Ok(())
            }
            Err(status) => {
                self.samples.failed(call, &status);
                Err(status)
            }
        }
    }
}

/// Whether kubelet takes the code for one after which the work may have been done.
fn is_uncertain(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::Cancelled
            | Code::DeadlineExceeded
            | Code::Unavailable
            | Code::ResourceExhausted
            | Code::Aborted
    )
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
