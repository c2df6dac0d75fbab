//! The sizes of directories, as limits of projects: on a kernel that has the quotas.

use std::{cell::Cell, fs, path::Path};

use testkit::{
    Controller, MIB, Mode, NfsServer, Node, Sandbox, Volume, can_use_nfs, eventually,
    from_snapshot, from_volume, provisioned, range, refused, run, run_err, story,
};
use tonic::Code;
use uring_csi::proto::csi::CreateVolumeRequest;

use super::nfs_controller::{claim, names, over, over_with};

/// For each file system that has them, mounted as the share.
async fn on_each(sandbox: &Sandbox, body: impl AsyncFn(&str, &Path)) {
    for fs_type in ["xfs", "ext4"] {
        if let Some(dir) = sandbox.quota_share(fs_type, fs_type) {
            body(fs_type, &dir).await;
        }
    }
}

fn sized(name: &str, bytes: u64, more: &[(&str, &str)]) -> CreateVolumeRequest {
    CreateVolumeRequest {
        capacity_range: Some(range(bytes)),
        ..claim(name, &[&[("mountPermissions", "0777")], more].concat())
    }
}

/// Creates a volume; its handle and its size.
async fn create(controller: &Controller, request: CreateVolumeRequest) -> (String, u64) {
    let made = controller.create(request).await.expect("made");
    (made.volume_id, made.capacity_bytes.unsigned_abs())
}

/// The size that a file system reports at a directory.
fn size(dir: &Path) -> u64 {
    let room = rustix::fs::statvfs(dir).expect("statistics");
    room.f_blocks * room.f_frsize
}

/// Writes so many MiB, as a user whom the limits of ext4 apply to.
fn fill(file: &Path, mebibytes: u64) -> Result<String, String> {
    let out = format!("of={}", file.display());
    let count = format!("count={mebibytes}");
    let user = ["setpriv", "--reuid=65534", "--clear-groups"];
    let write = ["dd", "if=/dev/urandom", &out, "bs=1M", &count, "conv=fsync"];
    run_err(&[&user[..], &write].concat())
}

/// The projects of a file system that have a file or a limit, with these.
fn quotas(dir: &Path) -> Vec<String> {
    let at = dir.to_str().expect("UTF-8");
    let report = "report -p -b -i -n -N";
    let all = run(&["xfs_quota", "-f", "-x", "-c", report, at]);
    let is_used = |line: &&str| {
        let mut words = line.split_whitespace();
        words
            .next()
            .is_some_and(|id| id.starts_with('#') && id != "#0")
            && words.any(|word| word.parse::<u64>().is_ok_and(|number| number != 0))
    };
    all.lines().filter(is_used).map(str::to_owned).collect()
}

/// XFS ends the accounting of a removed file some time later.
async fn assert_quotas(dir: &Path, number: usize) {
    eventually("so many projects are in use", async || {
        (quotas(dir).len() == number).then_some(())
    })
    .await;
}

#[test]
fn the_size_of_a_directory_is_enforced_and_grows() {
    story(async |sandbox| {
        on_each(sandbox, async |_, dir| {
            let controller = over(sandbox, dir).await;
            let (id, bytes) = create(&controller, sized("pvc-1", 16 * MIB, &[])).await;
            assert_eq!(bytes, 16 * MIB);
            assert_eq!(size(&dir.join("pvc-1")), 16 * MIB);
            assert!(size(dir) > 256 * MIB);
            fs::create_dir(dir.join("pvc-1/sub")).expect("made");
            run(&[
                "chmod",
                "777",
                dir.join("pvc-1/sub").to_str().expect("UTF-8"),
            ]);
            let file = dir.join("pvc-1/sub/file");
            fill(&file, 20).expect_err("too much");
            let (_, other) = create(&controller, sized("pvc-2", 32 * MIB, &[])).await;
            assert_eq!(other, 32 * MIB);
            fill(&dir.join("pvc-2/file"), 20).expect("it fits");

            let grown = controller.expand(&id, 24 * MIB).await.expect("grown");
            assert_eq!(grown, (24 << 20, false));
            fill(&file, 20).expect("it fits");
            // Equal requests and smaller sizes take nothing away.
            let again = create(&controller, sized("pvc-1", 16 * MIB, &[])).await;
            assert_eq!(again, (id.clone(), 24 * MIB));
            let same = controller
                .expand(&id, MIB)
                .await
                .expect("it is large enough");
            assert_eq!(same.0, 24 << 20);
            let mut less = sized("pvc-1", 16 * MIB, &[]);
            less.capacity_range.as_mut().expect("a range").limit_bytes = 16 << 20;
            refused(
                controller.create(less).await,
                Code::AlreadyExists,
                &["its size"],
            );
            // Its refusal leaves nothing that keeps the directory.
            let mut other = sized("pvc-3", 16 * MIB, &[("subDir", "pvc-1")]);
            other.capacity_range.as_mut().expect("a range").limit_bytes = 16 << 20;
            refused(
                controller.create(other).await,
                Code::AlreadyExists,
                &["its size"],
            );
            let mut limited = sized("pvc-4", 0, &[]);
            limited
                .capacity_range
                .as_mut()
                .expect("a range")
                .limit_bytes = 32 << 20;
            let (_, bytes) = create(&controller, limited).await;
            assert_eq!((bytes, size(&dir.join("pvc-4"))), (32 * MIB, 32 * MIB));

            for name in ["pvc-1", "pvc-2", "pvc-4"] {
                let id = format!("127.0.0.1#share#{name}##");
                controller.delete(&id).await.expect("deleted");
            }
            assert_quotas(dir, 0).await;
            assert_eq!(
                names(dir).iter().filter(|it| it.starts_with("pvc")).count(),
                0
            );
        })
        .await;
    });
}

#[test]
fn copies_have_quotas_of_their_own() {
    story(async |sandbox| {
        on_each(sandbox, async |_, dir| {
            let controller = over(sandbox, dir).await;
            let (source, _) = create(&controller, sized("pvc-1", 16 * MIB, &[])).await;
            fill(&dir.join("pvc-1/file"), 12).expect("it fits");
            fs::hard_link(dir.join("pvc-1/file"), dir.join("pvc-1/link")).expect("linked");
            let taken = controller.snapshot(&source, "snap").await.expect("taken");
            assert_quotas(dir, 1).await;
            for (name, from) in [
                ("restored", from_snapshot(&taken.snapshot_id)),
                ("cloned", from_volume(&source)),
            ] {
                let request = |bytes| CreateVolumeRequest {
                    volume_content_source: Some(from.clone()),
                    ..sized(name, bytes, &[])
                };
                let small = controller.create(request(8 * MIB)).await;
                refused(small, Code::OutOfRange, &["too little"]);
                assert!(!dir.join(name).exists());
                for _ in 0..2 {
                    let made = create(&controller, request(32 * MIB)).await;
                    assert_eq!(made.1, 32 * MIB);
                }
                assert_eq!(size(&dir.join(name)), 32 * MIB);
                fill(&dir.join(name).join("more"), 24).expect_err("too much");
                fs::remove_file(dir.join(name).join("more")).expect("removed");
                fill(&dir.join(name).join("more"), 16).expect("it fits");
                controller
                    .delete(&made_handle(name))
                    .await
                    .expect("deleted");
            }
            assert_quotas(dir, 1).await;
            controller
                .delete_snapshot(&taken.snapshot_id)
                .await
                .expect("deleted");
            controller.delete(&source).await.expect("deleted");
            assert_quotas(dir, 0).await;
        })
        .await;
    });
}

fn made_handle(name: &str) -> String {
    format!("127.0.0.1#share#{name}##")
}

/// Makes a call as before volumes in one another's directories were refused: the controller
/// knows none.
async fn without_records<T>(share: &Path, call: impl AsyncFnOnce() -> T) -> T {
    let records = share.join(".uring-csi/volumes");
    let away = share.join(".uring-csi/away");
    fs::rename(&records, &away).expect("moved");
    let done = call().await;
    for name in names(&records) {
        fs::rename(records.join(&name), away.join(name)).expect("moved");
    }
    fs::remove_dir(&records).expect("removed");
    fs::rename(&away, &records).expect("moved back");
    done
}

/// Nothing is moved into a directory of another project, so what is moved joins it.
#[test]
fn directories_in_one_with_a_quota_count_there() {
    story(async |sandbox| {
        on_each(sandbox, async |fs_type, dir| {
            let controller = over(sandbox, dir).await;
            let (outer, _) = create(&controller, sized("team", 16 * MIB, &[])).await;
            let (source, _) = create(&controller, sized("source", 16 * MIB, &[])).await;
            fs::create_dir_all(dir.join("source/a/b/c")).expect("made");
            fs::write(dir.join("source/a/b/file"), "copied").expect("written");
            let in_team = |name: &str, policy: &str| {
                let sub_dir = format!("team/{name}");
                sized(
                    name,
                    64 * MIB,
                    &[("subDir", &sub_dir), ("onDelete", policy)],
                )
            };
            let nested = controller.create(in_team("db", "delete")).await;
            refused(nested, Code::FailedPrecondition, &["subDir", "\"team\""]);
            let make = async || create(&controller, in_team("db", "delete")).await;
            let (inner, bytes) = without_records(dir, make).await;
            assert_eq!((bytes, size(&dir.join("team/db"))), (0, 16 * MIB));
            fs::create_dir_all(dir.join("team/db/a/b/c")).expect("made");
            let copy = CreateVolumeRequest {
                volume_content_source: Some(from_volume(&source)),
                ..in_team("copy", "archive")
            };
            let make = async || create(&controller, copy).await;
            let (copy, bytes) = without_records(dir, make).await;
            assert_eq!((bytes, size(&dir.join("team/copy"))), (0, 16 * MIB));
            assert_quotas(dir, 2).await;

            controller.delete(&inner).await.expect("deleted");
            controller.delete(&copy).await.expect("archived");
            let archived = dir.join("archived-team/copy/a/b/file");
            assert_eq!(fs::read_to_string(archived).expect("kept"), "copied");
            assert_eq!(size(&dir.join("team")), 16 * MIB);
            controller.delete(&source).await.expect("deleted");
            // ext4 lets the controller exceed it.
            if fs_type == "xfs" {
                fill(&dir.join("team/file"), 20).expect_err("too much");
                let make = async || controller.create(in_team("late", "delete")).await;
                let late = without_records(dir, make).await;
                refused(late, Code::ResourceExhausted, &["team/late"]);
                assert_eq!(names(&dir.join(".uring-csi/volumes")).len(), 1);
                fs::remove_file(dir.join("team/file")).expect("removed");
            }
            fs::create_dir_all(dir.join("team/d/e/f")).expect("made");
            controller.delete(&outer).await.expect("deleted");
            assert!(!dir.join("team").exists());
            // The files of the archive alone, without a limit.
            assert_quotas(dir, 1).await;
            fs::remove_dir_all(dir.join("archived-team")).expect("removed");
            assert_quotas(dir, 0).await;
        })
        .await;
    });
}

#[test]
fn an_archive_has_no_limit_and_a_new_volume_another_project() {
    story(async |sandbox| {
        on_each(sandbox, async |_, dir| {
            let controller = over(sandbox, dir).await;
            for policy in ["archive", "retain"] {
                let class = [("onDelete", policy), ("subDir", "team/v")];
                let (id, _) = create(&controller, sized("pvc-1", 16 * MIB, &class)).await;
                fill(&dir.join("team/v/file"), 12).expect("it fits");
                for _ in 0..2 {
                    controller.delete(&id).await.expect("deleted");
                }
                let (id, bytes) = create(&controller, sized("pvc-1", 16 * MIB, &class)).await;
                assert_eq!(bytes, 16 * MIB);
                let more = fill(&dir.join("team/v/more"), 12);
                if policy == "archive" {
                    more.expect("the archive does not count");
                    let archived = dir.join("archived-team/v");
                    assert!(size(&archived) > 256 * MIB, "no limit");
                    fs::remove_dir_all(dir.join("archived-team")).expect("removed");
                    controller.delete(&id).await.expect("archived");
                } else {
                    more.expect_err("it is the same directory");
                }
            }
        })
        .await;
    });
}

/// Makes a directory in a project of 64 MiB.
fn limit_of_administrator(share: &Path, dir: &Path, project: u32) {
    fs::create_dir(dir).expect("made");
    let at = share.to_str().expect("UTF-8");
    for command in [
        format!("project -s -p {} {project}", dir.display()),
        format!("limit -p bhard=64m {project}"),
    ] {
        run(&["xfs_quota", "-f", "-x", "-c", &command, at]);
    }
}

#[test]
fn projects_of_an_administrator_keep_their_limits() {
    story(async |sandbox| {
        on_each(sandbox, async |_, dir| {
            limit_of_administrator(dir, &dir.join("team"), 7);
            limit_of_administrator(dir, &dir.join("ns"), 8);
            let controller = over(sandbox, dir).await;
            let class = [("subDir", "team"), ("onDelete", "archive")];
            let (team, bytes) = create(&controller, sized("pvc-1", 128 * MIB, &class)).await;
            assert_eq!((bytes, size(&dir.join("team"))), (0, 64 * MIB));
            controller.expand(&team, 256 * MIB).await.expect("grown");
            assert_eq!(size(&dir.join("team")), 64 * MIB);
            controller.delete(&team).await.expect("archived");
            assert_eq!(size(&dir.join("archived-team")), 64 * MIB);

            let inner = sized("pvc-2", 16 * MIB, &[("subDir", "ns/v")]);
            let (inner, bytes) = create(&controller, inner).await;
            assert_eq!((bytes, size(&dir.join("ns/v"))), (0, 64 * MIB));
            fs::create_dir_all(dir.join("ns/v/a/b/c")).expect("made");
            controller.delete(&inner).await.expect("deleted");
            assert!(!dir.join("ns/v").exists());
            assert_eq!(size(&dir.join("ns")), 64 * MIB);
        })
        .await;
    });
}

/// The server's administrator limits the share as a whole.
#[test]
fn a_share_with_a_quota_of_its_own_has_no_others() {
    story(async |sandbox| {
        on_each(sandbox, async |_, dir| {
            let share = dir.join("share");
            limit_of_administrator(dir, &share, 7);
            let controller = over(sandbox, &share).await;
            let (source, bytes) = create(&controller, sized("pvc-1", 16 * MIB, &[])).await;
            assert_eq!((bytes, size(&share.join("pvc-1"))), (0, 64 * MIB));
            fs::create_dir_all(share.join("pvc-1/a/b/c")).expect("made");
            let taken = controller.snapshot(&source, "snap").await.expect("taken");
            let class = [("subDir", "team/copy"), ("onDelete", "archive")];
            let copy = CreateVolumeRequest {
                volume_content_source: Some(from_snapshot(&taken.snapshot_id)),
                ..sized("copy", 16 * MIB, &class)
            };
            let (copy, _) = create(&controller, copy).await;
            controller.delete(&source).await.expect("deleted");
            controller.delete(&copy).await.expect("archived");
            controller
                .delete_snapshot(&taken.snapshot_id)
                .await
                .expect("deleted");
            assert_eq!(names(&share), [".uring-csi", "archived-team", "team"]);
            assert_eq!(size(&share), 64 * MIB, "the limit stays");
        })
        .await;
    });
}

#[test]
fn a_demanded_quota_that_cannot_be_had_is_refused() {
    story(async |sandbox| {
        let dir = sandbox.pool("main");
        let controller = over_with(sandbox, &dir, "--nfs-quota=required").await;
        let copied = CreateVolumeRequest {
            volume_content_source: Some(from_volume("127.0.0.1#share#source##")),
            ..sized("copied", MIB, &[])
        };
        fs::create_dir(dir.join("source")).expect("made");
        for request in [sized("pvc-1", MIB, &[("subDir", "team/v")]), copied] {
            let made = controller.create(request).await;
            refused(made, Code::FailedPrecondition, &["prjquota"]);
        }
        assert_eq!(names(&dir), ["source"]);
        drop(controller);

        on_each(sandbox, async |_, dir| {
            let required = over_with(sandbox, dir, "--nfs-quota=required").await;
            let (_, bytes) = create(&required, sized("team", 16 * MIB, &[])).await;
            assert_eq!(bytes, 16 * MIB);
            fs::create_dir(dir.join("old")).expect("made");
            fs::write(dir.join("old/file"), "of another program").expect("written");
            for (sub_dir, word) in [("old", "there before"), ("team/db", "above it")] {
                let made = required
                    .create(sized("v", MIB, &[("subDir", sub_dir)]))
                    .await;
                refused(made, Code::FailedPrecondition, &[word]);
            }
            assert!(!dir.join("team/db").exists());
        })
        .await;
    });
}

#[test]
fn a_growth_waits_for_quotas_that_are_away() {
    story(async |sandbox| {
        on_each(sandbox, async |fs_type, dir| {
            let controller = over(sandbox, dir).await;
            let (id, _) = create(&controller, sized("pvc-1", 16 * MIB, &[])).await;
            drop(controller);
            let image = format!("{}.img", dir.display());
            let remount = |options: &str| {
                let dir = dir.to_str().expect("UTF-8");
                run(&["umount", dir]);
                run(&["mount", "-o", options, &image, dir]);
            };

            remount("loop");
            let controller = over(sandbox, dir).await;
            let grown = controller.expand(&id, 24 * MIB).await;
            // Ext4 has limits that it does not enforce.
            if fs_type == "ext4" {
                assert_eq!(grown.expect("grown").0, 24 << 20);
            } else {
                refused(grown, Code::FailedPrecondition, &["prjquota"]);
            }
            drop(controller);

            remount("loop,prjquota");
            let controller = over(sandbox, dir).await;
            let grown = controller.expand(&id, 24 * MIB).await;
            assert_eq!(grown.expect("grown").0, 24 << 20);
            assert_eq!(size(&dir.join("pvc-1")), 24 * MIB);
        })
        .await;
    });
}

#[test]
fn a_killed_controller_leaves_no_quota() {
    story(async |sandbox| {
        on_each(sandbox, async |_, dir| {
            let controller = over(sandbox, dir).await;
            let (source, _) = create(&controller, sized("source", 16 * MIB, &[])).await;
            fs::create_dir_all(dir.join("source/a/b")).expect("made");
            fs::write(dir.join("source/a/file"), "copied").expect("written");
            let copy = CreateVolumeRequest {
                volume_content_source: Some(from_volume(&source)),
                ..sized("copy", 16 * MIB, &[("onDelete", "archive")])
            };
            let [new, copied] = ["127.0.0.1#share#new##", "127.0.0.1#share#copy##archive"];
            for at in (0..).step_by(3) {
                controller.kill9().await;
                controller.start_crashing_at(at).await;
                let crashes = Cell::new(0);
                for step in 0..5 {
                    eventually("the step is done", async || {
                        let done = match step {
                            0 => controller
                                .create(sized("new", 16 * MIB, &[]))
                                .await
                                .map(drop),
                            1 => controller.expand(new, 24 * MIB).await.map(drop),
                            2 => controller.create(copy.clone()).await.map(drop),
                            3 => controller.delete(new).await,
                            _ => controller.delete(copied).await,
                        };
                        let is_done = done.is_ok();
                        match step {
                            0 if is_done => assert_eq!(size(&dir.join("new")), 16 * MIB),
                            1 if is_done => assert_eq!(size(&dir.join("new")), 24 * MIB),
                            2 if is_done => assert_eq!(size(&dir.join("copy")), 16 * MIB),
                            _ => {}
                        }
                        if controller.has_exited() {
                            crashes.set(crashes.get() + 1);
                            controller.start().await;
                        }
                        done.ok()
                    })
                    .await;
                }
                fs::remove_dir_all(dir.join("archived-copy")).expect("archived");
                assert_quotas(dir, 1).await;
                if crashes.get() == 0 {
                    assert!(at > 20, "the story has more steps");
                    break;
                }
            }
        })
        .await;
    });
}

#[test]
fn a_server_enforces_the_size() {
    if !can_use_nfs() {
        return;
    }
    story(async |sandbox| {
        for fs_type in ["xfs", "ext4"] {
            let server = format!("server-{fs_type}");
            let Some(dir) = sandbox.quota_share(&format!("{server}-export"), fs_type) else {
                continue;
            };
            let server = NfsServer::start_over(sandbox, &server, dir.clone()).await;
            let controller = over(sandbox, &dir).await;
            let node = Node::start(sandbox).await;
            let made = controller.create(sized("pvc-1", 16 * MIB, &[])).await;
            let made = made.expect("made");
            let class = Volume::filesystem("", "")
                .mode(Mode::MultiNodeMultiWriter)
                .flags(&[&format!("port={}", server.port()), "nfsvers=4.2"]);
            let volume = provisioned(&made, &class.capability);
            let target = node.up(&volume, "pod").await;
            fill(&target.join("file"), 20).expect_err("too much");
            fs::remove_file(target.join("file")).expect("removed");
            fill(&target.join("file"), 12).expect("it fits");
            node.down(&volume, "pod").await;
            controller.delete(&made.volume_id).await.expect("deleted");
            node.assert_clean().await;
        }
    });
}
