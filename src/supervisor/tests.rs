//! On a cluster, with rbd-nbd and a kernel that has its driver; elsewhere nothing
//! is tested. A supervisor that is killed is one that is dropped: it never ends a
//! daemon at its end.

use std::{
    fs::{self, File},
    io::{Read as _, Seek as _, Write as _},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    pin::pin,
    task::Poll,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use testkit::{TestCluster, skip_test};
use tokio::time::sleep;

use super::{keeper::Keeper, *};
use crate::{Done, ceph::krbd::ImageSpec, secret::Secret};

mod deaths;

pub(super) fn spec(volume_id: &str, pool: &str, image: &str) -> Spec {
    Spec {
        volume_id: volume_id.to_owned(),
        image: ImageSpec {
            cluster_id: String::new(),
            pool: pool.to_owned(),
            namespace: String::new(),
            name: image.to_owned(),
            snapshot: None,
        },
        monitors: vec!["192.0.2.1:6789".to_owned()],
        user: "csi".to_owned(),
        options: NbdOptions::default(),
        read_only: false,
        fencing: None,
    }
}

const MIB: usize = 1 << 20;
/// Longer than the time after which a dead client's lock on an image passes on.
const TIMEOUT: Duration = Duration::from_secs(150);

/// An image that is unmapped and removed with it.
struct Test {
    cluster: TestCluster,
    spec: Spec,
    dir: tempfile::TempDir,
}

impl Test {
    fn new(name: &str) -> Option<Self> {
        Self::of(name, &[])
    }

    /// Over an image whose lock does not stay with a daemon that died.
    fn without_lock(name: &str) -> Option<Self> {
        Self::of(name, &["--image-feature", "layering"])
    }

    /// With an image that `rbd create` makes with these options.
    fn of(name: &str, options: &[&str]) -> Option<Self> {
        if !Path::new("/sys/module/nbd").exists() {
            skip_test("the kernel module nbd is not loaded here");
            return None;
        }
        let cluster = TestCluster::shared()?;
        let name = format!("{name}-{}", uuid::Uuid::new_v4().simple());
        let mut spec = spec(&format!("handle of {name}"), &cluster.pool, &name);
        spec.monitors.clone_from(&cluster.monitors);
        spec.user.clone_from(&cluster.user);
        cluster.rbd(&[&["create", "-s", "64M", &spec.name()], options].concat());
        let dir = tempfile::tempdir().unwrap();
        Some(Self { cluster, spec, dir })
    }

    /// The next supervisor; the last one must have been dropped, with its runtime. It has
    /// looked for devices and daemons.
    fn supervisor(&self) -> Supervisor {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let guard = runtime.enter();
        let boot = crate::kernel::boot_id().unwrap();
        let keeper = Keeper::open("rbd-nbd", self.dir.path().to_owned(), boot).unwrap();
        drop(guard);
        let supervisor = Supervisor { runtime, keeper };
        let is_new =
            |status: &super::shared::Status| status.pid.is_none() && status.trouble.is_none();
        supervisor.until("a look for devices and daemons", || {
            let listed = supervisor.keeper.list();
            !listed.iter().any(|(_, status)| is_new(status))
        });
        supervisor
    }

    fn key(&self) -> Secret {
        Secret::new(self.cluster.key.clone())
    }

    fn map(&self, supervisor: &Supervisor) -> Result<(PathBuf, Done), SupervisorError> {
        supervisor.map(&self.spec, self.key())
    }

    /// The addresses of the clients that have the image open.
    fn watchers(&self) -> Vec<String> {
        let status = self.cluster.rbd(&["status", &self.spec.name()]);
        let watchers = status.split("watcher=").skip(1);
        let address = |text: &str| text.split(' ').next().unwrap_or_default().to_owned();
        watchers.map(address).collect()
    }

    fn resize(&self, size: &str) {
        let args = ["resize", "--no-progress", "-s", size, &self.spec.name()];
        self.cluster.rbd(&args);
    }

    /// What another client of the cluster reads from the image.
    fn assert_exported_holds(&self, at: u64, byte: u8, count: usize) {
        let copy = self.dir.path().join("copy");
        let args = ["export", "--no-progress", &self.spec.name()];
        let args = [&args[..], &[copy.to_str().unwrap()]].concat();
        self.cluster.rbd(&args);
        assert_holds(&copy, at, byte, count);
        fs::remove_file(copy).unwrap();
    }

    /// The device's size.
    fn bytes(&self) -> u64 {
        let device = crate::kernel::nbd::NbdDevice::attached_as(&self.spec.volume_id);
        device.unwrap().expect("a device").size_bytes().unwrap()
    }

    /// The milliseconds after which the kernel looks at its requests.
    fn request_timeout(&self) -> u64 {
        let device = crate::kernel::nbd::NbdDevice::attached_as(&self.spec.volume_id);
        let dev = device.unwrap().expect("a device").block.dev;
        crate::kernel::sysfs::request_timeout(dev).unwrap()
    }

    fn unmap(&self, supervisor: &Supervisor) -> Result<Done, SupervisorError> {
        supervisor
            .runtime
            .block_on(supervisor.keeper.unmap(&self.spec.volume_id))
    }
}

impl Drop for Test {
    fn drop(&mut self) {
        let supervisor = self.supervisor();
        let _ = self.unmap(&supervisor).unwrap();
        // Daemons that were killed have the image open until they are given up.
        let status = || self.cluster.rbd(&["status", &self.spec.name()]);
        supervisor.until("no client", || status().contains("Watchers: none"));
        self.cluster
            .rbd(&["rm", "--no-progress", &self.spec.name()]);
    }
}

struct Supervisor {
    runtime: tokio::runtime::Runtime,
    keeper: Keeper,
}

impl Supervisor {
    fn map(&self, spec: &Spec, key: Secret) -> Result<(PathBuf, Done), SupervisorError> {
        let mapped = self.runtime.block_on(self.keeper.map(spec.clone(), key));
        mapped.map(|(device, done)| (device.block.node, done))
    }

    fn status(&self, test: &Test) -> super::shared::Status {
        let mut kept = self.keeper.list().into_iter();
        let of = kept.find(|(id, _)| *id == test.spec.volume_id);
        of.expect("a volume that is kept").1
    }

    /// Lets the supervisor work until that is so.
    #[track_caller]
    fn until(&self, what: &str, so: impl Fn() -> bool) -> Duration {
        let begun = Instant::now();
        self.runtime.block_on(async {
            while !so() {
                assert!(begun.elapsed() < TIMEOUT, "{what}");
                sleep(Duration::from_millis(10)).await;
            }
        });
        begun.elapsed()
    }
}

fn signal(pid: Option<i32>, signal: Signal) {
    let pid = Pid::from_raw(pid.expect("a daemon")).unwrap();
    kill_process(pid, signal).unwrap();
}

fn wrong_key() -> Secret {
    Secret::new("AQD9jwFrAAAAABAAuX/tNCvFFjDZjYv/o18bHA==".to_owned())
}

/// Writes in the background, past the page cache; returns how long it took.
fn write(node: &Path, at: u64, byte: u8, count: usize) -> std::thread::JoinHandle<Duration> {
    let mut file = fs::OpenOptions::new().write(true).open(node).unwrap();
    file.seek(std::io::SeekFrom::Start(at)).unwrap();
    std::thread::spawn(move || {
        let begun = Instant::now();
        file.write_all(&vec![byte; count]).unwrap();
        file.sync_all().unwrap();
        begun.elapsed()
    })
}

#[track_caller]
fn assert_holds(node: &Path, at: u64, byte: u8, count: usize) {
    let mut file = File::open(node).unwrap();
    // What others wrote may be in the page cache no more, or never was.
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    file.seek(std::io::SeekFrom::Start(at)).unwrap();
    let mut read = vec![0; count];
    file.read_exact(&mut read).unwrap();
    assert!(read == vec![byte; count], "not what was written at {at}");
}

#[test]
fn an_unmap_waits_for_a_disconnect_that_takes_long() {
    let Some(test) = Test::new("late") else {
        return;
    };
    let supervisor = test.supervisor();
    let begun = Instant::now();
    // A thread that is starved sees the volume only after its disconnect.
    while !is_reported_late(&test, &supervisor) {
        assert!(begun.elapsed() < TIMEOUT, "it is not reported");
    }
}

/// Maps and unmaps it by a disconnect that takes long; whether a report of that was seen
/// meanwhile.
fn is_reported_late(test: &Test, supervisor: &Supervisor) -> bool {
    let (node, _) = test.map(supervisor).unwrap();
    let daemon = supervisor.status(test).pid;
    signal(daemon, Signal::STOP);
    // For a request in flight the disconnect waits for a second.
    let device = crate::kernel::nbd::NbdDevice::attached_as(&test.spec.volume_id);
    let dev = device.unwrap().expect("a device").block.dev;
    let reading = std::thread::spawn(move || {
        // Where udevd, which looks for superblocks, has read nothing into the page cache.
        let file = File::open(node).unwrap();
        let _ = file.read_at(&mut [0; 4096], 32 << 20);
    });
    supervisor.until("a request", || {
        crate::kernel::sysfs::in_flight(dev).unwrap() > 0
    });
    let late = async {
        let is_late = || {
            let kept = supervisor.keeper.list().into_iter();
            let mut troubles = kept.filter_map(|(_, status)| status.trouble);
            troubles.any(|why| why.contains("not disconnected"))
        };
        while !is_late() {
            sleep(Duration::from_millis(10)).await;
        }
        signal(daemon, Signal::CONT);
    };
    let (unmapped, is_late) = supervisor.runtime.block_on(async {
        let mut unmap = pin!(supervisor.keeper.unmap(&test.spec.volume_id));
        tokio::select! {
            unmapped = &mut unmap => (unmapped, false),
            () = late => (unmap.await, true),
        }
    });
    assert_eq!(unmapped.unwrap(), Done::Now);
    reading.join().unwrap();
    is_late
}

#[test]
fn an_image_is_mapped_once_served_and_unmapped() {
    let Some(test) = Test::new("life") else {
        return;
    };
    let supervisor = test.supervisor();
    let begun = Instant::now();
    let (node, done) = test.map(&supervisor).unwrap();
    eprintln!("mapped in {:?}", begun.elapsed());
    assert_eq!(done, Done::Now);
    assert_eq!(
        test.map(&supervisor).unwrap(),
        (node.clone(), Done::Already)
    );
    let status = supervisor.status(&test);
    assert!(status.has_key && status.trouble.is_none(), "{status:?}");
    assert_eq!(status.node.as_deref(), node.to_str());

    let record = fs::read_dir(test.dir.path())
        .unwrap()
        .next()
        .unwrap()
        .unwrap();
    assert!(
        !fs::read_to_string(record.path())
            .unwrap()
            .contains(&test.cluster.key)
    );
    let pid = status.pid.unwrap();
    for of in ["cmdline", "environ"] {
        let shown = fs::read(format!("/proc/{pid}/{of}")).unwrap();
        assert!(!String::from_utf8_lossy(&shown).contains(&test.cluster.key));
    }
    assert_eq!(fs::read(format!("/proc/{pid}/fd/0")).unwrap(), b"");

    let mut reading = test.spec.clone();
    reading.read_only = true;
    let error = supervisor
        .runtime
        .block_on(supervisor.keeper.map(reading, test.key()))
        .unwrap_err();
    assert!(error.to_string().contains("writable"), "{error}");

    let open = rustix::fs::open(
        &node,
        rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::EXCL,
        rustix::fs::Mode::empty(),
    )
    .unwrap();
    let error = test.unmap(&supervisor).unwrap_err();
    assert!(matches!(error, SupervisorError::Busy { .. }), "{error}");
    drop(open);
    let begun = Instant::now();
    assert_eq!(test.unmap(&supervisor).unwrap(), Done::Now);
    eprintln!("unmapped in {:?}", begun.elapsed());
    assert_eq!(test.unmap(&supervisor).unwrap(), Done::Already);
    assert!(supervisor.keeper.list().is_empty());
    assert_eq!(fs::read_dir(test.dir.path()).unwrap().count(), 0);
}

#[test]
fn a_failed_map_names_the_reason_and_leaves_nothing() {
    let Some(test) = Test::new("refused") else {
        return;
    };
    let supervisor = test.supervisor();
    let map = |change: fn(&mut Spec), key: Secret| {
        let mut spec = test.spec.clone();
        change(&mut spec);
        supervisor
            .runtime
            .block_on(supervisor.keeper.map(spec, key))
            .unwrap_err()
    };
    let error = map(|_| {}, wrong_key());
    assert!(matches!(error, SupervisorError::Denied { .. }), "{error}");
    let error = map(|spec| spec.image.name = "none".to_owned(), test.key());
    assert!(matches!(error, SupervisorError::Missing { .. }), "{error}");
    let error = map(|spec| spec.image.pool = "none".to_owned(), test.key());
    assert!(matches!(error, SupervisorError::Missing { .. }), "{error}");
    let error = map(
        |spec| spec.monitors = vec!["127.0.0.1:1".to_owned()],
        test.key(),
    );
    assert!(matches!(error, SupervisorError::Silent { .. }), "{error}");
    assert!(supervisor.keeper.list().is_empty());
    assert_eq!(fs::read_dir(test.dir.path()).unwrap().count(), 0);
}

#[test]
fn a_device_grows_with_its_image_and_what_is_beyond_the_old_end_is_kept() {
    let Some(test) = Test::new("grow") else {
        return;
    };
    let supervisor = test.supervisor();
    let (node, _) = test.map(&supervisor).unwrap();
    let id = &test.spec.volume_id;
    let grow = |bytes| {
        supervisor
            .runtime
            .block_on(supervisor.keeper.grow(id, bytes))
    };
    assert_eq!(grow(1).unwrap(), 64 << 20);
    assert_eq!(test.request_timeout(), 500);
    let error = grow(1 << 40).unwrap_err();
    assert!(matches!(error, SupervisorError::Small { .. }), "{error}");

    // While it is in use.
    let writing = write(&node, 0, 5, 32 * MIB);
    test.resize("128M");
    let begun = Instant::now();
    assert_eq!(grow(128 << 20).unwrap(), 128 << 20);
    eprintln!("grown in {:?}", begun.elapsed());
    supervisor.until("the write", || writing.is_finished());
    writing.join().unwrap();
    write(&node, 100 << 20, 6, MIB).join().unwrap();
    assert_holds(&node, 0, 5, 32 * MIB);
    assert_holds(&node, 100 << 20, 6, MIB);
    assert_eq!(supervisor.status(&test).trouble, None);
    supervisor.until("a short timeout", || test.request_timeout() == 500);
    // As another client sees it.
    test.assert_exported_holds(100 << 20, 6, MIB);
}

#[test]
fn a_device_follows_an_image_that_others_grow() {
    let Some(test) = Test::new("follow") else {
        return;
    };
    let supervisor = test.supervisor();
    let (node, _) = test.map(&supervisor).unwrap();
    let pid = supervisor.status(&test).pid;
    test.resize("96M");
    let grown = supervisor.until("the size", || test.bytes() == 96 << 20);
    eprintln!("followed within {grown:?}");
    write(&node, 80 << 20, 7, MIB).join().unwrap();
    assert_holds(&node, 80 << 20, 7, MIB);
    assert_eq!(supervisor.status(&test).pid, pid);
    test.assert_exported_holds(80 << 20, 7, MIB);
}

/// The release of the installed rbd-nbd.
fn release() -> u32 {
    let said = std::process::Command::new("rbd-nbd")
        .arg("--version")
        .output()
        .unwrap();
    let said = String::from_utf8(said.stdout).unwrap();
    let version = said.split_whitespace().nth(2).expect("ceph version …");
    version.split('.').next().unwrap().parse().unwrap()
}

#[test]
fn growth_replaces_only_a_daemon_that_does_not_resize_its_device() {
    // Without a lock another client need not ask the daemon to resize the image.
    let Some(test) = Test::without_lock("resizes") else {
        return;
    };
    let supervisor = test.supervisor();
    let (node, _) = test.map(&supervisor).unwrap();
    let before = supervisor.status(&test).pid;
    signal(before, Signal::STOP);
    std::thread::scope(|scope| {
        // It ends once the daemon has heard of it.
        let resizing = scope.spawn(|| test.resize("96M"));
        let info = || test.cluster.rbd(&["info", &test.spec.name()]);
        supervisor.until("the image's size", || info().contains("96 MiB"));
        let grown = supervisor.keeper.grow(&test.spec.volume_id, 96 << 20);
        let grown = supervisor.runtime.block_on(async {
            // Asked before the daemon hears of it.
            let mut grown = pin!(grown);
            let asked = std::future::poll_fn(|cx| Poll::Ready(grown.as_mut().poll(cx)));
            assert!(asked.await.is_pending());
            signal(before, Signal::CONT);
            grown.await
        });
        assert_eq!(grown.unwrap(), 96 << 20);
        resizing.join().unwrap();
    });
    let after = supervisor.status(&test).pid;
    assert_eq!(after == before, release() >= 17, "{before:?} {after:?}");
    write(&node, 80 << 20, 7, MIB).join().unwrap();
    assert_holds(&node, 80 << 20, 7, MIB);
    test.assert_exported_holds(80 << 20, 7, MIB);
}
