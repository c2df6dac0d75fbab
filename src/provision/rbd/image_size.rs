//! The sizes of images: whole MiB below 1 GiB, else whole GiB, as ceph-csi
//! rounds them; where that exceeds the limit, whole MiB.

use super::super::{ProvisionError, Range};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Rounded up, it still fits the sizes of CSI.
const MAXIMUM: u64 = i64::MAX.cast_unsigned() / GIB * GIB;

/// The size of a new or grown image in bytes: the required one, else `default`, at least
/// `least`.
pub fn choose(range: Range, default: u64, least: u64) -> Result<u64, ProvisionError> {
    let Range { required, limit } = range;
    let wanted = match (required, limit) {
        (0, 0) => default,
        (0, limit) => default.min(limit),
        (required, _) => required,
    };
    let wanted = wanted.max(least).max(1);
    if wanted > MAXIMUM {
        let why = format!("{wanted} exceeds the largest image, {MAXIMUM}");
        return Err(ProvisionError::Size {
            field: "required_bytes",
            why,
        });
    }
    let unit = if wanted < GIB { MIB } else { GIB };
    let fits = |bytes: &u64| limit == 0 || *bytes <= limit;
    let sizes = [wanted.next_multiple_of(unit), wanted.next_multiple_of(MIB)];
    let floor = Some(limit - limit % MIB).filter(|bytes| {
        // Without a required size: the largest within the limit.
        required == 0 && *bytes >= least.max(MIB)
    });
    let fitting = sizes.into_iter().find(fits).or(floor);
    fitting.ok_or_else(|| ProvisionError::Size {
        field: "limit_bytes",
        why: format!(
            "{limit} is too small: the smallest volume has {} bytes",
            sizes[1]
        ),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(required: u64, limit: u64) -> Result<u64, ProvisionError> {
        choose(Range { required, limit }, GIB, MIB)
    }

    #[test]
    fn sizes_are_rounded_as_ceph_csi_rounds_them() {
        for (required, limit, bytes) in [
            (0, 0, GIB),
            (1, 0, MIB),
            (MIB + 1, 0, 2 * MIB),
            (GIB - 1, 0, GIB),
            (GIB + 1, 0, 2 * GIB),
            (GIB + 1, GIB + MIB, GIB + MIB),
            (0, 5 * MIB + 1, 5 * MIB),
        ] {
            assert_eq!(of(required, limit).unwrap(), bytes, "{required} {limit}");
        }
        for (required, limit) in [(u64::MAX, 0), (MIB + 1, MIB + 2), (0, MIB - 1)] {
            assert!(of(required, limit).is_err(), "{required} {limit}");
        }
    }

    proptest! {
        #[test]
        fn a_chosen_size_satisfies_the_range(required: u64, limit: u64, default in 1..4 * GIB) {
            let range = Range { required, limit };
            if let Ok(bytes) = choose(range, default, MIB) {
                prop_assert!(range.holds(bytes) && bytes % MIB == 0 && bytes >= MIB);
            }
        }
    }
}
