//! The networks that are shut off from a cluster: ranges of addresses in its blocklist.
//!
//! The monitors of Ceph 16.2.11 and newer blocklist ranges. Older ones take a range for one
//! address, so each address of it is blocklisted alone; their list of the blocklist has no
//! part for ranges, by which they are told apart.

use std::{fmt, net::IpAddr, str::FromStr, time::Duration};

use serde::Deserialize;
use serde_json::json;

use super::host_of;
use crate::ceph::client::{CephError, rados::Cluster};

/// How long a network is fenced unless its fence is lifted: five years, as by ceph-csi.
const FENCED_FOR: Duration = Duration::from_secs(157_784_760);
/// The most addresses that are blocklisted one by one.
const MOST_HOSTS: u32 = 4096;

/// A range of IP addresses, in CIDR notation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cidr {
    /// An address of the range, as it was given.
    address: IpAddr,
    /// The number of bits that its addresses have in common.
    prefix: u32,
}

/// The text is no range of addresses.
///
/// Remedy: correct the range in the NetworkFence (`kubectl edit networkfence NAME`).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no range of IP addresses, such as 10.0.0.0/24 or 2001:db8::/64")]
pub struct BadCidr(String);

impl FromStr for Cidr {
    type Err = BadCidr;

    fn from_str(text: &str) -> Result<Self, BadCidr> {
        let parse = || {
            let (address, prefix) = text.split_once('/')?;
            let address: IpAddr = address.parse().ok()?;
            let is_number = prefix.bytes().all(|byte| byte.is_ascii_digit());
            let prefix = prefix.parse().ok().filter(|_| is_number)?;
            (prefix <= bits(address)).then_some(Self { address, prefix })
        };
        parse().ok_or_else(|| BadCidr(text.to_owned()))
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

fn bits(address: IpAddr) -> u32 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => v4.to_bits().into(),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

impl Cidr {
    /// The range of one address.
    pub fn of(address: IpAddr) -> Self {
        let prefix = bits(address);
        Self { address, prefix }
    }

    /// The range in an entry of the blocklist, `10.0.0.0:0/24` or `[2001:db8::]:0/64`.
    fn listed(text: &str) -> Option<Self> {
        let (_, prefix) = text.rsplit_once('/')?;
        let address = host_of(text).trim_matches(['[', ']']);
        format!("{address}/{prefix}").parse().ok()
    }

    /// The bits that the addresses of a range differ in.
    fn free_bits(self) -> u32 {
        bits(self.address) - self.prefix
    }

    /// Its first address, as a number.
    fn first(self) -> u128 {
        let free = self.free_bits();
        let all = number(self.address);
        all.checked_shr(free)
            .unwrap_or_default()
            .checked_shl(free)
            .unwrap_or_default()
    }

    /// Whether both have the same addresses.
    fn is_same(self, other: Self) -> bool {
        let is_same_kind = self.address.is_ipv4() == other.address.is_ipv4();
        is_same_kind && self.prefix == other.prefix && self.first() == other.first()
    }

    /// All its addresses; none where there are more than [`MOST_HOSTS`].
    fn hosts(self) -> Option<Vec<IpAddr>> {
        let count = 1_u32.checked_shl(self.free_bits())?;
        if count > MOST_HOSTS {
            return None;
        }
        let address = |number: u128| match self.address {
            IpAddr::V4(_) => IpAddr::from(u32::try_from(number).unwrap_or_default().to_be_bytes()),
            IpAddr::V6(_) => IpAddr::from(number.to_be_bytes()),
        };
        let all = (0..count).map(|one| address(self.first() + u128::from(one)));
        Some(all.collect())
    }
}

/// Why a network could not be fenced.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    #[error(transparent)]
    Ceph(#[from] CephError),
    /// The monitors are old, and the range is large.
    #[error(
        "{0} has more than {MOST_HOSTS} addresses, and the cluster's monitors fence no ranges; \
         fence smaller ones, or update the cluster"
    )]
    Large(Cidr),
}

/// The fences of a cluster's networks.
#[derive(Clone, Copy, Debug)]
pub struct FencedNetworks<'a>(&'a Cluster);

impl<'a> FencedNetworks<'a> {
    pub fn of(cluster: &'a Cluster) -> Self {
        Self(cluster)
    }

    /// Fences a network, or extends its fence.
    pub fn fence(self, network: Cidr) -> Result<(), NetworkError> {
        if self.blocklist()?.ranges.is_some() {
            return Ok(self.change("add", true, &network.to_string())?);
        }
        let hosts = network.hosts().ok_or(NetworkError::Large(network))?;
        for host in hosts {
            self.change("add", false, &host.to_string())?;
        }
        Ok(())
    }

    /// Lifts the fence of a network, whichever of its addresses it was fenced by. The
    /// fences of nodes stay, which are single clients.
    pub fn unfence(self, network: Cidr) -> Result<(), NetworkError> {
        let Blocklist { ranges, hosts } = self.blocklist()?;
        let has_ranges = ranges.is_some();
        let its = |range: &Cidr| range.is_same(network);
        for range in ranges.into_iter().flatten().filter(its) {
            self.change("rm", true, &range.to_string())?;
        }
        // The monitors may have fenced no ranges when it was fenced.
        let of_network = match network.hosts() {
            Some(of_network) => of_network,
            None if has_ranges => return Ok(()),
            None => return Err(NetworkError::Large(network)),
        };
        for host in hosts.into_iter().filter(|host| of_network.contains(host)) {
            let address = match host {
                IpAddr::V4(host) => format!("{host}:0/0"),
                IpAddr::V6(host) => format!("[{host}]:0/0"),
            };
            self.change("rm", false, &address)?;
        }
        Ok(())
    }

    /// The networks that are fenced.
    pub fn list(self) -> Result<Vec<Cidr>, NetworkError> {
        let Blocklist { ranges, hosts } = self.blocklist()?;
        let hosts = hosts.into_iter().map(Cidr::of);
        Ok(ranges.into_iter().flatten().chain(hosts).collect())
    }

    fn change(self, what: &str, is_range: bool, address: &str) -> Result<(), CephError> {
        let mut command = json!({
            "prefix": "osd blocklist",
            "blocklistop": what,
            "addr": address,
        });
        if is_range {
            command["range"] = json!("range");
        }
        if what == "add" {
            command["expire"] = json!(FENCED_FOR.as_secs_f64());
        }
        self.0.mon_command(&command).map(drop)
    }

    fn blocklist(self) -> Result<Blocklist, CephError> {
        let command = json!({"prefix": "osd blocklist ls", "format": "json"});
        Ok(Blocklist::parse(&self.0.mon_command(&command)?))
    }
}

/// What is blocklisted, apart from single clients.
#[derive(Debug, PartialEq, Eq)]
struct Blocklist {
    /// None where the monitors have no ranges.
    ranges: Option<Vec<Cidr>>,
    /// Addresses of which all clients are.
    hosts: Vec<IpAddr>,
}

#[derive(Deserialize)]
struct BlocklistEntry {
    #[serde(default, alias = "range")]
    addr: String,
}

impl Blocklist {
    /// The monitors write one list after the other.
    fn parse(output: &[u8]) -> Self {
        let mut lists =
            serde_json::Deserializer::from_slice(output).into_iter::<Vec<BlocklistEntry>>();
        let mut next = || lists.next().and_then(Result::ok);
        let singles = next().unwrap_or_default();
        let ranges = next().map(|ranges| {
            let ranges = ranges.iter();
            ranges
                .filter_map(|entry| Cidr::listed(&entry.addr))
                .collect()
        });
        // A client's entry ends with its number instead.
        let hosts = singles.iter().filter(|entry| entry.addr.ends_with(":0/0"));
        let hosts = hosts.filter_map(|entry| {
            let host = host_of(&entry.addr).trim_matches(['[', ']']);
            host.parse().ok()
        });
        Self {
            hosts: hosts.collect(),
            ranges,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ceph::testing::TestPool;

    fn cidr(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    #[test]
    fn ranges_are_parsed_and_compared() {
        assert_eq!(cidr("10.1.2.3/24").to_string(), "10.1.2.3/24");
        assert!(cidr("10.1.2.3/24").is_same(cidr("10.1.2.0/24")));
        assert!(!cidr("10.1.2.3/24").is_same(cidr("10.1.2.0/25")));
        assert!(cidr("0.0.0.0/0").is_same(cidr("1.2.3.4/0")));
        assert!(cidr("::/0").is_same(cidr("2001:db8::1/0")));
        assert!(!cidr("::/0").is_same(cidr("0.0.0.0/0")));
        let hosts = cidr("10.0.0.254/31").hosts().unwrap();
        assert_eq!(
            hosts,
            ["10.0.0.254", "10.0.0.255"].map(|one| one.parse::<IpAddr>().unwrap())
        );
        assert_eq!(cidr("2001:db8::1/128").hosts().unwrap().len(), 1);
        assert_eq!(cidr("10.0.0.0/8").hosts(), None);
        assert_eq!(cidr("::/0").hosts(), None);
        for bad in [
            "",
            "10.0.0.0",
            "10.0.0.0/33",
            "10.0.0.0/+1",
            "a/8",
            "::/129",
            "10.0.0.0/",
        ] {
            let error = bad.parse::<Cidr>().unwrap_err().to_string();
            assert!(error.contains("10.0.0.0/24"), "{error}");
        }
    }

    #[test]
    fn both_forms_of_a_blocklist_are_read() {
        let singles = r#"[{"addr":"10.0.0.5:0/1234","until":"x"},{"addr":"10.0.0.6:0/0"},
            {"addr":"[2001:db8::1]:0/0"}]"#;
        let old = Blocklist::parse(singles.as_bytes());
        assert_eq!(old.ranges, None);
        let hosts = ["10.0.0.6", "2001:db8::1"].map(|one| one.parse::<IpAddr>().unwrap());
        assert_eq!(old.hosts, hosts);
        let ranges = r#"[{"range":"10.1.0.7:0/24","until":"x"},{"range":"[2001:db8::]:0/64"}]"#;
        let new = Blocklist::parse(format!("\n{singles}{ranges}").as_bytes());
        assert_eq!(
            new.ranges.unwrap(),
            [cidr("10.1.0.7/24"), cidr("2001:db8::/64")]
        );
        assert_eq!(Blocklist::parse(b"[][]").ranges, Some(Vec::new()));
    }

    #[test]
    fn a_network_is_fenced_listed_and_unfenced() {
        let Some(pool) = TestPool::new() else {
            return;
        };
        let io = &pool.io;
        // Networks of documentation, which no other test has.
        let networks = FencedNetworks::of(io.cluster());
        for network in ["203.0.113.0/28", "2001:db8:7::/64"].map(cidr) {
            for _ in 0..2 {
                networks.fence(network).unwrap();
            }
            let is_it = |one: &Cidr| one.is_same(network);
            assert_eq!(
                networks
                    .list()
                    .unwrap()
                    .iter()
                    .filter(|one| is_it(one))
                    .count(),
                1
            );
            for _ in 0..2 {
                networks.unfence(network).unwrap();
            }
            assert!(!networks.list().unwrap().iter().any(is_it));
        }
        // Another driver may have named it by another of its addresses.
        networks.fence(cidr("198.51.100.7/28")).unwrap();
        networks.unfence(cidr("198.51.100.0/28")).unwrap();
        assert!(!networks.list().unwrap().contains(&cidr("198.51.100.7/28")));
    }

    #[test]
    fn monitors_without_ranges_fence_each_address() {
        let Some(pool) = TestPool::new() else {
            return;
        };
        let io = &pool.io;
        let networks = FencedNetworks::of(io.cluster());
        for address in ["192.0.2.77", "2001:db8:9::1"] {
            networks.change("add", false, address).unwrap();
            let host = Cidr::of(address.parse().unwrap());
            assert!(networks.list().unwrap().contains(&host));
            // Also if the monitors were updated since.
            networks.unfence(host).unwrap();
            assert!(!networks.list().unwrap().contains(&host));
        }
    }
}
