//! Keeping chains of clones short.
//!
//! Each copy lengthens the chain that a read may have to follow. If a chain is long, the
//! parent is flattened in the background, that is, it gets data of its own; if it is too
//! long, the caller waits for that.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use serde_json::json;

use super::{error::RbdError, pools::ManagerStatus, trash::ask_manager};
use crate::{
    ceph::client::{
        CephError,
        rados::IoCtx,
        rbd::{Image, OpenMode},
    },
    error_chain,
    lane::Lanes,
};

/// How long chains may become, and how many snapshots an image may have: ceph-csi's
/// defaults. krbd maps chains of 16, and images with 510 snapshots.
#[derive(Clone, Copy, Debug)]
pub struct FlattenLimits {
    /// The length from which the chain is flattened in the background.
    pub soft_depth: usize,
    /// The length from which a copy waits until the chain is flattened.
    pub hard_depth: usize,
    /// The number of snapshots from which clones are flattened in the background.
    pub soft_snapshots: usize,
    /// The number of snapshots above which a new one waits until clones are flattened.
    pub hard_snapshots: usize,
}

impl Default for FlattenLimits {
    fn default() -> Self {
        Self {
            soft_depth: 4,
            hard_depth: 8,
            soft_snapshots: 250,
            hard_snapshots: 450,
        }
    }
}

/// Flattens images, each once at a time.
#[derive(Clone, Debug)]
pub struct Flattener {
    lanes: Lanes,
    bounds: FlattenLimits,
    work: Arc<Mutex<Work>>,
    #[cfg(test)]
    panics: super::panic_once::PanicOnce,
}

#[derive(Debug, Default)]
struct Work {
    /// The images to flatten, by reason: those of one queue are flattened one after the
    /// other.
    queues: HashMap<String, VecDeque<LongChained>>,
    /// All of these, and those that are being flattened.
    known: HashSet<String>,
}

/// An image to flatten.
#[derive(Clone, Debug)]
struct LongChained {
    pool: IoCtx,
    name: String,
    /// The id of one that is in the trash, where others may have its name.
    trashed: Option<String>,
}

impl LongChained {
    fn named(pool: &IoCtx, name: &str) -> Self {
        Self {
            pool: pool.clone(),
            name: name.to_owned(),
            trashed: None,
        }
    }

    /// Its name among the images of all clusters.
    fn full_name(&self) -> String {
        let in_pool = self.trashed.as_ref().unwrap_or(&self.name);
        format!("{}/{}/{in_pool}", self.pool.cluster().fsid(), self.pool)
    }
}

impl Flattener {
    pub fn new(lanes: Lanes, bounds: FlattenLimits) -> Self {
        Self {
            lanes,
            bounds,
            work: Arc::default(),
            #[cfg(test)]
            panics: super::panic_once::PanicOnce::default(),
        }
    }

    /// Keeps the chain that ends in an image within its bounds, with `more` links added
    /// behind it.
    pub fn keep_short(
        &self,
        pool: &IoCtx,
        image: &Image,
        name: &str,
        more: usize,
    ) -> Result<(), RbdError> {
        let depth = depth(image)? + more;
        if depth < self.bounds.soft_depth {
            return Ok(());
        }
        let one = LongChained::named(pool, name);
        self.flatten(one.full_name(), [one].into());
        if depth < self.bounds.hard_depth {
            return Ok(());
        }
        Err(RbdError::Flattening(format!("{pool}/{name}")))
    }

    /// The same for a volume that is to be copied. It may be in use; so not it but
    /// its parent is flattened.
    pub fn keep_parent_short(&self, image: &Image) -> Result<(), RbdError> {
        let Some(parent) = image.parent()?.map(|parent| parent.image) else {
            return Ok(());
        };
        if parent.in_trash {
            return Ok(());
        }
        let pool = image
            .io()
            .cluster()
            .ioctx(parent.pool_id, &parent.namespace)?;
        let opened = Image::open_by_id(&pool, &parent.id, OpenMode::ReadOnly)?;
        // The copy adds two: the temporary image, and itself.
        self.keep_short(&pool, &opened, &parent.name, 2)
    }

    /// Flattens an image in the background; the error says so.
    pub fn flatten_image(&self, pool: &IoCtx, name: &str) -> RbdError {
        let image = LongChained::named(pool, name);
        self.flatten(format!("mirror {}", image.full_name()), [image].into());
        RbdError::Flattening(format!("{pool}/{name}"))
    }

    /// Keeps the number of an image's snapshots within its bounds.
    pub fn keep_few(&self, image: &Image) -> Result<(), RbdError> {
        let count = image.snapshots()?.len();
        if count <= self.bounds.soft_snapshots {
            return Ok(());
        }
        let children = image.children()?;
        let spare = if count > self.bounds.hard_snapshots {
            0
        } else {
            self.bounds.soft_snapshots
        };
        let clones = children.into_iter().skip(spare).map(|child| {
            let cluster = image.io().cluster();
            Ok(LongChained {
                pool: cluster.ioctx(child.pool_id, &child.namespace)?,
                name: child.name,
                trashed: child.in_trash.then_some(child.id),
            })
        });
        let clones = clones.collect::<Result<_, CephError>>()?;
        let why = format!("clones of {}/{image}", image.io().cluster().fsid());
        self.flatten(why, clones);
        if count <= self.bounds.hard_snapshots {
            return Ok(());
        }
        Err(RbdError::Snapshots {
            image: image.to_string(),
            count,
            limit: self.bounds.hard_snapshots,
        })
    }

    /// How many images wait or are being flattened.
    pub fn pending(&self) -> usize {
        self.work().known.len()
    }

    /// Flattens images in the background, by Ceph's manager if it runs, else here, one
    /// after the other: each is copied as a whole. An image that is queued or under way is
    /// not queued again.
    fn flatten(&self, why: String, mut images: VecDeque<LongChained>) {
        let begins = {
            let mut work = self.work();
            images.retain(|image| work.known.insert(image.full_name()));
            if images.is_empty() {
                return;
            }
            let begins = !work.queues.contains_key(&why);
            work.queues.entry(why.clone()).or_default().extend(images);
            begins
        };
        if begins {
            let own = self.clone();
            let turn = why.clone();
            // It runs even if the caller has ended.
            drop(self.lanes.run(&turn, "flatten", move || own.work_off(&why)));
        }
    }

    fn work_off(&self, why: &str) {
        while let Some(image) = self.next(why) {
            let _running = RunningFlatten {
                work: &self.work,
                why,
                image: image.full_name(),
            };
            #[cfg(test)]
            self.panics.maybe();
            if let Err(error) = flatten(&image) {
                let LongChained { pool, name, .. } = image;
                let error = error_chain(&error);
                tracing::warn!(image = %format!("{pool}/{name}"), error, "cannot flatten an image");
            }
        }
    }

    fn next(&self, why: &str) -> Option<LongChained> {
        let mut work = self.work();
        let next = work.queues.get_mut(why)?.pop_front();
        if next.is_none() {
            work.queues.remove(why);
        }
        next
    }

    fn work(&self) -> MutexGuard<'_, Work> {
        lock(&self.work)
    }
}

/// The flattening of an image, until this is dropped. If it panics, nothing works on its queue
/// any more: then the queue is dropped, and the next call that needs one begins another.
struct RunningFlatten<'a> {
    work: &'a Mutex<Work>,
    why: &'a str,
    image: String,
}

impl Drop for RunningFlatten<'_> {
    fn drop(&mut self) {
        let mut work = lock(self.work);
        work.known.remove(&self.image);
        if thread::panicking() {
            for image in work.queues.remove(self.why).unwrap_or_default() {
                work.known.remove(&image.full_name());
            }
        }
    }
}

fn lock(work: &Mutex<Work>) -> MutexGuard<'_, Work> {
    work.lock().unwrap_or_else(PoisonError::into_inner)
}

fn flatten(image: &LongChained) -> Result<(), CephError> {
    let LongChained {
        pool,
        name,
        trashed,
    } = image;
    if let Some(id) = trashed {
        return flatten_trashed(pool, id);
    }
    let task = json!({
        "prefix": "rbd task add flatten",
        "image_spec": format!("{pool}/{name}"),
    });
    if ManagerStatus::of(pool.cluster()).works() && ask_manager(pool, &task)? {
        return Ok(());
    }
    flatten_here(&Image::open(pool, name, OpenMode::ReadWrite)?)
}

fn flatten_here(image: &Image) -> Result<(), CephError> {
    match image.flatten() {
        // It has lost its parent.
        Err(error) if error.is_invalid() => Ok(()),
        result => result,
    }
}

/// A deleted image that its own clones keep in the trash, and with it a snapshot of its parent.
/// Such an image is flattened with its snapshots (deep-flatten). The manager flattens none by its
/// id.
fn flatten_trashed(pool: &IoCtx, id: &str) -> Result<(), CephError> {
    match Image::open_by_id(pool, id, OpenMode::ReadWrite) {
        // Without clones it is removed as a whole.
        Ok(image) if image.children()?.is_empty() => Ok(()),
        Ok(image) => flatten_here(&image),
        Err(error) if error.is_not_found() => Ok(()),
        Err(error) => Err(error),
    }
}

/// The length of an image's chain of parents.
fn depth(image: &Image) -> Result<usize, CephError> {
    let mut depth = 0;
    let mut next = image.parent()?;
    while let Some(parent) = next {
        depth += 1;
        let pool = image
            .io()
            .cluster()
            .ioctx(parent.image.pool_id, &parent.image.namespace)?;
        let opened = match Image::open_by_id(&pool, &parent.image.id, OpenMode::ReadOnly) {
            // Removed since.
            Err(error) if error.is_not_found() => return Ok(depth),
            opened => opened?,
        };
        next = opened.parent()?;
    }
    Ok(depth)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ceph::{
        client::rbd::{self, Features, ImageOptions},
        testing::TestPool,
    };

    #[tokio::test]
    async fn a_panic_ends_no_later_flatten() {
        let Some(place) = TestPool::new() else {
            return;
        };
        let options = ImageOptions {
            features: Some(Features::LAYERING),
            ..ImageOptions::default()
        };
        let io = &place.io;
        rbd::create(io, "source", 1 << 20, &options).unwrap();
        let source = Image::open(io, "source", OpenMode::ReadWrite).unwrap();
        source.snapshot_create("s").unwrap();
        rbd::clone_snapshot(io, "source", "s", io, "clone", &options).unwrap();
        let flattener = Flattener::new(Lanes::new(4), FlattenLimits::default());
        flattener.panics.arm();
        let ended = async || {
            drop(flattener.flatten_image(io, "clone"));
            testkit::eventually("an end", async || (flattener.pending() == 0).then_some(())).await;
        };
        ended().await;
        assert_eq!(source.children().unwrap().len(), 1, "it did not panic");
        ended().await;
        testkit::eventually("flat", async || {
            source.children().unwrap().is_empty().then_some(())
        })
        .await;
    }

    #[tokio::test]
    async fn clones_of_one_image_are_flattened_one_after_the_other() {
        let Some(place) = TestPool::new() else {
            return;
        };
        let options = ImageOptions {
            features: Some(Features::LAYERING),
            ..ImageOptions::default()
        };
        rbd::create(&place.io, "source", 1 << 20, &options).unwrap();
        let source = Image::open(&place.io, "source", OpenMode::ReadWrite).unwrap();
        for clone in ["a", "b", "c", "d"] {
            source.snapshot_create(clone).unwrap();
            let (io, name) = (&place.io, "source");
            rbd::clone_snapshot(io, name, clone, io, clone, &options).unwrap();
        }
        let lanes = Lanes::new(4);
        let bounds = FlattenLimits {
            soft_snapshots: 1,
            hard_snapshots: 100,
            ..FlattenLimits::default()
        };
        let flattener = Flattener::new(lanes.clone(), bounds);
        flattener.keep_few(&source).unwrap();
        // One is allowed.
        while source.children().unwrap().len() > 1 {
            flattener.keep_few(&source).unwrap();
            assert!(lanes.busy().len() <= 1, "{:?}", lanes.busy());
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    }

    /// Snapshots of a volume that were restored and deleted.
    #[tokio::test]
    async fn deleted_clones_that_have_clones_are_flattened() {
        let Some(place) = TestPool::new() else {
            return;
        };
        let options = ImageOptions {
            features: Some(Features::LAYERING | Features::DEEP_FLATTEN),
            ..ImageOptions::default()
        };
        let io = &place.io;
        let copy = |from: &str, to: &str| {
            let source = Image::open(io, from, OpenMode::ReadWrite).unwrap();
            source.snapshot_create(to).unwrap();
            rbd::clone_snapshot(io, from, to, io, to, &options).unwrap();
            source.snapshot_remove(to).unwrap();
        };
        rbd::create(io, "source", 1 << 20, &options).unwrap();
        for middle in ["a", "b"] {
            copy("source", middle);
            copy(middle, &format!("restored-{middle}"));
            rbd::trash::move_image(io, middle, std::time::Duration::ZERO).unwrap();
        }
        let bounds = FlattenLimits {
            soft_snapshots: 1,
            hard_snapshots: 1,
            ..FlattenLimits::default()
        };
        let flattener = Flattener::new(Lanes::new(4), bounds);
        let source = || Image::open(io, "source", OpenMode::ReadOnly).unwrap();
        let refused = flattener.keep_few(&source()).unwrap_err();
        assert!(matches!(refused, RbdError::Snapshots { count: 2, .. }));
        testkit::eventually("few snapshots", async || flattener.keep_few(&source()).ok()).await;
    }
}
