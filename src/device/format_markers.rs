//! Format markers on this node.
//!
//! An image of a pool has its marker beside it (`pool::format_marker`), a Ceph image in its
//! metadata (`device::ceph::format_marker`), for the next node that attaches it. An export, and a
//! Ceph image where librados is missing, cannot have one: this node keeps its marker, which
//! is valid only while the volume is on this node. It is on a tmpfs, and an unstage removes
//! it. The unstage also blanks the partial format of an interrupted mkfs, as long as the
//! marker is *fresh*: so recent that no other node can have the volume yet. Later, or after
//! a reboot, another node may have the volume; then only an operator's request formats it
//! again.

use std::{fmt::Display, fs, io, path::PathBuf, time::Duration};

use super::{
    backend::FormatMarker,
    error::{DeviceError, io},
};
use crate::{crash_point, digest};

/// Before a mkfs a node checks that no other client has the source open. Another node finds
/// the source free when Ceph has not heard from the first for 30 seconds
/// (`osd_client_watch_timeout`); Kubernetes waits for minutes.
const ALONE_FOR: Duration = Duration::from_secs(20);

/// The machine's uptime (proc(5)), in whole seconds.
fn uptime() -> Result<Duration, DeviceError> {
    let text = fs::read_to_string("/proc/uptime").map_err(io("read /proc/uptime"))?;
    let whole = text.split('.').next().and_then(|text| text.parse().ok());
    let odd = || io("read /proc/uptime")(io::ErrorKind::InvalidData.into());
    whole.map(Duration::from_secs).ok_or_else(odd)
}

fn is_recent(since: Duration, now: Duration) -> bool {
    now.saturating_sub(since) < ALONE_FOR
}

#[derive(Clone, Debug)]
pub struct NodeFormatMarkers {
    dir: PathBuf,
}

impl NodeFormatMarkers {
    /// In a directory on a tmpfs, made if missing.
    pub fn open(dir: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&dir)?;
        Ok(Self { dir })
    }

    /// The marker of one source.
    pub fn of(&self, source: String) -> NodeFormatMarker {
        NodeFormatMarker(self.clone(), source)
    }

    fn path(&self, source: &dyn Display) -> PathBuf {
        self.dir.join(digest::sha256_hex(&source.to_string()))
    }

    /// Sets the marker of a source before its mkfs, for this volume.
    pub fn set(&self, source: &dyn Display, volume_id: &str) -> Result<(), DeviceError> {
        let text = format!("{} {volume_id}", uptime()?.as_secs());
        let path = self.path(source);
        let draft = path.with_extension("tmp");
        // In one step: without a whole marker, a partial format counts as data.
        fs::write(&draft, text)
            .and_then(|()| fs::rename(&draft, &path))
            .map_err(io("set the format marker"))?;
        crash_point();
        Ok(())
    }

    /// Whether a mkfs of the source, for this volume, began and did not end.
    pub fn format_in_progress(
        &self,
        source: &dyn Display,
        volume_id: &str,
    ) -> Result<bool, DeviceError> {
        Ok(self.since(source, volume_id)?.is_some())
    }

    /// Whether it began so recently that no other node can have the source.
    pub fn is_fresh(&self, source: &dyn Display, volume_id: &str) -> Result<bool, DeviceError> {
        let Some(since) = self.since(source, volume_id)? else {
            return Ok(false);
        };
        Ok(is_recent(since, uptime()?))
    }

    /// The machine's uptime when it began.
    fn since(
        &self,
        source: &dyn Display,
        volume_id: &str,
    ) -> Result<Option<Duration>, DeviceError> {
        let text = match fs::read_to_string(self.path(source)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text.map_err(io("read the format marker"))?,
        };
        let owner = text
            .split_once(' ')
            .filter(|(_, owner)| *owner == volume_id);
        Ok(owner.and_then(|(since, _)| since.parse().ok().map(Duration::from_secs)))
    }

    /// Removes the marker: the source has data, or may have from now on.
    pub fn clear(&self, source: &dyn Display) -> Result<(), DeviceError> {
        let removed = fs::remove_file(self.path(source));
        crash_point();
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(io("clear the format marker")(error))
            }
            _ => Ok(()),
        }
    }
}

/// The marker of one source on this node.
#[derive(Debug)]
pub struct NodeFormatMarker(NodeFormatMarkers, String);

impl FormatMarker for NodeFormatMarker {
    fn set(&self, volume_id: &str) -> Result<(), DeviceError> {
        self.0.set(&self.1, volume_id)
    }

    fn format_in_progress(&self, volume_id: &str) -> Result<bool, DeviceError> {
        self.0.format_in_progress(&self.1, volume_id)
    }

    fn clear(&self) -> Result<(), DeviceError> {
        self.0.clear(&self.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_format_marker_is_for_one_volume_and_cleared_once() {
        let dir = tempfile::tempdir().unwrap();
        let markers = NodeFormatMarkers::open(dir.path().join("mkfs")).unwrap();
        let source = "nbd://host/x";
        assert!(!markers.format_in_progress(&source, "v").unwrap());
        markers.set(&source, "v").unwrap();
        assert!(markers.format_in_progress(&source, "v").unwrap());
        assert!(!markers.format_in_progress(&source, "w").unwrap());
        assert!(markers.is_fresh(&source, "v").unwrap());
        assert!(!markers.is_fresh(&source, "w").unwrap());
        markers.clear(&source).unwrap();
        markers.clear(&source).unwrap();
        assert!(!markers.format_in_progress(&source, "v").unwrap());
    }

    #[test]
    fn a_format_marker_is_replaced_atomically() {
        let dir = tempfile::tempdir().unwrap();
        let markers = NodeFormatMarkers::open(dir.path().to_owned()).unwrap();
        let source = "nbd://host/x";
        markers.set(&source, "v").unwrap();
        // A reader that has the old file open still reads the old marker.
        let before = dir.path().join("before");
        fs::hard_link(markers.path(&source), &before).unwrap();
        markers.set(&source, "w").unwrap();
        assert!(fs::read_to_string(before).unwrap().ends_with(" v"));
        assert!(markers.format_in_progress(&source, "w").unwrap());
        markers.clear(&source).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_format_marker_is_recent_for_a_while() {
        let begun = Duration::from_secs(7);
        assert!(is_recent(begun, begun));
        assert!(is_recent(begun, begun + ALONE_FOR / 2));
        assert!(!is_recent(begun, begun + ALONE_FOR));
    }
}
