//! `doctor`: whether this machine has what the driver needs, and what to do where not.

use std::{
    fs, io, iter,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Args;
use rustix::{
    process::{Resource, geteuid, getrlimit},
    thread::CapabilitySet,
};
use serde::Serialize;

use super::{
    answer::Answer,
    context::Context,
    error::{Agent, CliError},
};
use crate::{
    error_chain,
    kernel::{capabilities::NODE_NEEDS, exec, uring_setup::try_uring_setup},
    proto::{
        admin::{CheckStorageRequest, CheckStorageResponse},
        csi::ProbeRequest,
    },
};

/// Checks this machine: kernel, privileges, drivers, programs, mounts, agents, storage
#[derive(Args, Debug)]
#[command(after_help = "\
A state of `bad` keeps the node agent from starting, or from mounting anything, and the
exit code is 1 then. `lacks` is about volumes of that kind alone. `unknown` cannot be told
here, as in a container without the node's /lib/modules. Privileges and io_uring are those
of this process: of the agent, where it runs in the agent's container. It loads no modules.

Each agent that runs tries out its pools, with a file that it removes again, and asks the
monitors of its Ceph clusters. What does not answer costs a few seconds.

Examples:
  uringctl doctor
  uringctl doctor --kubelet-dir /var/snap/microk8s/common/var/lib/kubelet")]
pub struct Doctor {
    /// Kubelet's directory
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet")]
    kubelet_dir: PathBuf,
}

/// All checks, in their order.
#[derive(Debug, Serialize)]
pub struct DoctorAnswer {
    checks: Vec<Check>,
}

/// One property of the machine.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Check {
    name: String,
    state: CheckState,
    found: String,
    /// Empty where there is nothing to do.
    advice: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum CheckState {
    Good,
    /// Volumes of some kind do not work.
    Lacks,
    /// To be found out on the node itself.
    Unknown,
    /// The node agent does not start, or mounts nothing.
    Bad,
}

impl CheckState {
    fn as_str(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Lacks => "lacks",
            Self::Unknown => "unknown",
            Self::Bad => "bad",
        }
    }
}

impl Check {
    fn good(name: impl Into<String>, found: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            state: CheckState::Good,
            found: found.into(),
            advice: String::new(),
        }
    }

    fn lacks(name: impl Into<String>, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            state: CheckState::Lacks,
            advice: advice.into(),
            ..Self::good(name, found)
        }
    }

    fn unknown(
        name: impl Into<String>,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self {
            state: CheckState::Unknown,
            ..Self::lacks(name, found, advice)
        }
    }

    fn bad(name: impl Into<String>, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            state: CheckState::Bad,
            ..Self::lacks(name, found, advice)
        }
    }
}

impl Doctor {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<DoctorAnswer, CliError> {
        let machine = Machine::new(Path::new("/"));
        let mut checks = vec![
            machine.kernel(),
            machine.io_uring(try_uring_setup()),
            user(geteuid().is_root()),
            machine.capabilities(),
            descriptors(getrlimit(Resource::Nofile).maximum),
        ];
        checks.extend(
            DRIVERS
                .iter()
                .map(|(driver, kind)| machine.driver(driver, kind)),
        );
        checks.extend(FILE_SYSTEMS.iter().map(|fs| machine.file_system(fs)));
        checks.extend(PROGRAMS.iter().map(|program| machine.program(program)));
        checks.push(machine.librbd());
        checks.push(machine.propagation(&self.kubelet_dir));
        checks.extend(node_agent(context).await);
        checks.extend(controller(context).await);
        Ok(DoctorAnswer { checks })
    }
}

impl Answer for DoctorAnswer {
    /// A line for each check, and one below it where there is something to do.
    fn text(&self) -> String {
        let width = self.checks.iter().map(|check| check.name.len()).max();
        let width = width.unwrap_or_default();
        let lines = self.checks.iter().map(|check| {
            let (name, state) = (&check.name, check.state.as_str());
            let line = format!("{state:7} {name:width$} {}", check.found);
            match check.advice.as_str() {
                "" => line,
                advice => format!("{line}\n{:7} {advice}", ""),
            }
        });
        lines.collect::<Vec<_>>().join("\n")
    }

    fn require_success(self) -> Result<(), CliError> {
        let bad = self
            .checks
            .iter()
            .filter(|check| check.state == CheckState::Bad);
        let names: Vec<_> = bad.map(|check| check.name.as_str()).collect();
        if names.is_empty() {
            return Ok(());
        }
        Err(CliError::Unfit(names.join(", ")))
    }
}

/// Drivers of the kernel, and the volumes that need them.
const DRIVERS: [(&str, &str); 4] = [
    ("loop", "image files"),
    ("nbd", "NBD exports and rbd-nbd"),
    ("rbd", "Ceph images that rbd-nbd does not map"),
    ("dm_crypt", "encrypted Ceph images"),
];

const FILE_SYSTEMS: [&str; 4] = ["ext4", "xfs", "btrfs", "nfs4"];

/// A program that the node agent runs, its package in Debian, and its purpose.
struct Program(&'static str, &'static str, &'static str);

const PROGRAMS: [Program; 7] = [
    Program("mkfs.ext4", "e2fsprogs", "formats ext4"),
    Program("e2fsck", "e2fsprogs", "checks ext4"),
    Program("mkfs.xfs", "xfsprogs", "formats XFS"),
    Program("xfs_repair", "xfsprogs", "checks XFS"),
    Program("mkfs.btrfs", "btrfs-progs", "formats Btrfs"),
    Program(
        "cryptsetup",
        "cryptsetup-bin",
        "opens encrypted Ceph images",
    ),
    Program("rbd-nbd", "rbd-nbd", "maps Ceph images that krbd cannot"),
];

/// Linux 5.14.
const FLOOR: (u32, u32) = (5, 14);

fn user(is_root: bool) -> Check {
    if is_root {
        return Check::good("user", "root");
    }
    Check::bad("user", "not root", "run it, and the node agent, as root")
}

/// `limit`: the hard one, to which the node agent raises its own; none: unlimited.
fn descriptors(limit: Option<u64>) -> Check {
    // A volume takes up to a dozen while it is staged.
    const FEW: u64 = 4096;
    match limit {
        Some(limit) if limit < FEW => Check::lacks(
            "descriptors",
            format!("at most {limit}"),
            "raise the hard limit of open files (ulimit -Hn, LimitNOFILE=) for hundreds of volumes",
        ),
        Some(limit) => Check::good("descriptors", format!("at most {limit}")),
        None => Check::good("descriptors", "unlimited"),
    }
}

/// The files of a machine that tell what it has.
struct Machine {
    root: PathBuf,
    /// The kernel's release.
    release: String,
}

impl Machine {
    fn new(root: &Path) -> Self {
        let release = fs::read_to_string(root.join("proc/sys/kernel/osrelease"));
        Self {
            root: root.to_owned(),
            release: release.unwrap_or_default().trim().to_owned(),
        }
    }

    fn read(&self, path: &str) -> String {
        fs::read_to_string(self.root.join(path)).unwrap_or_default()
    }

    fn kernel(&self) -> Check {
        let mut numbers = self.release.split(|byte: char| !byte.is_ascii_digit());
        let mut next = || numbers.next().and_then(|part| part.parse().ok());
        let found = format!("Linux {}", self.release);
        match (next(), next()) {
            (Some(major), Some(minor)) if (major, minor) >= FLOOR => Check::good("kernel", found),
            _ => Check::bad("kernel", found, "boot Linux 5.14 or later"),
        }
    }

    /// `setup`: the outcome of io_uring_setup(2) in this process.
    fn io_uring(&self, setup: io::Result<()>) -> Check {
        let name = "io_uring";
        let refused = |error: &io::Error| error.kind() == io::ErrorKind::PermissionDenied;
        let missing = |error: &io::Error| error.kind() == io::ErrorKind::Unsupported;
        // 1 is for privileged programs as well, 2 for none
        // (Documentation/admin-guide/sysctl/kernel.rst).
        let sysctl = self.read("proc/sys/kernel/io_uring_disabled");
        match (sysctl.trim(), setup) {
            ("2", _) => Check::bad(
                name,
                "kernel.io_uring_disabled is 2",
                "sysctl kernel.io_uring_disabled=0, and in /etc/sysctl.d",
            ),
            (_, Ok(())) => Check::good(name, "a ring can be made"),
            ("1", Err(error)) if refused(&error) => Check::bad(
                name,
                format!("io_uring_setup: {error}, with kernel.io_uring_disabled 1"),
                "run it as root, with CAP_SYS_ADMIN, or sysctl kernel.io_uring_disabled=0; in a \
                 container first allow io_uring in its seccomp profile",
            ),
            // With its sysctl the kernel has io_uring, and podman's profile denies by ENOSYS.
            (value, Err(error)) if refused(&error) || missing(&error) && !value.is_empty() => {
                Check::bad(
                    name,
                    format!("io_uring_setup: {error}"),
                    "allow io_uring in the container's seccomp profile, or run the container privileged",
                )
            }
            (_, Err(error)) if missing(&error) => Check::bad(
                name,
                format!("io_uring_setup: {error}"),
                "boot a kernel with CONFIG_IO_URING; in a container first allow io_uring in its \
                 seccomp profile, or run it privileged",
            ),
            (_, Err(error)) => Check::bad(
                name,
                format!("io_uring_setup: {error}"),
                "raise the limits of descriptors and locked memory",
            ),
        }
    }

    /// What of the node agent's capabilities this process has, and can pass on.
    fn capabilities(&self) -> Check {
        let name = "capabilities";
        let status = self.read("proc/self/status");
        // proc_pid_status(5)
        let set = |key: &str| {
            let value = status.lines().find_map(|line| line.strip_prefix(key))?;
            let bits = u64::from_str_radix(value.trim(), 16).ok()?;
            Some(CapabilitySet::from_bits_retain(bits))
        };
        let (Some(effective), Some(bounding)) = (set("CapEff:"), set("CapBnd:")) else {
            return Check::unknown(name, "/proc/self/status does not tell", "mount /proc");
        };
        let missing = NODE_NEEDS.difference(effective.intersection(bounding));
        let names = missing.iter_names().map(|(name, _)| format!("CAP_{name}"));
        let names = names.collect::<Vec<_>>().join(", ");
        let advice = "run the container privileged, or the unit without CapabilityBoundingSet=";
        if missing.is_empty() {
            Check::good(name, "all that the node agent needs")
        } else if missing.contains(CapabilitySet::SYS_ADMIN) {
            Check::bad(name, format!("without {names}"), advice)
        } else {
            Check::lacks(name, format!("without {names}"), advice)
        }
    }

    /// Whether the kernel has a module, loaded, built in, or to be loaded.
    fn module(&self, name: &str) -> Option<&'static str> {
        if self.root.join("sys/module").join(name).exists() {
            return Some("loaded");
        }
        let lists = |list: &str| {
            let text = self.read(&format!("lib/modules/{}/{list}", self.release));
            text.lines().any(|line| {
                let path = line.split(':').next().unwrap_or_default();
                let file = path.rsplit('/').next().unwrap_or_default();
                let module = file.split('.').next().unwrap_or_default();
                !module.is_empty() && module.replace('-', "_") == name
            })
        };
        if lists("modules.builtin") {
            return Some("built in");
        }
        lists("modules.dep").then_some("a module, not loaded")
    }

    /// Where it is not known which modules the kernel has, as in most containers.
    fn unknown_module(&self, name: &str) -> Option<Check> {
        let modules = format!("lib/modules/{}", self.release);
        let is_absent = !self.root.join(&modules).is_dir();
        is_absent.then(|| {
            Check::unknown(
                name,
                format!("not loaded, and there is no /{modules} here"),
                "run uringctl doctor on the node itself",
            )
        })
    }

    fn driver(&self, driver: &str, kind: &str) -> Check {
        let name = format!("driver {driver}");
        match self.module(driver) {
            Some("a module, not loaded") => Check::lacks(
                name,
                "a module, not loaded",
                format!("for {kind}: modprobe {driver}; the pods of deploy/ do that"),
            ),
            Some(found) => Check::good(name, found),
            None => self.unknown_module(&name).unwrap_or_else(|| {
                let advice = format!("for {kind}: boot a kernel that has it");
                Check::lacks(name, "not there", advice)
            }),
        }
    }

    /// The kernel loads the module of a file system at the first mount.
    fn file_system(&self, fs: &str) -> Check {
        let name = format!("file system {fs}");
        let known = self.read("proc/filesystems");
        if known
            .lines()
            .any(|line| line.split_whitespace().last() == Some(fs))
        {
            return Check::good(name, "known to the kernel");
        }
        let module = if fs == "nfs4" { "nfsv4" } else { fs };
        match self.module(module) {
            Some(found) => Check::good(name, found),
            None => self.unknown_module(&name).unwrap_or_else(|| {
                let advice = "for volumes with it: boot a kernel that has it";
                Check::lacks(name, "not there", advice)
            }),
        }
    }

    fn program(&self, Program(program, package, purpose): &Program) -> Check {
        let mut directories = exec::PATH.split(':').map(|dir| dir.trim_start_matches('/'));
        let found = directories.find(|dir| self.root.join(dir).join(program).exists());
        match found {
            Some(dir) => Check::good(*program, format!("/{dir}")),
            None => Check::lacks(
                *program,
                "not there",
                format!("it {purpose}; install {package}, unless the agent runs in its image"),
            ),
        }
    }

    fn librbd(&self) -> Check {
        const DIRECTORIES: [&str; 4] = [
            "usr/lib/x86_64-linux-gnu",
            "usr/lib/aarch64-linux-gnu",
            "usr/lib64",
            "usr/lib",
        ];
        let has = |dir: &&str| self.root.join(dir).join("librbd.so.1").exists();
        match DIRECTORIES.into_iter().find(has) {
            Some(dir) => Check::good("librbd", format!("/{dir}")),
            None => Check::lacks(
                "librbd",
                "not there",
                "for Ceph: install librbd1, unless agent and controller run in their images",
            ),
        }
    }

    /// Whether mounts below kubelet's directory reach containers: a mount of the agent in
    /// its pod reaches kubelet, and kubelet's the pods.
    fn propagation(&self, kubelet: &Path) -> Check {
        let name = "mount propagation";
        let path = kubelet.display();
        if !self
            .root
            .join(kubelet.strip_prefix("/").unwrap_or(kubelet))
            .is_dir()
        {
            return Check::lacks(
                name,
                format!("there is no {path}"),
                "name kubelet's directory by --kubelet-dir; without kubelet there is none",
            );
        }
        // proc_pid_mountinfo(5): id, parent, device, root, mount point, options, tags.
        let mounts = self.read("proc/self/mountinfo");
        let nearest = mounts
            .lines()
            .filter_map(|line| {
                let mut fields = line.split(' ');
                let point = PathBuf::from(fields.nth(4)?);
                let tags = fields.skip(1).take_while(|tag| *tag != "-");
                let shared = tags.into_iter().any(|tag| tag.starts_with("shared:"));
                kubelet.starts_with(&point).then_some((point, shared))
            })
            // Of two mounts at one point the later one is on top.
            .reduce(|best, next| {
                let is_nearer = next.0.components().count() >= best.0.components().count();
                if is_nearer { next } else { best }
            });
        match nearest {
            Some((point, true)) => Check::good(name, format!("shared, at {}", point.display())),
            Some((point, false)) => Check::bad(
                name,
                format!("private, at {}", point.display()),
                format!("mount --make-rshared {}", point.display()),
            ),
            None => Check::lacks(name, "unknown", "/proc/self/mountinfo names no mount there"),
        }
    }
}

/// Longer than an agent takes to find that its storage does not answer.
const AGENT_TIMEOUT: Duration = Duration::from_secs(15);

/// The answer of an agent, which may be stopped or hang.
async fn in_time<T>(call: impl Future<Output = Result<T, CliError>>) -> Result<T, String> {
    match tokio::time::timeout(AGENT_TIMEOUT, call).await {
        // Its advice is the check's.
        Ok(Err(CliError::Unreachable { endpoint, why, .. })) => {
            Err(format!("nothing answers at {endpoint} ({why})"))
        }
        Ok(answer) => answer.map_err(|error| error_chain(&error)),
        Err(_) => Err(format!("no answer within {} s", AGENT_TIMEOUT.as_secs())),
    }
}

fn how_to_start(agent: Agent) -> String {
    let command = agent.start_command(Path::new("/"));
    command.unwrap_or_else(|| "start it".to_owned())
}

async fn node_agent(context: &Context) -> Vec<Check> {
    const NAME: &str = "node agent";
    let agent = match in_time(context.agent_info()).await {
        Err(found) => {
            let start = how_to_start(Agent::Node);
            let advice = format!("{start}, or name its socket by --node-endpoint");
            return vec![Check::lacks(NAME, found, advice)];
        }
        Ok(info) if info.not_ready_because.is_empty() => {
            Check::good(NAME, format!("ready, pools: {}", info.pools.join(" ")))
        }
        Ok(info) => Check::lacks(
            NAME,
            format!("not ready: {}", info.not_ready_because),
            "mend that; it becomes ready by itself",
        ),
    };
    let storage = in_time(context.admin(
        CHECK_STORAGE,
        CheckStorageRequest {},
        async |mut client, request| client.check_storage(request).await,
    ));
    with_storage(agent, NAME, storage.await)
}

async fn controller(context: &Context) -> Vec<Check> {
    const NAME: &str = "controller";
    let probe = in_time(context.controller_identity(
        "probe the controller",
        ProbeRequest {},
        async |mut client, request| client.probe(request).await,
    ));
    if let Err(found) = probe.await {
        let start = how_to_start(Agent::Controller);
        let advice = format!(
            "none is needed on this machine, unless it has local pools; else {start}, or name \
             its socket by --controller-endpoint"
        );
        return vec![Check::lacks(NAME, found, advice)];
    }
    let storage = in_time(context.controller_admin(
        CHECK_STORAGE,
        CheckStorageRequest {},
        async |mut client, request| client.check_storage(request).await,
    ));
    with_storage(Check::good(NAME, "answers"), NAME, storage.await)
}

const CHECK_STORAGE: &str = "check the storage";

/// The check of an agent, and below it those that the agent made of its storage.
fn with_storage(
    agent: Check,
    name: &str,
    answer: Result<CheckStorageResponse, String>,
) -> Vec<Check> {
    let findings = match answer {
        Ok(answer) => answer.findings,
        Err(found) => {
            let advice = "uringctl and the agent may be of different versions; else see its log";
            let storage = Check::unknown(format!("{name}: storage"), found, advice);
            return vec![agent, storage];
        }
    };
    let storage = findings.into_iter().map(|finding| {
        let name = format!("{name}: {}", finding.subject);
        if finding.remedy.is_empty() {
            Check::good(name, finding.found)
        } else {
            Check::lacks(name, finding.found, finding.remedy)
        }
    });
    iter::once(agent).chain(storage).collect()
}

#[cfg(test)]
mod tests;
