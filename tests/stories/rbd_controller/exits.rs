//! Processes with librados loaded exit with the right code, also while its threads work: no
//! exit handler of librados or OpenSSL frees memory that they still use.

use std::{
    env,
    io::Write as _,
    process::{Child, Command, Stdio},
    time::Duration,
};

use futures_util::future::join3;
use testkit::{Controller, MIB, Rng, program, story};

use super::{CEPH, Ceph};

/// How often each process ends; `ENDS` makes it more.
fn ends() -> usize {
    env::var("ENDS").map_or(10, |ends| ends.parse().expect("a number"))
}

/// Keeps the machine's CPUs busy until it is dropped.
struct Load(Vec<Child>);

impl Load {
    fn new() -> Self {
        let busy = || {
            Command::new("setpriv")
                .args([
                    "--pdeathsig",
                    "KILL",
                    "--",
                    "sh",
                    "-c",
                    "while :; do :; done",
                ])
                .spawn()
                .expect("setpriv of util-linux")
        };
        Self((0..4).map(|_| busy()).collect())
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// It is stopped amid its first connections: its own, for the trash, and those of calls, by
/// both versions of the protocol.
#[test]
fn a_controller_exits_cleanly_whatever_its_connections_do() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        ceph.configure(&[
            (CEPH, &ceph.cluster.monitors),
            ("second", &ceph.cluster.monitors_v2),
        ]);
        let mut setup = ceph.setup(sandbox);
        setup.args.extend(ceph.own_secret(sandbox));
        let own_volumes = ["--instance-id".to_owned(), ceph.pool.clone()];
        setup.args.extend(own_volumes);
        let controller = Controller::start_with(sandbox, setup).await;
        let mut rng = Rng::new();
        let _load = Load::new();
        let create = |cluster: &str| {
            let mut request = ceph.claim(&format!("of {cluster}"), MIB);
            let parameters = &mut request.parameters;
            parameters.insert("clusterID".to_owned(), cluster.to_owned());
            controller.create(request)
        };
        for end in 0..ends() {
            let shutdown = async {
                tokio::time::sleep(Duration::from_millis(rng.below(200) as u64)).await;
                controller.terminate();
            };
            // Late calls are refused.
            let _ = join3(create(CEPH), create("second"), shutdown).await;
            let status = controller.wait_for_exit().await;
            assert!(status.success(), "end {end}: {status}");
            controller.start().await;
        }
        for cluster in [CEPH, "second"] {
            create(cluster).await.unwrap();
        }
    });
}

/// The child of the process that keeps rbd-nbd, which registers its clients for fencing, and
/// blocklists those of the dead.
#[test]
fn the_supervisors_child_exits_cleanly() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let name = format!("ends-{}", uuid::Uuid::new_v4());
        let image = format!("{}/{name}", ceph.pool);
        ceph.cluster.rbd(&["create", "--size", "1M", &image]);
        let key = serde_json::json!({"node_id": "n", "volume": uuid::Uuid::new_v4()});
        let lineage =
            serde_json::json!({"since": uuid::Uuid::new_v4(), "or": null, "is_new": true});
        let register = serde_json::json!({"key": key, "lineage": lineage, "step": "Looks"});
        let orders = [
            (serde_json::json!({"Register": register}), "Unpublished"),
            // Of nobody.
            (serde_json::json!({"Blocklist": [-1]}), "NotThere"),
        ];
        let _load = Load::new();
        for end in 0..ends() {
            for (task, answer) in &orders {
                let order = serde_json::json!({
                    "image": {"cluster_id": CEPH, "pool": ceph.pool, "name": name},
                    "monitors": ceph.cluster.monitors_v2,
                    "user": ceph.cluster.user,
                    "task": task,
                });
                let mut child = Command::new(program("uring-csi-holder"))
                    .arg("ask-cluster")
                    .stdin(Stdio::piped())
                    .stdout(Stdio::piped())
                    .spawn()
                    .expect("a program of ours");
                let mut input = child.stdin.take().expect("a pipe");
                write!(input, "{order}\n{}", ceph.cluster.key).expect("a reader");
                drop(input);
                let ended = child.wait_with_output().expect("its output");
                assert!(ended.status.success(), "end {end}: {}", ended.status);
                let said = String::from_utf8_lossy(&ended.stdout);
                assert_eq!(said, format!("\"{answer}\"\n"), "end {end}");
            }
        }
        ceph.cluster.rbd(&["rm", &image]);
    });
}
