//! Images in a small Ceph cluster: as volumes, by programs, and by bare calls.

use std::{
    collections::HashMap,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use testkit::{NodeSetup, Sandbox, TestCluster, Volume};
use uring_csi::internals::{Cluster, Credentials, Timeouts};

use crate::{backends::Backend, by_exec::ByExec};

/// The cluster's id in the configuration.
pub const ID: &str = "bench";

/// The words of `rbd` for a new image, whose name is the last.
pub const CREATE: [&str; 5] = ["create", "--size", "1G", "--image-feature", "layering"];

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

    fn blank(&self, name: &str) {
        let cluster = &self.ceph.cluster;
        let image = format!("{}/{name}", cluster.pool);
        if cluster
            .rbd(&["ls", &cluster.pool])
            .lines()
            .any(|there| there == name)
        {
            cluster.rbd(&["rm", "--no-progress", &image]);
        }
        cluster.rbd(&[&CREATE[..], &[&image]].concat());
    }

    fn volume(&self, name: &str, fs_type: &str) -> Volume {
        self.blank(name);
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

    fn exec(&self, name: &str, fs_type: &str) -> ByExec {
        self.blank(name);
        let pool = &self.ceph.cluster.pool;
        let conf = self.ceph.cluster.dir().join("ceph.conf");
        let conf = conf.display();
        let attach = format!("rbd --conf {conf} map {pool}/{name}");
        ByExec::new(self.sandbox.dir(), name, fs_type, &attach, ["rbd", "unmap"])
    }
}

/// The system calls that no driver can do without: map, mount, and back.
pub struct Bare {
    line: String,
    image: String,
    at: PathBuf,
}

impl Bare {
    /// Over an image that is formatted.
    pub fn new(images: &CephImages<'_>, image: &str) -> Self {
        let cluster = &images.ceph.cluster;
        let (user, key, pool) = (&cluster.user, &cluster.key, &cluster.pool);
        let monitors = cluster.monitors.join(",");
        let at = images.sandbox.dir().join(format!("{image}-bare"));
        fs::create_dir_all(&at).expect("a mount point");
        Self {
            line: format!("{monitors} name={user},secret={key} {pool} {image} -"),
            image: image.to_owned(),
            at,
        }
    }

    /// The driver's number of the mapped image.
    fn id(&self) -> String {
        let devices = fs::read_dir("/sys/bus/rbd/devices").expect("sysfs");
        let ours = |device: &PathBuf| {
            fs::read_to_string(device.join("name")).is_ok_and(|name| name.trim() == self.image)
        };
        let device = devices.flatten().map(|device| device.path()).find(ours);
        let device = device.expect("a mapped image");
        device.file_name().expect("a number").display().to_string()
    }

    pub fn up(&self) {
        fs::write("/sys/bus/rbd/add_single_major", &self.line).expect("mapped");
        let device = format!("/dev/rbd{}", self.id());
        mount(device.as_str(), &self.at, "ext4", MountFlags::empty(), None).expect("mounted");
    }

    pub fn down(&self) {
        unmount(&self.at, UnmountFlags::empty()).expect("unmounted");
        let id = self.id();
        let remove = Path::new("/sys/bus/rbd/remove_single_major");
        while let Err(error) = fs::write(remove, &id) {
            assert_eq!(error.kind(), io::ErrorKind::ResourceBusy, "{error}");
            thread::sleep(Duration::from_millis(1));
        }
    }
}
