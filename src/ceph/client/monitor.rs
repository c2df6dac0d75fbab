//! Checking that a cluster's monitors answer, without Ceph's libraries.
//!
//! krbd connects under one lock for the whole node, and librados waits for its own timeouts,
//! so neither is called while all monitors are down. A monitor greets each client that
//! connects: `ceph v027` in the first version of the messenger
//! protocol, `ceph v2\n` in the second. One greeting is enough.

use std::{
    collections::HashMap,
    fmt,
    io::{self, Read},
    net::{SocketAddr, TcpStream, ToSocketAddrs},
    sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError, Weak},
    thread,
    time::{Duration, Instant},
};

use crate::kernel::net_namespace;

/// The ports of the second version of the protocol and of the first.
const PORTS: [u16; 2] = [3300, 6789];

/// The greetings, and the length of the shorter.
const GREETINGS: [&[u8]; 2] = [b"ceph v027", b"ceph v2\n"];
const GREETING: usize = 8;

/// A version of the messenger protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Messenger {
    /// The first, without encryption; port 6789.
    V1,
    /// The second, since Ceph 14; port 3300.
    V2,
}

/// One address of a monitor.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// The protocol, if it is given.
    pub messenger: Option<Messenger>,
    /// A name, or a numeric address without brackets.
    pub host: String,
    /// The port, if it is given.
    pub port: Option<u16>,
}

impl Address {
    fn parse(text: &str) -> Option<Self> {
        let (messenger, rest) = match text.split_once(':') {
            Some(("v1", rest)) => (Some(Messenger::V1), rest),
            Some(("v2", rest)) => (Some(Messenger::V2), rest),
            Some(("any", rest)) => (None, rest),
            _ => (None, text),
        };
        // A nonce may follow.
        let rest = rest.split_once('/').map_or(rest, |(address, _)| address);
        let (host, port) = match rest.strip_prefix('[') {
            Some(inner) => {
                let (host, rest) = inner.split_once(']')?;
                (host, rest.strip_prefix(':'))
            }
            // More than one colon: a bare IPv6 address.
            None if rest.matches(':').count() > 1 => (rest, None),
            None => match rest.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (rest, None),
            },
        };
        let port = port.map(str::parse).transpose().ok()?;
        (!host.is_empty()).then(|| Self {
            messenger,
            host: host.to_owned(),
            port,
        })
    }

    /// The ports to try: the given one, else that of the given protocol, else both.
    pub fn ports(&self) -> Vec<u16> {
        match (self.port, self.messenger) {
            (Some(port), _) => vec![port],
            (None, Some(Messenger::V2)) => vec![PORTS[0]],
            (None, Some(Messenger::V1)) => vec![PORTS[1]],
            (None, None) => PORTS.to_vec(),
        }
    }
}

impl fmt::Display for Address {
    /// `host:port`, with brackets around an IPv6 address.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]", self.host)?;
        } else {
            f.write_str(&self.host)?;
        }
        self.port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

/// The addresses in a list of monitors as `mon_host` takes it: `host:port`, or
/// all addresses of one monitor as `[v2:host:3300/0,v1:host:6789/0]`; each entry
/// holds one or more, separated by commas, semicolons or spaces.
pub fn addresses(monitors: &[String]) -> Result<Vec<Address>, MonitorError> {
    let parts = monitors
        .iter()
        .flat_map(|entry| entry.split([',', ';', ' ']));
    let texts = parts.map(bare).filter(|text| !text.is_empty());
    texts
        .map(|text| Address::parse(text).ok_or_else(|| MonitorError::NoAddress(text.to_owned())))
        .collect()
}

/// Removes the brackets around the addresses of one monitor, and keeps those of an IPv6
/// address.
fn bare(part: &str) -> &str {
    let part = match part.strip_prefix('[') {
        Some(inner) if inner.starts_with("v1:") || inner.starts_with("v2:") => inner,
        _ => part,
    };
    let closes_more = part.matches(']').count() > part.matches('[').count();
    match part.strip_suffix(']') {
        Some(inner) if closes_more => inner,
        _ => part,
    }
}

/// Why no monitor can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MonitorError {
    /// An entry of the list is no address.
    #[error("{0:?} is not the address of a monitor; use host:port")]
    NoAddress(String),
    /// The list is empty.
    ///
    /// Remedy: add the cluster's monitors to the file of --ceph-config: `ceph mon dump`.
    #[error("the list of monitors is empty")]
    Empty,
    /// No monitor greets; each address with its error.
    ///
    /// Remedy: repair the monitors or the network to them: `ceph -s`; `ceph mon dump` shows their
    /// addresses.
    #[error("no monitor answers ({0})")]
    Unanswered(String),
}

/// Waits until one of the monitors greets, and returns its address: [`ask`], then
/// [`PendingGreeting::answer`].
pub fn answers(monitors: &[String], deadline: Instant) -> Result<SocketAddr, MonitorError> {
    ask(monitors, deadline)?.answer()
}

/// How long callers of the same monitors share one request.
const SHARED_FOR: Duration = Duration::from_secs(1);

/// The requests under way, by their network namespaces and lists of monitors.
static UNDER_WAY: LazyLock<Mutex<RequestsUnderWay>> = LazyLock::new(Mutex::default);

type RequestsUnderWay = HashMap<(Option<u64>, Vec<String>), Weak<GreetingRequest>>;

/// A request to all monitors of a list, to greet.
#[derive(Debug)]
struct GreetingRequest {
    begun: Instant,
    deadline: Instant,
    answers: Mutex<Answers>,
    changed: Condvar,
}

#[derive(Debug)]
struct Answers {
    /// Each address with the reason that it has not greeted.
    tried: Vec<(Address, String)>,
    /// The number of addresses without a result yet.
    open: usize,
    greeted: Option<SocketAddr>,
}

/// One caller's part in a [`GreetingRequest`], with a deadline of its own.
#[derive(Debug)]
pub struct PendingGreeting {
    request: Arc<GreetingRequest>,
    deadline: Instant,
}

/// Asks all of the monitors at once, without waiting for their answers. Threads resolve the
/// names and connect, and end by themselves soon after `deadline`.
///
/// Callers that ask the same monitors within a second share one request and its threads,
/// unless the request has failed already.
pub fn ask(monitors: &[String], deadline: Instant) -> Result<PendingGreeting, MonitorError> {
    ask_within(SHARED_FOR, monitors, deadline)
}

fn ask_within(
    shared_for: Duration,
    monitors: &[String],
    deadline: Instant,
) -> Result<PendingGreeting, MonitorError> {
    let of = (net_namespace::current().ok(), monitors.to_vec());
    let mut under_way = lock(&UNDER_WAY);
    under_way.retain(|_, request| request.strong_count() > 0);
    let shared = under_way.get(&of).and_then(Weak::upgrade);
    let shared = shared.filter(|request| request.is_shareable(shared_for, deadline));
    let request = if let Some(request) = shared {
        request
    } else {
        let request = GreetingRequest::begin(monitors, deadline)?;
        under_way.insert(of, Arc::downgrade(&request));
        request
    };
    Ok(PendingGreeting { request, deadline })
}

impl GreetingRequest {
    fn begin(monitors: &[String], deadline: Instant) -> Result<Arc<Self>, MonitorError> {
        let mut tried = Vec::new();
        for address in addresses(monitors)? {
            for port in address.ports() {
                let shown = Address {
                    port: Some(port),
                    ..address.clone()
                };
                tried.push((shown, port, address.host.clone()));
            }
        }
        if tried.is_empty() {
            return Err(MonitorError::Empty);
        }
        let unanswered = |(shown, ..): &(Address, u16, String)| {
            let why = "no answer in time".to_owned();
            (shown.clone(), why)
        };
        let request = Arc::new(Self {
            begun: Instant::now(),
            deadline,
            answers: Mutex::new(Answers {
                tried: tried.iter().map(unanswered).collect(),
                open: tried.len(),
                greeted: None,
            }),
            changed: Condvar::new(),
        });
        for (nr, (_, port, host)) in tried.into_iter().enumerate() {
            let shared = Arc::clone(&request);
            let attempt = move || shared.record(nr, host_greeting(&host, port, deadline));
            let begun = thread::Builder::new()
                .name("ceph-monitor".into())
                .spawn(attempt);
            if let Err(error) = begun {
                request.record(nr, Err(error));
            }
        }
        Ok(request)
    }

    /// Whether a caller with this deadline may share it: it is recent, and has not failed.
    fn is_shareable(&self, shared_for: Duration, deadline: Instant) -> bool {
        let answers = lock(&self.answers);
        let failed = answers.greeted.is_none() && answers.open == 0;
        !failed && self.begun.elapsed() < shared_for && self.deadline + shared_for >= deadline
    }

    fn record(&self, nr: usize, result: io::Result<SocketAddr>) {
        let mut answers = lock(&self.answers);
        answers.open -= 1;
        match result {
            Ok(address) => answers.greeted = Some(address),
            Err(error) => answers.tried[nr].1 = error.to_string(),
        }
        drop(answers);
        self.changed.notify_all();
    }
}

impl PendingGreeting {
    /// Waits for the first monitor that greets, at most until the deadline, and returns its
    /// address.
    pub fn answer(self) -> Result<SocketAddr, MonitorError> {
        let waits = |answers: &mut Answers| answers.greeted.is_none() && answers.open > 0;
        let request = &self.request;
        let (answers, _) = request
            .changed
            .wait_timeout_while(lock(&request.answers), remaining(self.deadline), waits)
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(address) = answers.greeted {
            return Ok(address);
        }
        let each = answers.tried.iter();
        let each = each.map(|(address, why)| format!("{address}: {why}"));
        Err(MonitorError::Unanswered(
            each.collect::<Vec<_>>().join("; "),
        ))
    }
}

/// No code that could panic runs under these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn remaining(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// Connects to the host's addresses in turn until one greets, and returns that one.
fn host_greeting(host: &str, port: u16, deadline: Instant) -> io::Result<SocketAddr> {
    let mut last = io::Error::other("the name has no address");
    for address in (host, port).to_socket_addrs()? {
        match read_greeting(address, deadline) {
            Ok(()) => return Ok(address),
            Err(e) => last = e,
        }
    }
    Err(last)
}

fn read_greeting(address: SocketAddr, deadline: Instant) -> io::Result<()> {
    // Zero would mean no timeout.
    let left = || remaining(deadline).max(Duration::from_millis(1));
    let mut stream = TcpStream::connect_timeout(&address, left())?;
    stream.set_read_timeout(Some(left()))?;
    let mut received = [0; GREETING];
    stream.read_exact(&mut received)?;
    if GREETINGS
        .iter()
        .any(|greeting| greeting.starts_with(&received))
    {
        Ok(())
    } else {
        Err(io::Error::other("the server there is not a monitor"))
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        net::{Ipv4Addr, TcpListener},
    };

    use proptest::prelude::*;

    use super::*;

    /// A server that sends `greeting` to its first client, and its address.
    fn server(greeting: &'static [u8]) -> (String, thread::JoinHandle<()>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let serve = move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(greeting).unwrap();
        };
        (address, thread::spawn(serve))
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn one_monitor_that_greets_is_enough() {
        // A listener that accepts connections and sends nothing.
        let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let silent = silent
            .local_addr()
            .map(|address| (silent, address))
            .unwrap();
        for greeting in GREETINGS {
            let (address, thread) = server(greeting);
            let list = [silent.1.to_string(), format!("v2:{address}/0")];
            assert_eq!(answers(&list, soon()), Ok(address.parse().unwrap()));
            thread.join().unwrap();
        }
    }

    #[test]
    fn each_failed_monitor_is_named_with_its_error() {
        let (other, thread) = server(b"SSH-2.0-other");
        let gone = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .unwrap()
            .local_addr()
            .unwrap();
        let error = answers(&[other.clone(), gone.to_string()], soon()).unwrap_err();
        thread.join().unwrap();
        let error = error.to_string();
        assert!(
            error.contains(&format!("{other}: the server there is not a monitor")),
            "{error}"
        );
        assert!(
            error.contains(&format!("{gone}: Connection refused")),
            "{error}"
        );
        assert_eq!(answers(&[], soon()), Err(MonitorError::Empty));
    }

    #[test]
    fn a_silent_monitor_costs_the_deadline_and_no_more() {
        let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let list = [silent.local_addr().unwrap().to_string()];
        let deadline = Instant::now() + Duration::from_millis(50);
        assert!(answers(&list, deadline).is_err());
        assert!(Instant::now() >= deadline);
    }

    #[test]
    fn concurrent_callers_share_one_greeting_and_no_refusal() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let list = [address.to_string()];
        let hour = Duration::from_secs(3600);
        let pending: Vec<_> = (0..100)
            .map(|_| ask_within(hour, &list, soon()).unwrap())
            .collect();
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(GREETINGS[0]).unwrap();
        // A later caller shares the request, too.
        let late = ask_within(hour, &list, soon()).unwrap();
        for pending in pending.into_iter().chain([late]) {
            assert_eq!(pending.answer(), Ok(address));
        }
        listener.set_nonblocking(true).unwrap();
        assert!(
            listener.accept().is_err(),
            "the monitor got another request"
        );
        drop((stream, listener));

        let refused = ask_within(Duration::ZERO, &list, soon()).unwrap();
        let kept = Arc::clone(&refused.request);
        refused.answer().unwrap_err();
        let listener = TcpListener::bind(address).unwrap();
        let again = ask_within(hour, &list, soon()).unwrap();
        assert!(!Arc::ptr_eq(&kept, &again.request));
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(GREETINGS[0]).unwrap();
        assert_eq!(again.answer(), Ok(address));
    }

    #[test]
    fn every_spelling_of_an_address_is_read() {
        use Messenger::{V1, V2};
        let read = |list: &[&str]| {
            let list: Vec<_> = list.iter().map(ToString::to_string).collect();
            let found = addresses(&list).unwrap().into_iter();
            found
                .map(|a| (a.messenger, a.to_string(), a.ports()))
                .collect::<Vec<_>>()
        };
        let one = |messenger, shown: &str, ports: &[u16]| {
            vec![(messenger, shown.to_owned(), ports.to_vec())]
        };
        assert_eq!(
            read(&["10.0.0.1:6789"]),
            one(None, "10.0.0.1:6789", &[6789])
        );
        assert_eq!(read(&["mon-a"]), one(None, "mon-a", &[3300, 6789]));
        assert_eq!(read(&["[::1]:3300"]), one(None, "[::1]:3300", &[3300]));
        assert_eq!(read(&["fd00::1"]), one(None, "[fd00::1]", &[3300, 6789]));
        assert_eq!(read(&["v1:h"]), one(Some(V1), "h", &[6789]));
        for both in [
            "[v2:[::1]:3300/0,v1:[::1]:6789/0]",
            "v2:[::1]:3300/0;v1:[::1]:6789/0",
        ] {
            let first = one(Some(V2), "[::1]:3300", &[3300]);
            let second = one(Some(V1), "[::1]:6789", &[6789]);
            assert_eq!(read(&[both]), [first, second].concat());
        }
        assert_eq!(read(&["a:1, b:2", "c:3"]).len(), 3);
        for bad in ["a:b", ":6789", "[::1", "h:70000"] {
            assert!(addresses(&[bad.to_owned()]).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "\\PC{0,40}") {
            if let Ok(found) = addresses(&[text]) {
                for address in found {
                    prop_assert!(!address.host.is_empty());
                }
            }
        }
    }
}
