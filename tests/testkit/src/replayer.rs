//! A stand-in for rbd-mirror: tests/ceph/replayer.py.

use std::{
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
};

use super::TestCluster;

/// Reports that a secondary image is replayed, until this is dropped.
pub struct Replayer(Child);

impl Replayer {
    /// The image is `POOL/NAME`.
    pub fn of(cluster: &TestCluster, image: &str) -> Self {
        let info = cluster.rbd(&["info", "--format=json", image]);
        let info: serde_json::Value = serde_json::from_str(&info).expect("JSON");
        let global_id = info["mirroring"]["global_id"].as_str().expect("a mirror");
        let (pool, _) = image.split_once('/').expect("pool and image");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("ceph/replayer.py");
        let mut replayer = Command::new(script)
            .arg(cluster.dir().join("ceph.conf"))
            .args([pool, global_id])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("replayer.py");
        let mut ready = String::new();
        let output = replayer.stdout.take().expect("a pipe");
        let read = BufReader::new(output).read_line(&mut ready);
        read.expect("its output");
        let replayer = Self(replayer);
        assert_eq!(ready, "ready\n");
        replayer
    }
}

impl Drop for Replayer {
    fn drop(&mut self) {
        // Its watch would outlast a killed process.
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}
