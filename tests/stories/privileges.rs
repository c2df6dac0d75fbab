//! System calls that the agents and their child programs may not make: such a program tries
//! them, with the capabilities and the system call filter of a running agent.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    ptr,
};

use testkit::{
    Controller, Machine, Node, NodeSetup, ProgramStub, Supervisor, ceph_story, kernel_has_nbd,
    story,
};

use crate::rbd::{
    encrypted,
    rbd_nbd::{node_with, served},
};

/// The variable with the file for the results of [`forbidden_system_calls_of_a_child`].
const TRIES: &str = "TRIES_WRITTEN_TO";

/// As in docs/security.md, by number (include/uapi/linux/capability.h): chown,
/// `dac_override`, `dac_read_search`, fowner, fsetid, `net_admin`, `sys_ptrace`,
/// `sys_admin`, `sys_resource`, mknod.
const OF_THE_NODE: [u32; 10] = [0, 1, 2, 3, 4, 12, 19, 21, 24, 27];
/// `dac_override`, `net_admin`, `ipc_lock`, `sys_admin`, `sys_resource`.
const OF_THE_SUPERVISOR: [u32; 5] = [1, 12, 14, 21, 24];

/// The status of a process or a thread in procfs: `/proc/…/status`.
fn assert_confined(status: &Path, kept: &[u32]) {
    let text = fs::read_to_string(status).expect("procfs");
    let field = |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name));
        value.expect(name).trim()
    };
    let kept = kept.iter().fold(0, |set, number| set | 1 << number);
    for (set, allowed) in [
        ("CapBnd:", kept),
        ("CapPrm:", kept),
        ("CapEff:", kept),
        ("CapInh:", 0),
        ("CapAmb:", 0),
    ] {
        let has = u64::from_str_radix(field(set), 16).expect("hexadecimal");
        assert_eq!(has & !allowed, 0, "{set} {has:x} in {}", status.display());
    }
    assert_eq!(field("NoNewPrivs:"), "1", "{}", status.display());
    assert_eq!(field("Seccomp:"), "2", "{}", status.display());
}

/// Every thread: both sets and filters belong to threads.
fn assert_all_confined(pid: u32, kept: &[u32]) {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("procfs");
    let threads: Vec<_> = threads.flatten().collect();
    assert!(!threads.is_empty());
    for thread in threads {
        let status = thread.path().join("status");
        // A lane whose thread has ended meanwhile.
        if status.exists() {
            assert_confined(&status, kept);
        }
    }
}

#[test]
fn the_agents_leave_their_keys_in_no_core_dump() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let controller = Controller::start(sandbox).await;
        for pid in [node.pid(), controller.pid()] {
            let limits = fs::read_to_string(format!("/proc/{pid}/limits")).expect("procfs");
            let core = limits
                .lines()
                .find(|line| line.starts_with("Max core file size"));
            let core: Vec<_> = core.expect("a limit").split_whitespace().collect();
            assert_eq!(core[4..6], ["0", "0"]);
        }
        node.assert_clean().await;
    });
}

#[test]
fn the_node_agent_keeps_only_needed_privileges() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", "ext4");
        let _ = node.up(&volume, "pod").await;
        assert_all_confined(node.pid(), &OF_THE_NODE);
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn the_supervisor_keeps_only_needed_privileges() {
    if kernel_has_nbd() {
        story(async |sandbox| {
            let supervisor = Supervisor::start(sandbox).await;
            assert_all_confined(supervisor.pid(), &OF_THE_SUPERVISOR);
        });
    }
}

#[test]
fn the_node_agent_writes_nothing_to_its_root() {
    story(async |sandbox| {
        let mut setup = NodeSetup::new(sandbox);
        setup.machine = Machine::ReadOnlyRoot;
        let node = Node::start_with(sandbox, setup).await;
        for kind in ["ext4", "xfs", "btrfs", "block"] {
            let volume = sandbox.volume(kind, kind);
            for _ in 0..2 {
                let _ = node.up(&volume, "pod").await;
                node.down(&volume, "pod").await;
            }
        }
        node.assert_clean().await;
    });
}

#[test]
fn the_node_agent_encrypts_without_writing_to_its_root() {
    ceph_story(async |sandbox, ceph| {
        let mut setup = encrypted::setup(sandbox, ceph);
        setup.machine = Machine::ReadOnlyRoot;
        let node = Node::start_with(sandbox, setup).await;
        let volume = encrypted::volume(ceph, "ext4");
        for _ in 0..2 {
            let _ = node.up(&volume, "pod").await;
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn children_of_the_agent_cannot_take_over_the_host() {
    story(async |sandbox| {
        let written = sandbox.dir().join("tries");
        let _stub = forbidden_calls_stub("mkfs.ext4", &written);
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", "ext4");
        let _ = node.up(&volume, "pod").await;
        assert_refused(&written, &OF_THE_NODE);
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn children_of_the_supervisor_cannot_take_over_the_host() {
    ceph_story(async |sandbox, ceph| {
        let written = sandbox.dir().join("tries");
        let _stub = forbidden_calls_stub("rbd-nbd", &written);
        let supervisor = Supervisor::start(sandbox).await;
        let node = node_with(sandbox, ceph, &supervisor).await;
        let volume = served(ceph.volume("ext4"));
        let _ = node.up(&volume, "pod").await;
        assert_refused(&written, &OF_THE_SUPERVISOR);
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

/// Runs in place of a program, then runs that program.
fn forbidden_calls_stub(program: &str, written: &Path) -> ProgramStub {
    let script = format!(
        "cat /proc/self/status > {written}.status\n\
         {TRIES}={written} {test} --exact privileges::forbidden_system_calls_of_a_child \
         >&2 < /dev/null || exit\n\
         exec {program} \"$@\"",
        written = written.display(),
        test = env::current_exe().expect("this program").display(),
    );
    ProgramStub::new(program, &script)
}

/// Its results.
fn assert_refused(written: &Path, kept: &[u32]) {
    assert_confined(&written.with_extension("status"), kept);
    let allowed = fs::read_to_string(written).expect("the results");
    assert_eq!(allowed, "", "these were not refused");
}

/// Each system call that must fail, with arguments that are harmless if it does not.
#[test]
fn forbidden_system_calls_of_a_child() {
    let Some(written) = env::var_os(TRIES) else {
        return;
    };
    let null = ptr::null::<u8>() as i64;
    // One invalid argument suffices: the kernel checks permissions first.
    let tries = [
        ("init_module", libc::SYS_init_module, [null, 0, null]),
        ("finit_module", libc::SYS_finit_module, [-1, null, 0]),
        ("delete_module", libc::SYS_delete_module, [null, 0, 0]),
        ("kexec_load", libc::SYS_kexec_load, [0, 1 << 20, null]),
        ("kexec_file_load", libc::SYS_kexec_file_load, [-1, -1, 0]),
        ("reboot", libc::SYS_reboot, [0, 0, 0]),
        ("swapon", libc::SYS_swapon, [null, 0, 0]),
        ("swapoff", libc::SYS_swapoff, [null, 0, 0]),
        ("ptrace", libc::SYS_ptrace, [-1, 0, null]),
        ("process_vm_readv", libc::SYS_process_vm_readv, [1, null, 0]),
        (
            "process_vm_writev",
            libc::SYS_process_vm_writev,
            [1, null, 0],
        ),
        ("process_madvise", libc::SYS_process_madvise, [-1, null, 0]),
        ("process_mrelease", libc::SYS_process_mrelease, [-1, -1, 0]),
        ("pidfd_getfd", libc::SYS_pidfd_getfd, [-1, 0, 0]),
        ("kcmp", libc::SYS_kcmp, [1, 1, -1]),
        (
            "open_by_handle_at",
            libc::SYS_open_by_handle_at,
            [-1, null, 0],
        ),
        ("bpf", libc::SYS_bpf, [-1, null, 0]),
        ("perf_event_open", libc::SYS_perf_event_open, [null, 0, -1]),
        ("setns", libc::SYS_setns, [-1, 0, 0]),
        ("pivot_root", libc::SYS_pivot_root, [null, null, 0]),
        ("chroot", libc::SYS_chroot, [null, 0, 0]),
        ("settimeofday", libc::SYS_settimeofday, [null, null, 0]),
        ("clock_settime", libc::SYS_clock_settime, [0, null, 0]),
        ("adjtimex", libc::SYS_adjtimex, [null, 0, 0]),
        ("clock_adjtime", libc::SYS_clock_adjtime, [0, null, 0]),
        ("sethostname", libc::SYS_sethostname, [null, -1, 0]),
        ("setdomainname", libc::SYS_setdomainname, [null, -1, 0]),
        ("syslog", libc::SYS_syslog, [3, null, 0]),
        ("fanotify_init", libc::SYS_fanotify_init, [-1, 0, 0]),
        ("acct", libc::SYS_acct, [1, 0, 0]),
        ("quotactl", libc::SYS_quotactl, [-1, null, 0]),
        ("quotactl_fd", libc::SYS_quotactl_fd, [-1, -1, 0]),
        ("userfaultfd", libc::SYS_userfaultfd, [-1, 0, 0]),
    ];
    let mut allowed = BTreeSet::new();
    for (name, number, [a, b, c]) in tries {
        // SAFETY: every pointer is null or no address; if a call is allowed after all, the
        // kernel refuses the arguments.
        let answer = unsafe { libc::syscall(number, a, b, c, 0, 0) };
        let error = std::io::Error::last_os_error();
        if answer != -1 || error.raw_os_error() != Some(libc::EPERM) {
            allowed.insert(format!("{name}: {answer}, {error}\n"));
        }
    }
    // The machine's memory and ports.
    for path in ["/dev/mem", "/dev/port"] {
        if fs::exists(path).unwrap_or(false) && fs::File::open(path).is_ok() {
            allowed.insert(format!("{path} was opened\n"));
        }
    }
    let written = PathBuf::from(written);
    fs::write(written, allowed.into_iter().collect::<String>()).expect("a file");
}
