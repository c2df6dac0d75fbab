//! A cluster's monitors for the driver: numeric addresses, all of one version of the
//! messenger protocol.
//!
//! The driver uses the first version unless `ms_mode` names another. Each version has its
//! own ports; on the other's port the driver retries until its timeout. If the
//! configuration has addresses of the second version only, the agent chooses the mode.
//!
//! Sources: rbd(8), `ms_mode`; net/ceph/ceph_common.c, `ceph_parse_ips`; Ceph's
//! src/mon/MonMap.cc for addresses without a version.

use std::{
    fmt, io,
    net::{SocketAddr, ToSocketAddrs as _},
};

use super::KrbdError;
use crate::ceph::{
    client::monitor::{self, Address, Messenger},
    csi_format::map_options::MapOptions,
};

const V1_PORT: u16 = 6789;
const V2_PORT: u16 = 3300;

/// The value of `ms_mode` for the first version of the protocol.
const LEGACY: &str = "legacy";
/// The mode where only the second version is there: checksums, or encryption where the
/// monitors require it.
const CHOSEN: &str = "prefer-crc";

/// The addresses of a cluster's monitors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Monitors {
    v1: Vec<SocketAddr>,
    v2: Vec<SocketAddr>,
}

/// The addresses and the mode for the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverMonitors<'a> {
    /// All of one version.
    pub addresses: &'a [SocketAddr],
    /// The mode, if one is needed and the volume does not name it.
    pub ms_mode: Option<&'static str>,
}

impl Monitors {
    /// Resolves the names of monitors, in every form that the configuration may have.
    /// Blocks for as long as the resolver does.
    pub fn resolve(monitors: &[String]) -> Result<Self, KrbdError> {
        let mut resolved = Self::default();
        let mut missing = None;
        for address in monitor::addresses(monitors)? {
            if let Err(source) = resolved.add(&address) {
                missing = Some(KrbdError::Lookup {
                    monitor: address.to_string(),
                    source,
                });
            }
        }
        // One known name is enough.
        match missing {
            Some(error) if resolved.v1.is_empty() && resolved.v2.is_empty() => Err(error),
            _ => Ok(resolved),
        }
    }

    fn add(&mut self, address: &Address) -> io::Result<()> {
        let is_v1 = address.messenger != Some(Messenger::V2) && address.port != Some(V2_PORT);
        let is_v2 = address.messenger != Some(Messenger::V1) && address.port != Some(V1_PORT);
        // An address with a version may use the other version's port.
        let is_v1 = is_v1 || address.messenger == Some(Messenger::V1);
        let is_v2 = is_v2 || address.messenger == Some(Messenger::V2);
        for (wanted, list, port) in [
            (is_v1, &mut self.v1, V1_PORT),
            (is_v2, &mut self.v2, V2_PORT),
        ] {
            if wanted {
                let port = address.port.unwrap_or(port);
                for found in (address.host.as_str(), port).to_socket_addrs()? {
                    if !list.contains(&found) {
                        list.push(found);
                    }
                }
            }
        }
        Ok(())
    }

    /// The driver's arguments for a volume with these options.
    pub fn for_driver(&self, options: &MapOptions) -> Result<DriverMonitors<'_>, KrbdError> {
        let (addresses, ms_mode) = match options.get("ms_mode") {
            Some(LEGACY) => (&self.v1, None),
            Some(_) => (&self.v2, None),
            None if self.v1.is_empty() => (&self.v2, Some(CHOSEN)),
            None => (&self.v1, None),
        };
        if addresses.is_empty() {
            let mode = options.get("ms_mode").unwrap_or(LEGACY);
            return Err(KrbdError::WrongVersion {
                mode: mode.to_owned(),
                monitors: self.to_string(),
            });
        }
        Ok(DriverMonitors { addresses, ms_mode })
    }

    /// Whether both are monitors of one cluster: they have one in common.
    pub fn meet(&self, other: &Self) -> bool {
        self.share(&other.v1) || self.share(&other.v2)
    }

    /// Whether one of these addresses is among the monitors'.
    pub fn share(&self, addresses: &[SocketAddr]) -> bool {
        let mut addresses = addresses.iter();
        addresses.any(|address| self.v1.contains(address) || self.v2.contains(address))
    }
}

impl fmt::Display for Monitors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&list(self.v1.iter().chain(&self.v2)))
    }
}

/// The addresses in the driver's format.
pub fn list<'a>(addresses: impl IntoIterator<Item = &'a SocketAddr>) -> String {
    let texts: Vec<_> = addresses.into_iter().map(ToString::to_string).collect();
    texts.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(monitors: &[&str]) -> Monitors {
        let monitors: Vec<_> = monitors.iter().map(|&text| text.to_owned()).collect();
        Monitors::resolve(&monitors).unwrap()
    }

    fn for_driver(monitors: &[&str], options: &str) -> String {
        let (monitors, options) = (resolved(monitors), MapOptions::parse(options).unwrap());
        match monitors.for_driver(&options) {
            Ok(DriverMonitors { addresses, ms_mode }) => {
                format!("{} {}", list(addresses), ms_mode.unwrap_or("-"))
            }
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn each_version_of_the_protocol_has_its_ports() {
        for (monitors, options, given) in [
            (
                &["10.0.0.1:6789", "10.0.0.2:6789"][..],
                "",
                "10.0.0.1:6789,10.0.0.2:6789 -",
            ),
            (&["10.0.0.1"], "", "10.0.0.1:6789 -"),
            (&["10.0.0.1"], "ms_mode=secure", "10.0.0.1:3300 -"),
            (&["10.0.0.1"], "ms_mode=legacy", "10.0.0.1:6789 -"),
            (&["10.0.0.1:3300"], "", "10.0.0.1:3300 prefer-crc"),
            (
                &["[v2:10.0.0.1:3300/0,v1:10.0.0.1:6789/0]"],
                "",
                "10.0.0.1:6789 -",
            ),
            (&["v1:10.0.0.1:3300"], "", "10.0.0.1:3300 -"),
            (&["10.0.0.1:7000"], "ms_mode=crc", "10.0.0.1:7000 -"),
            (&["[fd00::1]:6789"], "", "[fd00::1]:6789 -"),
        ] {
            assert_eq!(
                for_driver(monitors, options),
                given,
                "{monitors:?} {options}"
            );
        }
        let error = for_driver(&["10.0.0.1:6789"], "ms_mode=secure");
        assert!(
            error.contains("secure") && error.contains("3300"),
            "{error}"
        );
    }

    #[test]
    fn a_mapped_devices_monitor_is_recognised_by_either_address() {
        let monitors = resolved(&["10.0.0.1", "10.0.0.2"]);
        assert!(monitors.share(&["10.0.0.2:3300".parse().unwrap()]));
        assert!(!monitors.share(&["10.0.0.2:6790".parse().unwrap()]));
    }
}
