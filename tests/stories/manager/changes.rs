//! Files that change while their volumes are in use.

use std::{
    fs::{self, File},
    io,
};

use testkit::{Content, loops_over, story};

use super::{Machine, all_options_at, image};

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
