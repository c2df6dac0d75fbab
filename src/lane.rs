//! Threads for calls that can hang.
//!
//! A read of a dead device, a mount, the last umount: such a call can sleep in
//! the kernel for minutes, or for ever, and nothing can end it. So it runs on a thread of
//! its own, a *lane*, and blocks only that thread. The caller awaits the result on its own
//! runtime; a deadline around that future ends the waiting, never the work, which continues
//! and is listed by [`Lanes::busy`] until the kernel returns from the call.
//!
//! A job is a closure ([`Lanes::run`]) or a future ([`Lanes::drive`]). A future is polled
//! on a lane, so the calls between its awaits may block; while it awaits, it has no
//! thread.
//!
//! There is no pool of a fixed size: as many dead devices would stop the agent. A job gets
//! an idle thread or a new one, and the caller ensures that a volume has one job at a time,
//! so stuck threads never outnumber stuck volumes. An idle thread ends after [`IDLE`].

use std::{
    any::Any,
    cell::RefCell,
    collections::{BTreeMap, HashMap, VecDeque},
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::{self, Thread},
    time::{Duration, Instant},
};

use async_task::Runnable;
use futures_util::FutureExt as _;
use tokio::sync::oneshot;
use tracing::{Instrument as _, Span};

mod inspections;

pub use inspections::{Inspection, Inspections};

/// How long a thread waits for another job before it ends.
const IDLE: Duration = Duration::from_secs(10);

/// Bytes of a thread's stack, of which only the used pages take memory. Ceph's libraries
/// use some hundred KiB of their caller's stack.
pub const STACK: usize = 2 << 20;

/// A job's closure, which sends its result itself and does not unwind into the lane.
type Work = Box<dyn FnOnce() + Send>;

/// A source of threads for blocking calls. Clones share the threads.
#[derive(Clone, Debug)]
pub struct Lanes {
    shared: Arc<LanesInner>,
}

/// A job that is running, or stuck.
#[derive(Clone, Debug)]
pub struct Busy {
    /// The volume for which it runs.
    pub volume: String,
    /// When the step began.
    pub since: Instant,
    /// The thread's kernel id: `/proc/PID/task/TID/stack` shows where it sleeps.
    pub tid: i32,
    /// The step that it is in.
    pub step: &'static str,
    /// What the job waits for, by [`waiting_for`]; empty if it has not reported it.
    pub waits_for: String,
}

struct Job {
    volume: String,
    step: &'static str,
    work: Work,
}

#[derive(Debug)]
struct LanesInner {
    max_idle: usize,
    idle_for: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    /// Live threads, idle or not.
    threads: usize,
    /// Idle threads, the last to become idle at the end: it is reused first, so that the
    /// others reach [`IDLE`] after a burst.
    idle: Vec<(u64, Thread)>,
    /// Jobs of threads that were idle.
    given: HashMap<u64, Job>,
    busy: BTreeMap<u64, Busy>,
    /// Jobs for a thread that is starting, or, if the kernel refused a new one, for the
    /// next that is free.
    backlog: VecDeque<Job>,
}

impl Lanes {
    /// Starts no thread before there is a job, and keeps at most `max_idle` idle ones.
    pub fn new(max_idle: usize) -> Self {
        Self::with_idle_time(max_idle, IDLE)
    }

    fn with_idle_time(max_idle: usize, idle_for: Duration) -> Self {
        Self {
            shared: Arc::new(LanesInner {
                max_idle,
                idle_for,
                state: Mutex::default(),
            }),
        }
    }

    /// Runs `f` on a lane, for `volume`, as its step `step`.
    ///
    /// `f` starts at once, whether or not the future is polled, and runs to its end even if
    /// the future is dropped; its result is then dropped on the lane. A panic in `f` continues
    /// in the task that awaits the future.
    pub fn run<T, F>(
        &self,
        volume: &str,
        step: &'static str,
        f: F,
    ) -> impl Future<Output = T> + Send + use<T, F>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        let (give, take) = oneshot::channel();
        // Lines of the work are the call's.
        let span = Span::current();
        self.submit(Job {
            volume: volume.to_owned(),
            step,
            work: Box::new(move || {
                let f = || span.in_scope(f);
                // Fails if the caller has dropped the future; then this drops the result.
                let _ = give.send(catch_unwind(AssertUnwindSafe(f)));
            }),
        });
        answer(take)
    }

    /// Runs `future` on lanes, for `volume`: each poll occupies one, which the calls
    /// between its awaits may block. The future reports its steps by [`enter_step`].
    ///
    /// As with [`Lanes::run`], `future` starts at once, and runs to its end even if the
    /// returned future is dropped.
    pub fn drive<T, F>(&self, volume: &str, future: F) -> impl Future<Output = T> + Send + use<T, F>
    where
        T: Send + 'static,
        F: Future<Output = T> + Send + 'static,
    {
        let (give, take) = oneshot::channel();
        let work = async move {
            let _ = give.send(AssertUnwindSafe(future).catch_unwind().await);
        };
        let work = work.in_current_span();
        let (lanes, volume) = (self.clone(), volume.to_owned());
        let schedule = move |runnable: Runnable| {
            lanes.submit(Job {
                volume: volume.clone(),
                step: "begin",
                work: Box::new(move || {
                    runnable.run();
                }),
            });
        };
        let (runnable, task) = async_task::spawn(work, schedule);
        task.detach();
        runnable.schedule();
        answer(take)
    }

    /// The jobs that have started and not ended, the oldest thread first. A job
    /// may be listed for an instant after its future is ready.
    pub fn busy(&self) -> Vec<Busy> {
        self.shared.lock().busy.values().cloned().collect()
    }

    /// The number of live threads, idle ones included.
    pub fn threads(&self) -> usize {
        self.shared.lock().threads
    }

    fn submit(&self, job: Job) {
        let mut state = self.shared.lock();
        if let Some((id, thread)) = state.idle.pop() {
            state.given.insert(id, job);
            drop(state);
            thread.unpark();
            return;
        }
        state.backlog.push_back(job);
        state.next += 1;
        let (id, shared) = (state.next, Arc::clone(&self.shared));
        let spawned = thread::Builder::new()
            .name("lane".to_owned())
            .stack_size(STACK)
            .spawn(move || serve(&shared, id));
        match spawned {
            Ok(_) => state.threads += 1,
            Err(error) => tracing::error!(
                %error,
                threads = state.threads,
                "no thread for a blocking call: it waits for the next free one; \
                 raise the container's pids limit"
            ),
        }
    }
}

impl LanesInner {
    /// No code of a job runs under this lock, so the state is consistent even if a thread
    /// panicked while it had the lock.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next job for thread `id`. None: the thread has to end, and is not counted any more.
    fn next_job(&self, id: u64) -> Option<Job> {
        let mut state = self.lock();
        if let Some(job) = state.backlog.pop_front() {
            return Some(job);
        }
        if state.idle.len() >= self.max_idle {
            state.threads -= 1;
            return None;
        }
        state.idle.push((id, thread::current()));
        let idle_since = Instant::now();
        loop {
            drop(state);
            let left = self.idle_for.saturating_sub(idle_since.elapsed());
            #[expect(clippy::disallowed_methods, reason = "a submitted job ends the wait")]
            thread::park_timeout(left);
            state = self.lock();
            if let Some(job) = state.given.remove(&id) {
                return Some(job);
            }
            if left.is_zero() {
                state.idle.retain(|(lane, _)| *lane != id);
                state.threads -= 1;
                return None;
            }
        }
    }
}

/// Awaits a job's result.
async fn answer<T>(take: oneshot::Receiver<thread::Result<T>>) -> T {
    match take.await {
        Ok(Ok(value)) => value,
        Ok(Err(panic)) => resume_unwind(panic),
        Err(_) => unreachable!("a lane ends no job without its result"),
    }
}

thread_local! {
    /// The lane that this thread is, if it is one.
    static LANE: RefCell<Option<(Arc<LanesInner>, u64)>> = const { RefCell::new(None) };
}

/// Reports in [`Lanes::busy`] what the job on this thread waits for, until the returned
/// value is dropped. On a thread that is no lane it does nothing.
pub fn waiting_for(what: String) -> WaitGuard {
    tell(what);
    WaitGuard(())
}

/// Reports something else that this thread's job waits for, until the [`WaitGuard`] that it
/// has is dropped.
pub fn now_waiting_for(what: String) {
    tell(what);
}

/// Reports that a job waits, until it is dropped ([`waiting_for`]).
#[derive(Debug)]
#[must_use]
pub struct WaitGuard(());

impl Drop for WaitGuard {
    fn drop(&mut self) {
        tell(String::new());
    }
}

fn tell(what: String) {
    change_busy(|busy| busy.waits_for = what);
}

/// Names the step that the job on this thread enters, in [`Lanes::busy`]. On a thread that
/// is no lane it does nothing.
pub fn enter_step(step: &'static str) {
    change_busy(|busy| (busy.step, busy.since) = (step, Instant::now()));
}

/// Changes the entry of this thread's job.
fn change_busy(change: impl FnOnce(&mut Busy)) {
    LANE.with_borrow(|lane| {
        if let Some((shared, id)) = lane {
            shared.lock().busy.get_mut(id).map(change);
        }
    });
}

/// The loop of a lane: runs one job after the other, until there was none for a while.
fn serve(shared: &Arc<LanesInner>, id: u64) {
    LANE.set(Some((Arc::clone(shared), id)));
    let tid = rustix::thread::gettid().as_raw_nonzero().get();
    while let Some(job) = shared.next_job(id) {
        let busy = Busy {
            volume: job.volume,
            since: Instant::now(),
            tid,
            step: job.step,
            waits_for: String::new(),
        };
        shared.lock().busy.insert(id, busy);
        // The job catches its own panic. This catches that of the Drop of a result that no
        // task awaits any more; the panic hook has logged it.
        let _: Result<(), Box<dyn Any + Send>> = catch_unwind(AssertUnwindSafe(job.work));
        shared.lock().busy.remove(&id);
    }
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State")
            .field("threads", &self.threads)
            .field("idle", &self.idle.len())
            .field("busy", &self.busy)
            .field("backlog", &self.backlog.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn block_on<F: Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap()
            .block_on(future)
    }

    /// Waits for a state of the lanes: a lane sends its result before it is idle again.
    fn until(lanes: &Lanes, met: impl Fn(&State) -> bool) {
        while !met(&lanes.shared.lock()) {
            thread::yield_now();
        }
    }

    #[test]
    fn an_idle_thread_is_reused_and_others_are_made() {
        let lanes = Lanes::new(8);
        let tid = || rustix::thread::gettid();
        let first = block_on(lanes.run("v", "probe", tid));
        until(&lanes, |state| state.idle.len() == 1);
        assert_eq!(first, block_on(lanes.run("v", "mount", tid)));
        until(&lanes, |state| state.idle.len() == 1);

        let (go, wait) = mpsc::channel::<()>();
        let stuck = lanes.run("dead", "mount", move || wait.recv());
        assert_ne!(first, block_on(lanes.run("alive", "mount", tid)));
        assert_eq!(lanes.threads(), 2);
        drop(go);
        block_on(stuck).unwrap_err();
    }

    #[test]
    fn a_dropped_future_cancels_nothing_and_busy_tells_of_it() {
        let lanes = Lanes::new(8);
        let (go, wait) = mpsc::channel::<()>();
        let (done, ended) = mpsc::channel();
        drop(lanes.run("pvc-1", "mount", move || {
            let _ = wait.recv();
            done.send(()).unwrap();
        }));
        until(&lanes, |state| !state.busy.is_empty());
        let busy = lanes.busy();
        assert_eq!((&*busy[0].volume, busy[0].step), ("pvc-1", "mount"));
        assert!(std::path::Path::new(&format!("/proc/self/task/{}", busy[0].tid)).exists());
        go.send(()).unwrap();
        ended.recv().unwrap();
        until(&lanes, |state| state.busy.is_empty());
    }

    #[test]
    fn a_driven_future_is_polled_on_lanes_and_has_none_while_it_awaits() {
        let lanes = Lanes::new(8);
        let tid = || rustix::thread::gettid();
        let (go, wait) = oneshot::channel::<()>();
        let (began, begins) = oneshot::channel();
        let (wake, woken) = mpsc::channel::<()>();
        let driven = lanes.drive("pvc-1", async move {
            enter_step("attach");
            began.send(()).unwrap();
            wait.await.unwrap_err();
            enter_step("mount");
            woken.recv().unwrap_err();
            tid()
        });
        block_on(begins).unwrap();
        until(&lanes, |state| {
            state.busy.is_empty() && state.idle.len() == 1
        });
        drop(go);
        until(&lanes, |state| {
            state.busy.values().any(|busy| busy.step == "mount")
        });
        drop(wake);
        assert_ne!(block_on(driven), tid());
        until(&lanes, |state| state.threads == 1 && state.busy.is_empty());
    }

    #[test]
    fn a_driven_future_runs_to_its_end_though_nothing_awaits_it() {
        let lanes = Lanes::new(8);
        let (go, wait) = oneshot::channel::<()>();
        let (done, ended) = mpsc::channel();
        drop(lanes.drive("pvc-1", async move {
            wait.await.unwrap_err();
            done.send(()).unwrap();
        }));
        drop(go);
        ended.recv().unwrap();
        let panics = lanes.drive("v", async { panic!("out of cheese") });
        let panic = catch_unwind(AssertUnwindSafe(|| block_on::<_>(panics))).unwrap_err();
        assert_eq!(panic.downcast_ref(), Some(&"out of cheese"));
        until(&lanes, |state| state.busy.is_empty());
    }

    #[test]
    fn a_panic_reaches_the_awaiter_and_the_lane_lives_on() {
        let lanes = Lanes::new(8);
        let job = lanes.run("v", "mkfs", || panic!("out of cheese"));
        let panic = catch_unwind(AssertUnwindSafe(|| block_on::<_>(job))).unwrap_err();
        assert_eq!(panic.downcast_ref(), Some(&"out of cheese"));
        assert_eq!(block_on(lanes.run("v", "mkfs", || 7)), 7);
        until(&lanes, |state| state.busy.is_empty());
    }

    #[test]
    fn a_result_that_panics_in_its_drop_ends_no_lane() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("in drop");
            }
        }
        let lanes = Lanes::new(8);
        let (go, wait) = mpsc::channel::<()>();
        drop(lanes.run("v", "probe", move || {
            let _ = wait.recv();
            Bomb
        }));
        drop(go);
        until(&lanes, |state| state.idle.len() == 1 && state.threads == 1);
        assert!(lanes.busy().is_empty());
    }

    #[test]
    fn idle_threads_end() {
        let lanes = Lanes::with_idle_time(8, Duration::ZERO);
        block_on(lanes.run("v", "probe", || ()));
        until(&lanes, |state| state.threads == 0 && state.idle.is_empty());

        let none_kept = Lanes::new(0);
        block_on(none_kept.run("v", "probe", || ()));
        until(&none_kept, |state| state.threads == 0);
    }

    #[test]
    fn hundreds_at_once_each_get_a_thread() {
        let lanes = Lanes::new(4);
        let barrier = Arc::new(std::sync::Barrier::new(301));
        let jobs: Vec<_> = (0..300)
            .map(|n| {
                let barrier = Arc::clone(&barrier);
                lanes.run("v", "mount", move || {
                    barrier.wait();
                    n
                })
            })
            .collect();
        barrier.wait();
        assert!(jobs.into_iter().map(block_on).eq(0..300));
        until(&lanes, |state| state.threads <= 4);
    }
}
