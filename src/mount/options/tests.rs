use proptest::prelude::*;

use super::*;

fn parsed(flags: &[&str]) -> MountOptions {
    MountOptions::parse(flags).expect("taken")
}

fn fs_options(options: &MountOptions) -> Vec<String> {
    options.fs_options().map(FsOption::to_string).collect()
}

#[test]
fn mount_attributes_and_superblock_options_are_separated() {
    let options = parsed(&["noatime", "discard,data=ordered", "ro"]);
    assert!(options.read_only());
    assert_eq!(fs_options(&options), ["data=ordered", "discard"]);
    let change = options.attributes();
    assert_eq!(
        change.set,
        Flags::MOUNT_ATTR_RDONLY | Flags::MOUNT_ATTR_NOATIME
    );
    assert_eq!(change.clear, Flags::MOUNT_ATTR__ATIME);
    assert_eq!(options.to_string(), "data=ordered,discard,noatime,ro");
}

#[test]
fn options_of_mount8_are_dropped_and_those_of_file_systems_kept() {
    let own = [
        "_netdev,nofail",
        "defaults",
        "x-systemd.automount",
        "comment=a",
        "user=joe",
        "",
    ];
    assert_eq!(parsed(&own), MountOptions::default());
    assert_eq!(fs_options(&parsed(&["user_xattr", "usrquota"])).len(), 2);
}

#[test]
fn a_quoted_comma_does_not_part() {
    let options = parsed(&[r#"context="system_u:object_r:container_file_t:s0:c1,c2",ro"#]);
    let context = options.fs_options().next().expect("one");
    assert_eq!(context.key, "context");
    assert_eq!(
        context.value.as_deref(),
        Some("system_u:object_r:container_file_t:s0:c1,c2")
    );
    assert_eq!(options.for_publish(), parsed(&["ro"]));
}

#[test]
fn the_last_of_contradictory_options_wins() {
    assert!(!parsed(&["ro", "rw"]).read_only());
    assert_eq!(parsed(&["noatime,relatime"]), parsed(&["atime"]));
}

#[test]
fn options_of_another_kind_of_mount_are_refused_by_name() {
    for word in [
        "bind",
        "rbind",
        "remount",
        "move",
        "rshared",
        "make-slave",
        "loop",
        "loop=/dev/loop0",
        "offset=512",
        "source=/dev/sda",
        "X-mount.owner=1000",
    ] {
        let error = MountOptions::parse(&[word]).expect_err(word);
        assert!(matches!(&error, MountOptionError::Refused { option, .. } if option == word));
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[test]
fn malformed_options_are_refused() {
    for word in [
        "=1",
        "ro=1",
        "a\0b",
        &"k".repeat(256),
        &format!("k={}", "v".repeat(256)),
    ] {
        let error = MountOptions::parse(&[word]).expect_err(word);
        assert!(
            matches!(error, MountOptionError::Malformed { .. }),
            "{error}"
        );
    }
    let error = MountOptions::parse(&["context=\"a"]).expect_err("open");
    assert!(matches!(error, MountOptionError::OpenQuote { .. }));
}

#[test]
fn records_hold_a_sorted_list() {
    let options = parsed(&["noatime", r#"context="a,b""#, "discard"]);
    let json = serde_json::to_string(&options).expect("serializes");
    assert_eq!(json, r#"["\"context=a,b\"","discard","noatime"]"#);
    assert_eq!(
        serde_json::from_str::<MountOptions>(&json).expect("reads"),
        options
    );
}

#[test]
fn common_mount_options_are_allowed() {
    for (fs, flags) in [
        (
            "ext4",
            "noatime,discard,data=writeback,commit=30,barrier=0,nobarrier,errors=remount-ro,\
             journal_checksum,stripe=16,init_itable=10,init_itable,user_xattr,acl,lazytime,sync,\
             dirsync,mb_optimize_scan=0,usrjquota=aquota.user,jqfmt=vfsv1,max_batch_time=15000",
        ),
        (
            "xfs",
            "nouuid,norecovery,logbufs=8,logbsize=256k,allocsize=64m,inode64,largeio,swalloc,\
             sunit=128,swidth=256,uquota,prjquota,discard,wsync,ro,nodiratime",
        ),
        (
            "btrfs",
            "compress=zstd:3,compress-force,compress=lzo,space_cache=v2,autodefrag,ssd,discard=async,\
             thread_pool=4,nodatacow,commit=120,strictatime,nosuid,nodev,noexec",
        ),
    ] {
        for fs in [Some(fs), None] {
            parsed(&[flags]).refuse_unlisted(fs).expect(flags);
        }
    }
    let context = r#"context="system_u:object_r:container_file_t:s0:c1,c2""#;
    parsed(&[context])
        .refuse_unlisted(Some("xfs"))
        .expect("allowed");
}

#[test]
fn mount_options_that_reach_beyond_the_volume_are_refused_by_name() {
    for (fs, word) in [
        ("ext4", "journal_dev=0x801"),
        ("ext4", "journal_path=/dev/sda"),
        ("ext4", "errors=panic"),
        ("ext4", "abort"),
        ("ext4", "sb=8193"),
        ("ext4", "usrjquota=../x"),
        ("ext4", "data=/etc"),
        ("ext4", "nouuid"),
        ("ext4", "test_dummy_encryption"),
        ("xfs", "logdev=/dev/sda"),
        ("xfs", "rtdev=/dev/sda"),
        ("xfs", "allocsize=x"),
        ("xfs", "allocsize"),
        ("xfs", "discard=1"),
        ("btrfs", "device=/dev/sda"),
        ("btrfs", "subvol=/other"),
        ("btrfs", "subvolid=256"),
        ("btrfs", "fatal_errors=panic"),
        ("btrfs", "degraded"),
        ("btrfs", "compress=zstd:/x"),
        ("btrfs", "nosuchoption"),
    ] {
        let error = parsed(&[word]).refuse_unlisted(Some(fs)).expect_err(word);
        assert!(error.to_string().contains(&format!("{word:?}")), "{error}");
        if word != "nouuid" {
            assert!(parsed(&[word]).refuse_unlisted(None).is_err(), "{word}");
        }
    }
}

#[test]
fn pods_set_no_option_of_nfs_by_which_the_client_finds_another_server() {
    let common = "ro,noatime,nodiratime,noexec,nosuid,nodev,nfsvers=4.2,vers=3,nolock,hard,soft,\
                  rsize=65536,wsize=65536,actimeo=1,noac,sync,x-own,nofail";
    for word in common.split(',') {
        let options = parsed(&[word]);
        assert!(options.refuse_unlisted(Some("nfs")).is_ok(), "{word}");
        assert_eq!(options.clone().for_pods(Some("nfs")), Ok(options));
    }
    // What the export requires may be more.
    let example = parsed(&["nfsvers=4.1,sec=sys"]).for_pods(Some("nfs"));
    assert_eq!(example, Ok(parsed(&["nfsvers=4.1"])));
    for word in [
        "port=30049",
        "mountport=30049",
        "addr=10.0.0.1",
        "proto=udp",
        "udp",
        "rdma",
        "sec=krb5",
        "sec=none",
        "resvport",
        "nconnect=16",
        "max_connect=16",
        "timeo=1",
        "retrans=0",
        "vers=2",
        "suid",
        "dev",
        "context=a:b:c:s0",
    ] {
        let refused = parsed(&["ro", word]).for_pods(Some("nfs"));
        assert_eq!(refused, Err(word.to_owned()));
    }
    for word in [
        "suid",
        "dev",
        "context=a",
        "fscontext=a",
        "defcontext=a",
        "rootcontext=a",
    ] {
        for fs in [None, Some("ext4")] {
            let refused = parsed(&["discard", word]).for_pods(fs);
            assert_eq!(refused, Err(word.to_owned()));
        }
    }
}

proptest! {
    #[test]
    fn any_text_is_taken_or_refused_and_the_canonical_form_means_the_same(
        flags in prop::collection::vec("[a-z,=\"\\x00 ]{0,12}|ro|rw|noatime|dev|.{0,20}", 0..5)
    ) {
        if let Ok(options) = MountOptions::parse(&flags) {
            prop_assert_eq!(&parsed(&[&options.to_string()]), &options);
            let words: Vec<String> = options.clone().into();
            prop_assert_eq!(MountOptions::try_from(words).expect("canonical"), options);
        }
    }

    #[test]
    fn order_and_grouping_do_not_matter(
        words in prop::collection::hash_set("[b-k]{1,6}(=[a-z0-9]{0,4})?", 0..6)
    ) {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        prop_assume!(MountOptions::parse(&words).is_ok());
        let reversed: Vec<&str> = words.iter().rev().copied().collect();
        prop_assert_eq!(parsed(&words), parsed(&reversed));
        prop_assert_eq!(parsed(&words), parsed(&[&words.join(",")]));
    }

    /// The rule behind the lists, stated independently: no path, no device, no
    /// other server, no halt.
    #[test]
    fn allowed_mount_options_name_no_file(
        key in prop::sample::select(vec![
            "journal_path", "journal_dev", "logdev", "rtdev", "device", "subvol", "subvolid",
            "errors", "fatal_errors", "context", "usrjquota", "data", "commit", "discard",
            "compress", "stripe", "quota", "sb", "abort", "barrier", "space_cache",
            "addr", "clientaddr", "mounthost", "mountaddr", "fsc", "proto", "vers", "sec",
        ]),
        value in prop::option::of(prop::sample::select(vec![
            "/dev/sda", "panic", "bug", "0x801", "5", "../x", "a/b", "a:b:c:s0", "zstd:/x", "1,2",
            "ordered", "v2", ".", "=x", "", "10.0.0.1", "tcp", "4.1", "krb5p",
        ])),
    ) {
        let word = match value {
            Some(value) => format!("\"{key}={value}\""),
            None => key.to_owned(),
        };
        let options = parsed(&[&word]);
        for fs in [None, Some("ext4"), Some("xfs"), Some("btrfs"), Some("nfs")] {
            if options.refuse_unlisted(fs).is_err() { continue }
            let value = value.unwrap_or_default();
            prop_assert!(!value.contains('/') && !value.starts_with('.'), "{}", word);
            let halts = key == "errors" && value != "continue" && value != "remount-ro";
            prop_assert!(!halts, "{}", word);
            let bad = [
                "journal_path", "journal_dev", "logdev", "rtdev", "device", "subvol", "subvolid",
                "fatal_errors", "sb", "abort",
                // Of NFS, which another server, or a cache on the node's disk, would serve.
                "addr", "clientaddr", "mounthost", "mountaddr", "fsc",
            ];
            prop_assert!(!bad.contains(&key), "{}", word);
        }
    }
}
