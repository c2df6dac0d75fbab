//! Stats, beside the least that any gRPC call costs.

use criterion::Criterion;
use uring_csi::proto::csi::{
    GetPluginInfoRequest, NodeGetVolumeStatsRequest, identity_client::IdentityClient,
};

use crate::rig::{Rig, timed};

const FRESH: &str = "stats on a new connection";
const KEPT: &str = "stats on a kept connection";

/// NodeGetVolumeStats against GetPluginInfo, which only answers a constant.
pub fn stats(criterion: &mut Criterion, rig: &Rig) {
    let volume = rig.sandbox.volume("stats", "ext4");
    let target = rig.runtime.block_on(rig.node.up(&volume, "pod"));
    let message = NodeGetVolumeStatsRequest {
        volume_id: volume.handle.clone(),
        volume_path: target.display().to_string(),
        staging_target_path: rig.node.staging(&volume).display().to_string(),
    };

    let mut group = criterion.benchmark_group(FRESH);
    rig.measure(&mut group, FRESH, "GetPluginInfo", || {
        let mut client = IdentityClient::new(rig.node.channel());
        let answer = client.get_plugin_info(GetPluginInfoRequest {});
        rig.runtime.block_on(answer).expect("an answer");
    });
    rig.measure(&mut group, FRESH, "NodeGetVolumeStats", || {
        let mut client = rig.node.client();
        let answer = client.node_get_volume_stats(message.clone());
        rig.runtime.block_on(answer).expect("an answer");
    });
    let path = target.to_str().expect("UTF-8");
    rig.measure(&mut group, FRESH, "exec df", || {
        testkit::run(&["df", "--output=size,used,avail,itotal,iused,iavail", path]);
    });
    group.finish();

    let mut group = criterion.benchmark_group(KEPT);
    let mut identity = IdentityClient::new(rig.node.channel());
    let mut info = || {
        let answer = identity.get_plugin_info(GetPluginInfoRequest {});
        rig.runtime.block_on(answer).expect("an answer");
    };
    rig.measure(&mut group, KEPT, "GetPluginInfo", &mut info);
    let mut node = rig.node.client();
    let mut stats = || {
        let answer = node.node_get_volume_stats(message.clone());
        rig.runtime.block_on(answer).expect("an answer");
    };
    rig.measure(&mut group, KEPT, "NodeGetVolumeStats", &mut stats);
    group.finish();
    let case = "NodeGetVolumeStats on a kept connection, to GetPluginInfo";
    rig.compare(case, || timed(&mut stats), || timed(&mut info));
    rig.runtime.block_on(rig.node.down(&volume, "pod"));
}
