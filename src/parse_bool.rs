//! Booleans of StorageClasses and volume contexts, by the rules of Go's
//! `strconv.ParseBool`, which the drivers before this one use.

/// The value; `None` if the text is no boolean.
pub fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn booleans_are_parsed_as_by_go() {
        for on in ["1", "t", "T", "true", "TRUE", "True"] {
            assert_eq!(parse_bool(on), Some(true), "{on}");
        }
        for off in ["0", "f", "F", "false", "FALSE", "False"] {
            assert_eq!(parse_bool(off), Some(false), "{off}");
        }
        for neither in ["", "tRUE", "yes", "on", " true", "2"] {
            assert_eq!(parse_bool(neither), None, "{neither}");
        }
    }
}
