//! The desired state of a volume, as a file of TOML says it.

use std::{
    collections::BTreeMap,
    path::{Component, Path, PathBuf},
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::root::{RootMode, RootOwner};
use crate::{capability::MAX_ID, size::Size};

#[cfg(feature = "cli")]
pub mod named;

/// The desired state of one volume on this machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "DesiredFile", into = "DesiredFile")]
pub struct Desired {
    /// The volume's handle; `None`: the file's name.
    pub handle: Option<String>,
    /// The volume context that names its source.
    pub source: BTreeMap<String, String>,
    /// Raw, or as a file system.
    pub access: DesiredAccess,
    /// Where it is to be mounted; for a raw volume, where its device node is to appear.
    pub path: PathBuf,
    /// Whether this machine may only read it.
    pub read_only: bool,
    /// The size that it is to have at least.
    pub size: Option<Size>,
    /// The directory of the secrets that its server asks for, one file each.
    pub secrets: Option<PathBuf>,
}

/// How a volume is to be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DesiredAccess {
    /// As a raw block device.
    Raw,
    /// Mounted.
    Mount {
        /// The file system; `None`: the one on the device, or the default where it is blank.
        fs: Option<String>,
        /// Mount options.
        options: Vec<String>,
        /// The owner of its root directory; `None`: as it is.
        owner: Option<RootOwner>,
        /// The permission bits of its root directory; `None`: as they are.
        mode: Option<RootMode>,
    },
}

#[cfg(feature = "node")]
impl DesiredAccess {
    /// Takes these mount options.
    pub fn set_options(&mut self, new: &[String]) {
        if let Self::Mount { options, .. } = self {
            *options = new.to_vec();
        }
    }
}

impl Desired {
    /// The handle of the volume that the file of this name asks for.
    pub fn handle<'a>(&'a self, name: &'a str) -> &'a str {
        self.handle.as_deref().unwrap_or(name)
    }
}

/// The keys of a file.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DesiredFile {
    #[serde(skip_serializing_if = "Option::is_none")]
    handle: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    size: Option<Size>,
    #[serde(skip_serializing_if = "Option::is_none")]
    secrets: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    source: Option<BTreeMap<String, String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    volume: Option<VolumeTable>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mount: Option<MountTable>,
    #[serde(skip_serializing_if = "Option::is_none")]
    raw: Option<RawTable>,
}

/// A volume of the controller, in place of its handle and source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeTable {
    /// The name that it was or is to be created with.
    pub name: String,
    /// The parameters of a StorageClass; `None`: it exists already.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parameters: Option<BTreeMap<String, String>>,
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct MountTable {
    path: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    fs: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    options: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    owner: Option<RootOwner>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mode: Option<RootMode>,
    #[serde(default)]
    read_only: bool,
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RawTable {
    path: PathBuf,
    #[serde(default)]
    read_only: bool,
}

impl TryFrom<DesiredFile> for Desired {
    type Error = String;

    fn try_from(file: DesiredFile) -> Result<Self, String> {
        let source = match (file.source, file.volume) {
            (Some(source), None) => source,
            (None, None) => return Err("needs a table [source]".to_owned()),
            (_, Some(_)) => {
                return Err(
                    "has a table [volume]; `uringctl apply` asks the controller \
                            for that volume and writes its [source]"
                        .to_owned(),
                );
            }
        };
        let (access, path, read_only) = match (file.mount, file.raw) {
            (Some(mount), None) => {
                let MountTable {
                    path,
                    fs,
                    options,
                    owner,
                    mode,
                    read_only,
                } = mount;
                let access = DesiredAccess::Mount {
                    fs,
                    options,
                    owner,
                    mode,
                };
                (access, path, read_only)
            }
            (None, Some(raw)) => (DesiredAccess::Raw, raw.path, raw.read_only),
            (None, None) => return Err("needs a table [mount] or [raw]".to_owned()),
            (Some(_), Some(_)) => {
                return Err("has both [mount] and [raw]; a volume is one of them".to_owned());
            }
        };
        if !is_plain(&path) {
            return Err(format!("path: {} {NOT_PLAIN}", path.display()));
        }
        if read_only && file.size.is_some() {
            return Err("size: a volume that is read-only does not grow".to_owned());
        }
        if file.secrets.as_deref().is_some_and(|dir| !is_plain(dir)) {
            // It is not shown: it may be a secret by mistake.
            return Err(format!("secrets: {NOT_PLAIN}"));
        }
        if let Some(handle) = &file.handle {
            check_handle("handle", handle)?;
        }
        Ok(Self {
            handle: file.handle,
            source,
            access,
            path,
            read_only,
            size: file.size,
            secrets: file.secrets,
        })
    }
}

impl From<Desired> for DesiredFile {
    fn from(desired: Desired) -> Self {
        let (path, read_only) = (desired.path, desired.read_only);
        let (mount, raw) = match desired.access {
            DesiredAccess::Raw => (None, Some(RawTable { path, read_only })),
            DesiredAccess::Mount {
                fs,
                options,
                owner,
                mode,
            } => {
                let mount = MountTable {
                    path,
                    fs,
                    options,
                    owner,
                    mode,
                    read_only,
                };
                (Some(mount), None)
            }
        };
        Self {
            handle: desired.handle,
            size: desired.size,
            secrets: desired.secrets,
            source: Some(desired.source),
            volume: None,
            mount,
            raw,
        }
    }
}

const NOT_PLAIN: &str = "is not an absolute path without . and .., doubled and trailing slashes";

/// Whether a path means the same to every process, in one spelling.
fn is_plain(path: &Path) -> bool {
    let is_plain = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
    let plain: PathBuf = path.components().collect();
    path.is_absolute() && path.components().all(is_plain) && plain.as_os_str() == path.as_os_str()
}

fn check_handle(field: &str, handle: &str) -> Result<(), String> {
    if handle.is_empty() || handle.len() > MAX_ID || handle.contains(char::is_control) {
        return Err(format!(
            "{field}: {handle:?} is no handle: 1 to {MAX_ID} bytes without control characters"
        ));
    }
    Ok(())
}

/// Why a file asks for no volume.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{why}", .line.map(|line| format!("line {line}: ")).unwrap_or_default())]
pub struct BadDesired {
    /// The line, where one is to blame.
    pub line: Option<usize>,
    /// The defect, with the field.
    pub why: String,
}

impl BadDesired {
    /// A defect of the whole file.
    pub fn whole(why: impl Into<String>) -> Self {
        let (line, why) = (None, why.into());
        Self { line, why }
    }
}

/// Reads a file's text. `name` is the file's name without `.toml`.
pub fn parse(name: &str, text: &str) -> Result<Desired, BadDesired> {
    parse_as(name, text)
}

/// An error of serde without the value that it found: in the wrong place, it may be a secret.
fn without_value(message: &str) -> String {
    let shows_value = ["invalid type: ", "invalid value: "]
        .iter()
        .any(|it| message.starts_with(it));
    match (message.find(['"', '`']), message.rfind(", expected ")) {
        (Some(from), Some(to)) if shows_value && from < to => {
            format!("{}{}", message[..from].trim_end(), &message[to..])
        }
        _ => message.to_owned(),
    }
}

fn parse_as<T: DeserializeOwned>(name: &str, text: &str) -> Result<T, BadDesired> {
    check_handle("the file's name", name).map_err(BadDesired::whole)?;
    toml::from_str(text).map_err(|error| {
        // An error of the whole text is at all of it.
        let span = error.span().filter(|span| *span != (0..text.len()));
        let at = span.map(|span| {
            let before = text.get(..span.start).unwrap_or_default();
            let line = before.matches('\n').count();
            let shown = text.lines().nth(line).unwrap_or_default();
            // Values are not shown: a secret may be among them by mistake.
            let shown = shown.split('=').next().unwrap_or_default();
            (line + 1, shown.trim())
        });
        let message = without_value(&error.message().replace('\n', ", "));
        match at {
            Some((line, shown)) => BadDesired {
                line: Some(line),
                why: format!("{message}: {shown}"),
            },
            None => BadDesired::whole(message),
        }
    })
}

#[cfg(test)]
mod tests;
