//! Registering rbd-nbd's clients with a volume, for a controller that fences nodes that
//! keep a volume ([`crate::ceph::fencing`]).
//!
//! A daemon may be replaced at any time, and the next one is another client of the
//! cluster. So the supervisor, which starts them, registers them:
//!
//! ```text
//!  is the volume published to this node, as it was?  no ─▶ no daemon
//!  registered as starting ─▶ rbd-nbd ─▶ registered by its address, else killed
//! ```
//!
//! **The daemon's client.** rbd-nbd logs each client id under which it joins the cluster;
//! under one of them it watches the image.
//!
//! The supervisor does not load librados. It runs its program once more for each
//! registration, and only that short-lived child has librados and the key.

use std::{
    io::{self, Read as _},
    process::ExitCode,
    thread,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use uuid::Uuid;
use zeroize::Zeroizing;

use super::{Spec, SupervisorError, error::failed, memory_lock, spec::RegistrationKey};
use crate::{
    ceph::{
        client::{
            CephError, Credentials,
            rados::{Cluster, Timeouts},
            rbd::{self, OpenMode},
        },
        fencing::{
            CephClient, NodeEntry, Process, Published, RegisteredNodes, Starting, Through, host_of,
        },
        krbd::ImageSpec,
    },
    error_chain,
    kernel::{self, exec},
    secret::Secret,
};

/// The supervisor's argument for a child that registers a client.
pub const VERB: &str = "enter";

/// The deadline of the child.
const WITHIN: Duration = Duration::from_secs(20);
/// The deadline of the cluster, to connect and for each answer.
const TIMEOUTS: Timeouts = Timeouts {
    connect: Duration::from_secs(10),
    operation: Duration::from_secs(10),
};

/// What the child registers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum RegistrationStep {
    /// Nothing: a process starts that does not write, if the volume is published.
    Looks,
    /// A daemon that is starting.
    Begins,
    /// The daemon has ended before it served.
    Ended,
    /// A daemon that serves: which of these client ids has the image open.
    Serves(Vec<i64>, Option<Process>),
}

/// Since when this node has the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Lineage {
    /// Its number.
    pub since: Uuid,
    /// A later one that may be registered: the answer was lost.
    pub or: Option<Uuid>,
    /// Nothing is registered under it yet: a stage does that, and earlier registrations do
    /// not matter.
    pub is_new: bool,
}

impl Lineage {
    /// A lineage that starts now.
    pub fn new() -> Self {
        let since = Uuid::new_v4();
        Self {
            since,
            or: None,
            is_new: true,
        }
    }

    /// A lineage that continues no other: earlier ones are unknown.
    pub fn broken() -> Self {
        Self {
            is_new: false,
            ..Self::new()
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Order {
    image: ImageSpec,
    monitors: Vec<String>,
    user: String,
    fencing: RegistrationKey,
    lineage: Lineage,
    step: RegistrationStep,
}

/// The child's answer.
#[derive(Debug, Serialize, Deserialize)]
enum RegistrationAnswer {
    Done,
    /// The image has none of these clients as a watcher.
    NotThere,
    Unpublished,
    Denied,
    Missing,
    Silent(String),
    Failed(String),
}

/// Starts a child that registers the client; blocks, no longer than [`WITHIN`]. False if
/// the daemon is not among the image's watchers yet.
pub(super) fn register(
    spec: &Spec,
    fencing: &RegistrationKey,
    key: &Secret,
    lineage: Lineage,
    step: RegistrationStep,
) -> Result<bool, SupervisorError> {
    let order = Order {
        image: spec.image.clone(),
        monitors: spec.monitors.clone(),
        user: spec.user.clone(),
        fencing: fencing.clone(),
        lineage,
        step,
    };
    let order = serde_json::to_string(&order).expect("strings are JSON");
    // Allocated once: a string that grows leaves copies of the key.
    let mut input = Zeroizing::new(Vec::with_capacity(order.len() + key.reveal().len() + 1));
    input.extend_from_slice(order.as_bytes());
    input.push(b'\n');
    input.extend_from_slice(key.reveal().as_bytes());
    // The running program, although its file may have been replaced.
    let output = exec::run("/proc/self/exe", &[VERB], &[], &input, || {});
    let output = output.map_err(failed("register the client of", &spec.volume_id))?;
    let image = || spec.image.to_string();
    match serde_json::from_slice(&output.stdout) {
        Ok(RegistrationAnswer::Done) => Ok(true),
        Ok(RegistrationAnswer::NotThere) => Ok(false),
        Ok(RegistrationAnswer::Unpublished) => Err(SupervisorError::Unpublished {
            image: image(),
            node: fencing.node_id.clone(),
        }),
        Ok(RegistrationAnswer::Denied) => Err(SupervisorError::Denied {
            image: image(),
            user: spec.user.clone(),
        }),
        Ok(RegistrationAnswer::Missing) => Err(SupervisorError::Missing { image: image() }),
        Ok(RegistrationAnswer::Silent(message)) => Err(SupervisorError::Silent {
            image: image(),
            message,
        }),
        Ok(RegistrationAnswer::Failed(message)) => Err(SupervisorError::NotRegistered {
            image: image(),
            message,
        }),
        Err(_) => {
            let message = String::from_utf8_lossy(&output.stderr);
            let message = format!(
                "the child that registers clients ended by {} and printed {message:?}",
                output.status
            );
            Err(SupervisorError::NotRegistered {
                image: image(),
                message,
            })
        }
    }
}

/// The child's main function: reads the order and the key, and answers.
pub fn child() -> ExitCode {
    // Not every call of librados that waits for an OSD has a deadline.
    thread::spawn(|| {
        #[expect(clippy::disallowed_methods, reason = "a deadline")]
        let _ = crossbeam::channel::after(WITHIN).recv();
        answer(&RegistrationAnswer::Silent(
            "an OSD does not answer".to_owned(),
        ));
    });
    let carried_out = match memory_lock::lock().and_then(|()| read()) {
        Ok((order, key)) => carry_out(order, key).unwrap_or_else(|error| why(&error)),
        Err(error) => RegistrationAnswer::Failed(error_chain(&error)),
    };
    answer(&carried_out)
}

/// Prints the answer and ends the process: of two threads, the first one counts.
fn answer(answer: &RegistrationAnswer) -> ! {
    let text = serde_json::to_string(answer).expect("strings are JSON");
    println!("{text}");
    std::process::exit(0)
}

fn read() -> io::Result<(Order, Secret)> {
    let mut text = Zeroizing::new(String::with_capacity(64 << 10));
    io::stdin().read_to_string(&mut text)?;
    let (order, key) = text.split_once('\n').unwrap_or_default();
    Ok((serde_json::from_str(order)?, Secret::new(key.to_owned())))
}

fn why(error: &CephError) -> RegistrationAnswer {
    let message = error_chain(error);
    if error.is_access_denied() {
        RegistrationAnswer::Denied
    } else if error.is_not_found() {
        RegistrationAnswer::Missing
    } else if error.is_timed_out() || matches!(error, CephError::Monitors(_)) {
        RegistrationAnswer::Silent(message)
    } else {
        RegistrationAnswer::Failed(message)
    }
}

fn carry_out(order: Order, key: Secret) -> Result<RegistrationAnswer, CephError> {
    let boot_id = match kernel::boot_id() {
        Ok(boot_id) => boot_id,
        Err(error) => return Ok(RegistrationAnswer::Failed(error_chain(&error))),
    };
    let credentials = Credentials {
        user: order.user,
        key,
    };
    let cluster = Cluster::connect(&order.monitors, &credentials, TIMEOUTS)?;
    let pool = cluster.ioctx(&order.image.pool, &order.image.namespace)?;
    let entry = match order.step {
        RegistrationStep::Looks => None,
        RegistrationStep::Ended => Some(NodeEntry::default()),
        RegistrationStep::Begins => Some(NodeEntry::from(Starting {
            host: host_of(&cluster.address()?).to_owned(),
            boot_id,
        })),
        RegistrationStep::Serves(clients, process) => {
            let image = rbd::Image::open(&pool, &order.image.name, OpenMode::ReadOnly)?;
            let mut watchers = image.watchers()?.into_iter();
            let Some(its) = watchers.find(|one| clients.contains(&one.client)) else {
                return Ok(RegistrationAnswer::NotThere);
            };
            Some(NodeEntry::from(CephClient {
                address: its.address,
                boot_id,
                through: Through::RbdNbd,
                process,
            }))
        }
    };
    let Lineage { since, or, is_new } = order.lineage;
    let published = if is_new {
        Published::Now
    } else {
        Published::Since(since, or)
    };
    let node = &order.fencing.node_id;
    let nodes = RegisteredNodes::of(&pool, order.fencing.volume);
    let is_published = match entry {
        None => nodes.is_published(node, published)?,
        Some(mut entry) => {
            entry.since = Some(since);
            nodes.attach(node, &entry, published)?
        }
    };
    Ok(if is_published {
        RegistrationAnswer::Done
    } else {
        RegistrationAnswer::Unpublished
    })
}
