//! On a cluster and a kernel that has the driver; elsewhere nothing is tested.

use std::{collections::HashMap, os::unix::fs::FileExt as _, thread};

use testkit::{TestCluster, skip_test};

use super::*;
use crate::{Kind, secret::Secrets};

fn credentials(cluster: &TestCluster, key: &str) -> Credentials {
    let given = [("userID", cluster.user.as_str()), ("userKey", key)];
    let given = given.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let given: HashMap<_, _> = given.into();
    Credentials::from_secrets(&Secrets::from(given)).unwrap()
}

/// An image that is removed with it, and all that is needed to map it.
struct Test {
    cluster: TestCluster,
    image: ImageSpec,
    monitors: Monitors,
    credentials: Credentials,
    options: MapOptions,
    mapper: Mapper,
    _dir: tempfile::TempDir,
}

impl Test {
    fn new(name: &str) -> Option<Self> {
        if !Path::new("/sys/bus/rbd").exists() {
            skip_test("the kernel module rbd is not loaded here");
            return None;
        }
        let cluster = TestCluster::shared()?;
        let name = format!("{name}-{}", uuid::Uuid::new_v4().simple());
        cluster.rbd(&["create", "-s", "64M", &format!("{}/{name}", cluster.pool)]);
        let dir = tempfile::tempdir().unwrap();
        Some(Self {
            image: ImageSpec {
                cluster_id: "lab".to_owned(),
                pool: cluster.pool.clone(),
                namespace: String::new(),
                name,
                snapshot: None,
            },
            monitors: Monitors::resolve(&cluster.monitors).unwrap(),
            credentials: credentials(&cluster, &cluster.key),
            options: MapOptions::default(),
            mapper: Mapper::open(dir.path().join("map")).unwrap(),
            cluster,
            _dir: dir,
        })
    }

    fn wanted(&self) -> Wanted<'_> {
        Wanted {
            image: &self.image,
            volume_id: &self.image.name,
            pool_id: None,
            fsid: None,
            features: Features::LAYERING,
            monitors: &self.monitors,
            credentials: &self.credentials,
            options: &self.options,
            location: None,
            read_only: false,
            net_namespace: None,
        }
    }

    /// As Ceph's own programs name it.
    fn spec(&self) -> String {
        format!("{}/{}", self.image.pool, self.image.name)
    }

    fn map(&self, wanted: &Wanted<'_>) -> Result<(RbdDevice, Done), KrbdError> {
        self.mapper.map(wanted, Greeting::ask(wanted)?)
    }
}

impl Drop for Test {
    fn drop(&mut self) {
        for mapped in mapped::named(&self.image.name).unwrap() {
            let _ = unmap(&mapped.device().unwrap()).unwrap();
        }
        let spec = self.spec();
        self.cluster.rbd(&["snap", "purge", "--no-progress", &spec]);
        self.cluster.rbd(&["rm", "--no-progress", &spec]);
    }
}

#[test]
fn an_image_is_mapped_once_recognised_and_unmapped() {
    let Some(test) = Test::new("life") else {
        return;
    };
    let (device, done) = test.map(&test.wanted()).unwrap();
    assert_eq!(done, Done::Now);
    assert_eq!(sysfs::size_bytes(device.dev).unwrap(), 64 << 20);
    assert_eq!(
        test.map(&test.wanted()).unwrap(),
        (device.clone(), Done::Already)
    );
    let marked = find_marked(&test.image.name).unwrap().unwrap();
    assert_eq!(marked.identity, device.identity);
    assert!(marked.image.is_named_as(&test.image));
    assert!(is_behind(device.dev, &device.identity));

    let config = format!("/sys/bus/rbd/devices/{}/config_info", marked.id);
    let config = fs::read_to_string(config).unwrap();
    assert!(!config.contains(&test.cluster.key), "{config}");
    let keys = fs::read_to_string("/proc/keys").unwrap_or_default();
    assert!(!keys.contains("uring-csi"), "{keys}");

    let reading = Wanted {
        read_only: true,
        ..test.wanted()
    };
    let error = test.map(&reading).unwrap_err();
    assert!(
        matches!(
            error,
            KrbdError::MappedOtherwise {
                how: "writable",
                ..
            }
        ),
        "{error}"
    );

    // By another of the cluster's names.
    let alias = ImageSpec {
        cluster_id: "another".to_owned(),
        ..test.image.clone()
    };
    let alias = Wanted {
        image: &alias,
        volume_id: "alias",
        ..test.wanted()
    };
    let error = test.map(&alias).unwrap_err();
    assert!(error.to_string().contains("for another volume"), "{error}");
    assert_eq!(error.kind(), Kind::Precondition);

    let open = File::open(&device.node).unwrap();
    let error = unmap(&device).unwrap_err();
    assert!(error.is_busy(), "{error}");
    drop(open);
    assert_eq!(unmap(&device).unwrap(), Detached::Now);
    assert_eq!(unmap(&device).unwrap(), Detached::Already);
    assert!(!is_behind(device.dev, &device.identity));
    let (device, _) = test.map(&reading).unwrap();
    assert!(device.read_only);
}

#[test]
fn a_snapshot_is_another_image() {
    let Some(test) = Test::new("snapshot") else {
        return;
    };
    let (device, _) = test.map(&test.wanted()).unwrap();
    let spec = format!("{}@s", test.spec());
    test.cluster
        .rbd(&["snap", "create", "--no-progress", &spec]);
    let image = ImageSpec {
        snapshot: Some("s".to_owned()),
        ..test.image.clone()
    };
    let wanted = Wanted {
        image: &image,
        read_only: true,
        ..test.wanted()
    };
    let (snapshot, done) = test.map(&wanted).unwrap();
    assert_eq!(done, Done::Now);
    assert_ne!(snapshot.dev, device.dev);
    assert_ne!(snapshot.identity, device.identity);
    assert!(snapshot.read_only);
}

#[test]
fn growth_of_the_image_reaches_its_device() {
    let Some(test) = Test::new("growth") else {
        return;
    };
    let (device, _) = test.map(&test.wanted()).unwrap();
    let error = refresh(&test.image, &device, 96 << 20).unwrap_err();
    assert!(matches!(error, KrbdError::Small { .. }), "{error}");
    let spec = test.spec();
    test.cluster
        .rbd(&["resize", "--no-progress", "-s", "96M", &spec]);
    assert_eq!(refresh(&test.image, &device, 96 << 20).unwrap(), 96 << 20);
    let file = File::options().write(true).open(&device.node).unwrap();
    file.write_all_at(&[1; 4096], (96 << 20) - 4096).unwrap();
    file.sync_all().unwrap();
}

#[test]
fn refusals_of_the_cluster_have_distinct_errors() {
    let Some(test) = Test::new("refused") else {
        return;
    };
    let wanted = test.wanted();
    // The last letters of a key are its own and not its header's.
    let (head, tail) = test.cluster.key.split_at(28);
    let swapped = |letter| if letter == 'A' { 'B' } else { 'A' };
    let other: String = tail.chars().take(4).map(swapped).collect();
    let other_key = credentials(&test.cluster, &format!("{head}{other}{}", &tail[4..]));
    let denied = Wanted {
        credentials: &other_key,
        ..wanted
    };
    let error = test.map(&denied).unwrap_err();
    assert!(
        matches!(error, KrbdError::Denied { .. }) && error.kind() == Kind::Unauthenticated,
        "{error:?}"
    );

    let missing = ImageSpec {
        name: "no-such-image".to_owned(),
        ..test.image.clone()
    };
    let missing = Wanted {
        image: &missing,
        ..wanted
    };
    let error = test.map(&missing).unwrap_err();
    assert_eq!(error.kind(), Kind::NotFound, "{error:?}");
    let nowhere = ImageSpec {
        pool: "no-such-pool".to_owned(),
        ..test.image.clone()
    };
    let error = test.map(&Wanted {
        image: &nowhere,
        ..wanted
    });
    assert_eq!(error.unwrap_err().kind(), Kind::NotFound);

    let journaled = Wanted {
        features: Features::JOURNALING | Features::LAYERING,
        ..wanted
    };
    let error = test.map(&journaled).unwrap_err();
    assert!(error.to_string().contains("lacks: journaling;"), "{error}");
    assert!(error.is_for_another_mounter());

    let unknown = MapOptions::parse("no_such_option").unwrap();
    let error = test.map(&Wanted {
        options: &unknown,
        ..wanted
    });
    let error = error.unwrap_err();
    assert!(error.to_string().contains("map options"), "{error}");

    let blanks = ImageSpec {
        name: "a b".to_owned(),
        ..test.image.clone()
    };
    let error = test.map(&Wanted {
        image: &blanks,
        ..wanted
    });
    assert!(matches!(error.unwrap_err(), KrbdError::Unsuited { .. }));
    assert!(mapped::named(&test.image.name).unwrap().is_empty());
}

/// The kernel gives the device of the second image the number that the first one had, unless
/// another test maps one meanwhile.
#[test]
fn a_name_that_was_read_is_not_taken_for_that_of_a_later_map() {
    let [Some(one), Some(other)] = ["earlier", "later"].map(Test::new) else {
        return;
    };
    for test in [&one, &other, &one] {
        let (device, done) = test.map(&test.wanted()).unwrap();
        assert_eq!(done, Done::Now);
        for at in [&one, &other] {
            let found = mapped::named(&at.image.name).unwrap();
            let devs: Vec<_> = found.iter().map(|it| it.device().unwrap().dev).collect();
            let is_it = at.image == test.image;
            assert_eq!(devs, is_it.then_some(device.dev).as_slice());
        }
        assert_eq!(unmap(&device).unwrap(), Detached::Now);
    }
}

#[test]
fn an_image_mapped_by_others_is_recognised_by_its_monitors_or_refused() {
    let Some(test) = Test::new("others") else {
        return;
    };
    let theirs = format!(
        "{} name={},secret={} {} {} -",
        test.cluster.monitors[0],
        test.cluster.user,
        test.cluster.key,
        test.image.pool,
        test.image.name
    );
    write(ADD, &theirs).unwrap();
    let (device, done) = test.map(&test.wanted()).unwrap();
    assert_eq!(done, Done::Already);

    let away = Monitors::resolve(&["192.0.2.1:6789".to_owned()]).unwrap();
    let away = Wanted {
        monitors: &away,
        ..test.wanted()
    };
    let error = test.map(&away).unwrap_err();
    let named = device.node.display().to_string();
    assert!(
        error.to_string().contains(&named) && error.kind() == Kind::Precondition,
        "{error}"
    );

    // A cluster whose monitors were all replaced is known by its fsid.
    for (fsid, which) in [
        (&*device.identity.fsid, recognise::Which::It),
        ("another", recognise::Which::Another),
    ] {
        let fsid = Some(fsid);
        let mapped = Mapped::of(device.dev).unwrap();
        assert_eq!(recognise::which(&mapped, &Wanted { fsid, ..away }), which);
    }

    // A pool of another id is another cluster's: there nobody answers.
    let another = Wanted {
        pool_id: Some(device.identity.pool_id + 1),
        ..away
    };
    assert_eq!(
        recognise::which(&Mapped::of(device.dev).unwrap(), &another),
        recognise::Which::Another
    );

    write(ADD, &theirs).unwrap();
    let error = test.map(&test.wanted()).unwrap_err();
    assert!(matches!(error, KrbdError::Twice { .. }), "{error}");
}

#[test]
fn silent_monitors_are_refused_before_the_driver_maps() {
    let Some(test) = Test::new("silent") else {
        return;
    };
    let closed = Monitors::resolve(&["127.0.0.1:1".to_owned()]).unwrap();
    let error = test.map(&Wanted {
        monitors: &closed,
        ..test.wanted()
    });
    let error = error.unwrap_err();
    assert!(
        matches!(error, KrbdError::Silent { .. }) && error.kind() == Kind::Transient,
        "{error}"
    );
}

#[test]
fn a_map_that_a_killed_agent_left_is_waited_for() {
    let Some(test) = Test::new("left") else {
        return;
    };
    let lock = test.mapper.lock(&test.image.name).unwrap();
    let error = test.map(&test.wanted()).unwrap_err();
    assert!(matches!(error, KrbdError::UnderWay), "{error}");
    drop(lock);
    let (_, done) = test.map(&test.wanted()).unwrap();
    assert_eq!(done, Done::Now);
}

#[test]
fn many_maps_at_once_each_get_their_own() {
    let tests: Option<Vec<_>> = (0..8).map(|nr| Test::new(&format!("many-{nr}"))).collect();
    let Some(tests) = tests else {
        return;
    };
    thread::scope(|scope| {
        for test in &tests {
            scope.spawn(|| {
                let (device, _) = test.map(&test.wanted()).unwrap();
                assert!(
                    Mapped::of(device.dev)
                        .unwrap()
                        .image
                        .is_named_as(&test.image)
                );
                assert_eq!(unmap(&device).unwrap(), Detached::Now);
            });
        }
    });
}
