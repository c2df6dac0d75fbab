//! Stats, beside the least that any gRPC call costs; and the first call of a connection.

use std::{fs, io, os::unix::net::UnixListener, thread, time::Duration};

use criterion::Criterion;
use testkit::Sandbox;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{
    Request, Response, Status,
    transport::{Channel, Server},
};
use uring_csi::{
    internals::Endpoint,
    proto::csi::{
        GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest,
        GetPluginInfoResponse, NodeGetVolumeStatsRequest, ProbeRequest, ProbeResponse,
        identity_client::IdentityClient,
        identity_server::{Identity, IdentityServer},
    },
};

use crate::rig::{Rig, timed};

const FRESH: &str = "stats on a new connection";
const KEPT: &str = "stats on a kept connection";
const FIRST: &str = "first call of a connection";

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
        rig.runtime.block_on(rig.call_for_nothing());
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
    let pid = rig.node.pid();
    let case = "NodeGetVolumeStats's CPU time, to GetPluginInfo's";
    rig.compare(
        case,
        || cpu_time_of(pid, &mut stats),
        || cpu_time_of(pid, &mut info),
    );
    rig.runtime.block_on(rig.node.down(&volume, "pod"));
}

/// What a process spends on a hundred calls.
pub fn cpu_time_of(pid: u32, mut call: impl FnMut()) -> Duration {
    let before = cpu_time(pid);
    (0..100).for_each(|_| call());
    cpu_time(pid).saturating_sub(before)
}

/// The CPU time of the process's threads, which do not end meanwhile.
fn cpu_time(pid: u32) -> Duration {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("procfs");
    let of_one = |thread: io::Result<fs::DirEntry>| {
        let stat = fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        stat.split(' ').next()?.parse::<u64>().ok()
    };
    Duration::from_nanos(threads.filter_map(of_one).sum())
}

/// Connect and Probe, at the agent and at a service of tonic's that does nothing else.
pub fn first(criterion: &mut Criterion, rig: &Rig) {
    let empty = serve_nothing(&rig.sandbox);
    let probe = |channel: Channel| {
        let mut client = IdentityClient::new(channel);
        let answer = client.probe(ProbeRequest {});
        rig.runtime.block_on(answer).expect("an answer");
    };
    let mut group = criterion.benchmark_group(FIRST);
    rig.measure(&mut group, FIRST, "empty service", || {
        probe(empty.channel());
    });
    rig.measure(&mut group, FIRST, "agent", || probe(rig.node.channel()));
    group.finish();
    let agent = || timed(|| probe(rig.node.channel()));
    let base = || timed(|| probe(empty.channel()));
    let case = "Probe on a new connection, to an empty service of tonic";
    rig.compare(case, agent, base);
}

/// Starts the empty service on a thread of its own, for as long as this process lives.
fn serve_nothing(sandbox: &Sandbox) -> Endpoint {
    let socket = sandbox.dir().join("empty.sock");
    let listener = UnixListener::bind(&socket).expect("a socket");
    listener.set_nonblocking(true).expect("a socket");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    thread::spawn(move || {
        runtime.block_on(async {
            let listener = tokio::net::UnixListener::from_std(listener).expect("a socket");
            let server = Server::builder().add_service(IdentityServer::new(Empty));
            let incoming = UnixListenerStream::new(listener);
            server
                .serve_with_incoming(incoming)
                .await
                .expect("a server");
        });
    });
    let address = format!("unix://{}", socket.display());
    address.parse().expect("an endpoint")
}

struct Empty;

#[tonic::async_trait]
impl Identity for Empty {
    async fn get_plugin_info(
        &self,
        _: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        Ok(Response::new(GetPluginInfoResponse::default()))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        Ok(Response::new(GetPluginCapabilitiesResponse::default()))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        Ok(Response::new(ProbeResponse::default()))
    }
}
