//! Group snapshots.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::SystemTime,
};

use uuid::Uuid;

use super::{
    crashes::{Party, ends_at},
    *,
};
use crate::{
    ceph::client::rbd::{Image, OpenMode, group},
    provision::{GroupSnapshotInfo, NewGroupSnapshot},
};

fn group_of(name: &str, volumes: &[&VolumeInfo], secrets: Secrets) -> NewGroupSnapshot {
    NewGroupSnapshot {
        name: name.to_owned(),
        volumes: volumes.iter().map(|one| one.handle.clone()).collect(),
        parameters: HashMap::new(),
        secrets,
    }
}

/// A volume whose image has these features.
fn with_features(mut new: NewVolume, features: &str) -> NewVolume {
    let name = "imageFeatures".to_owned();
    new.parameters.insert(name, features.to_owned());
    new
}

/// A volume whose writes Ceph can hold.
fn lockable(new: NewVolume) -> NewVolume {
    with_features(new, "layering,exclusive-lock")
}

impl Home {
    async fn lockable(&self, name: &str) -> VolumeInfo {
        self.make(lockable(self.volume(name, 32 * MIB))).await
    }

    async fn group(
        &self,
        name: &str,
        volumes: &[&VolumeInfo],
    ) -> Result<GroupSnapshotInfo, ProvisionError> {
        let new = group_of(name, volumes, self.secrets());
        self.rbd.create_group_snapshot(new).await
    }

    async fn delete_group(&self, handle: &str, members: Vec<String>) -> Result<(), ProvisionError> {
        let secrets = self.secrets();
        let rbd = &self.rbd;
        rbd.delete_group_snapshot(handle.to_owned(), members, secrets)
            .await
    }

    fn rados_keys(&self, object: &str) -> BTreeSet<String> {
        let keys = self.cluster.rados(&self.pool, &["listomapkeys", object]);
        keys.lines().map(str::to_owned).collect()
    }
}

fn open(io: &IoCtx, name: &str) -> Image {
    Image::open(io, name, OpenMode::ReadWrite).unwrap()
}

/// The name of a snapshot's image.
pub(super) fn image_of(snapshot: &SnapshotInfo) -> String {
    format!(
        "csi-snap-{}",
        &snapshot.handle[snapshot.handle.len() - 36..]
    )
}

#[tokio::test]
async fn a_delete_waits_for_the_group_snapshot_under_way() {
    let Some(home) = Home::new() else { return };
    let volume = home.lockable("one").await;
    let (io, image) = (home.io(), &volume.context["imageName"]);
    let temporary = format!("csi-vol-group-{}-vg", uuid::Uuid::new_v4());
    for (name, kind, word) in [
        (&*temporary, ErrorKind::InUse, "uringctl orphans"),
        (
            "by-hand-vg",
            ErrorKind::Precondition,
            "rbd group image remove",
        ),
    ] {
        group::create(&io, name).unwrap();
        group::add_image(&io, name, &io, image).unwrap();
        let refused = home.delete(&volume.handle).await.unwrap_err();
        assert_eq!(refused.kind(), kind, "{refused}");
        assert!(refused.to_string().contains(word), "{refused}");
        group::remove(&io, name).unwrap();
    }
    home.delete(&volume.handle).await.unwrap();
}

#[tokio::test]
async fn a_group_snapshot_is_made_looked_up_and_deleted_as_a_whole() {
    let Some(home) = Home::new() else { return };
    let volumes = [home.lockable("one").await, home.lockable("two").await];
    let both = [&volumes[0], &volumes[1]];
    let started = SystemTime::now();
    let taken = home.group("both", &both).await.unwrap();
    assert!(taken.created >= started);
    let sources: BTreeSet<_> = taken.snapshots.iter().map(|one| &one.source).collect();
    assert_eq!(sources, both.map(|one| &one.handle).into());
    for one in &taken.snapshots {
        assert_eq!(one.group.as_ref(), Some(&taken.handle));
        assert_eq!(one.bytes, 32 * MIB);
    }
    // In any order, the same again.
    let again = home.group("both", &[both[1], both[0]]).await.unwrap();
    assert_eq!(again, taken);
    let other = home.group("both", &both[..1]).await.unwrap_err();
    assert_eq!(other.kind(), ErrorKind::Conflict, "{other}");

    // ceph-csi's layout.
    let uuid = &taken.handle[taken.handle.len() - 36..];
    let object = format!("csi.volume.group.{uuid}");
    let mut keys: BTreeSet<String> = ["csi.volname", "csi.groupname", "csi.creationtime"]
        .map(str::to_owned)
        .into();
    keys.extend(taken.snapshots.iter().map(|one| one.handle.clone()));
    assert_eq!(home.rados_keys(&object), keys);
    let directory = home.rados_keys("csi.groups.default");
    assert_eq!(directory, ["csi.volume.group.both".to_owned()].into());
    // Nothing is left of the way there.
    assert_eq!(home.cluster.rbd(&["group", "ls", &home.pool]), "");
    for volume in both {
        let image = format!("{}/{}", home.pool, volume.context["imageName"]);
        assert_eq!(home.cluster.rbd(&["snap", "ls", &image]), "");
    }

    let get = |members: Vec<String>| {
        let handle = taken.handle.clone();
        home.rbd.get_group_snapshot(handle, members, home.secrets())
    };
    assert_eq!(get(Vec::new()).await.unwrap(), taken);
    let members: Vec<_> = taken
        .snapshots
        .iter()
        .map(|one| one.handle.clone())
        .collect();
    assert_eq!(get(members.clone()).await.unwrap(), taken);
    let others = get(members[..1].to_vec()).await.unwrap_err();
    assert_eq!(others.kind(), ErrorKind::Invalid, "{others}");

    // A member goes with its group alone, and a copy outlives it.
    let alone = home.rbd.delete_snapshot(members[0].clone(), home.secrets());
    let alone = alone.await.unwrap_err();
    assert_eq!(alone.kind(), ErrorKind::Invalid, "{alone}");
    let mut copy = home.volume("copy", 32 * MIB);
    copy.source = Some(ContentSource::Snapshot(members[0].clone()));
    let copy = home.make(copy).await;
    let others = home.delete_group(&taken.handle, members[..1].to_vec());
    let others = others.await.unwrap_err();
    assert_eq!(others.kind(), ErrorKind::Invalid, "{others}");
    for _ in 0..2 {
        let deleted = home.delete_group(&taken.handle, members.clone()).await;
        deleted.unwrap();
    }
    let gone = get(Vec::new()).await.unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::NotFound, "{gone}");
    for volume in [&copy, both[0], both[1]] {
        home.delete(&volume.handle).await.unwrap();
    }
    assert_eq!(home.images(), [""; 0]);
}

#[tokio::test]
async fn the_snapshots_of_a_group_whose_entry_is_lost_are_deleted() {
    let Some(home) = Home::new() else { return };
    let volumes = [home.lockable("one").await, home.lockable("two").await];
    let taken = home
        .group("both", &[&volumes[0], &volumes[1]])
        .await
        .unwrap();
    let alone = home
        .rbd
        .create_snapshot(home.snapshot("alone", &volumes[0].handle));
    let alone = alone.await.unwrap();
    let uuid = &taken.handle[taken.handle.len() - 36..];
    let object = format!("csi.volume.group.{uuid}");
    home.cluster.rados(&home.pool, &["rm", &object]);
    let handles = taken.snapshots.iter().map(|one| one.handle.clone());
    let mut members: Vec<_> = handles.collect();
    let one = home.rbd.delete_snapshot(members[0].clone(), home.secrets());
    one.await.unwrap();
    members.push(alone.handle.clone());
    for _ in 0..2 {
        let deleted = home.delete_group(&taken.handle, members.clone()).await;
        deleted.unwrap();
    }
    let mut left: Vec<_> = volumes
        .iter()
        .map(|one| one.context["imageName"].clone())
        .collect();
    left.push(image_of(&alone));
    left.sort();
    assert_eq!(home.images(), left, "a snapshot of no group stays");
}

#[tokio::test]
async fn a_group_of_volumes_of_ceph_csi_is_no_group_snapshot() {
    let Some(home) = Home::new() else { return };
    let volume = home.make(home.volume("member", MIB)).await.handle;
    let uuid = Uuid::new_v4();
    let handle = format!("{}{uuid}", &volume[..volume.len() - 36]);
    let object = format!("csi.volume.group.{uuid}");
    let group = format!("csi-vol-group-{uuid}");
    let name = ("csi.volume.group.volumes", &*uuid.to_string());
    home.io().omap_set("csi.groups.default", &[name]).unwrap();
    let keys = [
        ("csi.volname", "volumes"),
        ("csi.groupname", &group),
        ("csi.creationtime", "2025-02-03T04:05:06.5Z"),
    ];
    home.io().omap_set(&object, &keys).unwrap();
    for member in [None, Some(&volume)] {
        if let Some(member) = member {
            home.io().omap_set(&object, &[(member, "")]).unwrap();
        }
        let before = home.rados_keys(&object);
        home.delete_group(&handle, Vec::new()).await.unwrap();
        let got = home
            .rbd
            .get_group_snapshot(handle.clone(), Vec::new(), home.secrets());
        assert_eq!(got.await.unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(home.rados_keys(&object), before);
        assert_eq!(home.rados_keys("csi.groups.default").len(), 1);
    }
}

#[tokio::test]
async fn a_group_snapshot_outlives_its_volumes() {
    let Some(home) = Home::new() else { return };
    let volumes = [home.lockable("one").await, home.lockable("two").await];
    let class = [("clusterID", "ceph"), ("pool", &*home.pool)];
    let new = NewGroupSnapshot {
        parameters: class
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into(),
        ..group_of("both", &[&volumes[0], &volumes[1]], home.secrets())
    };
    let create = |new: &NewGroupSnapshot| home.rbd.create_group_snapshot(new.clone());
    let taken = create(&new).await.unwrap();
    home.delete(&volumes[1].handle).await.unwrap();
    assert_eq!(create(&new).await.unwrap(), taken);
    let other = NewGroupSnapshot {
        volumes: vec![volumes[0].handle.clone()],
        ..new
    };
    let other = create(&other).await.unwrap_err();
    assert_eq!(other.kind(), ErrorKind::Conflict, "{other}");
    home.delete_group(&taken.handle, Vec::new()).await.unwrap();
    home.delete(&volumes[0].handle).await.unwrap();
    assert_eq!(home.images(), [""; 0]);
}

#[tokio::test]
async fn a_group_snapshot_is_found_while_a_member_keeps_its_delete() {
    let Some(home) = Home::new() else { return };
    let volumes = [home.lockable("one").await, home.lockable("two").await];
    let both = [&volumes[0], &volumes[1]];
    let get = async |taken: &GroupSnapshotInfo| {
        let (handle, secrets) = (taken.handle.clone(), home.secrets());
        let found = home.rbd.get_group_snapshot(handle, Vec::new(), secrets);
        found.await.unwrap_err()
    };
    let mut taken = home.group("both", &both).await.unwrap();
    // By the driver's delete, and by a create of the same name.
    for created_again in [false, true] {
        // The members are removed in the order of their handles.
        let handles = taken.snapshots.iter().map(|one| &one.handle);
        let last = handles.max().unwrap();
        let last = taken.snapshots.iter().find(|one| one.handle == *last);
        let user = open(&home.io(), &image_of(last.unwrap()));
        let refused = home.delete_group(&taken.handle, Vec::new()).await;
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Precondition);
        let found = get(&taken).await;
        assert_eq!(found.kind(), ErrorKind::InUse, "{found}");
        assert!(found.to_string().contains("delete it again"), "{found}");
        drop(user);
        if created_again {
            let again = home.group("both", &both).await.unwrap();
            assert_ne!(again.handle, taken.handle);
            home.delete_group(&again.handle, Vec::new()).await.unwrap();
        } else {
            home.delete_group(&taken.handle, Vec::new()).await.unwrap();
        }
        let gone = get(&taken).await;
        assert_eq!(gone.kind(), ErrorKind::NotFound, "{gone}");
        assert_eq!(home.images().len(), 2);
        taken = home.group("both", &both).await.unwrap();
    }
}

/// The places that [`write_numbers`] writes to, one after the other.
const PLACES: u64 = 2000;
/// How many of them have data at a time.
const KEPT: u64 = 500;
/// Bytes of a place.
const PLACE: usize = 8192;

/// Writes each number to the first image before the second: to its beginning, then to a place
/// of its own, and zeros to the place of an earlier one. Returns the last.
fn write_numbers(images: &[Image], ended: &AtomicBool) -> u64 {
    let place = |number: u64| (number % PLACES + 1) * PLACE as u64;
    for number in 1_u64.. {
        for image in images {
            image.write(0, &number.to_le_bytes()).unwrap();
            image.write(place(number), &number.to_le_bytes()).unwrap();
            if let Some(old) = number.checked_sub(KEPT) {
                image.write_zeros(place(old), PLACE).unwrap();
            }
        }
        if ended.load(Ordering::Relaxed) {
            return number;
        }
    }
    unreachable!("there are more numbers than time")
}

/// The number at the beginning of an image; all writes before it are there, and none after.
fn number_in(image: &Image) -> u64 {
    let read = |offset| {
        let mut number = [0; 8];
        image.read(offset, &mut number).unwrap();
        u64::from_le_bytes(number)
    };
    let number = read(0);
    for slot in 0..PLACES {
        // The last number that was written there; 0: none.
        let since = (number + PLACES - slot) % PLACES;
        let last = number.saturating_sub(since);
        let there = read((slot + 1) * PLACE as u64);
        let may_be_either = last == number || last + KEPT == number;
        let expected = if last + KEPT > number { last } else { 0 };
        assert!(
            there == expected || may_be_either && (there == last || there == 0),
            "{there} for {last}, in the state of {number}"
        );
    }
    number
}

#[tokio::test]
async fn the_snapshots_show_one_moment() {
    let Some(home) = Home::new() else { return };
    let fast = "layering,exclusive-lock,object-map,fast-diff";
    let fast = with_features(home.volume("second", 32 * MIB), fast);
    let volumes = [home.lockable("first").await, home.make(fast).await];
    let ended = Arc::new(AtomicBool::new(false));
    let writer = {
        let (io, ended) = (home.io(), ended.clone());
        let images = volumes.each_ref();
        let images = images.map(|volume| open(&io, &volume.context["imageName"]));
        thread::spawn(move || write_numbers(&images, &ended))
    };
    let io = home.io();
    let mut seen = BTreeSet::new();
    for name in ["a", "b", "c"] {
        let taken = home.group(name, &[&volumes[0], &volumes[1]]).await.unwrap();
        let [first, second] = volumes.each_ref().map(|volume| {
            let of = |one: &&SnapshotInfo| one.source == volume.handle;
            let snapshot = taken.snapshots.iter().find(of).unwrap();
            number_in(&open(&io, &image_of(snapshot)))
        });
        assert!(first == second || first == second + 1, "{first}, {second}");
        seen.insert(first);
    }
    ended.store(true, Ordering::Relaxed);
    let last = writer.join().unwrap();
    let in_time = seen.iter().all(|seen| *seen <= last);
    assert!(seen.len() == 3 && in_time, "{seen:?} of {last}");
}

#[tokio::test]
async fn volumes_that_cannot_be_held_together_are_named() {
    let Some(home) = Home::new() else { return };
    let held = home.lockable("held").await;
    let plain = with_features(home.volume("plain", MIB), "layering");
    let plain = home.make(plain).await;
    let refused = home.group("unheld", &[&held, &plain]).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Precondition);
    let image = &plain.context["imageName"];
    assert!(refused.to_string().contains(image), "{refused}");

    home.configure(&["ceph", "other"]);
    let mut there = lockable(home.volume("there", MIB));
    there.parameters.insert("clusterID".into(), "other".into());
    let there = home.make(there).await;
    let refused = home.group("apart", &[&held, &there]).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Precondition);
    assert!(refused.to_string().contains("one cluster"), "{refused}");

    let io = home.io();
    group::create(&io, "theirs").unwrap();
    group::add_image(&io, "theirs", &io, &held.context["imageName"]).unwrap();
    let refused = home.group("taken", &[&held]).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InUse);
    assert!(refused.to_string().contains("theirs"), "{refused}");
    group::remove(&io, "theirs").unwrap();

    let missing = VolumeInfo {
        handle: format!("{}0", &held.handle[..held.handle.len() - 1]),
        ..held.clone()
    };
    if missing.handle != held.handle {
        let refused = home.group("missing", &[&held, &missing]).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::NotFound, "{refused}");
    }
    let images = VolumeInfo {
        handle: "vol.shared.fast.00000000-0000-0000-0000-000000006f1c".to_owned(),
        ..held.clone()
    };
    let refused = home.group("mixed", &[&held, &images]).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Precondition, "{refused}");
    // Nothing was begun.
    let directory = home.cluster.rados(&home.pool, &["ls"]);
    assert!(!directory.contains("csi.groups"), "{directory}");
}

#[tokio::test]
#[ignore = "the victim of the test below"]
async fn victim() {
    let variable = |name: &str| std::env::var(name).expect("run by the test below");
    let rbd = rbd_over(Path::new(&variable("VICTIM_DIR")));
    let volumes = variable("VICTIM_VOLUMES");
    let volumes = volumes.split(' ').map(str::to_owned).collect();
    let party = Party {
        rbd: &rbd,
        pool: "",
    };
    match variable("VICTIM_GROUP") {
        none if none.is_empty() => drop(party.group(volumes).await),
        handle => party.delete_group(&handle).await,
    }
}

impl Party<'_> {
    async fn group(&self, volumes: Vec<String>) -> GroupSnapshotInfo {
        let new = NewGroupSnapshot {
            name: "group".to_owned(),
            volumes,
            parameters: HashMap::new(),
            secrets: Secrets::default(),
        };
        self.patiently(async || self.rbd.create_group_snapshot(new.clone()).await)
            .await
    }

    async fn delete_group(&self, handle: &str) {
        let delete = async || {
            let (handle, secrets) = (handle.to_owned(), Secrets::default());
            let rbd = self.rbd;
            rbd.delete_group_snapshot(handle, Vec::new(), secrets).await
        };
        self.patiently(delete).await;
    }
}

/// The kills of a test: after each change with `EVERY_STEP`, else after some.
fn kills() -> impl Iterator<Item = usize> {
    let step = if std::env::var_os("EVERY_STEP").is_some() {
        1
    } else {
        7
    };
    (0..).step_by(step)
}

impl Home {
    /// Whether a create of that group was ended before it was done; or, of a handle, a delete.
    fn group_is_ended(&self, at: usize, volumes: &[String], group: &str) -> bool {
        let mut victim = self.victim_of("groups::victim");
        victim
            .env("VICTIM_VOLUMES", volumes.join(" "))
            .env("VICTIM_GROUP", group);
        ends_at(&mut victim, at)
    }
}

#[tokio::test]
async fn an_interrupted_group_snapshot_is_finished() {
    let Some(home) = Home::of_its_own() else {
        return;
    };
    let volumes = [home.lockable("one").await, home.lockable("two").await];
    let handles = volumes.each_ref().map(|one| one.handle.clone());
    for at in kills() {
        let killed_first = home.group_is_ended(at, &handles, "");
        let taken = home.party().group(handles.to_vec()).await;
        assert_eq!(taken.snapshots.len(), 2, "crashed at {at}");
        assert_eq!(home.images().len(), 4, "crashed at {at}");
        let killed_later = home.group_is_ended(at, &handles, &taken.handle);
        home.party().delete_group(&taken.handle).await;
        assert_eq!(home.images().len(), 2, "crashed at {at}");
        let groups = home.cluster.rbd(&["group", "ls", &home.pool]);
        assert_eq!(groups, "", "crashed at {at}");
        if !(killed_first || killed_later) {
            assert!(at > 20, "only {at} points");
            break;
        }
    }
    home.party().unmake(&handles, &[]).await;
    home.assert_empty(0).await;
}

#[tokio::test]
async fn what_a_killed_group_snapshot_leaves_is_an_orphan() {
    let Some(home) = Home::of_its_own() else {
        return;
    };
    let volumes = [home.lockable("one").await, home.lockable("two").await];
    let handles = volumes.each_ref().map(|one| one.handle.clone());
    // Removed as a whole, or complete.
    let is_removed = |at: usize| {
        let (images, names) = (home.images(), home.rados_keys("csi.groups.default"));
        let groups = home.cluster.rbd(&["group", "ls", &home.pool]);
        match (images.len(), names.len(), groups.as_str()) {
            (2, 0, "") => true,
            (4, 1, "") => false,
            _ => panic!("killed at {at}: {images:?}, {names:?}, {groups:?}"),
        }
    };
    // The first makes the directory of names.
    let first = home.party().group(handles.to_vec()).await;
    home.party().delete_group(&first.handle).await;
    let (mut creates, mut deletes) = (0, 0);
    for at in kills() {
        let killed_first = home.group_is_ended(at, &handles, "");
        home.remove_orphans_after(at).await;
        creates += usize::from(killed_first && is_removed(at));
        let taken = home.party().group(handles.to_vec()).await;
        let killed_later = home.group_is_ended(at, &handles, &taken.handle);
        home.remove_orphans_after(at).await;
        deletes += usize::from(killed_later && is_removed(at));
        home.party().delete_group(&taken.handle).await;
        assert!(is_removed(at));
        if !(killed_first || killed_later) {
            break;
        }
    }
    assert!(creates > 1 && deletes > 0, "{creates}, {deletes}");
    home.party().unmake(&handles, &[]).await;
    home.assert_empty(0).await;
}
