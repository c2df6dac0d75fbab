//! The same steps by the programs that drivers built on Kubernetes' mount-utils run.

use std::path::{Path, PathBuf};

use crate::harness::run;

/// `losetup`, `blkid`, `mkfs.ext4` where blank, `fsck`, `mount`, `mount --bind`,
/// and back.
pub struct ByExec {
    pub image: PathBuf,
    pub staging: PathBuf,
    pub target: PathBuf,
}

impl ByExec {
    pub fn new(dir: &Path, name: &str, bytes: u64) -> Self {
        let [staging, target] = ["staging", "target"].map(|kind| {
            let at = dir.join(format!("{name}-{kind}"));
            std::fs::create_dir_all(&at).expect("a mount point");
            at
        });
        let image = dir.join(format!("{name}.img"));
        let exec = Self {
            image,
            staging,
            target,
        };
        exec.blank(bytes);
        exec
    }

    /// Forgets the image's content.
    pub fn blank(&self, bytes: u64) {
        std::fs::File::create(&self.image)
            .and_then(|image| image.set_len(bytes))
            .expect("an image");
    }

    pub fn stage(&self) -> String {
        let device = run(&["losetup", "-f", "--show", text(&self.image)]);
        let device = device.trim();
        let known = crate::harness::run_err(&[
            "blkid", "-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "export", device,
        ]);
        if known.is_ok_and(|said| said.contains("TYPE=ext4")) {
            run(&["fsck", "-a", device]);
        } else {
            run(&["mkfs.ext4", "-F", "-m0", device]);
        }
        run(&["mount", "-t", "ext4", device, text(&self.staging)]);
        device.to_owned()
    }

    pub fn publish(&self) {
        run(&["mount", "--bind", text(&self.staging), text(&self.target)]);
    }

    pub fn unpublish(&self) {
        run(&["umount", text(&self.target)]);
    }

    pub fn unstage(&self, device: &str) {
        run(&["umount", text(&self.staging)]);
        run(&["losetup", "-d", device]);
    }

    pub fn whole_life(&self) {
        let device = self.stage();
        self.publish();
        self.unpublish();
        self.unstage(&device);
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}
