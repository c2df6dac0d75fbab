//! Finds the volume that a name, an id or a path stands for.
//!
//! A volume's handle is opaque and uringctl keeps no state. So it looks a name up
//! where the controller wrote it, in the `name` of the volume context of each listed
//! volume, and never by CreateVolume, because a mistyped name must not create a
//! volume. A volume of the node is found without the controller by its id, a path where it
//! is published, or, where no controller can be reached, the name that it was staged with.

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
fn take_less<T>(request: &mut Request<T>) {
    let yes = MetadataValue::from_static("1");
    request.metadata_mut().insert(TAKES_LESS, yes);
}

/// Metadata: the omissions of such a list, in sentences.
fn omitted_from<T>(page: &Response<T>) -> Vec<String> {
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
        let listed = self.list_volumes().await?;
        let named = |volume: &Volume| {
            let name = name_of(&volume.volume_context).to_owned();
            (volume.volume_id.clone(), name)
        };
        let all = listed.into_iter().map(|volume| (named(&volume), volume));
        match pick("volumes", wanted, all)? {
            Some(volume) => Ok(volume),
            // The volumes of csi-driver-nfs are in no list. Their ids have one of these, as
            // names may; then the id is of no share of the controller's.
            None if wanted.contains(['#', '/']) => match self.volume_of_id(wanted).await {
                Err(CliError::Refused { status, .. })
                    if !wanted.contains('#') && status.code() == Code::FailedPrecondition =>
                {
                    Err(CliError::NoSuchVolume(wanted.to_owned()))
                }
                found => found,
            },
            None => Err(CliError::NoSuchVolume(wanted.to_owned())),
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

    /// The volume of the node with the id, published path or name `wanted`. A name may be
    /// that of several volumes, so the controller is asked, if it can be.
    pub async fn held_volume(&self, wanted: &str) -> Result<HeldVolume, CliError> {
        let mut held = self.held().await?;
        let at = match find_held(wanted, &held) {
            Some(at) => at,
            None if wanted.starts_with('/') => return Err(CliError::NotHeld(wanted.to_owned())),
            None => {
                let id = self.id_of_name(wanted, &held).await?;
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
            None => self.id_of_name(wanted, &held).await,
        }
    }

    async fn id_of_name(&self, wanted: &str, held: &[HeldVolume]) -> Result<String, CliError> {
        let unreachable = match self.volume(wanted).await {
            Err(error @ CliError::Unreachable { .. }) => error,
            found => return Ok(found?.volume_id),
        };
        let named = held.iter().map(|volume| {
            let id = volume.volume_id.clone();
            ((id.clone(), volume.name.clone()), id)
        });
        pick("volumes", wanted, named)?.ok_or(unreachable)
    }
}

fn find_held(wanted: &str, held: &[HeldVolume]) -> Option<usize> {
    held.iter().position(|volume| {
        volume.volume_id == wanted || volume.targets.iter().any(|target| target.path == wanted)
    })
}

/// The one of `all` that has `wanted` as its id or its name, each with its id and name. An
/// id is unique and takes precedence; a name may be ambiguous (one volume in each of two
/// pools), which the operator must resolve.
pub fn pick<T>(
    what: &'static str,
    wanted: &str,
    all: impl Iterator<Item = ((String, String), T)>,
) -> Result<Option<T>, CliError> {
    let mut named = Vec::new();
    for ((id, name), one) in all {
        if id == wanted {
            return Ok(Some(one));
        }
        if name == wanted {
            named.push((id, one));
        }
    }
    if named.len() > 1 {
        return Err(CliError::Ambiguous {
            what,
            name: wanted.to_owned(),
            ids: named.into_iter().map(|(id, _)| id).collect(),
        });
    }
    Ok(named.pop().map(|(_, one)| one))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::admin::Target;

    #[test]
    fn ids_win_over_names_and_ambiguous_names_are_refused() {
        let all = [("1", "a"), ("2", "b"), ("3", "b"), ("b", "1"), ("x", "")];
        let picked = |wanted, count| {
            let all = all.into_iter().take(count);
            let named = all.map(|(id, name)| ((id.to_owned(), name.to_owned()), id));
            pick("volumes", wanted, named)
        };
        assert_eq!(picked("a", 5).unwrap(), Some("1"));
        assert_eq!(picked("1", 5).unwrap(), Some("1"));
        assert_eq!(picked("b", 5).unwrap(), Some("b"));
        assert_eq!(picked("x", 5).unwrap(), Some("x"));
        let error = picked("b", 3).unwrap_err();
        assert_eq!(
            error.to_string(),
            r#"2 volumes have the name "b"; pass an id instead: 2, 3"#
        );
        assert_eq!(error.exit_code(), 2);
        assert_eq!(picked("c", 5).unwrap(), None);
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
