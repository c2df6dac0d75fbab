//! Mirroring an image to another cluster, whose daemons (`rbd-mirror`) copy it.
//!
//! ```text
//!  primary      in use; the other follows     ──demote──▶  secondary
//!  secondary    follows the other; read-only  ──promote─▶  primary
//! ```
//!
//! A fail-over demotes the one and promotes the other. If the primary's cluster is lost, the
//! other is promoted by force; when the lost one returns, both are primary: it is demoted,
//! and its data replaced by a resync, which deletes the image and copies it anew. Each call
//! may be repeated.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    super::{
        ProvisionError, Replicated, ReplicationChange, ReplicationInfo,
        replication::{ReplicationHealth, ReplicationParameters},
    },
    RbdStore,
    error::RbdError,
    found::{FoundImage, Recorded},
    metadata::CREATED,
    removal::refuse_if_used,
};
use crate::{
    ceph::{
        client::rbd::{
            Features, Image, MirrorMode, MirrorSite, MirrorSites, MirrorState, Mirroring, OpenMode,
            image_id, is_mirroring_on,
        },
        csi_format::journal::CreateState,
    },
    secret::Secrets,
};

impl RbdStore {
    /// Changes how the volume's image is mirrored.
    pub(super) fn replicate(
        &self,
        handle: &str,
        change: &ReplicationChange,
        secrets: &Secrets,
    ) -> Result<Replicated, ProvisionError> {
        let found = match self.volume(handle, secrets) {
            Err(error) if matches!(change, ReplicationChange::Resync { .. }) => {
                let missing = self.replacement_without_image(handle, secrets)?;
                return Err(missing.map_or(error, |found| syncing(&found, COPIED_ANEW).into()));
            }
            found => found?,
        };
        match change {
            ReplicationChange::Enable(parameters) => self.enable(&found, parameters)?,
            ReplicationChange::Disable { force } => disable(&found, *force)?,
            ReplicationChange::Promote { force, parameters } => {
                self.promote(&found, *force, parameters)?;
            }
            ReplicationChange::Demote => demote(&found)?,
            ReplicationChange::Resync { force } => return Ok(self.resync(&found, *force)?),
        }
        Ok(Replicated::Done)
    }

    fn enable(&self, found: &FoundImage, wanted: &ReplicationParameters) -> Result<(), RbdError> {
        let image = found.open(OpenMode::ReadOnly)?;
        let role = image.mirroring()?;
        if role == Mirroring::Ending {
            return Err(syncing(found, ENDS));
        }
        if role == Mirroring::None {
            if !is_mirroring_on(&found.pool)? {
                let why = format!(
                    "images of pool {pool} are not mirrored; enable that on both clusters (rbd mirror pool enable {pool} image)",
                    pool = found.pool
                );
                return Err(refused(found, why));
            }
            self.check_parent(found, &image, wanted)?;
            let mode = if wanted.by_journal {
                // librbd would add the journal to an image that krbd writes, which keeps none.
                if !image.features()?.contains(Features::JOURNALING) {
                    let why = "it has no journal: mirror it by snapshots, or create volumes with imageFeatures that include journaling, and mounter rbd-nbd";
                    return Err(refused(found, why.to_owned()));
                }
                MirrorMode::Journal
            } else {
                MirrorMode::Snapshot
            };
            drop(image);
            found.open(OpenMode::ReadWrite)?.mirror_enable(mode)?;
        }
        schedule(found, wanted)
    }

    /// A mirror needs the parent, too.
    fn check_parent(
        &self,
        found: &FoundImage,
        image: &Image,
        wanted: &ReplicationParameters,
    ) -> Result<(), RbdError> {
        let Some(parent) = image.parent()?.map(|parent| parent.image) else {
            return Ok(());
        };
        if !parent.in_trash {
            let pool = found
                .pool
                .cluster()
                .ioctx(parent.pool_id, &parent.namespace)?;
            let parent = Image::open_by_id(&pool, &parent.id, OpenMode::ReadOnly)?;
            if parent.mirroring()? != Mirroring::None {
                return Ok(());
            }
        }
        if wanted.flattens {
            return Err(self.flattener.flatten_image(&found.pool, &found.image));
        }
        let why = format!(
            "its parent {}/{} is not mirrored; mirror that, or have the image flattened (flattenMode: force)",
            parent.pool, parent.name
        );
        Err(refused(found, why))
    }

    fn promote(
        &self,
        found: &FoundImage,
        force: bool,
        wanted: &ReplicationParameters,
    ) -> Result<(), RbdError> {
        let image = found.open(OpenMode::ReadWrite)?;
        match image.mirroring()? {
            Mirroring::None => return Err(refused(found, NOT_MIRRORED.to_owned())),
            Mirroring::Ending => return Err(syncing(found, ENDS)),
            Mirroring::Primary => {}
            Mirroring::Secondary => match image.mirror_promote(force) {
                Err(error) if error.is_busy() && !force => {
                    let why = "the other cluster's image is primary as well as this cluster knows; demote that, or promote this one by force";
                    return Err(refused(found, why.to_owned()));
                }
                promoted => promoted?,
            },
        }
        // A primary image is not copied anew.
        self.keep_id(found, &image)?;
        schedule(found, wanted)
    }

    fn resync(&self, found: &FoundImage, force: bool) -> Result<Replicated, RbdError> {
        let image = match found.open(OpenMode::ReadOnly) {
            Err(RbdError::Lost { .. }) => return Err(syncing(found, COPIED_ANEW)),
            image => image?,
        };
        let role = image.mirroring()?;
        if role == Mirroring::None && is_replaced(found, &image)? {
            return Err(syncing(found, COPIED_ANEW));
        }
        expect(
            found,
            role,
            Mirroring::Secondary,
            "only a secondary image is made equal to its primary",
        )?;
        let sites = image.mirror_sites()?;
        let peers = !sites.peers.is_empty() && sites.peers.iter().all(MirrorSite::is_idle);
        if sites.own.is_idle() && peers {
            self.keep_id(found, &image)?;
            return Ok(Replicated::Done);
        }
        let created = image.metadata_list()?.remove(CREATED);
        let is_old = created.as_deref().and_then(parse_time) == Some(image.created()?);
        let is_to_replace = is_old && sites.own.state != MirrorState::Syncing;
        if force && (is_to_replace || sites.own.is_split() && !is_copied_anew(found, &image)?) {
            drop(image);
            // A delete that was killed before it removed the image must not take the image that
            // is missing meanwhile for its own work.
            if let Some(recorded) = found.recorded.as_ref().filter(|_| found.is_deleting()) {
                let uuid = recorded.reserved.uuid;
                self.volumes.mark_deleting(&found.pool, uuid, false)?;
            }
            found.open(OpenMode::ReadWrite)?.mirror_resync()?;
            return Err(syncing(
                found,
                "its data is to be replaced by the primary's",
            ));
        }
        // What a resync has copied anew follows the primary.
        if sites.own.is_replaying() && !is_old {
            self.keep_id(found, &image)?;
        }
        Ok(Replicated::NotYet)
    }

    /// Enters the id of an image that was copied anew.
    fn keep_id(&self, found: &FoundImage, image: &Image) -> Result<(), RbdError> {
        let Some(Recorded {
            reserved, entry, ..
        }) = &found.recorded
        else {
            return Ok(());
        };
        let id = image.id()?;
        if entry.image_id != id && entry.is_complete() {
            let uuid = reserved.uuid;
            self.volumes
                .complete(&found.pool, uuid, CreateState::None, &id)?;
        }
        Ok(())
    }

    /// How the other cluster follows the volume's image.
    pub(super) fn replication_info(
        &self,
        handle: &str,
        secrets: &Secrets,
    ) -> Result<ReplicationInfo, ProvisionError> {
        let found = self.volume(handle, secrets)?;
        let image = found.open(OpenMode::ReadOnly)?;
        expect(
            &found,
            image.mirroring().map_err(RbdError::from)?,
            Mirroring::Primary,
            "only of a primary image its mirrors are known",
        )?;
        let sites = image.mirror_sites().map_err(RbdError::from)?;
        info(&sites).ok_or_else(|| RbdError::NotSynced(found.path()).into())
    }

    /// The volume's handle in the other cluster. It is the same: that site finds the image by
    /// `cluster-mapping.json`, under the same uuid.
    pub(super) fn replication_destination(
        &self,
        handle: &str,
        secrets: &Secrets,
    ) -> Result<String, ProvisionError> {
        let found = self.volume(handle, secrets)?;
        match found.open(OpenMode::ReadOnly)?.mirroring() {
            Ok(Mirroring::Primary | Mirroring::Secondary) => Ok(handle.to_owned()),
            Ok(Mirroring::None) => Err(refused(&found, NOT_MIRRORED.to_owned()).into()),
            Ok(Mirroring::Ending) => Err(syncing(&found, ENDS).into()),
            Err(error) => Err(RbdError::from(error).into()),
        }
    }
}

fn disable(found: &FoundImage, force: bool) -> Result<(), RbdError> {
    let image = found.open(OpenMode::ReadOnly)?;
    match image.mirroring()? {
        Mirroring::None => return Ok(()),
        Mirroring::Ending => return Err(syncing(found, ENDS)),
        // It goes when the mirroring of its primary ends.
        Mirroring::Secondary if image.mirror_sites()?.own.is_replaying() => return Ok(()),
        Mirroring::Secondary if !force => {
            let why = "it is secondary, and no daemon follows its primary; to keep it as an image of its own: force \"true\"";
            return Err(refused(found, why.to_owned()));
        }
        Mirroring::Primary | Mirroring::Secondary => {}
    }
    drop(image);
    unschedule(found)?;
    found.open(OpenMode::ReadWrite)?.mirror_disable(force)?;
    match found.open(OpenMode::ReadOnly)?.mirroring()? {
        Mirroring::None => Ok(()),
        _ => Err(syncing(found, ENDS)),
    }
}

fn demote(found: &FoundImage) -> Result<(), RbdError> {
    let image = found.open(OpenMode::ReadWrite)?;
    match image.mirroring()? {
        Mirroring::None => return Err(refused(found, NOT_MIRRORED.to_owned())),
        Mirroring::Ending => return Err(syncing(found, ENDS)),
        Mirroring::Secondary => return Ok(()),
        Mirroring::Primary => {}
    }
    // librbd does not see that krbd writes.
    refuse_if_used(found, &image)?;
    let created = image.created()?;
    // A clone may have its parent's.
    let stored = image.metadata_list()?.remove(CREATED);
    if stored.as_deref().and_then(parse_time) != Some(created) {
        image.metadata_set(CREATED, &shown_time(created))?;
    }
    Ok(image.mirror_demote()?)
}

const NOT_MIRRORED: &str = "it is not mirrored";
const ENDS: &str = "its mirroring ends";
const COPIED_ANEW: &str = "it is deleted, and being copied anew";

/// Whether a daemon copies this image anew, which is not mirrored. The daemon removes the
/// old one, perhaps since it was opened, creates another, and enters last that this is a
/// mirror.
pub(super) fn is_replaced(found: &FoundImage, image: &Image) -> Result<bool, RbdError> {
    if is_copied_anew(found, image)? {
        return Ok(true);
    }
    Ok(image_id(&found.pool, &found.image)? != Some(image.id()?))
}

/// Whether the image is another than the journal has.
fn is_copied_anew(found: &FoundImage, image: &Image) -> Result<bool, RbdError> {
    let id = image.id()?;
    let recorded = found.recorded.as_ref();
    Ok(recorded.is_some_and(|recorded| recorded.entry.image_id != id))
}

fn expect(found: &FoundImage, now: Mirroring, role: Mirroring, why: &str) -> Result<(), RbdError> {
    if now == role {
        return Ok(());
    }
    let is = match now {
        Mirroring::None => NOT_MIRRORED,
        Mirroring::Primary => "it is primary",
        Mirroring::Secondary => "it is secondary",
        Mirroring::Ending => return Err(syncing(found, ENDS)),
    };
    Err(refused(found, format!("{is}: {why}")))
}

fn refused(found: &FoundImage, why: String) -> RbdError {
    let image = found.path();
    RbdError::NotReplicated { image, why }
}

fn syncing(found: &FoundImage, why: &'static str) -> RbdError {
    let image = found.path();
    RbdError::Resyncing { image, why }
}

/// Has Ceph's manager take mirror snapshots.
fn schedule(found: &FoundImage, wanted: &ReplicationParameters) -> Result<(), RbdError> {
    let Some((interval, start)) = &wanted.schedule else {
        return Ok(());
    };
    let mut command = json!({
        "prefix": "rbd mirror snapshot schedule add",
        "level_spec": found.path(),
        "interval": interval,
    });
    if let Some(start) = start {
        command["start_time"] = json!(start);
    }
    found.pool.cluster().mgr_command(&command)?;
    Ok(())
}

/// Removes the image's own schedules.
fn unschedule(found: &FoundImage) -> Result<(), RbdError> {
    let command = |verb: &str| {
        json!({
            "prefix": format!("rbd mirror snapshot schedule {verb}"),
            "level_spec": found.path(),
        })
    };
    let cluster = found.pool.cluster();
    match cluster.mgr_command(&command("list")) {
        // Ceph before 16 knows no schedules; then there are none.
        Err(error) if error.is_invalid() => return Ok(()),
        Err(error) => return Err(error.into()),
        Ok(listed) => {
            let listed: Value = serde_json::from_slice(&listed).unwrap_or_default();
            if listed.as_object().is_none_or(serde_json::Map::is_empty) {
                return Ok(());
            }
        }
    }
    cluster.mgr_command(&command("remove"))?;
    Ok(())
}

/// A time as Go's protobuf library prints it, which ceph-csi stores.
fn shown_time(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("seconds:{} nanos:{}", since.as_secs(), since.subsec_nanos())
}

/// The library leaves out what is 0, and puts one space or two between.
fn parse_time(text: &str) -> Option<SystemTime> {
    let (mut seconds, mut nanos) = (0, 0);
    for word in text.split_whitespace() {
        match word.split_once(':')? {
            ("seconds", value) => seconds = value.parse().ok()?,
            ("nanos", value) => nanos = value.parse().ok()?,
            _ => return None,
        }
    }
    UNIX_EPOCH.checked_add(Duration::new(seconds, u32::min(nanos, 999_999_999)))
}

/// What the daemon that replays an image reports, after a comma, by snapshots.
#[derive(Debug, Default, Deserialize)]
struct Reported {
    local_snapshot_timestamp: Option<u64>,
    last_snapshot_sync_seconds: Option<u64>,
    last_snapshot_bytes: Option<u64>,
}

/// `None`: no other cluster has reported yet.
fn info(sites: &MirrorSites) -> Option<ReplicationInfo> {
    let peer = sites.peers.first()?;
    let (message, reported) = match peer.description.split_once(',') {
        Some((message, json)) => (message, serde_json::from_str(json.trim()).ok()),
        None => (peer.description.as_str(), None),
    };
    let reported: Reported = reported.unwrap_or_default();
    let synced = Duration::from_secs(reported.local_snapshot_timestamp?);
    let health = match (sites.own.is_up && peer.is_up, peer.state) {
        (false, _) => ReplicationHealth::Degraded,
        (true, MirrorState::Error) => ReplicationHealth::Failed,
        (true, MirrorState::Replaying | MirrorState::Stopped) => ReplicationHealth::Healthy,
        (true, _) => ReplicationHealth::Unknown,
    };
    Some(ReplicationInfo {
        synced: Some(UNIX_EPOCH.checked_add(synced)?),
        took: reported.last_snapshot_sync_seconds.map(Duration::from_secs),
        bytes: reported.last_snapshot_bytes,
        health,
        message: message.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_ceph_csi() {
        let time = UNIX_EPOCH + Duration::new(1_700_000_000, 5);
        assert_eq!(shown_time(time), "seconds:1700000000 nanos:5");
        assert_eq!(parse_time(&shown_time(time)), Some(time));
        assert_eq!(parse_time("seconds:1700000000  nanos:5"), Some(time));
        let whole = UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        assert_eq!(parse_time("seconds:1700000000"), Some(whole));
        for bad in ["1700000000", "seconds:x", "minutes:1", "seconds:1 nanos:-1"] {
            assert_eq!(parse_time(bad), None, "{bad}");
        }
    }

    fn peer(description: &str, state: MirrorState) -> MirrorSite {
        MirrorSite {
            is_up: true,
            state,
            description: description.to_owned(),
        }
    }

    #[test]
    fn the_peer_s_report_is_read() {
        let own = peer("local image is primary", MirrorState::Stopped);
        let words = r#"replaying, {"bytes_per_second":0.0,"last_snapshot_bytes":81920,"last_snapshot_sync_seconds":3,"local_snapshot_timestamp":1700000000,"replay_state":"idle"}"#;
        let mut sites = MirrorSites {
            own,
            peers: vec![peer(words, MirrorState::Replaying)],
        };
        let known = info(&sites).unwrap();
        assert_eq!(
            known.synced,
            Some(UNIX_EPOCH + Duration::from_secs(1_700_000_000))
        );
        assert_eq!(known.took, Some(Duration::from_secs(3)));
        assert_eq!(known.bytes, Some(81920));
        assert_eq!(
            (known.health, known.message.as_str()),
            (ReplicationHealth::Healthy, "replaying")
        );
        sites.own.is_up = false;
        assert_eq!(info(&sites).unwrap().health, ReplicationHealth::Degraded);
        // The daemon that copies has ended: its last state stays.
        sites.own.is_up = true;
        sites.peers[0].is_up = false;
        assert_eq!(info(&sites).unwrap().health, ReplicationHealth::Degraded);
        for nothing in [
            "",
            "starting replay",
            "replaying, {",
            "replaying, {}",
            "replaying, []",
        ] {
            sites.peers[0].description = nothing.to_owned();
            assert_eq!(info(&sites), None, "{nothing}");
        }
        sites.peers.clear();
        assert_eq!(info(&sites), None);
    }
}
