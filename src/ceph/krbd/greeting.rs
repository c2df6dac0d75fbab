//! The greeting of a monitor, without which the agent asks the driver for no map; see
//! [`super`] for the reason.
//!
//! The agent requests it first and waits for it last, so that it reads the image's features
//! and watchers meanwhile. If that took long, the greeting is stale, and the agent requests
//! another.

use std::time::{Duration, Instant};

use super::{KrbdError, Wanted};
use crate::ceph::client::monitor::{self, MonitorError};

/// The longest time until a monitor greets.
const WITHIN: Duration = Duration::from_secs(10);

/// The age at which a greeting is stale.
const FRESH: Duration = Duration::from_secs(1);

/// A requested greeting.
#[derive(Debug)]
pub struct Greeting {
    addresses: Vec<String>,
    image: String,
    pending: monitor::PendingGreeting,
    at: Instant,
}

impl Greeting {
    /// Requests a greeting from the monitors that the driver would get.
    pub fn ask(wanted: &Wanted<'_>) -> Result<Self, KrbdError> {
        let monitors = wanted.monitors.for_driver(wanted.options)?;
        let addresses: Vec<_> = monitors.addresses.iter().map(ToString::to_string).collect();
        let image = wanted.image.to_string();
        let at = Instant::now();
        match monitor::ask(&addresses, at + WITHIN) {
            Ok(pending) => Ok(Self {
                addresses,
                image,
                pending,
                at,
            }),
            Err(source) => Err(KrbdError::Silent { image, source }),
        }
    }

    /// Waits for the greeting.
    pub(super) fn wait(self) -> Result<(), KrbdError> {
        let Self {
            addresses, image, ..
        } = self;
        let answer = if self.at.elapsed() < FRESH {
            self.pending.answer()
        } else {
            monitor::answers(&addresses, Instant::now() + WITHIN)
        };
        let silent = |source: MonitorError| KrbdError::Silent { image, source };
        answer.map(drop).map_err(silent)
    }
}
