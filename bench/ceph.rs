//! Images in a small Ceph cluster: as volumes, by programs, and by bare calls.

use std::{
    collections::HashMap,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use testkit::{BareDevice, MIB, NodeSetup, Sandbox, TestCluster, Volume};
use uring_csi::internals::{Cluster, Credentials, Timeouts};

use crate::{
    backends::{Backend, SIZE, bare},
    by_exec::ByExec,
};

/// The cluster's id in the configuration.
pub const ID: &str = "bench";

/// The words of `rbd` for a new image, whose size and name are to follow.
pub const CREATE: [&str; 3] = ["create", "--image-feature", "layering"];

pub struct Ceph {
    pub cluster: TestCluster,
    /// ceph-csi's config.json.
    pub config: PathBuf,
}

impl Ceph {
    pub fn start() -> Self {
        let cluster = TestCluster::own().expect("Ceph (make setup)");
        let config = cluster.dir().join("config.json");
        let clusters = serde_json::json!([{"clusterID": ID, "monitors": cluster.monitors}]);
        fs::write(&config, clusters.to_string()).expect("a file");
        Self { cluster, config }
    }

    /// What an agent needs to know of it.
    pub fn args(&self) -> Vec<String> {
        vec![
            "--ceph-config".to_owned(),
            self.config.display().to_string(),
        ]
    }

    pub fn node(&self, sandbox: &Sandbox) -> NodeSetup {
        let mut setup = NodeSetup::new(sandbox);
        setup.args = self.args();
        setup
    }

    pub fn secrets(&self) -> HashMap<String, String> {
        let (user, key) = (self.cluster.user.clone(), self.cluster.key.clone());
        HashMap::from([("userID".to_owned(), user), ("userKey".to_owned(), key)])
    }

    /// A connection of this process.
    pub fn connect(&self) -> Arc<Cluster> {
        let secrets = self.secrets().into();
        let credentials = Credentials::from_secrets(&secrets).expect("credentials");
        Cluster::connect(&self.cluster.monitors, &credentials, Timeouts::default())
            .expect("a connection")
    }
}

/// Static volumes in the cluster's pool.
pub struct CephImages<'a> {
    pub ceph: &'a Ceph,
    pub sandbox: &'a Sandbox,
}

impl Backend for CephImages<'_> {
    fn title(&self, case: &str) -> String {
        format!("RBD: {case}")
    }

    fn blank(&self, name: &str, bytes: u64) {
        let cluster = &self.ceph.cluster;
        let image = format!("{}/{name}", cluster.pool);
        if cluster
            .rbd(&["ls", &cluster.pool])
            .lines()
            .any(|there| there == name)
        {
            cluster.rbd(&["rm", "--no-progress", &image]);
        }
        let size = format!("{}M", bytes / MIB);
        cluster.rbd(&[&CREATE[..], &["--size", &size, &image]].concat());
    }

    fn known(&self, name: &str, fs_type: &str) -> Volume {
        let volume = match fs_type {
            "block" => Volume::block(name),
            fs_type => Volume::filesystem(name, fs_type),
        };
        let mut volume = volume
            .with("clusterID", ID)
            .with("pool", &self.ceph.cluster.pool)
            .with("staticVolume", "true")
            .with("imageFeatures", "layering");
        volume.secrets = self.ceph.secrets();
        volume
    }

    fn copy(&self, from: &str, name: &str) {
        let pool = &self.ceph.cluster.pool;
        let [from, to] = [from, name].map(|image| format!("{pool}/{image}"));
        self.ceph.cluster.rbd(&["cp", "--no-progress", &from, &to]);
    }

    fn discard(&self, name: &str) {
        let cluster = &self.ceph.cluster;
        for image in [name, &bare(name)] {
            let image = format!("{}/{image}", cluster.pool);
            cluster.rbd(&["rm", "--no-progress", &image]);
        }
    }

    fn bare_device(&self, name: &str, bytes: u64) -> Box<dyn BareDevice> {
        let name = bare(name);
        self.blank(&name, bytes);
        Box::new(BareImage::new(&self.ceph.cluster, &name))
    }

    fn sandbox(&self) -> &Sandbox {
        self.sandbox
    }

    fn exec(&self, name: &str, fs_type: &str) -> ByExec {
        self.blank(name, SIZE);
        let pool = &self.ceph.cluster.pool;
        let conf = self.ceph.cluster.dir().join("ceph.conf");
        let conf = conf.display();
        let attach = format!("rbd --conf {conf} map {pool}/{name}");
        ByExec::new(self.sandbox.dir(), name, fs_type, &attach, ["rbd", "unmap"])
    }
}

/// An image by writes to krbd's files (Documentation/ABI/testing/sysfs-bus-rbd).
struct BareImage {
    line: String,
    name: String,
}

impl BareImage {
    fn new(cluster: &TestCluster, name: &str) -> Self {
        let (user, key, pool) = (&cluster.user, &cluster.key, &cluster.pool);
        let monitors = cluster.monitors.join(",");
        Self {
            line: format!("{monitors} name={user},secret={key} {pool} {name} -"),
            name: name.to_owned(),
        }
    }
}

impl BareDevice for BareImage {
    fn attach(&self) -> PathBuf {
        fs::write("/sys/bus/rbd/add_single_major", &self.line).expect("mapped");
        let devices = fs::read_dir("/sys/bus/rbd/devices").expect("sysfs");
        let ours = |device: &PathBuf| {
            fs::read_to_string(device.join("name")).is_ok_and(|name| name.trim() == self.name)
        };
        let device = devices.flatten().map(|device| device.path()).find(ours);
        let device = device.expect("a mapped image");
        let id = device.file_name().expect("a number").display();
        PathBuf::from(format!("/dev/rbd{id}"))
    }

    fn detach(&self, node: &Path) {
        let id = node.to_str().and_then(|node| node.strip_prefix("/dev/rbd"));
        let id = id.expect("a node");
        let remove = Path::new("/sys/bus/rbd/remove_single_major");
        while let Err(error) = fs::write(remove, id) {
            assert_eq!(error.kind(), io::ErrorKind::ResourceBusy, "{error}");
            thread::sleep(Duration::from_millis(1));
        }
    }
}
