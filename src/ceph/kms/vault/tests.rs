use std::{collections::HashMap, fs, net::TcpListener};

use serde_json::json;
use testkit::VaultServer;

use super::{
    super::{Kms, KmsConfig},
    *,
};

/// A configuration for a server, and the secrets of requests.
struct Client {
    dir: tempfile::TempDir,
    server: VaultServer,
    secrets: Secrets,
}

impl Client {
    fn new() -> Option<Self> {
        let server = VaultServer::start()?;
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("token"), server.web_token()).unwrap();
        let ca = ("vault-ca".to_owned(), server.ca());
        Some(Self {
            dir,
            secrets: HashMap::from([ca]).into(),
            server,
        })
    }

    fn kms(&self, more: &[(&str, &str)]) -> Kms {
        let at = |name| self.dir.path().join(name);
        let section = self.server.section(more);
        fs::write(at("config.json"), json!({"kms": section}).to_string()).unwrap();
        let config = KmsConfig {
            config: at("config.json"),
            secrets: at("secrets"),
            token: at("token"),
        };
        config.get("kms", "tenant").unwrap()
    }

    /// Puts a value of a Secret of the tenant there.
    fn tenant_secret(&self, name: &str, key: &str, value: &str) {
        let secret = self.dir.path().join("secrets/tenant").join(name);
        fs::create_dir_all(&secret).unwrap();
        fs::write(secret.join(key), value).unwrap();
    }

    fn failed(&self, kms: &Kms) -> (Kind, String) {
        match kms.create(&self.secrets, "handle").unwrap_err() {
            EncryptionError::Service { kind, what, .. } => (kind, what),
            other => panic!("{other}"),
        }
    }
}

fn secret(text: &str) -> Secret {
    Secret::new(text.to_owned())
}

#[test]
fn a_passphrase_lives_in_either_version_of_the_store() {
    let Some(client) = Client::new() else { return };
    let with = &client.secrets;
    for settings in [
        &[][..],
        // Found out by the mount.
        &[("vaultBackend", "")],
        &[("vaultBackend", "kv"), ("vaultBackendPath", "kv1/")],
        &[("vaultBackend", ""), ("vaultPassphraseRoot", "/v1/kv1")],
        &[("vaultTLSServerName", "localhost")],
    ] {
        let kms = client.kms(settings);
        kms.check(with).unwrap();
        let none = kms.load(with, "handle", None).unwrap_err();
        assert!(none.to_string().contains("no passphrase at"), "{none}");
        kms.remove(with, "handle").unwrap();

        assert_eq!(kms.create(with, "handle").unwrap(), None);
        let own = kms.load(with, "handle", None).unwrap();
        assert_eq!(own.reveal().len(), 28, "{settings:?}");
        // A repeat of the create.
        kms.create(with, "handle").unwrap();
        assert_eq!(
            kms.load(with, "handle", None).unwrap().reveal(),
            own.reveal()
        );
        // A copy's.
        for _ in 0..2 {
            kms.store(with, "handle", &secret("another")).unwrap();
            let stored = kms.load(with, "handle", None).unwrap();
            assert_eq!(stored.reveal(), "another");
        }
        for _ in 0..2 {
            kms.remove(with, "handle").unwrap();
            kms.load(with, "handle", None).unwrap_err();
        }
    }
}

#[test]
fn passphrases_are_where_ceph_csi_has_them() {
    let Some(client) = Client::new() else { return };
    let server = &client.server;
    let kms = client.kms(&[]);
    server.bao(&[
        "kv",
        "put",
        "secret/csi/theirs",
        r#"data={"passphrase":"x"}"#,
    ]);
    // A string of JSON is none of ceph-csi's.
    let bad = kms.load(&client.secrets, "theirs", None).unwrap_err();
    assert!(bad.to_string().contains("is no passphrase"), "{bad}");
    let file = client.dir.path().join("body");
    fs::write(&file, r#"{"data": {"passphrase": "of ceph-csi"}}"#).unwrap();
    let file = format!("@{}", file.display());
    server.bao(&["kv", "put", "secret/csi/theirs", &file]);
    let theirs = kms.load(&client.secrets, "theirs", None).unwrap();
    assert_eq!(theirs.reveal(), "of ceph-csi");
    kms.store(&client.secrets, "ours", &secret("own")).unwrap();
    assert_eq!(server.passphrase("ours").as_deref(), Some("own"));
}

#[test]
fn a_soft_delete_keeps_the_version_for_an_administrator() {
    let Some(client) = Client::new() else { return };
    let kms = client.kms(&[("vaultDestroyKeys", "false")]);
    let with = &client.secrets;
    kms.store(with, "handle", &secret("kept")).unwrap();
    kms.remove(with, "handle").unwrap();
    kms.load(with, "handle", None).unwrap_err();
    client
        .server
        .bao(&["kv", "undelete", "-versions=1", "secret/csi/handle"]);
    assert_eq!(kms.load(with, "handle", None).unwrap().reveal(), "kept");
    // A path whose last version is deleted can be written again.
    kms.remove(with, "handle").unwrap();
    kms.create(with, "handle").unwrap();
    assert_ne!(kms.load(with, "handle", None).unwrap().reveal(), "kept");
}

#[test]
fn a_tenant_has_a_token_and_certificates_of_its_own() {
    let Some(client) = Client::new() else { return };
    // Its passphrases are at the root of a store.
    let server = &client.server;
    server.bao(&["secrets", "enable", "-path=of-tenant", "-version=2", "kv"]);
    let settings = [
        ("encryptionKMSType", "vaulttokens"),
        ("vaultCAFromSecret", "ca"),
        ("vaultBackendPath", "of-others"),
    ];
    client.tenant_secret("ceph-csi-kms-config", "vaultBackendPath", "of-tenant");
    let kms = client.kms(&settings);
    let none = Secrets::default();
    let missing = kms.create(&none, "handle").unwrap_err();
    assert!(
        matches!(missing, EncryptionError::Config { .. }),
        "{missing}"
    );
    client.tenant_secret("ca", "cert", &client.server.ca());
    client.tenant_secret("ceph-csi-kms-token", "token", "root\n");
    kms.create(&none, "handle").unwrap();
    assert_eq!(kms.load(&none, "handle", None).unwrap().reveal().len(), 28);
    client.tenant_secret("ceph-csi-kms-token", "token", "revoked");
    let (kind, what) = client.failed(&kms);
    assert_eq!(kind, Kind::Unauthenticated, "{what}");
}

#[test]
fn a_tenant_has_a_service_account_and_settings_of_its_own() {
    let Some(client) = Client::new() else { return };
    let server = &client.server;
    server.bao(&["secrets", "enable", "-path=of-tenant", "-version=2", "kv"]);
    let rules = client.dir.path().join("rules");
    fs::write(
        &rules,
        r#"path "of-tenant/*" { capabilities = ["create", "update", "read"] }"#,
    )
    .unwrap();
    server.bao(&["policy", "write", "tenant", rules.to_str().unwrap()]);
    let role = "role_type=jwt user_claim=sub bound_audiences=vault token_policies=tenant";
    let write = ["write", "auth/jwt/role/tenant"].into_iter();
    server.bao(&write.chain(role.split(' ')).collect::<Vec<_>>());

    // The driver's own certificate.
    let ca = client.dir.path().join("secrets/ca");
    fs::create_dir_all(&ca).unwrap();
    fs::write(ca.join("cert"), server.ca()).unwrap();
    let settings = [
        ("encryptionKMSType", "vaulttenantsa"),
        ("vaultCAFromSecret", "ca"),
        ("vaultAddress", "https://127.0.0.1:1"),
        ("vaultRole", "other"),
    ];
    let address = server.address();
    for (key, value) in [
        ("vaultAddress", address.as_str()),
        ("vaultBackendPath", "of-tenant/\n"),
        ("vaultRole", "tenant"),
    ] {
        client.tenant_secret("ceph-csi-kms-config", key, value);
    }
    client.tenant_secret("ceph-csi-vault-sa", "token", &server.web_token());
    let (none, kms) = (Secrets::default(), client.kms(&settings));
    kms.create(&none, "handle").unwrap();
    let own = kms.load(&none, "handle", None).unwrap();
    let found = server.bao(&["kv", "get", "of-tenant/handle"]);
    assert!(found.contains(own.reveal()));

    // The tenant's own is preferred.
    client.tenant_secret("ca", "cert", "none");
    let refused = client.kms(&settings).check(&none).unwrap_err();
    assert!(refused.to_string().contains("tenant/ca/cert"), "{refused}");
}

#[test]
fn the_kind_of_an_error_tells_whether_to_repeat() {
    let Some(client) = Client::new() else { return };
    let (kind, what) = client.failed(&client.kms(&[("vaultRole", "other")]));
    assert_eq!(kind, Kind::Unauthenticated, "{what}");
    assert!(what.contains("other"), "{what}");
    let (kind, what) = client.failed(&client.kms(&[("vaultPassphrasePath", "elsewhere")]));
    assert_eq!(kind, Kind::Unauthenticated, "{what}");
    assert!(
        what.contains("permission denied") && what.contains("elsewhere"),
        "{what}"
    );

    let strangers = client.kms(&[("vaultCAFromSecret", "other-ca")]);
    let (kind, what) = client.failed(&strangers);
    assert_eq!(kind, Kind::Precondition, "{what}");
    assert!(what.contains("other-ca"), "{what}");

    // Its certificate has no such name.
    let (kind, what) = client.failed(&client.kms(&[("vaultTLSServerName", "other.test")]));
    assert_eq!(kind, Kind::Transient, "{what}");
    let unverified = client.kms(&[
        ("vaultTLSServerName", "other.test"),
        ("vaultCAVerify", "false"),
    ]);
    unverified.create(&client.secrets, "handle").unwrap();

    client.server.bao(&["operator", "seal"]);
    let (kind, what) = client.failed(&client.kms(&[]));
    assert_eq!(kind, Kind::Transient, "{what}");
    assert!(what.contains("503"), "{what}");

    // Nothing listens there.
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let (kind, what) = client.failed(&client.kms(&[("vaultAddress", &format!("https://{port}"))]));
    assert_eq!(kind, Kind::Transient, "{what}");
}

#[test]
fn a_login_ends_with_its_call() {
    let Some(client) = Client::new() else { return };
    let kms = client.kms(&[]);
    let logins = || {
        let listed = client
            .server
            .bao(&["list", "-format=json", "auth/token/accessors"]);
        serde_json::from_str::<Vec<String>>(&listed).unwrap().len()
    };
    let before = logins();
    for _ in 0..3 {
        kms.store(&client.secrets, "handle", &secret("own"))
            .unwrap();
    }
    assert_eq!(logins(), before);
}

#[test]
fn no_error_shows_a_secret() {
    let Some(client) = Client::new() else { return };
    let token = fs::read_to_string(client.dir.path().join("token")).unwrap();
    for settings in [
        &[("vaultRole", "other")],
        &[("vaultPassphrasePath", "elsewhere")],
    ] {
        let kms = client.kms(settings);
        let error = kms
            .store(&client.secrets, "handle", &secret("hidden"))
            .unwrap_err();
        let shown = format!("{error} {error:?} {kms:?}");
        assert!(
            !shown.contains(&token) && !shown.contains("hidden"),
            "{shown}"
        );
    }
}
