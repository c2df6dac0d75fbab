//! The size of a volume, from a capacity range.

use super::ProvisionError;
use crate::fs::FsType;

/// A capacity range (CSI `CapacityRange`), in bytes; 0: not given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Range {
    /// At least so many.
    pub required: u64,
    /// At most so many.
    pub limit: u64,
}

impl Range {
    /// As it is on the wire.
    pub fn new(required: i64, limit: i64) -> Result<Self, ProvisionError> {
        let natural = |field: &str, bytes: i64| {
            u64::try_from(bytes)
                .map_err(|_| ProvisionError::Range(format!("{field}: {bytes} is negative")))
        };
        let range = Self {
            required: natural("required_bytes", required)?,
            limit: natural("limit_bytes", limit)?,
        };
        if limit != 0 && required > limit {
            return Err(ProvisionError::Range(format!(
                "required_bytes: {required} is more than limit_bytes, {limit}"
            )));
        }
        Ok(range)
    }

    /// The size of a new volume: the required bytes, else `default`, at least
    /// `least`, in whole blocks.
    pub fn choose(self, default: u64, least: u64) -> Result<u64, ProvisionError> {
        let Self { required, limit } = self;
        if required > MAXIMUM {
            let why = format!("{required} is more than a file can have, {MAXIMUM}");
            return Err(size("required_bytes", why));
        }
        let wanted = match (required, limit) {
            (0, 0) => default,
            (0, limit) => default.min(limit - limit % BLOCK),
            (required, _) => required,
        };
        let bytes = wanted.max(least).next_multiple_of(BLOCK);
        if limit != 0 && bytes > limit {
            let why =
                format!("{limit} is too little: the smallest volume that fits has {bytes} bytes");
            return Err(size("limit_bytes", why));
        }
        Ok(bytes)
    }

    /// The size of a volume that may have any; 0: none is named.
    pub fn named(self) -> u64 {
        match self.required {
            0 => self.limit,
            bytes => bytes,
        }
    }

    /// Whether a volume of that size satisfies the range.
    pub fn holds(self, bytes: u64) -> bool {
        bytes >= self.required && (self.limit == 0 || bytes <= self.limit)
    }
}

/// The least size of a volume that is to hold one of these file systems.
pub fn least(file_systems: &[&str]) -> u64 {
    let of = |fs: &&str| fs.parse().map_or(MIB, FsType::least_bytes);
    file_systems.iter().map(of).max().unwrap_or(MIB)
}

fn size(field: &'static str, why: String) -> ProvisionError {
    ProvisionError::Size { field, why }
}

const MIB: u64 = 1 << 20;
/// Sizes are whole multiples of it: a page, and any logical block size.
const BLOCK: u64 = 4096;
/// The size if the request names none.
pub const DEFAULT: u64 = 1 << 30;
/// The largest `off_t`, in whole blocks.
pub const MAXIMUM: u64 = i64::MAX.cast_unsigned() / BLOCK * BLOCK;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range(required: u64, limit: u64) -> Range {
        Range { required, limit }
    }

    #[test]
    fn sizes_are_rounded_up_and_raised_where_the_limit_allows() {
        assert_eq!(range(0, 0).choose(DEFAULT, MIB).unwrap(), DEFAULT);
        assert_eq!(range(0, 5 * MIB).choose(DEFAULT, MIB).unwrap(), 5 * MIB);
        assert_eq!(range(1, 0).choose(DEFAULT, MIB).unwrap(), MIB);
        assert_eq!(range(MIB + 1, 0).choose(DEFAULT, MIB).unwrap(), MIB + 4096);
        assert_eq!(
            range(1, 0)
                .choose(DEFAULT, least(&["ext4", "xfs"]))
                .unwrap(),
            300 * MIB
        );
        for (bad, field) in [
            (range(u64::MAX, 0), "required_bytes"),
            (range(MIB + 1, MIB + 2), "limit_bytes"),
            (range(0, 4095), "limit_bytes"),
        ] {
            let error = bad.choose(DEFAULT, MIB).unwrap_err();
            assert!(error.to_string().starts_with(field), "{error}");
        }
    }

    #[test]
    fn unsatisfiable_ranges_are_refused() {
        assert_eq!(Range::new(4096, 4096).unwrap(), range(4096, 4096));
        for (required, limit) in [(-1, 0), (0, -1), (2, 1)] {
            let error = Range::new(required, limit).unwrap_err();
            assert_eq!(error.kind(), crate::Kind::Invalid);
        }
    }

    proptest! {
        #[test]
        fn a_chosen_size_satisfies_the_range(required: u64, limit: u64, default in 1..DEFAULT) {
            let range = range(required, limit);
            if let Ok(bytes) = range.choose(default, MIB) {
                prop_assert!(range.holds(bytes) && bytes % BLOCK == 0 && bytes >= MIB);
            }
        }
    }
}
