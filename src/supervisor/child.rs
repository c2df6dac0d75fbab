//! Asking the cluster. The supervisor does not load librados: it runs its program once more
//! for each question, and only that short-lived child has librados and the key.

use std::{
    io::{self, Read as _},
    process::ExitCode,
    thread,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use super::{Spec, SupervisorError, error::failed, memory_lock};
use crate::{
    ceph::{
        client::{
            CephError, Credentials,
            rados::{Cluster, IoCtx, Timeouts},
            rbd::{Image, OpenMode, Watcher},
        },
        krbd::ImageSpec,
    },
    error_chain,
    kernel::exec,
    secret::Secret,
};

pub mod dead_clients;
pub mod registration;

use registration::ClientRegistration;

/// The supervisor's argument for such a child.
pub const VERB: &str = "ask-cluster";

/// The deadline of the child.
const WITHIN: Duration = Duration::from_secs(20);
/// The deadline of the cluster, to connect and for each answer.
const TIMEOUTS: Timeouts = Timeouts {
    connect: Duration::from_secs(10),
    operation: Duration::from_secs(10),
};

/// What the child does, and with which image.
#[derive(Debug, Serialize, Deserialize)]
struct Order {
    image: ImageSpec,
    monitors: Vec<String>,
    user: String,
    task: Task,
}

#[derive(Debug, Serialize, Deserialize)]
enum Task {
    /// To register a client of the volume.
    Register(ClientRegistration),
    /// To blocklist those of these client ids that have the image open.
    Blocklist(Vec<i64>),
}

/// The child's answer.
#[derive(Debug, Serialize, Deserialize)]
enum ClusterAnswer {
    Done,
    /// The image has none of these clients as a watcher.
    NotThere,
    Unpublished,
    Denied,
    Missing,
    Silent(String),
    Failed(String),
}

/// Has a child carry out the task; blocks, no longer than [`WITHIN`].
fn ask(spec: &Spec, key: &Secret, task: Task) -> Result<ClusterAnswer, SupervisorError> {
    let order = Order {
        image: spec.image.clone(),
        monitors: spec.monitors.clone(),
        user: spec.user.clone(),
        task,
    };
    if cfg!(test) {
        // The program of the unit tests is not the supervisor's.
        return Ok(carry_out(order, key.clone()).unwrap_or_else(|error| why(&error)));
    }
    let order = serde_json::to_string(&order).expect("strings are JSON");
    // Allocated once: a string that grows leaves copies of the key.
    let mut input = Zeroizing::new(Vec::with_capacity(order.len() + key.reveal().len() + 1));
    input.extend_from_slice(order.as_bytes());
    input.push(b'\n');
    input.extend_from_slice(key.reveal().as_bytes());
    // The running program, although its file may have been replaced.
    let output = exec::run("/proc/self/exe", &[VERB], &[], &input, || {});
    let output = output.map_err(failed("ask the cluster about", &spec.volume_id))?;
    Ok(serde_json::from_slice(&output.stdout).unwrap_or_else(|_| {
        let message = String::from_utf8_lossy(&output.stderr);
        ClusterAnswer::Failed(format!(
            "the child that asks the cluster ended by {} and printed {message:?}",
            output.status
        ))
    }))
}

/// The child's main function: reads the order and the key, and answers.
pub fn main() -> ExitCode {
    // Not every call of librados that waits for an OSD has a deadline.
    thread::spawn(|| {
        #[expect(clippy::disallowed_methods, reason = "a deadline")]
        let _ = crossbeam::channel::after(WITHIN).recv();
        answer(&ClusterAnswer::Silent("an OSD does not answer".to_owned()));
    });
    let carried_out = match memory_lock::lock().and_then(|()| read()) {
        Ok((order, key)) => carry_out(order, key).unwrap_or_else(|error| why(&error)),
        Err(error) => ClusterAnswer::Failed(error_chain(&error)),
    };
    answer(&carried_out)
}

/// Prints the answer and ends the process: of two threads, the first one counts.
fn answer(answer: &ClusterAnswer) -> ! {
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

fn carry_out(order: Order, key: Secret) -> Result<ClusterAnswer, CephError> {
    let credentials = Credentials {
        user: order.user,
        key,
    };
    let cluster = Cluster::connect(&order.monitors, &credentials, TIMEOUTS)?;
    let pool = cluster.ioctx(&order.image.pool, &order.image.namespace)?;
    match order.task {
        Task::Register(registration) => registration.carry_out(&pool, &order.image.name),
        Task::Blocklist(clients) => dead_clients::carry_out(&pool, &order.image.name, &clients),
    }
}

fn why(error: &CephError) -> ClusterAnswer {
    let message = error_chain(error);
    if error.is_access_denied() {
        ClusterAnswer::Denied
    } else if error.is_not_found() {
        ClusterAnswer::Missing
    } else if error.is_timed_out() || matches!(error, CephError::Monitors(_)) {
        ClusterAnswer::Silent(message)
    } else {
        ClusterAnswer::Failed(message)
    }
}

/// Those of the image's watchers that have one of these client ids.
fn watchers_among(pool: &IoCtx, image: &str, clients: &[i64]) -> Result<Vec<Watcher>, CephError> {
    let mut watchers = Image::open(pool, image, OpenMode::ReadOnly)?.watchers()?;
    watchers.retain(|watcher| clients.contains(&watcher.client));
    Ok(watchers)
}
