//! Handles of directories, as csi-driver-nfs writes them: all of its forms are read, and
//! the last is written.
//!
//! | form | of its release |
//! | --- | --- |
//! | `server/share/subdir` | 3.0 |
//! | `server#share#subdir` | 3.1 |
//! | `server#share#subdir#[uuid]` | 4.1 |
//! | `server#share#subdir#[uuid]#[onDelete]` | 4.3 |

use std::{fmt, str::FromStr};

use super::below;
use crate::{
    capability::MAX_ID,
    nfs::{self, Directory},
};

/// The directory of a share that has all records.
pub const RECORDS: &str = ".uring-csi";
/// What the name of a directory begins with that is being filled.
pub const MAKING: &str = ".making-";
/// What the name of a directory begins with that is being removed.
pub const DELETED: &str = ".deleted-";
/// What the path of a directory begins with that is archived. Handles may have it, as
/// csi-driver-nfs makes such volumes, too.
pub const ARCHIVED: &str = "archived-";

/// The longest handle of a new volume: its directory, `#` four times, its name of at most 128
/// bytes, as CSI has it, and what a delete does.
const _: () = assert!(nfs::LONGEST + 4 + 128 + "archive".len() <= MAX_ID);

/// A volume's handle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryHandle {
    pub directory: Directory,
    /// The requested name, of a volume whose class names the directory.
    pub uuid: String,
    /// What a delete does, as the class says it; empty: the default.
    pub on_delete: String,
}

/// A text that is no handle of a directory below a share.
#[derive(Debug, PartialEq, Eq)]
pub struct BadHandle;

impl DirectoryHandle {
    /// The handle of a new volume. `None` where it could not be read: for the share itself,
    /// in a
    /// directory of the driver, with a `#` in a part, or `..` in the name.
    pub fn new(directory: Directory, uuid: &str, on_delete: &str) -> Option<Self> {
        let parts = [directory.server(), directory.share(), directory.sub_dir()];
        let has_separator = parts
            .into_iter()
            .chain([uuid, on_delete])
            .any(|it| it.contains('#'));
        // csi-driver-nfs reads no such handle.
        let climbs = uuid.split(['/', '\\']).any(|part| part == "..");
        let sub_dir = directory.sub_dir();
        let is_volume = !sub_dir.is_empty() && !is_reserved(sub_dir);
        let is_whole = !has_separator && !climbs && is_volume;
        is_whole.then(|| Self {
            directory,
            uuid: uuid.to_owned(),
            on_delete: on_delete.to_owned(),
        })
    }
}

/// Whether the path is in a directory that the driver keeps for itself, or is that.
pub fn is_reserved(sub_dir: &str) -> bool {
    let (first, _) = below::split_first(sub_dir);
    first == RECORDS || first.starts_with(MAKING) || first.starts_with(DELETED)
}

/// Whether no new volume may have the path: it is reserved, or may be that of an archive, which
/// the volume would take over, keep from being made, or delete.
pub fn is_refused(sub_dir: &str) -> bool {
    is_reserved(sub_dir) || sub_dir.starts_with(ARCHIVED)
}

/// Whether the text has the form of a handle since release 3.1.
pub fn is_ours(handle: &str) -> bool {
    handle.contains('#') && handle.parse::<DirectoryHandle>().is_ok()
}

impl FromStr for DirectoryHandle {
    type Err = BadHandle;

    fn from_str(text: &str) -> Result<Self, BadHandle> {
        let parts: Vec<_> = text.split('#').collect();
        let (server, share, sub_dir, uuid, on_delete) = match parts[..] {
            [server, share, sub_dir] => (server, share, sub_dir, "", ""),
            [server, share, sub_dir, uuid] => (server, share, sub_dir, uuid, ""),
            [server, share, sub_dir, uuid, on_delete] => (server, share, sub_dir, uuid, on_delete),
            [old] => {
                let (server, rest) = old.split_once('/').ok_or(BadHandle)?;
                let (share, sub_dir) = rest.rsplit_once('/').ok_or(BadHandle)?;
                (server, share, sub_dir, "", "")
            }
            _ => return Err(BadHandle),
        };
        let directory = Directory::new(server, share, sub_dir).map_err(|_| BadHandle)?;
        Self::new(directory, uuid, on_delete).ok_or(BadHandle)
    }
}

impl fmt::Display for DirectoryHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (it, uuid, on_delete) = (&self.directory, &self.uuid, &self.on_delete);
        let (server, share, sub_dir) = (it.server(), it.share(), it.sub_dir());
        write!(f, "{server}#{share}#{sub_dir}#{uuid}#{on_delete}")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> DirectoryHandle {
        text.parse().unwrap_or_else(|_| panic!("{text}"))
    }

    #[test]
    fn every_form_of_csi_driver_nfs_is_read() {
        for (text, mounted, on_delete) in [
            ("10.0.0.10/export/a/pvc-1", "10.0.0.10:/export/a/pvc-1", ""),
            ("10.0.0.10//pvc-1", "10.0.0.10:/pvc-1", ""),
            ("srv#share#pvc-1", "srv:/share/pvc-1", ""),
            ("srv#share#pvc-1#", "srv:/share/pvc-1", ""),
            ("srv#share#pvc-1##", "srv:/share/pvc-1", ""),
            ("srv##pvc-1##", "srv:/pvc-1", ""),
            (
                "fd00::1#share#pvc-1##archive",
                "[fd00::1]:/share/pvc-1",
                "archive",
            ),
            ("srv#a/b#ns/name#pvc-1#Retain", "srv:/a/b/ns/name", "Retain"),
            ("srv#a#.x/.making-y##", "srv:/a/.x/.making-y", ""),
        ] {
            let handle = read(text);
            assert_eq!(handle.directory.to_string(), mounted);
            assert_eq!(handle.on_delete, on_delete);
        }
        let last = "srv#a/b#ns/name#pvc-1#Retain";
        assert_eq!(read(last).to_string(), last);
        assert_eq!(read("srv#share#pvc-1").to_string(), "srv#share#pvc-1##");
    }

    #[test]
    fn what_names_no_directory_below_a_share_is_no_handle() {
        for text in [
            "",
            "pvc-1",
            "srv/pvc-1",
            "srv#share",
            "srv#share#",
            "srv#share#/##",
            "#share#pvc-1",
            "srv#share#../x##",
            "srv#../share#x##",
            "srv#a#b#c#d#e",
            "srv#a#b#..#",
            "srv#share#.uring-csi##",
            "srv#share#/./.uring-csi/volumes##",
            "srv#share#.making-x",
            "srv#share#.deleted-x/y#pvc-1#",
            "srv/share/.uring-csi",
        ] {
            assert!(text.parse::<DirectoryHandle>().is_err(), "{text}");
        }
        assert!(!is_ours("a/b/c") && is_ours("a#b#c"));
    }

    proptest! {
        #[test]
        fn a_handle_reads_as_it_was_written(text in "[a-z]{1,3}[#/]([a-z./#]|\\.\\.){0,12}") {
            if let Ok(handle) = text.parse::<DirectoryHandle>() {
                let written = handle.to_string();
                prop_assert!(is_ours(&written));
                prop_assert_eq!(read(&written), handle);
            }
        }
    }
}
