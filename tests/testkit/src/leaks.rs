//! Mounts, devices, files and descriptors that an agent has left behind.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use super::{
    disk::all_loops,
    nbd::nbds_over,
    rbd::{mappings_of, name_of, rbds_of},
};

/// Descriptors and threads that an idle agent may have gained since its start:
/// lanes that wait for work, connections that are just being closed, and those to
/// Ceph clusters, which are kept for minutes and have some fifteen of each.
const TOLERANCE: usize = 64;

/// The resources of an agent, as seen from outside.
#[derive(Default)]
pub struct LeakSnapshot {
    mounts: Vec<PathBuf>,
    loops: Vec<String>,
    /// Whose server's socket lies in the sandbox, or whose volume's handle names it.
    nbds: Vec<String>,
    /// Mapped images of the sandbox, and what shows encrypted ones.
    rbds: Vec<String>,
    /// Its own files: records, and claims beside the images.
    files: BTreeSet<PathBuf>,
    descriptors: Vec<String>,
    threads: usize,
}

impl LeakSnapshot {
    /// Those of the agent `pid`, which keeps its files in `own`, in the sandbox `root`.
    pub fn take(root: &Path, own: [&PathBuf; 2], pid: u32) -> Self {
        let mut files = files_below(&root.join("pools"));
        files.retain(|file| is_claim(file));
        files.extend(own.into_iter().flat_map(|dir| files_below(dir)));
        Self {
            mounts: mounts_below(root),
            loops: loops_below(root),
            nbds: nbds_over(&name_of(root)),
            rbds: (rbds_of(root).into_iter())
                .map(|device| device.display().to_string())
                .chain(mappings_of(root))
                .collect(),
            files,
            descriptors: descriptors(pid),
            threads: fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count),
        }
    }

    /// The resources that were not in `baseline`, in words.
    pub fn leaked_since(&self, baseline: &Self) -> Vec<String> {
        let mut left = Vec::new();
        for mounted in &self.mounts {
            if !baseline.mounts.contains(mounted) {
                left.push(format!("mount {}", mounted.display()));
            }
        }
        for device in &self.loops {
            if !baseline.loops.contains(device) {
                left.push(format!("loop device {device}"));
            }
        }
        for device in &self.nbds {
            if !baseline.nbds.contains(device) {
                left.push(format!("NBD device {device}"));
            }
        }
        for device in &self.rbds {
            if !baseline.rbds.contains(device) {
                left.push(format!("mapped image {device}"));
            }
        }
        for file in self.files.difference(&baseline.files) {
            left.push(format!("file {}", file.display()));
        }
        // Regardless of their number: a descriptor of a device or of an image pins it.
        for target in &self.descriptors {
            let device = target.starts_with("/dev/loop") && target != "/dev/loop-control"
                || ["/dev/nbd", "/dev/rbd", "/dev/dm-"]
                    .iter()
                    .any(|name| target.starts_with(name));
            if device || target.contains(".img") {
                left.push(format!("descriptor of {target}"));
            }
        }
        if self.descriptors.len() > baseline.descriptors.len() + TOLERANCE {
            left.push(format!("descriptors: {:?}", self.descriptors));
        }
        if self.threads > baseline.threads + TOLERANCE {
            left.push(format!(
                "{} threads, {} before",
                self.threads, baseline.threads
            ));
        }
        left
    }
}

/// The mount points strictly below `dir`, in this thread's namespace, oldest first.
pub fn mounts_below(dir: &Path) -> Vec<PathBuf> {
    fs::read_to_string("/proc/thread-self/mountinfo")
        .expect("procfs")
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(PathBuf::from)
        .filter(|point| point.starts_with(dir) && point != dir)
        .collect()
}

/// The loop devices whose backing file lies below `dir`.
pub fn loops_below(dir: &Path) -> Vec<String> {
    all_loops()
        .into_iter()
        .filter(|(_, backing)| backing.starts_with(dir))
        .map(|(device, _)| device.display().to_string())
        .collect()
}

/// Every file below `dir`.
pub fn files_below(dir: &Path) -> BTreeSet<PathBuf> {
    let mut files = BTreeSet::new();
    let mut left = vec![dir.to_owned()];
    while let Some(dir) = left.pop() {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                left.push(entry.path());
            } else {
                files.insert(entry.path());
            }
        }
    }
    files
}

/// The targets of a process's descriptors: paths, `socket:[…]`, `anon_inode:…`.
fn descriptors(pid: u32) -> Vec<String> {
    fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .map(|target| target.display().to_string())
        .collect()
}

/// Whether a file in a pool is a claim or a lock on an image.
fn is_claim(file: &Path) -> bool {
    file.to_string_lossy().contains("/.uring-csi/claims/")
}
