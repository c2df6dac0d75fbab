//! The scripts of `uringctl completions`, in the shells that they are for.

use std::{
    env,
    process::{Command, Stdio},
};

use testkit::{eventually, program, skip_uninstalled, story};

use crate::operator::machine;

/// Each shell's options, and how it completes its last argument by the script.
const SHELLS: [(&str, &[&str], &str); 3] = [
    (
        "bash",
        &["--norc"],
        r#"source <(uringctl completions bash)
        registered=$(complete -p uringctl)
        complete=${registered#*-F }
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_TYPE=9
        "${complete%% *}" uringctl "${!#}"
        printf '%s\n' "${COMPREPLY[@]}""#,
    ),
    (
        "zsh",
        &["-f"],
        // In place of those of compinit, which need a terminal.
        r#"compdef() { completer=$1 }
        _describe() { print -l -- ${(P)3} }
        source <(uringctl completions zsh)
        words=("$@") CURRENT=$#
        $completer"#,
    ),
    (
        "fish",
        &["--no-config"],
        r#"uringctl completions fish | source
        complete --do-complete "$argv""#,
    ),
];

#[test]
fn shells_complete_commands_flags_and_names() {
    story(async |sandbox| {
        let (node, controller, operator) = machine(sandbox).await;
        operator.json(&["create", "data-1", "16Mi"]);
        operator.json(&["create", "logs-1", "16Mi"]);
        operator.json(&["snapshot", "create", "data-1", "friday"]);
        let mut path = program("uringctl").parent().unwrap().as_os_str().to_owned();
        path.push(":");
        path.push(env::var_os("PATH").unwrap());
        for (shell, options, script) in SHELLS {
            let mut version = Command::new(shell);
            version.arg("--version").stdout(Stdio::null());
            if version.status().is_err() {
                skip_uninstalled(shell);
                continue;
            }
            for (words, completed) in [
                (&["snapsh"][..], "snapshot"),
                (&["list", "--js"], "--json"),
                (&["down", "da"], "data-1"),
                (&["create", "--pool", "ma"], "main"),
                (&["snapshot", "delete", "fr"], "friday"),
            ] {
                let mut completes = Command::new(shell);
                completes
                    .args(options)
                    .args(["-c", script])
                    // $0; fish has none.
                    .args((shell != "fish").then_some(shell))
                    .arg("uringctl")
                    .args(words)
                    .env("PATH", &path)
                    .env("HOME", sandbox.dir())
                    .env(
                        "URING_CSI_NODE_ENDPOINT",
                        format!("unix://{}", node.socket().display()),
                    )
                    .env(
                        "URING_CSI_CONTROLLER_ENDPOINT",
                        format!("unix://{}", controller.socket().display()),
                    )
                    .stdin(Stdio::null());
                // It waits a second for the agents; on a loaded machine they may take longer.
                eventually(&format!("{shell} completes {words:?}"), async || {
                    let output = completes.output().unwrap();
                    let err = String::from_utf8_lossy(&output.stderr);
                    assert!(err.is_empty(), "{shell}, {words:?}: {err}");
                    let out = String::from_utf8(output.stdout).unwrap();
                    // A description follows a tab or colon.
                    let said = (out.lines()).map(|line| line.split(['\t', ':', ' ']).next());
                    said.eq([Some(completed)]).then_some(())
                })
                .await;
            }
        }
    });
}
