//! One of the project's binaries, running.

use std::{
    cell::{Cell, RefCell},
    env, fs,
    path::{Path, PathBuf},
    process::{Child, ChildStderr, Command, ExitStatus, Stdio},
    time::Duration,
};

use rustix::{
    fs::{CWD, FileType, Mode, mknodat},
    process::{Pid, Signal, kill_process},
};
use tonic::transport::Channel;
use uring_csi::internals::Endpoint;
use uring_csi::{proto::csi::ProbeRequest, proto::csi::identity_client::IdentityClient};

use super::eventually;

/// How to start it, and, after [`Agent::start`], the process.
pub struct Agent {
    program: &'static str,
    args: Vec<String>,
    endpoint: Endpoint,
    log: PathBuf,
    /// What the program and its arguments are given to.
    through: &'static [&'static str],
    /// What it logs goes into a pipe that nobody reads.
    is_unread: Cell<bool>,
    process: RefCell<Option<Child>>,
}

/// What an agent runs on.
#[derive(Clone, Copy, Debug)]
pub enum Machine {
    /// That of the rest of the story.
    Usual,
    /// One of its own: it sees no RBD devices of the kernel's.
    Another,
    /// It has none of Ceph's libraries.
    WithoutLibrbd,
    /// Nothing is written to its root but where the manifests mount something.
    ReadOnlyRoot,
}

/// A machine of its own, as far as the kernel's RBD devices are concerned.
const ANOTHER_MACHINE: &[&str] = &[
    "unshare",
    "--mount",
    "--propagation=unchanged",
    "sh",
    "-c",
    "mount -t tmpfs none /sys/bus/rbd/devices && exec \"$@\"",
    "sh",
];

/// A machine without Ceph's libraries: what the linker finds of them is no library.
const WITHOUT_LIBRBD: &[&str] = &[
    "unshare",
    "--mount",
    "--propagation=unchanged",
    "sh",
    "-c",
    "for each in $(ldconfig -p | grep -o '/.*/lib\\(rados\\|rbd\\)\\.so.*'); do mount --bind /dev/null $each || exit; done; exec \"$@\"",
    "sh",
];

/// As in the manifests: a root that nothing is written to. Encryption has its own
/// directory for locks.
const ON_READ_ONLY_ROOT: &[&str] = &[
    "unshare",
    "--mount",
    "--propagation=unchanged",
    "sh",
    "-c",
    "mkdir -p /run/cryptsetup && mount -t tmpfs none /run/cryptsetup && mount -o remount,bind,ro / && exec \"$@\"",
    "sh",
];

impl Agent {
    /// Not started yet. What it prints goes to `log`.
    pub fn new(program: &'static str, socket: &Path, log: PathBuf, args: Vec<String>) -> Self {
        let endpoint: Endpoint = socket.display().to_string().parse().expect("a socket");
        let args = [vec!["--endpoint".to_owned(), endpoint.to_string()], args].concat();
        Self {
            program,
            args,
            endpoint,
            log,
            through: &[],
            is_unread: Cell::default(),
            process: RefCell::default(),
        }
    }

    /// As if it ran on such a machine.
    pub fn on(&mut self, machine: Machine) {
        self.through = match machine {
            Machine::Usual => &[],
            Machine::Another => ANOTHER_MACHINE,
            Machine::WithoutLibrbd => WITHOUT_LIBRBD,
            Machine::ReadOnlyRoot => ON_READ_ONLY_ROOT,
        };
    }

    /// Nobody reads what it logs, until [`Agent::take_logged`].
    pub fn unread(&self) {
        self.is_unread.set(true);
    }

    /// The end of the pipe into which an agent that is [`Agent::unread`] logs.
    pub fn take_logged(&self) -> ChildStderr {
        let mut process = self.process.borrow_mut();
        let stderr = process.as_mut().and_then(|process| process.stderr.take());
        stderr.expect("an agent that is unread")
    }

    /// Starts the process without waiting for anything.
    pub fn spawn(&self) {
        self.spawn_with(&[]);
    }

    /// Starts a process that ends by itself after `steps` of its steps (see
    /// `crash_point`), and waits until it is ready or has ended.
    pub async fn start_doomed(&self, steps: usize) {
        self.spawn_with(&[("CRASH_AT", steps.to_string())]);
        eventually("the agent is ready, or ends", async || {
            let ready = self.exited().is_some() || self.probe().await == Some(true);
            ready.then_some(())
        })
        .await;
    }

    /// Starts a process that stands still after `steps` of its steps (see
    /// `crash_point`), and waits until it is ready or stands still.
    pub async fn start_stalling(&self, steps: usize) {
        self.spawn_with(&[("STALL_AT", steps.to_string())]);
        eventually("the agent is ready, or stands still", async || {
            // One that stands still does not answer.
            let asked = tokio::time::timeout(Duration::from_secs(1), self.probe()).await;
            let ready = asked == Ok(Some(true)) || self.stands_still();
            ready.then_some(())
        })
        .await;
    }

    /// Whether it has been stopped by a signal.
    pub fn stands_still(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid())).expect("procfs");
        // Behind the program's name, which is in parentheses (proc_pid_stat(5)).
        stat.rsplit(')')
            .next()
            .is_some_and(|rest| rest.starts_with(" T"))
    }

    /// Ends a standstill.
    pub fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    /// Starts the process with more in its environment, without waiting for anything.
    pub(super) fn spawn_with(&self, environment: &[(&str, String)]) {
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(&self.log)
            .expect("a log file");
        // Whatever ends the story ends the agent, even a killed test runner.
        let stdout = log.try_clone().expect("a descriptor");
        let stderr = if self.is_unread.get() {
            Stdio::piped()
        } else {
            Stdio::from(log)
        };
        let program = program(self.program);
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--"])
            .args(self.through)
            .arg(program)
            .args(&self.args)
            .env("HOLD_AT", self.holds())
            .envs(environment.iter().cloned())
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr)
            .spawn()
            .expect("setpriv of util-linux");
        assert!(
            self.process.replace(Some(child)).is_none(),
            "{} runs already",
            self.program
        );
    }

    /// Holds up the agent wherever it comes to this step of this volume (see
    /// `hold_point`), until what is returned is dropped.
    pub fn hold(&self, step: &str, volume_id: &str) -> HeldUp {
        let fifo = self.holds().join(format!("{step}-{volume_id}"));
        fs::create_dir_all(self.holds()).expect("a directory");
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a FIFO");
        HeldUp(fifo)
    }

    fn holds(&self) -> PathBuf {
        self.log.with_extension("holds")
    }

    /// Starts the process and waits until it says that it is ready.
    pub async fn start(&self) {
        self.spawn();
        eventually("the agent is ready", async || {
            if let Some(status) = self.exited() {
                panic!("{} ended at once: {status}\n{}", self.program, self.log());
            }
            (self.probe().await == Some(true)).then_some(())
        })
        .await;
    }

    /// What Probe says; None while nobody answers.
    pub async fn probe(&self) -> Option<bool> {
        let answer = IdentityClient::new(self.channel())
            .probe(ProbeRequest {})
            .await
            .ok()?;
        Some(answer.into_inner().ready.unwrap_or(true))
    }

    /// A connection of its own, as kubelet makes one for each call.
    pub fn channel(&self) -> Channel {
        self.endpoint.channel()
    }

    pub fn socket(&self) -> &Path {
        self.endpoint.path()
    }

    pub fn pid(&self) -> u32 {
        self.process
            .borrow()
            .as_ref()
            .expect("a running agent")
            .id()
    }

    /// Everything it has printed so far.
    pub fn log(&self) -> String {
        fs::read(&self.log)
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// Waits until it has printed these words: a running agent writes its log a
    /// moment after its answers.
    pub async fn logged(&self, words: &str) {
        eventually(words, async || self.log().contains(words).then_some(())).await;
    }

    fn exited(&self) -> Option<ExitStatus> {
        let mut process = self.process.borrow_mut();
        process.as_mut()?.try_wait().expect("a child of ours")
    }

    /// Whether it has ended; then it can be started again.
    pub fn has_ended(&self) -> bool {
        let ended = self.exited().is_some();
        if ended {
            self.process.take();
        }
        ended
    }

    /// Waits for its end.
    pub async fn ended(&self) -> ExitStatus {
        let status = eventually("the agent ends", async || self.exited()).await;
        self.process.take();
        status
    }

    /// SIGKILL, and the process is gone.
    pub async fn kill9(&self) {
        self.signal(Signal::KILL);
        self.ended().await;
    }

    /// SIGKILL to a process with a thread that no signal reaches: it stays for
    /// as long as that thread does.
    pub fn abandon(&self) -> Dying {
        self.signal(Signal::KILL);
        Dying(RefCell::new(self.process.take().expect("a running agent")))
    }

    /// SIGTERM; see [`Agent::ended`].
    pub fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a process id"), signal).expect("a signal");
    }
}

/// A binary of the project. Cargo builds it before the tests and benches that run it,
/// and puts it one directory above theirs.
pub fn program(name: &str) -> PathBuf {
    let own = env::current_exe().expect("procfs");
    let built = own.parent().and_then(Path::parent).expect("target/*/deps");
    built.join(name)
}

/// Where an agent is held up.
pub struct HeldUp(PathBuf);

impl Drop for HeldUp {
    fn drop(&mut self) {
        // Whoever waits for a writer goes on, and nobody comes after it.
        let writer = fs::File::options().read(true).write(true).open(&self.0);
        let _ = fs::remove_file(&self.0);
        drop(writer);
    }
}

/// A killed process that may take its time to end.
pub struct Dying(RefCell<Child>);

impl Dying {
    pub fn is_gone(&self) -> bool {
        let mut child = self.0.borrow_mut();
        child.try_wait().expect("a child of ours").is_some()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if let Some(mut child) = self.process.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<_> = log.lines().collect();
            let tail = lines[lines.len().saturating_sub(80)..].join("\n");
            eprintln!("--- {} said at last:\n{tail}", self.program);
        }
    }
}

/// How long kubelet and the sidecars wait for an answer.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(120);

/// A request with the caller's deadline in its `grpc-timeout`.
pub fn request<T>(message: T, timeout: Duration) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(timeout);
    request
}
