//! Bounds on what many calls at once would take all of.
//!
//! A [`Gate`] has a number of places for one kind of work, attaching a device for
//! instance, and a queue for those that find no place free. Three rules keep one
//! dead server from using them up:
//!
//! - A place that is held for longer than the gate's time without a sign of life is
//!   given back, though the work goes on: a device that hangs delays others by that
//!   time at most. What is stuck then is bounded by the number of volumes, or, where
//!   the gate says so, by the share of its domain, against which it goes on counting.
//! - All that depends on one server, cluster or pool (its *domain*) gets three
//!   quarters of the places and of the queue at most.
//! - A queue that is full refuses, so that the caller comes again later.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::oneshot;

use crate::observe::metrics;

/// What a gate admits.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// The step that it stands before.
    pub step: &'static str,
    /// The flag that sets the number of places.
    pub flag: &'static str,
    /// How many may be in the step at once.
    pub places: usize,
    /// How many of them one domain may have.
    pub share: usize,
    /// How many may wait.
    pub queue: usize,
    /// How long a place may be held without a sign of life.
    pub patience: Duration,
    /// Whether work whose place was given back counts against its domain's share until
    /// it ends: it costs more than a thread.
    pub counts_stuck: bool,
}

impl Bounds {
    /// Three quarters of the places for a domain, no limit to the queue.
    pub fn new(step: &'static str, flag: &'static str, places: usize, patience: Duration) -> Self {
        Self {
            step,
            flag,
            places,
            share: most_of(places),
            queue: usize::MAX,
            patience,
            counts_stuck: false,
        }
    }
}

/// What one domain may have of `all`.
fn most_of(all: usize) -> usize {
    (all - all / 4).max(1)
}

/// Nobody may wait for a place any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{waiting} volumes wait for step {step} already, as many as --max-waiting allows; the call is not begun and may be repeated ({flag} says how many are in that step at once)"
)]
pub struct Full {
    /// The step.
    pub step: &'static str,
    /// How many wait.
    pub waiting: usize,
    /// The flag that sets the number of places.
    pub flag: &'static str,
}

/// Places for one kind of work. Clones share them.
#[derive(Clone, Debug)]
pub struct Gate(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    bounds: Bounds,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    last: u64,
    held: BTreeMap<u64, Held>,
    /// The domains of works that go on after their place was given back.
    stuck: BTreeMap<u64, String>,
    waiting: VecDeque<Waiting>,
}

#[derive(Debug)]
struct Held {
    domain: String,
    /// When it was given, or renewed.
    since: Instant,
}

#[derive(Debug)]
struct Waiting {
    domain: String,
    give: oneshot::Sender<Place>,
}

/// The right to do the work; given back when dropped.
#[derive(Debug)]
#[must_use]
pub struct Place {
    gate: Gate,
    id: u64,
}

/// What a gate says.
#[derive(Debug)]
pub enum Asked {
    /// There was a place.
    Admitted(Place),
    /// It will come here.
    Waits(oneshot::Receiver<Place>),
}

/// How a gate is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Places that are held.
    pub held: usize,
    /// Works that go on after their place was given back.
    pub stuck: usize,
    /// How many wait.
    pub waiting: usize,
}

impl Gate {
    /// A gate that nobody has passed.
    pub fn new(bounds: Bounds) -> Self {
        Self(Arc::new(Shared {
            bounds,
            state: Mutex::default(),
        }))
    }

    /// Asks for a place for work that depends on `domain`.
    pub fn ask(&self, domain: &str) -> Result<Asked, Full> {
        let bounds = &self.0.bounds;
        let mut state = self.lock();
        let waiting = state.waiting.len();
        let same = || (state.waiting.iter()).filter(|other| other.domain == domain);
        // Who waits holds up only those of the same domain, where that has its share.
        if state.has_room(bounds, domain) && same().next().is_none() {
            return Ok(Asked::Admitted(self.hold(&mut state, domain)));
        }
        if bounds.queue != usize::MAX
            && (waiting >= bounds.queue || same().count() >= most_of(bounds.queue))
        {
            metrics::admission_refused(bounds.step);
            return Err(Full {
                step: bounds.step,
                waiting,
                flag: bounds.flag,
            });
        }
        let (give, turn) = oneshot::channel();
        state.waiting.push_back(Waiting {
            domain: domain.to_owned(),
            give,
        });
        Ok(Asked::Waits(turn))
    }

    /// Waits for a place.
    pub async fn enter(&self, domain: &str) -> Result<Place, Full> {
        Ok(match self.ask(domain)? {
            Asked::Admitted(place) => place,
            Asked::Waits(turn) => turn.await.unwrap_or_else(|_| self.never()),
        })
    }

    /// Waits for a place on a lane, of a gate whose queue has no limit.
    pub fn enter_on_lane(&self, domain: &str) -> Result<Place, Full> {
        Ok(match self.ask(domain)? {
            Asked::Admitted(place) => place,
            Asked::Waits(turn) => turn.blocking_recv().unwrap_or_else(|_| self.never()),
        })
    }

    /// The queue is the gate's, and nobody is taken off it without a place.
    fn never(&self) -> ! {
        unreachable!("the gate before {} forgot somebody", self.0.bounds.step)
    }

    /// What who waits is waiting for.
    pub fn describe(&self) -> String {
        let Bounds {
            step, flag, places, ..
        } = self.0.bounds;
        format!("one of {places} places in step {step} ({flag})")
    }

    /// Gives the places back of those that show no sign of life.
    pub fn expire(&self, now: Instant) {
        let patience = self.0.bounds.patience;
        let mut state = self.lock();
        let lives = |held: &Held| now.saturating_duration_since(held.since) < patience;
        let all = std::mem::take(&mut state.held).into_iter();
        let (held, stuck): (BTreeMap<_, _>, BTreeMap<_, _>) =
            all.partition(|(_, held)| lives(held));
        state.held = held;
        if !stuck.is_empty() {
            let stuck = stuck.into_iter().map(|(id, held)| (id, held.domain));
            state.stuck.extend(stuck);
            self.grant(state);
        }
    }

    /// How it is used.
    pub fn usage(&self) -> Usage {
        let state = self.lock();
        Usage {
            held: state.held.len(),
            stuck: state.stuck.len(),
            waiting: state.waiting.len(),
        }
    }

    fn hold(&self, state: &mut State, domain: &str) -> Place {
        state.last += 1;
        let held = Held {
            domain: domain.to_owned(),
            since: Instant::now(),
        };
        state.held.insert(state.last, held);
        Place {
            gate: self.clone(),
            id: state.last,
        }
    }

    /// Gives free places to those that wait, the first that may have one first.
    fn grant(&self, mut state: MutexGuard<'_, State>) {
        // Of those that have gone nobody takes a place.
        state.waiting.retain(|waiting| !waiting.give.is_closed());
        let mut granted = Vec::new();
        while let Some(at) = state.next(&self.0.bounds)
            && let Some(Waiting { domain, give }) = state.waiting.remove(at)
        {
            granted.push((give, self.hold(&mut state, &domain)));
        }
        drop(state);
        for (give, place) in granted {
            // Where its taker went just now, it is dropped, and given back.
            let _ = give.send(place);
        }
    }

    /// No code of others runs under this lock.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn has_room(&self, bounds: &Bounds, domain: &str) -> bool {
        let held = self.held.values().map(|held| &held.domain);
        let stuck = self.stuck.values().filter(|_| bounds.counts_stuck);
        let same = held.chain(stuck).filter(|other| *other == domain);
        self.held.len() < bounds.places && same.count() < bounds.share
    }

    fn next(&self, bounds: &Bounds) -> Option<usize> {
        if self.held.len() >= bounds.places {
            return None;
        }
        // A domain that has its share is looked at once, however many wait of it.
        let mut full: Vec<&str> = Vec::new();
        (self.waiting.iter()).position(|waiting| {
            if full.contains(&waiting.domain.as_str()) {
                return false;
            }
            let room = self.has_room(bounds, &waiting.domain);
            if !room {
                full.push(&waiting.domain);
            }
            room
        })
    }
}

impl Place {
    /// A sign of life: the work is not stuck.
    pub fn renew(&self) {
        if let Some(held) = self.gate.lock().held.get_mut(&self.id) {
            held.since = Instant::now();
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.gate.lock();
        let held = state.held.remove(&self.id).is_some();
        let stuck = state.stuck.remove(&self.id).is_some();
        if held || (stuck && self.gate.0.bounds.counts_stuck) {
            self.gate.grant(state);
        }
    }
}

/// How many volumes of a node may be in a step at once.
#[derive(Clone, Debug, clap::Args)]
pub struct Limits {
    /// At most so many volumes are attached at once, devices that hang not counted; as
    /// many are looked for, and as many inline volumes' records written.
    #[arg(long, env = "URING_CSI_MAX_ATTACHES", default_value_t = 32, value_parser = positive, value_name = "N")]
    pub max_attaches: usize,
    /// At most so many devices are looked into at once.
    #[arg(long, env = "URING_CSI_MAX_PROBES", default_value_t = 32, value_parser = positive, value_name = "N")]
    pub max_probes: usize,
    /// At most so many file systems are mounted at once.
    #[arg(long, env = "URING_CSI_MAX_MOUNTS", default_value_t = 32, value_parser = positive, value_name = "N")]
    pub max_mounts: usize,
    /// At most so many mkfs run at once.
    #[arg(long, env = "URING_CSI_MAX_MKFS", default_value_t = 8, value_parser = positive, value_name = "N")]
    pub max_mkfs: usize,
    /// At most so many fsck run at once: each may take memory as the file system has files.
    #[arg(long, env = "URING_CSI_MAX_FSCK", default_value_t = 4, value_parser = positive, value_name = "N")]
    pub max_fsck: usize,
    /// At most so many cryptsetup run at once; of those that hang, three quarters of that
    /// for each Ceph cluster.
    #[arg(long, env = "URING_CSI_MAX_CRYPTSETUP", default_value_t = 8, value_parser = positive, value_name = "N")]
    pub max_cryptsetup: usize,
    /// At most so many NBD devices are connected anew at once, one for each server.
    #[arg(long, env = "URING_CSI_MAX_RECONNECTS", default_value_t = 32, value_parser = positive, value_name = "N")]
    pub max_reconnects: usize,
    /// At most so many volumes wait to be attached; further calls are refused with
    /// RESOURCE_EXHAUSTED and may be repeated.
    #[arg(long, env = "URING_CSI_MAX_WAITING", default_value_t = 4096, value_parser = positive, value_name = "N")]
    pub max_waiting: usize,
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("it must be 1 at least".to_owned()),
        Ok(number) => Ok(number),
        Err(error) => Err(error.to_string()),
    }
}

/// A place in a step that takes milliseconds, or at a server a second.
const SECONDS: Duration = Duration::from_secs(3);
/// Of a child, which shows signs of life by its own work.
const CHILD: Duration = Duration::from_secs(10);
/// An attempt to connect anew takes no longer.
const RECONNECT: Duration = Duration::from_secs(15);

/// The gates of a node.
#[derive(Clone, Debug)]
pub struct Gates {
    /// Before it is looked what there is of a volume, which asks no device and no pool.
    pub look: Gate,
    /// Before a device is attached; the one that refuses. What has come further is
    /// attached, and waits for what it needs next.
    pub attach: Gate,
    /// Before an inline volume's record is changed.
    pub record: Gate,
    /// Before a device is read.
    pub probe: Gate,
    /// Before a file system is mounted.
    pub mount: Gate,
    /// Before mkfs is run.
    pub mkfs: Gate,
    /// Before fsck is run.
    pub fsck: Gate,
    /// Before cryptsetup is run.
    pub cryptsetup: Gate,
    /// Before a server is connected to anew.
    pub reconnect: Gate,
}

impl Gates {
    /// With these limits.
    pub fn new(limits: &Limits) -> Self {
        let gate =
            |step, flag, places, patience| Gate::new(Bounds::new(step, flag, places, patience));
        // Of one disk, the node's own, whatever the volumes are on.
        let whole = |step| {
            Gate::new(Bounds {
                share: limits.max_attaches,
                ..Bounds::new(step, "--max-attaches", limits.max_attaches, SECONDS)
            })
        };
        Self {
            attach: Gate::new(Bounds {
                queue: limits.max_waiting,
                ..Bounds::new("attach", "--max-attaches", limits.max_attaches, SECONDS)
            }),
            look: whole("look"),
            record: whole("record"),
            probe: gate("probe", "--max-probes", limits.max_probes, SECONDS),
            mount: gate("mount", "--max-mounts", limits.max_mounts, SECONDS),
            mkfs: gate("mkfs", "--max-mkfs", limits.max_mkfs, CHILD),
            fsck: gate("fsck", "--max-fsck", limits.max_fsck, CHILD),
            // One that hangs on its cluster keeps its memory, and that is locked.
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
        }
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
        } = self;
        [
            look, attach, record, probe, mount, mkfs, fsck, cryptsetup, reconnect,
        ]
    }

    /// Gives the places back of those that show no sign of life; to be called every
    /// second or so.
    pub fn expire(&self) {
        let now = Instant::now();
        self.all().iter().for_each(|gate| gate.expire(now));
    }

    /// Tells how they are used.
    pub fn report(&self) {
        for gate in self.all() {
            let Usage {
                held,
                stuck,
                waiting,
            } = gate.usage();
            let Bounds { step, places, .. } = gate.0.bounds;
            metrics::admission(step, places, held, stuck, waiting);
        }
    }
}

#[cfg(test)]
mod tests;
