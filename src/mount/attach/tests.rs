use std::{fs, os::unix::fs::MetadataExt};

use super::*;
use crate::{
    Done,
    kernel::Dev,
    mount::testing::{MountScratch, TestLoop},
};

fn parsed(words: &str) -> MountOptions {
    MountOptions::parse(&[words]).expect("options")
}

fn mounted(
    (fs_type, device): (&str, &TestLoop),
    words: &str,
    at: &SafePath,
) -> Result<Mounted, MountError> {
    let new = NewMount {
        fs_type,
        source: &device.node,
        options: &parsed(words),
        extra: &[],
        read_only: false,
    };
    mount(&new, at)
}

fn unmounted(at: &SafePath) {
    assert_eq!(unmount(at).expect("no descriptor is left"), Done::Now);
}

#[test]
fn each_file_system_is_mounted_and_can_be_unmounted_at_once() {
    let scratch = MountScratch::new();
    let place = scratch.directory("m");
    for (fs_type, mkfs) in [
        ("ext4", "mkfs.ext4"),
        ("xfs", "mkfs.xfs"),
        ("btrfs", "mkfs.btrfs"),
    ] {
        let device = TestLoop::new(&scratch, &[mkfs], &[]);
        let rdev = Dev::from_raw(fs::metadata(&device.node).expect("there").rdev());

        let made = mounted((fs_type, &device), "noatime", &place).expect(fs_type);
        assert!(made.directory && made.rdev.is_none());
        assert!(!place.is_read_only(&made).expect("looks"));
        assert_eq!(place.kind().expect("looks"), PathKind::Mount(made));
        let entry = table::covering(place.open().expect("opens").as_fd()).expect("there");
        assert_eq!(Path::new(&entry.source), device.node);
        assert_eq!(entry.fs_type, fs_type);
        // btrfs has a number of its own.
        assert_eq!(made.dev == rdev, fs_type != "btrfs");
        fs::write(place.path().join("file"), "text").expect("writable");
        unmounted(&place);

        let made = mounted((fs_type, &device), "ro", &place).expect(fs_type);
        assert!(place.is_read_only(&made).expect("looks"));
        unmounted(&place);
    }
}

#[test]
fn a_refused_option_is_named_with_the_kernels_reason() {
    let scratch = MountScratch::new();
    let place = scratch.directory("m");
    let device = TestLoop::new(&scratch, &["mkfs.ext4"], &[]);
    for (words, culprit) in [
        ("discard,nosuch=1", "nosuch=1"),
        ("commit=soon", "commit=soon"),
    ] {
        match mounted(("ext4", &device), words, &place).expect_err("refused") {
            MountError::BadOption {
                option,
                kernel_says,
                ..
            } => {
                assert_eq!(option, culprit);
                let key = culprit.split('=').next().expect("a key");
                assert!(kernel_says.contains(key), "{kernel_says}");
            }
            error => panic!("{error}"),
        }
    }
    assert_eq!(place.kind().expect("looks"), PathKind::Dir);
}

#[test]
fn a_failed_mount_names_the_reason() {
    let scratch = MountScratch::new();
    let place = scratch.directory("m");
    let blank = TestLoop::new(&scratch, &[], &[]);
    for fs_type in ["ext4", "xfs", "btrfs"] {
        let error = mounted((fs_type, &blank), "", &place).expect_err("blank");
        assert!(matches!(error, MountError::BadSuperblock { .. }), "{error}");
    }
    let error = mounted(("nosuchfs", &blank), "", &place).expect_err("unknown");
    assert!(matches!(error, MountError::Unsupported { .. }), "{error}");

    let protected = TestLoop::new(&scratch, &["mkfs.ext4"], &["--read-only"]);
    let error = mounted(("ext4", &protected), "", &place).expect_err("protected");
    assert!(
        matches!(error, MountError::WriteProtected { .. }),
        "{error}"
    );
    let _ = mounted(("ext4", &protected), "ro", &place).expect("read-only");
    unmounted(&place);
}

/// Two devices over one image simulate two nodes with one export. The kernel watches the
/// MMP block for eleven seconds before it refuses the mount.
#[test]
fn an_ext4_with_mmp_is_mounted_by_one_node_at_a_time() {
    let scratch = MountScratch::new();
    let (first, second) = (scratch.directory("first"), scratch.directory("second"));
    let image = scratch.path().join("image");
    fs::File::create(&image)
        .and_then(|file| file.set_len(64 << 20))
        .expect("sparse");
    let device = TestLoop::over(&image, &["mkfs.ext4", "-O", "mmp"]);
    let other = TestLoop::over(&image, &[]);
    mounted(("ext4", &device), "", &first).expect("mounted");
    let error = mounted(("ext4", &other), "", &second).expect_err("mounted elsewhere");
    assert!(matches!(error, MountError::Busy { .. }), "{error}");
    assert!(error.to_string().contains("mmp"), "{error}");
    unmounted(&first);
    // The mount succeeds at once after a clean unmount of the other.
    mounted(("ext4", &other), "", &second).expect("mounted");
    unmounted(&second);
}

#[test]
fn a_device_mounted_elsewhere_keeps_its_options() {
    let scratch = MountScratch::new();
    let (first, second) = (scratch.directory("first"), scratch.directory("second"));
    let device = TestLoop::new(&scratch, &["mkfs.ext4"], &[]);
    let made = mounted(("ext4", &device), "data=journal,commit=7", &first).expect("mounted");

    for words in ["", "commit=7", "noexec,data=journal"] {
        let again = mounted(("ext4", &device), words, &second).expect(words);
        assert_eq!(again.dev, made.dev);
        assert_ne!(again.id, made.id);
        unmounted(&second);
    }
    match mounted(("ext4", &device), "commit=7,errors=panic", &second).expect_err("other") {
        MountError::OtherOptions { missing, .. } => assert_eq!(missing, "errors=panic"),
        error => panic!("{error}"),
    }
    assert_eq!(second.kind().expect("looks"), PathKind::Dir);

    let error = mounted(("ext4", &device), "ro", &second).expect_err("writable elsewhere");
    assert!(matches!(error, MountError::Busy { .. }), "{error}");
    unmounted(&first);
}

#[test]
fn a_copy_of_an_xfs_is_mounted_with_our_own_option() {
    let scratch = MountScratch::new();
    let (first, second) = (scratch.directory("first"), scratch.directory("second"));
    let uuid = format!("uuid={}", uuid::Uuid::new_v4());
    let mkfs = ["mkfs.xfs", "-m", &uuid];
    let one = TestLoop::new(&scratch, &mkfs, &[]);
    let two = TestLoop::new(&scratch, &mkfs, &[]);

    let _ = mounted(("xfs", &one), "", &first).expect("mounted");
    assert!(
        mounted(("xfs", &two), "", &second).is_err(),
        "the UUID is in use"
    );
    let options = MountOptions::default();
    let new = NewMount {
        fs_type: "xfs",
        source: &two.node,
        options: &options,
        extra: &["nouuid", "logbufs=8"],
        read_only: true,
    };
    let made = mount(&new, &second).expect("mounted");
    assert!(second.is_read_only(&made).expect("looks"));
    unmounted(&second);
    unmounted(&first);
}

#[test]
fn only_a_directory_is_mounted_on() {
    let scratch = MountScratch::new();
    let (elsewhere, file) = (scratch.directory("elsewhere"), scratch.place("file"));
    let _ = file.make_file(0o600).expect("made");
    std::os::unix::fs::symlink(elsewhere.path(), scratch.path().join("link")).expect("linked");
    let device = TestLoop::new(&scratch, &["mkfs.ext4"], &[]);

    for place in [&file, &scratch.place("link")] {
        let error = mounted(("ext4", &device), "", place).expect_err("refused");
        assert!(matches!(error, MountError::WrongTarget { .. }), "{error}");
    }
    let error = mounted(("ext4", &device), "", &scratch.place("absent")).expect_err("refused");
    assert!(matches!(error, MountError::Io { .. }), "{error}");
    assert_eq!(elsewhere.kind().expect("looks"), PathKind::Dir);
}

#[test]
fn a_copy_of_a_mounted_btrfs_has_an_error_of_its_own() {
    // The errno of Linux before 6.7.
    let of = |fs_type| {
        let new = NewMount {
            fs_type,
            source: Path::new("/dev/loop7"),
            options: &MountOptions::default(),
            extra: &[],
            read_only: false,
        };
        not_created(Errno::EXIST, "", &new)
    };
    let said = of("btrfs").to_string();
    assert!(
        said.contains("/dev/loop7") && said.contains("6.7"),
        "{said}"
    );
    assert!(matches!(of("ext4"), MountError::Io { .. }));
}
