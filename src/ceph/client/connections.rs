//! One connection for each cluster and user, made when it is needed.
//!
//! A connection costs some ten milliseconds, threads and sockets, and serves any number of
//! callers at once. A new one replaces a connection that is fenced or did not answer in time
//! ([`Cluster::is_lost`]). A thread of its own ends connections that were unused for
//! [`IDLE`], because ending one may block, and its last user may be on a thread that must
//! not block. A caller that arrives while a connection is being made waits for that attempt
//! and shares its result, so a dead cluster costs each of its callers one timeout, and
//! callers of other clusters nothing.

use std::{
    collections::{BTreeMap, HashMap},
    io, mem,
    path::{Path, PathBuf},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::io::Errno;

use super::{
    CephError, Credentials,
    rados::{Cluster, Timeouts},
};
use crate::{digest, kernel::net_namespace::within};

#[cfg(test)]
mod tests;

/// How long an unused connection is kept.
pub const IDLE: Duration = Duration::from_secs(300);

/// The connections of a process. Clones share them.
#[derive(Clone, Debug)]
pub struct Connections {
    timeouts: Timeouts,
    slots: Arc<Mutex<Slots>>,
    attempts: Arc<Mutex<BTreeMap<String, LastAttempt>>>,
    errors: Arc<Mutex<ErrorCounts>>,
    /// When its last clone is dropped, the thread that ends idle connections ends, too.
    _alive: Sender<()>,
}

type Slots = HashMap<Key, Arc<Slot>>;

/// By cluster and reason.
type ErrorCounts = BTreeMap<(String, &'static str), u64>;

/// The reasons of [`Connections::errors`].
const REASONS: [&str; 4] = ["unanswered", "refused", LOST, "other"];
const LOST: &str = "lost";

/// Callers with equal keys share a connection. A cluster whose monitors have moved gets a
/// new one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    monitors: Vec<String>,
    user: String,
    /// In place of the secret, of which a key needs no copy.
    secret_digest: String,
    net_namespace: Option<PathBuf>,
}

/// One connection, and the attempt to make it.
#[derive(Debug)]
struct Slot {
    state: Mutex<ConnectionState>,
    /// Notified when an attempt has ended.
    ended: Condvar,
}

#[derive(Debug)]
struct ConnectionState {
    /// One caller connects; later ones wait for it.
    connecting: bool,
    /// The result of the last attempt.
    last: Option<Result<Arc<Cluster>, CephError>>,
    /// Lost connections, which may still be in use.
    lost: Vec<Arc<Cluster>>,
    /// When a caller last got the connection.
    last_used: Instant,
}

impl Connections {
    /// Starts the thread that ends idle connections, and makes no connection.
    pub fn new(timeouts: Timeouts) -> io::Result<Self> {
        Self::with_idle_time(timeouts, IDLE)
    }

    fn with_idle_time(timeouts: Timeouts, idle_for: Duration) -> io::Result<Self> {
        let slots = Arc::<Mutex<Slots>>::default();
        let (alive, dropped) = channel();
        let swept = slots.clone();
        thread::Builder::new()
            .name("ceph-idle".into())
            .spawn(move || sweep(&swept, idle_for, &dropped))?;
        Ok(Self {
            timeouts,
            slots,
            attempts: Arc::default(),
            errors: Arc::default(),
            _alive: alive,
        })
    }

    /// The connection to the cluster of that id, which has these monitors, as this user, in
    /// the network namespace of that file, if any: the threads that have its sockets are those
    /// that the library starts when it connects. Blocks while it is made, at most for [`Timeouts::connect`].
    pub fn get(
        &self,
        cluster_id: &str,
        monitors: &[String],
        credentials: &Credentials,
        net_namespace: Option<&Path>,
    ) -> Result<Arc<Cluster>, CephError> {
        let key = Key {
            net_namespace: net_namespace.map(Path::to_owned),
            monitors: monitors.to_vec(),
            user: credentials.user.clone(),
            secret_digest: digest::sha256_hex(credentials.key.reveal()),
        };
        let slot = lock(&self.slots).entry(key).or_default().clone();
        let connect = || Cluster::connect(monitors, credentials, self.timeouts);
        let outcome = slot.get(|replaces_lost| {
            if replaces_lost {
                self.count_error(cluster_id, LOST);
            }
            let connected = within(net_namespace, connect).unwrap_or_else(|error| {
                let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
                let file = net_namespace.map(Path::to_owned).unwrap_or_default();
                Err(CephError::NetNamespace { file, errno })
            });
            if let Err(error) = &connected {
                self.count_error(cluster_id, reason(error));
            }
            connected
        });
        if let Some(attempt) = LastAttempt::of(&outcome) {
            lock(&self.attempts).insert(cluster_id.to_owned(), attempt);
        }
        outcome
    }

    /// Whether each cluster that was called answers, by its id; `None` where nothing has
    /// called it lately.
    pub fn reachable(&self) -> Vec<(String, Option<bool>)> {
        let attempts = lock(&self.attempts);
        let reachable = |(id, attempt): (&String, &LastAttempt)| (id.clone(), attempt.reached());
        attempts.iter().map(reachable).collect()
    }

    /// How many connections to each cluster that was called failed, by its id and the reason.
    pub fn errors(&self) -> Vec<(String, &'static str, u64)> {
        let called: Vec<_> = lock(&self.attempts).keys().cloned().collect();
        let errors = lock(&self.errors);
        let count = |id: &String, reason| {
            let count = errors.get(&(id.clone(), reason)).copied();
            (id.clone(), reason, count.unwrap_or_default())
        };
        let of_each = |id| REASONS.map(|reason| count(id, reason));
        called.iter().flat_map(of_each).collect()
    }

    fn count_error(&self, cluster_id: &str, reason: &'static str) {
        let mut errors = lock(&self.errors);
        *errors.entry((cluster_id.to_owned(), reason)).or_default() += 1;
    }
}

/// Why a cluster could not be connected to, as one of [`REASONS`].
fn reason(error: &CephError) -> &'static str {
    match error {
        CephError::Monitors(_) => "unanswered",
        error if error.is_timed_out() => "unanswered",
        error if error.is_access_denied() => "refused",
        _ => "other",
    }
}

/// How the last call of [`Connections::get`] for a cluster ended.
#[derive(Debug)]
struct LastAttempt {
    at: Instant,
    /// Whether the cluster answered, if only to refuse the user.
    answered: bool,
    /// Whether the connection is lost since, while there is one.
    lost: Weak<AtomicBool>,
}

impl LastAttempt {
    /// `None` if it says nothing about the cluster: a library is missing.
    fn of(outcome: &Result<Arc<Cluster>, CephError>) -> Option<Self> {
        let (answered, lost) = match outcome {
            Ok(cluster) => (true, cluster.lost_mark()),
            Err(CephError::Library(_)) => return None,
            Err(error) => (error.is_access_denied(), Weak::new()),
        };
        Some(Self {
            at: Instant::now(),
            answered,
            lost,
        })
    }

    fn reached(&self) -> Option<bool> {
        match self.lost.upgrade() {
            Some(lost) => Some(!lost.load(Relaxed)),
            None => (self.at.elapsed() < IDLE).then_some(self.answered),
        }
    }
}

impl Default for Slot {
    fn default() -> Self {
        Self {
            state: Mutex::new(ConnectionState {
                connecting: false,
                last: None,
                lost: Vec::new(),
                last_used: Instant::now(),
            }),
            ended: Condvar::new(),
        }
    }
}

impl Slot {
    /// The connection. `connect` makes it, and learns whether it replaces a lost one.
    fn get(
        &self,
        connect: impl FnOnce(bool) -> Result<Arc<Cluster>, CephError>,
    ) -> Result<Arc<Cluster>, CephError> {
        let mut state = lock(&self.state);
        state.last_used = Instant::now();
        if state.connecting {
            let connecting = |state: &mut ConnectionState| state.connecting;
            let waited = self.ended.wait_while(state, connecting);
            state = waited.unwrap_or_else(PoisonError::into_inner);
            if let Some(outcome) = &state.last {
                return outcome.clone();
            }
        }
        if let Some(Ok(cluster)) = &state.last
            && !cluster.is_lost()
        {
            return Ok(cluster.clone());
        }
        let lost = state.last.take().and_then(Result::ok);
        let replaces_lost = lost.is_some();
        state.lost.extend(lost);
        state.connecting = true;
        drop(state);
        let attempt = ConnectAttempt(self);
        let outcome = connect(replaces_lost);
        lock(&self.state).last = Some(outcome.clone());
        drop(attempt);
        outcome
    }

    /// Whether it was unused for this long.
    fn is_idle(&self, idle_for: Duration) -> bool {
        let state = lock(&self.state);
        let used = match &state.last {
            Some(Ok(cluster)) => Arc::strong_count(cluster) > 1,
            _ => state.connecting,
        };
        !used && state.lost.is_empty() && state.last_used.elapsed() >= idle_for
    }

    /// Takes out the lost connections that are no longer in use.
    fn unused(&self) -> Vec<Arc<Cluster>> {
        let unused = |cluster: &mut Arc<Cluster>| Arc::strong_count(cluster) == 1;
        lock(&self.state).lost.extract_if(.., unused).collect()
    }
}

/// An attempt to connect, which ends when this is dropped, also by a panic.
struct ConnectAttempt<'a>(&'a Slot);

impl Drop for ConnectAttempt<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).connecting = false;
        self.0.ended.notify_all();
    }
}

/// Ends idle connections, until `dropped` is closed: the last [`Connections`] was dropped.
fn sweep(slots: &Mutex<Slots>, idle_for: Duration, dropped: &Receiver<()>) {
    while dropped.recv_timeout(idle_for / 4) == Err(RecvTimeoutError::Timeout) {
        let idle = |_: &Key, slot: &mut Arc<Slot>| slot.is_idle(idle_for);
        let mut slots = lock(slots);
        let lost: Vec<_> = slots.values().flat_map(|slot| slot.unused()).collect();
        let ended: Vec<_> = slots.extract_if(idle).collect();
        drop(slots);
        // Without the lock, because it may block.
        drop((lost, ended));
    }
    // Here, because the thread of the last user may not be allowed to block.
    drop(mem::take(&mut *lock(slots)));
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
