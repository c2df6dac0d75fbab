//! csi-addons' replication, as its sidecar calls it.

use std::collections::HashMap;

use testkit::{Controller, MIB, eventually, refused, story};
use tonic::{
    Code::{FailedPrecondition, InvalidArgument, NotFound, Unavailable, Unimplemented},
    Status,
};
use uring_csi::proto::addons::{
    identity::capability::Type,
    replication::{
        DemoteVolumeRequest, DisableVolumeReplicationRequest, EnableVolumeReplicationRequest,
        GetReplicationDestinationInfoRequest, GetVolumeReplicationInfoRequest,
        PromoteVolumeRequest, ReplicationSource, ResyncVolumeRequest,
        controller_client::ControllerClient,
        replication_destination,
        replication_source::{self, VolumeGroupSource, VolumeSource},
    },
};

use super::{Ceph, addons::controller_with_addons};
use crate::addons::Addons;

/// The sidecar's calls on one volume.
struct Replication<'a> {
    addons: &'a Addons,
    controller: &'a Controller,
    source: Option<ReplicationSource>,
}

impl<'a> Replication<'a> {
    fn of(addons: &'a Addons, controller: &'a Controller, volume_id: &str) -> Self {
        let volume_id = volume_id.to_owned();
        let volume = replication_source::Type::Volume(VolumeSource { volume_id });
        Self {
            addons,
            controller,
            source: Some(ReplicationSource {
                r#type: Some(volume),
            }),
        }
    }

    fn client(&self) -> ControllerClient<tonic::transport::Channel> {
        ControllerClient::new(self.addons.channel())
    }

    fn secrets(&self) -> HashMap<String, String> {
        self.controller.secrets.clone()
    }

    async fn enable(&self, parameters: &[(&str, &str)]) -> Result<(), Status> {
        let own = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        let request = EnableVolumeReplicationRequest {
            parameters: parameters.iter().map(own).collect(),
            replication_source: self.source.clone(),
            secrets: self.secrets(),
            ..Default::default()
        };
        let answer = self.client().enable_volume_replication(request).await;
        answer.map(drop)
    }

    async fn promote(&self) -> Result<(), Status> {
        let request = PromoteVolumeRequest {
            replication_source: self.source.clone(),
            secrets: self.secrets(),
            ..Default::default()
        };
        self.client().promote_volume(request).await.map(drop)
    }

    async fn demote(&self) -> Result<(), Status> {
        let request = DemoteVolumeRequest {
            replication_source: self.source.clone(),
            secrets: self.secrets(),
            ..Default::default()
        };
        self.client().demote_volume(request).await.map(drop)
    }

    /// The volume's id in the other cluster.
    async fn destination(&self) -> Result<String, Status> {
        let request = GetReplicationDestinationInfoRequest {
            replication_source: self.source.clone(),
            secrets: self.secrets(),
        };
        let answer = self
            .client()
            .get_replication_destination_info(request)
            .await?;
        let destination = answer.into_inner().replication_destination;
        match destination.and_then(|destination| destination.r#type) {
            Some(replication_destination::Type::Volume(volume)) => Ok(volume.volume_id),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_volume_is_replicated_by_the_calls_of_the_sidecar() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let (controller, addons) = controller_with_addons(sandbox, &ceph).await;
        let announced = addons.capabilities().await;
        let is_replication = |one: &&Type| matches!(one, Type::VolumeReplication(_));
        // The calls that change and tell it, and that of its destination.
        assert_eq!(announced.iter().filter(is_replication).count(), 2);
        let made = controller.create(ceph.claim("v", MIB)).await.unwrap();
        let volume = Replication::of(&addons, &controller, &made.volume_id);
        refused(
            volume.promote().await,
            FailedPrecondition,
            &["not mirrored"],
        );
        refused(
            volume.destination().await,
            FailedPrecondition,
            &["not mirrored"],
        );
        let mirror = ["mirror", "pool", "enable", &ceph.pool, "image"];
        ceph.cluster.rbd(&mirror);
        volume.enable(&[]).await.unwrap();
        volume.promote().await.unwrap();
        assert_eq!(volume.destination().await.unwrap(), made.volume_id);
        let info = GetVolumeReplicationInfoRequest {
            replication_source: volume.source.clone(),
            secrets: volume.secrets(),
            ..Default::default()
        };
        let unknown = volume.client().get_volume_replication_info(info).await;
        refused(unknown, NotFound, &["no other cluster"]);
        volume.demote().await.unwrap();
        let resync = ResyncVolumeRequest {
            replication_source: volume.source.clone(),
            secrets: volume.secrets(),
            ..Default::default()
        };
        let resync = volume.client().resync_volume(resync).await.unwrap();
        assert!(!resync.into_inner().ready, "no daemon runs");
        volume.promote().await.unwrap();
        // As callers before July 2026.
        let disable = DisableVolumeReplicationRequest {
            volume_id: made.volume_id.clone(),
            secrets: volume.secrets(),
            ..Default::default()
        };
        // The cluster's manager may still be starting.
        eventually("disabled", async || {
            let mut client = volume.client();
            match client.disable_volume_replication(disable.clone()).await {
                Ok(_) => Some(()),
                Err(status) => {
                    assert_eq!(status.code(), Unavailable, "{status}");
                    None
                }
            }
        })
        .await;
        controller.delete(&made.volume_id).await.unwrap();
    });
}

#[test]
fn invalid_requests_for_a_replication_name_their_field() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let (controller, addons) = controller_with_addons(sandbox, &ceph).await;
        let mut volume = Replication::of(&addons, &controller, "");
        let id = ["replication_source.volume.volume_id"];
        refused(volume.enable(&[]).await, InvalidArgument, &id);
        volume.source = Some(ReplicationSource { r#type: None });
        let kind = ["replication_source.type"];
        refused(volume.demote().await, InvalidArgument, &kind);
        let group = VolumeGroupSource::default();
        volume.source = Some(ReplicationSource {
            r#type: Some(replication_source::Type::Volumegroup(group)),
        });
        refused(volume.promote().await, Unimplemented, &["groups"]);
        refused(volume.destination().await, Unimplemented, &["groups"]);
        let made = controller.create(ceph.claim("v", MIB)).await.unwrap();
        let volume = Replication::of(&addons, &controller, &made.volume_id);
        for name in ["mirroringMode", "schedulingInterval", "flattenMode"] {
            let bad = volume.enable(&[(name, "x")]).await;
            refused(bad, InvalidArgument, &[name]);
        }
        controller.delete(&made.volume_id).await.unwrap();
        refused(volume.enable(&[]).await, NotFound, &[]);
    });
}
