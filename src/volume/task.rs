//! One task for each volume.
//!
//! The first call that changes a volume becomes its task. An equal call that
//! arrives meanwhile joins it and gets the same answer; a different one is refused
//! with the call under way. Only calls on a single target run beside it, each as a task of
//! its own ([`Call::may_begin_beside`]): a pod that ends waits for no fsck.
//!
//! A caller's deadline ends its waiting, never the work: the task goes on to its
//! end, takes the late result, and starts nothing else before. So threads that are
//! stuck in the kernel never outnumber stuck volumes, and no volume waits for
//! another.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{self, Poll, Waker},
    time::{Duration, Instant},
};

use futures_util::FutureExt as _;
use tokio::sync::oneshot;
use tracing::Instrument as _;

use super::{
    Node, claims,
    context::Context,
    error::Cause,
    expand, format,
    held::{Answer, Outcome, Running, Volume},
    inline,
    progress::Progress,
    publish, reclaim, remount, rotate_key,
    spec::{Call, Request},
    stage, unpublish, unstage,
};
use crate::{Kind, error_chain, ring};

/// Runs a call on its volume, or joins the equal one that runs already; waits
/// for the answer until `deadline`. A caller that joined a call whose secrets were
/// refused, and passed others, gets an attempt of its own.
pub async fn submit(
    node: &Arc<Node>,
    volume_id: &str,
    request: Request,
    deadline: Duration,
) -> Answer {
    let request = Arc::new(request);
    let failed = |cause: Cause| Arc::new(cause.of(volume_id));
    let begun = Instant::now();
    loop {
        let volume = node.volume(volume_id);
        let running = match volume.in_the_way(&request.call) {
            Some(running) if running.request.call == request.call => running,
            Some(running) => {
                let left = deadline.saturating_sub(begun.elapsed());
                if running.ends_within(left).await {
                    continue;
                }
                return Err(failed(Cause::Pending(
                    running.progress.under_way(&node.lanes),
                )));
            }
            None => match start(node, &volume, Arc::clone(&request)) {
                VolumeTask::Finished(answer) => return answer,
                VolumeTask::Runs(running) => running,
            },
        };
        let left = deadline.saturating_sub(begun.elapsed());
        return match tokio::time::timeout(left, running.answer).await {
            Ok(Ok(Err(error)))
                if error.kind() == Kind::Unauthenticated
                    && running.request.secrets.differ(&request.secrets) =>
            {
                continue;
            }
            Ok(Ok(answer)) => answer,
            // The task ended without an answer: it panicked. The record
            // says what it did, and the next call takes that up.
            Ok(Err(_)) => Err(failed(Cause::Io {
                what: format!("finish {}", request.call.name()),
                source: std::io::Error::other("the volume's task panicked"),
            })),
            Err(_) => Err(failed(Cause::Deadline(
                running.progress.under_way(&node.lanes),
            ))),
        };
    }
}

enum VolumeTask {
    Finished(Answer),
    Runs(Running),
}

/// Begins a call. A call that needs no lane, such as one that the volume's record
/// refuses, ends at once.
fn start(node: &Arc<Node>, volume: &Arc<Volume>, request: Arc<Request>) -> VolumeTask {
    let progress = Progress::new(&volume.id, request.call.name());
    let (send, receive) = oneshot::channel();
    let running = Running {
        request: request.clone(),
        begun: Instant::now(),
        progress: progress.clone(),
        answer: receive.shared(),
    };
    volume.running().push(running.clone());
    let ended = Ended {
        node: node.clone(),
        volume: volume.clone(),
        request: request.clone(),
    };
    let mut work: Pin<Box<dyn Future<Output = Answer>>> = Box::pin(async move {
        let Ended { node, volume, .. } = &ended;
        let cx = Context {
            node,
            volume,
            progress: &progress,
            secrets: &request.secrets,
        };
        let ran = run(cx, &request.call).await;
        ran.map_err(|cause| Arc::new(cause.of(&volume.id)))
    });
    if let Poll::Ready(answer) = work
        .as_mut()
        .poll(&mut task::Context::from_waker(Waker::noop()))
    {
        return VolumeTask::Finished(answer);
    }
    let (id, name) = (volume.id.clone(), running.request.call.name());
    let task = async move {
        let answer = work.await;
        // All callers may have gone: then no answer tells why.
        if let Err(Err(error)) = send.send(answer) {
            let error = error_chain(&*error);
            tracing::warn!(
                volume_id = id,
                call = name,
                error,
                "the call failed after its deadline"
            );
        }
    };
    ring::spawn(task.in_current_span());
    VolumeTask::Runs(running)
}

/// Runs one call to its end; a volume has one at a time.
async fn run(cx: Context<'_>, call: &Call) -> Result<Outcome, Cause> {
    let occupy = |path| cx.node.occupied.occupy(path, &cx.volume.id);
    let _path = call.mount_path().map(occupy).transpose()?;
    match call {
        Call::Stage(spec) => stage::stage(cx, spec).await,
        Call::Unstage(path) => unstage::unstage(cx, path).await,
        Call::ReleaseClaim(source) => claims::release_claim(cx, source).await,
        Call::Publish(spec) => publish::publish(cx, spec).await,
        Call::Inline(spec) => inline::publish(cx, spec).await,
        Call::Unpublish(path) => unpublish::unpublish(cx, path).await,
        Call::DeleteOrphan(target) => inline::delete_orphan(cx, target).await,
        Call::Expand(spec) => expand::expand(cx, spec).await,
        Call::Reclaim(spec) => reclaim::reclaim(cx, spec).await,
        Call::Remount(spec) => remount::remount(cx, spec).await,
        Call::RotateKey(path) => rotate_key::rotate_key(cx, path).await,
        Call::Format(spec) => format::format(cx, spec).await,
    }
}

/// Clears a task of the volume when it ends, even by panic.
struct Ended {
    node: Arc<Node>,
    volume: Arc<Volume>,
    request: Arc<Request>,
}

impl Drop for Ended {
    fn drop(&mut self) {
        let request = &self.request;
        (self.volume.running()).retain(|one| !Arc::ptr_eq(&one.request, request));
        self.node.forget_if_empty(&self.volume.id);
    }
}
