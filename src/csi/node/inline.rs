//! Inline ephemeral volumes: the attributes that a pod may set.

use std::collections::HashMap;

use tonic::Status;

use super::{NodeService, clean, validate};
use crate::{
    capability::{AccessType, Capability},
    device::{Fencing, Source, set_by_kubernetes},
    fs::FsType,
    proto::csi::NodePublishVolumeRequest,
    size::Size,
    volume::{
        Cause,
        spec::{Inline, InlineVolume, Parsed, Publish, RootAccess, Stage, Use},
    },
};

/// The attributes that a pod may set for its inline volume with an image. The pod's author
/// need not be trusted with the node: no attribute here may change the arguments of a program
/// that runs as root, as `mkfsOptions` of a class does.
const ATTRIBUTES: [&str; 3] = ["fsType", "pool", "size"];

/// Refuses every other attribute.
pub(super) fn refuse_unlisted(attributes: &HashMap<String, String>) -> Result<(), Status> {
    let of_remote = Source::INLINE_REMOTE_KEYS;
    let is_image = Source::has_device_by(attributes);
    if is_image && let Some(missing) = Source::missing_remote_key(attributes) {
        let field = format!("volume_context.{missing}");
        return Err(validate::invalid(&field, "is required"));
    }
    let known = |key: &str| {
        set_by_kubernetes(key)
            || (is_image && ATTRIBUTES.contains(&key))
            || (!is_image && of_remote.iter().any(|it| it.eq_ignore_ascii_case(key)))
    };
    // Sorted, so that of two mistakes the error always names the same one.
    let unlisted = attributes.keys().filter(|key| !known(key)).min();
    unlisted.map_or(Ok(()), |key| {
        let [known, of_remote] = [ATTRIBUTES, of_remote].map(|keys| keys.join(", "));
        Err(validate::invalid(
            &format!("volume_context.{key}"),
            format!("a pod's inline volume may set no attribute but {known}, or else {of_remote}"),
        ))
    })
}

/// Refuses mount options that no author of a pod may set, and leaves out those without effect.
fn protect(usage: &mut Use, context: &HashMap<String, String>) -> Result<(), Status> {
    let Use::Mount { options, .. } = usage else {
        return Ok(());
    };
    let remote = Source::remote_file_system(context);
    *options = std::mem::take(options).for_pods(remote).map_err(|option| {
        let field = match remote {
            Some(_) => "volume_context.mountOptions",
            None => "volume_capability.mount.mount_flags",
        };
        let why = format!("a pod's inline volume may not set {option} (docs/security.md)");
        validate::invalid(field, why)
    })?;
    Ok(())
}

/// What an inline volume shall be, by the pod alone.
pub(super) enum InlineSource {
    /// An image in this pool, or in the only one.
    Image { pool: Option<String>, bytes: u64 },
    /// A source without a block device.
    Remote(Box<Source>),
}

impl InlineSource {
    /// `largest` is the size that the node allows for images, if it allows any. `usage` is
    /// left with the mount options that a pod may have.
    pub(super) fn parse(
        volume_id: &str,
        access: &AccessType,
        context: &HashMap<String, String>,
        usage: &mut Use,
        largest: Option<u64>,
    ) -> Result<Self, Status> {
        if *access == AccessType::Block {
            return Err(validate::invalid(
                "volume_capability",
                "an inline ephemeral volume is a file system, not a block device",
            ));
        }
        protect(usage, context)?;
        if Source::has_device_by(context) {
            let bytes = image_bytes(context.get("size"), usage, largest)?;
            let pool = context.get("pool").cloned();
            return Ok(Self::Image { pool, bytes });
        }
        let source = Source::parse(context, volume_id);
        let source = source.map_err(|error| Status::from(&Cause::from(error)))?;
        Ok(Self::Remote(Box::new(source)))
    }
}

/// The size of an inline volume without a `size` attribute.
const DEFAULT_BYTES: u64 = 1 << 30;

impl NodeService {
    /// An inline ephemeral volume: its source comes from the pod's attributes; the agent
    /// chooses the staging path.
    pub(super) async fn inline(
        &self,
        request: &NodePublishVolumeRequest,
        capability: &Capability,
        mut parsed: Parsed,
    ) -> Result<Inline, Status> {
        let id = request.volume_id.clone();
        let wanted = InlineSource::parse(
            &id,
            &capability.access,
            &request.volume_context,
            &mut parsed.usage,
            self.config.inline_max_bytes,
        )?;
        let (source, staging_path, image_bytes) = match wanted {
            InlineSource::Image { pool, bytes } => {
                let place = self.ask(move |node| node.inline_place(pool.as_deref(), &id));
                let (source, staging_path) = place.await?;
                (source, staging_path, Some(bytes))
            }
            InlineSource::Remote(named) => {
                let place = self.ask(move |node| node.inline_remote_place(*named, &id));
                let (source, staging_path) = place.await?;
                (source, staging_path, None)
            }
        };
        let target_path = clean(&request.target_path);
        // A share is not the pod's, whose author would give it to its own group.
        let group = parsed.group.filter(|_| image_bytes.is_some());
        Ok(Inline {
            publish: Publish {
                staging_path: staging_path.clone(),
                target_path: target_path.clone(),
                usage: parsed.usage.clone(),
                read_only: parsed.read_only || request.readonly,
                mode: parsed.mode,
                group,
                remount: false,
                lock: false,
                encrypted: None,
            },
            stage: Stage {
                name: String::new(),
                source,
                staging_path,
                usage: parsed.usage,
                // A new image is empty, so a pod has to write to it. Its target may still be
                // read-only.
                read_only: image_bytes.is_none() && parsed.read_only,
                mode: parsed.mode,
                mkfs_options: parsed.mkfs_options,
                group,
                root: RootAccess::default(),
                inline: Some(InlineVolume {
                    image_bytes,
                    target_path,
                }),
                fencing: Fencing::Off,
            },
        })
    }
}

/// The size of an inline volume's image.
fn image_bytes(
    requested: Option<&String>,
    usage: &Use,
    largest: Option<u64>,
) -> Result<u64, Status> {
    let Some(largest) = largest else {
        return Err(Status::failed_precondition(
            "this node makes no inline volumes: its agent runs without --inline-max-size; \
             use a claim, or a generic ephemeral volume, instead",
        ));
    };
    let field = "volume_context.size";
    let bytes = match requested {
        None => DEFAULT_BYTES.min(largest),
        Some(text) => {
            let size: Size = text
                .parse()
                .map_err(|error| validate::invalid(field, error))?;
            size.bytes().unsigned_abs()
        }
    };
    let fs = match usage {
        Use::Mount { fs: Some(fs), .. } => *fs,
        _ => FsType::Ext4,
    };
    let least = fs.least_bytes();
    if bytes < least {
        let why = format!("{bytes} bytes are too few for {fs}, which needs {least}");
        return Err(validate::invalid(field, why));
    }
    if bytes > largest {
        let why = format!(
            "{bytes} bytes are more than the {largest} that this node allows inline volumes \
             (--inline-max-size)"
        );
        return Err(validate::invalid(field, why));
    }
    Ok(bytes)
}
