//! Encoding and decoding of the driver's messages.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use netlink_packet_core::{
    DecodeError, DefaultNla, Emitable, NLA_F_NESTED, NetlinkMessage, NetlinkPayload, Nla as _,
    NlasIterator, Parseable as _, ParseableParametrized,
};
use netlink_packet_generic::{GenlFamily, GenlHeader, GenlMessage};

pub const FAMILY: &str = "nbd";
pub const VERSION: u8 = 1;

pub const CMD_CONNECT: u8 = 1;
pub const CMD_DISCONNECT: u8 = 2;
pub const CMD_RECONFIGURE: u8 = 3;
pub const CMD_LINK_DEAD: u8 = 4;

pub const ATTR_INDEX: u16 = 1;
pub const ATTR_SIZE_BYTES: u16 = 2;
pub const ATTR_BLOCK_SIZE_BYTES: u16 = 3;
pub const ATTR_TIMEOUT: u16 = 4;
pub const ATTR_SERVER_FLAGS: u16 = 5;
pub const ATTR_SOCKETS: u16 = 7;
pub const ATTR_DEAD_CONN_TIMEOUT: u16 = 8;
pub const ATTR_BACKEND_IDENTIFIER: u16 = 10;
pub const SOCK_ITEM: u16 = 1;
pub const SOCK_FD: u16 = 1;

/// A message of the driver's family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub command: u8,
    pub attributes: Vec<DefaultNla>,
}

impl Message {
    pub fn index(&self) -> Option<u32> {
        let index = self.attributes.iter().find(|a| a.kind() == ATTR_INDEX)?;
        let mut bytes = [0; 4];
        (index.value_len() == bytes.len()).then(|| index.emit_value(&mut bytes))?;
        Some(u32::from_ne_bytes(bytes))
    }
}

impl GenlFamily for Message {
    fn family_name() -> &'static str {
        FAMILY
    }

    fn command(&self) -> u8 {
        self.command
    }

    fn version(&self) -> u8 {
        VERSION
    }
}

impl Emitable for Message {
    fn buffer_len(&self) -> usize {
        self.attributes.as_slice().buffer_len()
    }

    fn emit(&self, buffer: &mut [u8]) {
        self.attributes.as_slice().emit(buffer);
    }
}

impl ParseableParametrized<[u8], GenlHeader> for Message {
    fn parse_with_param(buffer: &[u8], header: GenlHeader) -> Result<Self, DecodeError> {
        let attributes = NlasIterator::new(buffer)
            .map(|attribute| DefaultNla::parse(&attribute?))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            command: header.cmd,
            attributes,
        })
    }
}

/// The content of a datagram.
#[derive(Debug)]
pub struct Said<F> {
    /// The last answer in it.
    pub answer: Option<GenlMessage<F>>,
    /// The request was acknowledged: no more messages follow.
    pub end: bool,
}

/// Decodes a datagram of answers to one request. The error is the kernel's refusal, or of
/// the decoding.
pub fn read<F>(mut rest: &[u8]) -> io::Result<Said<F>>
where
    F: GenlFamily + ParseableParametrized<[u8], GenlHeader> + std::fmt::Debug,
{
    let mut said = Said {
        answer: None,
        end: false,
    };
    while !rest.is_empty() && !said.end {
        let message =
            NetlinkMessage::<GenlMessage<F>>::deserialize(rest).map_err(io::Error::other)?;
        match message.payload {
            NetlinkPayload::Error(end) if end.code.is_none() => said.end = true,
            NetlinkPayload::Error(error) => return Err(error.to_io()),
            NetlinkPayload::InnerMessage(inner) => said.answer = Some(inner),
            _ => {}
        }
        // Each message begins at a multiple of four (netlink(7)).
        let length = (message.header.length as usize).next_multiple_of(4).max(4);
        rest = rest.get(length..).unwrap_or_default();
    }
    Ok(said)
}

/// The index of the device that lost a connection, if the datagram announces that.
pub fn announced(bytes: &[u8]) -> Option<u32> {
    match NetlinkMessage::<GenlMessage<Message>>::deserialize(bytes)
        .ok()?
        .payload
    {
        NetlinkPayload::InnerMessage(message) if message.payload.command == CMD_LINK_DEAD => {
            message.payload.index()
        }
        _ => None,
    }
}

pub fn int(kind: u16, value: u32) -> DefaultNla {
    DefaultNla::new(kind, value.to_ne_bytes().to_vec())
}

pub fn long(kind: u16, value: u64) -> DefaultNla {
    DefaultNla::new(kind, value.to_ne_bytes().to_vec())
}

pub fn string(kind: u16, value: &str) -> DefaultNla {
    let mut bytes = value.as_bytes().to_vec();
    bytes.push(0);
    DefaultNla::new(kind, bytes)
}

pub fn nested(kind: u16, attributes: &[DefaultNla]) -> DefaultNla {
    let mut bytes = vec![0; attributes.buffer_len()];
    attributes.emit(&mut bytes);
    DefaultNla::new(kind | NLA_F_NESTED, bytes)
}

pub fn sockets(sockets: &[BorrowedFd<'_>]) -> DefaultNla {
    let items: Vec<_> = sockets
        .iter()
        .map(|socket| {
            let number = socket.as_raw_fd().unsigned_abs();
            nested(SOCK_ITEM, &[int(SOCK_FD, number)])
        })
        .collect();
    nested(ATTR_SOCKETS, &items)
}

#[cfg(test)]
mod tests {
    use netlink_packet_core::{ErrorMessage, NLM_F_REQUEST};
    use proptest::prelude::*;

    use super::*;

    fn bytes_of(command: u8, attributes: Vec<DefaultNla>) -> Vec<u8> {
        let mut message = GenlMessage::from_payload(Message {
            command,
            attributes,
        });
        message.set_resolved_family_id(0x1f);
        let mut message = NetlinkMessage::from(message);
        message.header.flags = NLM_F_REQUEST;
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        bytes
    }

    fn acknowledgement(code: i32) -> Vec<u8> {
        let mut error = ErrorMessage::default();
        error.code = std::num::NonZeroI32::new(code);
        error.header = vec![0; 16];
        let mut message = NetlinkMessage::<GenlMessage<Message>>::new(
            netlink_packet_core::NetlinkHeader::default(),
            NetlinkPayload::Error(error),
        );
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        bytes
    }

    #[test]
    fn a_dead_connection_is_announced_with_its_device() {
        assert_eq!(
            announced(&bytes_of(CMD_LINK_DEAD, vec![int(ATTR_INDEX, 7)])),
            Some(7)
        );
        assert_eq!(
            announced(&bytes_of(CMD_LINK_DEAD, vec![long(ATTR_INDEX, 7)])),
            None
        );
        assert_eq!(announced(&bytes_of(CMD_LINK_DEAD, vec![])), None);
        assert_eq!(
            announced(&bytes_of(CMD_CONNECT, vec![int(ATTR_INDEX, 7)])),
            None
        );
    }

    #[test]
    fn an_answer_ends_with_its_acknowledgement() {
        let answer = bytes_of(CMD_CONNECT, vec![int(ATTR_INDEX, 3)]);
        let said = read::<Message>(&answer).unwrap();
        assert!(!said.end);
        assert_eq!(said.answer.unwrap().payload.index(), Some(3));
        let said = read::<Message>(&[answer, acknowledgement(0)].concat()).unwrap();
        assert!(said.end && said.answer.is_some());
        let refused = read::<Message>(&acknowledgement(-libc::EBUSY)).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EBUSY));
    }

    proptest! {
        #[test]
        fn a_written_message_reads_back(attributes in proptest::collection::vec((1_u16..12, any::<u64>()), 0..8)) {
            let attributes: Vec<_> = attributes.into_iter().map(|(kind, value)| long(kind, value)).collect();
            let said = read::<Message>(&bytes_of(CMD_CONNECT, attributes.clone())).unwrap();
            prop_assert_eq!(said.answer.unwrap().payload.attributes, attributes);
        }

        #[test]
        fn any_datagram_is_survived(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..200),
            whole: bool,
        ) {
            if whole && let Ok(length) = u32::try_from(bytes.len()) && bytes.len() >= 4 {
                bytes[..4].copy_from_slice(&length.to_ne_bytes());
            }
            let _ = announced(&bytes);
            let _ = read::<Message>(&bytes);
        }
    }
}
