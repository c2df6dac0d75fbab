//! Volumes and snapshots of ceph-csi: made here by Ceph's own tools, key by key as ceph-csi
//! writes them, then used and deleted under ceph-csi's driver name.

use std::collections::BTreeMap;

use testkit::{Controller, MIB, Sandbox, from_snapshot, from_volume, refused, run, story};
use tonic::Code::{Aborted, Unavailable};
use uring_csi::proto::csi::ListSnapshotsRequest;

use super::{Ceph, GIB};

const VOLUME: &str = "36eaa70e-eb63-11ea-8e79-246e96907f74";
const SNAPSHOT: &str = "5a1f5bd0-ef0a-11ea-9d71-0242ac110003";

impl Ceph {
    fn handle(&self, uuid: &str) -> String {
        format!("0001-0004-ceph-{:016x}-{uuid}", self.pool_id())
    }

    fn spec(&self, image: &str) -> String {
        format!("{}/{image}", self.pool)
    }

    /// The omap of an object, by key.
    fn omap(&self, object: &str) -> BTreeMap<String, String> {
        let keys = self.rados(&["listomapkeys", object]);
        let value = |key: &str| {
            let file = tempfile::NamedTempFile::new().expect("a file");
            let path = file.path().to_str().expect("a path in UTF-8");
            self.rados(&["getomapval", object, key, path]);
            (
                key.to_owned(),
                std::fs::read_to_string(path).expect("a value"),
            )
        };
        keys.lines().map(value).collect()
    }

    fn enter(&self, object: &str, keys: &[(&str, &str)]) {
        for (key, value) in keys {
            self.rados(&["setomapval", object, key, value]);
        }
    }

    /// Makes an object look as if it was changed long ago.
    fn age(&self, object: &str) {
        const CHANGE: &str = "
import rados, sys
conf, pool, name = sys.argv[1:]
with rados.Rados(conffile=conf, name='client.admin') as cluster:
    with cluster.open_ioctx(pool) as io, rados.WriteOpCtx() as change:
        change.new(rados.LIBRADOS_CREATE_IDEMPOTENT)
        io.operate_write_op(change, name, mtime=1)
";
        let conf = self.cluster.dir().join("ceph.conf");
        let conf = conf.to_str().expect("a path in UTF-8");
        // Debian's own interpreter, because python3-rados belongs to it.
        run(&["/usr/bin/python3", "-c", CHANGE, conf, &self.pool, object]);
    }

    /// A volume of 64 MiB and a snapshot of it.
    fn made_by_ceph_csi(&self) {
        let (volume, snapshot) = (format!("csi-vol-{VOLUME}"), format!("csi-snap-{SNAPSHOT}"));
        let (of, image) = (self.spec(&volume), self.spec(&snapshot));
        let rbd = |args: &[&str]| self.cluster.rbd(args);
        let id = |spec: &str| self.info(spec)["id"].as_str().expect("an id").to_owned();
        self.enter("csi.volumes.default", &[("csi.volume.pvc-1", VOLUME)]);
        rbd(&["create", "-s", "64M", "--image-feature", "layering", &of]);
        let keys = [
            ("csi.volname", "pvc-1"),
            ("csi.imagename", &volume),
            ("csi.imageid", &id(&of)),
            ("csi.volume.owner", "tenant"),
        ];
        self.enter(&format!("csi.volume.{VOLUME}"), &keys);

        self.enter("csi.snaps.default", &[("csi.snap.snapshot-1", SNAPSHOT)]);
        let (taken, own) = (format!("{of}@{snapshot}"), format!("{image}@{snapshot}"));
        rbd(&["snap", "create", "--no-progress", &taken]);
        let clone = ["clone", "--rbd-default-clone-format", "2"];
        let features = ["--image-feature", "layering,deep-flatten"];
        rbd(&[&clone[..], &features, &[&taken, &image]].concat());
        rbd(&["snap", "rm", "--no-progress", &taken]);
        rbd(&["snap", "create", "--no-progress", &own]);
        let keys = [
            ("csi.snapname", "snapshot-1"),
            ("csi.imagename", &snapshot),
            ("csi.imageid", &id(&image)),
            ("csi.source", &volume),
        ];
        self.enter(&format!("csi.snap.{SNAPSHOT}"), &keys);
    }

    async fn in_place_of_ceph_csi(&self, sandbox: &Sandbox) -> Controller {
        let mut setup = self.setup(sandbox);
        setup.args.push("--driver-name=rbd.csi.ceph.com".to_owned());
        Controller::start_with(sandbox, setup).await
    }
}

#[test]
fn volumes_made_by_ceph_csi_are_used_and_deleted() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        ceph.made_by_ceph_csi();
        let controller = ceph.in_place_of_ceph_csi(sandbox).await;
        let (volume, snapshot) = (ceph.handle(VOLUME), ceph.handle(SNAPSHOT));

        // The sidecars repeat their calls.
        let again = controller.create(ceph.claim("pvc-1", 64 * MIB)).await;
        assert_eq!(again.unwrap().volume_id, volume);
        let again = controller.snapshot(&volume, "snapshot-1").await.unwrap();
        assert_eq!(again.snapshot_id, snapshot);
        let message = ListSnapshotsRequest {
            snapshot_id: snapshot.clone(),
            secrets: ceph.secrets(),
            ..Default::default()
        };
        let found = controller.client().list_snapshots(message).await.unwrap();
        let found = found.into_inner().entries.remove(0).snapshot.unwrap();
        assert_eq!(found.source_volume_id, volume);
        assert_eq!(ceph.images().len(), 2);

        let mut copies = Vec::new();
        for source in [from_snapshot(&snapshot), from_volume(&volume)] {
            let mut copy = ceph.claim(&format!("copy-{}", copies.len()), 64 * MIB);
            copy.volume_content_source = Some(source);
            copies.push(controller.create(copy).await.unwrap().volume_id);
        }
        let (bytes, _) = controller.expand(&volume, GIB).await.unwrap();
        assert_eq!(u64::try_from(bytes).unwrap(), GIB);
        let newer = controller.snapshot(&volume, "snapshot-2").await.unwrap();

        for handle in [&snapshot, &newer.snapshot_id] {
            controller.delete_snapshot(handle).await.unwrap();
        }
        for handle in copies.iter().chain([&volume]) {
            controller.delete(handle).await.unwrap();
        }
        assert!(ceph.images().is_empty());
        assert!(ceph.omap("csi.volumes.default").is_empty());
        assert!(ceph.omap("csi.snaps.default").is_empty());
        let entries = ceph.rados(&["ls"]);
        let of_an_entry =
            |line: &str| line.starts_with("csi.volume.") || line.starts_with("csi.snap.");
        assert!(!entries.lines().any(of_an_entry), "{entries}");
    });
}

#[test]
fn a_create_that_ceph_csi_began_is_finished() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let controller = ceph.in_place_of_ceph_csi(sandbox).await;
        // It reserves the uuid, then the name; then it was killed.
        ceph.rados(&["create", &format!("csi.volume.{VOLUME}")]);
        ceph.enter("csi.volumes.default", &[("csi.volume.pvc-1", VOLUME)]);
        // It may still be at work.
        let left = controller.create(ceph.claim("pvc-1", MIB)).await;
        refused(left, Aborted, &["ceph-csi", VOLUME]);
        ceph.age(&format!("csi.volume.{VOLUME}"));
        let made = controller.create(ceph.claim("pvc-1", MIB)).await.unwrap();
        assert_eq!(made.volume_id, ceph.handle(VOLUME));
        assert_eq!(ceph.images().len(), 1);
        // The image was removed, its entry was not: garbage, and no error.
        let image = ceph.spec(&format!("csi-vol-{VOLUME}"));
        ceph.cluster.rbd(&["rm", "--no-progress", &image]);
        controller.delete(&made.volume_id).await.unwrap();
        assert!(ceph.omap("csi.volumes.default").is_empty());
    });
}

#[test]
fn created_volumes_are_as_ceph_csi_expects() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let controller = ceph.in_place_of_ceph_csi(sandbox).await;
        let mut request = ceph.claim("pvc-2", 64 * MIB);
        let owner = "csi.storage.k8s.io/pvc/namespace".to_owned();
        request.parameters.insert(owner, "tenant".to_owned());
        let made = controller.create(request).await.unwrap();
        let taken = controller.snapshot(&made.volume_id, "snapshot-2").await;
        let taken = taken.unwrap();
        let uuid_of = |handle: &str| handle[handle.len() - 36..].to_owned();
        let (uuid, of_snapshot) = (uuid_of(&made.volume_id), uuid_of(&taken.snapshot_id));
        assert_eq!(made.volume_id, ceph.handle(&uuid));
        let names = ceph.omap("csi.volumes.default");
        assert_eq!(names["csi.volume.pvc-2"], uuid);
        let entry = ceph.omap(&format!("csi.volume.{uuid}"));
        let image = format!("csi-vol-{uuid}");
        assert_eq!(entry["csi.volname"], "pvc-2");
        assert_eq!(entry["csi.imagename"], image);
        assert_eq!(entry["csi.volume.owner"], "tenant");
        assert_eq!(ceph.info(&ceph.spec(&image))["id"], entry["csi.imageid"]);
        let names = ceph.omap("csi.snaps.default");
        assert_eq!(names["csi.snap.snapshot-2"], of_snapshot);
        let entry = ceph.omap(&format!("csi.snap.{of_snapshot}"));
        assert_eq!(entry["csi.snapname"], "snapshot-2");
        assert_eq!(entry["csi.imagename"], format!("csi-snap-{of_snapshot}"));
        assert_eq!(entry["csi.source"], image);
        assert!(!entry["csi.imageid"].is_empty());
        let own = format!("csi-snap-{of_snapshot}");
        let listed = ceph.cluster.rbd(&["snap", "ls", &ceph.spec(&own)]);
        assert!(listed.contains(&own), "{listed}");
        let of_volume = ceph.cluster.rbd(&["snap", "ls", &ceph.spec(&image)]);
        assert!(of_volume.is_empty(), "{of_volume}");
    });
}

/// The KMS is one that keeps passphrases itself, and that this driver does not know.
#[test]
fn a_delete_names_the_kms_that_keeps_the_passphrase() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let file = sandbox.dir().join("kms.json").display().to_string();
        let mut setup = ceph.setup(sandbox);
        setup.args.push(format!("--kms-config={file}"));
        let controller = Controller::start_with(sandbox, setup).await;
        let made = controller.create(ceph.claim("v", MIB)).await.unwrap();
        let uuid = &made.volume_id[made.volume_id.len() - 36..];
        let kms = [("csi.volume.encryptKMS", "a-vault")];
        ceph.enter(&format!("csi.volume.{uuid}"), &kms);
        // It may not be mounted yet.
        refused(
            controller.delete(&made.volume_id).await,
            Unavailable,
            &[&file],
        );
        std::fs::write(&file, "{}").unwrap();
        controller.delete(&made.volume_id).await.unwrap();
        controller.wait_for_log("a-vault").await;
    });
}
