//! ListVolumes and GetCapacity of pools with few and with many volumes.

use std::{
    fs::{self, File},
    path::Path,
    time::Instant,
};

use criterion::Criterion;
use serde_json::Value;
use testkit::{Controller, ControllerSetup, Volume, claim};
use uring_csi::proto::csi::{GetCapacityRequest, ListVolumesRequest};
use uuid::Uuid;

use crate::rig::Rig;

const LIST: &str = "ListVolumes, a page of 100";
const CAPACITY: &str = "GetCapacity";
/// So large that all of them together fit in a tmpfs of some GiB.
const BYTES: u64 = 4096;

/// As long as nothing changes in the pool, and the first call after a change.
pub fn of_pools(criterion: &mut Criterion, rig: &Rig) {
    of_pool(criterion, rig, 100, ["100", "100, changed"]);
    of_pool(criterion, rig, 20_000, ["20000", "20000, changed"]);
    of_pool(criterion, rig, 100_000, ["100000", "100000, changed"]);
}

fn of_pool(criterion: &mut Criterion, rig: &Rig, many: usize, ways: [&'static str; 2]) {
    let [unchanged, changed] = ways;
    let pool = rig.sandbox.pool(unchanged);
    let mut setup = ControllerSetup::new(&rig.sandbox);
    setup.name = unchanged;
    setup.pools = vec![format!("main={},shared", pool.display())];
    let controller = rig
        .runtime
        .block_on(Controller::start_with(&rig.sandbox, setup));
    let begin = Instant::now();
    fill(rig, &controller, &pool, many);
    println!("made {many} volumes in {:.1?}", begin.elapsed());

    let mut client = controller.client();
    let mut list = || {
        let page = ListVolumesRequest {
            max_entries: 100,
            ..ListVolumesRequest::default()
        };
        let page = rig.runtime.block_on(client.list_volumes(page));
        assert_eq!(page.expect("a page").into_inner().entries.len(), 100);
    };
    let records = pool.join(".uring-csi/volumes");
    let mut group = criterion.benchmark_group(LIST);
    list();
    rig.measure(&mut group, LIST, unchanged, &mut list);
    rig.measure_between(&mut group, LIST, changed, || change(&records), list, || {});
    group.finish();

    let mut client = controller.client();
    let mut capacity = || {
        let room = client.get_capacity(GetCapacityRequest::default());
        rig.runtime.block_on(room).expect("an answer");
    };
    let mut group = criterion.benchmark_group(CAPACITY);
    rig.measure(&mut group, CAPACITY, unchanged, &mut capacity);
    rig.measure_between(
        &mut group,
        CAPACITY,
        changed,
        || change(&pool),
        capacity,
        || {},
    );
    group.finish();
}

/// Volumes like the first one, without the reservations of their names.
fn fill(rig: &Rig, controller: &Controller, pool: &Path, many: usize) {
    let block = Volume::block("any").capability;
    let first = controller.create(claim("pvc", "main", &block, BYTES));
    let first = rig.runtime.block_on(first).expect("a volume");
    let image = &first.volume_context["image"];
    let records = pool.join(".uring-csi/volumes");
    let id = image.strip_suffix(".img").expect("an image");
    let record = fs::read(records.join(format!("{id}.json"))).expect("a record");
    let mut record: Value = serde_json::from_slice(&record).expect("a record");
    for n in 1..many {
        let id = Uuid::now_v7().to_string();
        record["id"] = Value::from(&*id);
        record["name"] = Value::from(format!("pvc-{n}"));
        let text = serde_json::to_vec(&record).expect("a record");
        fs::write(records.join(format!("{id}.json")), text).expect("a record");
        let image = File::create(pool.join(format!("{id}.img")));
        image
            .and_then(|image| image.set_len(BYTES))
            .expect("an image");
    }
}

/// A change that leaves all as it was, but for the directory's times.
fn change(dir: &Path) {
    let path = dir.join("changed");
    File::create(&path).expect("a file");
    fs::remove_file(path).expect("removed");
}
