//! Reports the tests that were skipped because this machine lacks something: a test that
//! passes shows no output. `make unit` and `make test-kernel` list them at their ends, from
//! the file that `NOT_TESTED` names: a line has the test's name, a tab and the reason.

use std::{env, fs::File, io::Write as _, thread};

/// Reports that a test does nothing here, for the reason `what`. On the test kernel,
/// where every test must run, it fails instead.
pub fn skip_test(what: &str) {
    report_not_tested(what);
    assert!(env::var_os("TEST_ALL").is_none(), "{what}");
}

/// Reports that a test does nothing here, for the reason `what`.
pub fn report_not_tested(what: &str) {
    eprintln!("**** NOT TESTED: {what}");
    if let Some(list) = env::var_os("NOT_TESTED") {
        let list = File::options().create(true).append(true).open(list);
        // The thread of a test or story has its name.
        let thread = thread::current();
        let name = thread.name().unwrap_or_default();
        assert!(
            name.contains("::") || name == "main",
            "{name:?} is no test's thread"
        );
        let what = what.replace(['\n', '\t'], " ");
        let line = format!("{name}\t{what}\n");
        list.and_then(|mut list| list.write_all(line.as_bytes()))
            .expect("the list of skipped tests");
    }
}

/// Skips a test for lack of a package that `make setup` installs; in CI it fails.
pub fn skip_uninstalled(what: &str) {
    assert!(env::var_os("CI").is_none(), "{what}");
    skip_test(what);
}
