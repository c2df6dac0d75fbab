use proptest::prelude::*;

use super::*;

fn parsed(flags: &[&str]) -> MountOptions {
    MountOptions::parse(flags).expect("taken")
}

fn fs_options(options: &MountOptions) -> Vec<String> {
    options.fs_options().map(FsOption::to_string).collect()
}

#[test]
fn attributes_and_superblock_options_are_told_apart() {
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
fn words_for_mount8_are_dropped_and_file_systems_words_are_not() {
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
fn the_last_of_contradictory_words_wins() {
    assert!(!parsed(&["ro", "rw"]).read_only());
    assert_eq!(parsed(&["noatime,relatime"]), parsed(&["atime"]));
}

#[test]
fn what_is_no_mount_of_this_volume_is_refused_by_name() {
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
        assert!(matches!(&error, OptionError::Refused { option, .. } if option == word));
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
        assert!(matches!(error, OptionError::Malformed { .. }), "{error}");
    }
    let error = MountOptions::parse(&["context=\"a"]).expect_err("open");
    assert!(matches!(error, OptionError::OpenQuote { .. }));
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
}
