//! The features of images, which decide the clients that can use them.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// The features of an image, as bits of `<rbd/features.h>`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Features(pub u64);

/// The bits' names, from the lowest on.
const NAMES: [&str; 12] = [
    "layering",
    "striping",
    "exclusive-lock",
    "object-map",
    "fast-diff",
    "deep-flatten",
    "journaling",
    "data-pool",
    "operations",
    "migrating",
    "non-primary",
    "dirty-cache",
];

/// No feature has this name.
///
/// Remedy: correct imageFeatures in the class.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no image feature {0:?}; there are {names}", names = NAMES.join(", "))]
pub struct UnknownFeature(pub String);

impl Features {
    /// The image can have a parent.
    pub const LAYERING: Self = Self(1);
    /// The data is striped by other than the default values.
    pub const STRIPING: Self = Self(1 << 1);
    /// Only one client writes at a time.
    pub const EXCLUSIVE_LOCK: Self = Self(1 << 2);
    /// A map records the objects that exist.
    pub const OBJECT_MAP: Self = Self(1 << 3);
    /// The object map also records the differences between snapshots.
    pub const FAST_DIFF: Self = Self(1 << 4);
    /// Flattening includes the snapshots.
    pub const DEEP_FLATTEN: Self = Self(1 << 5);
    /// Every write is journalled, for mirrors.
    pub const JOURNALING: Self = Self(1 << 6);
    /// The data is in another pool than the header.
    pub const DATA_POOL: Self = Self(1 << 7);
    /// It is the secondary image of a mirror by snapshots.
    pub const NON_PRIMARY: Self = Self(1 << 10);

    /// Whether all of `others` are set.
    pub fn contains(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }

    /// These without `others`.
    #[must_use]
    pub fn without(self, others: Self) -> Self {
        Self(self.0 & !others.0)
    }
}

impl std::ops::BitOr for Features {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl FromStr for Features {
    type Err = UnknownFeature;

    /// Names, separated by commas; blanks around them are ignored.
    fn from_str(text: &str) -> Result<Self, UnknownFeature> {
        let names = text
            .split(',')
            .map(str::trim)
            .filter(|name| !name.is_empty());
        let bit = |name: &str| {
            let nr = NAMES.iter().position(|known| *known == name);
            nr.map(|nr| 1 << nr)
                .ok_or_else(|| UnknownFeature(name.to_owned()))
        };
        names
            .map(bit)
            .try_fold(0, |all, bit| Ok(all | bit?))
            .map(Self)
    }
}

impl fmt::Display for Features {
    /// The names, separated by commas; bits without a name in hexadecimal.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for nr in (0..u64::BITS).filter(|nr| self.0 >> nr & 1 == 1) {
            f.write_str(separator)?;
            match NAMES.get(nr as usize) {
                Some(name) => f.write_str(name)?,
                None => write!(f, "{:#x}", 1_u64 << nr)?,
            }
            separator = ",";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_are_read_and_shown() {
        let features: Features = "layering, exclusive-lock".parse().unwrap();
        assert_eq!(features, Features::LAYERING | Features::EXCLUSIVE_LOCK);
        assert_eq!(features.to_string(), "layering,exclusive-lock");
        assert_eq!("".parse(), Ok(Features::default()));
        assert_eq!(Features(1 << 40).to_string(), "0x10000000000");
        let error = "layering,striped".parse::<Features>().unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("there is no image feature \"striped\"")
        );
    }

    proptest! {
        #[test]
        fn displayed_features_parse_back(bits in 0_u64..1 << NAMES.len()) {
            prop_assert_eq!(Features(bits).to_string().parse(), Ok(Features(bits)));
        }
    }
}
