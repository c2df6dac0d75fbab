//! An address of an NBD export: refused, or of one spelling from then on.

#![no_main]

use libfuzzer_sys::fuzz_target;
use uring_csi::internals::Export;

fuzz_target!(|text: &str| {
    for text in [text.to_owned(), format!("nbd://{text}"), format!("nbd+unix:///{text}")] {
        if let Ok(export) = text.parse::<Export>() {
            let canonical = export.to_string();
            assert!(!canonical.contains([' ', '\n']));
            assert_eq!(canonical.parse(), Ok(export));
        }
    }
});
