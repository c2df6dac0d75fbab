//! A device's number that goes to another image while a volume is staged: somebody
//! detaches the volume's device between two steps, and attaches what is theirs.

use std::{env, fs, path::Path};

use crate::harness::{
    Content, Dice, MIB, Node, all_loops, eventually, loops_over, run_err, sha256, story,
};

#[test]
fn another_image_that_gets_the_device_is_left_alone() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let of = env::var_os("EVERY_STEP").map_or(3, |_| 1);
        let mut at = Dice::new().below(of);
        let other = sandbox.dir().join("other.img");
        fs::File::create(&other).unwrap().set_len(64 * MIB).unwrap();
        let blank = sha256(&other).unwrap();
        loop {
            let volume = sandbox.volume(&format!("v{at}"), "ext4");
            let image = sandbox.image(&volume);
            node.kill9().await;
            node.start_stalling(at).await;
            if node.stands_still() {
                // It had not begun to serve.
                node.go_on();
            }
            let mut swapped = false;
            let swap = eventually("it is staged, or stands still", async || {
                node.stands_still().then_some(())
            });
            tokio::select! {
                biased;
                () = swap => {
                    take_over(&image, &other);
                    swapped = true;
                    node.go_on();
                }
                staged = node.stage(&volume) => staged.unwrap(),
            }
            if !swapped {
                // It would stand still at a later step.
                node.kill9().await;
                node.restart().await;
            }
            node.until_ok("staged", async || node.stage(&volume).await)
                .await;
            assert_eq!(sha256(&other).unwrap(), blank, "after step {at}");
            for device in loops_over(&other) {
                let _ = run_err(&["losetup", "-d", device.to_str().unwrap()]);
            }
            let target = node.up(&volume, "pod").await;
            Content::new("ours").put(&volume, &target);
            assert_eq!(loops_over(&image).len(), 1);
            node.down(&volume, "pod").await;
            assert!(loops_over(&image).is_empty());
            fs::remove_file(&image).unwrap();
            if !swapped {
                break;
            }
            at += of;
        }
        assert!(at > 10, "a stage has more than {at} steps");
        node.assert_clean().await;
    });
}

/// Detaches the image's device, and puts another image behind its number.
fn take_over(image: &Path, other: &Path) {
    for device in loops_over(image) {
        let node = device.to_str().expect("a node");
        let _ = run_err(&["losetup", "-d", node]);
        if !all_loops().iter().any(|(taken, _)| *taken == device) {
            let _ = run_err(&["losetup", node, other.to_str().expect("a path")]);
        }
    }
}
