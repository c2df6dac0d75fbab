//! Ends a controller after each change that it makes in a cluster, as kill -9
//! would, and looks whether the next one's equal calls put everything right.
//!
//! The victim is this test program, started anew for one test with `CRASH_AT`
//! set: see `crash_point`. What is killed within one call of librbd, no test can
//! time; what that leaves is made by hand.

use std::{collections::BTreeSet, env, process::Command, time::Duration};

use super::*;
use crate::Kind as K;

/// Who is at work, and where.
pub(super) struct Party<'a> {
    pub rbd: &'a Stores,
    pub pool: &'a str,
}

impl Party<'_> {
    /// Repeats a call for as long as a dead process still has an image open, or its
    /// lock: Ceph knows its end by its silence.
    pub(super) async fn patiently<T>(
        &self,
        call: impl AsyncFn() -> Result<T, ProvisionError>,
    ) -> T {
        loop {
            match call().await {
                Ok(done) => return done,
                Err(error) if matches!(error.kind(), K::Precondition | K::InUse | K::Transient) => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                Err(error) => panic!("{}", crate::error_chain(&error)),
            }
        }
    }

    /// Copies are of a class that names images by its own prefix, which nothing
    /// but the entry tells.
    async fn volume(&self, name: &str, bytes: u64, source: Option<ContentSource>) -> VolumeInfo {
        let mut new = volume(self.pool, name, bytes);
        if source.is_some() {
            let prefix = ("volumeNamePrefix".to_owned(), "copy-".to_owned());
            new.parameters.extend([prefix]);
        }
        new.source = source;
        self.patiently(async || self.rbd.create_volume(new.clone()).await)
            .await
    }

    /// Makes one of each thing; all of it may have been made before.
    pub(super) async fn make(&self) {
        let source = self.volume("source", 8 * MIB, None).await;
        let new = NewSnapshot {
            name: "snapshot".to_owned(),
            volume: source.handle.clone(),
            parameters: HashMap::from([("snapshotNamePrefix".to_owned(), "taken-".to_owned())]),
            secrets: Secrets::default(),
        };
        let taken = async || self.rbd.create_snapshot(new.clone()).await;
        let snapshot = self.patiently(taken).await;
        for (name, from) in [
            ("restored", ContentSource::Snapshot(snapshot.handle)),
            ("cloned", ContentSource::Volume(source.handle.clone())),
        ] {
            let copy = self.volume(name, 9 * MIB, Some(from)).await;
            assert_eq!(copy.bytes, 9 * MIB);
        }
        let range = Range {
            required: 16 * MIB,
            limit: 0,
        };
        let grow = async || {
            let handle = source.handle.clone();
            self.rbd
                .expand_volume(handle, range, Secrets::default())
                .await
        };
        assert_eq!(self.patiently(grow).await, 16 * MIB);
    }

    /// Deletes all that is still listed. A handle that a crash has left listed
    /// nowhere is deleted by whoever knows it: so those are told.
    pub(super) async fn unmake(&self, volumes: &[String], snapshots: &[String]) {
        for handle in snapshots {
            let delete = async || {
                let handle = handle.clone();
                self.rbd.delete_snapshot(handle, Secrets::default()).await
            };
            self.patiently(delete).await;
        }
        for handle in volumes {
            let delete = async || {
                let handle = handle.clone();
                self.rbd.delete_volume(handle, Secrets::default()).await
            };
            self.patiently(delete).await;
        }
    }

    pub(super) async fn handles(&self) -> (Vec<String>, Vec<String>) {
        let volumes = self.rbd.list_volumes(ListRequest::default()).await.unwrap();
        let snapshots = self
            .rbd
            .list_snapshots(ListRequest::default(), None, Secrets::default())
            .await
            .unwrap();
        let volumes = volumes.entries.into_iter().map(|one| one.handle).collect();
        let snapshots = snapshots.entries.into_iter().map(|one| one.handle);
        (volumes, snapshots.collect())
    }
}

#[tokio::test]
#[ignore = "the victim of the tests below"]
async fn victim() {
    let variable = |name: &str| env::var(name).expect("run by the tests below");
    let rbd = rbd_over(Path::new(&variable("VICTIM_DIR")));
    let pool = variable("VICTIM_POOL");
    let party = Party {
        rbd: &rbd,
        pool: &pool,
    };
    let list = |name: &str| -> Vec<String> {
        variable(name)
            .split_terminator(' ')
            .map(str::to_owned)
            .collect()
    };
    match list("VICTIM_DELETES").as_slice() {
        [] => party.make().await,
        volumes => {
            party
                .unmake(volumes, &list("VICTIM_DELETES_SNAPSHOTS"))
                .await;
        }
    }
}

/// Whether a victim ends at that change.
pub(super) fn ends_at(victim: &mut Command, at: usize) -> bool {
    let victim = victim.env("CRASH_AT", at.to_string()).output().unwrap();
    let said = String::from_utf8_lossy(&victim.stdout);
    let crashed = std::os::unix::process::ExitStatusExt::signal(&victim.status).is_some();
    assert!(crashed || victim.status.success(), "{said}");
    crashed
}

impl Home {
    /// A cluster that forgets its dead soon, and whose manager takes no tasks: so
    /// that all is done when it is done here.
    pub(super) fn of_its_own() -> Option<Self> {
        let mut cluster = TestCluster::own()?;
        cluster.ceph(&["config", "set", "osd", "osd_client_watch_timeout", "2"]);
        let caps = ["mon", "profile rbd", "osd", "profile rbd"];
        let user = ["auth", "get-or-create-key", "client.alone"];
        cluster.key = cluster.ceph(&[&user[..], &caps].concat()).trim().to_owned();
        cluster.user = "alone".to_owned();
        Some(Self::over(cluster))
    }

    pub(super) fn party(&self) -> Party<'_> {
        Party {
            rbd: &self.rbd,
            pool: &self.pool,
        }
    }

    /// One that makes or deletes, as soon as it is run.
    pub(super) fn victim(&self, deletes: (&[String], &[String])) -> Command {
        let mut victim = self.victim_of("crashes::victim");
        victim
            .env("VICTIM_POOL", &self.pool)
            .env("VICTIM_DELETES", deletes.0.join(" "))
            .env("VICTIM_DELETES_SNAPSHOTS", deletes.1.join(" "));
        victim
    }

    /// The victim of that name, below `tests`.
    pub(super) fn victim_of(&self, name: &str) -> Command {
        let mut victim = Command::new(env::current_exe().unwrap());
        victim
            .args(["--exact", "--ignored", "--test-threads=1"])
            .arg(format!("provision::rbd::tests::{name}"))
            .env("VICTIM_DIR", self.dir.path());
        victim
    }

    /// Whether a victim was ended before it was done.
    pub(super) fn crashes(&self, at: usize, deletes: (&[String], &[String])) -> bool {
        ends_at(&mut self.victim(deletes), at)
    }

    pub fn rados(&self, args: &[&str]) -> String {
        self.cluster.rados(&self.pool, args)
    }

    /// What is in the pool of images and journals, beside what stays.
    fn left(&self) -> BTreeSet<String> {
        const STAY: [&str; 10] = [
            "csi.groups.default",
            "csi.volumes.default",
            "csi.snaps.default",
            "uring-csi.trash",
            "rbd_children",
            "rbd_directory",
            "rbd_group_directory",
            "rbd_info",
            "rbd_trash",
            "rbd_trash_purge_schedule",
        ];
        let objects = self.rados(&["ls"]);
        let (stay, others): (Vec<_>, Vec<_>) = objects
            .lines()
            .map(str::to_owned)
            .partition(|object| STAY.contains(&object.as_str()));
        let mut left = BTreeSet::from_iter(others);
        if left.is_empty() {
            for object in stay {
                let keys = self.rados(&["listomapkeys", &object]);
                let keys = keys.lines().filter(|key| !key.starts_with("next"));
                left.extend(keys.map(|key| format!("{object}: {key}")));
            }
        }
        left
    }

    /// Waits until the trash is empty, and asserts that so is the pool.
    pub(super) async fn assert_empty(&self, at: usize) {
        // A dead client's watch keeps an image for seconds, and a slow machine makes them more.
        for _ in 0..2000 {
            assert!(self.rbd.sweep(StoreKind::Rbd).await.unwrap().is_empty());
            if self.left().is_empty() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!(
            "crashed at {at}, it left {:?}; images: {}; trash: {}",
            self.left(),
            self.cluster.rbd(&["ls", "--long", &self.pool]),
            self.cluster
                .rbd(&["trash", "ls", "--all", "--long", &self.pool]),
        );
    }
}

#[tokio::test]
async fn an_interrupted_create_is_finished() {
    let Some(home) = Home::of_its_own() else {
        return;
    };
    for at in 0.. {
        let crashed = home.crashes(at, (&[], &[]));
        home.party().make().await;
        let (volumes, snapshots) = home.party().handles().await;
        assert_eq!((volumes.len(), snapshots.len()), (3, 1), "crashed at {at}");
        // One of them stands between the clone and its source.
        assert_eq!(home.images().len(), 5, "crashed at {at}");
        home.party().unmake(&volumes, &snapshots).await;
        home.assert_empty(at).await;
        if !crashed {
            assert!(at > 20, "only {at} points");
            return;
        }
    }
}

#[tokio::test]
async fn an_interrupted_delete_is_finished() {
    let Some(home) = Home::of_its_own() else {
        return;
    };
    for at in 0.. {
        home.party().make().await;
        let (volumes, snapshots) = home.party().handles().await;
        let crashed = home.crashes(at, (&volumes, &snapshots));
        home.party().unmake(&volumes, &snapshots).await;
        home.assert_empty(at).await;
        if !crashed {
            assert!(at > 15, "only {at} points");
            return;
        }
    }
}

/// What librbd has made of an image when it is killed.
enum Half {
    /// Its name, in the pool's directory.
    Listed,
    /// An object of that name, too, and no header.
    Named,
}

impl Home {
    fn half_made(&self, name: &str, half: &Half) {
        // Each text has its length before it.
        let text = |text: &str| {
            let length = char::from(u8::try_from(text.len()).unwrap());
            format!("{length}\0\0\0{text}")
        };
        let of_name = format!("name_{name}");
        let of_id = format!("id_dead{}", name.len());
        let (id, listed) = (text(&of_id[3..]), text(name));
        let directory = [(&*of_name, &*id), (&*of_id, &*listed)];
        self.io().omap_set("rbd_directory", &directory).unwrap();
        if let Half::Named = half {
            let file = self.dir.path().join("id");
            std::fs::write(&file, &id).unwrap();
            let object = format!("rbd_id.{name}");
            self.rados(&["put", &object, file.to_str().unwrap()]);
        }
    }

    /// Reserves a volume's name as ceph-csi does; returns the name of its image.
    fn reserved_by_ceph_csi(&self, name: &str) -> String {
        self.reserved(
            name,
            [
                "csi.volume.",
                "csi.volname",
                "csi.volumes.default",
                "csi-vol-",
            ],
        )
    }

    /// The same for a snapshot's.
    pub(super) fn snapshot_reserved_by_ceph_csi(&self, name: &str) -> String {
        self.reserved(
            name,
            [
                "csi.snap.",
                "csi.snapname",
                "csi.snaps.default",
                "csi-snap-",
            ],
        )
    }

    /// ceph-csi enters the source of a reserved snapshot, and makes a snapshot of that name on
    /// it. Returns the path of the source's image.
    pub(super) fn cut_by_ceph_csi(&self, source: &VolumeInfo, snapshot: &str) -> String {
        let image = &source.context["imageName"];
        let object = snapshot.replacen("csi-snap-", "csi.snap.", 1);
        let io = self.io();
        io.omap_set(&object, &[("csi.source", image)]).unwrap();
        let path = format!("{}/{image}", self.pool);
        let made = format!("{path}@{snapshot}");
        self.cluster.rbd(&["snap", "create", &made]);
        path
    }

    fn reserved(&self, name: &str, [prefix, key, directory, image]: [&str; 4]) -> String {
        let uuid = uuid::Uuid::new_v4().to_string();
        let image = format!("{image}{uuid}");
        let keys = [(key, name), ("csi.imagename", &image)];
        let io = self.io();
        io.omap_set(&format!("{prefix}{uuid}"), &keys).unwrap();
        let key = format!("{prefix}{name}");
        io.omap_set(directory, &[(&*key, &*uuid)]).unwrap();
        image
    }
}

#[tokio::test]
async fn a_partial_image_of_ceph_csi_is_created_anew() {
    for half in [Half::Listed, Half::Named] {
        let Some(home) = Home::new() else { return };
        let source = home.make(home.volume("source", MIB)).await;
        let image = home.reserved_by_ceph_csi("plain");
        home.half_made(&image, &half);
        let between = format!("{}-temp", home.reserved_by_ceph_csi("copy"));
        home.half_made(&between, &half);
        let snapshot = home.snapshot_reserved_by_ceph_csi("moment");
        let cut = home.cut_by_ceph_csi(&source, &snapshot);
        home.half_made(&snapshot, &half);
        let moment = home.snapshot("moment", &source.handle);
        home.rbd.create_snapshot(moment).await.unwrap();
        let on_source = home.cluster.rbd(&["snap", "ls", &cut]);
        assert!(!on_source.contains(&snapshot), "{on_source}");
        let plain = home.make(home.volume("plain", MIB)).await;
        let mut copy = home.volume("copy", MIB);
        copy.source = Some(ContentSource::Volume(source.handle));
        let copy = home.make(copy).await;
        // Of the old names nothing is left, whatever librbd lists.
        let listed = home.rados(&["listomapkeys", "rbd_directory"]);
        assert!(!listed.contains(&image), "{listed}");
        assert!(!listed.contains(&between), "{listed}");
        assert!(!listed.contains(&snapshot), "{listed}");
        assert!(!home.rados(&["ls"]).contains(&image[8..]));
        for handle in [&plain.handle, &copy.handle] {
            home.delete(handle).await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_name_of_ceph_csi_whose_image_has_data_but_no_name_is_begun_anew() {
    let Some(home) = Home::new() else { return };
    let image = home.reserved_by_ceph_csi("plain");
    let spec = format!("{}/{image}", home.pool);
    home.cluster.rbd(&["create", "--size", "1M", &spec]);
    let id = crate::ceph::client::rbd::trash::interrupt_move(&home.io(), &image);
    let made = home.make(home.volume("plain", MIB)).await;
    assert!(!made.handle.ends_with(&image[8..]), "{}", made.handle);
    assert!(home.rados(&["ls"]).contains(&format!("rbd_header.{id}")));
}

/// librbd makes a clone without its parent, which it adds in its next step.
#[tokio::test]
async fn a_copy_of_ceph_csi_without_its_parent_is_begun_anew() {
    let Some(home) = Home::new() else { return };
    let source = home.make(home.volume("source", MIB)).await;
    let image = home.reserved_by_ceph_csi("copy");
    let spec = format!("{}/{image}", home.pool);
    home.cluster.rbd(&["create", "--size", "1M", &spec]);
    let mut copy = home.volume("copy", MIB);
    copy.source = Some(ContentSource::Volume(source.handle));
    let copy = home.make(copy).await;
    let made = &copy.context["imageName"];
    let info = home
        .cluster
        .rbd(&["info", &format!("{}/{made}", home.pool)]);
    assert!(info.contains("parent:"), "{info}");
}

#[tokio::test]
async fn a_partial_image_is_created_anew() {
    for half in [Half::Listed, Half::Named] {
        let Some(home) = Home::of_its_own() else {
            return;
        };
        // The victim has entered what it makes, and made nothing.
        let mut at = 0;
        while !home.rados(&["ls"]).contains("csi.volume.") {
            assert!(home.crashes(at, (&[], &[])));
            at += 1;
        }
        let entry = home.rados(&["ls"]);
        let uuid = entry
            .lines()
            .find_map(|object| object.strip_prefix("csi.volume."));
        let name = format!("csi-vol-{}", uuid.unwrap());
        home.half_made(&name, &half);
        let party = home.party();
        let longest = Duration::from_secs(60);
        tokio::time::timeout(longest, party.make())
            .await
            .expect("is made");
        // Under a name of its own, and of the old one nothing is left.
        let listed = home.cluster.rbd(&["ls", "--long", &home.pool]);
        assert!(!listed.contains(&name), "{listed}");
        assert!(listed.contains("16 MiB"), "{listed}");
    }
}
