use std::{fs, net::TcpListener, path::Path};

use serde_json::json;
use testkit::KmipServer;

use super::{
    super::{Kms, KmsConfig},
    *,
};
use crate::secret::Secrets;

fn kms(dir: &Path, section: &Value) -> Kms {
    fs::write(dir.join("config.json"), json!({"kms": section}).to_string()).unwrap();
    let config = KmsConfig {
        config: dir.join("config.json"),
        secrets: dir.join("secrets"),
        token: dir.join("token"),
    };
    config.get("kms", "").unwrap()
}

fn failed(kms: &Kms) -> (Kind, String) {
    match kms.create(&Secrets::default(), "handle").unwrap_err() {
        EncryptionError::Service { kind, what, .. } => (kind, what),
        other => panic!("{other}"),
    }
}

#[test]
fn a_passphrase_is_sealed_by_the_server() {
    let Some(server) = KmipServer::start() else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let none = Secrets::default();
    let kms_with = |more: &[(&str, &str)]| kms(dir.path(), &server.section(more));
    let whole = kms_with(&[]);
    let missing = whole.check(&none).unwrap_err();
    assert!(
        matches!(missing, EncryptionError::Config { .. }),
        "{missing}"
    );
    let secrets = dir.path().join("secrets");
    server.mount_secret(&secrets);
    whole.check(&none).unwrap();

    let sealed = whole.create(&none, "handle").unwrap().unwrap();
    let own = whole.load(&none, "handle", Some(&sealed)).unwrap();
    assert_eq!(own.reveal().len(), 28);
    let copied = whole.store(&none, "other", &own).unwrap().unwrap();
    assert_ne!(copied, sealed);
    let of_copy = whole.load(&none, "other", Some(&copied)).unwrap();
    assert_eq!(of_copy.reveal(), own.reveal());
    let (data, iv) = Sealed::bytes_of(&sealed).unwrap();
    assert_eq!((data.len(), iv.len()), (32, 16));
    let named = kms_with(&[("TLS_SERVER_NAME", "localhost")]);
    named.load(&none, "handle", Some(&sealed)).unwrap();

    // Not one that it sealed.
    let odd = Sealed::new(&data[..31], &iv).to_json();
    let refused = whole.load(&none, "handle", Some(&odd)).unwrap_err();
    assert!(refused.to_string().contains("refused Decrypt"), "{refused}");
    let none_there = whole.load(&none, "handle", None).unwrap_err();
    assert!(matches!(none_there, EncryptionError::Malformed));

    let (kind, what) = failed(&kms_with(&[("TLS_SERVER_NAME", "other.test")]));
    assert_eq!(kind, Kind::Transient, "{what}");
    assert!(what.contains("certificate"), "{what}");
    // One that does not answer, and none.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = listener.local_addr().unwrap().to_string();
    let silent = kms_with(&[("KMIP_ENDPOINT", &endpoint), ("READ_TIMEOUT", "1")]);
    let (kind, what) = failed(&silent);
    assert_eq!(kind, Kind::Transient, "{what}");
    assert!(what.contains("READ_TIMEOUT 1s"), "{what}");
    drop(listener);
    let (kind, what) = failed(&silent);
    assert_eq!(kind, Kind::Transient, "{what}");
    assert!(what.contains(&endpoint), "{what}");

    let secret = |key: &str| secrets.join("ceph-csi-kmip-credentials").join(key);
    fs::write(secret("UNIQUE_IDENTIFIER"), "77").unwrap();
    let (kind, what) = failed(&whole);
    assert_eq!(kind, Kind::Precondition, "{what}");
    assert!(what.contains("refused Encrypt"), "{what}");
    // Another authority's.
    fs::copy(secret("CLIENT_CERT"), secret("CA_CERT")).unwrap();
    let (kind, what) = failed(&whole);
    assert_eq!(kind, Kind::Transient, "{what}");
    fs::write(secret("CLIENT_KEY"), "none").unwrap();
    let (kind, what) = failed(&whole);
    assert_eq!(kind, Kind::Precondition, "{what}");
    assert!(what.contains("CLIENT_KEY has no private key"), "{what}");
    let refused = whole.check(&none).unwrap_err();
    assert!(refused.to_string().contains("CLIENT_KEY"), "{refused}");
}
