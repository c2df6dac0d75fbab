//! What the metrics tell of volumes, pools and calls.

use std::fs;

use testkit::{
    Controller, ControllerSetup, MIB, Node, NodeSetup, Sandbox, Supervisor, Volume, claim,
    eventually, free_port, refused, run, story,
};
use tonic::Code::{FailedPrecondition, NotFound};
use uring_csi::proto::holder::{ReattachRequest, UnmapRequest, holder_client::HolderClient};

use crate::observability::get;

/// The metrics of an agent.
pub struct Scrape(u16);

impl Scrape {
    pub fn new() -> Self {
        Self(free_port())
    }

    pub fn arg(&self) -> String {
        format!("--metrics-listen=127.0.0.1:{}", self.0)
    }

    /// The value of a series, with the labels in their order; `None` where it is absent.
    pub fn value(&self, series: &str) -> Option<f64> {
        let text = get(self.0, "/metrics").ok()?;
        let mut lines = text.lines().filter_map(|line| line.strip_prefix(series));
        lines.find_map(|value| value.strip_prefix(' ')?.parse().ok())
    }

    pub async fn becomes(&self, series: &str, fits: impl Fn(f64) -> bool) {
        eventually(&format!("{series} fits"), async || {
            self.value(series).filter(|value| fits(*value)).map(drop)
        })
        .await;
    }
}

async fn node(sandbox: &Sandbox) -> (Node, Scrape) {
    let scrape = Scrape::new();
    let setup = NodeSetup::new(sandbox).arg(&scrape.arg());
    (Node::start_with(sandbox, setup).await, scrape)
}

#[test]
fn formats_and_checks_are_counted_by_outcome() {
    story(async |sandbox| {
        let (node, scrape) = node(sandbox).await;
        let outcomes = || {
            let of = |program, outcome| {
                let series = format!("uring_csi_{program}_total{{outcome=\"{outcome}\"}}");
                scrape.value(&series)
            };
            [
                of("mkfs", "formatted"),
                of("mkfs", "refused"),
                of("fsck", "repaired"),
                of("fsck", "uncorrected"),
            ]
        };
        let counts = |counts: [i32; 4]| counts.map(|count| Some(f64::from(count)));
        let volume = sandbox.volume("v", "ext4");
        scrape.becomes("uring_csi_ready", |value| value > 0.0).await;
        assert_eq!(outcomes(), counts([0, 0, 0, 0]));
        node.up(&volume, "pod").await;
        node.down(&volume, "pod").await;
        assert_eq!(outcomes(), counts([1, 0, 0, 0]));

        let image = sandbox.image(&volume);
        let debugfs = |request| run(&["debugfs", "-w", "-R", request, image.to_str().unwrap()]);
        debugfs("ssv state 2");
        node.up(&volume, "pod").await;
        node.down(&volume, "pod").await;
        assert_eq!(outcomes(), counts([1, 0, 1, 0]));
        let failures = "uring_csi_step_failures_total{step=\"fsck\",backend=\"loop\"}";
        assert_eq!(scrape.value(failures), Some(0.0));
        debugfs("clri <2>");
        debugfs("ssv state 2");
        refused(node.stage(&volume).await, FailedPrecondition, &[]);
        assert_eq!(outcomes(), counts([1, 0, 1, 1]));
        assert_eq!(scrape.value(failures), Some(1.0));

        let swap = sandbox.volume("swap", "ext4");
        run(&["mkswap", sandbox.image(&swap).to_str().unwrap()]);
        refused(node.stage(&swap).await, FailedPrecondition, &["swap"]);
        assert_eq!(outcomes(), counts([1, 1, 1, 1]));
        node.assert_clean().await;
    });
}

#[test]
fn volumes_are_counted_by_condition() {
    story(async |sandbox| {
        let (node, scrape) = node(sandbox).await;
        let volumes = ["one", "other"].map(|name| sandbox.volume(name, "ext4"));
        for volume in &volumes {
            node.up(volume, "pod").await;
        }
        let deleted = "uring_csi_volume_conditions{reason=\"ImageDeleted\"}";
        scrape.becomes(deleted, |count| count < 1.0).await;
        for volume in &volumes {
            fs::remove_file(sandbox.image(volume)).unwrap();
        }
        scrape.becomes(deleted, |count| count > 1.0).await;
        let not_mounted = "uring_csi_volume_conditions{reason=\"NotMounted\"}";
        assert_eq!(scrape.value(not_mounted), Some(0.0));
        for volume in &volumes {
            node.down(volume, "pod").await;
        }
        scrape.becomes(deleted, |count| count < 1.0).await;
        node.assert_clean().await;
    });
}

#[test]
fn a_hung_file_system_is_a_condition_and_delays_no_scrape() {
    story(async |sandbox| {
        let (node, scrape) = node(sandbox).await;
        let [hung, other] = ["hung", "other"].map(|name| sandbox.volume(name, "ext4"));
        let held = node.hold("statfs", "hung");
        for volume in [&hung, &other] {
            node.up(volume, "pod").await;
        }
        let stuck = "uring_csi_volume_conditions{reason=\"FileSystemStuck\"}";
        scrape.becomes(stuck, |count| count > 0.0).await;
        assert_eq!(scrape.value(stuck), Some(1.0));
        drop(held);
        scrape.becomes(stuck, |count| count < 1.0).await;
        for volume in [&hung, &other] {
            node.down(volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn a_call_is_in_flight_until_its_caller_cancels_it() {
    story(async |sandbox| {
        let (node, scrape) = node(sandbox).await;
        let volume = sandbox.volume("v", "ext4");
        let held = node.hold("mount", "v");
        let of_stage = |what: &str| format!("uring_csi_{what}{{method=\"NodeStageVolume\"}}");
        let (in_flight, oldest) = (
            of_stage("calls_in_flight"),
            of_stage("oldest_call_age_seconds"),
        );
        tokio::select! {
            answer = node.stage(&volume) => panic!("it is held: {answer:?}"),
            () = async {
                scrape.becomes(&in_flight, |count| count > 0.0).await;
                scrape.becomes(&oldest, |age| age > 0.0).await;
            } => {}
        }
        scrape.becomes(&in_flight, |count| count < 1.0).await;
        assert_eq!(scrape.value(&oldest), Some(0.0));
        let cancelled = "uring_csi_calls_total{method=\"NodeStageVolume\",code=\"CANCELLED\"}";
        assert_eq!(scrape.value(cancelled), Some(1.0));
        drop(held);
        node.up(&volume, "pod").await;
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
#[allow(clippy::cast_precision_loss)]
fn a_pool_has_no_numbers_while_it_is_away() {
    story(async |sandbox| {
        let scrape = Scrape::new();
        let mut setup = ControllerSetup::new(sandbox);
        setup.args.push(scrape.arg());
        let controller = Controller::start_with(sandbox, setup).await;
        let of_pool = |what| format!("uring_csi_pool_{what}_bytes{{pool=\"main\"}}");
        let promised = of_pool("promised");
        scrape.becomes(&promised, |bytes| bytes < 1.0).await;
        let capability = Volume::filesystem("any", "ext4").capability;
        let request = claim("c", "main", &capability, 64 * MIB);
        let made = controller.create(request).await.unwrap();
        let all = 64.0 * MIB as f64;
        scrape
            .becomes(&promised, |bytes| (bytes - all).abs() < 1.0)
            .await;
        let [size, free] = ["size", "free"].map(|what| scrape.value(&of_pool(what)).unwrap());
        assert!(0.0 < free && free <= size, "{free} of {size}");

        let pool = sandbox.pool("main");
        let away = pool.with_extension("away");
        fs::rename(&pool, &away).unwrap();
        scrape.becomes(&promised, f64::is_nan).await;
        scrape.becomes("uring_csi_ready", |value| value < 1.0).await;
        fs::rename(&away, &pool).unwrap();
        scrape.becomes(&promised, |bytes| bytes > 0.0).await;
        controller.delete(&made.volume_id).await.unwrap();
        scrape.becomes(&promised, |bytes| bytes < 1.0).await;
    });
}

#[test]
fn the_supervisor_counts_calls_and_volumes() {
    story(async |sandbox| {
        let scrape = Scrape::new();
        let supervisor = Supervisor::start_with(sandbox, &[scrape.arg()]).await;
        scrape.becomes("uring_csi_ready", |value| value > 0.0).await;
        let mut client = HolderClient::new(supervisor.channel());
        let volume_id = "v".to_owned();
        let unknown = ReattachRequest {
            volume_id: volume_id.clone(),
            ..Default::default()
        };
        refused(client.reattach(unknown).await, NotFound, &["no record"]);
        client.unmap(UnmapRequest { volume_id }).await.unwrap();
        let calls = |method, code| {
            scrape.value(&format!(
                "uring_csi_calls_total{{method=\"{method}\",code=\"{code}\"}}"
            ))
        };
        assert_eq!(calls("Reattach", "NOT_FOUND"), Some(1.0));
        assert_eq!(calls("Unmap", "OK"), Some(1.0));
        assert_eq!(calls("Map", "OK"), Some(0.0));
        // The start of the supervisor asks for it.
        assert_eq!(calls("List", "OK"), None);
        for state in ["served", "keyless", "unserved"] {
            let series = format!("uring_csi_supervised_volumes{{state=\"{state}\"}}");
            assert_eq!(scrape.value(&series), Some(0.0), "{state}");
        }
        let failed = "uring_csi_daemon_restarts_total{reason=\"ended\",result=\"failed\"}";
        assert_eq!(scrape.value(failed), Some(0.0));
    });
}
