//! A node that dies in a volume's first mount: the next node to stage the volume finishes the
//! format by the format marker in the image's metadata, and formats nothing without one.

use testkit::{
    Ceph, Content, InterruptedProgram, LUKS_FORMAT, MKFS, Mode, Node, Sandbox, Volume, ceph_story,
    files_below, mapping_of, rbds_over, refused, run, run_err, spec_of, unmap_by_rbd,
};
use tonic::Code::FailedPrecondition;

use super::{encrypted, write_or_check};

const KEY: &str = "uring-csi/making";

/// The program that stops half-way, whether the volume is encrypted, and the error of a
/// stage that finds no marker.
type PartialFormat = ((&'static str, &'static str), bool, &'static str);

const PARTIAL_FORMATS: [PartialFormat; 3] = [
    (MKFS, false, "first superblock is missing"),
    (LUKS_FORMAT, true, "is incomplete"),
    (MKFS, true, "first superblock is missing"),
];

fn blank(ceph: &Ceph, is_encrypted: bool) -> Volume {
    if is_encrypted {
        encrypted::volume(ceph, "ext4")
    } else {
        ceph.volume("ext4")
    }
}

/// Leaves the state of a machine that lost power during a format.
async fn leave_partial_format(sandbox: &Sandbox, ceph: &Ceph, volume: &Volume, at: (&str, &str)) {
    let node = ceph.node(sandbox).await;
    InterruptedProgram::new(at)
        .kill_agent_at_stop(&node, async || node.stage(volume).await)
        .await;
    for file in files_below(&node.run_dir) {
        std::fs::remove_file(file).unwrap();
    }
    // It may never have been open.
    let _ = run_err(&["cryptsetup", "close", &mapping_of(&volume.handle)]);
    for device in rbds_over(volume) {
        unmap_by_rbd(&device);
    }
}

fn set(ceph: &Ceph, volume: &Volume, text: &str) {
    let set = ["image-meta", "set", &spec_of(volume), KEY, text];
    ceph.cluster.rbd(&set);
}

/// Sets the format marker that an agent sets before it formats an image.
fn set_format_marker(ceph: &Ceph, volume: &Volume, what: &str) {
    let info = ["info", "--format", "json", &spec_of(volume)];
    let info: serde_json::Value = serde_json::from_str(&ceph.cluster.rbd(&info)).unwrap();
    let id = info["id"].as_str().unwrap();
    set(ceph, volume, &format!("{what} {id} {}", volume.handle));
}

async fn another(sandbox: &Sandbox, ceph: &Ceph) -> Node {
    let mut setup = ceph.setup(sandbox);
    setup.node_id = "node-b";
    Node::start_with(sandbox, setup).await
}

fn format_marker_of(ceph: &Ceph, volume: &Volume) -> Option<String> {
    let list = ["image-meta", "list", "--format", "json", &spec_of(volume)];
    let metadata = ceph.cluster.rbd(&list);
    let metadata: serde_json::Value = serde_json::from_str(&metadata).unwrap_or_default();
    metadata[KEY].as_str().map(str::to_owned)
}

#[test]
fn another_node_finishes_a_partial_format() {
    ceph_story(async |sandbox, ceph| {
        for (at, is_encrypted, said) in PARTIAL_FORMATS {
            let volume = blank(ceph, is_encrypted);
            leave_partial_format(sandbox, ceph, &volume, at).await;
            assert!(
                format_marker_of(ceph, &volume)
                    .is_some_and(|marker| marker.ends_with(&volume.handle))
            );
            let node = another(sandbox, ceph).await;
            // A reader finishes no format.
            let reader = volume.clone().mode(Mode::SingleNodeReaderOnly);
            refused(node.stage(&reader).await, FailedPrecondition, &[said]);
            let content = Content::new(&volume.handle);
            for is_first in [true, false] {
                let target = node.up(&volume, "pod").await;
                assert_eq!(format_marker_of(ceph, &volume), None);
                write_or_check(&volume, &target, &content, is_first);
                node.down(&volume, "pod").await;
            }
            node.assert_clean().await;
        }
    });
}

#[test]
fn a_partial_format_without_its_own_marker_is_left_alone() {
    ceph_story(async |sandbox, ceph| {
        for (at, is_encrypted, said) in PARTIAL_FORMATS.into_iter().take(2) {
            let volume = blank(ceph, is_encrypted);
            leave_partial_format(sandbox, ceph, &volume, at).await;
            let own = format_marker_of(ceph, &volume).unwrap();
            let node = another(sandbox, ceph).await;
            let before = checksum(ceph, &volume);
            let left_alone = async |volume: &Volume| {
                refused(node.stage(volume).await, FailedPrecondition, &[said]);
            };
            // A clone has its parent's marker.
            let mut clone = ceph.clone_of(&volume, "ext4");
            clone.secrets.clone_from(&volume.secrets);
            clone.context.extend(
                volume
                    .context
                    .get("encrypted")
                    .map(|is| ("encrypted".to_owned(), is.clone())),
            );
            assert_eq!(format_marker_of(ceph, &clone).as_ref(), Some(&own));
            left_alone(&clone).await;
            // Another volume's marker; one of another format; none.
            let words: Vec<_> = own.split(' ').collect();
            let others = [
                format!("{} {} {}", words[0], words[1], clone.handle),
                format!("other {} {}", words[1], words[2]),
            ];
            for other in &others {
                set(ceph, &volume, other);
                left_alone(&volume).await;
            }
            ceph.cluster
                .rbd(&["image-meta", "remove", &spec_of(&volume), KEY]);
            left_alone(&volume).await;
            assert_eq!(checksum(ceph, &volume), before);
            // With its own marker it is formatted again.
            set(ceph, &volume, &own);
            node.up(&volume, "pod").await;
            node.down(&volume, "pod").await;
            node.assert_clean().await;
        }
    });
}

/// The checksum of an exported image.
fn checksum(ceph: &Ceph, volume: &Volume) -> String {
    let file = ceph.config().with_extension("export");
    let path = file.to_str().unwrap();
    ceph.cluster
        .rbd(&["export", "--no-progress", &spec_of(volume), path]);
    let sum = testkit::sha256(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    sum
}

#[test]
fn a_format_marker_outweighs_no_complete_or_foreign_content() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        for is_encrypted in [false, true] {
            let volume = blank(ceph, is_encrypted);
            let content = Content::new(&volume.handle);
            let target = node.up(&volume, "pod").await;
            write_or_check(&volume, &target, &content, true);
            node.down(&volume, "pod").await;
            // The marker of an agent that died before it removed the marker.
            for what in ["mkfs", "luksFormat"] {
                set_format_marker(ceph, &volume, what);
                let target = node.up(&volume, "pod").await;
                write_or_check(&volume, &target, &content, false);
                assert_eq!(format_marker_of(ceph, &volume), None);
                node.down(&volume, "pod").await;
            }
        }
        // Given out raw, it may have any content from now on.
        let raw = ceph.volume("block");
        for mode in [Mode::SingleNodeWriter, Mode::MultiNodeMultiWriter] {
            let raw = raw.clone().mode(mode);
            set_format_marker(ceph, &raw, "mkfs");
            node.up(&raw, "pod").await;
            assert_eq!(format_marker_of(ceph, &raw), None);
            node.down(&raw, "pod").await;
        }

        // Content that no mkfs leaves.
        let volume = ceph.volume("ext4");
        let device = ceph.map_by_rbd(&volume, "noudev");
        run(&["mkswap", device.to_str().unwrap()]);
        unmap_by_rbd(&device);
        set_format_marker(ceph, &volume, "mkfs");
        refused(node.stage(&volume).await, FailedPrecondition, &["swap"]);
        node.assert_clean().await;
    });
}
