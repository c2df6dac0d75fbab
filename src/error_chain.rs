//! Errors with their causes: an error's own sentence omits its source, so that no cause
//! appears twice.

use std::error::Error;

/// The error and its chain of sources, as one sentence.
pub fn error_chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}
