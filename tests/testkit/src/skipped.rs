//! Reports the tests that were skipped because this machine lacks something: a test that
//! passes shows no output. `make unit` and `make test-kernel` list them at their ends, from
//! the file that `NOT_TESTED` names.

use std::{env, fs::File, io::Write as _};

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
        let line = format!("{what}\n");
        list.and_then(|mut list| list.write_all(line.as_bytes()))
            .expect("the list of skipped tests");
    }
}

/// Skips a test for lack of a package that `make setup` installs; in CI it fails.
pub fn skip_uninstalled(what: &str) {
    assert!(env::var_os("CI").is_none(), "{what}");
    skip_test(what);
}
