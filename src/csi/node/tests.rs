//! Attributes and parameters as an attacker writes them: each is refused by name, or can
//! affect only the volume itself.

use proptest::{prelude::*, test_runner::TestCaseResult};
use tonic::Code;

use super::*;
use crate::fs::FsType;

/// Values in claims, classes and PersistentVolumes: valid ones and attacks.
const KEYS: [&str; 30] = [
    "backend",
    "bogus",
    "clusterID",
    "connections",
    "csi.storage.k8s.io/ephemeral",
    "csi.storage.k8s.io/pod.name",
    "directIO",
    "encrypted",
    "FsType",
    "fsType",
    "host",
    "image",
    "imageName",
    "mapOptions",
    "mkfsOptions",
    "mountOptions",
    "mounter",
    "nbdServer",
    "overcommit",
    "pool",
    "preallocate",
    "requestTimeout",
    "sectorSize",
    "server",
    "share",
    "size",
    "socket",
    "subDir",
    "storage.kubernetes.io/csiProvisionerIdentity",
    "uri",
];

const VALUES: [&str; 33] = [
    "",
    "../x",
    ".uring-csi/volumes",
    "/dev/sda",
    "/etc/passwd",
    "-1",
    "-d /etc",
    "-E root_owner=0:0",
    "-L x",
    "-O journal_dev",
    "-p /etc/passwd",
    "-r /etc",
    "-m 0 -i 8192",
    "4096",
    "512",
    "64Mi",
    "a\0b",
    "a\nb",
    "a/b",
    "btrfs",
    "ext4",
    "krbd:noshare,options=/x",
    "loop",
    "main",
    "nbd",
    "nbd://h/../x",
    "nbd+unix:///x?socket=/run/x",
    "storage",
    "true",
    "v.img",
    "xfs",
    "zfs",
    "$(id)",
];

type Pairs = HashMap<String, String>;

fn hostile() -> impl Strategy<Value = Pairs> {
    let key = prop_oneof![
        12 => prop::sample::select(&KEYS[..]).prop_map(str::to_owned),
        1 => ".{0,9}",
    ];
    let value = prop_oneof![
        12 => prop::sample::select(&VALUES[..]).prop_map(str::to_owned),
        1 => ".{0,20}",
        1 => Just("x".repeat(5000)),
    ];
    prop::collection::hash_map(key, value, 0..5)
}

/// The same, with the attributes that a static volume of that backend requires.
fn hostile_volume() -> impl Strategy<Value = Pairs> {
    let own: [&[(&str, &str)]; 5] = [
        &[],
        &[("backend", "loop"), ("pool", "main"), ("image", "v.img")],
        &[("backend", "nbd"), ("uri", "nbd://h/v.img")],
        &[("server", "h"), ("share", "/a"), ("subDir", "v")],
        &[
            ("clusterID", "c"),
            ("pool", "rbd"),
            ("imageName", "v"),
            ("staticVolume", "true"),
        ],
    ];
    (prop::sample::select(own.to_vec()), hostile()).prop_map(|(own, mut pairs)| {
        for (key, value) in own {
            let _ = pairs
                .entry((*key).to_owned())
                .or_insert_with(|| (*value).to_owned());
        }
        pairs
    })
}

fn capability(access: AccessType) -> Capability {
    let mode = AccessMode::SingleNodeWriter;
    Capability { access, mode }
}

fn mounted(flags: Vec<String>) -> Capability {
    capability(AccessType::Mount {
        fs_type: String::new(),
        flags,
        group: String::new(),
    })
}

fn invalid_by_name(status: &Status, field: &str, pairs: &Pairs) -> TestCaseResult {
    prop_assert_eq!(status.code(), Code::InvalidArgument, "{:?}", status);
    let message = status.message();
    // Errors of the backends quote it, in a third spelling.
    let has_key = |key: &String| {
        let spellings = [
            key.clone(),
            key.escape_debug().to_string(),
            format!("{key:?}"),
        ];
        spellings.iter().any(|key| message.contains(key))
    };
    let is_missing = message.contains("is required") || message.contains("hold");
    prop_assert!(message.starts_with(field), "{}", message);
    prop_assert!(pairs.keys().any(has_key) || is_missing, "{}", message);
    Ok(())
}

/// mkfs gets no argument with a path or a shell command.
fn reaches_nothing(options: &[String]) -> TestCaseResult {
    for option in options {
        prop_assert!(!option.contains(['/', '$', '\n', '\0']), "{:?}", options);
        let bad = ["-d", "-p", "-r", "journal_dev"];
        prop_assert!(!bad.contains(&option.as_str()), "{:?}", options);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn inline_attributes_are_parsed_or_refused_by_name(pairs in hostile()) {
        let field = "volume_context";
        let context = validate::map(field, &pairs)
            .and_then(|()| inline::refuse_unlisted(&pairs))
            .and_then(|()| {
                let parsed = Parsed::new(&mounted(Vec::new()), &pairs, false);
                parsed.map_err(|error| Status::from(&error))
            });
        match context {
            Err(status) => invalid_by_name(&status, field, &pairs)?,
            Ok(parsed) => {
                prop_assert_eq!(parsed.mkfs_options, Vec::<String>::new());
                let known: &[_] = if Source::has_device_by(&pairs) {
                    &["fsType", "pool", "size"]
                } else {
                    &["mountOptions", "server", "share"]
                };
                let known = |key: &String| known.contains(&key.as_str()) || key.contains(".io/");
                prop_assert!(pairs.keys().all(known), "{:?}", pairs);
                let fs = pairs.get("fsType").map_or("", String::as_str);
                let is_known = FsType::ALL.iter().any(|known| known.as_str() == fs);
                prop_assert!(fs.is_empty() || is_known, "{}", fs);
            }
        }
    }

    #[test]
    fn volume_attributes_are_parsed_or_refused_by_name(pairs in hostile_volume()) {
        let field = "volume_context";
        let read = validate::map(field, &pairs).and_then(|()| {
            let parsed = Parsed::new(&mounted(Vec::new()), &pairs, false)
                .map_err(|error| Status::from(&error))?;
            let source = Source::parse(&pairs, "handle");
            let source = source.map_err(|error| Status::from(&Cause::from(error)))?;
            Ok((parsed, source))
        });
        match read {
            Err(status) => invalid_by_name(&status, field, &pairs)?,
            Ok((parsed, source)) => {
                reaches_nothing(&parsed.mkfs_options)?;
                if let Source::Loop(image) = source {
                    prop_assert_eq!(&image.pool, &pairs["pool"]);
                    prop_assert_eq!(&image.image, &pairs["image"]);
                }
            }
        }
    }

    #[cfg(feature = "controller")]
    #[test]
    fn class_parameters_make_stageable_volumes_or_are_refused_by_name(pairs in hostile()) {
        use crate::provision::Parameters;

        let read = validate::map("parameters", &pairs)
            .and_then(|()| Parameters::parse(&pairs).map_err(Status::from));
        let class = match read {
            Err(status) => return invalid_by_name(&status, "", &pairs),
            Ok(class) => class,
        };
        let mut context: Pairs = class.context("i.img").into_iter().collect();
        let _ = context.insert("pool".to_owned(), "main".to_owned());
        let source = Source::parse(&context, "handle");
        let source = source.expect("as the controller writes it");
        match &source {
            Source::Loop(image) => prop_assert_eq!(&image.image, "i.img"),
            Source::Nbd(export) => {
                let shown = export.to_string();
                prop_assert!(shown.contains("i.img"), "{}", shown);
            }
            Source::Rbd(_) | Source::Nfs(_) => prop_assert!(false, "{}", source),
        }
        match Parsed::new(&mounted(Vec::new()), &context, false) {
            Err(error) => {
                let status = Status::from(&error);
                invalid_by_name(&status, "volume_context.mkfsOptions", &context)?;
            }
            Ok(parsed) => reaches_nothing(&parsed.mkfs_options)?,
        }
    }
}

#[test]
fn the_metrics_announce_every_measured_call() {
    let source = include_str!("service.rs");
    let calls = source.split("VolumeCall(").skip(1);
    let named: Vec<_> = calls
        .filter_map(|after| after.trim_start().strip_prefix('"')?.split('"').next())
        .collect();
    assert_eq!(named, METHODS);
}
