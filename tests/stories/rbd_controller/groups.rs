//! Group snapshots, and the blocks of snapshots.

use testkit::{Controller, MIB, Sandbox, refused, story};
use tonic::{
    Code::{FailedPrecondition, InvalidArgument, NotFound, OutOfRange},
    Status,
};
use uring_csi::proto::csi::{
    BlockMetadata, BlockMetadataType, CreateVolumeGroupSnapshotRequest,
    DeleteVolumeGroupSnapshotRequest, GetMetadataAllocatedRequest, GetMetadataDeltaRequest,
    GetPluginCapabilitiesRequest, GetVolumeGroupSnapshotRequest,
    GroupControllerGetCapabilitiesRequest, VolumeGroupSnapshot,
    group_controller_client::GroupControllerClient,
    identity_client::IdentityClient,
    plugin_capability::{Type, service::Type as Service},
    snapshot_metadata_client::SnapshotMetadataClient,
};

use super::Ceph;

async fn services(controller: &Controller) -> Vec<Service> {
    let mut identity = IdentityClient::new(controller.channel());
    let message = GetPluginCapabilitiesRequest {};
    let can = identity.get_plugin_capabilities(message).await.unwrap();
    let can = can.into_inner().capabilities.into_iter();
    can.filter_map(|one| match one.r#type? {
        Type::Service(service) => Some(service.r#type()),
        Type::VolumeExpansion(_) => None,
    })
    .collect()
}

async fn group_of(
    controller: &Controller,
    volumes: &[&str],
) -> Result<VolumeGroupSnapshot, Status> {
    let message = CreateVolumeGroupSnapshotRequest {
        name: "group".to_owned(),
        source_volume_ids: volumes.iter().map(|id| (*id).to_owned()).collect(),
        secrets: controller.secrets.clone(),
        ..Default::default()
    };
    let mut client = GroupControllerClient::new(controller.channel());
    let answer = client.create_volume_group_snapshot(message).await?;
    Ok(answer.into_inner().group_snapshot.expect("a group"))
}

async fn with_alpha(sandbox: &Sandbox, ceph: &Ceph) -> Controller {
    let mut setup = ceph.setup(sandbox);
    setup.args.push("--alpha-capabilities".to_owned());
    Controller::start_with(sandbox, setup).await
}

#[test]
fn a_group_snapshot_is_taken_of_all_its_volumes() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let controller = Controller::start_with(sandbox, ceph.setup(sandbox)).await;
        let announced = services(&controller).await;
        assert!(announced.contains(&Service::GroupControllerService));
        assert!(!announced.contains(&Service::SnapshotMetadataService));
        let mut client = GroupControllerClient::new(controller.channel());
        let can =
            client.group_controller_get_capabilities(GroupControllerGetCapabilitiesRequest {});
        assert_eq!(can.await.unwrap().into_inner().capabilities.len(), 1);

        let mut volumes = Vec::new();
        for name in ["data", "log"] {
            let made = controller.create(ceph.claim(name, MIB)).await.unwrap();
            volumes.push(made.volume_id);
        }
        let [data, log] = [&*volumes[0], &*volumes[1]];
        let taken = group_of(&controller, &[data, log]).await.unwrap();
        assert!(taken.ready_to_use && taken.creation_time.is_some());
        assert_eq!(group_of(&controller, &[log, data]).await.unwrap(), taken);
        for one in &taken.snapshots {
            assert_eq!(one.group_snapshot_id, taken.group_snapshot_id);
            assert!(one.ready_to_use);
        }
        refused(
            group_of(&controller, &[]).await,
            InvalidArgument,
            &["source_volume_ids"],
        );
        let mut plain = ceph.claim("plain", MIB);
        let features = ("imageFeatures".to_owned(), "layering".to_owned());
        plain.parameters.extend([features]);
        let plain = controller.create(plain).await.unwrap();
        let mixed = CreateVolumeGroupSnapshotRequest {
            name: "mixed".to_owned(),
            source_volume_ids: vec![data.to_owned(), plain.volume_id],
            secrets: controller.secrets.clone(),
            ..Default::default()
        };
        let mixed = client.create_volume_group_snapshot(mixed).await;
        refused(mixed, FailedPrecondition, &["exclusive-lock"]);

        let get = GetVolumeGroupSnapshotRequest {
            group_snapshot_id: taken.group_snapshot_id.clone(),
            snapshot_ids: Vec::new(),
            secrets: controller.secrets.clone(),
        };
        let found = client.get_volume_group_snapshot(get.clone()).await.unwrap();
        assert_eq!(found.into_inner().group_snapshot, Some(taken.clone()));
        let alone = controller.delete_snapshot(&taken.snapshots[0].snapshot_id);
        refused(alone.await, InvalidArgument, &[&taken.group_snapshot_id]);
        let delete = DeleteVolumeGroupSnapshotRequest {
            group_snapshot_id: taken.group_snapshot_id.clone(),
            snapshot_ids: (taken.snapshots.iter())
                .map(|one| one.snapshot_id.clone())
                .collect(),
            secrets: controller.secrets.clone(),
        };
        for _ in 0..2 {
            let deleted = client.delete_volume_group_snapshot(delete.clone()).await;
            deleted.unwrap();
        }
        refused(client.get_volume_group_snapshot(get).await, NotFound, &[]);
    });
}

#[test]
fn a_backup_learns_the_blocks_that_have_changed() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let controller = with_alpha(sandbox, &ceph).await;
        let announced = services(&controller).await;
        assert!(announced.contains(&Service::SnapshotMetadataService));
        let volume = controller
            .create(ceph.claim("data", 64 * MIB))
            .await
            .unwrap();
        let before = controller
            .snapshot(&volume.volume_id, "before")
            .await
            .unwrap();
        let image = format!("{}/{}", ceph.pool, volume.volume_context["imageName"]);
        let write = "bench --io-type write --io-threads 1 --io-size 4096 --io-total 8192";
        let write: Vec<_> = write.split(' ').chain([&*image]).collect();
        ceph.cluster.rbd(&write);
        let after = controller
            .snapshot(&volume.volume_id, "after")
            .await
            .unwrap();

        let mut client = SnapshotMetadataClient::new(controller.channel());
        let delta = |starting_offset: i64| GetMetadataDeltaRequest {
            base_snapshot_id: before.snapshot_id.clone(),
            target_snapshot_id: after.snapshot_id.clone(),
            starting_offset,
            max_results: 1,
            secrets: controller.secrets.clone(),
        };
        let mut stream = client
            .get_metadata_delta(delta(0))
            .await
            .unwrap()
            .into_inner();
        let mut changed = Vec::new();
        while let Some(message) = stream.message().await.unwrap() {
            assert_eq!(
                message.block_metadata_type(),
                BlockMetadataType::VariableLength
            );
            assert_eq!(message.volume_capacity_bytes, 64 << 20);
            assert!(message.block_metadata.len() <= 1);
            changed.extend(message.block_metadata);
        }
        let expected = BlockMetadata {
            byte_offset: 0,
            size_bytes: 8192,
        };
        assert_eq!(changed, [expected]);
        for (offset, code) in [(-1, OutOfRange), ((64 << 20) + 1, OutOfRange)] {
            let beyond = client.get_metadata_delta(delta(offset)).await;
            refused(beyond.map(drop), code, &["starting_offset"]);
        }
        let allocated = |snapshot_id: &str| GetMetadataAllocatedRequest {
            snapshot_id: snapshot_id.to_owned(),
            secrets: controller.secrets.clone(),
            ..Default::default()
        };
        let stream = client.get_metadata_allocated(allocated(&before.snapshot_id));
        let mut stream = stream.await.unwrap().into_inner();
        let first = stream.message().await.unwrap().expect("a message");
        assert_eq!(
            (first.volume_capacity_bytes, first.block_metadata),
            (64 << 20, vec![])
        );
        let missing = client
            .get_metadata_allocated(allocated(&volume.volume_id))
            .await;
        refused(missing.map(drop), NotFound, &[]);
        let none = client.get_metadata_allocated(allocated("")).await;
        refused(none.map(drop), InvalidArgument, &["snapshot_id"]);
    });
}
