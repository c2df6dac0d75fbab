//! What the agent leaves as it is: volumes that may be wanted, and what is of others.

use std::{fs, os::unix::fs::symlink, path::Path};

use testkit::{NfsServer, Volume, can_use_nfs, loops_over, refused, run, story};
use tonic::Code::FailedPrecondition;

use super::{Machine, image, options_at};

#[test]
fn nothing_is_undone_that_may_be_wanted() {
    story(async |sandbox| {
        let machine = Machine::start(sandbox).await;
        let node = &machine.node;
        for name in ["one", "two"] {
            image(sandbox, name);
            machine.write(name, &machine.file(name, "mount", ""));
            machine.wait(name, "mounted");
        }
        // Kubelet's volume, for which no file asks.
        let kubelets = sandbox.volume("kubelets", "ext4");
        let target = node.up(&kubelets, "pod").await;

        // A file that cannot be used any more.
        let text = machine.file("one", "mount", "option = 'noatime'");
        machine.write("one", &text);
        machine
            .wait_for("one", "bad", "line 7: unknown field `option`")
            .await;
        machine
            .wait_for("one", "blocked", "one.toml cannot be used")
            .await;
        // The directory is not the one that it was.
        let marker = machine.directory.join(".uring-csi-volumes");
        fs::remove_file(&marker).unwrap();
        machine.remove("two");
        machine
            .wait_for("two", "blocked", "has no file .uring-csi-volumes")
            .await;
        let moved = machine.directory.with_extension("moved");
        fs::rename(&machine.directory, &moved).unwrap();
        node.kill9().await;
        node.restart().await;
        machine.wait_for("two", "blocked", "cannot be read").await;
        // A new directory would be one without their files.
        let new = sandbox.dir().join("new.toml");
        fs::write(&new, machine.file("new", "mount", "")).unwrap();
        let new = new.to_str().unwrap();
        let at = machine.directory.to_str().unwrap();
        for apply in [&["apply", new][..], &["apply", new, "--directory", at]] {
            let (code, _, err) = machine.operator.run(apply);
            assert!(code == 5 && err.contains(at), "{code}: {err}");
        }
        assert!(!machine.directory.exists());
        for name in ["one", "two"] {
            assert_ne!(options_at(&machine.path(name)), "", "{name}");
        }
        // What is wanted no more goes, also if that was while no agent ran.
        node.kill9().await;
        fs::rename(&moved, &machine.directory).unwrap();
        machine.remove("one");
        fs::write(marker, "").unwrap();
        node.restart().await;
        machine.wait("one", "gone");
        machine.wait("two", "gone");
        assert!(!machine.path("one").exists() && !machine.path("two").exists());
        // Only what the manager has set up.
        assert_ne!(options_at(&target), "");
        machine.write(
            "mine",
            &format!("handle = 'kubelets'\n{}", machine.file("x", "mount", "")),
        );
        machine
            .wait_for("mine", "blocked", "staged by others")
            .await;
        machine.remove("mine");
        node.down(&kubelets, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn a_mount_of_others_at_its_path_is_not_the_volume() {
    story(async |sandbox| {
        let machine = Machine::start(sandbox).await;
        image(sandbox, "data");
        let path = machine.path("data");
        let text = path.to_str().unwrap();
        machine.write("data", &machine.file("data", "mount", ""));
        machine.wait("data", "mounted");
        run(&["mount", "-t", "tmpfs", "others", text]);
        fs::write(path.join("theirs"), "").unwrap();
        machine
            .wait_for("data", "failed", "something else is mounted")
            .await;
        // Neither by another path, nor without its file.
        let new = machine.path("new").display().to_string();
        let moved = machine.file("data", "mount", "").replace(text, &new);
        machine.write("data", &moved);
        machine
            .wait_for("data", "failed", "something else is mounted")
            .await;
        assert_eq!(options_at(Path::new(&new)), "");
        machine.remove("data");
        machine
            .wait_for("data", "failed", "cannot unmount and detach")
            .await;
        assert!(path.join("theirs").exists());
        run(&["umount", text]);
        machine.wait("data", "gone");
        machine.node.assert_clean().await;
    });
}

/// A path that was never the volume's, because its stage failed, and that has a share of the
/// administrator.
#[test]
fn a_share_of_the_administrator_at_a_wrong_path_is_kept() {
    if !can_use_nfs() {
        return;
    }
    story(async |sandbox| {
        let nfs = NfsServer::start(sandbox, "server").await;
        let allowed = sandbox.dir().join("mnt");
        let theirs = allowed.join("theirs");
        nfs.mount(&theirs);
        let setup = Machine::setup(sandbox).arg(&format!("--allow-path={}", allowed.display()));
        let machine = Machine::start_with(sandbox, setup).await;
        let right = machine.file("data", "mount", "");
        let path = |at: &Path| format!("path = '{}'", at.display());
        let wrong = right.replace(&path(&machine.path("data")), &path(&theirs));
        // Its image is missing.
        machine.write("data", &wrong);
        machine.wait_for("data", "failed", "data.img").await;
        image(sandbox, "data");
        machine.write("data", &right);
        machine.wait("data", "mounted");
        assert_ne!(options_at(&theirs), "");
        // Nor is it one without its file.
        machine.remove("data");
        machine.wait("data", "gone");
        machine.write("data", &wrong);
        machine.wait_for("data", "failed", "").await;
        machine.remove("data");
        machine.wait("data", "gone");
        assert_ne!(options_at(&theirs), "");
        let volume = Volume::filesystem("data", "");
        let answer = machine.node.unpublish_at(&volume, &theirs).await;
        refused(answer, FailedPrecondition, &["unmount it by hand"]);
        assert_ne!(options_at(&theirs), "");
        machine.node.assert_clean().await;
        run(&["umount", theirs.to_str().unwrap()]);
    });
}

#[test]
fn what_is_at_a_wrong_path_is_kept_and_keeps_no_volume() {
    story(async |sandbox| {
        let machine = Machine::start(sandbox).await;
        let image = image(sandbox, "data");
        let right = machine.file("data", "mount", "");
        let (full, link) = (machine.path("full"), machine.path("link"));
        fs::create_dir(&full).unwrap();
        fs::write(full.join("theirs"), "").unwrap();
        symlink(&full, &link).unwrap();
        for (wrong, why) in [(&full, "is not empty"), (&link, "")] {
            let at = |path: &Path| format!("path = '{}'", path.display());
            let wrong = right.replace(&at(&machine.path("data")), &at(wrong));
            machine.write("data", &wrong);
            machine.wait_for("data", "failed", why).await;
            machine.write("data", &right);
            machine.wait("data", "mounted");
            machine.write("data", &wrong);
            machine.wait_for("data", "failed", why).await;
            assert_eq!(loops_over(&image).len(), 1);
            machine.remove("data");
            machine.wait("data", "gone");
            assert!(loops_over(&image).is_empty());
        }
        assert!(full.join("theirs").exists() && link.is_symlink());
        machine.node.assert_clean().await;
    });
}
