//! Files that name a volume of the controller: it is found or created, and the file gets its
//! handle and source.

use std::collections::BTreeMap;

use tonic::Code;

use super::{args::AccessArgs, context::Context, error::CliError};
use crate::{
    manager::desired::{Desired, DesiredAccess, named::NamedFile},
    proto::csi::{CapacityRange, CreateVolumeRequest, Volume},
    size::Size,
};

impl Context {
    /// The file with its volume's handle and source. The volume is created if there is none
    /// and the file has parameters, and expanded if it is smaller than the file asks.
    pub async fn complete(&self, file: NamedFile) -> Result<Desired, CliError> {
        let name = file.volume.name.clone();
        let found = self.named_volume(&name).await?;
        let volume = match (&file.volume.parameters, found) {
            (None, None) => return Err(CliError::NoSuchVolume(name)),
            (None, Some(found)) => found,
            (Some(_), Some(found)) if found.volume_id == name => found,
            // Also of a volume that exists: the controller refuses other parameters.
            (Some(parameters), found) => {
                if let Some(found) = &found {
                    refuse_elsewhere(&name, found, parameters)?;
                }
                let wanted = file.desired.size.map_or(0, Size::bytes);
                let required_bytes =
                    (found.as_ref()).map_or(wanted, |it| it.capacity_bytes.min(wanted));
                let request = CreateVolumeRequest {
                    name: name.clone(),
                    capacity_range: Some(CapacityRange {
                        required_bytes,
                        limit_bytes: 0,
                    }),
                    volume_capabilities: vec![usage(&file.desired).capability()],
                    parameters: parameters.clone().into_iter().collect(),
                    secrets: self.secrets.to_wire(),
                    ..Default::default()
                };
                let made = match self.create(request.clone()).await {
                    // It may be there, smaller, and listed without its name.
                    Err(CliError::Refused { status, .. })
                        if status.code() == Code::AlreadyExists
                            && is_listed_without_name(&file) =>
                    {
                        let capacity_range = None;
                        let of_any_size = CreateVolumeRequest {
                            capacity_range,
                            ..request
                        };
                        self.create(of_any_size).await?
                    }
                    made => made?,
                };
                if let Some(found) = found.filter(|it| it.volume_id != made.volume_id) {
                    return Err(CliError::BadArguments(format!(
                        "volume {name} exists as {}, elsewhere than the file's parameters say, by which \
                         there is {} now; correct the parameters, and delete the volume that is not wanted",
                        found.volume_id, made.volume_id
                    )));
                }
                made
            }
        };
        if let Some(size) = file.desired.size
            && volume.capacity_bytes < size.bytes()
        {
            let _ = self
                .expand_volume(&name, volume.volume_id.clone(), size)
                .await?;
        }
        Ok(completed(file, volume))
    }

    /// The file with its volume's handle and source; `None`: the volume is yet to be created.
    pub async fn complete_if_found(&self, file: NamedFile) -> Result<Option<Desired>, CliError> {
        match self.named_volume(&file.volume.name).await? {
            Some(volume) => Ok(Some(completed(file, volume))),
            None if file.volume.parameters.is_some() => Ok(None),
            None => Err(CliError::NoSuchVolume(file.volume.name)),
        }
    }

    /// The controller's volume with this name. Directories of NFS servers are listed without
    /// their names: they are found by CreateVolume alone.
    async fn named_volume(&self, name: &str) -> Result<Option<Volume>, CliError> {
        match self.volume(name).await {
            Err(CliError::NoSuchVolume(_)) => Ok(None),
            Err(CliError::Refused { status, .. }) if status.code() == Code::NotFound => Ok(None),
            found => found.map(Some),
        }
    }
}

/// Whether the controller lists such a volume without its name, as a directory of an NFS server.
pub fn is_listed_without_name(file: &NamedFile) -> bool {
    let parameters = file.volume.parameters.iter().flatten();
    let mut keys = parameters.map(|(key, _)| key.to_ascii_lowercase());
    keys.any(|key| key == "share")
}

/// Parameters that say where a volume is, with which its context repeats them.
const PLACE: [&str; 5] = ["pool", "clusterID", "radosNamespace", "server", "share"];

/// Refuses parameters by which the controller would create a second volume of that name.
fn refuse_elsewhere(
    name: &str,
    found: &Volume,
    parameters: &BTreeMap<String, String>,
) -> Result<(), CliError> {
    for key in PLACE {
        if let (Some(wanted), Some(is)) = (parameters.get(key), found.volume_context.get(key))
            && wanted != is
        {
            return Err(CliError::BadArguments(format!(
                "volume {name} exists as {}, with {key} {is:?}; the file has parameters.{key} {wanted:?}",
                found.volume_id
            )));
        }
    }
    Ok(())
}

fn completed(file: NamedFile, volume: Volume) -> Desired {
    let source = volume.volume_context.into_iter().collect();
    file.complete(volume.volume_id, source)
}

/// How the volume is to be used.
fn usage(desired: &Desired) -> AccessArgs {
    match &desired.access {
        DesiredAccess::Raw => AccessArgs {
            block: true,
            ..AccessArgs::default()
        },
        DesiredAccess::Mount { fs, options, .. } => AccessArgs {
            fs: fs.clone(),
            mount_options: options.clone(),
            ..AccessArgs::default()
        },
    }
}
