//! From the desired state of a volume to the calls that kubelet would make.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use super::desired::{BadDesired, Desired, DesiredAccess};
use crate::{
    capability::{AccessMode, AccessType, Capability},
    device::{Fencing, Source},
    digest, error_chain,
    mount::options::FsOption,
    volume::{
        Cause, Node,
        spec::{Expand, Parsed, Publish, Remount, RootAccess, Stage, Use},
    },
};

/// Where the manager stages a volume, and nobody else does.
pub fn staging_path(node: &Node, handle: &str) -> PathBuf {
    let name = format!("managed-{}", digest::sha256_hex(handle));
    node.config.staging_dir.join(name)
}

/// Checks what the file's form alone does not show, and spells its path as the kernel does.
pub fn check(node: &Node, name: &str, mut desired: Desired) -> Result<Desired, BadDesired> {
    let bad = |cause: &dyn std::error::Error| BadDesired::whole(error_chain(cause));
    let handle = desired.handle(name);
    if !node.may_publish(&desired.path) {
        let path = desired.path.display();
        return Err(BadDesired::whole(format!(
            "path: {path} is not below a directory of --allow-path"
        )));
    }
    stage(node, handle, &desired).map_err(|cause| bad(&cause))?;
    desired.path = node.canonical(&desired.path);
    Ok(desired)
}

fn parse(desired: &Desired, context: &HashMap<String, String>) -> Result<Parsed, Cause> {
    Parsed::new(&capability(desired), context, false)
}

/// The call that stages the volume.
pub fn stage(node: &Node, handle: &str, desired: &Desired) -> Result<Stage, Cause> {
    let context = desired.source.clone().into_iter().collect();
    let parsed = parse(desired, &context)?;
    let mut usage = parsed.usage;
    if let Use::Mount { options, .. } = &mut usage {
        // They are the target's, and may change while the volume is staged.
        *options = options.clone().without_target_attributes();
    }
    Ok(Stage {
        name: String::new(),
        source: Source::parse(&context, handle)?,
        staging_path: staging_path(node, handle),
        usage,
        read_only: parsed.read_only,
        mode: parsed.mode,
        mkfs_options: parsed.mkfs_options,
        group: None,
        root: root(&desired.access),
        inline: None,
        fencing: Fencing::Off,
    })
}

/// The call that publishes the volume at its path.
pub fn publish(node: &Node, handle: &str, desired: &Desired) -> Result<Publish, Cause> {
    let context = desired.source.clone().into_iter().collect();
    let parsed = parse(desired, &context)?;
    Ok(Publish {
        encrypted: Source::encrypted_directory_of(&context),
        staging_path: staging_path(node, handle),
        target_path: desired.path.clone(),
        usage: parsed.usage,
        read_only: parsed.read_only,
        mode: parsed.mode,
        group: None,
        remount: true,
        lock: true,
    })
}

/// The call that gives the mounted file system the options of `desired`, by setting these;
/// `None` of a raw volume.
pub fn remount(
    node: &Node,
    handle: &str,
    desired: &Desired,
    set: Vec<FsOption>,
) -> Result<Option<Remount>, Cause> {
    let stage = stage(node, handle, desired)?;
    let Use::Mount { options, .. } = stage.usage else {
        return Ok(None);
    };
    Ok(Some(Remount {
        staging_path: stage.staging_path,
        options,
        set,
        read_only: stage.read_only,
        mode: stage.mode,
    }))
}

/// The call that grows the volume.
pub fn expand(staging_path: PathBuf, path: &Path, bytes: i64) -> Expand {
    Expand {
        volume_path: path.to_owned(),
        staging_path,
        required: bytes.unsigned_abs(),
        limit: 0,
        is_block: None,
    }
}

fn root(access: &DesiredAccess) -> RootAccess {
    match access {
        DesiredAccess::Raw => RootAccess::default(),
        DesiredAccess::Mount { owner, mode, .. } => RootAccess {
            owner: owner.map(|owner| (owner.uid, owner.gid)),
            mode: mode.map(|mode| mode.0),
        },
    }
}

fn capability(desired: &Desired) -> Capability {
    let access = match &desired.access {
        DesiredAccess::Raw => AccessType::Block,
        DesiredAccess::Mount { fs, options, .. } => AccessType::Mount {
            fs_type: fs.clone().unwrap_or_default(),
            flags: options.clone(),
            group: String::new(),
        },
    };
    let mode = if desired.read_only {
        AccessMode::SingleNodeReader
    } else {
        AccessMode::SingleNodeWriter
    };
    Capability { access, mode }
}
