//! The program that encrypts: whose device it gets.

use std::fs;

use super::{encrypted, whole_life};
use crate::harness::{StandIn, ceph_story, rbds_over, spec_of};

/// Before the program has the device: detaches that, and attaches what is somebody
/// else's in its place.
const TAKES_OVER: &str = r#"
for word; do case "$word" in /dev/rbd*) device=$word;; esac; done
case "$1" in luksFormat|luksOpen)
  echo "$1" >> "$reached"
  if rbd unmap -o noudev "$device"; then
    rbd -c CONF map -o noudev OTHER > /dev/null
  fi
esac
exec cryptsetup "$@""#;

#[test]
fn another_image_that_gets_the_device_is_left_alone() {
    ceph_story(async |sandbox, ceph| {
        let other = ceph.volume("block");
        let conf = ceph.cluster.dir().join("ceph.conf");
        let script = TAKES_OVER
            .replace("CONF", conf.to_str().unwrap())
            .replace("OTHER", &spec_of(&other));
        let stand_in = StandIn::new("cryptsetup", &script);
        let node = ceph.node(sandbox).await;
        let volume = encrypted::volume(ceph, "ext4");
        let _ = node.stage(&volume).await;
        assert_eq!(
            ceph.cluster
                .rbd(&["diff", "--format=json", &spec_of(&other)])
                .trim(),
            "[]",
            "nothing was written to it"
        );
        assert!(rbds_over(&other).is_empty());
        whole_life(&node, &volume).await;
        let tried = fs::read_to_string(&stand_in.reached).unwrap();
        for what in ["luksFormat", "luksOpen"] {
            assert!(tried.contains(what), "{tried}");
        }
        node.assert_clean().await;
    });
}
