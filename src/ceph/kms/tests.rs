use std::fs;

use proptest::prelude::*;
use serde_json::json;

use super::*;

/// A directory with a configuration.
fn configured(sections: &Value) -> (tempfile::TempDir, KmsConfig) {
    let dir = tempfile::tempdir().unwrap();
    let at = |name| dir.path().join(name);
    fs::write(at("config.json"), sections.to_string()).unwrap();
    let config = KmsConfig {
        config: at("config.json"),
        secrets: at("secrets"),
        token: at("token"),
    };
    (dir, config)
}

fn secrets(list: &[(&str, &str)]) -> Secrets {
    let own = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    list.iter().map(own).collect::<HashMap<_, _>>().into()
}

#[test]
fn key_management_systems_are_read_from_their_file() {
    let (_dir, config) = configured(&json!({"own": {"encryptionKMSType": "metadata"}}));
    assert!(matches!(config.get("", "").unwrap(), Kms::Secret));
    assert!(matches!(config.get("default", "").unwrap(), Kms::Secret));
    assert!(matches!(
        config.get("own", "").unwrap(),
        Kms::Metadata(None)
    ));
    let unknown = config.get("x", "").unwrap_err();
    assert!(
        matches!(unknown, EncryptionError::Unknown { .. }),
        "{unknown}"
    );
    fs::write(&config.config, "{").unwrap();
    let broken = config.get("x", "").unwrap_err();
    assert!(matches!(broken, EncryptionError::Config { .. }), "{broken}");
    fs::remove_file(&config.config).unwrap();
    let none = config.get("x", "").unwrap_err();
    assert!(matches!(none, EncryptionError::NoFile { .. }), "{none:?}");
    assert!(none.to_string().contains("config.json"), "{none}");
}

#[test]
fn a_directory_has_one_file_for_each_section() {
    let (dir, mut config) = configured(&json!({}));
    config.config = dir.path().join("sections");
    fs::create_dir(&config.config).unwrap();
    let section = json!({"KMS_PROVIDER": "metadata"}).to_string();
    fs::write(config.config.join("own"), &section).unwrap();
    fs::write(dir.path().join("outside"), &section).unwrap();
    assert!(matches!(
        config.get("own", "").unwrap(),
        Kms::Metadata(None)
    ));
    for id in ["other", "../outside", "..", "."] {
        let unknown = config.get(id, "").unwrap_err();
        assert!(
            matches!(unknown, EncryptionError::Unknown { .. }),
            "{unknown}"
        );
    }
}

#[test]
fn an_invalid_section_is_refused_by_its_key() {
    let with = |mut section: Value, more: &[(&str, &str)]| {
        for (key, value) in more {
            section[*key] = json!(value);
        }
        section
    };
    let vault = json!({"encryptionKMSType": "vault", "vaultAddress": "https://v:8200"});
    let section = |more: &[(&str, &str)]| with(vault.clone(), more);
    let kmip = json!({"encryptionKMSType": "kmip", "KMIP_ENDPOINT": "k:5696"});
    let kmip = |more: &[(&str, &str)]| with(kmip.clone(), more);
    let aws = json!({"encryptionKMSType": "aws-metadata"});
    let aws = |more: &[(&str, &str)]| with(aws.clone(), more);
    let cases = [
        (aws(&[]), "AWS_REGION"),
        (aws(&[("AWS_REGION", "e/x")]), "AWS_REGION"),
        (
            aws(&[("AWS_REGION", "e"), ("KMS_SECRET_NAME", "../s")]),
            "KMS_SECRET_NAME",
        ),
        (json!({}), "encryptionKMSType"),
        (json!({"encryptionKMSType": "azure-kv"}), "azure-kv"),
        (
            json!({"encryptionKMSType": "metadata", "secretName": "../s", "secretNamespace": "n"}),
            "../s",
        ),
        (
            json!({"encryptionKMSType": "metadata", "secretName": "s", "secretNamespace": ".."}),
            "secretNamespace",
        ),
        (section(&[("vaultAddress", "v:8200")]), "vaultAddress"),
        (section(&[("vaultAddress", "")]), "vaultAddress"),
        (section(&[("vaultBackend", "kv-v3")]), "vaultBackend"),
        (section(&[("vaultCAVerify", "maybe")]), "vaultCAVerify"),
        (
            section(&[("vaultDestroyKeys", "maybe")]),
            "vaultDestroyKeys",
        ),
        (
            section(&[("vaultAuthPath", "/v1/sys/seal")]),
            "vaultAuthPath",
        ),
        (
            section(&[("vaultAddress", "http://v"), ("vaultTLSServerName", "v")]),
            "vaultTLSServerName",
        ),
        (
            section(&[
                ("encryptionKMSType", "vaulttokens"),
                ("tenantTokenName", "a/b"),
            ]),
            "tenantTokenName",
        ),
        (
            section(&[
                ("encryptionKMSType", "vaulttenantsa"),
                ("tenantSAName", "../s"),
            ]),
            "tenantSAName",
        ),
        (
            section(&[
                ("encryptionKMSType", "vaulttokens"),
                ("tenantConfigName", ".."),
            ]),
            "tenantConfigName",
        ),
        (json!({"encryptionKMSType": "kmip"}), "KMIP_ENDPOINT"),
        (kmip(&[("KMIP_ENDPOINT", "kmip.test")]), "KMIP_ENDPOINT"),
        (kmip(&[("KMIP_ENDPOINT", "a b:5696")]), "KMIP_ENDPOINT"),
        (kmip(&[("TLS_SERVER_NAME", "a b")]), "TLS_SERVER_NAME"),
        (kmip(&[("READ_TIMEOUT", "0")]), "READ_TIMEOUT"),
        (kmip(&[("WRITE_TIMEOUT", "1m")]), "WRITE_TIMEOUT"),
        (kmip(&[("KMIP_SECRET_NAME", "../s")]), "KMIP_SECRET_NAME"),
    ];
    for (section, named) in cases {
        let (_dir, config) = configured(&json!({"bad": section}));
        let refused = config.get("bad", "tenant").unwrap_err().to_string();
        assert!(
            refused.contains(named) && refused.contains("bad"),
            "{refused}"
        );
    }
}

#[test]
fn a_passphrase_may_be_in_a_secret_of_the_tenant() {
    let (dir, config) = configured(&json!({
        "of-tenant": {"encryptionKMSType": "metadata", "secretName": "storage"},
        "of-one": {"encryptionKMSType": "metadata", "secretName": "storage", "secretNamespace": "one"},
    }));
    for (namespace, value) in [("tenant", "of the tenant\n"), ("one", "of one")] {
        let secret = dir.path().join("secrets").join(namespace).join("storage");
        fs::create_dir_all(&secret).unwrap();
        fs::write(secret.join("encryptionPassphrase"), value).unwrap();
    }
    let none = Secrets::default();
    // As ceph-csi, to the last byte.
    for (id, with) in [("of-tenant", "of the tenant\n"), ("of-one", "of one")] {
        let kms = config.get(id, "tenant").unwrap();
        kms.check(&none).unwrap();
        let sealed = kms.create(&none, "handle").unwrap().unwrap();
        let own = kms.load(&none, "handle", Some(&sealed)).unwrap();
        let with = Secret::new(with.to_owned());
        let opened = open(&with, "handle", &sealed).unwrap();
        assert_eq!(own.reveal(), opened.reveal());
        let for_files = kms.load_for_files(&none, "handle").unwrap();
        assert_eq!(for_files.reveal(), with.reveal());
    }
    // Earlier builds sealed without the newline.
    let (with, own) = (Secret::new("of the tenant".to_owned()), generate());
    let sealed = seal(&with, "handle", &own);
    let kms = config.get("of-tenant", "tenant").unwrap();
    let opened = kms.load(&none, "handle", Some(&sealed)).unwrap();
    assert_eq!(opened.reveal(), own.reveal());
    let kms = config.get("of-one", "tenant").unwrap();
    let wrong = kms.load(&none, "handle", Some(&sealed)).unwrap_err();
    assert!(matches!(wrong, EncryptionError::Wrong), "{wrong}");
    let other = config.get("of-tenant", "other").unwrap();
    let missing = other.check(&none).unwrap_err();
    assert!(missing.to_string().contains("other/storage"), "{missing}");
    let unknown = config.get("of-tenant", "").unwrap_err();
    assert!(
        matches!(unknown, EncryptionError::NoTenant { .. }),
        "{unknown}"
    );
}

#[test]
fn the_secrets_passphrase_needs_no_service() {
    let (_dir, config) = configured(&json!({}));
    let kms = config.get("default", "").unwrap();
    let with = secrets(&[("encryptionPassphrase", "of all")]);
    kms.check(&with).unwrap();
    assert_eq!(kms.create(&with, "handle").unwrap(), None);
    assert_eq!(kms.load(&with, "handle", None).unwrap().reveal(), "of all");
    kms.remove(&with, "handle").unwrap();
    assert!(matches!(
        kms.check(&Secrets::default()),
        Err(EncryptionError::Missing)
    ));
}

/// Any JSON, of the keys that a section may have, too.
fn any_json() -> impl Strategy<Value = Value> {
    let key = prop_oneof![
        Just("encryptionKMSType".to_owned()),
        Just("vaultAddress".to_owned()),
        Just("KMIP_ENDPOINT".to_owned()),
        Just("secretName".to_owned()),
        "[a-zA-Z]{0,8}",
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        prop_oneof![
            "vault",
            "vaulttokens",
            "kmip",
            "metadata",
            "https://a",
            "\\PC*"
        ]
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 24, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::hash_map(key.clone(), inner, 0..5)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn any_section_has_a_kms_or_an_error(section in any_json(), tenant in "\\PC{0,8}") {
        let (dir, config) = configured(&json!({"kms": section}));
        if let Ok(Kms::Metadata(Some(file))) = config.get("kms", &tenant) {
            prop_assert!(file.starts_with(dir.path().join("secrets")));
            prop_assert!(!file.components().any(|part| part.as_os_str() == ".."));
        }
    }
}
