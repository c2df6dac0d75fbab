use std::io::Cursor;

use proptest::prelude::*;

use super::*;

/// A server with all its messages prepared, and the client's messages to it.
struct Script {
    says: Cursor<Vec<u8>>,
    heard: Vec<u8>,
}

impl Script {
    fn new(says: Vec<u8>) -> Self {
        Self {
            says: Cursor::new(says),
            heard: Vec::new(),
        }
    }
}

impl Read for Script {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.says.read(buffer)
    }
}

impl Write for Script {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.heard.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn greeting() -> Vec<u8> {
    let mut says = Vec::new();
    says.extend(NBDMAGIC);
    says.extend(IHAVEOPT);
    says.extend((FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
    says
}

fn answer(option: u32, kind: u32, payload: &[u8]) -> Vec<u8> {
    let mut says = REPLY_MAGIC.to_be_bytes().to_vec();
    says.extend(option.to_be_bytes());
    says.extend(kind.to_be_bytes());
    says.extend(u32::try_from(payload.len()).unwrap().to_be_bytes());
    says.extend(payload);
    says
}

fn export(bytes: u64, flags: u16) -> Vec<u8> {
    let mut payload = INFO_EXPORT.to_be_bytes().to_vec();
    payload.extend(bytes.to_be_bytes());
    payload.extend(flags.to_be_bytes());
    payload
}

fn blocks(minimum: u32, maximum: u32) -> Vec<u8> {
    let mut payload = INFO_BLOCK_SIZE.to_be_bytes().to_vec();
    payload.extend(minimum.to_be_bytes());
    payload.extend(4096_u32.to_be_bytes());
    payload.extend(maximum.to_be_bytes());
    payload
}

fn go_with(replies: &[(u32, Vec<u8>)]) -> Result<ExportInfo> {
    let mut says = greeting();
    for (kind, payload) in replies {
        says.extend(answer(OPT_GO, *kind, payload));
    }
    go(&mut Script::new(says), "disk")
}

#[test]
fn nothing_is_read_beyond_the_handshake() {
    let mut says = greeting();
    says.extend(answer(OPT_GO, REP_INFO, &export(1 << 30, 0x105)));
    says.extend(answer(OPT_GO, REP_INFO, &[0, 1, b'd']));
    says.extend(answer(OPT_GO, REP_INFO, &blocks(4096, 1 << 20)));
    says.extend(answer(OPT_GO, REP_ACK, &[]));
    let end = says.len() as u64;
    says.extend(b"what the kernel reads");
    let mut script = Script::new(says);
    let info = go(&mut script, "disk").unwrap();
    let expected = ExportInfo {
        bytes: 1 << 30,
        flags: 0x105,
        minimum_block: 4096,
        maximum_block: 1 << 20,
    };
    assert_eq!(info, expected);
    assert_eq!(script.says.position(), end);
    let mut heard = vec![0, 0, 0, 3];
    heard.extend(b"IHAVEOPT\0\0\0\x07\0\0\0\x0c\0\0\0\x04disk\0\x01\0\x03");
    assert_eq!(script.heard, heard);
}

#[test]
fn a_refusal_carries_the_servers_message() {
    let refused = |code, message: &str| go_with(&[(code, message.into())]).unwrap_err();
    let error = refused(ERR_UNKNOWN, "no such disk here");
    assert!(matches!(error, HandshakeError::NoExport { .. }));
    assert!(error.to_string().contains("no such disk here"), "{error}");
    assert!(refused(ERR_TLS_REQD, "").to_string().contains("TLS"));
    assert!(matches!(
        refused(ERR_POLICY, ""),
        HandshakeError::Policy { .. }
    ));
    assert!(matches!(
        refused(ERR_SHUTDOWN, ""),
        HandshakeError::ShuttingDown { .. }
    ));
    assert!(matches!(refused(ERR_UNSUP, ""), HandshakeError::TooOld));
    assert!(
        refused(REP_ERROR | 0x4d, "x")
            .to_string()
            .contains("0x8000004d")
    );
}

#[test]
fn invalid_replies_are_errors() {
    let ack = || (REP_ACK, Vec::new());
    let cases = [
        vec![ack()],
        vec![(REP_INFO, vec![0])],
        vec![(REP_INFO, export(1, 0)[..11].to_vec())],
        vec![(REP_INFO, export(u64::MAX, 0)), ack()],
        vec![(REP_INFO, blocks(3, 512))],
        vec![(REP_INFO, blocks(4096, 512))],
        vec![(9, Vec::new())],
        vec![(REP_INFO, vec![0; LONGEST_REPLY as usize + 1])],
        vec![(REP_INFO, vec![0, 9]); MOST_REPLIES as usize + 1],
    ];
    for replies in cases {
        let error = go_with(&replies).unwrap_err();
        assert!(matches!(error, HandshakeError::Malformed(_)), "{error:?}");
    }
    let http = go(&mut Script::new(b"HTTP/1.1 400 Bad Request".to_vec()), "");
    assert!(
        matches!(http, Err(HandshakeError::Malformed(_))),
        "{http:?}"
    );
    let old = [&NBDMAGIC[..], &OLDSTYLE, &[0; 128]].concat();
    let old = go(&mut Script::new(old), "");
    assert!(matches!(old, Err(HandshakeError::TooOld)), "{old:?}");
    let other = [greeting(), answer(OPT_INFO, REP_ACK, &[])].concat();
    let other = go(&mut Script::new(other), "");
    assert!(
        matches!(other, Err(HandshakeError::Malformed(_))),
        "{other:?}"
    );
}

proptest! {
    #[test]
    fn any_bytes_of_a_server_are_survived(says in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = go(&mut Script::new(says.clone()), "disk");
        let _ = query(&mut Script::new([greeting(), says].concat()), "disk");
    }

    #[test]
    fn any_replies_of_a_server_are_survived(
        replies in proptest::collection::vec(
            (prop_oneof![Just(REP_ACK), Just(REP_INFO), any::<u32>()],
             proptest::collection::vec(any::<u8>(), 0..16)),
            0..8,
        ),
    ) {
        let _ = go_with(&replies);
    }

    #[test]
    fn export_info_is_read_from_the_replies(bytes in 0..i64::MAX.unsigned_abs(), flags: u16, shift in 0_u32..16) {
        let info = go_with(&[
            (REP_INFO, blocks(1 << shift, 1 << 25)),
            (REP_INFO, export(bytes, flags)),
            (REP_ACK, Vec::new()),
        ]).unwrap();
        prop_assert_eq!(info, ExportInfo {
            bytes, flags, minimum_block: 1 << shift, maximum_block: 1 << 25,
        });
    }
}
