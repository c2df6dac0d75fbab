//! NBD exports on the kernel's devices: the protocol's handshake (doc/proto.md of NBD)
//! and two messages of generic netlink (include/uapi/linux/nbd-netlink.h).

use std::{
    io::{Read, Write},
    net::TcpStream,
    os::{
        fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
};

use super::BareDevice;
use crate::nbd::Address;

const OPT_GO: u32 = 7;
const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;

const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const CTRL: u16 = 16;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
const CMD_CONNECT: u8 = 1;
const CMD_DISCONNECT: u8 = 2;
const ATTR_INDEX: u16 = 1;
const ATTR_SIZE_BYTES: u16 = 2;
const ATTR_BLOCK_SIZE_BYTES: u16 = 3;
const ATTR_SERVER_FLAGS: u16 = 5;
const ATTR_SOCKETS: u16 = 7;
const SOCK_ITEM: u16 = 1;
const SOCK_FD: u16 = 1;
/// Bytes of a netlink message before its attributes: `nlmsghdr` and `genlmsghdr`.
const HEADERS: usize = 20;

/// An export, and a netlink socket to the driver.
pub struct BareExport {
    address: Address,
    name: String,
    connections: usize,
    netlink: OwnedFd,
    family: u16,
}

impl BareExport {
    /// Each device gets so many connections.
    pub fn new(address: Address, name: &str, connections: usize) -> Self {
        let (kind, protocol) = (libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::NETLINK_GENERIC);
        // SAFETY: takes three numbers.
        let netlink = unsafe { libc::socket(libc::AF_NETLINK, kind, protocol) };
        assert!(netlink >= 0, "no netlink");
        let mut export = Self {
            address,
            name: name.to_owned(),
            connections,
            // SAFETY: it is new, and nobody else's.
            netlink: unsafe { OwnedFd::from_raw_fd(netlink) },
            family: CTRL,
        };
        let name = attribute(CTRL_ATTR_FAMILY_NAME, b"nbd\0");
        let id = export.call(CTRL_CMD_GETFAMILY, &name, CTRL_ATTR_FAMILY_ID);
        export.family = u16::from_ne_bytes(id.try_into().expect("a number"));
        export
    }

    /// Sends a request and receives until it is acknowledged. Returns the attribute
    /// `wanted` of the answer, or nothing.
    fn call(&self, command: u8, attributes: &[u8], wanted: u16) -> Vec<u8> {
        let length = u32::try_from(HEADERS + attributes.len()).expect("a short message");
        let mut message = length.to_ne_bytes().to_vec();
        message.extend(self.family.to_ne_bytes());
        message.extend((NLM_F_REQUEST | NLM_F_ACK).to_ne_bytes());
        message.extend([0; 8]);
        message.extend([command, 1, 0, 0]);
        message.extend(attributes);
        let socket = self.netlink.as_raw_fd();
        // SAFETY: reads as many bytes as there are.
        let sent = unsafe { libc::send(socket, message.as_ptr().cast(), message.len(), 0) };
        assert_eq!(usize::try_from(sent), Ok(message.len()), "netlink");
        let mut found = Vec::new();
        loop {
            let mut answer = [0_u8; 8192];
            let into = answer.as_mut_ptr().cast();
            // SAFETY: writes at most as many bytes as there is room for.
            let received = unsafe { libc::recv(socket, into, answer.len(), 0) };
            let received = usize::try_from(received).expect("an answer");
            let mut rest = &answer[..received];
            while let Some(length) = rest.first_chunk().copied().map(u32::from_ne_bytes) {
                let (message, after) = rest.split_at(length as usize);
                if message[4..6] == NLMSG_ERROR.to_ne_bytes() {
                    assert_eq!(message[16..20], [0; 4], "the driver refuses {command}");
                    return found;
                }
                found = value_of(&message[HEADERS..], wanted);
                rest = after;
            }
        }
    }

    /// A connection in its transmission phase, the export's size and flags.
    fn connect(&self) -> (OwnedFd, u64, u16) {
        match &self.address {
            Address::Unix(path) => {
                let mut stream = UnixStream::connect(path).expect("a server");
                let (bytes, flags) = self.go(&mut stream);
                (stream.into(), bytes, flags)
            }
            Address::Tcp(port) => {
                let mut stream = TcpStream::connect(("127.0.0.1", *port)).expect("a server");
                stream.set_nodelay(true).expect("a TCP socket");
                let (bytes, flags) = self.go(&mut stream);
                (stream.into(), bytes, flags)
            }
        }
    }

    fn go(&self, stream: &mut (impl Read + Write)) -> (u64, u16) {
        stream.read_exact(&mut [0; 18]).expect("a greeting");
        let name_bytes = u32::try_from(self.name.len()).expect("a short name");
        // Fixed newstyle, without zeroes.
        let mut message = 3_u32.to_be_bytes().to_vec();
        message.extend(b"IHAVEOPT");
        message.extend(OPT_GO.to_be_bytes());
        message.extend((name_bytes + 6).to_be_bytes());
        message.extend(name_bytes.to_be_bytes());
        message.extend(self.name.as_bytes());
        message.extend([0; 2]);
        stream.write_all(&message).expect("a server");
        let mut export = None;
        loop {
            let mut header = [0; 20];
            stream.read_exact(&mut header).expect("a reply");
            let number =
                |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().expect("four bytes"));
            let mut payload = vec![0; number(16) as usize];
            stream.read_exact(&mut payload).expect("a reply");
            match (number(12), &payload[..]) {
                (REP_ACK, _) => return export.expect("a size"),
                (REP_INFO, [0, 0, size @ .., high, low]) => {
                    let size = size.try_into().expect("eight bytes");
                    let flags = u16::from_be_bytes([*high, *low]);
                    export = Some((u64::from_be_bytes(size), flags));
                }
                (REP_INFO, _) => {}
                (kind, _) => panic!("the server refuses {}: {kind:#x}", self.name),
            }
        }
    }
}

impl BareDevice for BareExport {
    fn attach(&self) -> PathBuf {
        let connections: Vec<_> = (0..self.connections).map(|_| self.connect()).collect();
        let (_, bytes, flags) = connections[0];
        let socket = |(socket, ..): &(OwnedFd, u64, u16)| {
            let number: RawFd = socket.as_raw_fd();
            attribute(SOCK_ITEM, &attribute(SOCK_FD, &number.to_ne_bytes()))
        };
        let sockets: Vec<u8> = connections.iter().flat_map(socket).collect();
        let attributes = [
            attribute(ATTR_SIZE_BYTES, &bytes.to_ne_bytes()),
            attribute(ATTR_BLOCK_SIZE_BYTES, &512_u64.to_ne_bytes()),
            attribute(ATTR_SERVER_FLAGS, &u64::from(flags).to_ne_bytes()),
            attribute(ATTR_SOCKETS, &sockets),
        ];
        let index = self.call(CMD_CONNECT, &attributes.concat(), ATTR_INDEX);
        let index = u32::from_ne_bytes(index.try_into().expect("a number"));
        PathBuf::from(format!("/dev/nbd{index}"))
    }

    fn detach(&self, node: &Path) {
        let index = node.to_str().and_then(|node| node.strip_prefix("/dev/nbd"));
        let index: u32 = index.expect("a node").parse().expect("a number");
        self.call(
            CMD_DISCONNECT,
            &attribute(ATTR_INDEX, &index.to_ne_bytes()),
            0,
        );
    }
}

/// An attribute, padded. Those that contain others need no flag that says so for the
/// driver.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(4 + value.len()).expect("a short value");
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// The value of the attribute `kind`, or nothing.
fn value_of(mut attributes: &[u8], kind: u16) -> Vec<u8> {
    while let [low, high, kind_low, kind_high, ..] = *attributes {
        let length = usize::from(u16::from_ne_bytes([low, high]));
        if u16::from_ne_bytes([kind_low, kind_high]) == kind {
            return attributes[4..length].to_vec();
        }
        let next = length.next_multiple_of(4).min(attributes.len());
        attributes = &attributes[next..];
    }
    Vec::new()
}
