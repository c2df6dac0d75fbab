//! Faults of the storage below volumes: files, pools, servers, an OSD.

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    path::PathBuf,
};

use super::{
    Ceph, MIB, NbdServer, NfsServer, Node, NodeSetup, Sandbox, StuckFile, StuckTree, Volume,
    eventually, nbds_over,
    rbd::{FrozenOsd, StoppedOsd, spec_of},
    run,
};

/// How many volumes a fault affects.
pub const AFFECTED: usize = 8;

/// The phase of a volume in which its device dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Kubelet has made its directory, and it is not staged yet.
    Stage,
    /// It is attached, and not probed yet.
    Probe,
    /// It is probed, and not mounted yet.
    Mount,
    /// It is staged, and not published yet.
    Publish,
    /// A pod uses it.
    Use,
    /// A pod has used it, and it is about to be unpublished.
    Unpublish,
    /// A pod has used it, and it is about to be unmounted.
    Unmount,
    /// Its source has grown, and it has not yet.
    Growth,
}

/// A device, pool or server that fails, and the volumes on it.
pub trait Fault {
    /// The volumes that hang during the fault.
    fn affected(&self) -> &[Volume];

    /// Gives a volume's source more bytes, while it lives.
    fn grow(&self, volume: &Volume, bytes: u64);

    /// Whether calls in this phase may succeed during the fault.
    fn may_succeed(&self, phase: Phase) -> bool {
        phase == Phase::Use
    }

    /// Whether it is to stop while the calls are under way, about to mount: it cannot fail
    /// the mount alone.
    fn stops_at_the_mount(&self) -> bool {
        false
    }

    /// It stops answering in this phase of its volumes' lives.
    async fn stop(&mut self, phase: Phase);

    /// Called when the first calls to its volumes are under way.
    async fn while_calls_hang(&mut self, _phase: Phase) {}

    /// It answers again.
    async fn resume(&mut self);
}

/// Enough for a file system of the kind.
pub fn bytes_for(kind: &str) -> u64 {
    match kind {
        "xfs" => 320 * MIB,
        "btrfs" => 160 * MIB,
        _ => 64 * MIB,
    }
}

fn names(prefix: &str) -> impl Iterator<Item = String> {
    (0..AFFECTED).map(move |number| format!("{prefix}{number}"))
}

/// Directories of kubelet's, on a disk that stops answering.
pub struct HungDirectories {
    disk: StuckTree,
    volumes: Vec<Volume>,
}

impl HungDirectories {
    /// Of the pods called `pods`, and where the volumes are staged. Call it before the
    /// node starts, of which `node` answers for the paths.
    pub fn new(sandbox: &Sandbox, node: &Node, pods: &[&str], kind: &str) -> Self {
        let root = sandbox.dir().join("hung.root");
        fs::create_dir(&root).expect("a mount point");
        let disk = StuckTree::new(&root);
        let volumes: Vec<_> = names("affected")
            .map(|name| sandbox.volume_in("main", &name, kind, bytes_for(kind)))
            .collect();
        let on_disk = |volume: &Volume| {
            let published = pods.iter().map(|pod| node.target(volume, pod));
            published.chain([node.staging(volume)]).collect::<Vec<_>>()
        };
        for (number, place) in volumes.iter().flat_map(on_disk).enumerate() {
            let there = root.join(number.to_string());
            fs::create_dir(&there).expect("a directory");
            let parent = place.parent().expect("a parent");
            fs::create_dir_all(parent).expect("kubelet's directory");
            let [there, parent] = [&there, parent].map(|path| path.display().to_string());
            run(&["mount", "--bind", &there, &parent]);
        }
        Self { disk, volumes }
    }
}

impl Fault for HungDirectories {
    fn affected(&self) -> &[Volume] {
        &self.volumes
    }

    fn grow(&self, _: &Volume, _: u64) {
        unreachable!("no story grows what is in them");
    }

    async fn stop(&mut self, _: Phase) {
        self.disk.stop_all();
    }

    async fn resume(&mut self) {
        self.disk.resume();
    }
}

/// Image files on a file system whose server stops answering.
pub struct HungFiles {
    files: Vec<StuckFile>,
    volumes: Vec<Volume>,
}

impl HungFiles {
    pub fn new(sandbox: &Sandbox, kind: &str) -> Self {
        let (files, volumes) = names("affected")
            .map(|name| {
                let image = format!("{name}.img");
                let file = StuckFile::new(&sandbox.pool("main").join(&image), bytes_for(kind));
                let volume = Volume::filesystem(&name, kind).over("main", &image);
                (file, volume)
            })
            .unzip();
        Self { files, volumes }
    }
}

impl Fault for HungFiles {
    fn affected(&self) -> &[Volume] {
        &self.volumes
    }

    fn grow(&self, volume: &Volume, bytes: u64) {
        let file = self
            .volumes
            .iter()
            .position(|of| of.handle == volume.handle);
        self.files[file.expect("one of its volumes")].grow(bytes);
    }

    async fn stop(&mut self, phase: Phase) {
        for file in &self.files {
            match phase {
                Phase::Mount => file.stop_writes(),
                Phase::Use => file.stop_all(),
                _ => file.stop_data(),
            }
        }
    }

    async fn resume(&mut self) {
        self.files.iter().for_each(StuckFile::resume);
    }
}

/// A pool whose disk stops answering.
pub struct HungPool {
    disk: Disk,
    pool: PathBuf,
    volumes: Vec<Volume>,
}

enum Disk {
    /// A loop device over a file.
    File(StuckFile),
    /// A device-mapper device of this name.
    Mapped(String),
}

impl HungPool {
    /// The name of the pool.
    pub const NAME: &str = "hung";
    const BYTES: u64 = 8 << 30;

    pub fn new(sandbox: &Sandbox, kind: &str) -> Self {
        let file = sandbox.dir().join("hung.disk");
        let disk = Disk::File(StuckFile::new(&file, Self::BYTES));
        let device = run(&["losetup", "--find", "--show", &file.display().to_string()]);
        Self::on(sandbox, kind, disk, device.trim())
    }

    /// With device-mapper below it, which is suspended.
    pub fn mapped(sandbox: &Sandbox, kind: &str) -> Self {
        let file = sandbox.dir().join("hung.disk");
        fs::File::create(&file)
            .and_then(|file| file.set_len(Self::BYTES))
            .expect("a sparse file");
        let below = run(&["losetup", "--find", "--show", &file.display().to_string()]);
        let name = format!(
            "{}-hung",
            sandbox.dir().file_name().expect("a name").display()
        );
        let table = format!("0 {} linear {} 0", Self::BYTES / 512, below.trim());
        run(&["dmsetup", "create", &name, "--table", &table]);
        let device = format!("/dev/mapper/{name}");
        Self::on(sandbox, kind, Disk::Mapped(name), &device)
    }

    /// A node that has it, besides pool `main`.
    pub fn setup(sandbox: &Sandbox) -> NodeSetup {
        let mut setup = NodeSetup::new(sandbox);
        let pool = sandbox.pool(Self::NAME);
        let pool = format!("{}={},shared", Self::NAME, pool.display());
        setup.pools.push(pool);
        setup
    }

    fn on(sandbox: &Sandbox, kind: &str, disk: Disk, device: &str) -> Self {
        let pool = sandbox.pool(Self::NAME);
        run(&[
            "mkfs.ext4",
            "-q",
            "-E",
            "lazy_itable_init=1,nodiscard",
            device,
        ]);
        run(&["mount", device, &pool.display().to_string()]);
        let volumes = names("affected")
            .map(|name| sandbox.volume_in(Self::NAME, &name, kind, bytes_for(kind)))
            .collect();
        Self {
            disk,
            pool,
            volumes,
        }
    }
}

impl Fault for HungPool {
    fn affected(&self) -> &[Volume] {
        &self.volumes
    }

    fn grow(&self, volume: &Volume, bytes: u64) {
        fs::File::options()
            .write(true)
            .open(self.pool.join(&volume.context["image"]))
            .and_then(|image| image.set_len(bytes))
            .expect("a larger image");
    }

    fn stops_at_the_mount(&self) -> bool {
        true
    }

    async fn stop(&mut self, _: Phase) {
        match &self.disk {
            Disk::File(file) => file.stop_data(),
            Disk::Mapped(name) => {
                run(&["dmsetup", "suspend", "--nolockfs", "--noflush", name]);
            }
        }
    }

    async fn resume(&mut self) {
        match &self.disk {
            Disk::File(file) => file.resume(),
            Disk::Mapped(name) => {
                run(&["dmsetup", "resume", name]);
            }
        }
    }
}

impl Drop for HungPool {
    fn drop(&mut self) {
        if let Disk::Mapped(name) = &self.disk {
            let _ = super::run_err(&["dmsetup", "resume", name]);
            let _ = super::run_err(&["umount", "-l", &self.pool.display().to_string()]);
            let _ = super::run_err(&["dmsetup", "remove", "--deferred", name]);
        }
    }
}

/// Exports of an NBD server.
pub struct DeadServer {
    // They resume before the server is awaited.
    files: Vec<StuckFile>,
    server: NbdServer,
    volumes: Vec<Volume>,
    /// The file by which the server holds every request back.
    control: PathBuf,
}

impl DeadServer {
    pub async fn new(sandbox: &Sandbox, kind: &str, phase: Phase) -> Self {
        let control = sandbox.dir().join("pause.sock");
        let pause = format!("pause-control={}", control.display());
        let server = NbdServer::start_with(sandbox, false, &["--filter=pause", &pause]).await;
        // No other story's volume has the name.
        let prefix = format!(
            "{}.affected",
            sandbox.dir().file_name().expect("a name").display()
        );
        let mut files = Vec::new();
        let volumes = names(&prefix)
            .map(|name| {
                let image = NbdServer::image(sandbox, &name, bytes_for(kind));
                if phase == Phase::Mount {
                    files.push(StuckFile::new(&image, bytes_for(kind)));
                }
                server
                    .over(Volume::filesystem(&name, kind))
                    .with("deadConnectionTimeout", "300")
            })
            .collect();
        Self {
            files,
            server,
            volumes,
            control,
        }
    }
}

impl Fault for DeadServer {
    fn affected(&self) -> &[Volume] {
        &self.volumes
    }

    fn grow(&self, volume: &Volume, bytes: u64) {
        fs::File::options()
            .write(true)
            .open(self.server.image_of(volume))
            .and_then(|image| image.set_len(bytes))
            .expect("a larger image");
    }

    async fn stop(&mut self, phase: Phase) {
        match phase {
            Phase::Probe => {
                let mut control = UnixStream::connect(&self.control).expect("nbdkit's filter");
                control.write_all(b"p").expect("a command");
                control.read_exact(&mut [0]).expect("its answer");
            }
            Phase::Mount => self.files.iter().for_each(StuckFile::stop_writes),
            _ => self.server.kill9(),
        }
    }

    async fn while_calls_hang(&mut self, phase: Phase) {
        if phase == Phase::Probe {
            eventually("all are attached", async || {
                let attached = |volume: &Volume| !nbds_over(&volume.handle).is_empty();
                self.volumes.iter().all(attached).then_some(())
            })
            .await;
            self.server.kill9();
        }
    }

    async fn resume(&mut self) {
        if self.files.is_empty() {
            // Its predecessor left it.
            let _ = fs::remove_file(&self.control);
            self.server.restart().await;
        }
        self.files.iter().for_each(StuckFile::resume);
    }
}

impl Drop for DeadServer {
    /// Where the story failed, an agent's thread may wait for a device, and the agent
    /// with it, until the device's deadline for dead connections.
    fn drop(&mut self) {
        self.files.iter().for_each(StuckFile::resume);
        self.server.kill9();
        let attached = self.volumes.iter().flat_map(|of| nbds_over(&of.handle));
        for device in attached {
            let _ = super::run_err(&["nbd-client", "-d", &device]);
        }
    }
}

/// An NFS server.
pub struct DeadNfsServer {
    server: NfsServer,
    volumes: Vec<Volume>,
    is_frozen: bool,
}

impl DeadNfsServer {
    pub async fn new(sandbox: &Sandbox) -> Self {
        let server = NfsServer::start(sandbox, "dead-server").await;
        // Each with a superblock of its own: else the unmount of the last one alone waits.
        let options = format!("port={},nosharecache", server.port());
        let volumes = names("affected")
            .map(|name| server.volume(&name, &name).with("mountOptions", &options));
        Self {
            volumes: volumes.collect(),
            server,
            is_frozen: false,
        }
    }
}

impl Fault for DeadNfsServer {
    fn affected(&self) -> &[Volume] {
        &self.volumes
    }

    fn grow(&self, _: &Volume, _: u64) {
        unreachable!("the server's file system has their room");
    }

    /// An unmount ends without the server.
    fn may_succeed(&self, phase: Phase) -> bool {
        matches!(phase, Phase::Use | Phase::Unmount)
    }

    async fn stop(&mut self, phase: Phase) {
        self.is_frozen = phase == Phase::Mount;
        if self.is_frozen {
            // So the agent connects, and the kernel waits.
            self.server.freeze();
        } else {
            self.server.kill9();
        }
    }

    async fn resume(&mut self) {
        if self.is_frozen {
            self.server.thaw();
        } else {
            self.server.restart().await;
        }
    }
}

/// The only OSD of a Ceph cluster.
pub struct DeadOsd<'a> {
    ceph: &'a Ceph,
    volumes: Vec<Volume>,
    dead: Option<Dead<'a>>,
}

#[allow(dead_code, reason = "they work by being dropped")]
enum Dead<'a> {
    Frozen(FrozenOsd<'a>),
    Stopped(StoppedOsd<'a>),
}

impl<'a> DeadOsd<'a> {
    pub fn new(ceph: &'a Ceph, kind: &str) -> Self {
        Self {
            ceph,
            volumes: (0..AFFECTED).map(|_| ceph.volume(kind)).collect(),
            dead: None,
        }
    }
}

impl Fault for DeadOsd<'_> {
    fn affected(&self) -> &[Volume] {
        &self.volumes
    }

    fn grow(&self, volume: &Volume, bytes: u64) {
        let size = format!("{}M", bytes / MIB);
        let spec = spec_of(volume);
        self.ceph
            .cluster
            .rbd(&["resize", "--no-progress", "--size", &size, &spec]);
    }

    fn stops_at_the_mount(&self) -> bool {
        true
    }

    async fn stop(&mut self, phase: Phase) {
        self.dead = Some(match phase {
            // Its clients see their connections end.
            Phase::Use => Dead::Stopped(self.ceph.stop()),
            _ => Dead::Frozen(self.ceph.freeze()),
        });
    }

    async fn resume(&mut self) {
        self.dead = None;
    }
}
