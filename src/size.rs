//! Sizes in Kubernetes' notation: `10Gi`, `500M`, `1.5Ti`, `4096`.
//!
//! Suffixes are those of a Kubernetes quantity, powers of 1024 with an `i` and
//! of 1000 without; a trailing `B` is allowed. Digits are computed exactly, and
//! a fraction of a byte is rounded up, as Kubernetes does.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// A number of bytes, at most what CSI's `int64` holds. In files a text, exact to the byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Size(i64);

/// The text is not a size.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadSize {
    /// Not digits and a known suffix.
    #[error("{0:?} is not a size; write for example 10Gi, 500M or 4096")]
    Form(String),
    /// More than 2^63 - 1 bytes.
    ///
    /// Remedy: request less than 8Ei.
    #[error("{0} is larger than any volume")]
    TooLarge(String),
}

impl Size {
    /// The number of bytes.
    pub fn bytes(self) -> i64 {
        self.0
    }
}

impl FromStr for Size {
    type Err = BadSize;

    fn from_str(text: &str) -> Result<Self, BadSize> {
        let form = || BadSize::Form(text.to_owned());
        let too_large = || BadSize::TooLarge(text.to_owned());
        let end = text
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(text.len());
        let (number, suffix) = text.split_at(end);
        let unit = unit(suffix).ok_or_else(form)?;
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let digits = |digits: &str| digits.bytes().all(|b| b.is_ascii_digit());
        if whole.is_empty() || number.ends_with('.') || !digits(fraction) {
            return Err(form());
        }
        let whole: u128 = whole.parse().map_err(|_| too_large())?;
        // Nine digits express 1 Ei to within a few bytes; more are a mistake.
        if fraction.len() > 9 {
            return Err(form());
        }
        let scale = 10u128.pow(u32::try_from(fraction.len()).map_err(|_| form())?);
        let fraction: u128 = match fraction {
            "" => 0,
            digits => digits.parse().map_err(|_| form())?,
        };
        let bytes = whole
            .checked_mul(unit)
            .and_then(|bytes| bytes.checked_add((fraction * unit).div_ceil(scale)))
            .ok_or_else(too_large)?;
        i64::try_from(bytes).map(Self).map_err(|_| too_large())
    }
}

fn unit(suffix: &str) -> Option<u128> {
    let suffix = suffix.strip_suffix('B').unwrap_or(suffix);
    let (letter, base) = match suffix.strip_suffix('i') {
        Some("") => return None,
        Some(letter) => (letter, 1024u128),
        None => (suffix, 1000),
    };
    let power = match letter {
        "" => 0,
        "k" | "K" => 1,
        "M" => 2,
        "G" => 3,
        "T" => 4,
        "P" => 5,
        "E" => 6,
        _ => return None,
    };
    Some(base.pow(power))
}

/// For tables: three digits and the largest unit that leaves one before the
/// point, as `1.5Gi`; exact sizes are in the JSON.
pub fn human(bytes: i64) -> String {
    u64::try_from(bytes).map_or_else(|_| bytes.to_string(), human_bytes)
}

/// [`human`], of a size that cannot be negative.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    // The exponent of 1024.
    let power = (bytes | 1).ilog2() / 10;
    let Some(unit) = power.checked_sub(1).map(|at| UNITS[at as usize]) else {
        return bytes.to_string();
    };
    let one = 1u128 << (10 * power);
    let tenths = (u128::from(bytes) * 10 + one / 2) / one;
    match (tenths / 10, tenths % 10) {
        (whole, 0) => format!("{whole}{unit}"),
        (whole, tenth) => format!("{whole}.{tenth}{unit}"),
    }
}

/// For messages: exact, and as in a table.
pub fn exact(bytes: u64) -> String {
    match i64::try_from(bytes) {
        Ok(signed) if bytes >= 1024 => format!("{bytes} bytes ({})", human(signed)),
        _ => format!("{bytes} bytes"),
    }
}

impl TryFrom<String> for Size {
    type Error = BadSize;

    fn try_from(text: String) -> Result<Self, BadSize> {
        text.parse()
    }
}

impl From<Size> for String {
    fn from(size: Size) -> Self {
        size.0.to_string()
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&human(self.0))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_are_read_exactly() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4096B", 4096),
            ("500M", 500_000_000),
            ("500MB", 500_000_000),
            ("1k", 1000),
            ("1Ki", 1024),
            ("10Gi", 10 << 30),
            ("10GiB", 10 << 30),
            ("1.5Gi", 3 << 29),
            ("0.1Ki", 103),
            ("7Ei", 7 << 60),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
    }

    #[test]
    fn other_texts_are_rejected() {
        for text in [
            "", "Gi", "-1", "1.", ".5G", "1.2.3", "1 Gi", "10gi", "1i", "1e3", "B", "１",
        ] {
            assert_eq!(
                text.parse::<Size>(),
                Err(BadSize::Form(text.to_owned())),
                "{text}"
            );
        }
        for text in ["8Ei", "9223372036854775808", &"9".repeat(60)] {
            assert_eq!(
                text.parse::<Size>(),
                Err(BadSize::TooLarge(text.to_owned())),
                "{text}"
            );
        }
    }

    #[test]
    fn tables_show_round_sizes() {
        for (bytes, text) in [
            (-1, "-1"),
            (0, "0"),
            (1023, "1023"),
            (1024, "1Ki"),
            (3 << 29, "1.5Gi"),
            (10 << 30, "10Gi"),
            (i64::MAX, "8Ei"),
        ] {
            assert_eq!(human(bytes), text);
        }
    }

    #[test]
    fn messages_have_both() {
        assert_eq!(exact(0), "0 bytes");
        assert_eq!(exact(1023), "1023 bytes");
        assert_eq!(exact(8_362_328_064), "8362328064 bytes (7.8Gi)");
        assert_eq!(exact(u64::MAX), "18446744073709551615 bytes");
    }

    proptest! {
        #[test]
        fn no_text_panics(text in ".{0,40}|[0-9.]{0,40}[kKMGTPEiB]{0,3}") {
            let _ = text.parse::<Size>();
        }

        #[test]
        fn a_size_in_a_table_reads_back_nearly(bytes in 0..i64::MAX / 2) {
            let back = human(bytes).parse::<Size>().unwrap().bytes();
            prop_assert!((back - bytes).abs() <= bytes / 20 + 1, "{} {}", bytes, back);
        }
    }
}
