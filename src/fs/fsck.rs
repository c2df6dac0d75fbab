//! Checking file systems before they are mounted.
//!
//! Only ext4 has a check for this moment: `e2fsck -p` replays the journal and
//! mends what it can without losing anything. XFS and btrfs replay theirs when
//! they are mounted; what their repair tools do beyond that loses data and is
//! an operator's to decide.

use std::path::Path;

use super::{CommandLine, FsType};
use crate::Kind;

/// What a check found, all being well now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fixed {
    /// Nothing.
    Clean,
    /// Something that it mended.
    Repaired,
}

/// Why a file system may not be mounted after its check.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum FsckError {
    /// Errors that only an operator may mend.
    #[error(
        "{fs} has errors that cannot be mended without a decision; check it by hand. \
         The check said: {output}"
    )]
    Uncorrected {
        /// The file system.
        fs: FsType,
        /// What the program said.
        output: String,
    },
    /// The check itself did not work.
    #[error("{fs}'s check failed ({how}); it said: {output}")]
    Failed {
        /// The file system.
        fs: FsType,
        /// The exit code, or that there was none.
        how: String,
        /// What the program said.
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

/// The command line that checks and mends; none where mounting does it.
pub fn command(fs: FsType, device: &Path) -> Option<CommandLine> {
    match fs {
        FsType::Ext4 => Some(CommandLine {
            program: "e2fsck",
            args: vec!["-p".to_owned(), device.display().to_string()],
        }),
        FsType::Xfs | FsType::Btrfs => None,
    }
}

/// What the check's exit code means, by the table in e2fsck(8). A program that
/// was killed has none.
pub fn judge(fs: FsType, exit_code: Option<i32>, output: &str) -> Result<Fixed, FsckError> {
    const CORRECTED: i32 = 1;
    /// Corrected while it was mounted, of which the caller has made sure not.
    const REBOOT: i32 = 2;
    const UNCORRECTED: i32 = 4;
    let output = || output.trim().to_owned();
    let failed = |how| FsckError::Failed {
        fs,
        how,
        output: output(),
    };
    match exit_code {
        Some(0) => Ok(Fixed::Clean),
        Some(code) if code & !(CORRECTED | REBOOT) == 0 => Ok(Fixed::Repaired),
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
    #![allow(clippy::disallowed_methods)]

    use std::process::Command;

    use super::*;

    fn check(image: &Path) -> Result<Fixed, FsckError> {
        let line = command(FsType::Ext4, image).unwrap();
        let done = Command::new(line.program)
            .args(&line.args)
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&done.stdout);
        judge(FsType::Ext4, done.status.code(), &output)
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
    fn the_real_program_is_understood() {
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
        assert_eq!(check(image.path()).unwrap(), Fixed::Clean);

        debugfs(image.path(), "ssv state 2");
        assert_eq!(check(image.path()).unwrap(), Fixed::Repaired);
        assert_eq!(check(image.path()).unwrap(), Fixed::Clean);

        // A root directory that is a file takes a decision.
        debugfs(image.path(), "sif <2> mode 0100644");
        debugfs(image.path(), "ssv state 2");
        assert!(matches!(
            check(image.path()),
            Err(FsckError::Uncorrected { output, .. }) if !output.is_empty()
        ));
    }

    #[test]
    fn a_killed_check_proves_nothing() {
        let error = judge(FsType::Ext4, None, "").unwrap_err();
        assert!(error.to_string().contains("killed"));
        assert!(judge(FsType::Ext4, Some(32), "").is_err());
    }

    #[test]
    fn xfs_and_btrfs_are_left_to_their_mount() {
        assert_eq!(command(FsType::Xfs, Path::new("/dev/loop0")), None);
        assert_eq!(command(FsType::Btrfs, Path::new("/dev/loop0")), None);
    }
}
