//! Counts the agent's system calls and context switches in each call.
//!
//! Counts are the same on every machine, where times are not. Each case runs many times,
//! and the lowest decile is taken: the agent's timers, and the moments at which it and
//! its caller are scheduled, add to the counts of some runs.
//!
//! `make counts` fails if a case takes over six system calls more or fewer than
//! `bench/counts/counts.txt` says, or is missing: a change that makes more calls has to be
//! justified, and one that makes fewer updates the file (`UPDATE=1`). The file has the counts
//! of a node without other volumes; those of a node with 100 others, or `VOLUMES=1000`, must
//! not exceed them either. `NAMES=1` counts by the name of the system call, with strace. Needs
//! root.

#![allow(clippy::disallowed_methods, missing_docs)]

mod cases;
mod counters;
mod table;

use std::{env, io, mem, path::Path, process::ExitCode, thread};

use testkit::{Node, NodeSetup, Sandbox, report_not_tested};

use cases::Cases;
use counters::Counters;
use table::Table;

/// The number of other volumes that are staged in the second run.
fn others() -> usize {
    let number = env::var("VOLUMES").unwrap_or_default();
    if number.is_empty() {
        100
    } else {
        number.parse().expect("VOLUMES: a number")
    }
}

fn main() -> ExitCode {
    let sandbox = Sandbox::new();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let mut node = Node::prepare(&sandbox, NodeSetup::new(&sandbox));
    node.run_without_holds();
    // Its log goes to a container runtime's pipe, as in Kubernetes.
    node.leave_log_unread();
    runtime.block_on(node.start_first());
    let mut log = node.take_log_pipe();
    thread::spawn(move || io::copy(&mut log, &mut io::sink()));
    let Some(counters) = Counters::of(node.pid()) else {
        report_not_tested("the number of system calls: this kernel has no tracepoints for them");
        return ExitCode::SUCCESS;
    };
    let mut cases = Cases {
        node: &node,
        sandbox: &sandbox,
        counters,
        table: Table::default(),
    };
    cases.run_bare();
    runtime.block_on(cases.run());
    let alone = mem::take(&mut cases.table);
    let others = others();
    runtime.block_on(cases.run_beside(others));
    let beside_others = cases.table;
    print!("{alone}\nbeside {others} other volumes:\n{beside_others}");
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/counts/counts.txt");
    if env::var_os("UPDATE").is_some_and(|set| !set.is_empty()) {
        alone.write(&file);
        return ExitCode::SUCCESS;
    }
    let expected = Table::read(&file);
    let mut differences = alone.differences_from(&expected);
    differences.extend(
        beside_others
            .excesses_over(&expected)
            .map(|excess| format!("beside {others} other volumes: {excess}")),
    );
    for difference in &differences {
        eprintln!("{difference}");
    }
    if differences.is_empty() {
        return ExitCode::SUCCESS;
    }
    eprintln!(
        "write the new counts to {} by `make counts UPDATE=1`",
        file.display()
    );
    ExitCode::FAILURE
}
