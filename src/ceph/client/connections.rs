//! One connection for each cluster and user, made when it is needed.
//!
//! A connection costs some ten milliseconds, threads and sockets, and serves any
//! number of callers at once. It is made anew when a call has found it fenced or
//! without an answer ([`Cluster::is_lost`]), and ends after [`IDLE`]
//! without a use, on a thread of its own: ending one may block, which its last user must
//! not. A caller that asks while a connection is being made waits for that attempt and
//! shares its result, so a dead cluster costs each caller one timeout, and callers of other
//! clusters nothing.

use std::{
    collections::HashMap,
    io, mem,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    CephError, Credentials,
    rados::{Cluster, Timeouts},
};
use crate::digest;

#[cfg(test)]
mod tests;

/// How long a connection is kept that nobody asks for.
pub const IDLE: Duration = Duration::from_secs(300);

/// The connections of a process. Clones share them.
#[derive(Clone, Debug)]
pub struct Connections {
    timeouts: Timeouts,
    slots: Arc<Mutex<Slots>>,
    /// The thread that ends idle ones ends when the last of these is dropped.
    _alive: Sender<()>,
}

type Slots = HashMap<Key, Arc<Slot>>;

/// Connections are shared by those who would make the very same one. A cluster
/// whose monitors have moved gets a new one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    monitors: Vec<String>,
    user: String,
    /// Of the secret, which need not be kept for this.
    secret_digest: String,
}

/// The place of one connection.
#[derive(Debug)]
struct Slot {
    state: Mutex<ConnectionState>,
    /// An attempt has ended.
    ended: Condvar,
}

#[derive(Debug)]
struct ConnectionState {
    /// Somebody connects; who comes meanwhile waits.
    connecting: bool,
    /// What the last attempt came to.
    last: Option<Result<Arc<Cluster>, CephError>>,
    /// What was lost, and may still be in use.
    lost: Vec<Arc<Cluster>>,
    /// When somebody last asked.
    asked: Instant,
}

impl Connections {
    /// No connection yet.
    pub fn new(timeouts: Timeouts) -> io::Result<Self> {
        Self::with_idle_time(timeouts, IDLE)
    }

    fn with_idle_time(timeouts: Timeouts, idle_for: Duration) -> io::Result<Self> {
        let slots = Arc::<Mutex<Slots>>::default();
        let (alive, gone) = channel();
        let swept = slots.clone();
        thread::Builder::new()
            .name("ceph-idle".into())
            .spawn(move || sweep(&swept, idle_for, &gone))?;
        Ok(Self {
            timeouts,
            slots,
            _alive: alive,
        })
    }

    /// The connection to the cluster of these monitors as this user. Blocks while
    /// it is made, at most as long as the timeout for connecting says.
    pub fn get(
        &self,
        monitors: &[String],
        credentials: &Credentials,
    ) -> Result<Arc<Cluster>, CephError> {
        let key = Key {
            monitors: monitors.to_vec(),
            user: credentials.user.clone(),
            secret_digest: digest::sha256_hex(credentials.key.reveal()),
        };
        let slot = lock(&self.slots).entry(key).or_default().clone();
        slot.get(|| Cluster::connect(monitors, credentials, self.timeouts))
    }
}

impl Default for Slot {
    fn default() -> Self {
        Self {
            state: Mutex::new(ConnectionState {
                connecting: false,
                last: None,
                lost: Vec::new(),
                asked: Instant::now(),
            }),
            ended: Condvar::new(),
        }
    }
}

impl Slot {
    fn get(
        &self,
        connect: impl FnOnce() -> Result<Arc<Cluster>, CephError>,
    ) -> Result<Arc<Cluster>, CephError> {
        let mut state = lock(&self.state);
        state.asked = Instant::now();
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
        let lost = state.last.take();
        state.lost.extend(lost.and_then(Result::ok));
        state.connecting = true;
        drop(state);
        let attempt = ConnectAttempt(self);
        let outcome = connect();
        lock(&self.state).last = Some(outcome.clone());
        drop(attempt);
        outcome
    }

    /// Whether nobody has used it for so long.
    fn is_idle(&self, idle_for: Duration) -> bool {
        let state = lock(&self.state);
        let used = match &state.last {
            Some(Ok(cluster)) => Arc::strong_count(cluster) > 1,
            _ => state.connecting,
        };
        !used && state.lost.is_empty() && state.asked.elapsed() >= idle_for
    }

    /// What was lost and nobody uses.
    fn unused(&self) -> Vec<Arc<Cluster>> {
        let unused = |cluster: &mut Arc<Cluster>| Arc::strong_count(cluster) == 1;
        lock(&self.state).lost.extract_if(.., unused).collect()
    }
}

/// Somebody connects, until this is dropped, by a panic too.
struct ConnectAttempt<'a>(&'a Slot);

impl Drop for ConnectAttempt<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).connecting = false;
        self.0.ended.notify_all();
    }
}

/// Ends idle connections, until `gone` says that nobody can ask any more.
fn sweep(slots: &Mutex<Slots>, idle_for: Duration, gone: &Receiver<()>) {
    while gone.recv_timeout(idle_for / 4) == Err(RecvTimeoutError::Timeout) {
        let idle = |_: &Key, slot: &mut Arc<Slot>| slot.is_idle(idle_for);
        let mut slots = lock(slots);
        let lost: Vec<_> = slots.values().flat_map(|slot| slot.unused()).collect();
        let ended: Vec<_> = slots.extract_if(idle).collect();
        drop(slots);
        // After the lock, as it may block.
        drop((lost, ended));
    }
    // The last user may be on a thread that must not block.
    drop(mem::take(&mut *lock(slots)));
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
