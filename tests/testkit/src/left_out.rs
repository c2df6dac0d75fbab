//! Says what was not tested, for lack of something on this machine, where it is read:
//! the output of a test that passes is not. `make unit` and `make test-kernel` list it
//! at their ends, from the file that `NOT_TESTED` names.

use std::{env, fs::File, io::Write as _};

/// Says that a test does nothing because `what` is so here, which fails it where
/// nothing may be left out: in the test kernel.
pub fn left_out(what: &str) {
    not_tested(what);
    assert!(env::var_os("TEST_ALL").is_none(), "{what}");
}

/// Says that a test does nothing here, for the reason `what`.
pub fn not_tested(what: &str) {
    eprintln!("**** NOT TESTED: {what}");
    if let Some(list) = env::var_os("NOT_TESTED") {
        let list = File::options().create(true).append(true).open(list);
        let line = format!("{what}\n");
        list.and_then(|mut list| list.write_all(line.as_bytes()))
            .expect("a file for what is left out");
    }
}

/// The same of what `make setup` installs: there is no excuse where CI runs.
pub fn left_out_uninstalled(what: &str) {
    assert!(env::var_os("CI").is_none(), "{what}");
    left_out(what);
}
