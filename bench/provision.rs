//! CreateVolume and DeleteVolume of Ceph images, beside the calls of Ceph's
//! libraries that they need, and beside `rbd`.

use std::{cell::RefCell, sync::Arc, time::Duration};

use criterion::Criterion;
use futures_util::future::join_all;
use testkit::{Controller, ControllerSetup, Volume, claim};
use uring_csi::internals::{
    Header, ImageOptions, IoCtx, Journal, JournalEntry, JournalKind, NameEntry, rbd, trash,
};
use uring_csi::proto::csi::CreateVolumeRequest;
use uuid::Uuid;

use crate::{
    backends::SIZE,
    ceph::{CREATE, Ceph, ID},
    life::on_threads,
    rig::{Rig, timed},
};

/// So many at once.
pub fn create_and_delete(criterion: &mut Criterion, rig: &Rig, ceph: &Ceph, many: usize) {
    let library = Library::new(ceph);

    let mut setup = ControllerSetup::new(&rig.sandbox);
    setup.name = if many == 1 { "one" } else { "many" };
    setup.pools.clear();
    setup.args = ceph.args();
    setup.secrets = ceph.secrets();
    let controller = rig
        .runtime
        .block_on(Controller::start_with(&rig.sandbox, setup));
    let made = RefCell::default();
    let create_by_socket = || {
        let creates = (0..many).map(|_| controller.create(request(ceph)));
        *made.borrow_mut() = rig.runtime.block_on(join_all(creates));
    };
    let delete_by_socket = || {
        let made = made.take().into_iter().map(|made| made.expect("a volume"));
        let deletes = made.map(async |made| controller.delete(&made.volume_id).await);
        for deleted in rig.runtime.block_on(join_all(deletes)) {
            deleted.expect("deleted");
        }
    };
    let by_socket = Way {
        name: "socket",
        create: &create_by_socket,
        delete: &delete_by_socket,
        after: &|| library.wait_for_empty_trash(),
    };
    by_socket.measure(criterion, rig, many);

    let of_library = RefCell::default();
    let create_by_library = || *of_library.borrow_mut() = on_threads(0..many, |_| library.create());
    let ids = RefCell::default();
    let delete_by_library = || {
        let made: Vec<Made> = of_library.take();
        *ids.borrow_mut() = on_threads(made.into_iter(), |made| library.delete(&made));
    };
    let removed = || {
        let ids: Vec<String> = ids.take();
        for id in &ids {
            library.remove(id);
        }
    };
    let by_library = Way {
        name: "library",
        create: &create_by_library,
        delete: &delete_by_library,
        after: &removed,
    };
    by_library.measure(criterion, rig, many);

    rig.compare(
        &format!("Ceph: CreateVolume and DeleteVolume, {many} at once, to the library"),
        || by_socket.timed(),
        || by_library.timed(),
    );

    let image = |n| format!("{}/exec-{n}", ceph.cluster.pool);
    let create_by_exec = || {
        on_threads(0..many, |n| {
            let image = image(n);
            ceph.cluster
                .rbd(&[&CREATE[..], &["--size", "1G", &image]].concat())
        });
    };
    let delete_by_exec = || {
        on_threads(0..many, |n| {
            ceph.cluster.rbd(&["rm", "--no-progress", &image(n)])
        });
    };
    let by_exec = Way {
        name: "exec",
        create: &create_by_exec,
        delete: &delete_by_exec,
        after: &|| {},
    };
    by_exec.measure(criterion, rig, many);
}

/// One way to create volumes and to delete them.
struct Way<'a> {
    name: &'static str,
    create: &'a dyn Fn(),
    delete: &'a dyn Fn(),
    /// What is not timed.
    after: &'a dyn Fn(),
}

impl Way<'_> {
    /// Each of the two alone.
    fn measure(&self, criterion: &mut Criterion, rig: &Rig, many: usize) {
        let Self {
            name,
            create,
            delete,
            after,
        } = self;
        let case = format!("Ceph: CreateVolume, {many} at once");
        let mut group = criterion.benchmark_group(&case);
        let back = || {
            delete();
            after();
        };
        rig.measure_between(&mut group, &case, name, || {}, create, back);
        group.finish();
        let case = format!("Ceph: DeleteVolume, {many} at once");
        let mut group = criterion.benchmark_group(&case);
        rig.measure_between(&mut group, &case, name, create, delete, after);
        group.finish();
    }

    /// The time of both.
    fn timed(&self) -> Duration {
        let took = timed(self.create) + timed(self.delete);
        (self.after)();
        took
    }
}

fn request(ceph: &Ceph) -> CreateVolumeRequest {
    let name = format!("pvc-{}", Uuid::new_v4());
    let block = Volume::block("any").capability;
    let mut request = claim(&name, &ceph.cluster.pool, &block, SIZE);
    for (key, value) in [("clusterID", ID), ("imageFeatures", "layering")] {
        request.parameters.insert(key.to_owned(), value.to_owned());
    }
    request
}

/// The least that a volume in ceph-csi's form takes, where two controllers may be at
/// it: its name reserved, its entry written while the name leads there, an image, and
/// the image's id in the entry; and all that taken back, if nobody uses the image.
struct Library {
    pool: IoCtx,
    journal: Journal,
    options: ImageOptions,
}

struct Made {
    uuid: Uuid,
    name: String,
}

impl Library {
    fn new(ceph: &Ceph) -> Self {
        let cluster: Arc<_> = ceph.connect();
        Self {
            pool: cluster.ioctx(&*ceph.cluster.pool, "").expect("a pool"),
            journal: Journal::new(JournalKind::Volume, "library"),
            options: ImageOptions {
                features: Some("layering".parse().expect("a feature")),
                ..ImageOptions::default()
            },
        }
    }

    fn create(&self) -> Made {
        let (pool, uuid) = (&self.pool, Uuid::new_v4());
        let name = format!("pvc-{uuid}");
        let reserved = NameEntry {
            uuid,
            pool_id: None,
        };
        let found = self
            .journal
            .reserve(pool, &name, reserved)
            .expect("a reservation");
        assert!(found.is_none());
        let image = JournalKind::Volume.image(None, uuid);
        let entry = JournalEntry {
            name: name.clone(),
            image: image.clone(),
            ..JournalEntry::default()
        };
        let entered = self.journal.enter(pool, pool, reserved, &entry);
        assert!(entered.expect("an entry"));
        rbd::create(pool, &image, SIZE, &self.options).expect("an image");
        let id = rbd::image_id(pool, &image)
            .expect("an id")
            .expect("an image");
        let completed = self.journal.complete(pool, uuid, entry.state, &id);
        assert!(completed.expect("an entry"));
        Made { uuid, name }
    }

    /// The image's id, by which it is in the trash.
    fn delete(&self, made: &Made) -> String {
        let pool = &self.pool;
        let entry = self
            .journal
            .read(pool, made.uuid)
            .expect("a journal")
            .expect("an entry");
        let header = Header::of(pool, &entry.image).expect("an image");
        assert!(header.watching().expect("its watchers").is_empty());
        trash::move_image(pool, &entry.image, Duration::ZERO).expect("moved to the trash");
        let reserved = NameEntry {
            uuid: made.uuid,
            pool_id: None,
        };
        self.journal
            .forget(pool, pool, &made.name, reserved)
            .expect("forgotten");
        entry.image_id
    }

    fn remove(&self, id: &str) {
        trash::remove(&self.pool, id, false).expect("removed from the trash");
    }

    /// The controller, or Ceph's manager, empties it behind the deletes.
    fn wait_for_empty_trash(&self) {
        while !trash::list(&self.pool).expect("a trash").is_empty() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
