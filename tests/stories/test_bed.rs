//! The testkit itself.

use std::{process::Command, thread, time::Duration};

use testkit::{TestCluster, output_despite_abort};

#[test]
fn an_own_ceph_cluster_starts_stops_and_is_removed() {
    let Some(cluster) = TestCluster::own() else {
        return;
    };
    let pool = cluster.fresh_pool();
    let image = format!("{pool}/image");
    cluster.rbd(&["create", "--size", "1G", &image]);
    cluster.stop_osd();
    cluster.start_osd();
    assert!(cluster.rbd(&["info", &image]).contains("size 1 GiB"));
    let dir = cluster.dir().to_owned();
    drop(cluster);
    while dir.exists() {
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn the_shared_ceph_cluster_is_the_same_for_all() {
    let (Some(one), Some(other)) = (TestCluster::shared(), TestCluster::shared()) else {
        return;
    };
    assert_eq!((&one.fsid, &one.key), (&other.fsid, &other.key));
}

#[test]
fn a_program_of_ceph_that_aborts_at_its_exit_is_no_failure() {
    let dir = tempfile::tempdir().unwrap();
    let run = |script: &str| {
        let mut sh = Command::new("sh");
        output_despite_abort(sh.args(["-c", script]).current_dir(dir.path())).unwrap()
    };
    let whole = run("echo image; kill -ABRT $$");
    assert!(whole.status.success());
    assert_eq!(whole.stdout, b"image\n");
    let silent = run("mkdir once && kill -ABRT $$; echo image");
    assert!(silent.status.success());
    assert_eq!(silent.stdout, b"image\n");
    // EEXIST: the first time it was done.
    assert!(run("mkdir made && kill -ABRT $$; exit 17").status.success());
    assert_eq!(run("exit 17").status.code(), Some(17));
    assert!(!run("kill -ABRT $$").status.success());
}
