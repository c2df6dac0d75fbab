//! Attributes and parameters as an attacker writes them: each is refused by name, or can
//! affect only the volume itself.

use proptest::{prelude::*, test_runner::TestCaseResult};
use tonic::Code;

use super::{inline::InlineSource, *};
use crate::{
    device::{ImageFiles, PendingReleases},
    fs::FsType,
    nfs::InlineShare,
    pool::{Pool, Pools, Scope},
    proto::csi::{
        VolumeCapability,
        volume_capability::{
            AccessMode as WireMode, AccessType as WireType, BlockVolume, MountVolume,
        },
    },
    volume::spec::Use,
};

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

/// Words of `mountOptions` and of `mount_flags`.
const OPTIONS: [&str; 48] = [
    "",
    "SUID",
    "abort",
    "addr=10.0.0.1",
    "bind",
    "clientaddr=10.0.0.1",
    "\"context=a:b:c:s0:c1,c2\"",
    "context=a:b:c:s0",
    "dev",
    "device=/dev/sda",
    "defcontext=x",
    "discard",
    "errors=panic",
    "exec",
    "fsc",
    "fscontext=x",
    "hard",
    "journal_path=/dev/sda",
    "logdev=/dev/sda",
    "loop",
    "mountaddr=10.0.0.1",
    "mounthost=h",
    "mountport=30049",
    "mountproto=udp",
    "nconnect=16",
    "nfsvers=4.2",
    "noatime",
    "nodev",
    "noexec",
    "noresvport",
    "nosuid",
    "port=30049",
    "proto=udp",
    "rdma",
    "remount",
    "ro",
    "rootcontext=x",
    "rsize=65536",
    "rw",
    "sec=none",
    "sec=sys",
    "source=/dev/sda",
    "suid",
    "timeo=1",
    "udp",
    "vers=3",
    "x-own",
    "xprtsec=none",
];

/// What no author of a pod may set, by the word's beginning: programs that run as root,
/// devices, labels, and of NFS another server or identity.
const NOT_FOR_PODS: [&str; 18] = [
    "suid",
    "dev",
    "context=",
    "fscontext=",
    "defcontext=",
    "rootcontext=",
    "addr=",
    "port=",
    "mount",
    "clientaddr",
    "proto",
    "rdma",
    "udp",
    "sec",
    "xprtsec=none",
    "noresvport",
    "nconnect",
    "timeo",
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
    let options = prop::collection::vec(prop::sample::select(&OPTIONS[..]), 1..4);
    let options = options.prop_map(|words| words.join(","));
    let pair = prop_oneof![
        12 => (key, value),
        2 => (Just("mountOptions".to_owned()), options),
    ];
    let pairs = prop::collection::vec(pair, 0..5);
    pairs.prop_map(|pairs| pairs.into_iter().collect())
}

/// With what an inline volume of either kind requires.
fn hostile_inline() -> impl Strategy<Value = Pairs> {
    let own: [&[(&str, &str)]; 3] = [
        &[],
        &[("pool", "main"), ("size", "64Mi")],
        &[("server", "h"), ("share", "/a")],
    ];
    with_own(own.to_vec())
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
    with_own(own.to_vec())
}

fn with_own(own: Vec<&'static [(&'static str, &'static str)]>) -> impl Strategy<Value = Pairs> {
    (prop::sample::select(own), hostile()).prop_map(|(own, mut pairs)| {
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

/// Capabilities as they arrive.
fn hostile_capability() -> impl Strategy<Value = VolumeCapability> {
    let fs_types = [
        "", "", "ext4", "xfs", "btrfs", "nfs", "zfs", "EXT4", "../x", "a\0b",
    ];
    let groups = ["", "", "0", "4711", "4294967295", "-1", "root", "0\n"];
    let flag = prop_oneof![
        12 => prop::sample::select(&OPTIONS[..]).prop_map(str::to_owned),
        1 => ".{0,9}",
        1 => Just("x".repeat(5000)),
    ];
    let mount = (
        prop::sample::select(fs_types.to_vec()),
        prop::collection::vec(flag, 0..3),
        prop::sample::select(groups.to_vec()),
    );
    let mount = mount.prop_map(|(fs_type, mount_flags, group)| {
        WireType::Mount(MountVolume {
            fs_type: fs_type.to_owned(),
            mount_flags,
            volume_mount_group: group.to_owned(),
        })
    });
    let access = prop_oneof![12 => mount, 1 => Just(WireType::Block(BlockVolume {}))];
    (access, -1..9).prop_map(|(access, mode)| VolumeCapability {
        access_type: Some(access),
        access_mode: Some(WireMode { mode }),
    })
}

/// The pools of a node, of which pods may fill the local one.
fn pools() -> ImageFiles {
    let pool = |name: &str, scope| Pool {
        name: name.to_owned(),
        dir: "/nonexistent".into(),
        scope,
        mounted: false,
    };
    let pools = Pools::new([pool("main", Scope::Local), pool("storage", Scope::Shared)]);
    let pools = pools.expect("two pools");
    ImageFiles {
        node_id: "node".to_owned(),
        boot_id: "boot".to_owned(),
        pending_releases: PendingReleases::of(&pools),
        pools,
    }
}

/// Refused as the capability or the context; mount options by their words.
fn refused_by_name(status: &Status) -> TestCaseResult {
    let known = [Code::InvalidArgument, Code::FailedPrecondition];
    prop_assert!(known.contains(&status.code()), "{:?}", status);
    let message = status.message();
    let begins = ["volume_c", "mount option", "this node makes no inline"];
    prop_assert!(
        begins.iter().any(|it| message.starts_with(it)),
        "{}",
        message
    );
    Ok(())
}

fn words(usage: &Use) -> Vec<String> {
    match usage {
        Use::Mount { options, .. } => options.clone().into(),
        Use::Block => Vec::new(),
    }
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
    fn an_inline_volume_reaches_its_image_or_its_share_alone(
        wire in hostile_capability(),
        pairs in hostile_inline(),
        largest in prop::option::of(prop::sample::select(vec![1_u64 << 20, 1 << 26, 1 << 40])),
    ) {
        let read = validate::map("volume_context", &pairs).and_then(|()| {
            let capability = validate::capability("volume_capability", Some(&wire))?;
            refuse_unsafe(&capability, &pairs)?;
            inline::refuse_unlisted(&pairs)?;
            let mut parsed = Parsed::new(&capability, &pairs, true)
                .map_err(|error| Status::from(&error))?;
            let (access, usage) = (&capability.access, &mut parsed.usage);
            let wanted = InlineSource::parse("csi-x", access, &pairs, usage, largest)?;
            Ok((parsed, wanted))
        });
        let (parsed, wanted) = match read {
            Err(status) => return refused_by_name(&status),
            Ok(read) => read,
        };
        prop_assert_ne!(&parsed.usage, &Use::Block);
        prop_assert_eq!(parsed.mkfs_options, Vec::<String>::new());
        let words = words(&parsed.usage);
        let is_image = matches!(wanted, InlineSource::Image { .. });
        let of_any = &NOT_FOR_PODS[..if is_image { 6 } else { NOT_FOR_PODS.len() }];
        let bad = |word: &String| of_any.iter().any(|bad| word.trim_matches('"').starts_with(bad));
        prop_assert!(!words.iter().any(bad), "{:?}", words);
        match wanted {
            InlineSource::Image { pool, bytes } => {
                prop_assert!(largest.is_some_and(|largest| bytes <= largest), "{}", bytes);
                prop_assert!(bytes >= 1 << 20, "{}", bytes);
                if let Ok(source) = pools().inline_source(pool.as_deref(), "../csi-x") {
                    prop_assert_eq!(&source.pool, "main");
                    let name = source.image.strip_suffix(".img").expect("an image's name");
                    prop_assert!(!name.contains(['/', '.']), "{}", source.image);
                }
            }
            InlineSource::Remote(source) => {
                let Source::Nfs(named) = *source else {
                    panic!("{source}");
                };
                prop_assert_eq!(named.mode, None);
                let shares: Vec<InlineShare> =
                    ["h:/a", "storage:2050:/dev/sda"].map(|it| it.parse().expect(it)).into();
                let text = named.to_string();
                let allowed = named.of_inline_shares(&shares);
                let is_listed = ["directory h:/a", "directory storage:/dev/sda"].contains(&&*text);
                prop_assert_eq!(allowed.is_some(), is_listed, "{}", text);
            }
        }
    }

    #[test]
    fn capabilities_are_parsed_or_refused_by_name(
        wire in hostile_capability(),
        pairs in hostile_volume(),
    ) {
        let read = validate::map("volume_context", &pairs).and_then(|()| {
            let capability = validate::capability("volume_capability", Some(&wire))?;
            refuse_unsafe(&capability, &pairs)?;
            let parsed = Parsed::new(&capability, &pairs, true);
            Ok((parsed.map_err(|error| Status::from(&error))?, capability))
        });
        let (parsed, capability) = match read {
            Err(status) => return refused_by_name(&status),
            Ok(read) => read,
        };
        let is_block = capability.access == AccessType::Block;
        prop_assert_eq!(parsed.usage == Use::Block, is_block);
        let is_shared = capability.mode.multi_node_writer();
        let is_remote = Source::remote_file_system(&pairs).is_some();
        prop_assert!(!is_shared || is_block || is_remote);
        if let AccessType::Mount { group, .. } = &capability.access {
            let is_group = |group: &str| ["0", "4711"].contains(&group);
            prop_assert!(group.is_empty() || is_group(group), "{}", group);
        }
        let words = words(&parsed.usage);
        let beyond = ["abort", "addr", "bind", "clientaddr", "device", "errors=panic", "fsc",
            "journal_path", "logdev", "loop", "mountaddr", "mounthost", "remount", "source"];
        let key = |word: &str| word.split('=').next().unwrap_or_default().to_owned();
        let bad = |word: &String| beyond.contains(&word.as_str()) || beyond.contains(&&*key(word));
        prop_assert!(!words.iter().any(bad), "{:?}", words);
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
