//! A Ceph cluster to test against: real daemons, started by
//! tests/ceph/cluster.py, for the library's own tests and for stories.
//!
//! Most tests share one, in all processes of a run: the first user starts it, which takes
//! half a second, and it ends by itself when no process has had a [`TestCluster`] for a few
//! seconds. A test that stops the daemons has one of its own. No test has to end a cluster,
//! not even one that is killed: each user of a cluster locks a file, and the kernel unlocks
//! the files of a dead process.

use std::{
    collections::HashMap,
    env,
    fs::{self, File, TryLockError},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    io::{self, ErrorKind, Read as _},
    os::unix::{
        fs::MetadataExt as _,
        process::{CommandExt as _, ExitStatusExt as _},
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use super::skipped::skip_uninstalled;

/// A running cluster, which runs at least until this is dropped.
pub struct TestCluster {
    /// The monitors, `address:port` for the first messenger protocol, which krbd uses by
    /// default, and librados.
    pub monitors: Vec<String>,
    /// The same for the second, which `ms_mode` chooses.
    pub monitors_v2: Vec<String>,
    pub fsid: String,
    /// A pool initialised for RBD.
    pub pool: String,
    /// A user without `client.`; it has the capabilities of ceph-csi's documents, in
    /// every pool, and may edit the blocklist.
    pub user: String,
    /// Its key, base64.
    pub key: String,
    /// That of `admin`.
    pub admin_key: String,
    dir: PathBuf,
    /// Locked, shared.
    _users: File,
}

impl TestCluster {
    /// The one that all tests of this checkout share; they are kept apart by
    /// pools ([`TestCluster::fresh_pool`]) or names. None, and a
    /// sentence on standard error, where Ceph is not installed.
    pub fn shared() -> Option<Self> {
        let mut checkout = DefaultHasher::new();
        env!("CARGO_MANIFEST_DIR").hash(&mut checkout);
        let name = format!("uring-csi-ceph-{:x}", checkout.finish());
        installed().then(|| Self::at(env::temp_dir().join(name), "3", "1"))
    }

    /// One that ends with this; else as [`TestCluster::shared`].
    pub fn own() -> Option<Self> {
        Self::of_size("1")
    }

    /// The same with three monitors, and three OSDs: it serves without one of each.
    pub fn own_of_three() -> Option<Self> {
        Self::of_size("3")
    }

    fn of_size(size: &str) -> Option<Self> {
        let dir = tempfile::Builder::new().prefix("uring-csi-ceph-").tempdir();
        installed().then(|| Self::at(dir.expect("a directory").keep(), "0", size))
    }

    fn at(dir: PathBuf, linger: &str, size: &str) -> Self {
        let users = enter(&dir);
        // One test looks for it and starts it, while others wait.
        let starting = File::create(dir.join("starting")).expect("a file");
        starting.lock().expect("a lock");
        if !is_alive(&dir) {
            start(&dir, linger, size);
        }
        let ready = fs::read_to_string(dir.join("ready")).expect("what cluster.py says");
        let mut said: HashMap<_, _> = (ready.lines())
            .filter_map(|line| line.split_once('='))
            .collect();
        let mut take = |name| said.remove(name).expect("a value of each name").to_owned();
        Self {
            monitors: take("monitors").split(',').map(str::to_owned).collect(),
            monitors_v2: take("monitors_v2").split(',').map(str::to_owned).collect(),
            fsid: take("fsid"),
            pool: take("pool"),
            user: take("user"),
            key: take("key"),
            admin_key: take("admin_key"),
            dir,
            _users: users,
        }
    }

    /// Runs `ceph` as the administrator, and returns its output.
    #[track_caller]
    pub fn ceph(&self, args: &[&str]) -> String {
        self.tool("ceph", args)
    }

    /// Runs `rbd` as the administrator, and returns its output.
    #[track_caller]
    pub fn rbd(&self, args: &[&str]) -> String {
        self.tool("rbd", args)
    }

    /// Runs `rados` on a pool as the administrator, and returns its output.
    #[track_caller]
    pub fn rados(&self, pool: &str, args: &[&str]) -> String {
        self.tool("rados", &[&["--pool", pool], args].concat())
    }

    /// The directory of its files: with `ceph.conf` Ceph's programs run as the
    /// administrator. It is removed with the cluster.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    #[track_caller]
    fn tool(&self, program: &str, args: &[&str]) -> String {
        // Where something is wrong they would wait for ever, and silently.
        let ran = output_despite_abort(
            Command::new("timeout")
                .args(["100", program, "--conf"])
                .arg(self.dir.join("ceph.conf"))
                .args(args),
        )
        .expect("a program of coreutils");
        let said = String::from_utf8_lossy(&ran.stderr);
        let status = ran.status;
        assert!(status.success(), "{program} {args:?}: {status}: {said}");
        String::from_utf8(ran.stdout).expect("text")
    }

    /// Makes another pool for RBD.
    pub fn fresh_pool(&self) -> String {
        let name = format!("test-{}", uuid::Uuid::new_v4().simple());
        self.ceph(&["osd", "pool", "create", &name]);
        self.rbd(&["pool", "init", &name]);
        name
    }

    /// Makes an erasure-coded pool for the data of images, in a cluster of three: two chunks
    /// of data and one of their code, of which any two are enough.
    pub fn erasure_coded_pool(&self) -> String {
        let name = format!("test-{}", uuid::Uuid::new_v4().simple());
        let code = ["k=2", "m=1", "crush-failure-domain=osd"];
        let profile = ["osd", "erasure-code-profile", "set", &name];
        self.ceph(&[&profile[..], &code].concat());
        self.ceph(&["osd", "pool", "create", &name, "8", "8", "erasure", &name]);
        for (setting, value) in [("min_size", "2"), ("allow_ec_overwrites", "true")] {
            self.ceph(&["osd", "pool", "set", &name, setting, value]);
        }
        self.ceph(&["osd", "pool", "application", "enable", &name, "rbd"]);
        name
    }

    /// The first monitor, which leads, and the first OSD are killed, with all that they have.
    pub fn lose_daemons(&self) {
        for daemon in ["mon.a", "osd.0"] {
            kill_process(self.pid(daemon), Signal::KILL).expect("a daemon");
        }
    }

    /// The OSD stops answering, and keeps its connections.
    pub fn freeze_osd(&self) {
        kill_process(self.osd(), Signal::STOP).expect("an OSD");
    }

    /// Continues it.
    pub fn thaw_osd(&self) {
        kill_process(self.osd(), Signal::CONT).expect("an OSD");
    }

    /// The OSD ends; its data is kept.
    pub fn stop_osd(&self) {
        let osd = self.osd();
        kill_process(osd, Signal::TERM).expect("an OSD");
        until("the OSD ends", || test_kill_process(osd).is_err());
    }

    /// Starts it again; its clients wait, as for any OSD that starts.
    pub fn start_osd(&self) {
        kill_process(self.pid("cluster"), Signal::USR1).expect("a cluster");
    }

    /// Another monitor joins, at another address, and the first one leaves for good.
    pub fn move_monitor(&self) -> MovedMonitors {
        let address = self.fresh_addresses(1).pop().expect("an address");
        let map = self.dir.join("monmap.b").display().to_string();
        let mut daemon = self.add_monitor("b", &address);
        self.ask_monitors_at(std::slice::from_ref(&address));
        self.lose_monitor("a");
        // Not by `mon remove`: the removed monitor may end before the other gets the new
        // map, and then the other waits for it for ever.
        end(&mut daemon);
        let monitor = |more: &[&str]| self.monitor("b", &address, more);
        done(monitor(&["--extract-monmap", &map]));
        let mut without = Command::new("monmaptool");
        without.args(["--rm", "a", &map]).stdout(Stdio::null());
        done(without);
        done(monitor(&["--inject-monmap", &map]));
        let daemon = monitor(&["-f"]).spawn().expect("a monitor");
        until("it is alone", || self.quorum() == ["b"]);
        MovedMonitors::new(&[address], vec![daemon])
    }

    /// Three other monitors join a cluster of three, at other addresses, and then the first
    /// three leave for good, one after the other.
    pub fn replace_monitors(&self) -> MovedMonitors {
        let addresses = self.fresh_addresses(3);
        let names = ["d", "e", "f"].iter().zip(&addresses);
        let daemons = names
            .map(|(name, address)| self.add_monitor(name, address))
            .collect();
        self.ask_monitors_at(&addresses);
        for name in ["a", "b", "c"] {
            self.ceph(&["mon", "remove", name]);
            until("it has left the quorum", || {
                !self.quorum().iter().any(|other| other == name)
            });
            self.lose_monitor(name);
        }
        until("the others are alone", || self.quorum() == ["d", "e", "f"]);
        MovedMonitors::new(&addresses, daemons)
    }

    /// Addresses beside those of the cluster's monitors.
    fn fresh_addresses(&self, count: u8) -> Vec<String> {
        let last = self.monitors.last().expect("a monitor");
        let (address, _) = last.rsplit_once(':').expect("a port");
        let (net, last) = address.rsplit_once('.').expect("four parts");
        let last: u8 = last.parse().expect("a number");
        let nth = |number| (u32::from(last) + u32::from(number)) % 254 + 1;
        (0..count)
            .map(|number| format!("{net}.{}", nth(number)))
            .collect()
    }

    /// Starts a monitor, and waits until it has joined.
    fn add_monitor(&self, name: &str, address: &str) -> Child {
        let file = |name: String| self.dir.join(name).display().to_string();
        let map = file(format!("monmap.{name}"));
        self.ceph(&["mon", "getmap", "-o", &map]);
        fs::create_dir(file(format!("mon.{name}"))).expect("a directory");
        let keyring = file("keyring".to_owned());
        let make = ["--mkfs", "--monmap", &map, "--keyring", &keyring];
        done(self.monitor(name, address, &make));
        let daemon = self.monitor(name, address, &["-f"]).spawn();
        until("it has joined", || {
            self.quorum().iter().any(|other| other == name)
        });
        daemon.expect("a monitor")
    }

    fn monitor(&self, name: &str, address: &str, more: &[&str]) -> Command {
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "KILL", "ceph-mon", "-i", name, "-c"])
            .arg(self.dir.join("ceph.conf"))
            .arg(format!("--public-addrv={}", address_vector(address)))
            .args(more)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        command
    }

    /// The names of the monitors that agree, sorted.
    fn quorum(&self) -> Vec<String> {
        let status = self.ceph(&["quorum_status", "-f", "json"]);
        let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
        let names = status["quorum_names"].as_array().expect("names").iter();
        let mut names: Vec<_> = names
            .map(|name| name.as_str().expect("a name").to_owned())
            .collect();
        names.sort();
        names
    }

    /// From now on Ceph's programs ask these monitors, and no other.
    fn ask_monitors_at(&self, addresses: &[String]) {
        let file = self.dir.join("ceph.conf");
        let conf = fs::read_to_string(&file).expect("a configuration");
        let all: Vec<_> = addresses.iter().map(|one| address_vector(one)).collect();
        let settings = conf.lines().map(|line| match line.split_once(" = ") {
            Some(("mon host", _)) => format!("mon host = {}\n", all.join(", ")),
            _ => format!("{line}\n"),
        });
        fs::write(file, settings.collect::<String>()).expect("a configuration");
    }

    /// A monitor ends, with its data: it does not return with the restarted ones.
    fn lose_monitor(&self, name: &str) {
        let of = format!("mon.{name}");
        let pid = self.pid(&of);
        let _ = kill_process(pid, Signal::KILL);
        until("the monitor ends", || test_kill_process(pid).is_err());
        fs::remove_dir_all(self.dir.join(of)).expect("its data");
    }

    fn osd(&self) -> Pid {
        self.pid("osd.0")
    }

    fn pid(&self, of: &str) -> Pid {
        let text = fs::read_to_string(self.dir.join(format!("{of}.pid"))).expect("its process id");
        let number = text.trim().parse().expect("a number");
        Pid::from_raw(number).expect("a process id")
    }
}

/// Runs one of Ceph's programs until it has answered, at times more than once: those of
/// Ceph 16.2 may abort as they exit, in the destructors of librados, with their work done.
/// Then its output counts; a program without output runs again, and may report that all is
/// done already.
pub fn output_despite_abort(command: &mut Command) -> io::Result<Output> {
    const ABORTED: [Option<i32>; 2] = [Some(libc::SIGABRT), Some(libc::SIGSEGV)];
    const DONE: [Option<i32>; 2] = [Some(libc::EEXIST), Some(libc::ENOENT)];
    let mut again = 0;
    loop {
        let mut ran = command.output()?;
        let aborted = ABORTED.contains(&ran.status.signal());
        let whole = ran.stdout.ends_with(b"\n");
        if aborted && !whole && again < 3 {
            again += 1;
            continue;
        }
        if aborted && whole || again > 0 && DONE.contains(&ran.status.code()) {
            ran.status = ExitStatus::default();
        }
        return Ok(ran);
    }
}

/// Waits, with a timeout.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(100);
    while !is_so() {
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

fn address_vector(address: &str) -> String {
    format!("[v2:{address}:3300/0,v1:{address}:6789/0]")
}

/// Runs a program that may be repeated. ceph-mon 16.2 crashes at times while it ends, in a
/// thread of RocksDB, after its work.
fn done(mut command: Command) {
    let ends_well = |_| {
        let status = command.status().expect("a program");
        assert!(status.success() || status.signal().is_some(), "{status}");
        status.success()
    };
    assert!((0..3).any(ends_well), "{command:?} crashes each time");
}

fn end(daemon: &mut Child) {
    let _ = daemon.kill();
    let _ = daemon.wait();
}

/// The monitors that a test has started.
pub struct MovedMonitors {
    /// As in [`TestCluster`].
    pub monitors: Vec<String>,
    daemons: Vec<Child>,
}

impl MovedMonitors {
    fn new(addresses: &[String], daemons: Vec<Child>) -> Self {
        let with_port = |address: &String| format!("{address}:6789");
        Self {
            monitors: addresses.iter().map(with_port).collect(),
            daemons,
        }
    }
}

impl Drop for MovedMonitors {
    fn drop(&mut self) {
        self.daemons.iter_mut().for_each(end);
    }
}

/// Whether there are clusters here.
fn installed() -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let missing = ["ceph-mon", "ceph-mgr", "ceph-osd", "rbd"]
        .into_iter()
        .find(|program| !env::split_paths(&path).any(|dir| dir.join(program).exists()));
    if let Some(program) = missing {
        skip_uninstalled(&format!("{program} is not installed here (make setup)"));
    }
    missing.is_none()
}

/// Makes the directory and locks it, so that its cluster stays.
fn enter(dir: &Path) -> File {
    let path = dir.join("users");
    loop {
        fs::create_dir_all(dir).expect("a directory");
        let users = match File::create(&path) {
            Ok(users) => users,
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => panic!("{}: {error}", path.display()),
        };
        users.lock_shared().expect("a lock");
        // The cluster may have ended, and removed its directory, during the wait.
        let inode = |of: fs::Metadata| (of.dev(), of.ino());
        let here = fs::metadata(&path).ok().map(inode);
        if here.is_some() && here == users.metadata().ok().map(inode) {
            return users;
        }
    }
}

fn is_alive(dir: &Path) -> bool {
    File::open(dir.join("cluster.pid"))
        .is_ok_and(|its| matches!(its.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

/// Starts it, and waits until it takes I/O.
fn start(dir: &Path, linger: &str, size: &str) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("ceph/cluster.py");
    let mut cluster = Command::new(script)
        .arg(dir)
        .args([linger, size])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(File::create(dir.join("said")).expect("a file"))
        // It outlives this process where others use it, and ^C.
        .process_group(0)
        .spawn()
        .expect("cluster.py");
    let mut ready = String::new();
    let mut output = cluster.stdout.take().expect("a pipe");
    output.read_to_string(&mut ready).expect("its output");
    if ready != "ready\n" {
        let said = fs::read_to_string(dir.join("said")).unwrap_or_default();
        panic!("the cluster in {} did not start: {said}", dir.display());
    }
    // Reaps it when it ends, or it would look alive to a test that counts processes.
    thread::spawn(move || cluster.wait());
}
