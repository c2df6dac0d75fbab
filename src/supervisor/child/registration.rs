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

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{ClusterAnswer, Spec, SupervisorError, Task, ask, watchers_among};
use crate::{
    ceph::{
        client::{CephError, rados::IoCtx},
        fencing::{
            CephClient, NodeEntry, Process, Published, RegisteredNodes, Starting, Through, host_of,
        },
    },
    error_chain, kernel,
    secret::Secret,
    supervisor::RegistrationKey,
};

/// What is registered.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum RegistrationStep {
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
pub struct Lineage {
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

/// A step, and of which volume.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ClientRegistration {
    key: RegistrationKey,
    lineage: Lineage,
    step: RegistrationStep,
}

/// Registers the client; blocks for a while. False if the daemon is not among the image's
/// watchers yet.
pub fn register(
    spec: &Spec,
    fencing: &RegistrationKey,
    key: &Secret,
    lineage: Lineage,
    step: RegistrationStep,
) -> Result<bool, SupervisorError> {
    let registration = ClientRegistration {
        key: fencing.clone(),
        lineage,
        step,
    };
    let image = spec.image.to_string();
    Err(match ask(spec, key, Task::Register(registration))? {
        ClusterAnswer::Done => return Ok(true),
        ClusterAnswer::NotThere => return Ok(false),
        ClusterAnswer::Unpublished => SupervisorError::Unpublished {
            image,
            node: fencing.node_id.clone(),
        },
        ClusterAnswer::Denied => SupervisorError::Denied {
            image,
            user: spec.user.clone(),
        },
        ClusterAnswer::Missing => SupervisorError::Missing { image },
        ClusterAnswer::Silent(message) => SupervisorError::Silent { image, message },
        ClusterAnswer::Failed(message) => SupervisorError::NotRegistered { image, message },
    })
}

impl ClientRegistration {
    pub(super) fn carry_out(self, pool: &IoCtx, image: &str) -> Result<ClusterAnswer, CephError> {
        let boot_id = match kernel::boot_id() {
            Ok(boot_id) => boot_id,
            Err(error) => return Ok(ClusterAnswer::Failed(error_chain(&error))),
        };
        let entry = match self.step {
            RegistrationStep::Looks => None,
            RegistrationStep::Ended => Some(NodeEntry::default()),
            RegistrationStep::Begins => Some(NodeEntry::from(Starting {
                host: host_of(&pool.cluster().address()?).to_owned(),
                boot_id,
            })),
            RegistrationStep::Serves(clients, process) => {
                let mut watchers = watchers_among(pool, image, &clients)?.into_iter();
                let Some(its) = watchers.next() else {
                    return Ok(ClusterAnswer::NotThere);
                };
                Some(NodeEntry::from(CephClient {
                    address: its.address,
                    boot_id,
                    through: Through::RbdNbd,
                    process,
                }))
            }
        };
        let Lineage { since, or, is_new } = self.lineage;
        let published = if is_new {
            Published::Now
        } else {
            Published::Since(since, or)
        };
        let node = &self.key.node_id;
        let nodes = RegisteredNodes::of(pool, self.key.volume);
        let is_published = match entry {
            None => nodes.is_published(node, published)?,
            Some(mut entry) => {
                entry.since = Some(since);
                nodes.attach(node, &entry, published)?
            }
        };
        Ok(if is_published {
            ClusterAnswer::Done
        } else {
            ClusterAnswer::Unpublished
        })
    }
}
