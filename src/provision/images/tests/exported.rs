//! Volumes that nodes attach as exports of an NBD server.

use super::*;

/// On a file system that has no reflink and is this machine's alone.
fn home() -> Home {
    home_in(tempfile::tempdir_in("/dev/shm").unwrap())
}

fn served(name: &str) -> NewVolume {
    let server = [("backend", "nbd"), ("nbdServer", "storage")];
    with(new(name, MIB), &server)
}

#[tokio::test]
async fn every_answer_names_the_export() {
    let home = home();
    let made = home.images.create_volume(served("pvc")).await.unwrap();
    let id = made.handle.rsplit('.').next().unwrap();
    let uri = format!("nbd://storage:10809/{id}.img");
    let expected = [
        ("backend", "nbd"),
        ("minSize", &MIB.to_string()),
        ("name", "pvc"),
        ("pool", "main"),
        ("uri", &uri),
    ];
    let expected = expected.map(|(k, v)| (k.to_owned(), v.to_owned()));
    assert_eq!(made.context, expected.into());
    assert!(!made.local);

    // By a controller that knows the catalogue only.
    let later = images_over(&[("main", home.dir.path(), Scope::Shared)], None);
    let found = later.get_volume(made.handle.clone()).await.unwrap();
    assert_eq!(found.volume, made);
    let listed = later.list_volumes(ListRequest::default()).await.unwrap();
    assert_eq!(listed.entries, std::slice::from_ref(&made));
    assert_eq!(later.create_volume(served("pvc")).await.unwrap(), made);

    let elsewhere = [("backend", "nbd"), ("nbdServer", "elsewhere")];
    for other in [
        new("pvc", MIB),
        with(new("pvc", MIB), &elsewhere),
        with(new("pvc", MIB), &[("backend", "loop")]),
    ] {
        assert_eq!(kind(home.images.create_volume(other).await), Kind::Conflict);
    }
    let many = VolumeUse {
        fs_type: None,
        many_nodes_write: true,
    };
    let refused = later.check_uses(made.handle, vec![many], HashMap::new(), none());
    assert_eq!(refused.await.unwrap(), None);
}

#[tokio::test]
async fn the_minimum_size_is_that_at_creation() {
    let home = home();
    let made = home.images.create_volume(served("pvc")).await.unwrap();
    let range = Range {
        required: 4 * MIB,
        limit: 0,
    };
    let grown = home
        .images
        .expand_volume(made.handle.clone(), range, none());
    assert_eq!(grown.await.unwrap(), 4 * MIB);
    let clone = NewVolume {
        source: Some(ContentSource::Volume(made.handle.clone())),
        range,
        ..served("clone")
    };
    let clone = home.images.create_volume(clone).await.unwrap();
    assert_eq!(clone.context["minSize"], (4 * MIB).to_string());

    let later = images_over(&[("main", home.dir.path(), Scope::Shared)], None);
    let found = later.get_volume(made.handle).await.unwrap().volume;
    assert_eq!((found.bytes, &found.context), (4 * MIB, &made.context));
    let again = later.create_volume(served("pvc")).await.unwrap();
    assert_eq!(again.context, made.context);
}

#[tokio::test]
async fn a_local_pool_is_not_exported() {
    let dir = tempfile::tempdir().unwrap();
    let images = images_over(&[("disk", dir.path(), Scope::Local)], Some("node-a"));
    let error = images.create_volume(served("pvc")).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid);
    assert!(error.to_string().contains("shared"), "{error}");
    let room = images.capacity(room(served("pvc").parameters, true));
    assert_eq!(room.await.unwrap().available, 0);
}

#[tokio::test]
async fn an_image_open_in_a_server_is_neither_deleted_nor_copied_torn() {
    let home = home();
    let made = home.images.create_volume(served("pvc")).await.unwrap();
    let id = made.handle.rsplit('.').next().unwrap();
    let image = format!("{id}.img");
    let delete = || home.images.delete_volume(made.handle.clone(), none());
    let snapshot = || {
        let snapshot = snapshot_of("snap".to_owned(), made.handle.clone());
        home.images.create_snapshot(snapshot)
    };
    let clone = || {
        let clone = copy_of("clone", MIB, ContentSource::Volume(made.handle.clone()));
        home.images.create_volume(clone)
    };

    let connection = home.pool().open_image(&image, true).unwrap();
    connection.write_all_at(b"data", 4096).unwrap();
    assert_eq!(kind(delete().await), Kind::Precondition);
    assert_eq!(kind(clone().await), Kind::Precondition);
    let error = snapshot().await.unwrap_err();
    assert_eq!(error.kind(), Kind::Precondition);
    assert!(crate::error_chain(&error).contains("NBD server"), "{error}");
    // A growth needs no lease.
    let range = Range {
        required: 2 * MIB,
        limit: 0,
    };
    let grown = home
        .images
        .expand_volume(made.handle.clone(), range, none());
    assert_eq!(grown.await.unwrap(), 2 * MIB);

    drop(connection);
    let taken = snapshot().await.unwrap();
    delete().await.unwrap();
    let copy = copy_of(
        "copy",
        2 * MIB,
        ContentSource::Snapshot(taken.handle.clone()),
    );
    let copy = NewVolume {
        parameters: served("copy").parameters,
        ..copy
    };
    let copy = home.images.create_volume(copy).await.unwrap();
    let id = copy.handle.rsplit('.').next().unwrap();
    let file = home.pool().open_image(&format!("{id}.img"), false).unwrap();
    let mut found = [0; 4];
    file.read_exact_at(&mut found, 4096).unwrap();
    assert_eq!(&found, b"data");
    drop(file);
    home.images
        .delete_volume(copy.handle, none())
        .await
        .unwrap();
    home.images
        .delete_snapshot(taken.handle, none())
        .await
        .unwrap();
    assert_eq!(home.files(), Vec::<String>::new());
}
