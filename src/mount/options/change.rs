//! From the options of a mounted superblock to others.

use super::{FsOption, MountOptions};

impl MountOptions {
    /// The options to set on a superblock that was mounted with those of `before`, for it to
    /// have these. `in_doubt`: a change did not end, and any of these may be set, or of those
    /// before. Fails with one that ends only with the mount: nothing says what its default is.
    pub fn to_set(
        &self,
        before: &Self,
        in_doubt: Option<&Self>,
    ) -> Result<Vec<FsOption>, FsOption> {
        let differs = |option: &&FsOption| in_doubt.is_some() || !before.has(option);
        let mut set: Vec<_> = self.superblock.iter().filter(differs).cloned().collect();
        let has_key = |key: &str| self.superblock.iter().any(|option| option.key == key);
        let in_doubt = in_doubt.iter().flat_map(|options| &options.superblock);
        for former in before.superblock.iter().chain(in_doubt) {
            if has_key(&former.key) {
                continue;
            }
            let opposite = former.opposite().ok_or_else(|| former.clone())?;
            if !set.contains(&opposite) {
                set.push(opposite);
            }
        }
        Ok(set)
    }
}

impl FsOption {
    /// The option that undoes this one; none of one with a value. The kernel refuses words
    /// that it does not know.
    pub fn opposite(&self) -> Option<Self> {
        let key = match (&*self.key, &self.value) {
            (_, Some(_)) => return None,
            ("sync", None) => "async".to_owned(),
            ("async", None) => "sync".to_owned(),
            (key, None) => match key.strip_prefix("no") {
                Some(rest) => rest.to_owned(),
                None => format!("no{key}"),
            },
        };
        Some(Self { key, value: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(words: &str) -> MountOptions {
        MountOptions::parse(&[words]).expect("options")
    }

    #[test]
    fn a_change_sets_what_is_new_and_the_opposite_of_what_is_gone() {
        for (before, in_doubt, now, expected) in [
            ("sync", None, "sync", Some("")),
            ("", None, "sync,commit=5", Some("commit=5,sync")),
            ("sync,discard", None, "discard", Some("async")),
            ("nobarrier", None, "barrier", Some("barrier")),
            ("nobarrier,lazytime", None, "", Some("nolazytime,barrier")),
            ("commit=5", None, "commit=30", Some("commit=30")),
            ("commit=5", None, "", None),
            // An unfinished change may have set these, or not.
            (
                "commit=5",
                Some("commit=30,sync"),
                "commit=5",
                Some("commit=5,async"),
            ),
            ("sync", Some(""), "sync", Some("sync")),
            ("", Some("commit=30"), "", None),
        ] {
            let set = options(now).to_set(&options(before), in_doubt.map(options).as_ref());
            let set = set.ok().map(|set| {
                let words = set.iter().map(ToString::to_string);
                words.collect::<Vec<_>>().join(",")
            });
            assert_eq!(set.as_deref(), expected, "{before} ({in_doubt:?}) -> {now}");
        }
    }
}
