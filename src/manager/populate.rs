//! Following the directory: by inotify, and by a look now and then, since a network's file
//! system reports no change of others.

use std::{io, path::Path, time::Duration};

use rustix::{
    fd::OwnedFd,
    fs::inotify::{self, CreateFlags, WatchFlags},
};

use super::directory::{DirectoryContent, VolumesDir};
use crate::{lane::Lanes, ring::poll};

/// How long a directory must not have changed to be believed: an editor may write a file in
/// pieces, or remove it before it writes it anew.
const SETTLE: Duration = Duration::from_millis(300);

/// How long no event is trusted.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Reads the directory whenever it may have changed, and passes on what is there.
pub async fn follow(
    directory: VolumesDir,
    lanes: Lanes,
    mut changed: impl FnMut(io::Result<DirectoryContent>),
) {
    let mut last = None;
    loop {
        // Before the look: no change between the two is lost.
        let path = directory.path().to_owned();
        let watched = lanes.run("", "watch", move || watch(&path)).await;
        let content = settled(&directory, &lanes).await;
        let outcome =
            (content.as_ref()).map_or_else(|error| Err(error.kind()), |it| Ok(it.clone()));
        if last.as_ref() != Some(&outcome) {
            last = Some(outcome);
            changed(content);
        }
        let event = async {
            let seen = match watched {
                Ok(watched) => poll::readable(watched).await.map(drop),
                Err(error) => Err(error),
            };
            if seen.is_err() {
                std::future::pending::<()>().await;
            }
        };
        let _ = tokio::time::timeout(LOOK_EVERY, event).await;
    }
}

fn watch(directory: &Path) -> io::Result<OwnedFd> {
    let watched = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    let changes = WatchFlags::CLOSE_WRITE
        | WatchFlags::CREATE
        | WatchFlags::DELETE
        | WatchFlags::MOVE
        | WatchFlags::DELETE_SELF
        | WatchFlags::MOVE_SELF;
    inotify::add_watch(&watched, directory, changes | WatchFlags::ONLYDIR)?;
    Ok(watched)
}

/// What is in the directory once it has stopped changing.
async fn settled(directory: &VolumesDir, lanes: &Lanes) -> io::Result<DirectoryContent> {
    let read = || {
        let directory = directory.clone();
        lanes.run("", "read", move || directory.read())
    };
    let mut content = read().await?;
    loop {
        tokio::time::sleep(SETTLE).await;
        let again = read().await?;
        if again == content {
            return Ok(content);
        }
        content = again;
    }
}
