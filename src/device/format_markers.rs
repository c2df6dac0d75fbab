//! Which sources have a file system under way.
//!
//! An image of a pool has its note beside it ([`format_marker`]), a Ceph image in its
//! metadata ([`ImageFormatMarker`]), for whichever node has it next. An export, and a Ceph
//! image where librados is missing, is out of reach: the note is this node's, and holds
//! only while the volume is this node's. It is on a tmpfs, and goes when the volume is
//! unstaged. What an interrupted mkfs left is blanked out then, as long as the note is
//! *fresh*: so recent that no other node can have the volume yet. Later, or after a
//! reboot, that may be another node's by now, and is formatted again by an operator's
//! request only.

use std::{fmt::Display, fs, io, path::PathBuf, sync::Arc, time::Duration};

use super::{
    ceph::{Format, ImageFormatMarker},
    error::DeviceError,
};
use crate::{
    crash_point, digest,
    pool::{Pool, format_marker},
};

/// Where it is noted that something is being made on one source.
#[derive(Debug)]
pub enum FormatMarker {
    /// Beside an image of a pool.
    Pool(Pool, String),
    /// In the metadata of a Ceph image.
    Image(Arc<ImageFormatMarker>, Format),
    /// On this node, under what it is made on.
    Node(NodeFormatMarkers, String),
}

impl FormatMarker {
    /// Records durably that a format of this volume is about to begin.
    pub fn set(&self, volume_id: &str) -> Result<(), DeviceError> {
        match self {
            Self::Pool(pool, image) => Ok(format_marker::set(pool, image, volume_id)?),
            Self::Image(marker, what) => Ok(marker.set(*what, volume_id)?),
            Self::Node(markers, source) => Ok(markers.set(source, volume_id)?),
        }
    }

    /// Whether it has begun for this volume and not ended.
    pub fn format_in_progress(&self, volume_id: &str) -> Result<bool, DeviceError> {
        match self {
            Self::Pool(pool, image) => {
                Ok(format_marker::format_in_progress(pool, image, volume_id)?)
            }
            Self::Image(marker, what) => Ok(marker.format_in_progress(*what, volume_id)?),
            Self::Node(markers, source) => Ok(markers.format_in_progress(source, volume_id)?),
        }
    }

    /// From now on the source may hold data.
    pub fn clear(&self) -> Result<(), DeviceError> {
        match self {
            Self::Pool(pool, image) => Ok(format_marker::clear(pool, image)?),
            Self::Image(marker, _) => Ok(marker.clear()?),
            Self::Node(markers, source) => Ok(markers.clear(source)?),
        }
    }
}

/// Before a mkfs a node makes sure that it has the source alone. Another one finds
/// it free when Ceph has not heard of the first for 30 seconds
/// (`osd_client_watch_timeout`); Kubernetes waits for minutes.
const ALONE_FOR: Duration = Duration::from_secs(20);

/// How long the machine is up (proc(5)), in whole seconds.
fn uptime() -> Result<Duration, FormatMarkerError> {
    let text = fs::read_to_string("/proc/uptime").map_err(failed("read /proc/uptime"))?;
    let whole = text.split('.').next().and_then(|text| text.parse().ok());
    let odd = || failed("read /proc/uptime")(io::ErrorKind::InvalidData.into());
    whole.map(Duration::from_secs).ok_or_else(odd)
}

fn is_recent(since: Duration, now: Duration) -> bool {
    now.saturating_sub(since) < ALONE_FOR
}

/// A note that could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what}")]
pub struct FormatMarkerError {
    what: &'static str,
    source: io::Error,
}

fn failed(what: &'static str) -> impl FnOnce(io::Error) -> FormatMarkerError {
    move |source| FormatMarkerError { what, source }
}

/// The notes of this node.
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

    fn path(&self, source: &dyn Display) -> PathBuf {
        self.dir.join(digest::sha256_hex(&source.to_string()))
    }

    /// A mkfs of the source is about to begin, for this volume.
    pub fn set(&self, source: &dyn Display, volume_id: &str) -> Result<(), FormatMarkerError> {
        let text = format!("{} {volume_id}", uptime()?.as_secs());
        let path = self.path(source);
        let draft = path.with_extension("tmp");
        // In one step: half a note would be none, and what mkfs leaves somebody's data.
        fs::write(&draft, text)
            .and_then(|()| fs::rename(&draft, &path))
            .map_err(failed("set the format marker"))?;
        crash_point();
        Ok(())
    }

    /// Whether a mkfs of the source, for this volume, has begun and not ended.
    pub fn format_in_progress(
        &self,
        source: &dyn Display,
        volume_id: &str,
    ) -> Result<bool, FormatMarkerError> {
        Ok(self.since(source, volume_id)?.is_some())
    }

    /// Whether that was so recently that no other node can have the source.
    pub fn is_fresh(
        &self,
        source: &dyn Display,
        volume_id: &str,
    ) -> Result<bool, FormatMarkerError> {
        let Some(since) = self.since(source, volume_id)? else {
            return Ok(false);
        };
        Ok(is_recent(since, uptime()?))
    }

    /// When it began, by the machine's uptime.
    fn since(
        &self,
        source: &dyn Display,
        volume_id: &str,
    ) -> Result<Option<Duration>, FormatMarkerError> {
        let text = match fs::read_to_string(self.path(source)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text.map_err(failed("read the format marker"))?,
        };
        let noted = text
            .split_once(' ')
            .filter(|(_, noted)| *noted == volume_id);
        Ok(noted.and_then(|(since, _)| since.parse().ok().map(Duration::from_secs)))
    }

    /// The source holds, or may hold from now on, somebody's data.
    pub fn clear(&self, source: &dyn Display) -> Result<(), FormatMarkerError> {
        let removed = fs::remove_file(self.path(source));
        crash_point();
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(failed("clear the format marker")(error))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_for_one_volume_and_goes_once() {
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
    fn a_note_is_there_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let markers = NodeFormatMarkers::open(dir.path().to_owned()).unwrap();
        let source = "nbd://host/x";
        markers.set(&source, "v").unwrap();
        // Whoever has it open meanwhile goes on reading the one that was there.
        let before = dir.path().join("before");
        fs::hard_link(markers.path(&source), &before).unwrap();
        markers.set(&source, "w").unwrap();
        assert!(fs::read_to_string(before).unwrap().ends_with(" v"));
        assert!(markers.format_in_progress(&source, "w").unwrap());
        markers.clear(&source).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_note_is_fresh_for_a_while() {
        let begun = Duration::from_secs(7);
        assert!(is_recent(begun, begun));
        assert!(is_recent(begun, begun + ALONE_FOR / 2));
        assert!(!is_recent(begun, begun + ALONE_FOR));
    }
}
