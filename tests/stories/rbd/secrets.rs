//! No key and no passphrase shows in a file, command line, environment or log.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use testkit::{Ceph, Node, Sandbox, Supervisor, Volume, ceph_story, files_below, rbds_over};

use super::{encrypted, lifecycle::config_of, rbd_nbd::served};

#[test]
fn no_secret_is_readable_elsewhere() {
    ceph_story(async |sandbox, ceph| {
        let setup = ceph.setup(sandbox).arg("--log-level").arg("trace");
        let node = Node::start_with(sandbox, setup).await;
        assert_not_disclosed(sandbox, ceph, &node, encrypted::volume(ceph, "ext4")).await;
    });
}

#[test]
fn no_secret_of_rbd_nbd_is_readable_elsewhere() {
    ceph_story(async |sandbox, ceph| {
        let supervisor = Supervisor::start(sandbox).await;
        let setup = ceph.setup(sandbox).arg("--log-level").arg("trace");
        let socket = supervisor.socket().display().to_string();
        let node = Node::start_with(sandbox, setup.arg("--holder").arg(&socket)).await;
        let volume = served(encrypted::volume(ceph, "ext4"));
        assert_not_disclosed(sandbox, ceph, &node, volume).await;
    });
}

async fn assert_not_disclosed(sandbox: &Sandbox, ceph: &Ceph, node: &Node, volume: Volume) {
    let secrets = ["userKey", "encryptionPassphrase"];
    let secrets = secrets.map(|name| volume.secrets[name].clone());
    let done = Arc::new(AtomicBool::new(false));
    let lines = {
        let (secrets, done) = (secrets.clone(), Arc::clone(&done));
        thread::spawn(move || disclosed_in_command_lines(&secrets, &done))
    };
    let nowhere = |when: &str| {
        let found: Vec<_> = readable(sandbox, node)
            .into_iter()
            .filter(|file| tells(file, &secrets))
            .collect();
        assert!(found.is_empty(), "{when}: {found:?}");
    };
    for _ in 0..3 {
        node.up(&volume, "pod").await;
        nowhere("staged");
        if !rbds_over(&volume).is_empty() {
            let config = config_of(&volume);
            assert!(!secrets.iter().any(|secret| config.contains(secret)));
        }
        node.down(&volume, "pod").await;
        nowhere("unstaged");
    }
    // The agent logs refused requests, too.
    let mut wrong = volume.clone();
    let key = wrong.secrets.get_mut("userKey").unwrap();
    key.clone_from(&ceph.cluster.admin_key);
    node.stage(&wrong).await.unwrap_err();
    assert!(!node.log().contains(&ceph.cluster.admin_key));
    nowhere("refused");
    done.store(true, Ordering::Relaxed);
    let found = lines.join().unwrap();
    assert!(found.is_empty(), "{found:?}");
    node.assert_clean().await;
}

/// The files that an agent writes, and the kernel's files about it and its mapped images.
fn readable(sandbox: &Sandbox, node: &Node) -> Vec<PathBuf> {
    let mut files: Vec<_> = files_below(sandbox.dir()).into_iter().collect();
    // The administrator's own.
    files.retain(|file| !file.ends_with("keyfile"));
    files.push(PathBuf::from("/proc/keys"));
    for name in ["cmdline", "environ"] {
        files.push(PathBuf::from(format!("/proc/{}/{name}", node.pid())));
    }
    for entry in fs::read_dir("/sys/bus/rbd/devices").unwrap().flatten() {
        files.push(entry.path().join("config_info"));
    }
    files
}

fn tells(file: &Path, secrets: &[String]) -> bool {
    // Sockets cannot be read, and removed files have no text.
    let text = fs::read(file).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    secrets.iter().any(|secret| text.contains(secret))
}

/// The command lines and environments with a secret in them, of all processes until `done`.
fn disclosed_in_command_lines(secrets: &[String], done: &AtomicBool) -> Vec<PathBuf> {
    let mut found = Vec::new();
    while !done.load(Ordering::Relaxed) {
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            for name in ["cmdline", "environ"] {
                let file = entry.path().join(name);
                if tells(&file, secrets) {
                    found.push(file);
                }
            }
        }
    }
    found
}
