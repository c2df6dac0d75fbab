//! Images that rbd-nbd serves: those that krbd cannot map, and those of the mounter
//! `rbd-nbd`.
//!
//! The supervisor runs rbd-nbd's daemons ([`crate::supervisor`]), and maps, grows and
//! unmaps for the agent. The agent finds such a device by itself, by its cookie, which is
//! the volume's handle.

use super::{
    BoundCephImage, CephImageError, CephSource, Known, LowerDevice, as_it_is_shown,
    library::OwnClient, mounter::RbdNbdArgs,
};
use crate::{
    Detached, Done,
    ceph::krbd::{self, ImageSpec, Monitors},
    crash_point,
    device::{
        AttachOptions, Backing, Condition, Device, Source,
        backend::FoundDevice,
        error::{DeviceError, io},
    },
    error_chain,
    kernel::nbd::{self, NbdDevice},
    supervisor::{
        DaemonCondition, Spec, Watch,
        client::{ClientError, Refusal},
        processes::DaemonProcess,
    },
};

/// The device of a volume that rbd-nbd serves.
pub fn device(volume_id: &str) -> Result<Option<Device>, DeviceError> {
    Ok(device_and_server(volume_id)?.map(|(device, _)| device))
}

/// The device with the process that serves it, if there is one.
fn device_and_server(
    volume_id: &str,
) -> Result<Option<(Device, Option<DaemonProcess>)>, DeviceError> {
    let found = NbdDevice::attached_as(volume_id).map_err(io("look at the NBD devices"))?;
    let Some(device) = found else {
        return Ok(None);
    };
    let mut lower = lower(device, volume_id);
    // What the kernel shows may be a mark.
    let server = server_of(volume_id).map_err(io("look at the processes"))?;
    let server = server.map(|(_, server)| server);
    if let Some(server) = &server {
        lower.read_only = server.read_only;
    }
    Ok(Some((as_it_is_shown(lower)?, server)))
}

/// Whether rbd-nbd has the volume's device.
pub fn is_nbd_backed(volume_id: &str) -> Result<bool, CephImageError> {
    let found = NbdDevice::attached_as(volume_id).map_err(ClientError::Io)?;
    Ok(found.is_some())
}

/// The device with its source: the image from the supervisor, from the daemon's command
/// line, or else from the stage file. ceph-csi's daemons end with its pod, and then only
/// its stage file is left.
pub fn find(
    supervisor: Option<&Watch>,
    volume_id: &str,
    recorded: Option<ImageSpec>,
) -> Result<Option<FoundDevice>, DeviceError> {
    let Some((device, server)) = device_and_server(volume_id)? else {
        if is_being_mapped(supervisor, volume_id)? {
            return Err(CephImageError::BeingMapped.into());
        }
        return Ok(None);
    };
    let name = supervisor.and_then(|supervisor| supervisor.image(volume_id));
    let name = name.or_else(|| Some(server?.image));
    let Some(image) = name.as_deref().and_then(named).or(recorded) else {
        tracing::warn!(volume_id, node = %device.node.display(), "no record of the image behind this NBD device");
        return Ok(None);
    };
    let source = Source::Rbd(CephSource::found_nbd_backed(image, volume_id));
    Ok(Some(FoundDevice { device, source }))
}

/// Whether the supervisor is starting rbd-nbd for it, for a call of a killed agent.
fn is_being_mapped(supervisor: Option<&Watch>, volume_id: &str) -> Result<bool, CephImageError> {
    let mapping = supervisor.map(|supervisor| supervisor.is_mapping(volume_id));
    if mapping.transpose()? == Some(true) {
        return Ok(true);
    }
    let server = server_of(volume_id).map_err(ClientError::Io)?;
    Ok(server.is_some())
}

/// The process that serves a volume, and its id.
fn server_of(volume_id: &str) -> std::io::Result<Option<(i32, DaemonProcess)>> {
    let servers = DaemonProcess::all()?.into_iter();
    let mut its = servers.filter(|(_, server)| server.cookie == volume_id);
    Ok(its.next())
}

/// The monitors by which this node has mapped an image for the volume, by either driver;
/// none where it has not, or where no process serves rbd-nbd's device.
pub fn monitors_of_device(volume_id: &str) -> Option<Monitors> {
    let given = match krbd::find_marked(volume_id).ok()? {
        Some(mapped) => mapped
            .config
            .monitors
            .iter()
            .map(ToString::to_string)
            .collect(),
        None => vec![server_of(volume_id).ok()??.1.monitors?],
    };
    Monitors::resolve(&given).ok()
}

/// The id of the process that serves a device, which must be one of rbd-nbd.
#[cfg(feature = "cli")]
pub fn daemon_of(volume_id: &str) -> Result<Option<i32>, DeviceError> {
    let server = server_of(volume_id).map_err(io("look at the processes"))?;
    Ok(server.map(|(pid, _)| pid))
}

/// Refuses an image that rbd-nbd serves here, for this volume or another.
pub fn refuse_nbd_backed(
    image: &ImageSpec,
    volume_id: &str,
    monitors: &Monitors,
) -> Result<(), CephImageError> {
    let taken = |by| CephImageError::Taken {
        image: image.to_string(),
        by,
    };
    let devices = nbd::identifiers().map_err(ClientError::Io)?;
    if let Some((index, _)) = devices.iter().find(|(_, has)| has == volume_id) {
        return Err(taken(format!("rbd-nbd as /dev/nbd{index}")));
    }
    if devices.is_empty() {
        return Ok(());
    }
    for (pid, server) in DaemonProcess::all().map_err(ClientError::Io)? {
        let is_other = has_other_monitors(&server, monitors);
        if !is_other && named(&server.image).is_some_and(|named| named.is_named_as(image)) {
            return Err(taken(format!("rbd-nbd, process {pid}")));
        }
    }
    Ok(())
}

/// Whether the daemon of the volume is known to serve the image of another cluster than the
/// one with these monitors.
pub fn is_of_another_cluster(volume_id: &str, monitors: &Monitors) -> Result<bool, CephImageError> {
    let server = server_of(volume_id).map_err(ClientError::Io)?;
    Ok(server.is_some_and(|(_, server)| has_other_monitors(&server, monitors)))
}

/// Of a daemon without monitors, the cluster may be this one.
fn has_other_monitors(server: &DaemonProcess, monitors: &Monitors) -> bool {
    let given = server.monitors.clone();
    let its = given.map(|given| Monitors::resolve(&[given]));
    matches!(its, Some(Ok(its)) if !monitors.meet(&its))
}

/// Whether a process serves the image for the volume as requested, with or without a
/// supervisor.
fn is_backed_without_supervisor(spec: &Spec) -> Result<bool, CephImageError> {
    let server = server_of(&spec.volume_id).map_err(ClientError::Io)?;
    Ok(server.is_some_and(|(_, server)| {
        server.image == spec.name() && server.read_only == spec.read_only
    }))
}

/// `POOL/[NAMESPACE/]IMAGE[@SNAPSHOT]`.
fn named(text: &str) -> Option<ImageSpec> {
    let (path, snapshot) = match text.split_once('@') {
        Some((path, snapshot)) => (path, Some(snapshot.to_owned())),
        None => (text, None),
    };
    let parts: Vec<_> = path.split('/').collect();
    let (pool, namespace, name) = match parts[..] {
        [pool, name] => (pool, "", name),
        [pool, namespace, name] => (pool, namespace, name),
        _ => return None,
    };
    let is_part = |text: &str| !text.is_empty() && !text.contains(['/', '@']);
    if !is_part(pool) || !is_part(name) || !snapshot.iter().all(|name| is_part(name)) {
        return None;
    }
    Some(ImageSpec {
        cluster_id: String::new(),
        pool: pool.to_owned(),
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        snapshot,
    })
}

fn lower(device: NbdDevice, cookie: &str) -> LowerDevice {
    LowerDevice {
        block: device.block,
        backing: Backing::RbdNbd(cookie.to_owned()),
        read_only: device.read_only,
    }
}

impl BoundCephImage<'_> {
    fn supervisor(&self) -> Result<&Watch, CephImageError> {
        let image = || self.source.image.to_string();
        let supervisor = self.images.supervisor.as_ref();
        supervisor.ok_or_else(|| CephImageError::NoSupervisor { image: image() })
    }

    /// Maps the image by the supervisor, or finds it mapped; passes the key either way.
    pub(super) fn serve(
        &self,
        known: &Known<'_>,
        served: &RbdNbdArgs,
        options: &AttachOptions,
    ) -> Result<(LowerDevice, Done), CephImageError> {
        if let Some(path) = known.cluster.net_namespace() {
            return Err(CephImageError::NetNamespace {
                cluster_id: known.cluster.cluster_id.clone(),
                path: path.to_owned(),
            });
        }
        let supervisor = self.supervisor()?;
        let look = || NbdDevice::attached_as(&served.cookie).map_err(ClientError::Io);
        // A daemon that a killed agent's call started has the image open.
        let is_being_mapped = is_being_mapped(Some(supervisor), &served.cookie)?;
        let before = look()?;
        // As with krbd, a second writer destroys the image.
        let single_writer = !options.staged && !options.read_only && !options.shared;
        let is_first = before.is_none() && !is_being_mapped;
        if is_first {
            self.is_not_mapped(known, options)?;
            self.refuse_secondary(known)?;
            if single_writer {
                let _ = self.alone(known)?;
            }
        }
        let spec = Spec {
            volume_id: served.cookie.clone(),
            // After a fail-over not that of the handle.
            image: ImageSpec {
                cluster_id: known.cluster.cluster_id.clone(),
                ..known.image.clone()
            },
            monitors: known.cluster.monitors.clone(),
            user: known.credentials.user.clone(),
            options: served.options.clone(),
            read_only: options.read_only,
            fencing: self.fencing(options),
        };
        let (node, done) = match (supervisor.map(&spec, &known.credentials.key), before) {
            // The supervisor is away, and the key is not needed now.
            (Err(ClientError::Unreachable { source, .. }), Some(device))
                if spec.fencing.is_none() && is_backed_without_supervisor(&spec)? =>
            {
                let why = error_chain(&source);
                tracing::warn!(
                    volume_id = options.volume_id,
                    why,
                    "rbd-nbd serves the volume without a supervisor"
                );
                (device.block.node, Done::Already)
            }
            // Otherwise no client would be registered.
            (Err(error @ ClientError::Unreachable { .. }), Some(_))
                if spec.fencing.is_some() && is_backed_without_supervisor(&spec)? =>
            {
                return Err(error.into());
            }
            (Err(error @ ClientError::Unreachable { .. }), Some(device)) => {
                return Err(CephImageError::Unserved {
                    image: known.image.to_string(),
                    node: device.block.node,
                    source: error,
                });
            }
            (Err(ClientError::Refused(Refusal::Unpublished, _)), _) => {
                return Err(self.unpublished(known));
            }
            (mapped, _) => mapped?,
        };
        crash_point();
        let device = look()?.filter(|device| device.block.node == node);
        let device = device.ok_or_else(|| {
            let why = format!("{} disappeared after rbd-nbd was started", node.display());
            ClientError::Io(std::io::Error::other(why))
        })?;
        let mut lower = lower(device, &served.cookie);
        // The supervisor has compared them; the kernel also shows a mark.
        lower.read_only = options.read_only;
        if !single_writer {
            return Ok((lower, done));
        }
        // Another node may have checked at the same time, as with krbd. The watch of a
        // daemon that died since an earlier call stays for a while.
        let queried = known.queried(&self.images.connections);
        let alone = queried.and_then(|queried| match queried {
            Some(queried) if is_first => queried.is_alone(OwnClient::RbdNbd),
            Some(queried) => queried.wait_until_alone(OwnClient::RbdNbd),
            None => Ok(()),
        });
        match alone {
            Ok(()) => Ok((lower, done)),
            Err(cause) => Err(match self.unmap(&lower) {
                Ok(_) => cause,
                Err(undo) => CephImageError::not_undone(&cause, &undo),
            }),
        }
    }

    /// Refuses an image that krbd has mapped here.
    fn is_not_mapped(
        &self,
        known: &Known<'_>,
        options: &AttachOptions,
    ) -> Result<(), CephImageError> {
        let monitors = Monitors::resolve(&known.cluster.monitors)?;
        let mut wanted = known.wanted(options, &monitors);
        match self.find_mapped(known, &mut wanted)? {
            None => Ok(()),
            Some(device) => Err(CephImageError::Taken {
                image: known.image.to_string(),
                by: format!("krbd as {}", device.node.display()),
            }),
        }
    }

    pub(super) fn unmap(&self, lower: &LowerDevice) -> Result<Detached, CephImageError> {
        match &lower.backing {
            Backing::Rbd(identity) => Ok(crate::ceph::krbd::unmap(&lower.krbd(identity))?),
            Backing::RbdNbd(cookie) => match self.supervisor()?.unmap(cookie)? {
                Done::Now => Ok(Detached::Now),
                Done::Already => Ok(Detached::Already),
            },
            Backing::Image(_) | Backing::Export(_) => unreachable!("a Ceph image is behind it"),
        }
    }

    pub(super) fn grow_nbd_backed(
        &self,
        lower: &LowerDevice,
        bytes: u64,
    ) -> Result<u64, CephImageError> {
        let Backing::RbdNbd(cookie) = &lower.backing else {
            unreachable!("rbd-nbd serves it");
        };
        Ok(self.supervisor()?.grow(cookie, bytes)?)
    }

    /// The trouble that the supervisor reports for an image.
    pub(super) fn daemon_condition(&self, lower: &LowerDevice) -> Option<Condition> {
        let Backing::RbdNbd(cookie) = &lower.backing else {
            return None;
        };
        let Some(supervisor) = &self.images.supervisor else {
            let why = "this agent was started without --holder";
            return Some(Condition::Unsupervised(why.to_owned()));
        };
        Some(match supervisor.condition(cookie)? {
            DaemonCondition::Unsupervised(why) => Condition::Unsupervised(why),
            DaemonCondition::NotRunning(why) => Condition::Unreachable {
                failing: false,
                why: format!("({why})"),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_name_is_read_as_it_is_written_or_refused(text in "[a-c@/]{0,9}") {
            if let Some(image) = named(&text) {
                // An empty namespace is not written.
                prop_assert_eq!(image.to_string(), text.replacen("//", "/", 1));
            }
        }
    }
}
