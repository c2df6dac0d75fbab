//! NFS 3, which has no sessions, no leases, and a protocol of its own to mount.

use std::fs;

use testkit::{Content, NfsServer, SHARE};

use super::{health, impatient_node, mounts_of, nfs_story};

#[test]
fn a_server_that_has_no_other_version_is_used_lost_and_found_again() {
    nfs_story(async |sandbox| {
        let mut server = NfsServer::start_version_3(sandbox, "server").await;
        let node = impatient_node(sandbox).await;
        // The first finds out the version, after those that the server refuses.
        for (name, flags) in [("any", &["nolock"][..]), ("three", &["vers=3", "nolock"])] {
            let volume = server.volume(name, name).flags(flags);
            let target = node.up(&volume, "pod").await;
            let mounts = mounts_of(&node, &format!("127.0.0.1:{SHARE}/{name}"));
            let is_3 = |line: &String| line.contains("vers=3,") && line.contains("nolock");
            assert!(mounts.len() == 2 && mounts.iter().all(is_3), "{mounts:?}");
            let content = Content::new(name);
            content.write(&target.join("file"));
            content.assert_in(&server.export().join(name).join("file"));
            let usage = node.stats(&volume, &target).await.expect("statistics");
            assert!(usage[0].total > 0);

            server.kill9();
            let writer = {
                let file = target.join("late");
                std::thread::spawn(move || fs::write(file, "late"))
            };
            let usage = node.stats(&volume, &target).await.expect("the last ones");
            assert!(usage[0].total > 0);
            server.restart().await;
            writer.join().expect("a thread").expect("written");
            assert_eq!(health(&node, &volume).await, Vec::<String>::new());

            server.kill9();
            node.down(&volume, "pod").await;
            server.restart().await;
            let target = node.up(&volume, "pod").await;
            content.assert_in(&target.join("file"));
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}
