//! The supervisor's report on its volumes, polled, for callers that must not wait.

use std::{
    io,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use super::{
    Spec,
    client::{Client, ClientError},
};
use crate::{Done, error_chain, proto::holder::Held, secret::Secret};

/// The time between two polls; the supervisor answers from memory.
const EVERY: Duration = Duration::from_secs(2);

/// The supervisor's client with its last report. Clones share it.
#[derive(Clone, Debug)]
pub struct Watch {
    client: Client,
    last: Arc<Mutex<Polls>>,
}

/// The newest report, and the numbers of the polls: an answer may arrive after that of a
/// later poll.
#[derive(Debug, Default)]
struct Polls {
    sent: u64,
    answered: u64,
    last: Report,
}

#[derive(Debug, Default)]
enum Report {
    #[default]
    None,
    Listed(Vec<Held>),
    /// The error of the poll.
    Failed(String),
}

/// The condition of a volume that rbd-nbd serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DaemonCondition {
    /// No daemon serves it now.
    NotRunning(String),
    /// If its daemon ends, nothing restarts it.
    Unsupervised(String),
}

impl Watch {
    /// Starts to poll, on a thread of its own.
    pub fn start(client: Client) -> io::Result<Self> {
        let last = Arc::<Mutex<Polls>>::default();
        let (poller, polls) = (client.clone(), Arc::downgrade(&last));
        thread::Builder::new()
            .name("holder".to_owned())
            .spawn(move || {
                while let Some(last) = polls.upgrade() {
                    let client = poller.clone();
                    Self { client, last }.poll();
                    #[expect(clippy::disallowed_methods, reason = "a period")]
                    let _ = crossbeam::channel::after(EVERY).recv();
                }
            })?;
        Ok(Self { client, last })
    }

    /// Polls once. Blocks.
    fn poll(&self) {
        let number = {
            let mut polls = self.last();
            polls.sent += 1;
            polls.sent
        };
        let listed = match self.client.list() {
            Ok(volumes) => Report::Listed(volumes),
            Err(error) => Report::Failed(error_chain(&error)),
        };
        self.last().answer(number, listed);
    }

    fn last(&self) -> MutexGuard<'_, Polls> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The volume's condition at the last poll.
    pub fn condition(&self, volume_id: &str) -> Option<DaemonCondition> {
        let polls = self.last();
        let volumes = match &polls.last {
            Report::None => return None,
            Report::Listed(volumes) => volumes,
            Report::Failed(why) => return Some(DaemonCondition::Unsupervised(why.clone())),
        };
        let Some(held) = volumes.iter().find(|held| held.volume_id == volume_id) else {
            let why = "uring-csi-holder has no record of the volume: stage it again";
            return Some(DaemonCondition::Unsupervised(why.to_owned()));
        };
        match (held.trouble.as_str(), held.pid) {
            ("", _) => None,
            (why, 0) => Some(DaemonCondition::NotRunning(why.to_owned())),
            (why, _) => Some(DaemonCondition::Unsupervised(why.to_owned())),
        }
    }

    /// The image of a volume, `POOL/[NAMESPACE/]IMAGE[@SNAPSHOT]`, if the supervisor knew
    /// it at the last poll.
    pub fn image(&self, volume_id: &str) -> Option<String> {
        let polls = self.last();
        let Report::Listed(volumes) = &polls.last else {
            return None;
        };
        let held = volumes.iter().find(|held| held.volume_id == volume_id)?;
        Some(held.image.clone()).filter(|image| !image.is_empty())
    }

    /// Whether it is mapping the volume's image, and there is no device yet. Blocks: for
    /// a lane.
    pub fn is_mapping(&self, volume_id: &str) -> Result<bool, ClientError> {
        let volumes = match self.client.list() {
            Err(ClientError::Unreachable { .. }) => return Ok(false),
            listed => listed?,
        };
        let mut its = volumes.iter().filter(|held| held.volume_id == volume_id);
        Ok(its.any(|held| held.node.is_empty()))
    }

    /// [`Client::map`]. Blocks: for a lane.
    pub fn map(&self, spec: &Spec, key: &Secret) -> Result<(PathBuf, Done), ClientError> {
        let mapped = self.client.map(spec, key);
        self.poll();
        mapped
    }

    /// [`Client::unmap`]. Blocks: for a lane.
    pub fn unmap(&self, volume_id: &str) -> Result<Done, ClientError> {
        self.client.unmap(volume_id)
    }

    /// Ensures that nothing is mapped for the volume, nor will be by a call under way.
    /// Without a supervisor nothing is. Blocks: for a lane.
    pub fn forget(&self, volume_id: &str) -> Result<(), ClientError> {
        match self.unmap(volume_id) {
            Ok(_) | Err(ClientError::Unreachable { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// [`Client::grow`]. Blocks: for a lane.
    pub fn grow(&self, volume_id: &str, bytes: u64) -> Result<u64, ClientError> {
        self.client.grow(volume_id, bytes)
    }
}

impl Polls {
    fn answer(&mut self, number: u64, last: Report) {
        if number > self.answered {
            (self.answered, self.last) = (number, last);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_does_not_replace_that_of_a_later_poll() {
        let mut polls = Polls::default();
        polls.answer(2, Report::Listed(Vec::new()));
        polls.answer(1, Report::Failed("away".to_owned()));
        assert!(matches!(polls.last, Report::Listed(_)));
        polls.answer(3, Report::Failed("away".to_owned()));
        assert!(matches!(polls.last, Report::Failed(_)));
    }
}
