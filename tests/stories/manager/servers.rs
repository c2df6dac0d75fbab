//! Volumes of servers.

use testkit::{
    Content, MIB, NbdServer, NfsServer, NodeSetup, Volume, can_use_nfs, kernel_has_nbd, story,
};

use super::{super::nbd::own, Machine, all_options_at, options_at};

/// An export and directories; the server of the directories dies and returns.
#[test]
fn a_dead_server_delays_no_other_volume() {
    if !kernel_has_nbd() || !can_use_nfs() {
        return;
    }
    story(async |sandbox| {
        let mut nfs = NfsServer::start(sandbox, "server").await;
        let nbd = NbdServer::start(sandbox).await;
        let machine = Machine::start_with(sandbox, NodeSetup::new(sandbox)).await;
        let directory = nfs.volume("directory", "directory");
        let late = nfs.volume("late", "late");
        let export = nbd.over(Volume::filesystem(&own(sandbox, "export"), "ext4"));
        NbdServer::image(sandbox, &export.handle, 64 * MIB);
        machine.write("directory", &machine.file_of("directory", &directory, ""));
        machine.wait("directory", "mounted");
        let content = Content::new("directory");
        content.write(&machine.path("directory").join("file"));

        nfs.kill9();
        machine.write("late", &machine.file_of("late", &late, ""));
        for options in ["", "options = ['noexec', 'sync']"] {
            machine.write("export", &machine.file_of("export", &export, options));
            machine.wait("export", "mounted");
        }
        let options = all_options_at(&machine.path("export"));
        assert!(options.0.contains("noexec") && options.1.contains("sync"));
        machine.remove("export");
        machine.wait("export", "gone");
        assert_eq!(options_at(&machine.path("late")), "");

        nfs.restart().await;
        machine.wait("late", "mounted");
        content.assert_in(&machine.path("directory").join("file"));
        for name in ["directory", "late"] {
            machine.remove(name);
            machine.wait(name, "gone");
        }
        machine.node.assert_clean().await;
    });
}
