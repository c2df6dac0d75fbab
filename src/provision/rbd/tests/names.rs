//! The names of Kubernetes in images' metadata.

use std::collections::BTreeMap;

use super::*;
use crate::{
    ceph::client::rbd::{Image, OpenMode},
    provision::NewGroupSnapshot,
};

const CLAIM: &str = "csi.storage.k8s.io/pvc/name";
const CLUSTER: &str = "csi.ceph.com/cluster/name";

impl Home {
    fn named(mut self, names: ObjectNames) -> Self {
        let purge = PurgeTimes {
            settle: Duration::ZERO,
            lock: Duration::from_secs(1),
            ..PurgeTimes::default()
        };
        let mut store = store_over(self.dir.path(), None, purge);
        store.names_of_objects = names;
        self.rbd = Stores::new(None, Some(store.into()), None, &Lanes::new(4));
        self
    }

    fn names(&self, image: &str) -> BTreeMap<String, String> {
        let image = Image::open(&self.io(), image, OpenMode::ReadOnly).unwrap();
        image.metadata_list().unwrap()
    }

    fn image_of(&self, handle: &str) -> String {
        let uuid = &handle[handle.len() - 36..];
        let mut images = self.images().into_iter();
        images.find(|name| name.ends_with(uuid)).unwrap()
    }
}

/// A claim's volume, as csi-provisioner asks for it.
fn of_claim(mut new: NewVolume, claim: &str) -> NewVolume {
    let names = [
        (CLAIM, claim),
        ("csi.storage.k8s.io/pvc/namespace", "tenant"),
        ("csi.storage.k8s.io/pv/name", "pvc-1"),
        ("csi.storage.k8s.io/fstype", "ext4"),
    ];
    let own = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
    new.parameters.extend(names.map(own));
    new
}

fn list(of: &[(&str, &str)]) -> BTreeMap<String, String> {
    let own = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    of.iter().map(own).collect()
}

#[tokio::test]
async fn images_have_the_names_of_their_own_objects() {
    let names = ObjectNames {
        are_set: true,
        cluster: Some("east".to_owned()),
    };
    let Some(home) = Home::new() else { return };
    let home = home.named(names);
    let of_volume = |claim: &str| {
        list(&[
            (CLAIM, claim),
            ("csi.storage.k8s.io/pvc/namespace", "tenant"),
            ("csi.storage.k8s.io/pv/name", "pvc-1"),
            (CLUSTER, "east"),
        ])
    };
    let made = home.make(of_claim(home.volume("one", MIB), "data")).await;
    assert_eq!(home.names(&home.image_of(&made.handle)), of_volume("data"));

    let mut new = home.snapshot("moment", &made.handle);
    let of_snapshot = [
        ("csi.storage.k8s.io/volumesnapshot/name", "daily"),
        (
            "csi.storage.k8s.io/volumesnapshotcontent/name",
            "snapcontent-1",
        ),
        ("snapshotNamePrefix", "csi-snap-"),
    ];
    new.parameters = list(&of_snapshot).into_iter().collect();
    let snapshot = home.rbd.create_snapshot(new).await.unwrap();
    let expected = [of_snapshot[0], of_snapshot[1], (CLUSTER, "east")];
    let image = home.image_of(&snapshot.handle);
    assert_eq!(home.names(&image), list(&expected));

    let source = Some(ContentSource::Snapshot(snapshot.handle));
    let copy = of_claim(
        NewVolume {
            source,
            ..home.volume("two", MIB)
        },
        "copy",
    );
    let copy = home.make(copy).await;
    assert_eq!(home.names(&home.image_of(&copy.handle)), of_volume("copy"));
}

#[tokio::test]
async fn a_prefix_that_no_node_maps_is_refused() {
    let Some(home) = Home::new() else { return };
    let invalid = |name: &str, error: ProvisionError| {
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(name), "{error}");
    };
    let prefix = |name: &str| (name.to_owned(), "team/".to_owned());
    let mut new = home.volume("one", MIB);
    let made = home.make(new.clone()).await;
    "two".clone_into(&mut new.name);
    new.parameters.extend([prefix("volumeNamePrefix")]);
    let refused = home.rbd.create_volume(new).await;
    invalid("volumeNamePrefix", refused.unwrap_err());
    let mut new = home.snapshot("moment", &made.handle);
    new.parameters.extend([prefix("snapshotNamePrefix")]);
    let refused = home.rbd.create_snapshot(new).await;
    invalid("snapshotNamePrefix", refused.unwrap_err());
    let new = NewGroupSnapshot {
        name: "group".to_owned(),
        volumes: vec![made.handle],
        parameters: HashMap::from([prefix("groupNamePrefix")]),
        secrets: home.secrets(),
    };
    let refused = home.rbd.create_group_snapshot(new).await;
    invalid("groupNamePrefix", refused.unwrap_err());
    assert_eq!(home.images().len(), 1);
}

#[tokio::test]
async fn images_have_no_names_unasked() {
    let Some(home) = Home::new() else { return };
    let names = ObjectNames {
        are_set: false,
        cluster: Some("east".to_owned()),
    };
    let home = home.named(names);
    let made = home.make(of_claim(home.volume("one", MIB), "data")).await;
    assert!(home.names(&home.image_of(&made.handle)).is_empty());
}
