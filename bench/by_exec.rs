//! The same steps by the programs that drivers built on Kubernetes' mount-utils run.

use std::{
    fs,
    path::{Path, PathBuf},
};

use testkit::{run, run_err};

/// A program that attaches, `blkid`, `mkfs.ext4` where blank, `fsck`, `mount`,
/// `mount --bind`, and back; of a raw block device only what it needs.
pub struct ByExec {
    pub name: String,
    /// Says the device as its last word.
    attach: Vec<String>,
    /// Takes the device as its last word.
    detach: [&'static str; 2],
    /// Where the file system is mounted; none for a raw block device.
    staging: Option<PathBuf>,
    target: PathBuf,
}

impl ByExec {
    /// Where `fs_type` is "block", a raw one.
    pub fn new(
        dir: &Path,
        name: &str,
        fs_type: &str,
        attach: &str,
        detach: [&'static str; 2],
    ) -> Self {
        let [staging, target] =
            ["staging", "target"].map(|kind| dir.join(format!("{name}-{kind}")));
        let staging = if fs_type == "block" {
            fs::write(&target, "").expect("a file");
            None
        } else {
            fs::create_dir_all(&staging).expect("a mount point");
            fs::create_dir_all(&target).expect("a mount point");
            Some(staging)
        };
        Self {
            name: name.to_owned(),
            attach: attach.split(' ').map(str::to_owned).collect(),
            detach,
            staging,
            target,
        }
    }

    pub fn attach(&self) -> String {
        let command: Vec<_> = self.attach.iter().map(String::as_str).collect();
        let said = run(&command);
        let device = said.split_whitespace().last().expect("a device");
        device.to_owned()
    }

    pub fn detach(&self, device: &str) {
        run(&[self.detach[0], self.detach[1], device]);
    }

    pub fn stage(&self) -> String {
        let device = self.attach();
        let Some(staging) = &self.staging else {
            return device;
        };
        let known = run_err(&[
            "blkid", "-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "export", &device,
        ]);
        if known.is_ok_and(|said| said.contains("TYPE=ext4")) {
            run(&["fsck", "-a", &device]);
        } else {
            run(&["mkfs.ext4", "-F", "-m0", &device]);
        }
        run(&["mount", "-t", "ext4", &device, text(staging)]);
        device
    }

    pub fn publish(&self, device: &str) {
        let what = self.staging.as_deref().map_or(device, text);
        run(&["mount", "--bind", what, text(&self.target)]);
    }

    pub fn unpublish(&self) {
        run(&["umount", text(&self.target)]);
    }

    pub fn unstage(&self, device: &str) {
        if let Some(staging) = &self.staging {
            run(&["umount", text(staging)]);
        }
        self.detach(device);
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}
