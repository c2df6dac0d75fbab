//! The file by which the volume manager keeps a volume that `up` has made.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{args::AccessArgs, attach::failed, context::Context, error::CliError};
use crate::{
    manager::{
        desired::{Desired, DesiredAccess},
        directory::{VolumesDir, name_of},
    },
    proto::csi::Volume,
};

/// The most bytes of a name: a file's name has 255 (NAME_MAX), a few of them for its ending
/// and for that of its draft.
const LONGEST_NAME: usize = 200;

/// A file that is to ask for a volume.
pub struct NewFile<'a> {
    name: &'a str,
    directory: VolumesDir,
}

impl<'a> NewFile<'a> {
    /// Checks what can be checked before there is a volume.
    pub async fn open(context: &Context, name: &'a str) -> Result<Self, CliError> {
        let is_short = name.len() <= LONGEST_NAME;
        if !is_short || name_of(Path::new(&format!("{name}.toml"))).as_deref() != Some(name) {
            let why = format!("{name:?} cannot be a file's name, which --persist needs");
            return Err(CliError::BadArguments(why));
        }
        let directory = context.volumes_dir().await?;
        Ok(Self { name, directory })
    }

    /// Writes it, unless the agent could not follow it, or a file of that name asks for
    /// something else.
    pub async fn write(
        &self,
        context: &Context,
        volume: &Volume,
        path: &Path,
        usage: &AccessArgs,
        read_only: bool,
    ) -> Result<(), CliError> {
        let refused = |why: String| CliError::CannotPersist {
            name: self.name.to_owned(),
            why,
        };
        let desired = Desired {
            handle: Some(volume.volume_id.clone()),
            source: volume.volume_context.clone().into_iter().collect(),
            access: access(usage),
            // Without doubled and trailing slashes.
            path: path.components().collect(),
            read_only,
            size: None,
            secrets: secrets(context)?,
        };
        let present = self.directory.read();
        let present = present.map_err(failed("read", self.directory.path()))?;
        let is_other = |file: &Result<Desired, _>| file.as_ref().ok() != Some(&desired);
        if present.parse().get(self.name).is_some_and(is_other) {
            let name = self.name;
            let why = format!("{name}.toml asks for something else; change it, or remove it");
            return Err(refused(why));
        }
        let text = toml::to_string(&desired).map_err(|error| refused(error.to_string()))?;
        let files = [(self.name.to_owned(), text.clone())].into();
        let planned = context.plan(files).await?;
        let stands_against = |state: &str| matches!(state, "bad" | "blocked");
        if let Some(refusal) = planned
            .into_iter()
            .find(|it| it.name == self.name && stands_against(&it.state))
        {
            return Err(refused(refusal.reason));
        }
        let written = self.directory.write(self.name, &text);
        written.map_err(failed("write to", self.directory.path()))
    }
}

fn access(usage: &AccessArgs) -> DesiredAccess {
    if usage.block {
        return DesiredAccess::Raw;
    }
    DesiredAccess::Mount {
        fs: usage.fs.clone(),
        options: usage.mount_options.clone(),
        owner: None,
        mode: None,
    }
}

/// The directory of the secrets, as the agent finds it.
fn secrets(context: &Context) -> Result<Option<PathBuf>, CliError> {
    let resolve = |dir: &PathBuf| fs::canonicalize(dir).map_err(failed("resolve", dir));
    context.secrets_dir.as_ref().map(resolve).transpose()
}
