//! A volume comes by its file, changes, and goes with it.

use std::{
    fs::{self, File},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use serde_json::Value;
use testkit::{Content, MIB, all_loops, eventually, loops_over, run, story};

use super::{Machine, image, options_at};

#[test]
fn a_file_asks_for_a_volume() {
    story(async |sandbox| {
        let machine = Machine::start(sandbox).await;
        let image = image(sandbox, "data");
        let path = machine.path("data");
        let content = Content::new("managed");
        let file = sandbox.dir().join("data.toml");
        let access = "fs = 'ext4'\nowner = '999:998'\nmode = '0750'";
        fs::write(&file, machine.file("data", "mount", access)).unwrap();
        let file = file.to_str().unwrap();
        let plan = |args: &[&str]| {
            let planned = machine.operator.json(&[&["plan"], args].concat());
            let volumes = planned["volumes"].as_array().expect("volumes");
            volumes.first().cloned().unwrap_or_default()
        };
        let new = plan(&[file]);
        assert_eq!(new["reason"], "data.toml asks for it");
        let actions = ["take over data.toml", "attach and mount", "publish"];
        assert_eq!(new["actions"], Value::from(actions.to_vec()));
        assert_eq!(plan(&[]), Value::Null, "nothing was written");
        machine.operator.json(&["apply", file]);
        machine.wait("data", "mounted");
        let (ready, actions) = (plan(&[]), plan(&[])["actions"].clone());
        assert_eq!(
            (&ready["state"], actions),
            (&"ready".into(), Value::Array(Vec::new()))
        );
        let root = fs::metadata(&path).unwrap();
        let access = (root.uid(), root.gid(), root.mode() & 0o7777);
        assert_eq!(access, (999, 998, 0o750));
        content.write(&path.join("file"));

        // Another setup: not while it is in use.
        let open = File::open(path.join("file")).unwrap();
        machine.write(
            "data",
            &machine.file("data", "mount", "options = ['nosuid', 'noexec']"),
        );
        machine.wait_for("data", "failed", "in use").await;
        assert!(!options_at(&path).contains("noexec"));
        drop(open);
        machine.wait("data", "mounted");
        assert!(options_at(&path).contains("noexec"));
        content.assert_in(&path.join("file"));

        // Unmounted by others, it comes back.
        run(&["umount", path.to_str().unwrap()]);
        eventually("mounted again", async || {
            path.join("file").exists().then_some(())
        })
        .await;

        // Another path, by a file of another name.
        let other = machine.path("other");
        let text = machine.file("data", "mount", "options = ['nosuid', 'noexec']");
        let text = text.replace(path.to_str().unwrap(), other.to_str().unwrap());
        machine.write("renamed", &format!("handle = 'data'\n{text}"));
        machine
            .wait_for("renamed", "bad", "handle: is that of data.toml")
            .await;
        machine.remove("data");
        machine.wait("renamed", "mounted");
        content.assert_in(&other.join("file"));
        assert!(!path.exists());
        assert_eq!(loops_over(&image).len(), 1);

        machine.operator.json(&["remove", "renamed"]);
        machine.wait("renamed", "gone");
        assert!(loops_over(&image).is_empty());
        machine.node.assert_clean().await;
    });
}

#[test]
fn a_raw_volume_is_a_device_at_a_path() {
    story(async |sandbox| {
        let machine = Machine::start(sandbox).await;
        let image = image(sandbox, "disk");
        machine.write("disk", &machine.file("disk", "raw", ""));
        machine.wait("disk", "mounted");
        let path = machine.path("disk");
        let content = Content::new("raw");
        // A map by volume and user: also by its next name, and after a restart.
        let mapped = |user: &str| {
            let maps = machine.node.run_dir.join("devices/disk");
            fs::read_link(maps.join(user)).is_ok_and(|node| node == path)
        };
        assert!(mapped("disk"));
        content
            .write_at(&machine.node.run_dir.join("devices/disk/disk"), MIB)
            .unwrap();
        let text = machine.file("disk", "raw", "");
        machine.write("renamed", &format!("handle = 'disk'\n{text}"));
        machine.remove("disk");
        machine.wait("renamed", "mounted");
        assert!(mapped("renamed") && !mapped("disk"));
        machine.write("disk", &text);
        machine.remove("renamed");
        machine.wait("disk", "mounted");
        assert!(mapped("disk") && !mapped("renamed"));
        // The lock is held, also after it was lost while no agent ran.
        let device = loops_over(&image).remove(0);
        let locks = || {
            let over = |on: &Path| on == path || on == device;
            let locks = all_loops().into_iter().filter(|(_, on)| over(on));
            locks.map(|(lock, _)| lock).collect::<Vec<_>>()
        };
        let locked_again = async || {
            eventually("locked", async || (locks().len() == 1).then_some(())).await;
        };
        assert_eq!(locks().len(), 1);
        machine.node.kill9().await;
        run(&["losetup", "--detach", locks()[0].to_str().unwrap()]);
        fs::remove_file(machine.node.run_dir.join("devices/disk/disk")).unwrap();
        machine.node.restart().await;
        locked_again().await;
        eventually("mapped again", async || mapped("disk").then_some(())).await;
        // The lock of a path that others have unmounted goes.
        machine.node.kill9().await;
        let orphan = locks().remove(0);
        run(&["umount", "--lazy", path.to_str().unwrap()]);
        machine.node.restart().await;
        machine.wait("disk", "mounted");
        locked_again().await;
        eventually("released", async || {
            let is_orphan =
                |(lock, on): &(PathBuf, PathBuf)| *lock == orphan && on == Path::new("/");
            (!all_loops().iter().any(is_orphan)).then_some(())
        })
        .await;
        // It grows while it is in use.
        let open = File::open(&path).unwrap();
        let text = format!("size = '96Mi'\n{}", machine.file("disk", "raw", ""));
        machine.write("disk", &text);
        machine.wait("disk", "mounted");
        let size = run(&["blockdev", "--getsize64", path.to_str().unwrap()]);
        assert_eq!(size.trim(), (96 * MIB).to_string());
        // It stays while it is in use.
        machine.remove("disk");
        machine.wait_for("disk", "failed", "in use").await;
        assert_eq!(loops_over(&image).len(), 1);
        assert!(!mapped("disk"));
        machine.write("disk", &text);
        machine.wait("disk", "mounted");
        locked_again().await;
        assert!(mapped("disk"));
        machine.remove("disk");
        machine.wait_for("disk", "failed", "in use").await;
        drop(open);
        machine.wait("disk", "gone");
        assert!(locks().is_empty() && !machine.node.run_dir.join("devices/disk").exists());
        content.assert_at(&image, MIB);
        assert!(loops_over(&image).is_empty());
        machine.node.assert_clean().await;
    });
}
