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
            if former.is_default() {
                continue;
            }
            let end = former.end().ok_or_else(|| former.clone())?;
            if !set.iter().any(|option| option.key == end.key) {
                set.push(end);
            }
        }
        Ok(set)
    }
}

/// Words that say other than the default, and the default that each ends with. Of others
/// nothing is known: btrfs' `nodatacow` implies more than one word takes back.
const ENDS: &[(&str, &str)] = &[
    ("autodefrag", "noautodefrag"),
    ("flushoncommit", "noflushoncommit"),
    ("grpid", "nogrpid"),
    ("lazytime", "nolazytime"),
    ("mand", "nomand"),
    ("noacl", "acl"),
    ("noauto_da_alloc", "auto_da_alloc"),
    ("nobarrier", "barrier"),
    ("nodelalloc", "delalloc"),
    ("noinit_itable", "init_itable"),
    ("notreelog", "treelog"),
    ("nouser_xattr", "user_xattr"),
    ("sync", "async"),
];

impl FsOption {
    /// Whether the file system has it in any case.
    fn is_default(&self) -> bool {
        self.value.is_none() && ENDS.iter().any(|(_, end)| *end == self.key)
    }

    /// The option that gives the default back, where it is known.
    fn end(&self) -> Option<Self> {
        let pair = ENDS.iter().find(|(word, _)| *word == self.key);
        let (_, end) = pair.filter(|_| self.value.is_none())?;
        Some(Self {
            key: (*end).to_owned(),
            value: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(words: &str) -> MountOptions {
        MountOptions::parse(&[words]).expect("options")
    }

    #[test]
    fn a_change_sets_what_is_new_and_the_default_of_what_is_gone() {
        for (before, in_doubt, now, expected) in [
            ("sync", None, "sync", Some("")),
            ("", None, "sync,commit=5", Some("commit=5,sync")),
            ("sync,discard", None, "discard", Some("async")),
            ("nobarrier", None, "barrier", Some("barrier")),
            ("nobarrier,lazytime", None, "", Some("nolazytime,barrier")),
            ("nobarrier", None, "barrier=0", Some("barrier=0")),
            ("barrier,async,acl,datacow", None, "datacow", Some("")),
            ("datasum", None, "", None),
            ("nodatacow", None, "", None),
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
