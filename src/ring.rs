//! io_uring. No other module names tokio-uring or io-uring.
//!
//! The agent has three kinds of rings, because a ring's kernel workers belong to the thread
//! that submits, and are few:
//!
//! - tokio-uring's own, which drives the runtime. [`start`] runs it inside a
//!   current-thread tokio runtime, so that tonic's sockets, which are polled by epoll, are
//!   on the same thread.
//! - A small one for operations that tokio-uring lacks: readiness of descriptors and
//!   exits of processes ([`poll`], [`child`]).
//!   No operation on it ever needs a kernel worker.
//! - One for each device that is being read, which may never answer, on the volume's lane
//!   ([`probe`]).
//!
//! No child inherits a ring's memory (madvise(2), MADV_DONTFORK): a child does not need it
//! between fork and exec, and User-Mode Linux 7.2, on which the tests run, miscounts such
//! pages and panics.
//!
//! All types but [`probe::Prober`] and [`RuntimeHandle`] are `!Send`, belong to the runtime
//! thread, and must be used within [`start`].

use std::{
    future::Future,
    io,
    panic::{AssertUnwindSafe, resume_unwind},
    pin::Pin,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use futures_util::FutureExt as _;
use tokio::sync::{mpsc, oneshot};
use tracing::{Instrument as _, Span};

pub(crate) mod child;
pub(crate) mod poll;
pub mod probe;

/// A sysctl of Linux 6.6: 0 allows io_uring to all, 1 to the privileged and
/// `kernel.io_uring_group`, 2 to none (kernel document admin-guide/sysctl/kernel).
const DISABLED_SYSCTL: &str = "/proc/sys/kernel/io_uring_disabled";

/// Why the runtime could not be created.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// The sysctl disables io_uring.
    #[error(
        "io_uring is disabled on this node (sysctl kernel.io_uring_disabled is {value}); \
         set it to 0, or to 1 and give this process CAP_SYS_ADMIN"
    )]
    Disabled {
        /// The sysctl's value.
        value: String,
        /// The error of io_uring_setup(2).
        source: io::Error,
    },
    /// A seccomp filter or missing privileges.
    #[error(
        "io_uring_setup is refused; allow io_uring in the container's seccomp profile, \
         or run the container privileged"
    )]
    Refused(#[source] io::Error),
    /// The kernel lacks io_uring; podman's profile denies by the same error, which before Linux 6.6
    /// no sysctl tells apart.
    #[error(
        "this kernel has no io_uring, or a container's seccomp profile hides it; it needs Linux \
         5.14 or later with CONFIG_IO_URING, and in a container a profile that allows io_uring, or \
         to run it privileged"
    )]
    Missing(#[source] io::Error),
    /// Any other failure, such as no memory or no descriptors.
    ///
    /// Remedy: raise the limits of memory and descriptors (`ulimit -n`); `uringctl doctor` checks
    /// them.
    #[error("cannot create the io_uring runtime")]
    Setup(#[source] io::Error),
}

impl RingError {
    fn new(error: io::Error) -> Self {
        Self::classify(
            error,
            std::fs::read_to_string(DISABLED_SYSCTL).ok().as_deref(),
        )
    }

    fn classify(error: io::Error, sysctl: Option<&str>) -> Self {
        let has_sysctl = sysctl.is_some();
        let sysctl = sysctl.map_or("0", str::trim);
        match error.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) if sysctl != "0" => Self::Disabled {
                value: sysctl.to_owned(),
                source: error,
            },
            Some(libc::EPERM | libc::EACCES) => Self::Refused(error),
            // With its sysctl the kernel has io_uring, and podman's profile denies by ENOSYS.
            Some(libc::ENOSYS) if has_sysctl => Self::Refused(error),
            Some(libc::ENOSYS) => Self::Missing(error),
            _ => Self::Setup(error),
        }
    }
}

/// The operations of one kind on all rings of the process.
#[derive(Debug)]
struct Operations {
    submitted: AtomicU64,
    ended: AtomicU64,
}

/// Reads of devices.
static READS: Operations = Operations::new();
/// Polls for one event, such as the exit of a child.
static POLLS: Operations = Operations::new();
/// Polls that go on until they are cancelled.
static WATCHES: Operations = Operations::new();

impl Operations {
    const fn new() -> Self {
        Self {
            submitted: AtomicU64::new(0),
            ended: AtomicU64::new(0),
        }
    }

    fn submitted(&self) {
        self.submitted.fetch_add(1, Relaxed);
    }

    fn ended(&self) {
        self.ended.fetch_add(1, Relaxed);
    }
}

/// How many operations of a kind were submitted to rings, and how many of these are in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperationCount {
    /// `read`, `poll` or `watch`.
    pub operation: &'static str,
    /// Since the start.
    pub submitted: u64,
    /// Not ended yet.
    pub in_flight: u64,
}

/// The counts of every kind.
pub fn operations() -> [OperationCount; 3] {
    [("read", &READS), ("poll", &POLLS), ("watch", &WATCHES)].map(|(operation, count)| {
        // First what has ended: what is submitted between the two is in flight.
        let ended = count.ended.load(Relaxed);
        let submitted = count.submitted.load(Relaxed);
        OperationCount {
            operation,
            submitted,
            in_flight: submitted.saturating_sub(ended),
        }
    })
}

/// Runs `future` on this thread, with this module's rings and with tokio's epoll, timers
/// and `spawn_local`.
///
/// Tasks that are still running when the future is ready are dropped.
pub fn start<F: Future>(future: F) -> Result<F::Output, RingError> {
    let mut builder = tokio_uring::builder();
    builder.uring_builder(tokio_uring::uring_builder().dontfork());
    let runtime = tokio_uring::Runtime::new(&builder).map_err(RingError::new)?;
    runtime.block_on(async {
        let _poller = poll::install().map_err(RingError::new)?;
        Ok(future.await)
    })
}

/// Spawns a task on the runtime thread.
pub fn spawn(task: impl Future<Output = ()> + 'static) {
    tokio::task::spawn_local(task);
}

type Job = Box<dyn FnOnce() -> Pin<Box<dyn Future<Output = ()>>> + Send>;

/// Runs futures that are not `Send` on the runtime thread, for other threads.
#[derive(Clone, Debug)]
pub struct RuntimeHandle(mpsc::UnboundedSender<Job>);

impl RuntimeHandle {
    /// The handle of this thread, which runs [`start`].
    pub fn current() -> Self {
        let (send, mut jobs) = mpsc::unbounded_channel::<Job>();
        spawn(async move {
            while let Some(job) = jobs.recv().await {
                spawn(job());
            }
        });
        Self(send)
    }

    /// Runs `job` on the runtime thread. It runs to its end even if the caller is
    /// dropped; a panic in it continues in the caller. `None` when the runtime is
    /// shutting down.
    pub async fn run<F, T>(&self, job: impl FnOnce() -> F + Send + 'static) -> Option<T>
    where
        F: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        let (send, receive) = oneshot::channel();
        // The span puts the call's trace id into every line that its work logs.
        let span = Span::current();
        let job: Job = Box::new(move || {
            let work = span.in_scope(job);
            let work = async move {
                // The caller has gone if this fails.
                let _ = send.send(AssertUnwindSafe(work).catch_unwind().await);
            };
            Box::pin(work.instrument(span))
        });
        self.0.send(job).ok()?;
        match receive.await.ok()? {
            Ok(out) => Some(out),
            Err(panic) => resume_unwind(panic),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[test]
    fn sockets_and_timers_share_the_thread() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("csi.sock");
        let answer = start(async {
            let listener = tokio::net::UnixListener::bind(&socket).unwrap();
            tokio::task::spawn_local(async move {
                let (mut peer, _) = listener.accept().await.unwrap();
                let mut text = vec![0; 5];
                peer.read_exact(&mut text).await.unwrap();
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                peer.write_all(&text).await.unwrap();
            });
            let mut client = tokio::net::UnixStream::connect(&socket).await.unwrap();
            client.write_all(b"hello").await.unwrap();
            let mut answer = String::new();
            client.read_to_string(&mut answer).await.unwrap();
            answer
        });
        assert_eq!(answer.unwrap(), "hello");
    }

    #[test]
    fn another_thread_has_a_future_run_on_the_runtime_thread() {
        let tid = || rustix::thread::gettid();
        start(async {
            let runtime = RuntimeHandle::current();
            let here = tid();
            let (give, ran_on) = oneshot::channel();
            std::thread::spawn(move || {
                let on_it = runtime.run(move || async move {
                    tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                    tid()
                });
                give.send(block_on(on_it)).unwrap();
            });
            assert_eq!(ran_on.await.unwrap(), Some(here));
        })
        .unwrap();
    }

    #[test]
    fn a_panic_on_the_runtime_thread_continues_in_the_caller() {
        start(async {
            let runtime = RuntimeHandle::current();
            let caller = runtime.run(|| async { panic!("on purpose") });
            let panic = AssertUnwindSafe(caller).catch_unwind().await.unwrap_err();
            assert_eq!(panic.downcast_ref(), Some(&"on purpose"));
            assert_eq!(runtime.run(|| async { 7 }).await, Some(7));
        })
        .unwrap();
    }

    /// Other tests use the rings of this process meanwhile, so each count is a lower bound.
    #[test]
    fn operations_are_counted_while_they_are_in_flight() {
        let count = |operation: &str| {
            let all = operations();
            all.into_iter()
                .find(|it| it.operation == operation)
                .unwrap()
        };
        start(async {
            let before = ["poll", "watch"].map(count);
            let (never, held_open) = rustix::pipe::pipe().unwrap();
            let watch = poll::watch(never, rustix::event::PollFlags::IN).unwrap();
            let (ready, writer) = rustix::pipe::pipe().unwrap();
            rustix::io::write(&writer, b"x").unwrap();
            poll::readable(ready).await.unwrap();
            let after = ["poll", "watch"].map(count);
            for (before, after) in before.into_iter().zip(after) {
                assert!(after.submitted > before.submitted, "{before:?} {after:?}");
            }
            assert!(after[1].in_flight >= 1, "{after:?}");
            drop((watch, held_open));
        })
        .unwrap();
    }

    fn block_on<F: Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap()
            .block_on(future)
    }

    #[test]
    fn an_idle_runtime_takes_no_processor_time() {
        let spent = || {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
            std::time::Duration::new(
                now.tv_sec.unsigned_abs(),
                u32::try_from(now.tv_nsec).unwrap(),
            )
        };
        let idle = start(async {
            let _never = poll::watch(
                rustix::pipe::pipe().unwrap().0,
                rustix::event::PollFlags::IN,
            )
            .unwrap();
            let before = spent();
            tokio::time::sleep(std::time::Duration::from_millis(500)).await;
            spent().saturating_sub(before)
        })
        .unwrap();
        assert!(
            idle < std::time::Duration::from_millis(10),
            "{idle:?} of 500 ms asleep"
        );
    }

    #[test]
    fn a_refusal_names_the_setting_to_change() {
        let eperm = || io::Error::from_raw_os_error(libc::EPERM);
        let off = RingError::classify(eperm(), Some("2\n")).to_string();
        assert!(off.contains("kernel.io_uring_disabled is 2"), "{off}");
        let refused = RingError::classify(eperm(), Some("0\n")).to_string();
        assert!(refused.contains("seccomp"), "{refused}");
        let enosys = || io::Error::from_raw_os_error(libc::ENOSYS);
        let missing = RingError::classify(enosys(), None);
        assert!(matches!(missing, RingError::Missing(_)));
        assert!(missing.to_string().contains("seccomp"), "{missing}");
        let denied = RingError::classify(enosys(), Some("0\n"));
        assert!(matches!(denied, RingError::Refused(_)));
    }
}
