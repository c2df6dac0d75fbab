//! Creates that fail, and cannot be undone.

use std::path::PathBuf;

use super::{
    super::{catalogue::Catalogue, snapshots::SnapshotDetail, volumes::VolumeDetail},
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
    /// The reservation of a name, which stays as that of a killed create.
    fn pinned(&self, names: &str, name: &str) -> Pinned {
        let file = format!("{}.json", crate::digest::sha256_hex(name));
        Pinned::new(self.pool().meta_path(names).join(file))
    }
}

/// An error that names the cause and what is left.
fn check(error: &ProvisionError, cause: &str) {
    let text = error_chain(error);
    assert_eq!(error.kind(), Kind::Transient, "{text}");
    assert!(text.contains("nor remove what was begun"), "{text}");
    assert!(text.contains(cause), "{text}");
}

#[tokio::test]
async fn a_create_that_is_not_undone_has_no_final_error() {
    let home = home();
    let source = home.images.create_volume(new("source", 2 * MIB)).await;
    let source = source.unwrap();
    home.claim(&source, "node-a");
    let before = home.files();

    drop(Catalogue::<VolumeDetail>::of(home.pool()).reserve("copy"));
    let copy = copy_of("copy", 0, ContentSource::Volume(source.handle.clone()));
    let pinned = home.pinned("names", "copy");
    let made = home.images.create_volume(copy.clone()).await;
    check(&made.unwrap_err(), "node-a");
    drop(pinned);
    let made = home.images.create_volume(copy.clone()).await;
    assert_eq!(kind(made), Kind::Precondition);
    assert_eq!(home.files(), before);

    drop(Catalogue::<SnapshotDetail>::of(home.pool()).reserve("taken"));
    let take = || {
        let taken = snapshot_of("taken".to_owned(), source.handle.clone());
        home.images.create_snapshot(taken)
    };
    let pinned = home.pinned("snapnames", "taken");
    check(&take().await.unwrap_err(), "node-a");
    drop(pinned);
    assert_eq!(kind(take().await), Kind::Precondition);
    assert_eq!(home.files(), before);
}
