//! The step that a call is in, for errors, listings, metrics and logs.

use std::{
    fmt,
    future::Future,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tracing::{Instrument as _, Span};

use crate::{
    crash_point,
    device::Source,
    hold_point,
    lane::{self, Lanes},
    observe::{logs, metrics, traces},
};

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

/// What a step results in: by default no failure.
pub trait StepResult {
    /// Whether the step failed.
    fn is_failure(&self) -> bool {
        false
    }
}

impl StepResult for () {}
impl StepResult for bool {}
impl StepResult for Source {}
impl<T> StepResult for Option<T> {}
impl<T> StepResult for Vec<T> {}

impl<T, E> StepResult for Result<T, E> {
    fn is_failure(&self) -> bool {
        self.is_err()
    }
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
    pub async fn wait<T: StepResult>(
        &self,
        name: &'static str,
        event: impl Future<Output = T>,
    ) -> T {
        let (begun, _) = self.begin(name);
        let span = logs::step_span(name);
        let out = event.instrument(span.clone()).await;
        self.end(name, begun, out.is_failure(), &span);
        out
    }

    /// Runs one step on the volume's lane, maybe within another one, which goes on
    /// afterwards.
    pub fn step<T: StepResult>(&self, name: &'static str, work: impl FnOnce() -> T) -> T {
        let (begun, outer) = self.begin(name);
        lane::enter_step(name);
        let span = logs::step_span(name);
        let out = span.in_scope(|| {
            hold_point(name, &self.volume);
            work()
        });
        self.end(name, begun, out.is_failure(), &span);
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

    fn end(&self, name: &'static str, begun: Instant, failed: bool, span: &Span) {
        crash_point();
        let took = begun.elapsed();
        let mut now = self.now();
        now.waits_for.clear();
        let backend = now.backend;
        drop(now);
        metrics::step(name, backend, took, failed);
        traces::step_ended(span, backend, failed);
        tracing::debug!(
            volume_id = self.volume,
            call = self.call,
            step = name,
            failed,
            micros = logs::micros(took),
            "step"
        );
    }

    /// The step as it is now; of a thread that is stuck in it, its number.
    pub fn under_way(&self, lanes: &Lanes) -> UnderWay {
        let now = self.now();
        let mut waits_for = now.waits_for.clone();
        if waits_for.is_empty()
            && let Some(busy) = lanes.busy().into_iter().find(|b| b.volume == self.volume)
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
