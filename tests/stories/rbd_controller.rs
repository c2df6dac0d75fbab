//! The controller and a Ceph cluster: the sidecars' calls for volumes that are RBD images.
//! Nothing is attached, so no kernel with rbd is needed.

use std::{
    collections::{BTreeSet, HashMap},
    fs::{self, File},
    io::{BufRead as _, BufReader},
    net::TcpListener,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use testkit::{
    Controller, ControllerSetup, MIB, Sandbox, TestCluster, Volume, claim, eventually,
    from_snapshot, from_volume, program, refused, refused_by_monitor, request, run, run_err, story,
};
use tonic::{
    Code::{
        AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, OutOfRange, Unauthenticated,
        Unavailable,
    },
    metadata::MetadataValue,
};
use uring_csi::proto::csi::{
    ControllerGetCapabilitiesRequest, ControllerGetVolumeRequest, ControllerModifyVolumeRequest,
    CreateVolumeRequest, GetCapacityRequest, ListSnapshotsRequest, ListVolumesRequest,
    ValidateVolumeCapabilitiesRequest, controller_service_capability,
    controller_service_capability::rpc::Type as Rpc,
};

use crate::metrics::Scrape;

mod addons;
mod classes;
mod crashes;
mod exits;
mod fencing;
mod groups;
mod orphans;
mod replication;
mod takeover;

const GIB: u64 = 1 << 30;
/// The cluster's id in the configuration.
const CEPH: &str = "ceph";

/// A pool of its own in the cluster of all tests, and a controller's configuration for it.
struct Ceph {
    cluster: TestCluster,
    pool: String,
    config: PathBuf,
}

impl Ceph {
    /// None where Ceph is not installed.
    fn new(sandbox: &Sandbox) -> Option<Self> {
        Some(Self::over(sandbox, TestCluster::shared()?))
    }

    fn over(sandbox: &Sandbox, cluster: TestCluster) -> Self {
        let config = sandbox.dir().join("config.json");
        let ceph = Self {
            pool: cluster.fresh_pool(),
            cluster,
            config,
        };
        ceph.configure(&[(CEPH, &ceph.cluster.monitors)]);
        ceph
    }

    /// Writes the list of clusters.
    fn configure(&self, clusters: &[(&str, &[String])]) {
        let entry = |(id, monitors): &(&str, &[String])| serde_json::json!({"clusterID": id, "monitors": monitors});
        let entries: Vec<_> = clusters.iter().map(entry).collect();
        fs::write(&self.config, serde_json::json!(entries).to_string()).expect("a file");
    }

    fn secrets(&self) -> HashMap<String, String> {
        let (user, key) = (self.cluster.user.clone(), self.cluster.key.clone());
        HashMap::from([("userID".to_owned(), user), ("userKey".to_owned(), key)])
    }

    /// For a controller of this cluster alone, whose calls carry secrets.
    fn setup(&self, sandbox: &Sandbox) -> ControllerSetup {
        let mut setup = ControllerSetup::new(sandbox);
        setup.pools.clear();
        setup.args = vec![
            "--ceph-config".to_owned(),
            self.config.display().to_string(),
        ];
        setup.secrets = self.secrets();
        setup
    }

    /// The option that gives a controller secrets of its own.
    fn own_secret(&self, sandbox: &Sandbox) -> [String; 2] {
        let dir = sandbox.dir().join("secret");
        fs::create_dir_all(&dir).expect("a directory");
        for (name, value) in self.secrets() {
            fs::write(dir.join(name), value).expect("a file");
        }
        ["--ceph-secret".to_owned(), dir.display().to_string()]
    }

    /// A CreateVolume for a raw block device.
    fn claim(&self, name: &str, bytes: u64) -> CreateVolumeRequest {
        let block = Volume::block("any").capability;
        let mut request = claim(name, &self.pool, &block, bytes);
        request
            .parameters
            .insert("clusterID".to_owned(), CEPH.to_owned());
        request
    }

    fn rados(&self, args: &[&str]) -> String {
        self.cluster.rados(&self.pool, args)
    }

    /// The output of `rbd info` for an image.
    fn info(&self, image: &str) -> serde_json::Value {
        let said = self.cluster.rbd(&["info", "--format", "json", image]);
        serde_json::from_str(&said).expect("JSON")
    }

    fn pool_id(&self) -> i64 {
        let said = self
            .cluster
            .ceph(&["osd", "pool", "stats", &self.pool, "-f", "json"]);
        let said: serde_json::Value = serde_json::from_str(&said).expect("JSON");
        said[0]["pool_id"].as_i64().expect("a pool's id")
    }

    fn images(&self) -> BTreeSet<String> {
        let listed = self.cluster.rbd(&["ls", &self.pool]);
        listed.lines().map(str::to_owned).collect()
    }

    /// A process that has an image open for writing, as a node that has it mapped.
    fn user_of(&self, image: &str) -> ImageUser {
        const SCRIPT: &str = "\
import rados, rbd, sys
cluster = rados.Rados(conffile=sys.argv[1], name='client.admin')
cluster.connect()
image = rbd.Image(cluster.open_ioctx(sys.argv[2]), sys.argv[3])
print('open', flush=True)
sys.stdin.read()
image.close()
";
        let mut python = Command::new("setpriv")
            .args([
                "--pdeathsig",
                "KILL",
                "--",
                "/usr/bin/python3",
                "-c",
                SCRIPT,
            ])
            .arg(self.cluster.dir().join("ceph.conf"))
            .args([&self.pool, image])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("setpriv of util-linux");
        let mut line = String::new();
        let said = python.stdout.take().expect("a pipe");
        BufReader::new(said).read_line(&mut line).expect("a line");
        assert_eq!(line, "open\n");
        ImageUser(python)
    }
}

/// Closes the image when this is dropped.
struct ImageUser(Child);

impl Drop for ImageUser {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// All volumes, three at a time.
async fn listed(controller: &Controller) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    let mut starting_token = String::new();
    loop {
        let message = ListVolumesRequest {
            max_entries: 3,
            starting_token,
        };
        let answer = controller.client().list_volumes(message).await.unwrap();
        let page = answer.into_inner();
        assert!(page.entries.len() <= 3);
        for entry in page.entries {
            assert!(all.insert(entry.volume.expect("a volume").volume_id));
        }
        if page.next_token.is_empty() {
            return all;
        }
        starting_token = page.next_token;
    }
}

async fn capabilities(controller: &Controller) -> Vec<Rpc> {
    let message = ControllerGetCapabilitiesRequest {};
    let mut client = controller.client();
    let can = client.controller_get_capabilities(message).await.unwrap();
    let can = can.into_inner().capabilities;
    can.into_iter()
        .filter_map(|capability| match capability.r#type? {
            controller_service_capability::Type::Rpc(rpc) => Some(rpc.r#type()),
        })
        .collect()
}

#[test]
fn a_name_is_one_image_for_its_whole_life() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let controller = Controller::start_with(sandbox, ceph.setup(sandbox)).await;
        let create = async || controller.create(ceph.claim("pvc-1", 100 * MIB)).await;
        let made = join_all((0..32).map(|_| create())).await;
        let first = made[0].clone().unwrap();
        assert!(made.into_iter().all(|one| one.unwrap() == first));
        assert_eq!(ceph.images().len(), 1);
        assert!(first.volume_id.starts_with("0001-0004-ceph-"));
        let context = &first.volume_context;
        assert_eq!(context["clusterID"], CEPH);
        assert_eq!(context["pool"], ceph.pool);
        assert!(ceph.images().contains(&context["imageName"]));

        let larger = controller.create(ceph.claim("pvc-1", GIB)).await;
        refused(larger, AlreadyExists, &["pvc-1", "104857600"]);
        let grown = controller.expand(&first.volume_id, GIB + 1).await;
        assert_eq!(grown.unwrap(), (i64::try_from(2 * GIB).unwrap(), true));
        let beyond = controller.expand(&first.volume_id, i64::MAX.unsigned_abs());
        refused(beyond.await, OutOfRange, &[]);

        let snapshot = controller.snapshot(&first.volume_id, "snap").await.unwrap();
        let again = controller.snapshot(&first.volume_id, "snap").await.unwrap();
        assert_eq!(again, snapshot);
        let mut copies = Vec::new();
        for source in [
            from_snapshot(&snapshot.snapshot_id),
            from_volume(&first.volume_id),
        ] {
            let mut copy = ceph.claim(&format!("copy{}", copies.len()), 2 * GIB);
            copy.volume_content_source = Some(source.clone());
            let copy = controller.create(copy).await.unwrap();
            assert_eq!(copy.content_source, Some(source));
            copies.push(copy.volume_id);
        }

        let source = controller.delete(&first.volume_id).await;
        source.expect("copies do not need their source");
        controller.delete(&first.volume_id).await.expect("deleted");
        let expanded = controller.expand(&first.volume_id, GIB).await;
        refused(expanded, NotFound, &[&first.volume_id]);
        for _ in 0..2 {
            let deleted = controller.delete_snapshot(&snapshot.snapshot_id).await;
            deleted.unwrap();
        }
        for copy in &copies {
            controller.delete(copy).await.unwrap();
        }
        assert_eq!(ceph.images(), BTreeSet::new());
        let new = create().await.unwrap();
        assert_ne!(new.volume_id, first.volume_id);
        controller.delete(&new.volume_id).await.unwrap();
        let image = &new.volume_context["imageName"];
        let trash = || ceph.cluster.rbd(&["trash", "ls", "--all", &ceph.pool]);
        let removed = async || (!trash().contains(image)).then_some(());
        eventually("the trash is emptied", removed).await;
        assert!(!controller.log().contains(&ceph.cluster.key));
    });
}

#[test]
fn calls_without_secrets_use_the_controller_s_own() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let mut setup = ceph.setup(sandbox);
        let able = Controller::start_with(sandbox, setup).await;
        let can = capabilities(&able).await;
        assert!(can.contains(&Rpc::ModifyVolume) && can.contains(&Rpc::CloneVolume));
        assert!(
            !can.contains(&Rpc::ListVolumes),
            "it has no secrets: {can:?}"
        );
        able.terminate();
        able.wait_for_exit().await;

        // Both kinds of volumes, and an instance of its own, so that the volumes of other
        // tests are not listed.
        setup = ceph.setup(sandbox);
        setup.pools = ControllerSetup::new(sandbox).pools;
        setup.args.extend(ceph.own_secret(sandbox));
        setup
            .args
            .extend(["--instance-id".to_owned(), ceph.pool.clone()]);
        setup.secrets.clear();
        let controller = Controller::start_with(sandbox, setup).await;
        let can = capabilities(&controller).await;
        for expected in [
            Rpc::ListVolumes,
            Rpc::ListSnapshots,
            Rpc::GetCapacity,
            Rpc::GetVolume,
        ] {
            assert!(can.contains(&expected), "{expected:?} is not in {can:?}");
        }
        let block = Volume::block("any").capability;
        let mut made = BTreeSet::new();
        for number in 0..4 {
            let name = format!("v{number}");
            for request in [claim(&name, "main", &block, MIB), ceph.claim(&name, MIB)] {
                made.insert(controller.create(request).await.unwrap().volume_id);
            }
        }
        assert_eq!(listed(&controller).await, made);
        let mut snapshots = BTreeSet::new();
        for id in &made {
            let taken = controller.snapshot(id, &format!("of {id}")).await.unwrap();
            snapshots.insert(taken.snapshot_id);
        }
        let mut client = controller.client();
        let all = client.list_snapshots(ListSnapshotsRequest::default());
        let all = all.await.unwrap().into_inner().entries;
        let all = all
            .into_iter()
            .map(|entry| entry.snapshot.unwrap().snapshot_id);
        assert_eq!(all.collect::<BTreeSet<_>>(), snapshots);

        let handle = made.first().expect("a volume").clone();
        let found = client.controller_get_volume(ControllerGetVolumeRequest {
            volume_id: handle.clone(),
        });
        let found = found.await.unwrap().into_inner().volume.unwrap();
        assert_eq!(found.capacity_bytes, i64::try_from(MIB).unwrap());
        let limits = [("rbd_qos_read_iops_limit".to_owned(), "100".to_owned())];
        let modify = client.controller_modify_volume(ControllerModifyVolumeRequest {
            volume_id: handle.clone(),
            mutable_parameters: limits.into(),
            ..Default::default()
        });
        modify.await.unwrap();
        let image = format!("{}/{}", ceph.pool, found.volume_context["imageName"]);
        let metadata = ceph.cluster.rbd(&["image-meta", "ls", &image]);
        assert!(
            metadata.contains("rbd_qos_read_iops_limit  100"),
            "{metadata}"
        );
        let validated = client.validate_volume_capabilities(ValidateVolumeCapabilitiesRequest {
            volume_id: handle,
            volume_capabilities: vec![block],
            ..Default::default()
        });
        assert!(validated.await.unwrap().into_inner().confirmed.is_some());
        // external-provisioner sends those of a class, a caller of CSI may send none.
        for parameters in [ceph.claim("any", 0).parameters, HashMap::new()] {
            has_capacity(&controller, parameters).await;
        }
        for id in &snapshots {
            controller.delete_snapshot(id).await.unwrap();
        }
        for id in &made {
            controller.delete(id).await.unwrap();
        }
        assert_eq!(listed(&controller).await, BTreeSet::new());
    });
}

/// Waits until there is some: the manager counts a new pool after a moment.
async fn has_capacity(controller: &Controller, parameters: HashMap<String, String>) {
    let capacity = async || {
        let parameters = parameters.clone();
        let message = GetCapacityRequest {
            parameters,
            ..Default::default()
        };
        match controller.client().get_capacity(message).await {
            Ok(answer) => Some(answer.into_inner().available_capacity).filter(|n| *n > 0),
            Err(status) => {
                assert_eq!(status.code(), Unavailable, "{status}");
                None
            }
        }
    };
    eventually("there is room", capacity).await;
}

#[test]
fn invalid_parameters_are_named_and_secrets_are_not() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let mut controller = Controller::start_with(sandbox, ceph.setup(sandbox)).await;
        for (name, value, word) in [
            ("clusterID", "other", "other"),
            ("clusterID", "", "clusterID"),
            ("pool", "none", "none"),
            ("pool", "", "pool"),
            ("dataPool", "none", "none"),
            ("imageFeatures", "layering,colour", "imageFeatures"),
            ("objectSize", "3", "objectSize"),
            ("stripeUnit", "4096", "stripeCount"),
            ("mounter", "fuse", "mounter"),
            ("integrityMode", "hmac-sha256", "integrityMode"),
            ("encrypted", "true", "encryptionPassphrase"),
        ] {
            let mut request = ceph.claim("wrong", MIB);
            request.parameters.insert(name.to_owned(), value.to_owned());
            let answer = controller.create(request).await;
            refused(answer, InvalidArgument, &[word]);
        }
        // The error for another backend's class names the missing option.
        let block = Volume::block("any").capability;
        let of_a_pool = controller.create(claim("v", "main", &block, MIB)).await;
        refused(of_a_pool, InvalidArgument, &["--pool"]);
        let of_a_pool = "vol.shared.main.00000000-0000-0000-0000-000000006f1c";
        refused(
            controller.delete(of_a_pool).await,
            FailedPrecondition,
            &["--pool"],
        );

        let made = controller.create(ceph.claim("right", MIB)).await.unwrap();
        let right = std::mem::take(&mut controller.secrets);
        let without = controller.delete(&made.volume_id).await;
        refused(without, FailedPrecondition, &["--ceph-secret"]);
        let wrong_key = ceph.cluster.admin_key.clone();
        controller.secrets = right.clone();
        controller
            .secrets
            .insert("userKey".to_owned(), wrong_key.clone());
        for answer in [
            refused_by_monitor(async || controller.delete(&made.volume_id).await).await,
            refused_by_monitor(async || {
                let claim = ceph.claim("v", MIB);
                controller.create(claim).await.map(drop)
            })
            .await,
        ] {
            let said = format!("{answer:?}");
            assert!(!said.contains(&wrong_key), "{said}");
            refused(answer, Unauthenticated, &["the cluster at"]);
        }
        controller
            .secrets
            .insert("userKey".to_owned(), "rubbish".to_owned());
        let answer = controller.delete(&made.volume_id).await;
        refused(answer, InvalidArgument, &["userKey"]);
        controller.secrets = right;
        controller.delete(&made.volume_id).await.unwrap();
        assert_eq!(ceph.images(), BTreeSet::new());
        let log = controller.log();
        for secret in [&wrong_key, &ceph.cluster.key, "rubbish"] {
            assert!(!log.contains(secret), "a secret is in the log");
        }
    });
}

#[test]
fn a_dead_cluster_times_out_and_delays_no_other() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        // It accepts connections, and sends nothing.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = silent.local_addr().unwrap().to_string();
        let monitors = &ceph.cluster.monitors;
        ceph.configure(&[(CEPH, monitors), ("dead", std::slice::from_ref(&address))]);
        let mut setup = ceph.setup(sandbox);
        setup.args.extend(ceph.own_secret(sandbox));
        let scrape = Scrape::new();
        setup.args.push(scrape.arg());
        let controller = Controller::start_with(sandbox, setup).await;
        let mut of_the_dead = ceph.claim("dead", MIB);
        of_the_dead
            .parameters
            .insert("clusterID".to_owned(), "dead".to_owned());
        let begun = Instant::now();
        let (dead, live) = tokio::join!(
            async {
                let answer = controller.create(of_the_dead).await;
                (answer, begun.elapsed())
            },
            async {
                let made = controller.create(ceph.claim("live", MIB)).await.unwrap();
                controller.delete(&made.volume_id).await.unwrap();
                begun.elapsed()
            }
        );
        refused(dead.0, Unavailable, &[&address]);
        assert!(
            live < dead.1 && dead.1 < Duration::from_secs(60),
            "{live:?}, {:?}",
            dead.1
        );
        for (id, reachable) in [(CEPH, 1.0), ("dead", 0.0)] {
            let series = format!("uring_csi_ceph_cluster_reachable{{cluster_id=\"{id}\"}}");
            assert_eq!(scrape.value(&series), Some(reachable), "{id}");
        }
        scrape
            .becomes("uring_csi_ceph_trash_images", |count| count < 1.0)
            .await;
        // Kubernetes must not restart the controller for that.
        assert_eq!(controller.probe().await, Some(true));
    });
}

#[test]
fn an_incomplete_list_names_the_dead_cluster() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = silent.local_addr().unwrap().to_string();
        let monitors = &ceph.cluster.monitors;
        ceph.configure(&[(CEPH, monitors), ("dead", std::slice::from_ref(&address))]);
        let mut setup = ceph.setup(sandbox);
        setup.args.extend(ceph.own_secret(sandbox));
        let controller = Controller::start_with(sandbox, setup).await;
        let made = controller.create(ceph.claim("live", MIB)).await.unwrap();
        let mut what = request(ListVolumesRequest::default(), Duration::from_secs(60));
        let yes = MetadataValue::from_static("1");
        what.metadata_mut().insert("uring-csi-takes-less", yes);
        let page = controller.client().list_volumes(what).await.unwrap();
        let omitted = page.metadata().get_bin("uring-csi-omitted-bin").unwrap();
        let omitted = omitted.to_bytes().unwrap();
        let omitted = String::from_utf8_lossy(&omitted);
        assert!(omitted.contains("\"dead\""), "{omitted}");
        let entries = page.into_inner().entries;
        let mut ids = entries
            .iter()
            .flat_map(|it| &it.volume)
            .map(|it| &it.volume_id);
        assert!(ids.any(|id| *id == made.volume_id), "{entries:?}");
        // A sidecar would take a missing volume for deleted.
        let what = request(ListVolumesRequest::default(), Duration::from_secs(60));
        let answer = controller.client().list_volumes(what).await;
        refused(answer, Unavailable, &[&address]);
        controller.delete(&made.volume_id).await.unwrap();
    });
}

#[test]
fn an_image_in_use_is_not_deleted() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let controller = Controller::start_with(sandbox, ceph.setup(sandbox)).await;
        let made = controller.create(ceph.claim("used", MIB)).await.unwrap();
        let image = &made.volume_context["imageName"];
        let user = ceph.user_of(image);
        let answer = controller.delete(&made.volume_id).await;
        refused(answer, FailedPrecondition, &[image, "127."]);
        assert_eq!(ceph.images().len(), 1);
        drop(user);
        controller.delete(&made.volume_id).await.unwrap();
    });
}

#[test]
fn a_controller_without_storage_or_libraries_names_what_is_missing() {
    story(async |sandbox| {
        let controller = program("uring-csi-controller").display().to_string();
        let endpoint = format!("--endpoint=unix://{}/c.sock", sandbox.dir().display());
        let said = run_err(&[&controller, &endpoint]).unwrap_err();
        assert!(
            said.contains("--pool") && said.contains("--ceph-config"),
            "{said}"
        );

        let linked = run(&["ldd", &controller]);
        assert!(!linked.contains("librados"), "{linked}");
        let found = run_err(&["ldconfig", "-p"]).unwrap_or_default();
        let library = found
            .lines()
            .find(|line| line.contains("librados.so.2"))
            .and_then(|line| line.split(" => ").nth(1));
        // In the story's own mount namespace.
        if let Some(library) = library {
            let empty = sandbox.dir().join("empty");
            File::create(&empty).expect("a file");
            run_err(&["mount", "--bind", &empty.display().to_string(), library]).unwrap();
        }
        let said =
            run_err(&[&controller, &endpoint, "--ceph-config=/etc/config.json"]).unwrap_err();
        assert!(said.contains("install the package librados2"), "{said}");
    });
}
