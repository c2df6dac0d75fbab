//! The volumes of a run, as a file lists them, and what is known of each.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use super::place::VolumePaths;
use crate::{
    cli::error::CliError,
    proto::csi::{
        VolumeCapability,
        volume_capability::{AccessType, BlockVolume, MountVolume},
    },
    secret::Secrets,
};

/// More are no load test of one node.
pub const MAX_VOLUMES: usize = 1024;

/// A volume with all that its calls need, and what may have to be undone.
pub struct BenchVolume {
    /// Empty until the controller has answered.
    pub handle: String,
    /// The name of one that the run creates, and deletes.
    pub created_as: Option<String>,
    pub volume_context: HashMap<String, String>,
    pub publish_context: HashMap<String, String>,
    pub secrets: Secrets,
    pub capability: VolumeCapability,
    pub paths: VolumePaths,
    pub may_be: MayBe,
    /// Whether a stage has succeeded before, so that nothing else had the volume.
    pub was_staged: bool,
    /// Directories that could not be removed, in sentences.
    pub left: Option<String>,
}

/// What a run may have made of a volume: set before the call is sent, and cleared when the
/// opposite has succeeded.
#[derive(Default)]
pub struct MayBe {
    pub created: bool,
    pub staged: bool,
    pub published: bool,
}

impl BenchVolume {
    /// A volume of which nothing is done yet.
    pub fn new(
        handle: String,
        created_as: Option<String>,
        capability: VolumeCapability,
        paths: VolumePaths,
    ) -> Self {
        Self {
            handle,
            created_as,
            volume_context: HashMap::new(),
            publish_context: HashMap::new(),
            secrets: Secrets::default(),
            capability,
            paths,
            may_be: MayBe::default(),
            was_staged: false,
            left: None,
        }
    }

    /// What may be left of it, in sentences.
    pub fn what_is_left(&self) -> Vec<String> {
        let (name, handle) = (self.created_as.as_deref().unwrap_or(""), &self.handle);
        let mut left = Vec::new();
        if self.may_be.published {
            let target = self.paths.target.display();
            left.push(format!("volume {handle} may be published at {target}"));
        }
        if self.may_be.staged {
            let staging = self.paths.staging.display();
            left.push(format!("volume {handle} may be staged at {staging}"));
        }
        left.extend(self.left.clone());
        if self.may_be.created {
            let id = match handle.as_str() {
                "" => String::new(),
                handle => format!(" (id {handle})"),
            };
            left.push(format!(
                "volume {name}{id}, which this run created, may exist"
            ));
        }
        left
    }
}

/// A line of `--volumes-file`.
#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ListedVolume {
    pub handle: String,
    #[serde(default)]
    pub volume_context: HashMap<String, String>,
    #[serde(default)]
    pub publish_context: HashMap<String, String>,
    /// A directory, as for --secrets.
    pub secrets: Option<PathBuf>,
    pub fs_type: Option<String>,
    #[serde(default)]
    pub mount_options: Vec<String>,
    #[serde(default)]
    pub block: bool,
}

impl ListedVolume {
    /// `default`, with what the file says instead.
    pub fn capability(&self, default: VolumeCapability) -> VolumeCapability {
        let access_type = match (&self.fs_type, default.access_type) {
            _ if self.block => AccessType::Block(BlockVolume {}),
            (None, Some(default)) if self.mount_options.is_empty() => default,
            (fs_type, default) => {
                let default = match default {
                    Some(AccessType::Mount(mount)) => mount,
                    _ => MountVolume::default(),
                };
                AccessType::Mount(MountVolume {
                    fs_type: fs_type.clone().unwrap_or(default.fs_type),
                    mount_flags: if self.mount_options.is_empty() {
                        default.mount_flags
                    } else {
                        self.mount_options.clone()
                    },
                    ..Default::default()
                })
            }
        };
        VolumeCapability {
            access_type: Some(access_type),
            ..default
        }
    }
}

/// Reads `--volumes-file`.
pub fn read(path: &Path) -> Result<Vec<ListedVolume>, CliError> {
    let text = fs::read_to_string(path).map_err(|source| CliError::Io {
        doing: "read",
        path: path.to_owned(),
        source,
    })?;
    parse(&text).map_err(|why| CliError::BadFile {
        path: path.to_owned(),
        why,
    })
}

/// One JSON object for each volume; white space is between them, such as a newline.
fn parse(text: &str) -> Result<Vec<ListedVolume>, String> {
    let mut volumes = Vec::new();
    let mut handles = BTreeSet::new();
    for volume in serde_json::Deserializer::from_str(text).into_iter::<ListedVolume>() {
        let volume =
            volume.map_err(|error| format!("it has no JSON object for each volume: {error}"))?;
        if volume.handle.is_empty() {
            return Err("a volume has no handle".to_owned());
        }
        if volume.block && (volume.fs_type.is_some() || !volume.mount_options.is_empty()) {
            let handle = volume.handle;
            return Err(format!(
                "{handle} is a raw block volume, which has neither fsType nor mountOptions"
            ));
        }
        if !handles.insert(volume.handle.clone()) {
            return Err(format!("{} is listed twice", volume.handle));
        }
        if volumes.len() == MAX_VOLUMES {
            return Err(format!("more than {MAX_VOLUMES} volumes"));
        }
        volumes.push(volume);
    }
    if volumes.is_empty() {
        return Err("it lists no volume".to_owned());
    }
    Ok(volumes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::cli::args::AccessArgs;

    #[test]
    fn a_file_lists_volumes() {
        let text = r#"
            {"handle": "a", "volumeContext": {"pool": "main"}, "fsType": "xfs"}
            {"handle": "b", "block": true, "secrets": "/etc/key"}"#;
        let volumes = parse(text).unwrap();
        assert_eq!(volumes.len(), 2);
        assert_eq!(volumes[0].volume_context["pool"], "main");
        assert!(volumes[1].block && volumes[1].secrets.is_some());
    }

    #[test]
    fn wrong_files_are_refused_by_name() {
        let many: Vec<_> = (0..=MAX_VOLUMES)
            .map(|number| json!({"handle": number.to_string()}).to_string())
            .collect();
        let many = many.concat();
        for (text, why) in [
            ("", "no volume"),
            ("[]", "JSON object"),
            (r#"{"handle":""}"#, "no handle"),
            (r#"{"handle":"a"}{"handle":"a"}"#, "a is listed twice"),
            (r#"{"handle":"a","fstype":"xfs"}"#, "fstype"),
            (r#"{"handle":"a","fsType":"xfs","block":true}"#, "raw block"),
            (r#"{"volumeContext":{}}"#, "handle"),
            (many.as_str(), "more than 1024"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(why), "{text:.40}: {error}");
        }
    }

    #[test]
    fn a_listed_volume_overrides_the_command_line() {
        let of_command = || AccessArgs {
            fs: Some("ext4".to_owned()),
            mount_options: vec!["noatime".to_owned()],
            ..Default::default()
        };
        let mount = |volume: &ListedVolume| match volume
            .capability(of_command().capability())
            .access_type
        {
            Some(AccessType::Mount(mount)) => Some((mount.fs_type, mount.mount_flags)),
            _ => None,
        };
        let options = |option: &str| vec![option.to_owned()];
        let mut volume = ListedVolume::default();
        assert_eq!(
            mount(&volume),
            Some(("ext4".to_owned(), options("noatime")))
        );
        volume.fs_type = Some("xfs".to_owned());
        assert_eq!(mount(&volume), Some(("xfs".to_owned(), options("noatime"))));
        volume.mount_options = options("discard");
        assert_eq!(mount(&volume), Some(("xfs".to_owned(), options("discard"))));
        let block = ListedVolume {
            block: true,
            ..Default::default()
        };
        assert_eq!(mount(&block), None);
    }

    proptest! {
        #[test]
        fn any_text_is_volumes_or_a_reason(text in ".{0,80}|[{}\":, ahndle]{0,60}") {
            if let Err(why) = parse(&text) {
                prop_assert!(!why.is_empty());
            }
        }

        #[test]
        fn every_volume_that_is_written_is_read(
            handles in proptest::collection::btree_set(".{1,20}", 1..20),
            context in proptest::collection::hash_map(".{0,10}", ".{0,10}", 0..4),
            fs_type in proptest::option::of(".{0,8}"),
        ) {
            let lines = handles.iter().map(|handle| {
                let line = json!({
                    "handle": handle, "volumeContext": &context, "fsType": &fs_type,
                });
                format!("{line}\n")
            });
            let read = parse(&lines.collect::<String>()).unwrap();
            let written = handles.iter().map(|handle| ListedVolume {
                handle: handle.clone(),
                volume_context: context.clone(),
                fs_type: fs_type.clone(),
                ..Default::default()
            });
            prop_assert_eq!(read, written.collect::<Vec<_>>());
        }
    }
}
