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

/// After so many looks at a directory that goes on changing, the files that did not change
/// between the last two are believed.
const MAX_LOOKS: usize = 10;

/// How long no event is trusted.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Reads the directory whenever it may have changed, and passes on what is there.
pub async fn follow(
    directory: VolumesDir,
    lanes: Lanes,
    mut changed: impl FnMut(io::Result<DirectoryContent>),
) {
    let mut last = None;
    let mut passed = None;
    let read = async || {
        let directory = directory.clone();
        lanes.run("", "read", move || directory.read()).await
    };
    loop {
        // Before the look: no change between the two is lost.
        let path = directory.path().to_owned();
        let watched = lanes.run("", "watch", move || watch(&path)).await;
        let content = settled(&read, passed.as_ref(), SETTLE).await;
        if let Ok(content) = &content {
            passed = Some(content.clone());
        }
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

/// What is in the directory once it has stopped changing for so long. What goes on changing is
/// as in `passed`, the content that was passed on last.
async fn settled(
    read: impl AsyncFn() -> io::Result<DirectoryContent>,
    passed: Option<&DirectoryContent>,
    settle: Duration,
) -> io::Result<DirectoryContent> {
    let mut content = read().await?;
    for _ in 1..MAX_LOOKS {
        tokio::time::sleep(settle).await;
        let again = read().await?;
        if again == content {
            return Ok(content);
        }
        content = again;
    }
    tokio::time::sleep(settle).await;
    Ok(read().await?.stable(&content, passed))
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, fs};

    use super::*;
    use crate::manager::directory::MARKER;

    #[tokio::test]
    async fn a_file_that_changes_all_the_time_holds_up_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let directory = VolumesDir::new(dir.path().to_owned());
        directory.make().unwrap();
        let write = |name: &str, path: &str| {
            let text = format!("source = {{}}\nraw.path = '{path}'\n");
            // Also while the marker is missing.
            fs::write(directory.path().join(format!("{name}.toml")), text).unwrap();
        };
        write("busy", "/before");
        write("data", "/before");
        let passed = directory.read().unwrap();
        write("data", "/now");
        let reads = Cell::new(0);
        let look = async |passed: Option<&DirectoryContent>| {
            let read = async || {
                reads.set(reads.get() + 1);
                write("busy", &format!("/{}", reads.get()));
                let content = directory.read();
                if reads.get() % 2 == 0 {
                    directory.make().unwrap();
                } else {
                    fs::remove_file(directory.path().join(MARKER)).unwrap();
                }
                content
            };
            settled(read, passed, Duration::from_millis(1)).await
        };
        let content = look(Some(&passed)).await.unwrap();
        let wanted = content.parse();
        assert_eq!(wanted["busy"].as_ref().unwrap().path, Path::new("/before"));
        assert_eq!(wanted["data"].as_ref().unwrap().path, Path::new("/now"));
        assert!(content.has_marker);
        // One that was never used, and may be a renamed one.
        let first = look(None).await.unwrap();
        assert!(first.parse()["busy"].is_err() && !first.has_marker);
        assert!(first.parse()["data"].is_ok());
    }
}
