//! Creates that fail, and cannot be undone.

use std::path::PathBuf;

use super::{
    super::{catalogue::Catalogue, volumes::VolumeDetail},
    *,
};
use crate::error_chain;

/// A mount over a file, which so cannot be removed.
struct Pinned(PathBuf);

impl Pinned {
    fn new(path: PathBuf) -> Self {
        let path_arg = path.to_str().unwrap();
        testkit::run(&["mount", "--bind", path_arg, path_arg]);
        Self(path)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        testkit::run(&["umount", self.0.to_str().unwrap()]);
    }
}

impl Home {
    /// The reservation of a name.
    fn reservation(&self, names: &str, name: &str) -> PathBuf {
        let file = format!("{}.json", crate::digest::sha256_hex(name));
        self.pool().meta_path(names).join(file)
    }

    /// The reservation of a name, which stays as that of a killed create.
    fn pinned(&self, names: &str, name: &str) -> Pinned {
        Pinned::new(self.reservation(names, name))
    }
}

/// An error that names the cause and what is left.
fn check(error: &ProvisionError, cause: &str) {
    let text = error_chain(error);
    assert_eq!(error.kind(), Kind::Transient, "{text}");
    assert!(text.contains("nor remove what was begun"), "{text}");
    assert!(text.contains(cause), "{text}");
}

/// Runs a call until it waits to copy, and then `meanwhile`, before it continues.
async fn halfway<T: Send + 'static, R>(
    copies: &Copies,
    call: impl Future<Output = T> + Send + 'static,
    meanwhile: impl AsyncFnOnce() -> R,
) -> (T, R) {
    let permit = copied::hold_permit(copies);
    let call = tokio::spawn(call);
    while copies.gate().load().waiting == 0 {
        tokio::task::yield_now().await;
    }
    let done = meanwhile().await;
    drop(permit);
    (call.await.unwrap(), done)
}

#[tokio::test]
async fn a_create_that_is_not_undone_has_no_final_error() {
    let home = home();
    let copies = Copies::new(1, 1);
    let images = copied::over(home.dir.path(), &copies);
    let source = images.create_volume(new("source", 2 * MIB)).await;
    let source = source.unwrap();
    home.claim(&source, "node-a");
    let before = home.files();

    let copy = copy_of("copy", 0, ContentSource::Volume(source.handle.clone()));
    let make = || {
        let (images, copy) = (images.clone(), copy.clone());
        async move { images.create_volume(copy).await }
    };
    let pin = async || home.pinned("names", "copy");
    let (answer, pinned) = halfway(&copies, make(), pin).await;
    check(&answer.unwrap_err(), "node-a");
    drop(pinned);
    assert_eq!(kind(make().await), Kind::Precondition);
    assert_eq!(home.files(), before);

    let take = || {
        let taken = snapshot_of("taken".to_owned(), source.handle.clone());
        let images = images.clone();
        async move { images.create_snapshot(taken).await }
    };
    let pin = async || home.pinned("snapnames", "taken");
    let (answer, pinned) = halfway(&copies, take(), pin).await;
    check(&answer.unwrap_err(), "node-a");
    drop(pinned);
    assert_eq!(kind(take().await), Kind::Precondition);
    assert_eq!(home.files(), before);
}

#[tokio::test]
async fn a_controller_that_lost_its_lock_removes_nothing_of_the_next_one() {
    let home = home();
    let pools = Pools::new([home.pool().clone()]).unwrap();
    let copies = Copies::new(4, 1);
    let late = ImageStore::new(pools, None, BOOT.to_owned(), copies, &Lanes::new(2));
    let stale = Catalogue::<VolumeDetail>::of(home.pool()).reserve("pvc");
    let stale = stale.unwrap();
    stale.lose();
    let made = home.images.create_volume(new("pvc", MIB)).await.unwrap();
    let before = home.files();
    for _ in 0..2 {
        late.undo::<VolumeDetail>(home.pool(), &stale).unwrap();
        assert_eq!(home.files(), before);
    }
    let again = home.images.create_volume(new("pvc", MIB)).await.unwrap();
    assert_eq!(again, made);

    // Nor what an equal call has answered by now.
    let complete = Catalogue::<VolumeDetail>::of(home.pool()).reserve("pvc");
    let undone = late.undo::<VolumeDetail>(home.pool(), &complete.unwrap());
    assert!(
        matches!(undone, Err(ProvisionError::Complete(_))),
        "{undone:?}"
    );
    assert_eq!(home.files(), before);
}

#[tokio::test]
async fn a_create_that_lost_its_name_leaves_it_to_the_next_one() {
    let home = home();
    let copies = Copies::new(1, 1);
    let late = copied::over(home.dir.path(), &copies);
    let source = home.images.create_volume(new("source", MIB)).await;
    let source = ContentSource::Volume(source.unwrap().handle);
    let copy = copy_of("copy", MIB, source);
    let (at_once, other) = (copy.clone(), home.images.clone());
    let reservation = home.reservation("names", "copy");
    let first = async move { late.create_volume(at_once).await };
    let (lost, made) = halfway(&copies, first, async || {
        std::fs::remove_file(&reservation).unwrap();
        other.create_volume(copy.clone()).await.unwrap()
    })
    .await;
    assert_eq!(kind(lost), Kind::InUse);
    let again = home.images.create_volume(copy).await.unwrap();
    assert_eq!(again, made);
    // Image, record and name of each.
    assert_eq!(home.files().len(), 2 * 3, "{:?}", home.files());
}
