//! Scripts in place of programs that an agent runs: ones that stop half-way, or that find
//! a device busy.

use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf};

use super::{Node, eventually, run, run_err};

/// Where agents look for programs first.
const STUB_DIR: &str = "/usr/local/sbin";

/// mkfs.ext4 before its last write, of the superblock.
pub const MKFS: (&str, &str) = (
    "mkfs.ext4",
    "dd if=/dev/zero of=\"$device\" bs=1024 seek=1 count=1 conv=notrunc,fsync status=none",
);

/// luksFormat adds a key to the header that it has written.
pub const LUKS_FORMAT: (&str, &str) = (
    "cryptsetup",
    "[ \"$1\" = luksFormat ] || exit 0\ncryptsetup -q luksErase \"$device\"",
);

/// A script in place of a program, removed on drop.
pub struct ProgramStub {
    /// A file that the script makes at its hold point.
    pub reached: PathBuf,
}

impl ProgramStub {
    /// In a story's own mount namespace. `script` has the program's arguments, the
    /// last of them as `$device`, and `$reached`.
    pub fn new(program: &str, script: &str) -> Self {
        run(&["mount", "-t", "tmpfs", "none", STUB_DIR]);
        let reached = PathBuf::from(STUB_DIR).join("reached");
        let script = format!(
            "#!/bin/sh -e\nPATH=/usr/sbin:/usr/bin:/sbin:/bin\nfor device; do :; done\n\
             reached={}\n{script}\n",
            reached.display()
        );
        let path = PathBuf::from(STUB_DIR).join(program);
        fs::write(&path, script).expect("a program");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a mode");
        Self { reached }
    }

    /// The program as it is, but the first time while another program has the device
    /// open exclusively.
    pub fn busy_once(program: &str) -> Self {
        const HOLD: &str = "import os, subprocess, sys\n\
             held = os.open(sys.argv[1], os.O_RDONLY | os.O_EXCL)\n\
             sys.exit(subprocess.call(sys.argv[2:]))";
        let script = format!(
            "[ -e \"$reached\" ] && exec {program} \"$@\"\n: > \"$reached\"\n\
             exec python3 -c '{HOLD}' \"$device\" {program} \"$@\""
        );
        Self::new(program, &script)
    }
}

impl Drop for ProgramStub {
    fn drop(&mut self) {
        let _ = run_err(&["umount", "-l", STUB_DIR]);
    }
}

/// A program that does not end, and lacks its last write: the script runs it, and then
/// `undo`.
pub struct InterruptedProgram(ProgramStub);

impl InterruptedProgram {
    /// In a story's own mount namespace.
    pub fn new((program, undo): (&str, &str)) -> Self {
        let script = format!("{program} \"$@\"\n{undo}\n: > \"$reached\"\nexec sleep 600");
        Self(ProgramStub::new(program, &script))
    }

    /// Makes a call and kills the node's agent when the program stops.
    pub async fn kill_agent_at_stop<T>(&self, node: &Node, call: impl AsyncFnOnce() -> T) {
        tokio::join!(call(), async {
            let reached = async || self.0.reached.exists().then_some(());
            eventually("the program stops half-way", reached).await;
            node.kill9().await;
        });
    }
}
