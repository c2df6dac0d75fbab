//! `backend: nbd`: the parameters of volumes that nodes attach as exports of an
//! NBD server over the pool.

use std::{collections::BTreeMap, ops::RangeInclusive};

use serde::{Deserialize, Serialize};

use super::{ProvisionError, bad};
use crate::nbd::{BadExport, CONNECTIONS, DEAD_SECONDS, Export, REQUEST_SECONDS, Server};

/// The server of the pool, and the options by which nodes attach its exports. For a missing
/// option the node has a default.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExportParameters {
    /// `nbdServer`: as nodes reach it. Every image is an export of its name.
    pub server: Server,
    /// `connections`: for each device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections: Option<u32>,
    /// `requestTimeout`: seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_timeout: Option<u32>,
    /// `deadConnectionTimeout`: seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dead_connection_timeout: Option<u32>,
}

/// The parameters that only volumes of this backend have.
pub const OWN: [&str; 4] = [
    SERVER,
    "connections",
    "requestTimeout",
    "deadConnectionTimeout",
];
/// Those that loop devices have and NBD devices do not.
const OF_LOOP: [&str; 2] = ["directIO", "sectorSize"];
const SERVER: &str = "nbdServer";

impl ExportParameters {
    /// Reads the parameters of this backend, beside others.
    pub fn parse(given: &BTreeMap<&str, &str>) -> Result<Self, ProvisionError> {
        for name in OF_LOOP {
            if let Some(value) = given.get(name) {
                return Err(bad(
                    name,
                    value,
                    "only loop devices have it, NBD devices do not",
                ));
            }
        }
        let server = given.get(SERVER).copied().unwrap_or_default();
        let why = "with backend nbd it says where nodes reach the server of the pool: \
                   host, host:port, nbd://host:port or nbd+unix:///?socket=/path";
        if server.is_empty() {
            return Err(bad(SERVER, server, why));
        }
        let number = |name, range| {
            let value = given.get(name);
            value.map(|value| number(name, value, &range)).transpose()
        };
        Ok(Self {
            server: server.parse().map_err(|error| match error {
                BadExport::Malformed { why, .. } => bad(SERVER, server, why),
                tls @ BadExport::Tls(_) => bad(SERVER, server, &tls.to_string()),
            })?,
            connections: number("connections", CONNECTIONS)?,
            request_timeout: number("requestTimeout", REQUEST_SECONDS)?,
            dead_connection_timeout: number("deadConnectionTimeout", DEAD_SECONDS)?,
        })
    }

    /// The part of the volume context that names an image's export.
    pub fn context(&self, image: &str) -> impl Iterator<Item = (&'static str, String)> {
        let export = Export::new(self.server.clone(), image).expect("an image has a short name");
        let number = |name, number: Option<u32>| number.map(|n| (name, n.to_string()));
        [
            Some(("uri", export.to_string())),
            number("connections", self.connections),
            number("requestTimeout", self.request_timeout),
            number("deadConnectionTimeout", self.dead_connection_timeout),
        ]
        .into_iter()
        .flatten()
    }
}

fn number(
    name: &'static str,
    value: &str,
    range: &RangeInclusive<u32>,
) -> Result<u32, ProvisionError> {
    let number = value.parse().ok().filter(|number| range.contains(number));
    number.ok_or_else(|| {
        let (from, to) = (range.start(), range.end());
        bad(name, value, &format!("it is a number from {from} to {to}"))
    })
}
