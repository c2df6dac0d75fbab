//! Images of a Ceph cluster, and their volumes as ceph-csi describes them to a node.
//!
//! Mapped images belong to the machine, not to a mount namespace. So that concurrent
//! stories stay apart, all names that a story makes have the sandbox's: its clusters' ids,
//! which every handle has, and its images' names.

use std::{
    cell::RefCell,
    collections::HashMap,
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use serde_json::{Value, json};
use uring_csi::internals::Handle;
use uuid::Uuid;

mod cleanup;

use super::{
    MIB, Node, NodeSetup, Sandbox, TestCluster, Volume, bytes_for, run_err, skip_test, story,
};

/// Each kind of volume, with bytes enough for it.
pub const KINDS: [(&str, u64); 4] = [
    ("ext4", 64 * MIB),
    ("xfs", 320 * MIB),
    ("btrfs", 160 * MIB),
    ("block", 64 * MIB),
];

/// A story on the cluster that all share; skipped where the kernel cannot map images.
pub fn ceph_story(body: impl AsyncFnOnce(&Sandbox, &Ceph) + Send) {
    on(TestCluster::shared, true, body);
}

/// A story on a cluster of its own, whose daemons it may stop.
pub fn own_cluster_story(body: impl AsyncFnOnce(&Sandbox, &Ceph) + Send) {
    on(TestCluster::own, false, body);
}

/// The same on a cluster with three monitors and three OSDs.
pub fn cluster_of_three_story(body: impl AsyncFnOnce(&Sandbox, &Ceph) + Send) {
    on(TestCluster::own_of_three, false, body);
}

fn on(
    start: fn() -> Option<TestCluster>,
    is_shared: bool,
    body: impl AsyncFnOnce(&Sandbox, &Ceph) + Send,
) {
    if !Path::new("/sys/bus/rbd").exists() {
        return skip_test("the kernel module rbd is not loaded here");
    }
    story(async |sandbox| {
        if let Some(cluster) = start() {
            body(sandbox, &Ceph::new(sandbox, cluster, is_shared)).await;
        }
    });
}

/// A cluster with the administrator's configuration in a sandbox.
pub struct Ceph {
    pub cluster: TestCluster,
    pub cluster_id: String,
    /// It outlives the story.
    is_shared: bool,
    /// Where the sandbox is.
    pub(super) root: PathBuf,
    /// By name: the program that lists them is slow.
    pool_ids: RefCell<HashMap<String, i64>>,
}

impl Ceph {
    fn new(sandbox: &Sandbox, cluster: TestCluster, is_shared: bool) -> Self {
        let number = entries(sandbox.dir()).len();
        let ceph = Self {
            cluster_id: format!("{}-{number}", name_of(sandbox.dir())),
            cluster,
            is_shared,
            root: sandbox.dir().to_owned(),
            pool_ids: RefCell::default(),
        };
        let mut known = entries(&ceph.root);
        known.push(ceph.entry());
        ceph.configure(&known);
        ceph
    }

    /// The cluster that all share, where there is one.
    pub fn shared(sandbox: &Sandbox) -> Option<Self> {
        TestCluster::shared().map(|cluster| Self::new(sandbox, cluster, true))
    }

    /// One more cluster in the configuration of the sandbox's nodes.
    pub fn another(sandbox: &Sandbox) -> Self {
        let cluster = TestCluster::own().expect("where there is one, there is another");
        Self::new(sandbox, cluster, false)
    }

    /// Its entry of `config.json`.
    pub fn entry(&self) -> Value {
        json!({"clusterID": self.cluster_id, "monitors": self.cluster.monitors})
    }

    /// Writes `config.json` anew, in place as an editor does.
    pub fn configure(&self, entries: &[Value]) {
        let text = serde_json::to_vec(entries).expect("JSON");
        fs::write(self.config(), text).expect("config.json");
    }

    pub fn config(&self) -> PathBuf {
        config(&self.root)
    }

    /// A node with the sandbox's clusters in its configuration.
    pub fn setup(&self, sandbox: &Sandbox) -> NodeSetup {
        let config = self.config();
        NodeSetup::new(sandbox)
            .arg("--ceph-config")
            .arg(config.to_str().expect("a path in UTF-8"))
    }

    pub async fn node(&self, sandbox: &Sandbox) -> Node {
        Node::start_with(sandbox, self.setup(sandbox)).await
    }

    /// A volume over a blank image, large enough for its kind.
    pub fn volume(&self, kind: &str) -> Volume {
        let known = KINDS.iter().find(|(known, _)| *known == kind);
        self.volume_of(kind, known.expect("a kind").1, &[])
    }

    /// A volume over a blank image of `bytes`, made by `rbd create` with `args`.
    pub fn volume_of(&self, kind: &str, bytes: u64, args: &[&str]) -> Volume {
        let volume = self.over(&self.image_name(), kind);
        let (size, spec) = (mebibytes(bytes), spec_of(&volume));
        let features = ["--image-feature", "layering"];
        let features = if args.contains(&features[0]) {
            &[]
        } else {
            &features[..]
        };
        self.cluster
            .rbd(&[&["create", "-s", &size], features, args, &[&spec]].concat());
        volume
    }

    /// Gives a volume after another, and removes the image of the one before: the OSD has all
    /// objects in memory.
    pub fn one_after_another(&self, make: impl Fn() -> Volume) -> impl FnMut() -> Volume {
        let mut last = None::<Volume>;
        move || {
            if let Some(last) = last.take() {
                self.cluster.rbd(&["rm", "--no-progress", &spec_of(&last)]);
            }
            last.insert(make()).clone()
        }
    }

    /// The class's `volumeNamePrefix`.
    pub fn prefix(&self) -> String {
        format!("{}-", name_of(&self.root))
    }

    /// A name that no other image has.
    pub fn image_name(&self) -> String {
        format!("{}{}", self.prefix(), Uuid::new_v4())
    }

    /// A dynamic volume over an image, as ceph-csi's controller describes it.
    pub fn over(&self, image: &str, kind: &str) -> Volume {
        self.over_in(&self.cluster.pool, image, kind)
    }

    pub fn over_in(&self, pool: &str, image: &str, kind: &str) -> Volume {
        let id = Handle::new(&self.cluster_id, self.pool_id(pool), Uuid::new_v4());
        self.describe(&id.expect("a handle").to_string(), kind)
            .with("pool", pool)
            .with("journalPool", pool)
            .with("imageName", image)
            .with("imageFeatures", "layering")
            .with("volumeNamePrefix", &self.prefix())
            .with(
                "storage.kubernetes.io/csiProvisionerIdentity",
                "1700000000000-1234-rbd.csi.ceph.com",
            )
    }

    /// A static volume, whose handle is the image's name, over a blank image.
    pub fn static_volume(&self, kind: &str) -> Volume {
        let made = self.volume(kind);
        self.describe(&made.context["imageName"], kind)
            .with("pool", &self.cluster.pool)
            .with("staticVolume", "true")
            .with("imageFeatures", "layering")
    }

    fn describe(&self, handle: &str, kind: &str) -> Volume {
        let mut volume = match kind {
            "block" => Volume::block(handle),
            kind => Volume::filesystem(handle, kind),
        };
        volume.secrets = self.secrets();
        volume.with("clusterID", &self.cluster_id)
    }

    /// Of the user that ceph-csi's documents have.
    pub fn secrets(&self) -> HashMap<String, String> {
        let [user, key] = [&self.cluster.user, &self.cluster.key].map(String::clone);
        [("userID".to_owned(), user), ("userKey".to_owned(), key)].into()
    }

    pub fn pool_id(&self, name: &str) -> i64 {
        if let Some(known) = self.pool_ids.borrow().get(name) {
            return *known;
        }
        let listed = self.cluster.ceph(&["osd", "lspools", "-f", "json"]);
        let pools: Vec<Value> = serde_json::from_str(&listed).expect("pools");
        let pool = pools.iter().find(|pool| pool["poolname"] == name);
        let id = pool.map_or(99, |pool| pool["poolnum"].as_i64().expect("an id"));
        self.pool_ids.borrow_mut().insert(name.to_owned(), id);
        id
    }

    pub fn resize(&self, volume: &Volume, bytes: u64) {
        let (size, spec) = (mebibytes(bytes), spec_of(volume));
        self.cluster
            .rbd(&["resize", "--no-progress", "-s", &size, &spec]);
    }

    /// Makes an image twice as large as volumes of its kind are; its new size.
    pub fn doubling(&self) -> impl Fn(&Volume) -> u64 {
        |volume| {
            let bytes = 2 * bytes_for(volume.fs_type());
            self.resize(volume, bytes);
            bytes
        }
    }

    /// A snapshot of a volume's image, and a clone of that as a volume.
    pub fn clone_of(&self, volume: &Volume, kind: &str) -> Volume {
        let clone = self.over(&self.image_name(), kind);
        let snapshot = format!("{}@{}", spec_of(volume), Uuid::new_v4());
        let rbd = |args: &[&str]| self.cluster.rbd(args);
        rbd(&["snap", "create", "--no-progress", &snapshot]);
        let v2 = ["--rbd-default-clone-format", "2"];
        rbd(&[
            "clone",
            v2[0],
            v2[1],
            "--image-feature",
            "layering",
            &snapshot,
            &spec_of(&clone),
        ]);
        clone
    }

    /// A client that has a volume's image open for writing, as a node does.
    pub fn open_elsewhere(&self, volume: &Volume) -> ImageOpener {
        let of = |key| &*volume.context[key];
        ImageOpener::start(&self.cluster, of("pool"), of("imageName"))
    }

    /// The OSD stops answering until the guard is dropped.
    pub fn freeze(&self) -> FrozenOsd<'_> {
        self.cluster.freeze_osd();
        FrozenOsd(&self.cluster)
    }

    /// The OSD is down until the guard is dropped.
    pub fn stop(&self) -> StoppedOsd<'_> {
        self.cluster.stop_osd();
        StoppedOsd(&self.cluster)
    }
}

/// The mapping that shows an encrypted volume in the clear.
pub fn mapping_of(handle: &str) -> String {
    format!("luks-rbd-{handle}")
}

/// `pool[/namespace]/image`.
pub fn spec_of(volume: &Volume) -> String {
    let context = |key: &str| volume.context.get(key).cloned().unwrap_or_default();
    let parts = [
        context("pool"),
        context("radosNamespace"),
        context("imageName"),
    ];
    let mut parts: Vec<_> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    if !volume.context.contains_key("imageName") {
        parts.push(volume.handle.clone());
    }
    parts.join("/")
}

/// The mapped images (`/dev/rbdN`) of a sandbox, as sysfs has them.
pub fn rbds_of(root: &Path) -> Vec<PathBuf> {
    let name = name_of(root);
    mapped("name", |image| image.starts_with(&name))
}

/// The devices whose image is this volume's.
pub fn rbds_over(volume: &Volume) -> Vec<PathBuf> {
    let spec = spec_of(volume);
    mapped("name", |image| spec.ends_with(&format!("/{image}")))
}

fn mapped(attribute: &str, is_it: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let mut devices: Vec<_> = fs::read_dir("/sys/bus/rbd/devices")
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| {
            fs::read_to_string(entry.path().join(attribute))
                .is_ok_and(|value| is_it(value.trim_end()))
        })
        .map(|entry| PathBuf::from(format!("/dev/rbd{}", entry.file_name().display())))
        .collect();
    devices.sort();
    devices
}

/// The open mappings of a sandbox's encrypted volumes.
pub fn mappings_of(root: &Path) -> Vec<String> {
    let name = name_of(root);
    fs::read_dir("/sys/block")
        .expect("sysfs")
        .flatten()
        .filter_map(|entry| fs::read_to_string(entry.path().join("dm/name")).ok())
        .map(|mapping| mapping.trim_end().to_owned())
        .filter(|mapping| mapping.starts_with(&mapping_of("")) && mapping.contains(&name))
        .collect()
}

/// A process of Ceph's own libraries that has an image open.
pub struct ImageOpener(Child);

const OPEN: &str = "
import contextlib, rados, rbd, sys
conf, pool, name, *watched = sys.argv[1:]
with rados.Rados(conffile=conf, name='client.admin') as cluster:
    with cluster.open_ioctx(pool) as pool, rbd.Image(pool, name), contextlib.ExitStack() as stack:
        for object in watched:
            stack.enter_context(pool.watch(object, lambda *_: None))
        print('open', flush=True)
        sys.stdin.read()
";

impl ImageOpener {
    /// Of an image in the default namespace of a pool.
    pub fn start(cluster: &TestCluster, pool: &str, image: &str) -> Self {
        Self::watching(cluster, pool, image, &[])
    }

    /// Like `rbd-mirror`, which has the image open and reports the status of its mirror.
    pub fn mirroring(cluster: &TestCluster, pool: &str, image: &str) -> Self {
        Self::watching(cluster, pool, image, &["rbd_mirroring"])
    }

    fn watching(cluster: &TestCluster, pool: &str, image: &str, watched: &[&str]) -> Self {
        let mut child = Command::new("/usr/bin/python3")
            .args(["-c", OPEN])
            .arg(cluster.dir().join("ceph.conf"))
            .args([pool, image])
            .args(watched)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("Debian's Python");
        let mut said = String::new();
        let output = child.stdout.take().expect("a pipe");
        BufReader::new(output).read_line(&mut said).expect("a line");
        assert_eq!(said, "open\n");
        Self(child)
    }

    /// As when its machine fails: its watch stays until that times out.
    pub fn kill9(mut self) {
        self.0.kill().expect("a child");
    }
}

impl Drop for ImageOpener {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// See [`Ceph::freeze`].
pub struct FrozenOsd<'a>(&'a TestCluster);

impl Drop for FrozenOsd<'_> {
    fn drop(&mut self) {
        self.0.thaw_osd();
    }
}

/// See [`Ceph::stop`].
pub struct StoppedOsd<'a>(&'a TestCluster);

impl Drop for StoppedOsd<'_> {
    fn drop(&mut self) {
        self.0.start_osd();
    }
}

impl Drop for Ceph {
    fn drop(&mut self) {
        self.unmap_all();
        if self.is_shared {
            // The story has reported a failure of it.
            let _ = cleanup::remove(&self.cluster, &self.prefix());
        }
    }
}

impl Ceph {
    /// Before the cluster ends: afterwards nothing can be written back.
    fn unmap_all(&self) {
        if rbds_of(&self.root).is_empty() {
            return;
        }
        for mounted in super::mounts_below(&self.root).iter().rev() {
            let _ = run_err(&["umount", "-l", mounted.to_str().expect("UTF-8")]);
        }
        for mapping in mappings_of(&self.root) {
            let _ = run_err(&["cryptsetup", "close", &mapping]);
        }
        for device in rbds_of(&self.root) {
            let device = device.to_str().expect("UTF-8");
            let _ = run_err(&["rbd", "unmap", "-o", "noudev,force", device]);
        }
    }
}

fn mebibytes(bytes: u64) -> String {
    format!("{}M", bytes / MIB)
}

/// The sandbox's name, a part of all names in a cluster that it makes.
pub(super) fn name_of(root: &Path) -> String {
    let name = root.file_name().expect("a directory");
    name.to_str().expect("UTF-8").to_owned()
}

fn config(root: &Path) -> PathBuf {
    root.join("config.json")
}

fn entries(root: &Path) -> Vec<Value> {
    fs::read(config(root)).map_or_else(
        |_| Vec::new(),
        |text| serde_json::from_slice(&text).expect("JSON"),
    )
}
