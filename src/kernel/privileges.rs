//! Dropping the privileges that a process does not need.
//!
//! The node container has to be privileged, since mount propagation to the host
//! demands it. The agent itself needs a few capabilities, and its children
//! (mkfs, fsck) no others. So before any other thread exists it removes the rest from its
//! bounding and permitted sets, sets no_new_privs, and filters the system calls by which
//! an attacker could take over the rest of the host.
//!
//! Sources: capabilities(7), seccomp(2), Documentation/userspace-api/no_new_privs.

use std::{collections::BTreeMap, io};

#[cfg(feature = "holder")]
use rustix::ioctl::Opcode;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set,
    set_capabilities, set_no_new_privs,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

use super::capabilities::NODE_NEEDS;

/// The capabilities of the supervisor and of rbd-nbd's daemons.
#[cfg(feature = "holder")]
const SUPERVISOR_NEEDS: CapabilitySet = CapabilitySet::SYS_ADMIN // the NBD driver
    .union(CapabilitySet::IPC_LOCK) // keys stay in memory
    .union(CapabilitySet::SYS_RESOURCE) // PR_SET_IO_FLUSHER
    .union(CapabilitySet::NET_ADMIN)
    .union(CapabilitySet::DAC_OVERRIDE);

/// System calls that neither the agents nor mkfs, fsck and rbd-nbd ever make. The
/// reasons are in docs/security.md.
const REFUSED: &[i64] = &[
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_process_mrelease,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    // With CAP_DAC_READ_SEARCH it opens any file of a file system, in any mount namespace.
    libc::SYS_open_by_handle_at,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_adjtimex,
    libc::SYS_clock_adjtime,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_syslog,
    libc::SYS_fanotify_init,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_userfaultfd,
];

/// By `setns` the agent enters network namespaces that a cluster's configuration names, and
/// no other one: this call is refused unless its second argument is that type.
const ONLY_NETWORKS: i64 = libc::SYS_setns;

/// On x86-64, the bit in the number of a call with 32-bit pointers, where the kernel has
/// these (arch/x86/include/uapi/asm/unistd.h); elsewhere no call has such a number.
const X32: i64 = 0x4000_0000;

/// Drops the privileges that the node agent does not need. Must be called while the process
/// has one thread. Returns whether ext4 can be grown online (CAP_SYS_RESOURCE).
pub fn drop_for_node() -> io::Result<bool> {
    Ok(drop_all_but(NODE_NEEDS)?.contains(CapabilitySet::SYS_RESOURCE))
}

/// Drops the privileges that the supervisor and its daemons do not need, such as to load a
/// kernel module. Must be called while the process has one thread.
#[cfg(feature = "holder")]
pub fn drop_for_supervisor() -> io::Result<()> {
    drop_all_but(SUPERVISOR_NEEDS).map(drop)
}

fn drop_all_but(needed: CapabilitySet) -> io::Result<CapabilitySet> {
    let had = capabilities(None)?;
    for capability in had.permitted.difference(needed).iter() {
        remove_capability_from_bounding_set(capability)?;
    }
    let kept = had.permitted.intersection(needed);
    set_capabilities(
        None,
        CapabilitySets {
            effective: kept,
            permitted: kept,
            inheritable: CapabilitySet::empty(),
        },
    )?;
    set_no_new_privs(true)?;
    seccompiler::apply_filter(&filter().map_err(io::Error::other)?).map_err(io::Error::other)?;
    Ok(kept)
}

/// A filter by which that ioctl(2) does nothing, and succeeds.
#[cfg(feature = "holder")]
pub fn without_ioctl(request: Opcode) -> Result<BpfProgram, seccompiler::BackendError> {
    let is_it =
        SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, request.into())?;
    let rules = [(libc::SYS_ioctl, vec![SeccompRule::new(vec![is_it])?])];
    let (arch, done) = (std::env::consts::ARCH.try_into()?, SeccompAction::Errno(0));
    SeccompFilter::new(rules.into(), SeccompAction::Allow, done, arch)?.try_into()
}

fn filter() -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<_, _> = (REFUSED.iter())
        .flat_map(|call| [*call, *call | X32])
        .map(|call| (call, Vec::new()))
        .collect();
    let network = u64::from(libc::CLONE_NEWNET.unsigned_abs());
    for call in [ONLY_NETWORKS, ONLY_NETWORKS | X32] {
        let other = SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, network)?;
        rules.insert(call, vec![SeccompRule::new(vec![other])?]);
    }
    let arch: TargetArch = std::env::consts::ARCH.try_into()?;
    SeccompFilter::new(
        rules,
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM.unsigned_abs()),
        arch,
    )?
    .try_into()
}
