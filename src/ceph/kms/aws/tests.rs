//! Against a stand-in that has the forms of AWS's API reference, and checks signatures.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
};

use super::*;
use crate::ceph::{csi_format::encryption::generate, kms::KmsConfig};

const KEY_ID: &str = "AKIDEXAMPLE";
const KEY: &str = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY";
const TOKEN: &str = "a session's token";
const ARN: &str = "arn:aws:kms:eu-central-1:111122223333:key/1234abcd";

/// What the next request is refused with: a status, and a body.
type Refused = Arc<Mutex<Option<(u16, String)>>>;

/// A service that seals by reversing.
struct StandIn {
    address: String,
    refuses: Refused,
}

impl StandIn {
    /// It ends with the process.
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let refuses = Refused::default();
        let (host, next) = (address.clone(), refuses.clone());
        thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { return };
                let (status, body) = answer(&stream, &host, &next);
                let length = body.len();
                let head = format!("HTTP/1.1 {status} x\r\nContent-Length: {length}\r\n");
                let close = "Connection: close\r\n\r\n";
                let _ = (&stream).write_all(format!("{head}{close}{body}").as_bytes());
            }
        });
        Self { address, refuses }
    }

    fn refuse(&self, status: u16, kind: &str) {
        let body = json!({"__type": kind, "message": "not today"}).to_string();
        *self.refuses.lock().unwrap() = Some((status, body));
    }
}

fn answer(stream: &TcpStream, host: &str, next: &Refused) -> (u16, String) {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    assert_eq!(line, "POST / HTTP/1.1\r\n");
    let mut headers = std::collections::HashMap::new();
    loop {
        line.clear();
        reader.read_line(&mut line).unwrap();
        let Some((name, value)) = line.trim_end().split_once(": ") else {
            break;
        };
        headers.insert(name.to_ascii_lowercase(), value.to_owned());
    }
    let mut body = vec![0; headers["content-length"].parse().unwrap()];
    reader.read_exact(&mut body).unwrap();
    let body = String::from_utf8(body).unwrap();
    if let Some(refusal) = next.lock().unwrap().take() {
        return refusal;
    }
    let signed = [
        "content-type",
        "host",
        "x-amz-date",
        "x-amz-security-token",
        "x-amz-target",
    ];
    let signed = signed.map(|name| (name, &*headers[name]));
    assert_eq!(headers["host"], host);
    assert_eq!(headers["x-amz-security-token"], TOKEN);
    assert_eq!(headers["content-type"], "application/x-amz-json-1.1");
    let time = &headers["x-amz-date"];
    assert!(time.len() == 16 && time.ends_with('Z'), "{time}");
    let by_key = Signer {
        key_id: KEY_ID,
        key: &Secret::new(KEY.to_owned()),
        region: "eu-central-1",
        service: "kms",
    };
    if headers["authorization"] != by_key.authorize(&signed, time, &body) {
        let kind = "InvalidSignatureException";
        return (400, json!({"__type": kind, "message": "wrong"}).to_string());
    }
    let body: Value = serde_json::from_str(&body).unwrap();
    let reversed = |field: &str| {
        let mut bytes = STANDARD.decode(body[field].as_str().unwrap()).unwrap();
        bytes.reverse();
        STANDARD.encode(bytes)
    };
    let answer = match &*headers["x-amz-target"] {
        "TrentService.Encrypt" if body["KeyId"] == ARN => {
            json!({"CiphertextBlob": reversed("Plaintext"), "KeyId": ARN})
        }
        "TrentService.Decrypt" if body.as_object().unwrap().len() == 1 => {
            json!({"Plaintext": reversed("CiphertextBlob"), "KeyId": ARN})
        }
        other => panic!("{other}: {body}"),
    };
    (200, answer.to_string())
}

/// A key, the credentials of which are in the returned directory.
fn key(service: &StandIn) -> (tempfile::TempDir, AwsKms) {
    let dir = tempfile::tempdir().unwrap();
    let credentials = dir.path().join("secrets/ceph-csi-aws-credentials");
    fs::create_dir_all(&credentials).unwrap();
    for (name, value) in [
        ("AWS_ACCESS_KEY_ID", KEY_ID),
        ("AWS_SECRET_ACCESS_KEY", KEY),
        ("AWS_SESSION_TOKEN", TOKEN),
        ("AWS_CMK_ARN", ARN),
    ] {
        fs::write(credentials.join(name), value).unwrap();
    }
    let config = KmsConfig {
        config: dir.path().join("config.json"),
        secrets: dir.path().join("secrets"),
        token: dir.path().join("token"),
    };
    let lookup = Lookup {
        config: &config,
        id: "aws",
        tenant: "",
    };
    let kms = AwsKms::of(&lookup, &json!({"AWS_REGION": "eu-central-1"})).unwrap();
    assert_eq!(kms.endpoint, "https://kms.eu-central-1.amazonaws.com/");
    let endpoint = format!("http://{}/", service.address);
    (dir, AwsKms { endpoint, ..kms })
}

fn failed(result: Result<String, EncryptionError>) -> (Kind, String) {
    match result.unwrap_err() {
        EncryptionError::Service { kind, what, .. } => (kind, what),
        other => panic!("{other}"),
    }
}

#[test]
fn a_passphrase_is_sealed_and_opened() {
    let service = StandIn::start();
    let (dir, kms) = key(&service);
    kms.check().unwrap();
    let passphrase = generate();
    let sealed = kms.seal(&passphrase).unwrap();
    assert!(!sealed.contains(passphrase.reveal()), "{sealed}");
    assert_eq!(kms.open(&sealed).unwrap().reveal(), passphrase.reveal());
    for bad in ["", "not base64!"] {
        let refused = kms.open(bad).unwrap_err();
        assert!(matches!(refused, EncryptionError::Malformed), "{refused}");
    }

    let credentials = dir.path().join("secrets/ceph-csi-aws-credentials");
    fs::write(credentials.join("AWS_SECRET_ACCESS_KEY"), "another").unwrap();
    let (kind, what) = failed(kms.seal(&passphrase));
    assert_eq!(kind, Kind::Unauthenticated, "{what}");
    fs::remove_file(credentials.join("AWS_CMK_ARN")).unwrap();
    let missing = kms.check().unwrap_err();
    assert!(missing.to_string().contains("AWS_CMK_ARN"), "{missing}");
}

#[test]
fn a_refusal_has_the_kind_of_its_cause() {
    let service = StandIn::start();
    let (_dir, kms) = key(&service);
    for (status, name, kind) in [
        (400, "AccessDeniedException", Kind::Unauthenticated),
        (
            400,
            "com.amazonaws.kms#NotFoundException",
            Kind::Precondition,
        ),
        (400, "ThrottlingException", Kind::Transient),
        (500, "KMSInternalException", Kind::Transient),
        (503, "", Kind::Transient),
    ] {
        service.refuse(status, name);
        let (found, what) = failed(kms.seal(&generate()));
        assert_eq!(found, kind, "{what}");
        assert!(what.contains("not today"), "{what}");
    }
    *service.refuses.lock().unwrap() = Some((200, "{}".to_owned()));
    let (kind, what) = failed(kms.seal(&generate()));
    assert_eq!(kind, Kind::Transient, "{what}");
    let gone = AwsKms {
        endpoint: "http://127.0.0.1:1/".to_owned(),
        ..kms
    };
    let (kind, what) = failed(gone.seal(&generate()));
    assert_eq!(kind, Kind::Transient, "{what}");
}
