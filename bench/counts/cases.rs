//! What is counted.

use std::{env, fs};

use futures_util::future::join_all;
use testkit::{BareContent, BareImageFile, BareVolume, MIB, Node, Sandbox, Volume, request};
use tonic::transport::Channel;
use uring_csi::proto::csi::{
    GetPluginInfoRequest, NodeGetVolumeStatsRequest, NodeUnpublishVolumeRequest,
    NodeUnstageVolumeRequest, identity_client::IdentityClient, node_client::NodeClient,
};

use crate::{
    counters::{Count, Counters, of_this_thread},
    table::Table,
};

/// How often a case is counted.
const ROUNDS: usize = 80;

/// How often strace sees it.
const TIMES: usize = 10;

/// A node, and what was counted of it so far.
pub struct Cases<'a> {
    pub node: &'a Node,
    pub sandbox: &'a Sandbox,
    pub counters: Counters,
    pub table: Table,
}

impl Cases<'_> {
    /// The calls' cases, beside `others` volumes that are staged and published.
    pub async fn run_beside(&mut self, others: usize) {
        let (node, sandbox) = (self.node, self.sandbox);
        let names = (0..others).map(|n| format!("other-{n}"));
        let others: Vec<_> = names.map(|name| sandbox.volume(&name, "ext4")).collect();
        for some in others.chunks(16) {
            join_all(some.iter().map(|volume| node.up(volume, "pod"))).await;
        }
        self.run().await;
        for some in others.chunks(16) {
            join_all(some.iter().map(|volume| node.down(volume, "pod"))).await;
        }
    }

    /// The same by the system calls that a life cannot do without.
    pub fn run_bare(&mut self) {
        let dir = self.sandbox.dir();
        let device = BareImageFile::new(dir.join("counted-bare-image"), 64 * MIB);
        let volume = BareVolume::new(dir, "counted", Box::new(device), BareContent::Ext4);
        let live = || {
            let node = volume.up();
            volume.down(&node);
        };
        live();
        let of = |run: &dyn Fn()| of_this_thread(ROUNDS as u64, run).expect("the kernel's events");
        self.table
            .add("life of a formatted ext4, bare calls", of(&live));
        let node = volume.stage();
        let published = of(&|| {
            volume.publish(&node);
            volume.unpublish();
        });
        self.table
            .add("publish and unpublish, bare calls", published);
        volume.unstage(&node);
    }

    /// The calls' cases.
    pub async fn run(&mut self) {
        let (node, sandbox) = (self.node, self.sandbox);
        let volume = &sandbox.volume("counted", "ext4");
        node.up(volume, "pod").await;
        node.down(volume, "pod").await;
        let kept = &Calls {
            node,
            kept: Some(node.channel()),
        };
        let new = &Calls { node, kept: None };
        for (how, calls) in [("kept connection", kept), ("new connections", new)] {
            let title = |case: &str| format!("{case}, {how}");
            self.count(&title("life of a formatted ext4"), async || {
                calls.stage(volume).await;
                calls.publish(volume).await;
                calls.unpublish(volume).await;
                calls.unstage(volume).await;
            })
            .await;
            calls.stage(volume).await;
            self.count(&title("stage again"), async || calls.stage(volume).await)
                .await;
            self.count(&title("publish and unpublish"), async || {
                calls.publish(volume).await;
                calls.unpublish(volume).await;
            })
            .await;
            calls.publish(volume).await;
            self.count(&title("stats"), async || calls.stats(volume).await)
                .await;
            self.count(&title("GetPluginInfo"), async || calls.info().await)
                .await;
            node.down(volume, "pod").await;
        }
        fs::remove_file(sandbox.image(volume)).expect("the image");
    }

    /// Counts one call of `run`.
    async fn count(&mut self, case: &str, run: impl AsyncFn()) {
        if env::var_os("NAMES").is_some_and(|set| !set.is_empty()) {
            let names = self.sandbox.dir().join("names");
            let strace = self.counters.names(&names);
            println!("{TIMES} times {case}");
            for _ in 0..TIMES {
                run().await;
            }
            strace.print(&names);
        }
        let mut rounds = Vec::new();
        let mut before = self.counters.read_idle();
        for _ in 0..ROUNDS {
            run().await;
            let after = self.counters.read_idle();
            rounds.push(after - before);
            before = after;
        }
        self.table.add(case, Count::lowest_decile(&rounds));
    }
}

/// Kubelet's calls, on a new connection each unless one is kept.
struct Calls<'a> {
    node: &'a Node,
    kept: Option<Channel>,
}

impl Calls<'_> {
    fn channel(&self) -> Channel {
        self.kept.clone().unwrap_or_else(|| self.node.channel())
    }

    fn client(&self) -> NodeClient<Channel> {
        NodeClient::new(self.channel())
    }

    async fn stage(&self, volume: &Volume) {
        fs::create_dir_all(self.node.staging(volume)).expect("kubelet's directory");
        let message = request(self.node.stage_request(volume), self.node.timeout.get());
        let answer = self.client().node_stage_volume(message).await;
        answer.expect("staged");
    }

    async fn publish(&self, volume: &Volume) {
        let parent = self.node.target(volume, "pod");
        fs::create_dir_all(parent.parent().expect("a parent")).expect("kubelet's directory");
        let message = self.node.publish_request(volume, "pod");
        let message = request(message, self.node.timeout.get());
        let answer = self.client().node_publish_volume(message).await;
        answer.expect("published");
    }

    async fn unpublish(&self, volume: &Volume) {
        let message = NodeUnpublishVolumeRequest {
            volume_id: volume.handle.clone(),
            target_path: self.node.target(volume, "pod").display().to_string(),
        };
        let message = request(message, self.node.timeout.get());
        let answer = self.client().node_unpublish_volume(message).await;
        answer.expect("unpublished");
    }

    async fn unstage(&self, volume: &Volume) {
        let message = NodeUnstageVolumeRequest {
            volume_id: volume.handle.clone(),
            staging_target_path: self.node.staging(volume).display().to_string(),
        };
        let message = request(message, self.node.timeout.get());
        let answer = self.client().node_unstage_volume(message).await;
        answer.expect("unstaged");
    }

    async fn stats(&self, volume: &Volume) {
        let message = NodeGetVolumeStatsRequest {
            volume_id: volume.handle.clone(),
            volume_path: self.node.target(volume, "pod").display().to_string(),
            staging_target_path: self.node.staging(volume).display().to_string(),
        };
        let message = request(message, self.node.timeout.get());
        let answer = self.client().node_get_volume_stats(message).await;
        answer.expect("stats");
    }

    async fn info(&self) {
        let answer = IdentityClient::new(self.channel())
            .get_plugin_info(GetPluginInfoRequest {})
            .await;
        answer.expect("an answer");
    }
}
