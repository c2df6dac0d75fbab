use std::{fs::File, sync::Barrier, thread};

use rustix::mount::{MountFlags, mount};

use super::*;
use crate::mount::testing::MountScratch;

const MIB: u64 = 1 << 20;

/// With 64 MiB, and as many images as let a look at them take a while.
fn images(scratch: &MountScratch) -> ImageFiles {
    let dir = scratch.path();
    let options = Some(c"size=64m");
    mount("none", dir, "tmpfs", MountFlags::empty(), options).expect("a tmpfs");
    for number in 0..500 {
        File::create(dir.join(format!("other-{number}.img"))).expect("made");
    }
    let pool = Pool {
        name: "main".to_owned(),
        dir: dir.to_owned(),
        scope: Scope::Local,
        mounted: false,
    };
    pool.initialize().expect("ours");
    let pools = Pools::new([pool]).expect("one pool");
    ImageFiles {
        node_id: "node".to_owned(),
        boot_id: "boot".to_owned(),
        pending_releases: PendingReleases::of(&pools),
        pools,
    }
}

/// Makes or grows images `a` and `b` at once, many times, by 40 MiB each, of which the
/// pool has room for one.
fn at_once(other: impl Fn(&ImageFiles) -> Result<(), DeviceError> + Sync) {
    let scratch = MountScratch::new();
    let images = images(&scratch);
    let [a, b] = ["a", "b"].map(|image| scratch.path().join(image));
    let source = ImageSource::new("main", "a");
    for round in 0..50 {
        for image in [&a, &b] {
            File::create(image).expect("made");
        }
        let barrier = Barrier::new(2);
        let grown = thread::scope(|scope| {
            let other = scope.spawn(|| {
                barrier.wait();
                other(&images)
            });
            barrier.wait();
            let one = images.bind(&source).enlarge(40 * MIB);
            [one, other.join().expect("ends")]
        });
        let refused = |answer: &Result<(), DeviceError>| {
            let no_room = |error: &PoolError| {
                matches!(
                    error,
                    PoolError::NoRoom { .. } | PoolError::NoRoomToGrow { .. }
                )
            };
            matches!(answer, Err(DeviceError::Pool(error)) if no_room(error))
        };
        let refused = grown.iter().filter(|answer| refused(answer)).count();
        assert_eq!(refused, 1, "in round {round}: {grown:?}");
        let pool = images.pools.get("main").expect("there");
        let room = pool.room().expect("looked at");
        assert!(room.promised <= room.free, "in round {round}: {room:?}");
        let _ = pool
            .delete_inline(&digest::sha256_hex("pod"))
            .expect("deleted");
    }
}

#[test]
fn concurrent_growths_count_each_others_space() {
    at_once(|images| {
        let source = ImageSource::new("main", "b");
        images.bind(&source).enlarge(40 * MIB)
    });
}

#[test]
fn a_growth_and_an_inline_volume_count_each_others_space() {
    at_once(|images| {
        let source = images.inline_source(None, "pod")?;
        let done = images.bind(&source).create_inline("pod", 40 * MIB)?;
        assert_eq!(done, Done::Now);
        Ok(())
    });
}
