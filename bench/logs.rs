//! What a log for collectors costs: the calls that write lines, of an agent whose log is JSON,
//! beside the one whose log is text.

use criterion::Criterion;
use testkit::{Node, NodeSetup};

use crate::{
    backends::Backend,
    calls::cpu_time_of,
    rig::{Rig, timed},
};

/// Publish and unpublish write a line each, into a file.
pub fn json(criterion: &mut Criterion, rig: &Rig, over: &dyn Backend) {
    const CASE: &str = "publish and unpublish, with a log";
    let runtime = &rig.runtime;
    let setup = NodeSetup {
        node_id: "node-json",
        ..NodeSetup::new(&rig.sandbox).arg("--log-format=json")
    };
    let json = runtime.block_on(Node::start_with(&rig.sandbox, setup));
    let [in_text, in_json] = [(&rig.node, "text"), (&json, "json")].map(|(node, name)| {
        let volume = over.volume(&format!("log-{name}"), "ext4");
        runtime.block_on(node.stage(&volume)).expect("staged");
        (node, volume)
    });
    let [mut text_calls, mut json_calls] = [&in_text, &in_json].map(|(node, volume)| {
        || {
            runtime.block_on(async {
                node.publish(volume, "pod").await.expect("published");
                node.unpublish(volume, "pod").await.expect("unpublished");
            });
        }
    });
    let mut group = criterion.benchmark_group(CASE);
    rig.measure(&mut group, CASE, "text", &mut text_calls);
    rig.measure(&mut group, CASE, "JSON", &mut json_calls);
    group.finish();
    let case = "publish and unpublish, a log in JSON, to one in text";
    rig.compare(case, || timed(&mut json_calls), || timed(&mut text_calls));
    let case = "publish and unpublish, a log in JSON, to one in text, CPU time";
    rig.compare(
        case,
        || cpu_time_of(json.pid(), &mut json_calls),
        || cpu_time_of(rig.node.pid(), &mut text_calls),
    );
    for (node, volume) in [in_text, in_json] {
        runtime.block_on(node.unstage(&volume)).expect("unstaged");
    }
}
