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

/// The command to start it, and, after [`Agent::start`], the process.
pub struct Agent {
    program: &'static str,
    args: Vec<String>,
    endpoint: Endpoint,
    log: PathBuf,
    /// The command that runs the program with its arguments.
    wrapper: &'static [&'static str],
    /// Its log goes into a pipe without a reader.
    log_is_unread: Cell<bool>,
    /// It looks for [`StepHold`]s at each step.
    has_holds: Cell<bool>,
    process: RefCell<Option<Child>>,
}

/// The machine of an agent.
#[derive(Clone, Copy, Debug)]
pub enum Machine {
    /// The story's own.
    Host,
    /// Another one: no RBD devices of this kernel are visible.
    OtherHost,
    /// Without Ceph's libraries.
    WithoutLibrbd,
    /// Nothing is written to its root but where the manifests mount something.
    ReadOnlyRoot,
    /// Its root has no capability, as in the manifests of the controller.
    WithoutCapabilities,
    /// Its root has the capabilities of the package's file for controllers of NFS servers.
    NfsServer,
    /// It gives processes a low soft limit of descriptors, as containers have it.
    FewDescriptors,
}

/// Another machine, as far as the kernel's RBD devices are concerned.
const ON_OTHER_HOST: &[&str] = &[
    "unshare",
    "--mount",
    "--propagation=unchanged",
    "sh",
    "-c",
    "mount -t tmpfs none /sys/bus/rbd/devices && exec \"$@\"",
    "sh",
];

/// A machine without Ceph's libraries: the linker finds files that are no libraries.
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

/// Root without a capability.
const WITHOUT_CAPABILITIES: &[&str] = &[
    "setpriv",
    "--bounding-set=-all",
    "--inh-caps=-all",
    "--no-new-privs",
    "--",
];

/// Root with the capabilities of a unit's file.
const ON_NFS_SERVER: &[&str] = &[
    "sh",
    "-c",
    "set=$(sed -n 's/^CapabilityBoundingSet=//p' \"$1\" | sed 's/CAP_/,+/g' | tr -d ' ' | tr A-Z a-z) && shift && exec setpriv --bounding-set=-all$set --inh-caps=-all --no-new-privs -- \"$@\"",
    "sh",
    concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../deploy/systemd/controller-nfs-server.conf"
    ),
];

/// Processes may raise the limit.
const ON_FEW_DESCRIPTORS: &[&str] = &["prlimit", "--nofile=256:"];

impl Agent {
    /// Not started yet. Its output goes to `log`.
    pub fn new(program: &'static str, socket: &Path, log: PathBuf, args: Vec<String>) -> Self {
        let endpoint: Endpoint = socket.display().to_string().parse().expect("a socket");
        let args = [vec!["--endpoint".to_owned(), endpoint.to_string()], args].concat();
        Self {
            program,
            args,
            endpoint,
            log,
            wrapper: &[],
            log_is_unread: Cell::default(),
            has_holds: Cell::new(true),
            process: RefCell::default(),
        }
    }

    /// Runs it as on such a machine.
    pub fn run_on(&mut self, machine: Machine) {
        self.wrapper = match machine {
            Machine::Host => &[],
            Machine::OtherHost => ON_OTHER_HOST,
            Machine::WithoutLibrbd => WITHOUT_LIBRBD,
            Machine::ReadOnlyRoot => ON_READ_ONLY_ROOT,
            Machine::WithoutCapabilities => WITHOUT_CAPABILITIES,
            Machine::NfsServer => ON_NFS_SERVER,
            Machine::FewDescriptors => ON_FEW_DESCRIPTORS,
        };
    }

    /// Its log goes into a pipe without a reader, until [`Agent::take_log_pipe`].
    pub fn leave_log_unread(&self) {
        self.log_is_unread.set(true);
    }

    /// It makes no system calls for [`Agent::hold`], which has no effect on it.
    pub fn run_without_holds(&self) {
        self.has_holds.set(false);
    }

    /// The pipe of an agent with [`Agent::leave_log_unread`].
    pub fn take_log_pipe(&self) -> ChildStderr {
        let mut process = self.process.borrow_mut();
        let stderr = process.as_mut().and_then(|process| process.stderr.take());
        stderr.expect("an agent whose log goes into a pipe")
    }

    /// Starts the process without waiting for anything.
    pub fn spawn(&self) {
        self.spawn_with(&[]);
    }

    /// Starts a process that ends by itself after `steps` of its steps (see
    /// `crash_point`), and waits until it is ready or has ended.
    pub async fn start_crashing_at(&self, steps: usize) {
        self.spawn_with(&[("CRASH_AT", steps.to_string())]);
        eventually("the agent is ready, or ends", async || {
            let ready = self.exit_status().is_some() || self.probe().await == Some(true);
            ready.then_some(())
        })
        .await;
    }

    /// Starts a process that stops (SIGSTOP) after `steps` of its steps (see
    /// `crash_point`), and waits until it is ready or has stopped.
    pub async fn start_stopping_at(&self, steps: usize) {
        self.spawn_with(&[("STALL_AT", steps.to_string())]);
        eventually("the agent is ready, or has stopped", async || {
            // A stopped one does not answer.
            let probed = tokio::time::timeout(Duration::from_secs(1), self.probe()).await;
            let ready = probed == Ok(Some(true)) || self.is_stopped();
            ready.then_some(())
        })
        .await;
    }

    /// Starts the process as systemd does, which listens at the socket (sd_notify(3)).
    pub fn start_notifying(&self, socket: &Path) {
        self.spawn_with(&[("NOTIFY_SOCKET", socket.display().to_string())]);
    }

    /// Whether it has been stopped by a signal.
    pub fn is_stopped(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid())).expect("procfs");
        // Behind the program's name, which is in parentheses (proc_pid_stat(5)).
        stat.rsplit(')')
            .next()
            .is_some_and(|rest| rest.starts_with(" T"))
    }

    /// SIGCONT.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// Starts the process with more in its environment, without waiting for anything.
    pub(super) fn spawn_with(&self, environment: &[(&str, String)]) {
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(&self.log)
            .expect("a log file");
        // The agent ends with the story, also with a killed test runner.
        let stdout = log.try_clone().expect("a descriptor");
        let stderr = if self.log_is_unread.get() {
            Stdio::piped()
        } else {
            Stdio::from(log)
        };
        let program = program(self.program);
        let holds = self.has_holds.get().then(|| ("HOLD_AT", self.holds()));
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--"])
            .args(self.wrapper)
            .arg(program)
            .args(&self.args)
            .envs(holds)
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

    /// Holds the agent at this step of this volume (see `hold_point`), until the returned
    /// guard is dropped.
    pub fn hold(&self, step: &str, volume_id: &str) -> StepHold {
        let fifo = self.holds().join(format!("{step}-{volume_id}"));
        fs::create_dir_all(self.holds()).expect("a directory");
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a FIFO");
        StepHold(fifo)
    }

    fn holds(&self) -> PathBuf {
        self.log.with_extension("holds")
    }

    /// Starts the process and waits until it is ready.
    pub async fn start(&self) {
        self.spawn();
        eventually("the agent is ready", async || {
            if let Some(status) = self.exit_status() {
                panic!("{} ended at once: {status}\n{}", self.program, self.log());
            }
            (self.probe().await == Some(true)).then_some(())
        })
        .await;
    }

    /// The answer of Probe; None while no agent answers.
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

    /// Its output so far.
    pub fn log(&self) -> String {
        fs::read(&self.log)
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// Waits until it has printed these words: a running agent writes its log a
    /// moment after its answers.
    pub async fn wait_for_log(&self, words: &str) {
        eventually(words, async || self.log().contains(words).then_some(())).await;
    }

    fn exit_status(&self) -> Option<ExitStatus> {
        let mut process = self.process.borrow_mut();
        process.as_mut()?.try_wait().expect("a child of ours")
    }

    /// Whether it has ended; then it can be started again.
    pub fn has_exited(&self) -> bool {
        let ended = self.exit_status().is_some();
        if ended {
            self.process.take();
        }
        ended
    }

    /// Waits for its end.
    pub async fn wait_for_exit(&self) -> ExitStatus {
        let status = eventually("the agent ends", async || self.exit_status()).await;
        self.process.take();
        status
    }

    /// SIGKILL, and waits for the end of the process.
    pub async fn kill9(&self) {
        self.signal(Signal::KILL);
        self.wait_for_exit().await;
    }

    /// SIGKILL to a process with a thread that no signal reaches: it stays for
    /// as long as that thread does.
    pub fn kill_and_detach(&self) -> DyingAgent {
        self.signal(Signal::KILL);
        DyingAgent(RefCell::new(self.process.take().expect("a running agent")))
    }

    /// SIGTERM; see [`Agent::wait_for_exit`].
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

/// Holds up an agent at a step until dropped.
pub struct StepHold(PathBuf);

impl Drop for StepHold {
    fn drop(&mut self) {
        // The reader that waits for a writer continues, and no later reader waits.
        let writer = fs::File::options().read(true).write(true).open(&self.0);
        let _ = fs::remove_file(&self.0);
        drop(writer);
    }
}

/// A killed process that may take its time to end.
pub struct DyingAgent(RefCell<Child>);

impl DyingAgent {
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
