//! Group snapshots.

use super::*;
use crate::provision::{GroupSnapshotInfo, NewGroupSnapshot};

impl Home {
    async fn group(
        &self,
        name: &str,
        volumes: &[&VolumeInfo],
    ) -> Result<GroupSnapshotInfo, ProvisionError> {
        let new = NewGroupSnapshot {
            name: name.to_owned(),
            volumes: volumes.iter().map(|one| one.handle.clone()).collect(),
            parameters: HashMap::new(),
            secrets: none(),
        };
        self.images.create_group_snapshot(new).await
    }

    async fn delete_group(&self, handle: &str, members: &[String]) -> Result<(), ProvisionError> {
        let (handle, members) = (handle.to_owned(), members.to_vec());
        let images = &self.images;
        images.delete_group_snapshot(handle, members, none()).await
    }

    async fn two(&self) -> [VolumeInfo; 2] {
        let mut made = Vec::new();
        for name in ["one", "two"] {
            made.push(self.images.create_volume(new(name, MIB)).await.unwrap());
        }
        made.try_into().unwrap()
    }
}

#[tokio::test]
async fn a_group_snapshot_is_made_looked_up_and_deleted_as_a_whole() {
    let home = home();
    let [one, two] = home.two().await;
    home.file(&one).write_all_at(b"one", 0).unwrap();
    let before = home.files();
    let taken = home.group("both", &[&one, &two]).await.unwrap();
    assert_eq!(home.group("both", &[&two, &one]).await.unwrap(), taken);
    assert_eq!(kind(home.group("both", &[&one]).await), Kind::Conflict);
    let mut sources: Vec<_> = taken.snapshots.iter().map(|one| &one.source).collect();
    sources.sort_unstable();
    assert_eq!(sources, [&one.handle, &two.handle]);
    for snapshot in &taken.snapshots {
        assert_eq!(snapshot.group.as_ref(), Some(&taken.handle));
        assert_eq!(snapshot.created, taken.created);
    }
    let members: Vec<_> = taken
        .snapshots
        .iter()
        .map(|one| one.handle.clone())
        .collect();
    let get = |members: &[String]| {
        let (handle, members) = (taken.handle.clone(), members.to_vec());
        home.images.get_group_snapshot(handle, members, none())
    };
    assert_eq!(get(&[]).await.unwrap(), taken);
    assert_eq!(get(&members).await.unwrap(), taken);
    assert_eq!(kind(get(&members[..1]).await), Kind::Invalid);

    let of_one = taken.snapshots.iter().find(|it| it.source == one.handle);
    let source = ContentSource::Snapshot(of_one.unwrap().handle.clone());
    let copy = home
        .images
        .create_volume(copy_of("copy", MIB, source))
        .await;
    let copy = copy.unwrap();
    let mut data = [0; 3];
    home.file(&copy).read_exact_at(&mut data, 0).unwrap();
    assert_eq!(&data, b"one");
    home.images
        .delete_volume(copy.handle, none())
        .await
        .unwrap();

    let alone = home
        .images
        .delete_snapshot(members[0].clone(), none())
        .await;
    assert_eq!(kind(alone), Kind::Invalid);
    let others = home.delete_group(&taken.handle, &members[..1]).await;
    assert_eq!(kind(others), Kind::Invalid);
    for _ in 0..2 {
        home.delete_group(&taken.handle, &members).await.unwrap();
    }
    assert_eq!(kind(get(&[]).await), Kind::NotFound);
    assert_eq!(home.files(), before);
}

#[tokio::test]
async fn an_attached_volume_is_in_no_group_snapshot() {
    let home = home();
    let [one, two] = home.two().await;
    let before = home.files();
    let node = Claim {
        node_id: "node-a".to_owned(),
        boot_id: BOOT.to_owned(),
        volume_id: String::new(),
        access: Sharing::Exclusive,
        read_only: false,
    };
    let image = &two.context["image"];
    let _ = claim::claim(home.pool(), image, &node).unwrap();
    let refused = home.group("both", &[&one, &two]).await.unwrap_err();
    assert_eq!(refused.kind(), Kind::Precondition);
    assert!(refused.to_string().contains("node-a"), "{refused}");
    let _ = claim::release(home.pool(), image, "node-a").unwrap();
    assert_eq!(home.files(), before);
    // The first one is free again.
    let _ = claim::claim(home.pool(), &one.context["image"], &node).unwrap();
    let _ = claim::release(home.pool(), &one.context["image"], "node-a").unwrap();
    home.group("both", &[&one, &two]).await.unwrap();
}

#[tokio::test]
async fn a_group_snapshot_of_a_lost_image_leaves_nothing() {
    let home = home();
    let [one, two] = home.two().await;
    let lost = home.dir.path().join(&two.context["image"]);
    std::fs::remove_file(lost).unwrap();
    let before = home.files();
    let refused = home.group("both", &[&one, &two]).await.unwrap_err();
    assert!(refused.to_string().contains(&two.handle), "{refused}");
    assert_eq!(home.files(), before);
}

#[tokio::test]
async fn the_volumes_of_a_group_are_in_one_pool() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let pools = [
        ("a", first.path(), Scope::Shared),
        ("b", second.path(), Scope::Shared),
    ];
    let images = images_over(&pools, None);
    let mut volumes = Vec::new();
    for pool in ["a", "b"] {
        let made = images.create_volume(with(new(pool, MIB), &[("pool", pool)]));
        volumes.push(made.await.unwrap().handle);
    }
    let group = NewGroupSnapshot {
        name: "both".to_owned(),
        volumes,
        parameters: HashMap::new(),
        secrets: none(),
    };
    let refused = images.create_group_snapshot(group).await;
    assert_eq!(kind(refused), Kind::Precondition);
}

#[tokio::test]
async fn a_group_snapshot_is_found_while_a_member_keeps_its_delete() {
    let home = home();
    let [one, two] = home.two().await;
    let before = home.files();
    let taken = home.group("both", &[&one, &two]).await.unwrap();
    let members = taken.snapshots.iter().map(|one| one.handle.clone());
    let members: Vec<_> = members.collect();
    let id = &members[1][members[1].len() - 36..];
    let image = home.pool().meta_path("snapshots").join(format!("{id}.img"));
    // What is no file is not deleted.
    let aside = image.with_extension("aside");
    std::fs::rename(&image, &aside).unwrap();
    std::fs::create_dir(&image).unwrap();
    let refused = home.delete_group(&taken.handle, &members).await;
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains(id), "{refused}");
    let get = || {
        let handle = taken.handle.clone();
        home.images.get_group_snapshot(handle, Vec::new(), none())
    };
    let found = get().await.unwrap_err();
    assert_eq!(found.kind(), Kind::InUse, "{found}");
    assert!(found.to_string().contains("delete it again"), "{found}");
    std::fs::remove_dir(&image).unwrap();
    std::fs::rename(&aside, &image).unwrap();
    home.delete_group(&taken.handle, &members).await.unwrap();
    assert_eq!(kind(get().await), Kind::NotFound);
    assert_eq!(home.files(), before);
}
