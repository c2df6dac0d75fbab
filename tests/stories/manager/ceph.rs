//! Images of a Ceph cluster, by their names and made by the controller.

use std::fs;

use testkit::{
    Content, Controller, ControllerSetup, MIB, ceph_story, mappings_of, rbds_of, rbds_over, run,
    unmap_by_rbd,
};

use super::{Machine, capacity, options_at};

#[test]
fn files_ask_for_images_of_a_ceph_cluster() {
    ceph_story(async |sandbox, ceph| {
        let secrets = sandbox.dir().join("secrets");
        fs::create_dir(&secrets).unwrap();
        let passphrase = "correct horse battery staple".to_owned();
        let mut all = ceph.secrets();
        all.insert("encryptionPassphrase".to_owned(), passphrase);
        for (name, value) in &all {
            fs::write(secrets.join(name), value).unwrap();
        }
        let secrets = secrets.to_str().unwrap();
        let config = ceph.config();
        let config = config.to_str().unwrap();
        let args = ["--ceph-config", config, "--ceph-secret", secrets];
        let setup = ControllerSetup {
            pools: Vec::new(),
            args: args.map(str::to_owned).to_vec(),
            ..ControllerSetup::new(sandbox)
        };
        let controller = Controller::start_with(sandbox, setup).await;
        let machine = Machine::start_with(sandbox, ceph.setup(sandbox)).await;
        let machine = machine.with_controller(&controller);
        let operator = &machine.operator;
        let [image, made] = ["image", "made"].map(|name| machine.path(name));

        // By the image, as the secrets are there.
        let volume = ceph.static_volume("ext4");
        let text = machine.file_of("image", &volume, "fs = 'ext4'");
        machine.write("image", &text);
        machine.wait_for("image", "failed", "userID").await;
        machine.write("image", &format!("secrets = '{secrets}'\n{text}"));
        machine.wait("image", "mounted");
        let content = Content::new("image");
        content.write(&image.join("file"));

        // By the controller, encrypted.
        let id = format!("clusterID={}", ceph.cluster_id);
        let (pool, prefix) = (
            ceph.cluster.fresh_pool(),
            format!("volumeNamePrefix={}", ceph.prefix()),
        );
        let class = ["imageFeatures=layering", "encrypted=true", &id, &prefix];
        let class = class.map(|parameter| ["-p", parameter]).concat();
        let up = ["--secrets", secrets, "up", "made", "64Mi"];
        let at = [made.to_str().unwrap(), "--pool", &pool, "--persist"];
        operator.json(&[&up[..], &at, &class].concat());
        content.write(&made.join("file"));
        assert_eq!(mappings_of(sandbox.dir()).len(), 1);

        // It grows, found by its name.
        let before = capacity(&made);
        let file = sandbox.dir().join("made.toml");
        let text = format!(
            "size = '128Mi'\nsecrets = '{secrets}'\n[volume]\nname = 'made'\n[mount]\npath = '{}'\n",
            made.display()
        );
        fs::write(&file, text).unwrap();
        let apply = ["--secrets", secrets, "apply", file.to_str().unwrap()];
        operator.json(&apply);
        machine.wait("made", "mounted");
        let grown = capacity(&made);
        assert!(grown > before + 32 * MIB, "{before} -> {grown}");

        machine
            .reboot(|| {
                for mapping in mappings_of(sandbox.dir()) {
                    run(&["cryptsetup", "close", &mapping]);
                }
                for device in rbds_of(sandbox.dir()) {
                    unmap_by_rbd(&device);
                }
            })
            .await;
        for path in [&image, &made] {
            machine.wait(path.file_name().unwrap().to_str().unwrap(), "mounted");
            assert_ne!(options_at(path), "");
            content.assert_in(&path.join("file"));
        }
        assert_eq!(rbds_over(&volume).len(), 1);

        for name in ["image", "made"] {
            operator.json(&["remove", name]);
            machine.wait(name, "gone");
        }
        operator.json(&["--secrets", secrets, "delete", "made"]);
        assert_eq!(ceph.cluster.rbd(&["ls", &pool]), "");
        machine.node.assert_clean().await;
    });
}
