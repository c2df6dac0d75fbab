//! Creates that fail, and cannot be undone.

use super::*;
use crate::error_chain;

#[tokio::test]
async fn a_create_that_is_not_undone_has_no_final_error() {
    let Some(home) = Home::new() else { return };
    let source = home.make(home.volume("source", MIB)).await;
    // A user who may change nothing but the journal.
    let (pool, user) = (&home.pool, format!("journal-{}", home.pool));
    let caps = format!("allow r class-read pool={pool}, allow rwx pool={pool} object_prefix csi.");
    let client = format!("client.{user}");
    let create = ["auth", "get-or-create-key", &client];
    let caps = ["mon", "profile rbd", "osd", &caps];
    let key = home.cluster.ceph(&[&create[..], &caps].concat());
    let secrets = [("userID", user), ("userKey", key.trim().to_owned())];
    let secrets = HashMap::from(secrets.map(|(name, value)| (name.to_owned(), value)));

    let copy = NewVolume {
        source: Some(ContentSource::Volume(source.handle.clone())),
        ..home.volume("copy", MIB)
    };
    let snapshot = home.snapshot("taken", &source.handle);
    let (mut limited, mut limited_snapshot) = (copy.clone(), snapshot.clone());
    limited.secrets = secrets.clone().into();
    limited_snapshot.secrets = secrets.into();
    let create = async || {
        let copy = home.rbd.create_volume(limited.clone()).await;
        let taken = home.rbd.create_snapshot(limited_snapshot.clone()).await;
        [copy.unwrap_err(), taken.unwrap_err()]
    };
    for error in create().await {
        let text = error_chain(&error);
        assert_eq!(error.kind(), ErrorKind::Transient, "{text}");
        // Why it failed, and why the undo did.
        assert_eq!(text.matches("refuses the user").count(), 2, "{text}");
        assert!(text.contains("nor remove what was begun"), "{text}");
    }
    // Their repeats neither.
    for error in create().await {
        let text = error_chain(&error);
        assert_eq!(error.kind(), ErrorKind::Transient, "{text}");
        assert!(text.contains("refuses the user"), "{text}");
        assert!(text.contains("an earlier attempt"), "{text}");
    }

    // A repeat as another user finishes both.
    let copy = home.make(copy).await;
    let taken = home.rbd.create_snapshot(snapshot).await.unwrap();
    let deleted = home.rbd.delete_snapshot(taken.handle, home.secrets());
    deleted.await.unwrap();
    for volume in [copy, source] {
        home.delete(&volume.handle).await.unwrap();
    }
    assert_eq!(home.images(), [""; 0]);
    let left = home.cluster.rados(pool, &["ls"]);
    let entries = ["csi.volume.", "csi.snap."].map(|prefix| left.contains(prefix));
    assert_eq!(entries, [false; 2], "{left}");
    home.cluster.ceph(&["auth", "rm", &client]);
}
