//! Formatted volumes: written data stays, mount and mkfs options take effect, and only what
//! is proven blank is formatted.

use std::{fs, os::unix::fs::FileExt as _, path::Path};

use testkit::{
    Content, MIB, Mode, Node, NodeSetup, ProgramStub, Volume, loops_over, refused, run, run_err,
    sha256, story,
};
use tonic::Code::{FailedPrecondition, InvalidArgument};

/// A mount's options: its own and its superblock's.
fn options(at: &Path) -> Vec<String> {
    let at = at.display().to_string();
    run(&["findmnt", "-n", "-o", "OPTIONS", "-M", &at])
        .trim()
        .split(',')
        .map(str::to_owned)
        .collect()
}

fn fs_type(at: &Path) -> String {
    let at = at.display().to_string();
    run(&["findmnt", "-n", "-o", "FSTYPE", "-M", &at])
        .trim()
        .to_owned()
}

#[test]
fn ext4_keeps_written_data() {
    keeps_written_data("ext4");
}

#[test]
fn xfs_keeps_written_data() {
    keeps_written_data("xfs");
}

#[test]
fn btrfs_keeps_written_data() {
    keeps_written_data("btrfs");
}

fn keeps_written_data(kind: &'static str) {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", kind);
        let content = Content::new(kind);
        let target = node.up(&volume, "one").await;
        assert_eq!(fs_type(&target), kind);
        content.write(&target.join("file"));

        // A second pod on the node sees the same files, read-only if it requests that.
        node.publish_read_only(&volume, "two").await.unwrap();
        let second = node.target(&volume, "two");
        content.assert_in(&second.join("file"));
        assert!(fs::write(second.join("other"), "x").is_err());
        fs::write(target.join("other"), "x").expect("the first still writes");
        node.unpublish(&volume, "two").await.unwrap();
        node.down(&volume, "one").await;
        assert!(loops_over(&sandbox.image(&volume)).is_empty());

        // At another path, and later: nothing was formatted again.
        let target = node.up(&volume, "three").await;
        content.assert_in(&target.join("file"));
        node.down(&volume, "three").await;
        node.assert_clean().await;
    });
}

#[test]
fn mount_flags_take_effect() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("flags", "ext4").flags(&[
            "noatime",
            "nosuid,nodev",
            "data=writeback",
            "discard",
            // Options of mount(8) alone.
            "_netdev,nofail",
            "x-systemd.automount",
            "comment=a",
            "defaults",
        ]);
        let target = node.up(&volume, "pod").await;
        for at in [target, node.staging(&volume)] {
            let options = options(&at);
            for expected in ["noatime", "nosuid", "nodev", "discard", "data=writeback"] {
                assert!(
                    options.iter().any(|o| o == expected),
                    "{expected}: {options:?}"
                );
            }
            assert!(!options.iter().any(|o| o.contains("x-") || o == "_netdev"));
        }
        node.down(&volume, "pod").await;

        for (name, flags, word) in [
            ("unknown", "nosuchoption=1", "nosuchoption"),
            ("bind", "bind", "bind"),
            ("remount", "remount", "remount"),
            ("loop", "loop", "loop"),
            ("propagation", "rshared", "rshared"),
            ("journal", "journal_path=/dev/sda", "journal_path"),
            ("halt", "errors=panic", "errors=panic"),
            ("other's", "logdev=/dev/sda", "logdev"),
        ] {
            let volume = sandbox.volume(name, "ext4").flags(&[flags]);
            refused(node.stage(&volume).await, InvalidArgument, &[word]);
            assert!(loops_over(&sandbox.image(&volume)).is_empty());
        }
        node.assert_clean().await;
    });
}

/// Without SELinux the kernel refuses a context, and its error names it.
#[test]
fn a_context_is_refused_by_name_where_selinux_is_off() {
    if Path::new("/sys/fs/selinux/enforce").exists() {
        return;
    }
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let context = r#"context="system_u:object_r:container_file_t:s0:c1,c2""#;
        let volume = sandbox.volume("v", "ext4").flags(&[context]);
        refused(node.stage(&volume).await, InvalidArgument, &["context"]);
        assert!(loops_over(&sandbox.image(&volume)).is_empty());
        node.assert_clean().await;
    });
}

/// The superblock of an image is untrusted: its author may not be the node's owner.
#[test]
fn mount_settings_in_an_image_do_not_affect_the_node() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", "ext4");
        let image = sandbox.image(&volume);
        let image = image.to_str().unwrap();
        run(&["mkfs.ext4", "-q", "-F", image]);
        run(&["tune2fs", "-e", "panic", image]);
        let target = node.up(&volume, "pod").await;
        let shown = options(&target);
        assert!(shown.iter().any(|o| o == "errors=remount-ro"), "{shown:?}");
        node.down(&volume, "pod").await;

        let with_flag = volume.clone().flags(&["errors=continue"]);
        let shown = options(&node.up(&with_flag, "pod").await);
        assert!(!shown.iter().any(|o| o == "errors=remount-ro"), "{shown:?}");
        node.down(&with_flag, "pod").await;

        run(&["tune2fs", "-E", "mount_opts=errors=panic", image]);
        let words = ["mount options", "tune2fs"];
        refused(node.stage(&volume).await, FailedPrecondition, &words);
        assert!(loops_over(&sandbox.image(&volume)).is_empty());
        node.assert_clean().await;
    });
}

#[test]
fn an_image_too_small_for_its_file_system_is_refused() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        for (name, fs, bytes) in [("tiny", "ext4", 1000), ("small", "xfs", 8 * MIB)] {
            let volume = sandbox.volume_in("main", name, fs, bytes);
            refused(
                node.stage(&volume).await,
                FailedPrecondition,
                &["too few", fs],
            );
            assert!(loops_over(&sandbox.image(&volume)).is_empty());
        }
        node.assert_clean().await;
    });
}

/// Such as one restored from a backup, by other programs, for a claim whose file system did
/// not fit.
#[test]
fn a_refused_mkfs_vouches_for_nothing_that_is_written_later() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume_in("main", "small", "xfs", 8 * MIB);
        let image = sandbox.image(&volume);
        refused(node.stage(&volume).await, FailedPrecondition, &["too few"]);
        node.unstage(&volume).await.unwrap();
        let written = b"restored by others".repeat(4096);
        let file = std::fs::File::options().write(true).open(&image).unwrap();
        file.write_all_at(&written, 0).unwrap();

        let image = image.file_name().unwrap().to_str().unwrap();
        let other = Volume::filesystem("small", "ext4").over("main", image);
        let words = ["unknown data at byte 0"];
        refused(node.stage(&other).await, FailedPrecondition, &words);
        assert!(
            std::fs::read(sandbox.image(&other))
                .unwrap()
                .starts_with(&written)
        );
        node.assert_clean().await;
    });
}

#[test]
fn a_volume_for_readers_is_never_written() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        for kind in ["ext4", "xfs", "btrfs"] {
            let volume = sandbox.volume(kind, kind);
            let content = Content::new("readers");
            content.write(&node.up(&volume, "writer").await.join("file"));
            node.down(&volume, "writer").await;
            let before = sha256(&sandbox.image(&volume)).unwrap();

            let reader = volume.clone().mode(Mode::SingleNodeReaderOnly);
            let target = node.up(&reader, "reader").await;
            content.assert_in(&target.join("file"));
            assert!(fs::write(target.join("other"), "x").is_err());
            node.down(&reader, "reader").await;

            let flagged = volume.flags(&["ro"]);
            let target = node.up(&flagged, "flagged").await;
            assert!(fs::write(target.join("other"), "x").is_err());
            node.down(&flagged, "flagged").await;
            assert_eq!(sha256(&sandbox.image(&flagged)).unwrap(), before, "{kind}");
        }

        // Blank and read-only: there is nothing to read, and nothing is made.
        let blank = sandbox
            .volume("blank", "ext4")
            .mode(Mode::SingleNodeReaderOnly);
        refused(node.stage(&blank).await, FailedPrecondition, &["blank"]);
        assert!(
            fs::read(sandbox.image(&blank))
                .unwrap()
                .iter()
                .all(|&b| b == 0)
        );
        node.assert_clean().await;
    });
}

#[test]
fn a_dirty_ext4_is_checked_before_it_is_mounted() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("dirty", "ext4");
        let content = Content::new("dirty");
        content.write(&node.up(&volume, "pod").await.join("file"));
        node.down(&volume, "pod").await;
        let image = sandbox.image(&volume);
        let image = image.to_str().unwrap();
        // EXT4_ERROR_FS: the kernel found an inconsistency at some time.
        run(&["debugfs", "-w", "-R", "ssv state 2", image]);

        let target = node.up(&volume, "pod").await;
        content.assert_in(&target.join("file"));
        node.down(&volume, "pod").await;
        let said = run(&["dumpe2fs", "-h", image]);
        assert!(
            said.lines()
                .any(|line| line.starts_with("Filesystem state:") && line.ends_with(" clean")),
            "{said}"
        );
        node.assert_clean().await;
    });
}

#[test]
fn an_ext4_beyond_automatic_repair_is_left_to_an_operator() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("broken", "ext4");
        node.up(&volume, "pod").await;
        node.down(&volume, "pod").await;
        let image = sandbox.image(&volume);
        let text = image.to_str().unwrap();
        // The root directory's inode cleared: `fsck -a` refuses to guess.
        run(&["debugfs", "-w", "-R", "clri <2>", text]);
        run(&["debugfs", "-w", "-R", "ssv state 2", text]);
        refused(
            node.stage(&volume).await,
            FailedPrecondition,
            &["broken", "fsck"],
        );
        assert!(loops_over(&image).is_empty());
        node.assert_clean().await;
    });
}

#[test]
fn the_default_and_the_class_choose_the_file_system() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let default = sandbox.volume("default", "");
        let target = node.up(&default, "pod").await;
        assert_eq!(fs_type(&target), "ext4");
        node.down(&default, "pod").await;

        let class = sandbox
            .volume_in("main", "class", "", 320 * MIB)
            .with("fsType", "xfs");
        let target = node.up(&class, "pod").await;
        assert_eq!(fs_type(&target), "xfs");
        node.down(&class, "pod").await;

        let labelled = sandbox
            .volume("labelled", "ext4")
            .with("mkfsOptions", "-L 'two words' -m 7");
        node.up(&labelled, "pod").await;
        node.down(&labelled, "pod").await;
        let image = sandbox.image(&labelled);
        let label = run(&["e2label", image.to_str().unwrap()]);
        assert_eq!(label.trim(), "two words");

        let unsupported = sandbox.volume("unsupported", "zfs");
        refused(
            node.stage(&unsupported).await,
            InvalidArgument,
            &["zfs", "ext4", "xfs", "btrfs"],
        );
        node.assert_clean().await;
    });
}

#[test]
fn the_file_system_on_the_volume_wins_over_none_and_loses_to_another() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", "xfs");
        node.up(&volume, "pod").await;
        node.down(&volume, "pod").await;
        let other = testkit::Volume::filesystem("v", "ext4").over("main", "v.img");
        refused(
            node.stage(&other).await,
            FailedPrecondition,
            &["xfs", "ext4"],
        );
        node.assert_clean().await;
    });
}

/// Its name, words of the refusal, and the command that writes it to the image.
type Foreign<'a> = (&'a str, &'a [&'a str], &'a dyn Fn(&Path));

#[test]
fn foreign_content_is_never_formatted() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let gpt: &dyn Fn(&Path) = &|image| {
            let script = sandbox.dir().join("gpt");
            fs::write(&script, "label: gpt\n,\n").unwrap();
            // Otherwise it ends with a sync(2), which writes what other stories leave unwritten.
            let sfdisk = "sfdisk -q --no-tell-kernel";
            let line = format!("{sfdisk} {} < {}", image.display(), script.display());
            run(&["sh", "-c", &line]);
        };
        let put = |image: &Path, offset: u64, bytes: &[u8]| {
            let file = fs::File::options().write(true).open(image).unwrap();
            file.write_all_at(bytes, offset).unwrap();
        };
        let luks: &dyn Fn(&Path) = &|image| put(image, 0, b"LUKS\xba\xbe\0\x02");
        let lvm: &dyn Fn(&Path) = &|image| {
            put(
                image,
                512,
                b"LABELONE\x01\0\0\0\0\0\0\0\0\0\0\0\x20\0\0\0LVM2 001",
            );
        };
        let random: &dyn Fn(&Path) = &|image| Content::new("random").write_at(image, 0).unwrap();
        let swap: &dyn Fn(&Path) = &|image| drop(run(&["mkswap", image.to_str().unwrap()]));
        let vfat: &dyn Fn(&Path) = &|image| put(image, 54, b"FAT16   ");
        // The first blocks were wiped, but a copy of the superblock is left.
        let headless: &dyn Fn(&Path) = &|image| {
            run(&[
                "mkfs.ext4",
                "-q",
                "-F",
                "-b",
                "1024",
                image.to_str().unwrap(),
            ]);
            put(image, 0, &vec![0; 1 << 20]);
        };
        let tail: &dyn Fn(&Path) = &|image| put(image, 64 * MIB - 512, b"something");
        let cases: [Foreign; 8] = [
            ("gpt", &["partition"], gpt),
            ("luks", &["LUKS"], luks),
            ("lvm", &["LVM"], lvm),
            ("random", &["format"], random),
            ("swap", &["swap"], swap),
            ("vfat", &[], vfat),
            ("headless", &[], headless),
            ("tail", &[], tail),
        ];
        for (name, words, fill) in cases {
            let volume = sandbox.volume(name, "ext4");
            let image = sandbox.image(&volume);
            fill(&image);
            let before = sha256(&image).unwrap();
            let words = [words, &[name][..]].concat();
            refused(node.stage(&volume).await, FailedPrecondition, &words);
            assert!(loops_over(&image).is_empty(), "{name}");
            assert_eq!(sha256(&image).unwrap(), before, "{name} was written to");
        }
        node.assert_clean().await;
    });
}

#[test]
fn a_device_that_is_busy_for_a_moment_is_formatted_and_checked() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        for kind in ["ext4", "xfs", "btrfs"] {
            let mkfs = ProgramStub::busy_once(&format!("mkfs.{kind}"));
            let volume = sandbox.volume(kind, kind);
            node.up(&volume, "pod").await;
            assert!(mkfs.reached.exists());
            node.down(&volume, "pod").await;
            drop(mkfs);
            if kind != "ext4" {
                continue;
            }
            let image = sandbox.image(&volume);
            run(&[
                "debugfs",
                "-w",
                "-R",
                "ssv state 2",
                image.to_str().unwrap(),
            ]);
            let fsck = ProgramStub::busy_once("e2fsck");
            node.up(&volume, "pod").await;
            assert!(fsck.reached.exists());
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn an_interrupted_format_is_made_again() {
    story(async |sandbox| {
        // Slow enough to be observed: the inode tables are written at once.
        let node = Node::start_with(sandbox, NodeSetup::new(sandbox)).await;
        let volume = sandbox.volume_in("main", "big", "ext4", 40_960 * MIB).with(
            "mkfsOptions",
            "-E lazy_itable_init=0,lazy_journal_init=0 -m 0",
        );
        let image = sandbox.image(&volume);
        let mkfs_runs = async || {
            let written = std::os::unix::fs::MetadataExt::blocks(&fs::metadata(&image).unwrap());
            (written > 1024).then_some(())
        };
        let (cut_off, ()) = tokio::join!(node.stage(&volume), async {
            testkit::eventually("mkfs has begun to write", mkfs_runs).await;
            node.kill9().await;
        });
        assert!(
            cut_off.is_err(),
            "the format was too fast to be interrupted"
        );
        node.restart().await;
        node.retry_until_ok("the retry formats again", async || {
            node.stage(&volume).await
        })
        .await;
        node.publish(&volume, "pod").await.unwrap();
        Content::new("again").write(&node.target(&volume, "pod").join("file"));
        node.down(&volume, "pod").await;
        run_err(&["fsck.ext4", "-f", "-n", image.to_str().unwrap()]).expect("a sound file system");
        node.assert_clean().await;
    });
}

#[test]
fn a_format_marker_does_not_outweigh_a_file_system() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", "ext4");
        let content = Content::new("precious");
        content.write(&node.up(&volume, "pod").await.join("file"));
        node.down(&volume, "pod").await;

        // The marker of an agent that died after mkfs, before it removed the marker.
        let dir = sandbox.pool("main").join(".uring-csi/mkfs");
        let left = dir.join(sandbox.image(&volume).file_name().unwrap());
        fs::write(&left, "v").unwrap();
        content.assert_in(&node.up(&volume, "pod").await.join("file"));
        assert!(!left.exists(), "the format marker outlives its mkfs");
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

/// The probe finds an ext4; its driver finds it damaged.
#[test]
fn a_file_system_that_cannot_be_mounted_is_refused_for_good_and_undone() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", "ext4");
        let content = Content::new("kept");
        content.write(&node.up(&volume, "pod").await.join("file"));
        node.down(&volume, "pod").await;
        let image = std::fs::File::options()
            .read(true)
            .write(true)
            .open(sandbox.image(&volume))
            .unwrap();
        // The descriptors of its groups, with blocks of 1 KiB and of 4.
        let mut descriptors = vec![0; 6 << 10];
        image.read_exact_at(&mut descriptors, 2 << 10).unwrap();
        image.write_all_at(&vec![0xff; 6 << 10], 2 << 10).unwrap();

        for _ in 0..2 {
            let words = ["ext4", "kernel log", "repair"];
            refused(node.stage(&volume).await, FailedPrecondition, &words);
            assert!(loops_over(&sandbox.image(&volume)).is_empty());
        }
        node.unstage(&volume).await.unwrap();
        image.write_all_at(&descriptors, 2 << 10).unwrap();
        content.assert_in(&node.up(&volume, "pod").await.join("file"));
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}
