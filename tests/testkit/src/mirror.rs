//! Two clusters that mirror a pool to each other, by real daemons.

use std::{
    env, fs,
    process::{Child, Command, Stdio},
};

use crate::{cluster::TestCluster, skipped::skip_uninstalled};

/// A cluster's daemon that copies images from its peer.
pub struct MirrorDaemon(Child);

impl MirrorDaemon {
    /// Of that cluster, for its pools that have peers.
    pub fn start(cluster: &TestCluster) -> Self {
        let log = fs::File::create(cluster.dir().join("rbd-mirror.log")).expect("a log");
        let mut command = Command::new("rbd-mirror");
        command
            .args(["-f", "-n", "client.admin"])
            // For each pool it looks for ceph.conf anew, wherever its own is: here, too.
            .current_dir(cluster.dir())
            // In seconds: it looks for pools, and for images to resync, every half minute
            // otherwise.
            .args(["--rbd-mirror-pool-replayers-refresh-interval", "1"])
            .args(["--rbd-mirror-image-state-check-interval", "1"])
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a log"))
            .stderr(log);
        Self(command.spawn().expect("rbd-mirror"))
    }
}

impl Drop for MirrorDaemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Makes a pool of the same name in the other cluster, and has both mirror its images to
/// each other. False: rbd-mirror is not installed.
pub fn mirror_pool(pool: &str, here: &TestCluster, there: &TestCluster) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    if !env::split_paths(&path).any(|dir| dir.join("rbd-mirror").exists()) {
        skip_uninstalled("rbd-mirror is not installed here (make setup)");
        return false;
    }
    there.ceph(&["osd", "pool", "create", pool]);
    there.rbd(&["pool", "init", pool]);
    for cluster in [here, there] {
        cluster.rbd(&["mirror", "pool", "enable", pool, "image"]);
    }
    let bootstrap = ["mirror", "pool", "peer", "bootstrap"];
    let create = ["create", "--site-name", "here", pool];
    let token = here.rbd(&[&bootstrap[..], &create].concat());
    let file = there.dir().join("peer");
    fs::write(&file, token).expect("a file");
    let file = file.to_str().expect("a path");
    let import = ["import", "--site-name", "there", pool, file];
    there.rbd(&[&bootstrap[..], &import].concat());
    true
}
