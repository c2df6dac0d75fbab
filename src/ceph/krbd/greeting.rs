//! The greeting of a monitor, without which the agent asks the driver for no map; see
//! [`super`] for the reason.
//!
//! The agent requests it first and waits for it last, so that it reads the image's features
//! and watchers meanwhile. If that took long, the greeting is stale, and the agent requests
//! another.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use super::{KrbdError, Wanted, entered, error::failed};
use crate::{
    ceph::client::monitor::{self, MonitorError},
    kernel::net_namespace::within,
};

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
    /// In which to ask.
    net_namespace: Option<PathBuf>,
}

impl Greeting {
    /// Requests a greeting from the monitors that the driver would get.
    pub fn ask(wanted: &Wanted<'_>) -> Result<Self, KrbdError> {
        let monitors = wanted.monitors.for_driver(wanted.options)?;
        let addresses: Vec<_> = monitors.addresses.iter().map(ToString::to_string).collect();
        let image = wanted.image.to_string();
        let at = Instant::now();
        let net_namespace = wanted.net_namespace;
        // The threads that connect begin here.
        let asked = within(net_namespace, || monitor::ask(&addresses, at + WITHIN));
        match asked.map_err(failed("enter", entered(net_namespace)))? {
            Ok(pending) => Ok(Self {
                addresses,
                image,
                pending,
                at,
                net_namespace: net_namespace.map(Path::to_owned),
            }),
            Err(source) => Err(KrbdError::Silent { image, source }),
        }
    }

    /// Waits for the greeting.
    pub(super) fn wait(self) -> Result<(), KrbdError> {
        let Self {
            addresses,
            image,
            ref net_namespace,
            ..
        } = self;
        let answer = if self.at.elapsed() < FRESH {
            self.pending.answer()
        } else {
            let deadline = Instant::now() + WITHIN;
            let net_namespace = net_namespace.as_deref();
            within(net_namespace, || monitor::answers(&addresses, deadline))
                .map_err(failed("enter", entered(net_namespace)))?
        };
        let silent = |source: MonitorError| KrbdError::Silent { image, source };
        answer.map(drop).map_err(silent)
    }
}
