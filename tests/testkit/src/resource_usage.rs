//! The resources that an agent uses.

use std::fs;

/// The resources that a process uses, by procfs.
#[derive(Clone, Copy, Debug)]
pub struct ResourceUsage {
    pub threads: usize,
    pub descriptors: usize,
    /// Memory of its own, in KiB (`RssAnon`, proc_pid_status(5)).
    pub memory_kib: usize,
}

impl ResourceUsage {
    pub fn of(pid: u32) -> Self {
        Self {
            threads: status_of(pid, "Threads:"),
            descriptors: fs::read_dir(format!("/proc/{pid}/fd"))
                .expect("procfs")
                .count(),
            memory_kib: status_of(pid, "RssAnon:"),
        }
    }

    /// Whether it is larger than `other` by no more than `room`.
    pub fn is_within(&self, other: &Self, room: &Self) -> bool {
        self.threads <= other.threads + room.threads
            && self.descriptors <= other.descriptors + room.descriptors
            && self.memory_kib <= other.memory_kib + room.memory_kib
    }
}

/// Resident memory in KiB, with the program's own pages (`VmRSS`).
pub fn resident_kib(pid: u32) -> usize {
    status_of(pid, "VmRSS:")
}

fn status_of(pid: u32, key: &str) -> usize {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("procfs");
    let value = status.lines().find_map(|line| line.strip_prefix(key));
    let digits = value.and_then(|value| value.split_ascii_whitespace().next());
    digits.and_then(|digits| digits.parse().ok()).expect(key)
}
