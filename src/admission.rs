//! Limits on how many volumes are in a step at once.
//!
//! A [`Gate`] has a number of permits for one step, attaching a device for instance, and
//! a queue for volumes without a permit. Three rules prevent that the volumes of one dead
//! server occupy all permits:
//!
//! - A gate frees a permit that is held longer than its timeout without progress, though
//!   the work continues: a device that hangs delays others by that time at most.
//!   The number of volumes bounds the stuck work; at a gate with [`Bounds::counts_stuck`]
//!   the share of its domain does, against which it still counts.
//! - All volumes of one server, cluster or pool (their *domain*) get three quarters of
//!   the permits and of the queue at most.
//! - A gate with a full queue refuses further volumes, so that the caller retries later. A
//!   volume that is attached is not refused any more: while a queue behind the attach is
//!   full, nothing new is attached ([`Gates::refuse_full`]).

use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::oneshot;

use crate::observe::metrics;

/// The limits of a gate.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// The name of the step.
    pub step: &'static str,
    /// The command-line flag of `permits`.
    pub flag: &'static str,
    /// How many volumes may be in the step at once.
    pub permits: usize,
    /// How many volumes of one domain may be in the step at once.
    pub share: usize,
    /// How many volumes may wait for a permit.
    pub queue: usize,
    /// How long a permit may be held without progress.
    pub timeout: Duration,
    /// Whether stuck work counts against its domain's share until it ends, because it
    /// costs more than a thread.
    pub counts_stuck: bool,
}

impl Bounds {
    /// Bounds with three quarters of the permits for a domain, and an unlimited queue.
    pub fn new(step: &'static str, flag: &'static str, permits: usize, timeout: Duration) -> Self {
        Self {
            step,
            flag,
            permits,
            share: share_of(permits),
            queue: usize::MAX,
            timeout,
            counts_stuck: false,
        }
    }
}

/// The share of one domain: three quarters, rounded up.
fn share_of(all: usize) -> usize {
    (all - all / 4).max(1)
}

/// The queue of a gate is full.
///
/// Remedy: nothing: the call is repeated; `uringctl volumes` shows what the others wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{waiting} volumes already wait for step {step}, as many as --max-waiting allows, or those of one pool, server or cluster; nothing was started, retry later ({flag} sets how many are in that step at once)"
)]
pub struct Full {
    /// The name of the step.
    pub step: &'static str,
    /// How many volumes wait.
    pub waiting: usize,
    /// The command-line flag of `permits`.
    pub flag: &'static str,
}

/// Places for one kind of work. Clones share them.
#[derive(Clone, Debug)]
pub struct Gate(Arc<GateInner>);

#[derive(Debug)]
struct GateInner {
    bounds: Bounds,
    state: Mutex<GateState>,
}

#[derive(Debug, Default)]
struct GateState {
    last: u64,
    held: BTreeMap<u64, HeldPermit>,
    /// The domains of stuck work that lost its permit.
    stuck: BTreeMap<u64, String>,
    waiting: VecDeque<QueuedCall>,
}

#[derive(Debug)]
struct HeldPermit {
    domain: String,
    /// When the permit was granted, or last renewed.
    since: Instant,
}

#[derive(Debug)]
struct QueuedCall {
    domain: String,
    grant: oneshot::Sender<Permit>,
}

/// A permit for a step. Dropping it frees the permit.
#[derive(Debug)]
#[must_use]
pub struct Permit {
    gate: Gate,
    id: u64,
}

/// The answer of a gate.
#[derive(Debug)]
pub enum Entry {
    /// A permit was free.
    Admitted(Permit),
    /// The volume is queued; the gate sends its permit to this channel.
    Waits(oneshot::Receiver<Permit>),
}

/// The load of a gate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Places that are held.
    pub held: usize,
    /// Volumes that are stuck in the step and lost their permit.
    pub stuck: usize,
    /// Volumes that wait for a permit.
    pub waiting: usize,
}

impl Gate {
    /// A gate with all permits free.
    pub fn new(bounds: Bounds) -> Self {
        Self(Arc::new(GateInner {
            bounds,
            state: Mutex::default(),
        }))
    }

    /// Requests a permit for a volume of `domain`.
    pub fn ask(&self, domain: &str) -> Result<Entry, Full> {
        let bounds = &self.0.bounds;
        let mut state = self.lock();
        let same = || (state.waiting.iter()).filter(|other| other.domain == domain);
        // A waiting volume delays only later ones of its own domain.
        if state.has_room(bounds, domain) && same().next().is_none() {
            return Ok(Entry::Admitted(self.hold(&mut state, domain)));
        }
        self.refuse_behind(&state, bounds.queue, domain)?;
        let (grant, granted) = oneshot::channel();
        state.waiting.push_back(QueuedCall {
            domain: domain.to_owned(),
            grant,
        });
        Ok(Entry::Waits(granted))
    }

    /// Refuses a volume of `domain` where so many others wait already.
    fn refuse_behind(&self, state: &GateState, queue: usize, domain: &str) -> Result<(), Full> {
        let waiting = state.waiting.len();
        let same = (state.waiting.iter()).filter(|other| other.domain == domain);
        if waiting < queue && same.count() < share_of(queue) {
            return Ok(());
        }
        let Bounds { step, flag, .. } = self.0.bounds;
        metrics::admission_refused(step);
        Err(Full {
            step,
            waiting,
            flag,
        })
    }

    /// Waits for a permit.
    pub async fn enter(&self, domain: &str) -> Result<Permit, Full> {
        Ok(match self.ask(domain)? {
            Entry::Admitted(permit) => permit,
            Entry::Waits(granted) => granted.await.unwrap_or_else(|_| self.never()),
        })
    }

    /// As [`Gate::enter`], for a lane.
    pub fn enter_on_lane(&self, domain: &str) -> Result<Permit, Full> {
        Ok(match self.ask(domain)? {
            Entry::Admitted(permit) => permit,
            Entry::Waits(granted) => granted.blocking_recv().unwrap_or_else(|_| self.never()),
        })
    }

    /// Panics: only [`Gate::grant`] removes a waiting volume from the queue.
    fn never(&self) -> ! {
        unreachable!(
            "the gate of step {} dropped a waiting volume",
            self.0.bounds.step
        )
    }

    /// What a queued volume waits for, for messages.
    pub fn describe(&self) -> String {
        let Bounds {
            step,
            flag,
            permits,
            ..
        } = self.0.bounds;
        format!("one of {permits} permits in step {step} ({flag})")
    }

    /// Frees the permits that are held without progress.
    pub fn expire(&self, now: Instant) {
        let timeout = self.0.bounds.timeout;
        let mut state = self.lock();
        let in_time = |held: &HeldPermit| now.saturating_duration_since(held.since) < timeout;
        let all = std::mem::take(&mut state.held).into_iter();
        let (held, stuck): (BTreeMap<_, _>, BTreeMap<_, _>) =
            all.partition(|(_, held)| in_time(held));
        state.held = held;
        if !stuck.is_empty() {
            let stuck = stuck.into_iter().map(|(id, held)| (id, held.domain));
            state.stuck.extend(stuck);
            self.grant(state);
        }
    }

    /// Updates its metrics.
    pub fn report(&self) {
        let Load {
            held,
            stuck,
            waiting,
        } = self.load();
        let Bounds { step, permits, .. } = self.0.bounds;
        metrics::admission(step, permits, held, stuck, waiting);
    }

    /// The current load of the gate.
    pub fn load(&self) -> Load {
        let state = self.lock();
        Load {
            held: state.held.len(),
            stuck: state.stuck.len(),
            waiting: state.waiting.len(),
        }
    }

    fn hold(&self, state: &mut GateState, domain: &str) -> Permit {
        state.last += 1;
        let held = HeldPermit {
            domain: domain.to_owned(),
            since: Instant::now(),
        };
        state.held.insert(state.last, held);
        Permit {
            gate: self.clone(),
            id: state.last,
        }
    }

    /// Grants free permits to the queue, first to the domain with room that has the fewest.
    fn grant(&self, mut state: MutexGuard<'_, GateState>) {
        // Calls that ended meanwhile get no permit.
        state.waiting.retain(|waiting| !waiting.grant.is_closed());
        let mut granted = Vec::new();
        while let Some(at) = state.next(&self.0.bounds)
            && let Some(QueuedCall { domain, grant }) = state.waiting.remove(at)
        {
            granted.push((grant, self.hold(&mut state, &domain)));
        }
        drop(state);
        for (grant, permit) in granted {
            // If the call has just ended, this drops the permit, and so frees it.
            let _ = grant.send(permit);
        }
    }

    /// No code of other modules runs under this lock, so the state is consistent even if a
    /// thread panicked while it had the lock.
    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GateState {
    fn has_room(&self, bounds: &Bounds, domain: &str) -> bool {
        self.held.len() < bounds.permits && self.count(bounds, domain) < bounds.share
    }

    /// The permits that a domain has.
    fn count(&self, bounds: &Bounds, domain: &str) -> usize {
        let held = self.held.values().map(|held| &held.domain);
        let stuck = self.stuck.values().filter(|_| bounds.counts_stuck);
        let same = held.chain(stuck).filter(|other| *other == domain);
        same.count()
    }

    /// The place in the queue of the next volume that gets a permit. Of the domains, that with
    /// the fewest permits is first: a volume of a domain that answers waits for no queue of
    /// several that do not.
    fn next(&self, bounds: &Bounds) -> Option<usize> {
        if self.held.len() >= bounds.permits {
            return None;
        }
        let mut domains = HashSet::new();
        let firsts = (self.waiting.iter().enumerate())
            .filter(|(_, waiting)| domains.insert(waiting.domain.as_str()));
        let counted = firsts.map(|(at, waiting)| (self.count(bounds, &waiting.domain), at));
        let next = counted.filter(|(count, _)| *count < bounds.share).min();
        next.map(|(_, at)| at)
    }
}

impl Permit {
    /// Signals progress: the work is not stuck.
    pub fn renew(&self) {
        if let Some(held) = self.gate.lock().held.get_mut(&self.id) {
            held.since = Instant::now();
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.gate.lock();
        let held = state.held.remove(&self.id).is_some();
        let stuck = state.stuck.remove(&self.id).is_some();
        if held || (stuck && self.gate.0.bounds.counts_stuck) {
            self.gate.grant(state);
        }
    }
}

/// How many volumes of a node may be in each step at once.
#[derive(Clone, Debug, clap::Args)]
#[allow(clippy::struct_field_names, reason = "the names of the flags")]
pub struct Limits {
    /// Volumes that are attached at once, not counting devices that hang; also mounts of NFS
    /// directories, lookups of volumes, and writes of inline volumes' records.
    #[arg(long, env = "URING_CSI_MAX_ATTACHES", default_value_t = 32, value_parser = positive, value_name = "N")]
    pub max_attaches: usize,
    /// Devices that are probed at once.
    #[arg(long, env = "URING_CSI_MAX_PROBES", default_value_t = 32, value_parser = positive, value_name = "N")]
    pub max_probes: usize,
    /// File systems that are mounted at once.
    #[arg(long, env = "URING_CSI_MAX_MOUNTS", default_value_t = 32, value_parser = positive, value_name = "N")]
    pub max_mounts: usize,
    /// mkfs that run at once.
    #[arg(long, env = "URING_CSI_MAX_MKFS", default_value_t = 8, value_parser = positive, value_name = "N")]
    pub max_mkfs: usize,
    /// fsck that run at once: each may take memory in proportion to the number of files.
    #[arg(long, env = "URING_CSI_MAX_FSCK", default_value_t = 4, value_parser = positive, value_name = "N")]
    pub max_fsck: usize,
    /// cryptsetup that run at once; those that hang count against their Ceph cluster,
    /// which may have three quarters.
    #[arg(long, env = "URING_CSI_MAX_CRYPTSETUP", default_value_t = 8, value_parser = positive, value_name = "N")]
    pub max_cryptsetup: usize,
    /// NBD devices that are reconnected at once, one for each server.
    #[arg(long, env = "URING_CSI_MAX_RECONNECTS", default_value_t = 32, value_parser = positive, value_name = "N")]
    pub max_reconnects: usize,
    /// Volumes that wait for one step, to be looked up, attached, probed or formatted for
    /// instance; further calls get RESOURCE_EXHAUSTED before they begin, and may be retried.
    #[arg(long, env = "URING_CSI_MAX_WAITING", default_value_t = 4096, value_parser = positive, value_name = "N")]
    pub max_waiting: usize,
}

/// Parses a limit.
pub fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("it must be 1 at least".to_owned()),
        Ok(number) => Ok(number),
        Err(error) => Err(error.to_string()),
    }
}

/// The timeout of a step that takes milliseconds, or at a server a second.
const SHORT: Duration = Duration::from_secs(3);
/// The timeout of a step that runs a child, whose work signals progress.
const CHILD: Duration = Duration::from_secs(10);
/// The timeout of an attempt to reconnect.
const RECONNECT: Duration = Duration::from_secs(15);

/// The gates of a node.
#[derive(Clone, Debug)]
pub struct Gates {
    /// Looking up a volume, without its device or pool: the first step of a stage. Its queue
    /// refuses, and that of the attach.
    pub look: Gate,
    /// Attaching a device; mounting a directory of a server.
    pub attach: Gate,
    /// Changing the record of an inline volume.
    pub record: Gate,
    /// Probing a device.
    pub probe: Gate,
    /// Mounting a file system.
    pub mount: Gate,
    /// Running mkfs.
    pub mkfs: Gate,
    /// Running fsck.
    pub fsck: Gate,
    /// Running cryptsetup.
    pub cryptsetup: Gate,
    /// Reconnecting to an NBD server.
    pub reconnect: Gate,
    /// How many volumes may wait in each queue.
    max_waiting: usize,
}

impl Gates {
    /// Gates with these limits.
    pub fn new(limits: &Limits) -> Self {
        let gate =
            |step, flag, permits, timeout| Gate::new(Bounds::new(step, flag, permits, timeout));
        let attaches = |step| Bounds::new(step, "--max-attaches", limits.max_attaches, SHORT);
        // Look and record use the node's own disk, so the domain does not matter.
        let share = limits.max_attaches;
        let queue = limits.max_waiting;
        Self {
            look: Gate::new(Bounds {
                share,
                queue,
                ..attaches("look")
            }),
            attach: Gate::new(Bounds {
                queue,
                ..attaches("attach")
            }),
            record: Gate::new(Bounds {
                share,
                ..attaches("record")
            }),
            probe: gate("probe", "--max-probes", limits.max_probes, SHORT),
            mount: gate("mount", "--max-mounts", limits.max_mounts, SHORT),
            mkfs: gate("mkfs", "--max-mkfs", limits.max_mkfs, CHILD),
            fsck: gate("fsck", "--max-fsck", limits.max_fsck, CHILD),
            // A cryptsetup that hangs keeps its memory, which is locked.
            cryptsetup: Gate::new(Bounds {
                counts_stuck: true,
                ..Bounds::new(
                    "cryptsetup",
                    "--max-cryptsetup",
                    limits.max_cryptsetup,
                    CHILD,
                )
            }),
            reconnect: Gate::new(Bounds {
                share: 1,
                ..Bounds::new(
                    "reconnect",
                    "--max-reconnects",
                    limits.max_reconnects,
                    RECONNECT,
                )
            }),
            max_waiting: limits.max_waiting,
        }
    }

    /// Refuses a volume that is to be attached, if the queue for one of its later steps is full.
    pub fn refuse_full(&self, domain: &str, later: &[&Gate]) -> Result<(), Full> {
        (later.iter())
            .try_for_each(|gate| gate.refuse_behind(&gate.lock(), self.max_waiting, domain))
    }

    fn all(&self) -> [&Gate; 9] {
        let Self {
            look,
            attach,
            record,
            probe,
            mount,
            mkfs,
            fsck,
            cryptsetup,
            reconnect,
            max_waiting: _,
        } = self;
        [
            look, attach, record, probe, mount, mkfs, fsck, cryptsetup, reconnect,
        ]
    }

    /// Frees the permits that are held without progress; to be called every second or so.
    pub fn expire(&self) {
        let now = Instant::now();
        self.all().iter().for_each(|gate| gate.expire(now));
    }

    /// Updates the metrics.
    pub fn report(&self) {
        self.all().iter().for_each(|gate| gate.report());
    }
}

#[cfg(test)]
mod tests;
