//! Making, growing and looking up volumes.

use std::{collections::HashMap, fs::File, os::unix::fs::MetadataExt as _, path::PathBuf};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{
    super::{
        ContentSource, NewVolume, Parameters, ProvisionError, PublishedVolume, Range,
        TopologySegments, VolumeCondition, VolumeInfo, VolumeUse,
        range::{self, least},
    },
    ImageStore,
    capacity::refuse_without_room,
    catalogue::{Catalogue, CatalogueEntry, EntryKind, EntryState, ReservationLock, failed},
    copies::{CopyKind, CopyTarget},
    store::size_of,
};
use crate::{
    Done, crash_point,
    pool::{
        Pool, Scope, claim,
        draft::{Draft, Durability::Durable},
        growth,
        handle::VolumeHandle,
    },
    size::exact,
};

/// The fields of a volume's record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeDetail {
    pub parameters: Parameters,
    /// The source that it was copied from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<ContentSource>,
    /// Made for several nodes that write.
    #[serde(default)]
    pub many_nodes_write: bool,
    /// The size of an exported volume at its creation, by which nodes detect a truncated
    /// export. A growth does not change it: the context of a volume never changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made_bytes: Option<u64>,
}

impl EntryKind for VolumeDetail {
    const NAMES: &str = "names";
    const RECORDS: &str = "volumes";
    const IS_CLAIMED: bool = true;

    fn is_exported(&self) -> bool {
        self.parameters.nbd.is_some()
    }

    fn image(pool: &Pool, id: Uuid) -> PathBuf {
        pool.image_path(&format!("{id}.img"))
    }
}

type Volumes<'p> = Catalogue<'p, VolumeDetail>;

impl ImageStore {
    pub(super) fn create_volume(&self, new: &NewVolume) -> Result<VolumeInfo, ProvisionError> {
        let parameters = Parameters::parse(&new.parameters)?;
        let pool = self.pool_for(parameters.pool.as_deref())?;
        parameters.refuse_uses(pool, &new.uses)?;
        if let (Scope::Local, Some(wanted)) = (pool.scope, &new.elsewhere) {
            return Err(ProvisionError::NotHere {
                pool: pool.name.clone(),
                wanted: wanted.escape_debug().to_string(),
            });
        }
        pool.initialize()?;
        // Before the image takes the room; the pool of a source mostly has them.
        if new.source.is_none() {
            pool.refill_spares();
        }
        let smallest = least(&parameters.file_systems(&new.uses)?);
        let detail = VolumeDetail {
            parameters,
            source: new.source.clone(),
            many_nodes_write: new
                .uses
                .iter()
                .any(|volume_use| volume_use.many_nodes_write),
            made_bytes: None,
        };
        if let Some((other, _)) = self.find_name::<VolumeDetail>(Some(pool), &new.name)
            && other.name != pool.name
        {
            return Err(ProvisionError::Differs {
                name: new.name.clone(),
                how: format!("it is in pool {:?}", other.name),
            });
        }

        let catalogue = Volumes::of(pool);
        loop {
            let held = catalogue.reserve(&new.name)?;
            crash_point();
            match catalogue.get(held.id)? {
                Some(entry) if entry.state == EntryState::Ready => {
                    return self.as_made_before(pool, &entry, &detail, new.range);
                }
                Some(entry) => self.delete_entry(pool, entry, Some(&held))?,
                None if held.is_new => {
                    let made = self.make_volume(pool, &held, new, detail, smallest);
                    return made.map_err(|error| {
                        let what = format!("volume {:?}", new.name);
                        error.after_undo(&what, self.undo::<VolumeDetail>(pool, &held))
                    });
                }
                None => {
                    catalogue.refuse_unrecorded(&held)?;
                    held.abandon()?;
                }
            }
        }
    }

    fn make_volume(
        &self,
        pool: &Pool,
        held: &ReservationLock,
        new: &NewVolume,
        mut detail: VolumeDetail,
        smallest: u64,
    ) -> Result<VolumeInfo, ProvisionError> {
        let origin = match &new.source {
            Some(source) => Some(self.origin(source)?),
            None => None,
        };
        let default = origin.as_ref().map_or(range::DEFAULT, |from| from.bytes);
        let bytes = new.range.choose(default, smallest)?;
        if let Some(from) = origin.as_ref().filter(|from| from.bytes > bytes) {
            let field = if new.range.required == 0 {
                "limit_bytes"
            } else {
                "required_bytes"
            };
            let why = format!("{bytes} is less than the {} of the source", from.bytes);
            return Err(ProvisionError::Size { field, why });
        }

        detail.made_bytes = detail.is_exported().then_some(bytes);

        let tmp = pool.meta_dir("tmp")?;
        let draft = Draft::new(&tmp).map_err(|e| failed("write in", &tmp, e))?;
        let mut promise = None;
        if let (Some(from), Some(source)) = (&origin, &new.source) {
            let target = CopyTarget {
                kind: CopyKind::Volume,
                name: new.name.clone(),
                handle: VolumeHandle::new(pool, self.node_id.as_deref(), held.id).to_string(),
                source: source.handle().to_owned(),
                pool: pool.name.clone(),
            };
            // Refused below, too, but then its data has taken space that others were promised.
            let promise_room = || {
                let _room = pool.lock_room();
                refuse_without_room(pool, &detail.parameters, bytes)?;
                Ok(pool.promise_room(&draft, bytes))
            };
            promise = self.fill(&draft, from, target, promise_room)?;
        }
        let there = draft.file().metadata();
        let there = there.map_err(|e| failed("look at a draft in", &tmp, e))?;
        // The copied data is allocated already, or shared.
        let more = bytes.saturating_sub(there.blocks() * 512);
        let room = pool.lock_room();
        drop(promise);
        refuse_without_room(pool, &detail.parameters, more)?;
        crash_point();
        let image = VolumeDetail::image(pool, held.id);
        set_size(draft.file(), bytes, detail.parameters.preallocate)
            .map_err(|e| failed("make room for", &image, e))?;
        let mut entry = CatalogueEntry {
            id: held.id,
            name: new.name.clone(),
            state: EntryState::Making,
            detail,
        };
        held.refuse_lost(&new.name)?;
        Volumes::of(pool).record_as(&entry)?;
        match draft.place_new(&image, Durable) {
            Ok(Done::Now) => {}
            Ok(Done::Already) => return Err(ProvisionError::Busy(new.name.clone())),
            Err(e) => return Err(failed("put in place", &image, e)),
        }
        // From here on the image is counted.
        drop(room);
        held.refuse_lost(&new.name)?;
        entry.state = EntryState::Ready;
        Volumes::of(pool).record_as(&entry)?;
        crash_point();
        tracing::info!(name = new.name, image = %image.display(), bytes, "created an image");
        Ok(self.volume(pool, &entry, bytes))
    }

    /// The answer to a repeated request.
    fn as_made_before(
        &self,
        pool: &Pool,
        entry: &CatalogueEntry<VolumeDetail>,
        detail: &VolumeDetail,
        range: Range,
    ) -> Result<VolumeInfo, ProvisionError> {
        let bytes = self.size(pool, entry)?;
        let there = &entry.detail;
        let how = if there.parameters != detail.parameters {
            "its parameters differ".to_owned()
        } else if there.source != detail.source {
            "its content source differs".to_owned()
        } else if detail.many_nodes_write && !there.many_nodes_write {
            "it does not support several nodes that write".to_owned()
        } else if !range.holds(bytes) {
            format!("it has {}", exact(bytes))
        } else {
            return Ok(self.volume(pool, entry, bytes));
        };
        let name = entry.name.clone();
        Err(ProvisionError::Differs { name, how })
    }

    pub(super) fn delete_volume(&self, handle: &str) -> Result<(), ProvisionError> {
        let Ok(parsed) = handle.parse::<VolumeHandle>() else {
            return Ok(());
        };
        let pool = self.reach(parsed.parts(), handle)?;
        self.delete::<VolumeDetail>(pool, parsed.id())
    }

    pub(super) fn expand_volume(&self, handle: &str, range: Range) -> Result<u64, ProvisionError> {
        let (pool, entry) = match self.find_volume(handle) {
            // The node there grows the file itself.
            Err(ProvisionError::Elsewhere(_)) => return range.choose(0, 0),
            found => found?,
        };
        let before = self.size(pool, &entry)?;
        if range.required <= before {
            if range.holds(before) {
                return Ok(before);
            }
            return Err(ProvisionError::Size {
                field: "limit_bytes",
                why: format!(
                    "the volume has {} already, and volumes never become smaller",
                    exact(before)
                ),
            });
        }
        let bytes = range.choose(before, before)?;
        let room = pool.lock_room();
        refuse_without_room(pool, &entry.detail.parameters, bytes - before)?;
        let path = VolumeDetail::image(pool, entry.id);
        let grown = pool
            .open_image(&format!("{}.img", entry.id), true)
            .map_err(ProvisionError::from)
            .and_then(|file| {
                let preallocate = entry.detail.parameters.preallocate;
                grow(&file, bytes, preallocate)
                    .and_then(|()| {
                        pool.mark_grown();
                        drop(room);
                        file.sync_all()
                    })
                    .map_err(|e| failed("make room for", &path, e))
            });
        grown.map(|()| bytes)
    }

    pub(super) fn get_volume(&self, handle: &str) -> Result<PublishedVolume, ProvisionError> {
        let (pool, entry) = self.find_volume(handle)?;
        let bytes = self.size(pool, &entry)?;
        let holders = claim::owners(pool, &format!("{}.img", entry.id))?;
        Ok(PublishedVolume {
            volume: self.volume(pool, &entry, bytes),
            nodes: holders.into_iter().map(|claim| claim.node_id).collect(),
        })
    }

    pub(super) fn check_uses(
        &self,
        handle: &str,
        uses: &[VolumeUse],
        parameters: &HashMap<String, String>,
    ) -> Result<Option<String>, ProvisionError> {
        let (pool, entry) = self.find_volume(handle)?;
        let refused = match entry.detail.parameters.refuse_uses(pool, uses) {
            Ok(()) if uses.iter().any(|volume_use| volume_use.many_nodes_write) => {
                let ready = entry.detail.many_nodes_write
                    || entry.detail.is_exported()
                    || entry.detail.parameters.direct_io == Some(true);
                (!ready).then(|| {
                    "the volume does not support several nodes that write: each node's loop \
                     device has a cache of its own"
                        .to_owned()
                })
            }
            Ok(()) => None,
            Err(error) => Some(error.to_string()),
        };
        if refused.is_none() && !parameters.is_empty() {
            return Ok(match Parameters::parse(parameters) {
                Ok(parsed) if parsed == entry.detail.parameters => None,
                Ok(_) => Some("the volume has other parameters".to_owned()),
                Err(error) => Some(error.to_string()),
            });
        }
        Ok(refused)
    }

    pub(super) fn volume_condition(
        &self,
        handle: &str,
    ) -> Result<Option<VolumeCondition>, ProvisionError> {
        let (pool, entry) = self.find_volume(handle)?;
        match self.size(pool, &entry) {
            Ok(_) => Ok(None),
            Err(error @ ProvisionError::Lost { .. }) => Ok(Some(VolumeCondition {
                reason: "ImageMissing",
                message: error.to_string(),
            })),
            Err(error) => Err(error),
        }
    }

    pub(super) fn volume(
        &self,
        pool: &Pool,
        entry: &CatalogueEntry<VolumeDetail>,
        bytes: u64,
    ) -> VolumeInfo {
        let handle = VolumeHandle::new(pool, self.node_id.as_deref(), entry.id);
        let detail = &entry.detail;
        let mut context = detail.parameters.context(&handle.image());
        context.insert("pool".to_owned(), pool.name.clone());
        // Recorded nowhere else: uringctl finds volumes by it.
        context.insert("name".to_owned(), entry.name.clone());
        if let Some(bytes) = detail.made_bytes {
            context.insert("minSize".to_owned(), bytes.to_string());
        }
        if detail.many_nodes_write && !detail.is_exported() {
            // The page caches of two nodes are not coherent; clients of one server share
            // its cache.
            context.insert("directIO".to_owned(), "true".to_owned());
        }
        VolumeInfo {
            handle: handle.to_string(),
            bytes,
            context,
            source: detail.source.clone(),
            local: pool.scope == Scope::Local,
            topology: TopologySegments::new(),
        }
    }

    fn size(
        &self,
        pool: &Pool,
        entry: &CatalogueEntry<VolumeDetail>,
    ) -> Result<u64, ProvisionError> {
        let path = VolumeDetail::image(pool, entry.id);
        size_of(&path)?.ok_or_else(|| ProvisionError::Lost {
            handle: VolumeHandle::new(pool, self.node_id.as_deref(), entry.id).to_string(),
            path,
        })
    }

    /// A volume that exists and that this controller can reach.
    pub(super) fn find_volume(
        &self,
        handle: &str,
    ) -> Result<(&Pool, CatalogueEntry<VolumeDetail>), ProvisionError> {
        let missing = || ProvisionError::NoVolume(handle.to_owned());
        let parsed: VolumeHandle = handle.parse().map_err(|_| missing())?;
        let pool = self.reach(parsed.parts(), handle)?;
        let entry = Volumes::of(pool).ready(parsed.id())?;
        Ok((pool, entry.ok_or_else(missing)?))
    }
}

/// Gives a draft the size of the image that it becomes, and all blocks if that is
/// `preallocate`d. It never becomes smaller.
fn set_size(draft: &File, bytes: u64, preallocate: bool) -> std::io::Result<()> {
    if preallocate {
        growth::allocate(draft, bytes)?;
    }
    if draft.metadata()?.len() < bytes {
        // No other process changes a draft, so this shrinks nothing; and allocates nothing.
        draft.set_len(bytes)?;
    }
    Ok(())
}

/// The same for an image in its place, which a node or another controller may grow, too.
fn grow(image: &File, bytes: u64, preallocate: bool) -> std::io::Result<()> {
    if preallocate {
        growth::allocate(image, bytes)?;
    }
    growth::grow(image, bytes)
}
