//! A monitor's greeting, without which the driver is not asked: see [`super`] for
//! why.
//!
//! It is asked for first and waited for last, so that what is to be known of the
//! image is looked at meanwhile. Where that took long, the greeting says nothing
//! any more, and is asked for again.

use std::time::{Duration, Instant};

use super::{KrbdError, Wanted};
use crate::ceph::client::monitor::{self, MonitorError};

/// How long the monitors may take to greet.
const WITHIN: Duration = Duration::from_secs(10);

/// For how long a greeting is one of just now.
const FRESH: Duration = Duration::from_secs(1);

/// A greeting that was asked for.
#[derive(Debug)]
pub struct Greeting {
    addresses: Vec<String>,
    image: String,
    pending: monitor::PendingGreeting,
    at: Instant,
}

impl Greeting {
    /// Asks those monitors that the driver would be given.
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

    /// Waits for it.
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
