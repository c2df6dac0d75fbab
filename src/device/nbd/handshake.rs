//! The client's half of NBD's fixed newstyle handshake (the NBD project's
//! doc/proto.md, "Newstyle negotiation", `NBD_OPT_GO`).
//!
//! ```text
//! server  NBDMAGIC IHAVEOPT flags:16
//! client  flags:32
//! client  IHAVEOPT option:32 length:32  name-length:32 name  requests:16 [info:16 …]
//! server  reply-magic option:32 type:32 length:32 payload      any number, until
//! server  … type ACK, or an error with a message
//! ```
//!
//! All numbers are big-endian. After the server has acknowledged `NBD_OPT_GO` the stream
//! is in its transmission phase and belongs to the kernel, so the client reads not one
//! byte beyond the handshake. It never requests structured replies, TLS or metadata
//! contexts: the kernel's driver supports none of them.

use std::io::{self, Read, Write};

const NBDMAGIC: [u8; 8] = *b"NBDMAGIC";
const IHAVEOPT: [u8; 8] = *b"IHAVEOPT";
/// The magic number that oldstyle servers send in place of `IHAVEOPT`.
const OLDSTYLE: [u8; 8] = 0x0000_4202_8186_1253_u64.to_be_bytes();
const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

const FIXED_NEWSTYLE: u16 = 1;
const NO_ZEROES: u16 = 2;

const OPT_ABORT: u32 = 2;
const OPT_INFO: u32 = 6;
const OPT_GO: u32 = 7;

const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const REP_ERROR: u32 = 1 << 31;
const ERR_UNSUP: u32 = REP_ERROR | 1;
const ERR_POLICY: u32 = REP_ERROR | 2;
const ERR_TLS_REQD: u32 = REP_ERROR | 5;
const ERR_UNKNOWN: u32 = REP_ERROR | 6;
const ERR_SHUTDOWN: u32 = REP_ERROR | 7;

/// The maximum length of a reply in bytes: the protocol's limit on a string, and room for
/// the fields around it.
const LONGEST_REPLY: u32 = 8192;

/// The maximum number of replies to one option.
const MOST_REPLIES: u32 = 64;

/// The server's transmission flags (doc/proto.md), which the kernel needs.
pub mod flags {
    /// The flags that the kernel's driver acts on (include/uapi/linux/nbd.h): that there
    /// are flags, read-only, flush, FUA, rotational, trim, zeroes, several connections.
    /// It gets no other.
    pub const DRIVERS: u16 =
        1 | READ_ONLY | FLUSH | FUA | 1 << 4 | 1 << 5 | WRITE_ZEROES | CAN_MULTI_CONN;
    /// The export cannot be written.
    pub const READ_ONLY: u16 = 1 << 1;
    /// The server supports `NBD_CMD_FLUSH`.
    pub const FLUSH: u16 = 1 << 2;
    /// The server supports `NBD_CMD_FLAG_FUA`.
    pub const FUA: u16 = 1 << 3;
    /// The server supports `NBD_CMD_WRITE_ZEROES`.
    pub const WRITE_ZEROES: u16 = 1 << 6;
    /// All connections see, and flush, the writes of each.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
}

/// The server's announcement of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// Its size in bytes.
    pub bytes: u64,
    /// Its transmission flags, see [`flags`].
    pub flags: u16,
    /// The minimum block size of requests in bytes; 1 where the server accepts any.
    pub minimum_block: u32,
    /// The most bytes of one read or write.
    pub maximum_block: u32,
}

/// Why the handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The server has no such export.
    ///
    /// Remedy: correct the volume's export, or add it on the server: `nbdinfo --list nbd://SERVER`.
    #[error("the server has no export {name:?}{}", ServerMessage(message))]
    NoExport {
        /// The requested name.
        name: String,
        /// The server's message; may be empty.
        message: String,
    },
    /// The server insists on TLS.
    #[error(
        "the server insists on TLS{}, which the kernel's NBD driver does not support; run nbdkit as a TLS client on each node (docs/nbd.md), or serve the export without TLS, over a network that you trust",
        ServerMessage(message)
    )]
    NeedsTls {
        /// The server's message; may be empty.
        message: String,
    },
    /// The server does not serve this client.
    ///
    /// Remedy: let this node use the export, on the server.
    #[error("the server refuses{}", ServerMessage(message))]
    Policy {
        /// The server's message; may be empty.
        message: String,
    },
    /// The server is shutting down.
    ///
    /// Remedy: start the server again; the call is repeated.
    #[error("the server is shutting down{}", ServerMessage(message))]
    ShuttingDown {
        /// The server's message; may be empty.
        message: String,
    },
    /// Any other error of the protocol.
    ///
    /// Remedy: read the server's log.
    #[error("the server answers error {:#x}{}", code, ServerMessage(message))]
    Refused {
        /// `NBD_REP_ERR_…`.
        code: u32,
        /// The server's message; may be empty.
        message: String,
    },
    /// The server has no NBD_OPT_GO: it is older than 2016.
    #[error(
        "the server does not know NBD_OPT_GO; use a newer one (nbdkit, qemu-nbd and nbd-server have it since 2018)"
    )]
    TooOld,
    /// The peer is no NBD server, or a broken one.
    ///
    /// Remedy: correct address and port: `nbdinfo nbd://SERVER` must answer.
    #[error("the peer does not speak NBD: {0}")]
    Malformed(&'static str),
    /// The connection failed, or the timeout expired.
    ///
    /// Remedy: read the server's log, and repair the network; `nbdinfo nbd://SERVER` tries it.
    #[error("the handshake failed")]
    Io(#[from] io::Error),
}

struct ServerMessage<'a>(&'a str);

impl std::fmt::Display for ServerMessage<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_empty() {
            return Ok(());
        }
        write!(f, ": {:?}", self.0)
    }
}

type Result<T> = std::result::Result<T, HandshakeError>;

/// Enters the transmission phase of the export `name` (`NBD_OPT_GO`). After it the
/// stream belongs to the kernel.
pub fn go<S: Read + Write>(stream: &mut S, name: &str) -> Result<ExportInfo> {
    receive_greeting(stream)?;
    negotiate(stream, OPT_GO, name)
}

/// Queries the export `name` (`NBD_OPT_INFO`) and ends the session (`NBD_OPT_ABORT`).
pub fn query<S: Read + Write>(stream: &mut S, name: &str) -> Result<ExportInfo> {
    receive_greeting(stream)?;
    let info = negotiate(stream, OPT_INFO, name)?;
    // A courtesy: the answer is complete, whether or not the server still listens.
    let _ = option(stream, OPT_ABORT, &[]);
    Ok(info)
}

fn receive_greeting<S: Read + Write>(stream: &mut S) -> Result<()> {
    let mut greeting = FieldReader::new(take::<18>(stream)?);
    let (magic, style) = (greeting.next()?, greeting.next()?);
    let flags = u16::from_be_bytes(greeting.next()?);
    match (magic, style) {
        (NBDMAGIC, IHAVEOPT) => {}
        (NBDMAGIC, OLDSTYLE) => return Err(HandshakeError::TooOld),
        _ => return Err(HandshakeError::Malformed("no NBD greeting")),
    }
    if flags & FIXED_NEWSTYLE == 0 {
        return Err(HandshakeError::TooOld);
    }
    let answer = u32::from(flags & (FIXED_NEWSTYLE | NO_ZEROES));
    stream.write_all(&answer.to_be_bytes())?;
    Ok(())
}

fn option<S: Write>(stream: &mut S, option: u32, data: &[u8]) -> Result<()> {
    let mut message = Vec::with_capacity(16 + data.len());
    message.extend(IHAVEOPT);
    message.extend(option.to_be_bytes());
    message.extend(length(data)?.to_be_bytes());
    message.extend(data);
    stream.write_all(&message)?;
    Ok(())
}

fn negotiate<S: Read + Write>(stream: &mut S, what: u32, name: &str) -> Result<ExportInfo> {
    let mut data = Vec::with_capacity(8 + name.len());
    data.extend(length(name.as_bytes())?.to_be_bytes());
    data.extend(name.as_bytes());
    data.extend(1_u16.to_be_bytes());
    data.extend(INFO_BLOCK_SIZE.to_be_bytes());
    option(stream, what, &data)?;
    let mut export = None;
    let mut blocks = None;
    for _ in 0..MOST_REPLIES {
        let (kind, payload) = reply(stream, what)?;
        match kind {
            REP_ACK => {
                let (bytes, flags) = export.ok_or(HandshakeError::Malformed(
                    "an acknowledgement before the export's size",
                ))?;
                // The protocol's own defaults (doc/proto.md, "Block size
                // constraints").
                let (minimum_block, maximum_block) = blocks.unwrap_or((512, 32 << 20));
                return Ok(ExportInfo {
                    bytes,
                    flags,
                    minimum_block,
                    maximum_block,
                });
            }
            REP_INFO => match parse_info(&payload)? {
                InfoReply::Export { bytes, flags } => export = Some((bytes, flags)),
                InfoReply::Blocks { minimum, maximum } => blocks = Some((minimum, maximum)),
                InfoReply::Other => {}
            },
            kind if kind & REP_ERROR != 0 => return Err(refusal(kind, name, &payload)),
            _ => return Err(HandshakeError::Malformed("a reply to another option")),
        }
    }
    Err(HandshakeError::Malformed("too many replies to one option"))
}

fn reply<S: Read>(stream: &mut S, to: u32) -> Result<(u32, Vec<u8>)> {
    let mut header = FieldReader::new(take::<20>(stream)?);
    let magic = u64::from_be_bytes(header.next()?);
    let option = u32::from_be_bytes(header.next()?);
    let kind = u32::from_be_bytes(header.next()?);
    let length = u32::from_be_bytes(header.next()?);
    if magic != REPLY_MAGIC {
        return Err(HandshakeError::Malformed(
            "a reply without its magic number",
        ));
    }
    if option != to {
        return Err(HandshakeError::Malformed("a reply to another option"));
    }
    if length > LONGEST_REPLY {
        return Err(HandshakeError::Malformed("a reply that is too long"));
    }
    let mut payload = vec![0; length as usize];
    stream.read_exact(&mut payload)?;
    Ok((kind, payload))
}

#[derive(Debug, PartialEq, Eq)]
enum InfoReply {
    Export { bytes: u64, flags: u16 },
    Blocks { minimum: u32, maximum: u32 },
    Other,
}

/// The payload of `NBD_REP_INFO`. Servers may send types that were not requested.
fn parse_info(payload: &[u8]) -> Result<InfoReply> {
    let mut fields = FieldReader::new(payload);
    match u16::from_be_bytes(fields.next()?) {
        INFO_EXPORT => {
            let bytes = u64::from_be_bytes(fields.next()?);
            let flags = u16::from_be_bytes(fields.next()?);
            fields.end()?;
            if i64::try_from(bytes).is_err() {
                return Err(HandshakeError::Malformed("an export of 2^63 bytes or more"));
            }
            Ok(InfoReply::Export { bytes, flags })
        }
        INFO_BLOCK_SIZE => {
            let minimum = u32::from_be_bytes(fields.next()?);
            let _preferred: [u8; 4] = fields.next()?;
            let maximum = u32::from_be_bytes(fields.next()?);
            fields.end()?;
            if !minimum.is_power_of_two() || maximum < minimum {
                return Err(HandshakeError::Malformed("inconsistent block sizes"));
            }
            Ok(InfoReply::Blocks { minimum, maximum })
        }
        _ => Ok(InfoReply::Other),
    }
}

fn refusal(code: u32, name: &str, payload: &[u8]) -> HandshakeError {
    let message = String::from_utf8_lossy(payload).trim().to_owned();
    match code {
        ERR_UNKNOWN => HandshakeError::NoExport {
            name: name.to_owned(),
            message,
        },
        ERR_UNSUP => HandshakeError::TooOld,
        ERR_TLS_REQD => HandshakeError::NeedsTls { message },
        ERR_POLICY => HandshakeError::Policy { message },
        ERR_SHUTDOWN => HandshakeError::ShuttingDown { message },
        code => HandshakeError::Refused { code, message },
    }
}

/// The fields of a message, one after the other.
struct FieldReader<B> {
    bytes: B,
    at: usize,
}

impl<B: AsRef<[u8]>> FieldReader<B> {
    fn new(bytes: B) -> Self {
        Self { bytes, at: 0 }
    }

    fn next<const N: usize>(&mut self) -> Result<[u8; N]> {
        let field = self.bytes.as_ref()[self.at..].first_chunk().copied();
        self.at += N;
        field.ok_or(HandshakeError::Malformed("a truncated reply"))
    }

    /// Fails if bytes are left.
    fn end(&self) -> Result<()> {
        if self.at == self.bytes.as_ref().len() {
            Ok(())
        } else {
            Err(HandshakeError::Malformed("a reply with excess bytes"))
        }
    }
}

fn take<const N: usize>(stream: &mut impl Read) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn length(data: &[u8]) -> Result<u32> {
    u32::try_from(data.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput).into())
}

#[cfg(test)]
mod tests;
