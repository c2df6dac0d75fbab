//! How much room there is, and for whom.

use super::*;

#[tokio::test]
async fn capacity_is_not_overcommitted_unless_the_class_allows_it() {
    let home = home();
    let capacity = async |overcommit: &str| {
        let parameters = HashMap::from([("overcommit".to_owned(), overcommit.to_owned())]);
        let capacity = home.images.capacity(room(parameters, true)).await;
        capacity.unwrap()
    };
    let there = capacity("false").await;
    assert!(there.maximum.unwrap() <= there.available, "{there:?}");
    let too_much = there.available * 2;
    let refused = home.images.create_volume(new("pvc", too_much)).await;
    assert_eq!(kind(refused), Kind::Exhausted);
    assert_eq!(home.files(), [""; 0]);

    let made = home.images.create_volume(new("pvc", MIB)).await.unwrap();
    let range = Range {
        required: too_much,
        limit: 0,
    };
    let refused = home
        .images
        .expand_volume(made.handle.clone(), range, none())
        .await;
    assert_eq!(kind(refused), Kind::Exhausted);
    let copy = copy_of("copy", too_much, ContentSource::Volume(made.handle));
    assert_eq!(kind(home.images.create_volume(copy).await), Kind::Exhausted);

    assert!(capacity("true").await.maximum.unwrap() > too_much);
    let thin = with(new("thin", too_much), &[("overcommit", "true")]);
    assert_eq!(
        home.images.create_volume(thin).await.unwrap().bytes,
        too_much
    );
}

#[tokio::test]
async fn concurrent_creates_count_each_others_space() {
    let home = home();
    let there = home
        .images
        .capacity(room(HashMap::new(), true))
        .await
        .unwrap();
    let most = there.available / 5 * 3;
    for round in 0..10 {
        let names = [format!("a{round}"), format!("b{round}")];
        let creates = names.map(|name| home.images.create_volume(new(&name, most)));
        let (made, refused): (Vec<_>, Vec<_>) =
            join_all(creates).await.into_iter().partition(Result::is_ok);
        assert_eq!((made.len(), refused.len()), (1, 1), "in round {round}");
        for volume in made {
            let handle = volume.unwrap().handle;
            home.images.delete_volume(handle, none()).await.unwrap();
        }
        for answer in refused {
            assert_eq!(kind(answer), Kind::Exhausted);
        }
    }
}

#[tokio::test]
async fn local_volumes_stay_on_their_node() {
    let dir = tempfile::tempdir().unwrap();
    let here = images_over(&[("disk", dir.path(), Scope::Local)], Some("node-a"));
    let there = images_over(&[("disk", dir.path(), Scope::Local)], Some("node-b"));
    let unwanted = NewVolume {
        elsewhere: Some("node-b".to_owned()),
        ..new("pvc", MIB)
    };
    let error = here.create_volume(unwanted).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Exhausted);
    assert!(error.to_string().contains("node-b"), "{error}");

    let another = with(new("pvc", MIB), &[("pool", "of node-b")]);
    let parameters = another.parameters.clone();
    assert_eq!(kind(here.create_volume(another).await), Kind::Exhausted);
    let empty = here.capacity(room(parameters, true)).await.unwrap();
    assert_eq!(empty.available, 0);

    let made = here.create_volume(new("pvc", MIB)).await.unwrap();
    assert!(made.local);
    let handle = || made.handle.clone();
    assert_eq!(
        kind(there.delete_volume(handle(), none()).await),
        Kind::Precondition
    );
    let copy = copy_of("copy", MIB, ContentSource::Volume(handle()));
    assert_eq!(kind(there.create_volume(copy).await), Kind::Exhausted);
    let range = Range {
        required: 2 * MIB,
        limit: 0,
    };
    assert_eq!(
        there.expand_volume(handle(), range, none()).await.unwrap(),
        2 * MIB
    );
    let none = HashMap::new();
    let capacity = here.capacity(room(none.clone(), false)).await.unwrap();
    assert_eq!(capacity.available, 0);
    assert!(here.capacity(room(none, true)).await.unwrap().available > 0);
}

#[tokio::test]
async fn options_with_which_no_node_would_make_the_file_system_are_refused() {
    let home = home();
    let asking = |fs: &str, options: &str| NewVolume {
        uses: vec![VolumeUse {
            fs_type: Some(fs.to_owned()),
            many_nodes_write: false,
        }],
        ..with(new("pvc", MIB * 512), &[("mkfsOptions", options)])
    };
    for (fs, options) in [
        ("ext4", "-J device=/dev/sda"),
        ("", "-s size=4096"),
        ("xfs", "-l logdev=/dev/sda"),
        ("ext4", "'"),
    ] {
        let refused = home.images.create_volume(asking(fs, options)).await;
        let error = refused.unwrap_err();
        assert!(error.to_string().contains("mkfsOptions"), "{error}");
        assert_eq!(error.kind(), Kind::Invalid);
    }
    let accepted = asking("xfs", "-K -s size=4096");
    home.images.create_volume(accepted).await.unwrap();
}

#[tokio::test]
async fn several_nodes_write_only_where_nothing_caches() {
    let home = home();
    let shared = |fs_type: Option<&str>| VolumeUse {
        fs_type: fs_type.map(str::to_owned),
        many_nodes_write: true,
    };
    let asking = |volume_use| NewVolume {
        uses: vec![volume_use],
        ..new("pvc", MIB)
    };
    let refused = [
        asking(shared(Some("ext4"))),
        with(asking(shared(None)), &[("directIO", "false")]),
    ];
    for new in refused {
        assert_eq!(kind(home.images.create_volume(new).await), Kind::Invalid);
    }
    let made = home
        .images
        .create_volume(asking(shared(None)))
        .await
        .unwrap();
    assert_eq!(made.context["directIO"], "true");
    let check = async |handle: &str, volume_use| {
        home.images
            .check_uses(handle.to_owned(), vec![volume_use], HashMap::new(), none())
            .await
            .unwrap()
    };
    assert_eq!(check(&made.handle, shared(None)).await, None);
    assert!(check(&made.handle, shared(Some(""))).await.is_some());
    let plain = home.images.create_volume(new("plain", MIB)).await.unwrap();
    assert!(check(&plain.handle, shared(None)).await.is_some());
}

#[tokio::test]
async fn reserved_space_counts_as_used() {
    let home = home();
    let capacity = async || {
        let none = HashMap::new();
        home.images.capacity(room(none, true)).await.unwrap()
    };
    let before = capacity().await.available;
    home.images
        .create_volume(new("thin", before / 2))
        .await
        .unwrap();
    assert!(capacity().await.available < before * 6 / 10);
    let thick = with(new("thick", 3 * MIB), &[("preallocate", "true")]);
    let thick = home.images.create_volume(thick).await.unwrap();
    let found = home.file(&thick).metadata().unwrap();
    assert!(found.blocks() * 512 >= 3 * MIB);
}
