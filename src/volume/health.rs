//! The conditions of a volume on this node, found without touching its device: a volume
//! without any is healthy. And the conditions of the agent itself.

use std::{
    os::fd::AsFd as _,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    Node, VolumeError,
    error::Cause,
    places::Places,
    record::{Phase, Record},
    spec::Use,
};
use crate::{
    device::{self, Device},
    fs::FsType,
    kernel::sysfs,
    mount::{PathKind, path::SafePath, table},
};

/// A step that takes longer than this is a condition of the volume.
const STUCK_AFTER: Duration = Duration::from_secs(30);

/// The remedy for a file system that has shut down.
pub(super) const RESTAGE: &str = "the kernel log says why; once no pod of this node uses the volume it is \
                           unstaged, and the next one finds it mounted anew";

/// How bad it is (CSI `VolumeHealthErrorType`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// Usable, but not as it should be.
    Degraded,
    /// Not usable now.
    Inaccessible,
    /// Data is lost, or may be.
    DataLoss,
}

/// What is wrong with a volume, in one word for programs and metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConditionReason {
    /// A call is in one step for long.
    StepStuck,
    /// The file system does not answer.
    FileSystemStuck,
    /// The device is detached.
    DeviceGone,
    /// The image behind the device was deleted.
    ImageDeleted,
    /// The image behind the device was renamed.
    ImageRenamed,
    /// The server of the device would not be restarted.
    ServerUnkept,
    /// The server of the device does not answer.
    ServerAway,
    /// The file system has shut down.
    FileSystemShutDown,
    /// The file system became read-only.
    ReadOnly,
    /// The file system is not mounted any more.
    NotMounted,
    /// The file system counted errors.
    FileSystemErrors,
}

impl ConditionReason {
    /// All.
    pub const ALL: [Self; 11] = [
        Self::StepStuck,
        Self::FileSystemStuck,
        Self::DeviceGone,
        Self::ImageDeleted,
        Self::ImageRenamed,
        Self::ServerUnkept,
        Self::ServerAway,
        Self::FileSystemShutDown,
        Self::ReadOnly,
        Self::NotMounted,
        Self::FileSystemErrors,
    ];

    /// The word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::StepStuck => "StepStuck",
            Self::FileSystemStuck => "FileSystemStuck",
            Self::DeviceGone => "DeviceGone",
            Self::ImageDeleted => "ImageDeleted",
            Self::ImageRenamed => "ImageRenamed",
            Self::ServerUnkept => "ServerUnkept",
            Self::ServerAway => "ServerAway",
            Self::FileSystemShutDown => "FileSystemShutDown",
            Self::ReadOnly => "ReadOnly",
            Self::NotMounted => "NotMounted",
            Self::FileSystemErrors => "FileSystemErrors",
        }
    }
}

/// What is wrong with a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthCondition {
    /// How bad it is.
    pub severity: Severity,
    /// One of a few, for programs.
    pub reason: ConditionReason,
    /// A sentence for the operator.
    pub message: String,
}

fn condition(severity: Severity, reason: ConditionReason, message: String) -> HealthCondition {
    HealthCondition {
        severity,
        reason,
        message,
    }
}

impl Node {
    /// `NodeGetVolumeHealth`.
    pub async fn health(
        self: Arc<Self>,
        volume_id: String,
        deadline: Duration,
    ) -> Result<Vec<HealthCondition>, VolumeError> {
        let begun = Instant::now();
        self.recovered(&volume_id, deadline).await?;
        let left = deadline.saturating_sub(begun.elapsed());
        self.inline_recovered(&volume_id, left).await?;
        let volume = self.known(&volume_id).ok_or_else(|| {
            Cause::NotFound("this node does not hold it".to_owned()).of(&volume_id)
        })?;
        let mut found = Vec::new();
        if let Some(under_way) = volume.under_way(&self.lanes)
            && under_way.age > STUCK_AFTER
        {
            found.push(condition(
                Severity::Degraded,
                ConditionReason::StepStuck,
                format!(
                    "{} has been in step {} for {} s",
                    under_way.call,
                    under_way.step,
                    under_way.age.as_secs()
                ),
            ));
        }
        if let Some(record) = volume
            .record()
            .filter(|record| record.phase == Phase::Staged)
        {
            if let Some(device) = &record.device {
                self.check_device(&record, device, &mut found);
            }
            if let Use::Mount { .. } = record.usage {
                let health = self
                    .file_system_health(&volume.asked, &record, deadline)
                    .await;
                found.extend(health.unwrap_or_else(|| {
                    vec![condition(
                        Severity::Inaccessible,
                        ConditionReason::FileSystemStuck,
                        format!(
                            "the file system at {} has waited {} s for {}",
                            record.mount_point().display(),
                            volume.asked.waits_for().as_secs(),
                            record.waits_for()
                        ),
                    )]
                }));
            }
        }
        Ok(found)
    }

    /// A part of this agent that has ended, and that only a restart brings back.
    pub fn has_ended(&self) -> Option<&'static str> {
        let ended = !self.uevents.is_alive();
        ended.then_some("the listener to events of block devices has ended: restart the agent")
    }

    fn check_device(&self, record: &Record, device: &Device, found: &mut Vec<HealthCondition>) {
        let node = device.node.display();
        found.extend(self.backends.condition(&record.source, device).map(|found| match found {
            device::Condition::Detached => condition(
                Severity::Inaccessible,
                ConditionReason::DeviceGone,
                format!("{node} is detached"),
            ),
            device::Condition::Deleted => condition(
                Severity::DataLoss,
                ConditionReason::ImageDeleted,
                format!(
                    "the image behind {node} was deleted; its data is lost when the volume is unstaged"
                ),
            ),
            device::Condition::Renamed(path) => condition(
                Severity::Degraded,
                ConditionReason::ImageRenamed,
                format!(
                    "the image behind {node} is {} now; rename it back: once unstaged, the volume is not found under that name",
                    path.display()
                ),
            ),
            device::Condition::Unsupervised(why) => condition(
                Severity::Degraded,
                ConditionReason::ServerUnkept,
                format!("if the server of {node} ends, nothing restarts it: {why}"),
            ),
            device::Condition::Unreachable {
                failing: false,
                why,
            } => condition(
                Severity::Degraded,
                ConditionReason::ServerAway,
                format!("requests to {node} wait for its server, which is away {why}"),
            ),
            device::Condition::Unreachable { failing: true, why } => condition(
                Severity::Inaccessible,
                ConditionReason::ServerAway,
                format!("requests to {node} fail, since its server is away {why}"),
            ),
        }));
    }
}

/// The conditions of the file system at the staging path. On the volume's lane.
pub(super) fn of_file_system(places: &Places, record: &Record) -> Vec<HealthCondition> {
    let mut found = Vec::new();
    let mount_point = record.mount_point();
    let path = mount_point.display();
    let looked = (places.staging(&mount_point).ok()).and_then(|place| {
        let look = place.kind().ok()?;
        Some((place, look))
    });
    match looked {
        Some((place, PathKind::Mount(mounted))) if record.appears_at(&mounted) => {
            if mounted.shut_down {
                found.push(condition(
                    Severity::Inaccessible,
                    ConditionReason::FileSystemShutDown,
                    format!("the file system at {path} has shut down: {RESTAGE}"),
                ));
            } else if !record.read_only
                && (place.is_read_only(&mounted).unwrap_or(false)
                    || (record.device.as_ref())
                        .is_some_and(|device| refuses_writes(record, device, &place)))
            {
                found.push(condition(
                    Severity::Degraded,
                    ConditionReason::ReadOnly,
                    format!("the file system at {path} became read-only; the kernel log says why"),
                ));
            }
        }
        _ => found.push(condition(
            Severity::Inaccessible,
            ConditionReason::NotMounted,
            format!(
                "volume {} is not mounted at {path} any more",
                record.volume_id
            ),
        )),
    }
    if record.fs == Some(FsType::Ext4)
        && let Some(device) = &record.device
        && let Ok(errors) = sysfs::ext4_errors(device.dev)
        && errors > 0
    {
        found.push(condition(
            Severity::Degraded,
            ConditionReason::FileSystemErrors,
            format!(
                "ext4 on {} counted {errors} errors; check it while it is not mounted",
                device.node.display()
            ),
        ));
    }
    found
}

/// Whether ext4 refuses to write after an error and does not look read-only
/// otherwise (Linux 6.14 and later).
fn refuses_writes(record: &Record, device: &Device, place: &SafePath) -> bool {
    // The mount table is read only where there were errors.
    record.fs == Some(FsType::Ext4)
        && sysfs::ext4_errors(device.dev).is_ok_and(|errors| errors > 0)
        && place
            .open()
            .and_then(|root| table::super_options(root.as_fd()))
            .is_ok_and(|options| options.split(',').any(|option| option == "emergency_ro"))
}
