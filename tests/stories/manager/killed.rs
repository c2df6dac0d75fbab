//! An agent that is killed while it works.

use std::fs::File;

use testkit::{Content, Rng, eventually, loops_over, story};

use super::{Machine, image, options_at};

/// Kills the agent at one of its steps, while files come, change and go.
#[test]
fn an_agent_that_is_killed_continues() {
    story(async |sandbox| {
        let machine = Machine::start(sandbox).await;
        let node = &machine.node;
        image(sandbox, "steady");
        machine.write("steady", &machine.file("steady", "mount", ""));
        machine.wait("steady", "mounted");
        let steady = Content::new("steady");
        steady.write(&machine.path("steady").join("file"));
        let open = File::open(machine.path("steady").join("file")).unwrap();
        let data = image(sandbox, "data");
        let content = Content::new("data");
        let mut at = Rng::new().below(11);
        let mut has_content = false;
        loop {
            node.kill9().await;
            node.start_crashing_at(at).await;
            let mut crashed = false;
            for (state, more) in [
                ("mounted", ""),
                ("mounted", "options = ['noexec']"),
                ("gone", ""),
            ] {
                match state {
                    "gone" => machine.remove("data"),
                    _ => machine.write("data", &machine.file("data", "mount", more)),
                }
                eventually(state, async || {
                    if node.has_exited() {
                        assert!(!crashed, "it ends once");
                        crashed = true;
                        node.restart().await;
                    }
                    let args = ["wait", "data", "--for", state, "--timeout", "300ms"];
                    (machine.operator.run(&args).0 == 0).then_some(())
                })
                .await;
                let file = machine.path("data").join("file");
                if state == "mounted" {
                    if has_content {
                        content.assert_in(&file);
                    } else {
                        content.write(&file);
                        has_content = true;
                    }
                    assert_eq!(
                        options_at(&machine.path("data")).contains("noexec"),
                        !more.is_empty()
                    );
                } else {
                    assert!(!machine.path("data").exists());
                    assert!(loops_over(&data).is_empty());
                }
                steady.assert_in(&machine.path("steady").join("file"));
            }
            if !crashed {
                break;
            }
            at += 11;
        }
        // None at all in a build without debug assertions.
        assert!(at > 20, "there are more than {at} steps");
        // From here on it does not end.
        node.kill9().await;
        node.restart().await;
        drop(open);
        machine.remove("steady");
        machine.wait("steady", "gone");
        machine.node.assert_clean().await;
    });
}
