//! Volumes of servers.

use testkit::{
    Content, Controller, ControllerSetup, MIB, NbdServer, NfsServer, NodeSetup, SHARE, Volume,
    can_use_nfs, kernel_has_nbd, nbds_over, run, story,
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

#[test]
fn volumes_of_servers_that_up_makes_persist() {
    if !kernel_has_nbd() || !can_use_nfs() {
        return;
    }
    story(async |sandbox| {
        let nfs = NfsServer::start(sandbox, "server").await;
        let nbd = NbdServer::of_pool(sandbox, &sandbox.pool("main"), false).await;
        let export = format!("--nfs-export=127.0.0.1:{SHARE}={}", nfs.export().display());
        let setup = ControllerSetup {
            args: vec![export],
            ..ControllerSetup::new(sandbox)
        };
        let controller = Controller::start_with(sandbox, setup).await;
        let machine = Machine::start_with(sandbox, NodeSetup::new(sandbox)).await;
        let machine = machine.with_controller(&controller);
        let (uri, port) = (nbd.uri(), format!("port={}", nfs.port()));
        let share = format!("share={SHARE}");
        let by_nbd = ["--nbd-server", &uri, "-p", "overcommit=true"];
        let by_nfs = ["-p", "server=127.0.0.1", "-p", &share, "-o", &port];
        let contents = ["export", "directory"].map(Content::new);
        let names = ["export", "directory"].map(|name| own(sandbox, name));
        for (name, class) in names.iter().zip([&by_nbd[..], &by_nfs]) {
            let path = machine.path(name);
            let up = ["up", name, "64Mi", path.to_str().unwrap(), "--persist"];
            machine.operator.json(&[&up[..], class].concat());
        }
        for (name, content) in names.iter().zip(&contents) {
            content.write(&machine.path(name).join("file"));
        }
        machine
            .reboot(|| {
                for device in nbds_over(&own(sandbox, "export")) {
                    run(&["nbd-client", "-d", &device]);
                }
            })
            .await;
        for (name, content) in names.iter().zip(&contents) {
            machine.wait(name, "mounted");
            content.assert_in(&machine.path(name).join("file"));
            // The controller lists directories without their names.
            let id = machine.rows(name)[0]["volume_id"].clone();
            machine.operator.json(&["remove", name]);
            machine.wait(name, "gone");
            machine.operator.json(&["delete", id.as_str().unwrap()]);
        }
        machine.node.assert_clean().await;
    });
}
