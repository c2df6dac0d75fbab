//! The kernel's NBD driver by generic netlink (include/uapi/linux/nbd-netlink.h,
//! drivers/block/nbd.c).
//!
//! The kernel serves the commands of this family, and of most other generic netlink
//! families of the machine, one after the other: every call here may block, and belongs
//! on a lane. Only taking announcements ([`LinkListener::take`]) never blocks.
//!
//! `NBD_CMD_STATUS` is not used: it shows only whether a device is configured, and sysfs
//! shows that and the backend identifier without blocking.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
};

use netlink_packet_core::{
    DefaultNla, Emitable, NLM_F_ACK, NLM_F_REQUEST, NetlinkMessage, ParseableParametrized,
};
use netlink_packet_generic::{
    GenlFamily, GenlHeader, GenlMessage,
    ctrl::{
        GenlCtrl, GenlCtrlCmd,
        nlas::{GenlCtrlAttrs, McastGrpAttrs},
    },
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_GENERIC};

mod message;

pub use message::announced;
use message::{
    ATTR_BACKEND_IDENTIFIER, ATTR_BLOCK_SIZE_BYTES, ATTR_DEAD_CONN_TIMEOUT, ATTR_INDEX,
    ATTR_SERVER_FLAGS, ATTR_SIZE_BYTES, ATTR_TIMEOUT, CMD_CONNECT, CMD_DISCONNECT, CMD_RECONFIGURE,
    FAMILY, Message, int, long, sockets, string,
};

const GROUP: &str = "nbd_mc_group";

/// Bytes of the largest message; a netlink attribute cannot be longer.
const LONGEST: usize = 64 * 1024;

/// Bytes of the longest answer (netlink(7)), without the request that a refusal repeats.
const LONGEST_ANSWER: usize = 8192;

/// The parameters of a new connection of a device to its server.
#[derive(Debug)]
pub struct Connect<'a> {
    /// The device's index, the 7 of `nbd7`; `EBUSY` if that device is in use. Without one
    /// the kernel chooses.
    pub index: Option<u32>,
    /// Its backend identifier, shown in `/sys/block/nbd0/backend`.
    pub identifier: &'a str,
    /// Its size in bytes.
    pub bytes: u64,
    /// Its logical block size: a power of two from 512 to a page.
    pub block_bytes: u32,
    /// The protocol's transmission flags.
    pub flags: u16,
    /// Seconds without an answer to a request after which its connection counts as dead.
    pub request_seconds: u32,
    /// Seconds that requests wait for a live connection before they fail.
    pub dead_seconds: u32,
    /// Sockets in their transmission phase.
    pub sockets: &'a [BorrowedFd<'a>],
}

/// A change of an attached device.
#[derive(Debug)]
pub enum Change<'a> {
    /// These sockets replace dead ones. The driver drops sockets that the device does not
    /// need, and that is success, too.
    Sockets {
        /// Sockets in their transmission phase.
        fresh: &'a [BorrowedFd<'a>],
        /// As [`Connect::dead_seconds`], from now on.
        dead_seconds: u32,
    },
    /// Its size in bytes.
    Bytes(u64),
    /// As [`Connect::dead_seconds`], from now on.
    DeadSeconds(u32),
}

/// A netlink socket to the driver.
#[derive(Debug)]
pub struct Driver {
    socket: Socket,
    family: u16,
    group: u32,
}

impl Driver {
    /// Opens the socket. `NotFound` if the kernel has no NBD driver loaded.
    pub fn open() -> io::Result<Self> {
        let socket = open_socket()?;
        let mut request = NetlinkMessage::from(GenlMessage::from_payload(GenlCtrl {
            cmd: GenlCtrlCmd::GetFamily,
            nlas: vec![GenlCtrlAttrs::FamilyName(FAMILY.to_owned())],
        }));
        request.header.flags = NLM_F_REQUEST | NLM_F_ACK;
        let answer = exchange(&socket, request)?.ok_or_else(|| broken("it names no family"))?;
        let (mut family, mut group) = (None, None);
        for attribute in answer.payload.nlas {
            match attribute {
                GenlCtrlAttrs::FamilyId(id) => family = Some(id),
                GenlCtrlAttrs::McastGroups(groups) => group = group_of(&groups),
                _ => {}
            }
        }
        Ok(Self {
            socket,
            family: family.ok_or_else(|| broken("it names no family"))?,
            group: group.ok_or_else(|| broken("it announces no dead connections"))?,
        })
    }

    /// Attaches a device, and returns its index, the 7 of `nbd7`.
    pub fn connect(&self, connect: &Connect<'_>) -> io::Result<u32> {
        let mut attributes = vec![
            long(ATTR_SIZE_BYTES, connect.bytes),
            long(ATTR_BLOCK_SIZE_BYTES, connect.block_bytes.into()),
            long(ATTR_TIMEOUT, connect.request_seconds.into()),
            long(ATTR_DEAD_CONN_TIMEOUT, connect.dead_seconds.into()),
            long(ATTR_SERVER_FLAGS, connect.flags.into()),
            string(ATTR_BACKEND_IDENTIFIER, connect.identifier),
            sockets(connect.sockets),
        ];
        attributes.extend(connect.index.map(|index| int(ATTR_INDEX, index)));
        let answer = self.call(CMD_CONNECT, attributes)?;
        answer
            .and_then(|message| message.index())
            .ok_or_else(|| broken("it does not name the device that it made"))
    }

    /// Changes an attached device. The driver refuses if the identifier is not the device's.
    pub fn reconfigure(&self, index: u32, identifier: &str, change: &Change<'_>) -> io::Result<()> {
        let mut attributes = vec![
            int(ATTR_INDEX, index),
            string(ATTR_BACKEND_IDENTIFIER, identifier),
        ];
        match *change {
            Change::Sockets {
                fresh,
                dead_seconds,
            } => attributes.extend([
                long(ATTR_DEAD_CONN_TIMEOUT, dead_seconds.into()),
                sockets(fresh),
            ]),
            Change::Bytes(bytes) => attributes.push(long(ATTR_SIZE_BYTES, bytes)),
            Change::DeadSeconds(seconds) => {
                attributes.push(long(ATTR_DEAD_CONN_TIMEOUT, seconds.into()));
            }
        }
        self.call(CMD_RECONFIGURE, attributes).map(drop)
    }

    /// Disconnects the device, even while it is open: the caller has made sure that it has no
    /// openers.
    pub fn disconnect(&self, index: u32) -> io::Result<()> {
        self.call(CMD_DISCONNECT, vec![int(ATTR_INDEX, index)])
            .map(drop)
    }

    /// Subscribes to the announcements of dead connections.
    pub fn listen(&self) -> io::Result<LinkListener> {
        let socket = open_socket()?;
        socket.set_non_blocking(true)?;
        socket.add_membership(self.group)?;
        Ok(LinkListener { socket })
    }

    fn call(&self, command: u8, attributes: Vec<DefaultNla>) -> io::Result<Option<Message>> {
        let mut message = GenlMessage::from_payload(Message {
            command,
            attributes,
        });
        message.set_resolved_family_id(self.family);
        let mut message = NetlinkMessage::from(message);
        message.header.flags = NLM_F_REQUEST | NLM_F_ACK;
        Ok(exchange(&self.socket, message)?.map(|answer| answer.payload))
    }
}

/// The announcements of dead connections.
#[derive(Debug)]
pub struct LinkListener {
    socket: Socket,
}

impl LinkListener {
    /// The index of the next device that lost a connection; `WouldBlock` if there is none,
    /// `ENOBUFS` if announcements were lost.
    pub fn take(&self) -> io::Result<u32> {
        loop {
            let (bytes, _) = self.socket.recv_from_full()?;
            if let Some(index) = message::announced(&bytes) {
                return Ok(index);
            }
        }
    }
}

impl AsFd for LinkListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn open_socket() -> io::Result<Socket> {
    let mut socket = Socket::new(NETLINK_GENERIC)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    Ok(socket)
}

/// Sends a request, and receives messages until it is acknowledged.
fn exchange<F>(
    socket: &Socket,
    mut request: NetlinkMessage<GenlMessage<F>>,
) -> io::Result<Option<GenlMessage<F>>>
where
    F: GenlFamily + Emitable + ParseableParametrized<[u8], GenlHeader> + std::fmt::Debug,
{
    request.finalize();
    let mut bytes = vec![0; request.buffer_len()];
    if bytes.len() > LONGEST {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    request.serialize(&mut bytes);
    socket.send(&bytes, 0)?;
    let mut answer = None;
    let mut bytes = Vec::with_capacity(LONGEST_ANSWER + bytes.len());
    loop {
        bytes.clear();
        socket.recv_from(&mut bytes, 0)?;
        let said = message::read(&bytes)?;
        answer = said.answer.or(answer);
        if said.end {
            return Ok(answer);
        }
    }
}

fn group_of(groups: &[Vec<McastGrpAttrs>]) -> Option<u32> {
    let group = groups.iter().find(|attributes| {
        attributes
            .iter()
            .any(|a| matches!(a, McastGrpAttrs::Name(name) if name == GROUP))
    })?;
    group.iter().find_map(|attribute| match attribute {
        McastGrpAttrs::Id(id) => Some(*id),
        McastGrpAttrs::Name(_) => None,
    })
}

fn broken(why: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("unexpected answer of the kernel's NBD driver: {why}"),
    )
}
