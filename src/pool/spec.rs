//! The `--pool` option, and the set of configured pools.

use std::{collections::BTreeMap, path::PathBuf, str::FromStr};

use super::{Pool, PoolError, Scope};

/// `NAME=DIR[,local|,shared][,mounted]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolSpec {
    /// The pool's name.
    pub name: String,
    /// Its directory.
    pub dir: PathBuf,
    /// Its scope, if given.
    pub scope: Option<Scope>,
    /// Whether the directory has to be a mount point.
    pub mounted: bool,
}

impl PoolSpec {
    /// The pool, with `default` for a scope that is not given.
    pub fn or(self, default: Scope) -> Pool {
        Pool {
            name: self.name,
            dir: self.dir,
            scope: self.scope.unwrap_or(default),
            mounted: self.mounted,
        }
    }
}

impl FromStr for PoolSpec {
    type Err = PoolError;

    fn from_str(text: &str) -> Result<Self, PoolError> {
        let bad = |why| PoolError::BadSpec {
            text: text.to_owned(),
            why,
        };
        let (name, rest) = text
            .split_once('=')
            .ok_or_else(|| bad("there is no `=` in it"))?;
        if !is_name(name) {
            return Err(bad(
                "a name has 1 to 63 letters, digits, `-` and `_` and begins with a letter or digit",
            ));
        }
        let (dir, options) = rest.split_once(',').unzip();
        let dir = dir.unwrap_or(rest);
        let (mut scope, mut mounted) = (None, false);
        for option in options.into_iter().flat_map(|options| options.split(',')) {
            match option {
                "local" if scope.is_none() => scope = Some(Scope::Local),
                "shared" if scope.is_none() => scope = Some(Scope::Shared),
                "mounted" if !mounted => mounted = true,
                _ => {
                    return Err(bad(
                        "after the directory come `,local` or `,shared`, and `,mounted`",
                    ));
                }
            }
        }
        if !dir.starts_with('/') {
            return Err(bad("the directory must be an absolute path"));
        }
        Ok(Self {
            name: name.to_owned(),
            dir: dir.into(),
            scope,
            mounted,
        })
    }
}

/// Whether this is a valid pool name. It has no dot, so that handles can be split.
pub(super) fn is_name(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric();
    name.len() <= 63
        && name.bytes().next().is_some_and(plain)
        && name.bytes().all(|b| plain(b) || b == b'-' || b == b'_')
}

/// The pools of this process, by name.
#[derive(Clone, Debug, Default)]
pub struct Pools(BTreeMap<String, Pool>);

impl Pools {
    /// Fails if two pools have one name.
    pub fn new(pools: impl IntoIterator<Item = Pool>) -> Result<Self, PoolError> {
        let mut map = BTreeMap::new();
        for pool in pools {
            if let Some(twice) = map.insert(pool.name.clone(), pool) {
                return Err(PoolError::Twice(twice.name));
            }
        }
        Ok(Self(map))
    }

    /// The pool of that name.
    pub fn get(&self, name: &str) -> Result<&Pool, PoolError> {
        self.0.get(name).ok_or_else(|| PoolError::Unknown {
            name: name.to_owned(),
            known: self.known(),
        })
    }

    /// The pool of that name, or the only one where no name is given.
    pub fn get_or_only(&self, name: Option<&str>) -> Result<&Pool, PoolError> {
        match (name, self.0.len()) {
            (Some(name), _) => self.get(name),
            (None, 1) => Ok(&self.0[self.0.keys().next().expect("one pool")]),
            (None, _) => Err(PoolError::Unnamed {
                known: self.known(),
            }),
        }
    }

    /// All of them, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = &Pool> {
        self.0.values()
    }

    /// The names, for messages.
    fn known(&self) -> String {
        if self.0.is_empty() {
            return "none (see --pool)".to_owned();
        }
        let names: Vec<_> = self.0.keys().map(String::as_str).collect();
        names.join(", ")
    }
}
