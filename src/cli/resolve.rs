//! Finds the volume that a name, an id or a path stands for.
//!
//! A volume's handle is opaque and uringctl keeps no state. So it looks a name up
//! where the controller wrote it, in the `name` of the volume context of each listed
//! volume, and never by CreateVolume, because a mistyped name must not create a
//! volume. For a volume of the node, its id or a path where it is published is enough
//! without the controller.

use std::collections::{BTreeSet, HashMap};

use tonic::{Code, Request, Response, metadata::MetadataValue};

use super::{context::Context, error::CliError};
use crate::{
    csi::call::{OMITTED, TAKES_LESS},
    proto::{
        admin::HeldVolume,
        csi::{ControllerGetVolumeRequest, ListVolumesRequest, Volume},
    },
};

/// The key of the volume context that holds the name given to CreateVolume.
pub const NAME_KEY: &str = "name";

/// The name that a volume was created with; empty where its context has none.
pub fn name_of(context: &HashMap<String, String>) -> &str {
    context.get(NAME_KEY).map_or("", String::as_str)
}

/// Metadata: accepts a list that omits unreachable storage.
pub fn take_less<T>(request: &mut Request<T>) {
    let yes = MetadataValue::from_static("1");
    request.metadata_mut().insert(TAKES_LESS, yes);
}

/// Metadata: the omissions of such a list, in sentences.
pub fn omitted_from<T>(page: &Response<T>) -> Vec<String> {
    let said = page.metadata().get_all_bin(OMITTED).into_iter();
    let said = said.filter_map(|value| value.to_bytes().ok());
    said.map(|text| String::from_utf8_lossy(&text).into_owned())
        .collect()
}

impl Context {
    /// Every volume of the controller, all pages.
    pub async fn list_volumes(&self) -> Result<Vec<Volume>, CliError> {
        let (volumes, _) = self.list_pages(false).await?;
        Ok(volumes)
    }

    /// The volumes that the controller can list now, and the omissions.
    pub async fn list_what_can_be_reached(&self) -> Result<(Vec<Volume>, Vec<String>), CliError> {
        self.list_pages(true).await
    }

    async fn list_pages(&self, takes_less: bool) -> Result<(Vec<Volume>, Vec<String>), CliError> {
        let mut omitted = BTreeSet::new();
        let mut volumes = Vec::new();
        let mut starting_token = String::new();
        loop {
            let request = ListVolumesRequest {
                max_entries: 0,
                starting_token,
            };
            let page = self
                .controller("list volumes", request, async |mut client, mut request| {
                    if takes_less {
                        take_less(&mut request);
                    }
                    let page = client.list_volumes(request).await?;
                    omitted.extend(omitted_from(&page));
                    Ok(page)
                })
                .await?;
            volumes.extend(page.entries.into_iter().filter_map(|entry| entry.volume));
            starting_token = page.next_token;
            if starting_token.is_empty() {
                return Ok((volumes, omitted.into_iter().collect()));
            }
        }
    }

    /// The volume that has `wanted` as its id or its name, from the controller.
    pub async fn volume(&self, wanted: &str) -> Result<Volume, CliError> {
        match self.list_volumes().await {
            // Of directories of NFS servers there is no list: only an id finds one.
            Err(CliError::Refused { status, .. }) if status.code() == Code::Unimplemented => {
                self.volume_of_id(wanted).await
            }
            listed => pick(wanted, listed?.into_iter()),
        }
    }

    async fn volume_of_id(&self, id: &str) -> Result<Volume, CliError> {
        let request = ControllerGetVolumeRequest {
            volume_id: id.to_owned(),
        };
        let answer = self
            .controller(
                format!("look up {id}"),
                request,
                async |mut client, request| client.controller_get_volume(request).await,
            )
            .await?;
        let found = answer.volume;
        found.ok_or_else(|| CliError::NoSuchVolume(id.to_owned()))
    }

    /// The volume of the node with the id, published path or name `wanted`. Asks the
    /// controller only if the node does not know it.
    pub async fn held_volume(&self, wanted: &str) -> Result<HeldVolume, CliError> {
        let mut held = self.held().await?;
        let at = match find_held(wanted, &held) {
            Some(at) => at,
            None if wanted.starts_with('/') => return Err(CliError::NotHeld(wanted.to_owned())),
            None => {
                let id = self.volume(wanted).await?.volume_id;
                find_held(&id, &held).ok_or_else(|| CliError::NotHeld(wanted.to_owned()))?
            }
        };
        Ok(held.swap_remove(at))
    }

    /// The id of the volume that `wanted` stands for, on this node or not.
    pub async fn volume_id(&self, wanted: &str) -> Result<String, CliError> {
        // The controller may know the volume even if the node does not answer.
        let held = self.held().await.unwrap_or_default();
        match find_held(wanted, &held) {
            Some(at) => Ok(held[at].volume_id.clone()),
            None => Ok(self.volume(wanted).await?.volume_id),
        }
    }
}

fn find_held(wanted: &str, held: &[HeldVolume]) -> Option<usize> {
    held.iter().position(|volume| {
        volume.volume_id == wanted || volume.targets.iter().any(|target| target.path == wanted)
    })
}

/// An id is unique and takes precedence; a name may be ambiguous (one volume in each
/// of two pools), which the operator must resolve.
fn pick(wanted: &str, volumes: impl Iterator<Item = Volume>) -> Result<Volume, CliError> {
    let mut named = Vec::new();
    for volume in volumes {
        if volume.volume_id == wanted {
            return Ok(volume);
        }
        if name_of(&volume.volume_context) == wanted {
            named.push(volume);
        }
    }
    match named.len() {
        1 => Ok(named.remove(0)),
        0 => Err(CliError::NoSuchVolume(wanted.to_owned())),
        _ => Err(CliError::Ambiguous {
            name: wanted.to_owned(),
            ids: named.into_iter().map(|volume| volume.volume_id).collect(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::admin::Target;

    fn volume(id: &str, name: &str) -> Volume {
        Volume {
            volume_id: id.to_owned(),
            volume_context: [(NAME_KEY.to_owned(), name.to_owned())].into(),
            ..Default::default()
        }
    }

    #[test]
    fn ids_win_over_names_and_ambiguous_names_are_refused() {
        let volumes = || {
            [
                volume("1", "a"),
                volume("2", "b"),
                volume("3", "b"),
                volume("b", "1"),
            ]
            .into_iter()
        };
        assert_eq!(pick("a", volumes()).unwrap().volume_id, "1");
        assert_eq!(pick("1", volumes()).unwrap().volume_id, "1");
        assert_eq!(pick("b", volumes()).unwrap().volume_id, "b");
        let error = pick("b", volumes().take(3)).unwrap_err();
        assert_eq!(
            error.to_string(),
            r#"2 volumes have the name "b"; pass an id instead: 2, 3"#
        );
        assert_eq!(pick("c", volumes()).unwrap_err().exit_code(), 3);
    }

    #[test]
    fn a_nameless_volume_is_not_found_by_the_empty_name() {
        let nameless = Volume {
            volume_id: "x".to_owned(),
            ..Default::default()
        };
        assert_eq!(name_of(&nameless.volume_context), "");
        assert_eq!(pick("x", [nameless].into_iter()).unwrap().volume_id, "x");
    }

    #[test]
    fn held_volumes_are_found_by_id_or_path() {
        let held = [HeldVolume {
            volume_id: "x".to_owned(),
            targets: vec![Target {
                path: "/mnt/x".to_owned(),
                read_only: false,
            }],
            ..Default::default()
        }];
        assert_eq!(find_held("x", &held), Some(0));
        assert_eq!(find_held("/mnt/x", &held), Some(0));
        assert_eq!(find_held("/mnt", &held), None);
    }
}
