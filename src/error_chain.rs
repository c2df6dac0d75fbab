//! Errors in full: their sentences name no cause, so that each cause is said once.

use std::error::Error;

/// The error and all that caused it, as one sentence.
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
