//! A client that writes to an image: tests/ceph/writer.py.

use std::{
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
};

use super::TestCluster;

/// Writes to an image until it is told to end, and then reads all again.
pub struct Writer(Child);

impl Writer {
    /// The image of that pool. Returns once it writes.
    pub fn start(cluster: &TestCluster, pool: &str, image: &str) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("ceph/writer.py");
        let mut writer = Command::new(script)
            .arg(cluster.dir().join("ceph.conf"))
            .args([pool, image])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("writer.py");
        let mut ready = String::new();
        let output = writer.stdout.take().expect("a pipe");
        let read = BufReader::new(output).read_line(&mut ready);
        read.expect("its output");
        let writer = Self(writer);
        assert_eq!(ready, "ready\n");
        writer
    }

    /// Whether it read what it had written.
    pub fn end(mut self) -> bool {
        drop(self.0.stdin.take());
        self.0.wait().expect("its end").success()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
