//! Files that change while their volumes are in use.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt as _,
};

use testkit::{Content, MIB, loops_over, run, story};

use super::{Machine, all_options_at, capacity, image};

#[test]
fn options_change_while_the_volume_is_in_use() {
    story(async |sandbox| {
        let machine = Machine::start(sandbox).await;
        let image = image(sandbox, "data");
        let path = machine.path("data");
        let ask = |options: &str| {
            let options = format!("fs = 'ext4'\noptions = [{options}]");
            machine.write("data", &machine.file("data", "mount", &options));
        };
        let has = |option: &str| {
            let (mount, superblock) = all_options_at(&path);
            let mut all = mount.split(',').chain(superblock.split(','));
            all.any(|it| it == option)
        };
        ask("");
        machine.wait("data", "mounted");
        let content = Content::new("in use");
        content.write(&path.join("file"));
        let open = File::open(path.join("file")).unwrap();
        let loops = loops_over(&image);

        ask("'noexec', 'sync', 'commit=30'");
        machine.wait("data", "mounted");
        assert!(has("noexec") && has("sync") && has("commit=30"));
        ask("'commit=20'");
        machine.wait("data", "mounted");
        assert!(has("commit=20") && !has("noexec") && !has("sync"));
        // The kernel refuses this one, and a new mount waits for the user.
        ask("'commit=20', 'data=journal'");
        machine
            .wait_for("data", "failed", "keeps its options while it is mounted")
            .await;
        machine.wait_for("data", "failed", "needed since").await;
        ask("'commit=20'");
        machine.wait("data", "mounted");

        // Read-only, once nobody writes.
        let written = File::options()
            .append(true)
            .open(path.join("file"))
            .unwrap();
        ask("'commit=20', 'ro'");
        machine.wait_for("data", "failed", "open for writing").await;
        // Nothing was changed.
        ask("'commit=20'");
        machine.wait("data", "mounted");
        assert_eq!(loops_over(&image), loops);
        ask("'commit=20', 'ro'");
        machine.wait_for("data", "failed", "open for writing").await;
        drop(written);
        machine.wait("data", "mounted");
        let refused = fs::write(path.join("new"), "").unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ReadOnlyFilesystem);
        assert_eq!(loops_over(&image), loops);
        machine.node.kill9().await;
        machine.node.restart().await;
        machine.wait("data", "mounted");
        // Writable only by another stage.
        ask("'commit=20'");
        machine.wait_for("data", "failed", "in use").await;
        drop(open);
        machine.wait("data", "mounted");
        fs::write(path.join("new"), "").unwrap();
        content.assert_in(&path.join("file"));
        machine.remove("data");
        machine.wait("data", "gone");
        machine.node.assert_clean().await;
    });
}

#[test]
fn a_file_system_grows_to_the_size_and_never_shrinks() {
    story(async |sandbox| {
        let machine = Machine::start(sandbox).await;
        let image = sandbox.pool("main").join("data.img");
        sandbox.volume_in("main", "data", "xfs", 320 * MIB);
        let path = machine.path("data");
        let ask = |size: &str| {
            let text = machine.file("data", "mount", "fs = 'xfs'");
            machine.write("data", &format!("size = '{size}'\n{text}"));
            machine.wait("data", "mounted");
        };
        ask("320Mi");
        let content = Content::new("grows");
        content.write(&path.join("file"));
        let open = File::open(path.join("file")).unwrap();
        let before = capacity(&path);
        ask("384Mi");
        let grown = capacity(&path);
        assert!(grown > before + 32 * MIB, "{before} -> {grown}");
        // The size is the least that it is to have.
        ask("64Mi");
        assert_eq!(capacity(&path), grown);
        assert_eq!(fs::metadata(&image).unwrap().len(), 384 * MIB);
        content.assert_in(&path.join("file"));
        drop(open);
        machine.remove("data");
        machine.wait("data", "gone");
        machine.node.assert_clean().await;
    });
}

#[test]
fn a_read_only_volume_is_not_written() {
    story(async |sandbox| {
        let machine = Machine::start(sandbox).await;
        let image = image(sandbox, "data");
        let path = machine.path("data");
        let ask = |access: &str, more: &str| {
            machine.write("data", &machine.file("data", access, more));
        };
        let is_device_read_only = || {
            let device = loops_over(&image).remove(0);
            run(&["blockdev", "--getro", device.to_str().unwrap()]).trim() == "1"
        };
        // A blank volume gets no file system by it.
        ask("mount", "read-only = true");
        machine
            .wait_for("data", "failed", "cannot be formatted read-only")
            .await;
        ask("mount", "");
        machine.wait("data", "mounted");
        let content = Content::new("read");
        content.write(&path.join("file"));

        // In use, by the mount alone.
        let open = File::open(path.join("file")).unwrap();
        ask("mount", "read-only = true");
        machine.wait("data", "mounted");
        let refused = fs::write(path.join("new"), "").unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ReadOnlyFilesystem);
        drop(open);
        // Attached anew, by the device as well, in both ways of use.
        machine.remove("data");
        machine.wait("data", "gone");
        ask("mount", "read-only = true");
        machine.wait("data", "mounted");
        let refused = fs::write(path.join("new"), "").unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ReadOnlyFilesystem);
        assert!(is_device_read_only());
        content.assert_in(&path.join("file"));
        ask("raw", "read-only = true");
        machine.wait("data", "mounted");
        assert!(content.write_at(&path, MIB).is_err());
        assert!(is_device_read_only());

        let text = machine.file("data", "mount", "read-only = true");
        machine.write("data", &format!("size = '96Mi'\n{text}"));
        machine
            .wait_for("data", "bad", "a volume that is read-only does not grow")
            .await;
        ask("mount", "owner = '7:8'");
        machine.wait("data", "mounted");
        assert!(!is_device_read_only());
        assert_eq!(fs::metadata(&path).unwrap().uid(), 7);
        fs::write(path.join("new"), "").unwrap();
        content.assert_in(&path.join("file"));
        machine.remove("data");
        machine.wait("data", "gone");
        machine.node.assert_clean().await;
    });
}
