//! Listings in pages, and entries that have lost their image or record.

use super::*;

#[tokio::test]
async fn pages_continue_behind_a_deleted_entry() {
    let home = home();
    let mut handles = Vec::new();
    for n in 0..5 {
        let made = home
            .images
            .create_volume(new(&format!("pvc-{n}"), MIB))
            .await;
        handles.push(made.unwrap().handle);
    }
    let page = async |from: Option<String>| {
        let page = home
            .images
            .list_volumes(ListRequest {
                from,
                max: 2,
                omitted: None,
            })
            .await
            .unwrap();
        let ids: Vec<_> = page.entries.into_iter().map(|v| v.handle).collect();
        (ids, page.next)
    };
    let (ids, next) = page(None).await;
    assert_eq!(ids, handles[..2]);
    home.images
        .delete_volume(handles[1].clone(), none())
        .await
        .unwrap();
    let late = home.images.create_volume(new("late", MIB)).await.unwrap();
    let (ids, next) = page(next).await;
    assert_eq!(ids, handles[2..4]);
    let (ids, next) = page(next).await;
    assert_eq!((ids, next), (vec![handles[4].clone(), late.handle], None));
    let bad = ListRequest {
        from: Some("2".to_owned()),
        max: 0,
        omitted: None,
    };
    assert_eq!(kind(home.images.list_volumes(bad).await), Kind::InUse);
}

#[tokio::test]
async fn a_page_has_an_end_and_a_bad_record_hides_no_other() {
    use catalogue::{Catalogue, CatalogueEntry, EntryState};
    let home = home();
    let catalogue = Catalogue::<volumes::VolumeDetail>::of(home.pool());
    let records = home.pool().meta_dir("volumes").unwrap();
    for n in 0..=listing::LARGEST_PAGE {
        let entry = CatalogueEntry {
            id: uuid::Uuid::now_v7(),
            name: format!("pvc-{n}"),
            state: EntryState::Ready,
            detail: volumes::VolumeDetail {
                parameters: crate::provision::Parameters::default(),
                source: None,
                many_nodes_write: false,
                made_bytes: None,
            },
        };
        let bytes = serde_json::to_vec(&entry).unwrap();
        std::fs::write(records.join(format!("{}.json", entry.id)), bytes).unwrap();
    }
    let bad = uuid::Uuid::now_v7();
    std::fs::write(records.join(format!("{bad}.json")), "{").unwrap();
    assert_eq!(catalogue.ids().unwrap().len(), listing::LARGEST_PAGE + 2);
    let mut what = ListRequest::default();
    for expected in [listing::LARGEST_PAGE, 1] {
        let page = home.images.list_volumes(what.clone()).await.unwrap();
        assert_eq!(page.entries.len(), expected);
        what.from = page.next;
    }
    assert_eq!(what.from, None);
}

#[tokio::test]
async fn a_lost_image_is_reported_and_can_be_deleted() {
    let home = home();
    let made = home.images.create_volume(new("pvc", MIB)).await.unwrap();
    let condition = async || {
        home.images
            .volume_condition(made.handle.clone(), none())
            .await
            .unwrap()
    };
    assert_eq!(condition().await, None);
    std::fs::remove_file(home.pool().image_path(&made.context["image"])).unwrap();
    assert_eq!(condition().await.unwrap().reason, "ImageMissing");
    let again = home.images.create_volume(new("pvc", MIB)).await;
    assert_eq!(kind(again), Kind::Internal);
    home.images
        .delete_volume(made.handle, none())
        .await
        .unwrap();
    assert_eq!(home.files(), [""; 0]);
}

#[tokio::test]
async fn an_image_whose_record_is_lost_is_left_alone() {
    let home = home();
    let made = home.images.create_volume(new("pvc", MIB)).await.unwrap();
    let taken = home
        .images
        .create_snapshot(snapshot_of("snap".to_owned(), made.handle.clone()))
        .await;
    let snapshot = taken.unwrap().handle;
    home.claim(&made, "node-a");
    home.file(&made).write_all_at(b"data", 0).unwrap();
    for area in ["volumes", "snapshots"] {
        let files = files_below(&home.pool().meta_path(area));
        let record = files.iter().find(|file| file.contains(".json"));
        std::fs::remove_file(record.unwrap()).unwrap();
    }
    let files = home.files();
    let image = &made.context["image"];
    let errors = home.images.sweep(StoreKind::Images).await.unwrap();
    let messages: Vec<_> = errors.iter().map(ToString::to_string).collect();
    assert_eq!(messages.len(), 2, "{messages:?}");
    assert!(messages[0].contains(image) && messages[1].contains("snapshots/"));
    let again = home.images.create_volume(new("pvc", MIB)).await;
    assert!(again.unwrap_err().to_string().contains(image));
    home.images
        .delete_volume(made.handle, none())
        .await
        .unwrap();
    home.images.delete_snapshot(snapshot, none()).await.unwrap();
    assert_eq!(home.files(), files);
}

#[tokio::test]
async fn an_entry_that_cannot_be_read_is_missing_only_where_the_list_says_so() {
    let home = home();
    let mut records = Vec::new();
    for name in ["a", "b", "c"] {
        let made = home.images.create_volume(new(name, MIB)).await.unwrap();
        let id = made.context["image"]
            .strip_suffix(".img")
            .unwrap()
            .to_owned();
        records.push(home.pool().meta_path("volumes").join(format!("{id}.json")));
    }
    // Reading it fails, as it may on a bad disk.
    std::fs::remove_file(&records[1]).unwrap();
    std::fs::create_dir(&records[1]).unwrap();
    let whole = home.images.list_volumes(ListRequest::default()).await;
    assert_eq!(kind(whole), Kind::Transient);
    let omitted = crate::provision::Omitted::within(std::time::Duration::from_secs(60));
    let what = ListRequest {
        omitted: Some(omitted.clone()),
        ..ListRequest::default()
    };
    let listed = home.images.list_volumes(what).await.unwrap().entries;
    let names: Vec<_> = listed.iter().map(|one| &*one.context["name"]).collect();
    assert_eq!(names, ["a", "c"]);
    let [sentence] = &*omitted.take() else {
        panic!("another number of omissions");
    };
    assert!(
        sentence.contains(records[1].to_str().unwrap()),
        "{sentence}"
    );
}
