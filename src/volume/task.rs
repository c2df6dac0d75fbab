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
    fmt,
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicU64},
    task::{self, Poll, Waker},
    time::{Duration, Instant},
};

use futures_util::{FutureExt as _, future::Shared};
use tokio::sync::oneshot;
use tracing::Instrument as _;

use super::{
    Error, Node,
    context::Context,
    error::Cause,
    record::Held,
    spec::{Call, Request},
    stats::Asked,
};
use crate::{Kind, crash_point, hold_point, lane, observe::metrics, ring};

/// What a successful call reports back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing but success.
    Done,
    /// The volume's size in bytes.
    Size(u64),
    /// The previous content of a device that an operator had formatted.
    Was(String),
}

/// A call's answer, shared by all who joined it.
pub type Answer = Result<Outcome, Arc<Error>>;

/// A volume that this node holds or works on.
#[derive(Debug)]
pub struct Volume {
    /// The handle.
    pub id: String,
    /// Its record and targets, while this node holds it.
    held: Mutex<Option<Held>>,
    /// How often it was published; read and changed under the lock of `held`.
    pub published: AtomicU64,
    /// Questions to its file system.
    pub asked: Asked,
    /// In the order in which they began: first the volume's task, then calls beside it.
    running: Mutex<Vec<Running>>,
}

#[derive(Clone)]
struct Running {
    request: Arc<Request>,
    begun: Instant,
    progress: Progress,
    answer: Shared<oneshot::Receiver<Answer>>,
}

/// How long a call waits for a conflicting brief one ([`Call::is_brief`]) before it is
/// refused.
const BRIEF: Duration = Duration::from_secs(1);

impl Running {
    /// Whether it is a brief call and ends in time: kubelet repeats a refused call after
    /// half a second, much longer than a brief call takes.
    async fn ends_within(&self, left: Duration) -> bool {
        let left = left.min(BRIEF.saturating_sub(self.begun.elapsed()));
        self.request.call.is_brief()
            && ring::timer::timeout(left, self.answer.clone())
                .await
                .is_ok()
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running")
            .field("call", &self.request.call)
            .field("progress", &self.progress)
            .finish_non_exhaustive()
    }
}

/// The step that a call is in. Clones share it: the runtime thread and the volume's lane
/// report their steps.
#[derive(Clone, Debug)]
pub struct Progress {
    volume: String,
    call: &'static str,
    now: Arc<Mutex<Now>>,
}

#[derive(Debug)]
struct Now {
    backend: &'static str,
    step: &'static str,
    since: Instant,
    waits_for: String,
}

/// A snapshot of [`Progress`], for errors and listings.
#[derive(Clone, Debug)]
pub struct UnderWay {
    /// The RPC's name.
    pub call: &'static str,
    /// The step's name.
    pub step: &'static str,
    /// How long the step has taken.
    pub age: Duration,
    /// A process or device, where known.
    pub waits_for: String,
}

impl fmt::Display for UnderWay {
    /// Without the call: the step, its age, and what it waits for.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "in step {} for {:.1} s",
            self.step,
            self.age.as_secs_f64()
        )?;
        if !self.waits_for.is_empty() {
            write!(f, ", waiting for {}", self.waits_for)?;
        }
        Ok(())
    }
}

impl Progress {
    /// Before the first step.
    pub fn new(volume: &str, call: &'static str) -> Self {
        Self {
            volume: volume.to_owned(),
            call,
            now: Arc::new(Mutex::new(Now {
                backend: "none",
                step: "begin",
                since: Instant::now(),
                waits_for: String::new(),
            })),
        }
    }

    /// Nothing can panic under this lock.
    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Steps from here on are counted for this backend.
    pub fn backend(&self, name: &'static str) {
        self.now().backend = name;
    }

    /// What the step under way waits for, as an operator would look for it.
    pub fn waits_for(&self, what: String) {
        self.now().waits_for = what;
    }

    /// Waits in a step of its own: it is named meanwhile, and counted when it ends.
    pub async fn wait<T>(&self, name: &'static str, event: impl Future<Output = T>) -> T {
        let (begun, _) = self.begin(name);
        let out = event.await;
        self.end(name, begun);
        out
    }

    /// Runs one step on the volume's lane, maybe within another one, which goes on
    /// afterwards.
    pub fn step<T>(&self, name: &'static str, work: impl FnOnce() -> T) -> T {
        let (begun, outer) = self.begin(name);
        lane::enter_step(name);
        hold_point(name, &self.volume);
        let out = work();
        self.end(name, begun);
        let mut now = self.now();
        (now.step, now.since) = outer;
        out
    }

    /// When the step began, and the step before it with its beginning.
    fn begin(&self, name: &'static str) -> (Instant, (&'static str, Instant)) {
        let begun = Instant::now();
        let mut now = self.now();
        let before = (now.step, now.since);
        (now.step, now.since) = (name, begun);
        drop(now);
        crash_point();
        (begun, before)
    }

    fn end(&self, name: &'static str, begun: Instant) {
        crash_point();
        let took = begun.elapsed();
        let mut now = self.now();
        now.waits_for.clear();
        let backend = now.backend;
        drop(now);
        metrics::step(name, backend, took);
        tracing::debug!(
            volume_id = self.volume,
            call = self.call,
            step = name,
            micros = took.as_micros(),
            "step"
        );
    }

    fn under_way(&self, node: &Node) -> UnderWay {
        let now = self.now();
        let mut waits_for = now.waits_for.clone();
        if waits_for.is_empty()
            && let Some(busy) = node
                .lanes
                .busy()
                .into_iter()
                .find(|b| b.volume == self.volume)
        {
            waits_for = format!("thread {} of this agent", busy.tid);
        }
        UnderWay {
            call: self.call,
            step: now.step,
            age: now.since.elapsed(),
            waits_for,
        }
    }
}

impl Volume {
    /// A volume without a record.
    pub fn new(id: &str) -> Self {
        Self {
            id: id.to_owned(),
            held: Mutex::default(),
            published: AtomicU64::default(),
            asked: Asked::default(),
            running: Mutex::default(),
        }
    }

    /// Its record and targets, while this node holds it. Nothing can panic under this
    /// lock.
    pub fn held(&self) -> MutexGuard<'_, Option<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running(&self) -> MutexGuard<'_, Vec<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The call under way, if any.
    pub fn under_way(&self, node: &Node) -> Option<UnderWay> {
        let progress = (self.running().first()).map(|first| first.progress.clone());
        progress.map(|progress| progress.under_way(node))
    }

    /// Nothing is held, and nothing runs: the entry can go.
    pub fn is_idle_and_empty(&self) -> bool {
        self.running().is_empty() && self.held().is_none()
    }

    /// The equal call under way, or else one that this call must not run beside.
    fn in_the_way(&self, call: &Call) -> Option<Running> {
        let is_inline = (self.held().as_ref()).is_some_and(|held| held.record.inline.is_some());
        let running = self.running();
        let conflicts = |other: &&Running| is_inline || !call.may_begin_beside(&other.request.call);
        let equal = running.iter().find(|other| other.request.call == *call);
        equal.or_else(|| running.iter().find(conflicts)).cloned()
    }
}

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
                return Err(failed(Cause::Pending(running.progress.under_way(node))));
            }
            None => match start(node, &volume, Arc::clone(&request)) {
                Started::Finished(answer) => return answer,
                Started::Runs(running) => running,
            },
        };
        let left = deadline.saturating_sub(begun.elapsed());
        return match ring::timer::timeout(left, running.answer).await {
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
            Err(_) => Err(failed(Cause::Deadline(running.progress.under_way(node)))),
        };
    }
}

enum Started {
    Finished(Answer),
    Runs(Running),
}

/// Begins a call. A call that needs no lane, such as one that the volume's record
/// refuses, ends at once.
fn start(node: &Arc<Node>, volume: &Arc<Volume>, request: Arc<Request>) -> Started {
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
        let ran = super::run(cx, &request.call).await;
        ran.map_err(|cause| Arc::new(cause.of(&volume.id)))
    });
    if let Poll::Ready(answer) = work
        .as_mut()
        .poll(&mut task::Context::from_waker(Waker::noop()))
    {
        return Started::Finished(answer);
    }
    let task = async move {
        let answer = work.await;
        // All callers may have gone.
        let _ = send.send(answer);
    };
    ring::spawn(task.in_current_span());
    Started::Runs(running)
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
