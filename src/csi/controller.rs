//! The Controller service: requests parsed and passed to the [`Stores`].
//!
//! The nodes attach volumes by themselves. The controller learns that an image is in use
//! from the claims beside an image file, or from the Ceph cluster.

use std::collections::HashMap;

use tonic::Status;

use super::{
    identity::topology_key,
    validate::{self, invalid, required},
};
use crate::{
    Kind,
    capability::{AccessType, Capability},
    proto::csi::{
        self as wire, CapacityRange, Topology, TopologyRequirement,
        volume_content_source::{self, SnapshotSource, VolumeSource},
        volume_health::VolumeHealthEntry,
    },
    provision::{
        AccessibilityRequirements, CapacityRequest, ContentSource, ListRequest, NewVolume, Page,
        ProvisionError, Range, SnapshotInfo, Stores, TopologySegments, VolumeCondition, VolumeInfo,
        VolumeUse,
    },
    secret::Secrets,
};

mod admin;
mod blocks;
mod groups;
mod node;
mod orphans;
mod publish;
mod service;

pub use admin::ControllerAdminService;
pub use node::WhichNode;
pub use orphans::OrphanService;
pub use service::{METHODS, answered, taken};

/// Serves the calls of external-provisioner, -attacher, -resizer and -snapshotter.
#[derive(Debug)]
pub struct Controller {
    stores: Stores,
    /// This node's topology segment, where there are local pools.
    here: Option<(String, String)>,
    alpha: bool,
}

impl Controller {
    /// `node_id`: the node whose local pools are served. `alpha`: announce the
    /// capabilities that are alpha in CSI 1.13, which older sidecars and test
    /// suites do not know; their calls are served in any case.
    pub fn new(stores: Stores, driver_name: &str, node_id: Option<&str>, alpha: bool) -> Self {
        let here = node_id.map(|id| (topology_key(driver_name), id.to_owned()));
        Self {
            stores,
            here,
            alpha,
        }
    }

    async fn create(&self, request: wire::CreateVolumeRequest) -> Result<wire::Volume, Status> {
        required("name", &request.name)?;
        let uses = uses(&validate::capabilities(
            "volume_capabilities",
            &request.volume_capabilities,
        )?);
        validate::map("parameters", &request.parameters)?;
        validate::secrets(&request.secrets)?;
        validate::map("mutable_parameters", &request.mutable_parameters)?;
        let requirement = request.accessibility_requirements;
        let new = NewVolume {
            name: request.name,
            range: range(request.capacity_range)?,
            parameters: request.parameters,
            mutable: request.mutable_parameters,
            uses,
            source: request.volume_content_source.map(source).transpose()?,
            elsewhere: self.elsewhere(requirement.as_ref()),
            accessibility: requirement.map(accessibility).unwrap_or_default(),
            secrets: request.secrets.into(),
        };
        let volume = self.stores.create_volume(new).await?;
        Ok(self.volume(volume))
    }

    /// The requested topology, if this node is not within it.
    fn elsewhere(&self, requirement: Option<&TopologyRequirement>) -> Option<String> {
        let requisite = requirement.map(|r| r.requisite.as_slice())?;
        let is_here =
            requisite.is_empty() || requisite.iter().any(|topology| self.is_here(topology));
        (!is_here).then(|| {
            let segments: Vec<_> = requisite
                .iter()
                .flat_map(|topology| &topology.segments)
                .map(|(key, value)| format!("{key}={value}"))
                .collect();
            segments.join(" or ")
        })
    }

    /// Whether this node is within a topology. Keys are compared without regard to
    /// case (CSI specification, `Topology`).
    fn is_here(&self, topology: &Topology) -> bool {
        let is_mine = |(key, value): (&String, &String)| {
            let here = self.here.as_ref();
            here.is_some_and(|(my_key, id)| my_key.eq_ignore_ascii_case(key) && id == value)
        };
        // Other segments of this driver come from this node itself, and are true of it.
        let is_beside = |key: &str| {
            let domain = |key: &str| key.split_once('/').map(|(domain, _)| domain.to_lowercase());
            let here = self.here.as_ref();
            here.is_some_and(|(my_key, _)| {
                !my_key.eq_ignore_ascii_case(key) && domain(my_key) == domain(key)
            })
        };
        let segments = &topology.segments;
        segments.is_empty()
            || segments.iter().any(is_mine)
                && segments.iter().all(|one| is_mine(one) || is_beside(one.0))
    }

    fn topology(&self, local: bool, own: TopologySegments) -> Vec<Topology> {
        let here = self.here.clone().filter(|_| local);
        let segments: HashMap<_, _> = here.into_iter().chain(own).collect();
        let topology = (!segments.is_empty()).then_some(Topology { segments });
        topology.into_iter().collect()
    }

    fn volume(&self, volume: VolumeInfo) -> wire::Volume {
        wire::Volume {
            capacity_bytes: signed(volume.bytes),
            volume_id: volume.handle,
            volume_context: volume.context.into_iter().collect(),
            content_source: volume.source.map(content_source),
            accessible_topology: self.topology(volume.local, volume.topology),
        }
    }

    fn snapshot(&self, snapshot: SnapshotInfo) -> wire::Snapshot {
        wire::Snapshot {
            size_bytes: signed(snapshot.bytes),
            snapshot_id: snapshot.handle,
            source_volume_id: snapshot.source,
            creation_time: Some(snapshot.created.into()),
            ready_to_use: true,
            group_snapshot_id: snapshot.group.unwrap_or_default(),
            accessible_topology: self.topology(snapshot.local, TopologySegments::new()),
        }
    }

    async fn confirm(
        &self,
        request: wire::ValidateVolumeCapabilitiesRequest,
    ) -> Result<wire::ValidateVolumeCapabilitiesResponse, Status> {
        use wire::validate_volume_capabilities_response::Confirmed;
        validate::id("volume_id", &request.volume_id)?;
        let list = validate::capabilities("volume_capabilities", &request.volume_capabilities)?;
        validate::map("parameters", &request.parameters)?;
        let handle = request.volume_id;
        let refused = self
            .stores
            .check_uses(
                handle,
                uses(&list),
                request.parameters.clone(),
                request.secrets.into(),
            )
            .await?;
        Ok(wire::ValidateVolumeCapabilitiesResponse {
            confirmed: refused.is_none().then_some(Confirmed {
                // It is not compared with the volume.
                volume_context: HashMap::new(),
                volume_capabilities: request.volume_capabilities,
                parameters: request.parameters,
                mutable_parameters: HashMap::new(),
            }),
            message: refused.unwrap_or_default(),
        })
    }

    async fn capacity(
        &self,
        request: wire::GetCapacityRequest,
    ) -> Result<wire::GetCapacityResponse, Status> {
        validate::map("parameters", &request.parameters)?;
        let uses = match request.volume_capabilities.as_slice() {
            [] => Vec::new(),
            list => uses(&validate::capabilities("volume_capabilities", list)?),
        };
        let topology = request.accessible_topology;
        let room = CapacityRequest {
            parameters: request.parameters,
            uses,
            includes_local: topology.as_ref().is_none_or(|it| self.is_here(it)),
            topology: topology.map(segments).unwrap_or_default(),
        };
        let capacity = self.stores.capacity(room).await?;
        Ok(wire::GetCapacityResponse {
            available_capacity: signed(capacity.available),
            maximum_volume_size: capacity.maximum.map(signed),
            minimum_volume_size: Some(signed(capacity.minimum)),
        })
    }

    async fn expand(
        &self,
        request: wire::ControllerExpandVolumeRequest,
    ) -> Result<wire::ControllerExpandVolumeResponse, Status> {
        validate::id("volume_id", &request.volume_id)?;
        validate::secrets(&request.secrets)?;
        let range = range(request.capacity_range)?;
        if range == Range::default() {
            return Err(invalid("capacity_range", "is required"));
        }
        if request.volume_capability.is_some() {
            validate::capability("volume_capability", request.volume_capability.as_ref())?;
        }
        // The node has to expand the device over an image, and its file system.
        let node_expansion_required = self.stores.grows_on_nodes(&request.volume_id);
        let bytes = self
            .stores
            .expand_volume(request.volume_id, range, request.secrets.into())
            .await?;
        Ok(wire::ControllerExpandVolumeResponse {
            capacity_bytes: signed(bytes),
            node_expansion_required,
        })
    }

    async fn snapshots(
        &self,
        request: wire::ListSnapshotsRequest,
    ) -> Result<Page<SnapshotInfo>, Status> {
        let what = listing(request.max_entries, request.starting_token)?;
        let of_volume = Some(request.source_volume_id).filter(|id| !id.is_empty());
        let secrets = request.secrets.into();
        let stores = &self.stores;
        if request.snapshot_id.is_empty() {
            return Ok(stores.list_snapshots(what, of_volume, secrets).await?);
        }
        let entries = match stores.get_snapshot(request.snapshot_id, secrets).await {
            Ok(one) if of_volume.is_none_or(|volume| volume == one.source) => vec![one],
            Ok(_) => Vec::new(),
            Err(error) if error.kind() == Kind::NotFound => Vec::new(),
            Err(error) => return Err(error.into()),
        };
        let next = None;
        Ok(Page { entries, next })
    }

    async fn health(
        &self,
        handle: String,
        secrets: Secrets,
    ) -> Result<wire::VolumeHealth, ProvisionError> {
        let stores = &self.stores;
        let condition = stores.volume_condition(handle.clone(), secrets).await?;
        Ok(wire::VolumeHealth {
            volume_id: handle,
            health_statuses: condition.into_iter().map(inaccessible).collect(),
        })
    }

    async fn all_health(
        &self,
        request: wire::ControllerListVolumeHealthRequest,
    ) -> Result<wire::ControllerListVolumeHealthResponse, Status> {
        let what = listing(request.max_entries, request.starting_token)?;
        let secrets = Secrets::from(request.secrets);
        let page = self.stores.list_volumes(what).await?;
        let mut entries = Vec::new();
        for volume in page.entries {
            match self.health(volume.handle, secrets.clone()).await {
                Ok(health) => entries.push(health),
                // Deleted after it was listed.
                Err(error) if error.kind() == Kind::NotFound => {}
                Err(error) => return Err(error.into()),
            }
        }
        let next_token = page.next.unwrap_or_default();
        Ok(wire::ControllerListVolumeHealthResponse {
            entries,
            next_token,
        })
    }
}

fn uses(capabilities: &[Capability]) -> Vec<VolumeUse> {
    let volume_use = |capability: &Capability| VolumeUse {
        fs_type: match &capability.access {
            AccessType::Block => None,
            AccessType::Mount { fs_type, .. } => Some(fs_type.clone()),
        },
        many_nodes_write: capability.mode.multi_node_writer(),
    };
    capabilities.iter().map(volume_use).collect()
}

fn range(range: Option<CapacityRange>) -> Result<Range, ProvisionError> {
    let range = range.unwrap_or_default();
    Range::new(range.required_bytes, range.limit_bytes)
}

fn accessibility(requirement: TopologyRequirement) -> AccessibilityRequirements {
    let all = |list: Vec<Topology>| list.into_iter().map(segments).collect();
    AccessibilityRequirements {
        requisite: all(requirement.requisite),
        preferred: all(requirement.preferred),
    }
}

fn segments(topology: Topology) -> TopologySegments {
    topology.segments.into_iter().collect()
}

fn listing(max_entries: i32, token: String) -> Result<ListRequest, Status> {
    let max = usize::try_from(max_entries);
    Ok(ListRequest {
        from: Some(token).filter(|token| !token.is_empty()),
        max: max.map_err(|_| invalid("max_entries", "is negative"))?,
        omitted: None,
    })
}

fn source(wire: wire::VolumeContentSource) -> Result<ContentSource, Status> {
    use volume_content_source::Type;
    match wire.r#type {
        Some(Type::Snapshot(SnapshotSource { snapshot_id: id })) => {
            validate::id("volume_content_source.snapshot_id", &id)?;
            Ok(ContentSource::Snapshot(id))
        }
        Some(Type::Volume(VolumeSource { volume_id: id })) => {
            validate::id("volume_content_source.volume_id", &id)?;
            Ok(ContentSource::Volume(id))
        }
        None => Err(invalid(
            "volume_content_source",
            "a snapshot or a volume is required",
        )),
    }
}

fn content_source(source: ContentSource) -> wire::VolumeContentSource {
    use volume_content_source::Type;
    let kind = match source {
        ContentSource::Snapshot(snapshot_id) => Type::Snapshot(SnapshotSource { snapshot_id }),
        ContentSource::Volume(volume_id) => Type::Volume(VolumeSource { volume_id }),
    };
    wire::VolumeContentSource { r#type: Some(kind) }
}

fn inaccessible(condition: VolumeCondition) -> VolumeHealthEntry {
    VolumeHealthEntry {
        status: wire::VolumeHealthErrorType::Inaccessible.into(),
        reason: condition.reason.to_owned(),
        message: condition.message,
    }
}

/// No image is larger than the largest file, whose size fits.
fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
