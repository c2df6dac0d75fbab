//! Checking file systems before they are mounted.
//!
//! Only ext4 has a check to run before a mount: `e2fsck -p` replays the journal and
//! makes the repairs that lose no data. XFS and btrfs replay their journals when
//! they are mounted; their repair tools can lose data, so running them is an
//! operator's decision.

use std::path::Path;

use super::{CommandLine, FsType};
use crate::Kind;

/// The result of a check that left the file system clean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FsckOutcome {
    /// The file system had no errors.
    Clean,
    /// The check repaired its errors.
    Repaired,
}

/// Why a file system must not be mounted after its check.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum FsckError {
    /// Errors that `e2fsck -p` does not repair by itself.
    ///
    /// Remedy: detach the volume (`uringctl down VOLUME`), back up its image, and run e2fsck on it
    /// by hand.
    #[error(
        "{fs} has errors that e2fsck -p cannot repair; run e2fsck on it by hand. Its output: \
         {output}"
    )]
    Uncorrected { fs: FsType, output: String },
    /// The check itself failed.
    ///
    /// Remedy: read the output, and the kernel log (`journalctl -k`); the device may fail.
    #[error("the check of {fs} failed ({how}); its output: {output}")]
    Failed {
        fs: FsType,
        /// The exit code, or that there was none.
        how: String,
        output: String,
    },
}

impl FsckError {
    /// What the caller may do about it.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Uncorrected { .. } => Kind::Precondition,
            Self::Failed { .. } => Kind::Transient,
        }
    }
}

/// The command line that checks and repairs; `None` where mounting does that.
pub fn command(fs: FsType, device: &Path) -> Option<CommandLine> {
    match fs {
        FsType::Ext4 => Some(CommandLine {
            program: "e2fsck",
            args: vec!["-p".to_owned(), device.display().to_string()],
        }),
        FsType::Xfs | FsType::Btrfs => None,
    }
}

/// Interprets the exit code by the table in e2fsck(8); `None` for a killed program.
pub fn interpret(
    fs: FsType,
    exit_code: Option<i32>,
    output: &str,
) -> Result<FsckOutcome, FsckError> {
    const CORRECTED: i32 = 1;
    /// Errors of a mounted file system were corrected; the caller has excluded a mount.
    const REBOOT: i32 = 2;
    const UNCORRECTED: i32 = 4;
    let output = || output.trim().to_owned();
    let failed = |how| FsckError::Failed {
        fs,
        how,
        output: output(),
    };
    match exit_code {
        Some(0) => Ok(FsckOutcome::Clean),
        Some(code) if code & !(CORRECTED | REBOOT) == 0 => Ok(FsckOutcome::Repaired),
        Some(code) if code & !(CORRECTED | REBOOT | UNCORRECTED) == 0 => {
            Err(FsckError::Uncorrected {
                fs,
                output: output(),
            })
        }
        Some(code) => Err(failed(format!("exit code {code}"))),
        None => Err(failed("killed by a signal".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn check(image: &Path) -> Result<FsckOutcome, FsckError> {
        let line = command(FsType::Ext4, image).unwrap();
        let done = Command::new(line.program)
            .args(&line.args)
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&done.stdout);
        interpret(FsType::Ext4, done.status.code(), &output)
    }

    fn debugfs(image: &Path, request: &str) {
        let done = Command::new("debugfs")
            .args(["-w", "-R", request])
            .arg(image)
            .output()
            .unwrap();
        assert!(done.status.success());
    }

    #[test]
    fn exit_codes_of_e2fsck_are_interpreted() {
        let image = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        assert!(matches!(
            check(image.path()),
            Err(FsckError::Failed { how, .. }) if how == "exit code 8"
        ));
        image.as_file().set_len(32 << 20).unwrap();
        let made = Command::new("mkfs.ext4")
            .arg("-q")
            .arg(image.path())
            .status()
            .unwrap();
        assert!(made.success());
        assert_eq!(check(image.path()).unwrap(), FsckOutcome::Clean);

        debugfs(image.path(), "ssv state 2");
        assert_eq!(check(image.path()).unwrap(), FsckOutcome::Repaired);
        assert_eq!(check(image.path()).unwrap(), FsckOutcome::Clean);

        // e2fsck -p does not repair a root directory that is a file.
        debugfs(image.path(), "sif <2> mode 0100644");
        debugfs(image.path(), "ssv state 2");
        assert!(matches!(
            check(image.path()),
            Err(FsckError::Uncorrected { output, .. }) if !output.is_empty()
        ));
    }

    #[test]
    fn a_killed_check_is_a_failure() {
        let error = interpret(FsType::Ext4, None, "").unwrap_err();
        assert!(error.to_string().contains("killed"));
        assert!(interpret(FsType::Ext4, Some(32), "").is_err());
    }

    #[test]
    fn xfs_and_btrfs_have_no_check_before_the_mount() {
        assert_eq!(command(FsType::Xfs, Path::new("/dev/loop0")), None);
        assert_eq!(command(FsType::Btrfs, Path::new("/dev/loop0")), None);
    }
}
