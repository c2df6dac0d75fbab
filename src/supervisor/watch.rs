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
    last: Arc<Mutex<Told>>,
}

/// The newest report, and the numbers of the polls: an answer may come after that to a
/// later poll.
#[derive(Debug, Default)]
struct Told {
    asked: u64,
    answered: u64,
    last: Last,
}

#[derive(Debug, Default)]
enum Last {
    #[default]
    NotAsked,
    Said(Vec<Held>),
    /// Why it did not answer.
    Silent(String),
}

/// The trouble of a volume that rbd-nbd serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// No daemon serves it now.
    NoDaemon(String),
    /// If its daemon ends, nothing restarts it.
    Unkept(String),
}

impl Watch {
    /// Starts to poll, on a thread of its own.
    pub fn start(client: Client) -> io::Result<Self> {
        let last = Arc::<Mutex<Told>>::default();
        let (asks, seen) = (client.clone(), Arc::downgrade(&last));
        thread::Builder::new()
            .name("holder".to_owned())
            .spawn(move || {
                while let Some(last) = seen.upgrade() {
                    let client = asks.clone();
                    Self { client, last }.ask();
                    #[expect(clippy::disallowed_methods, reason = "a period")]
                    let _ = crossbeam::channel::after(EVERY).recv();
                }
            })?;
        Ok(Self { client, last })
    }

    /// Polls once. Blocks.
    fn ask(&self) {
        let number = {
            let mut told = self.last();
            told.asked += 1;
            told.asked
        };
        let said = match self.client.list() {
            Ok(volumes) => Last::Said(volumes),
            Err(error) => Last::Silent(error_chain(&error)),
        };
        self.last().answer(number, said);
    }

    fn last(&self) -> MutexGuard<'_, Told> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The volume's trouble at the last poll.
    pub fn trouble(&self, volume_id: &str) -> Option<Trouble> {
        let told = self.last();
        let volumes = match &told.last {
            Last::NotAsked => return None,
            Last::Said(volumes) => volumes,
            Last::Silent(why) => return Some(Trouble::Unkept(why.clone())),
        };
        let Some(held) = volumes.iter().find(|held| held.volume_id == volume_id) else {
            let why = "uring-csi-holder does not know it: stage the volume again";
            return Some(Trouble::Unkept(why.to_owned()));
        };
        match (held.trouble.as_str(), held.pid) {
            ("", _) => None,
            (why, 0) => Some(Trouble::NoDaemon(why.to_owned())),
            (why, _) => Some(Trouble::Unkept(why.to_owned())),
        }
    }

    /// The image of a volume, `POOL/[NAMESPACE/]IMAGE[@SNAPSHOT]`, if the supervisor knew
    /// it at the last poll.
    pub fn image(&self, volume_id: &str) -> Option<String> {
        let told = self.last();
        let Last::Said(volumes) = &told.last else {
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
        self.ask();
        mapped
    }

    /// [`Client::unmap`]. Blocks: for a lane.
    pub fn unmap(&self, volume_id: &str) -> Result<Done, ClientError> {
        self.client.unmap(volume_id)
    }

    /// Makes sure that nothing is mapped for the volume, nor will be by a call under way.
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

impl Told {
    fn answer(&mut self, number: u64, last: Last) {
        if number > self.answered {
            (self.answered, self.last) = (number, last);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_does_not_replace_that_to_a_later_question() {
        let mut told = Told::default();
        told.answer(2, Last::Said(Vec::new()));
        told.answer(1, Last::Silent("away".to_owned()));
        assert!(matches!(told.last, Last::Said(_)));
        told.answer(3, Last::Silent("away".to_owned()));
        assert!(matches!(told.last, Last::Silent(_)));
    }
}
