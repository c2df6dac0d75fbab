//! A node that dies in a volume's first mount: whichever has it next finishes it, by
//! the note in the image's metadata, and nothing else is taken for half made.

use testkit::{
    Ceph, Content, InterruptedProgram, LUKS_FORMAT, MKFS, Mode, Node, Sandbox, Volume, ceph_story,
    files_below, mapping_of, rbds_over, refused, run, run_err, spec_of,
};
use tonic::Code::FailedPrecondition;

use super::{encrypted, kept};

const KEY: &str = "uring-csi/making";

/// What stops half-way, and what it says to who finds it without a note.
type Half = ((&'static str, &'static str), bool, &'static str);

const HALVES: [Half; 3] = [
    (MKFS, false, "first superblock is gone"),
    (LUKS_FORMAT, true, "not whole"),
    (MKFS, true, "first superblock is gone"),
];

fn blank(ceph: &Ceph, is_encrypted: bool) -> Volume {
    if is_encrypted {
        encrypted::volume(ceph, "ext4")
    } else {
        ceph.volume("ext4")
    }
}

/// What a machine leaves that is switched off while a program of its agent is half-way.
async fn left_half_made(sandbox: &Sandbox, ceph: &Ceph, volume: &Volume, at: (&str, &str)) {
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
        run(&["rbd", "unmap", "-o", "noudev", device.to_str().unwrap()]);
    }
}

fn set(ceph: &Ceph, volume: &Volume, text: &str) {
    let set = ["image-meta", "set", &spec_of(volume), KEY, text];
    ceph.cluster.rbd(&set);
}

/// The note of an agent that has begun with a volume's image.
fn begin(ceph: &Ceph, volume: &Volume, what: &str) {
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

fn noted(ceph: &Ceph, volume: &Volume) -> Option<String> {
    let list = ["image-meta", "list", "--format", "json", &spec_of(volume)];
    let noted = ceph.cluster.rbd(&list);
    let noted: serde_json::Value = serde_json::from_str(&noted).unwrap_or_default();
    noted[KEY].as_str().map(str::to_owned)
}

#[test]
fn another_node_finishes_a_partial_format() {
    ceph_story(async |sandbox, ceph| {
        for (at, is_encrypted, said) in HALVES {
            let volume = blank(ceph, is_encrypted);
            left_half_made(sandbox, ceph, &volume, at).await;
            assert!(noted(ceph, &volume).is_some_and(|note| note.ends_with(&volume.handle)));
            let node = another(sandbox, ceph).await;
            // Who only reads finishes nothing.
            let reader = volume.clone().mode(Mode::SingleNodeReaderOnly);
            refused(node.stage(&reader).await, FailedPrecondition, &[said]);
            let content = Content::new(&volume.handle);
            for is_first in [true, false] {
                let target = node.up(&volume, "pod").await;
                assert_eq!(noted(ceph, &volume), None);
                kept(&volume, &target, &content, is_first);
                node.down(&volume, "pod").await;
            }
            node.assert_clean().await;
        }
    });
}

#[test]
fn a_partial_format_without_its_own_marker_is_left_alone() {
    ceph_story(async |sandbox, ceph| {
        for (at, is_encrypted, said) in HALVES.into_iter().take(2) {
            let volume = blank(ceph, is_encrypted);
            left_half_made(sandbox, ceph, &volume, at).await;
            let own = noted(ceph, &volume).unwrap();
            let node = another(sandbox, ceph).await;
            let before = sum(ceph, &volume);
            let left_alone = async |volume: &Volume| {
                refused(node.stage(volume).await, FailedPrecondition, &[said]);
            };
            // A clone has its parent's note.
            let mut clone = ceph.clone_of(&volume, "ext4");
            clone.secrets.clone_from(&volume.secrets);
            clone.context.extend(
                volume
                    .context
                    .get("encrypted")
                    .map(|is| ("encrypted".to_owned(), is.clone())),
            );
            assert_eq!(noted(ceph, &clone).as_ref(), Some(&own));
            left_alone(&clone).await;
            // Another volume's; one of something else; none.
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
            assert_eq!(sum(ceph, &volume), before);
            // With its own, all is well.
            set(ceph, &volume, &own);
            node.up(&volume, "pod").await;
            node.down(&volume, "pod").await;
            node.assert_clean().await;
        }
    });
}

/// Of all that is in an image.
fn sum(ceph: &Ceph, volume: &Volume) -> String {
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
            kept(&volume, &target, &content, true);
            node.down(&volume, "pod").await;
            // As an agent leaves it that dies before it takes its note away.
            for what in ["mkfs", "luksFormat"] {
                begin(ceph, &volume, what);
                let target = node.up(&volume, "pod").await;
                kept(&volume, &target, &content, false);
                assert_eq!(noted(ceph, &volume), None);
                node.down(&volume, "pod").await;
            }
        }
        // Given out raw, it may hold anything from now on.
        let raw = ceph.volume("block");
        for mode in [Mode::SingleNodeWriter, Mode::MultiNodeMultiWriter] {
            let raw = raw.clone().mode(mode);
            begin(ceph, &raw, "mkfs");
            node.up(&raw, "pod").await;
            assert_eq!(noted(ceph, &raw), None);
            node.down(&raw, "pod").await;
        }

        // What no mkfs leaves.
        let volume = ceph.volume("ext4");
        let device = ceph.map_by_rbd(&volume, "noudev");
        let device = device.to_str().unwrap();
        run(&["mkswap", device]);
        run(&["rbd", "unmap", "-o", "noudev", device]);
        begin(ceph, &volume, "mkfs");
        refused(node.stage(&volume).await, FailedPrecondition, &["swap"]);
        node.assert_clean().await;
    });
}
