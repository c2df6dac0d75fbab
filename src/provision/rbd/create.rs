//! One CreateVolume.
//!
//! ```text
//! 1. reserve    the name gets a uuid              csi.volumes.<instance>
//! 2. enter      the keys of the image             csi.volume.<uuid>
//! 3. make       the image, blank or a copy        csi-vol-<uuid>
//! 4. complete   size, limits, encryption
//! 5. id         the journal has the image's id: complete
//! ```
//!
//! A repeat, by any controller, finds the reservation; so a crash needs no cleanup. An
//! incomplete image may be half made, as librbd takes several steps for each call, and its
//! controller may still be at work: it is abandoned, and another begun
//! ([`Attempt`]). An attempt of ceph-csi is continued, as ceph-csi does, unless ceph-csi was
//! killed within a step of librbd: then another is begun, too. A definite failure is undone.

use uuid::Uuid;

use super::{
    super::{ContentSource, NewVolume, ProvisionError, VolumeInfo},
    RbdStore,
    attempt::Attempt,
    class::{CephPools, Class},
    copies,
    encryption::Encryption,
    error::RbdError,
    found::{ClusterConnection, FoundImage, Recorded, handle_of, name_of},
    qos,
};
use crate::ceph::{
    client::{
        rados::IoCtx,
        rbd::{self, Image, OpenMode, Remains},
    },
    csi_format::journal::{self, JournalEntry, JournalError, NameEntry},
};

mod build;

use build::CopySource;

/// A request with its cluster, pools and class.
#[derive(Clone)]
pub struct Creation<'a> {
    store: &'a RbdStore,
    new: &'a NewVolume,
    class: &'a Class,
    link: &'a ClusterConnection,
    least: u64,
    pools: CephPools,
    journal: IoCtx,
    /// The metadata that a modification may change later.
    changeable: Vec<(String, Option<String>)>,
}

/// The image to create.
struct NewImage {
    pool: IoCtx,
    reserved: NameEntry,
    handle: String,
    entry: JournalEntry,
}

impl NewImage {
    fn image(&self) -> &str {
        &self.entry.image
    }
}

impl<'a> Creation<'a> {
    pub fn new(
        store: &'a RbdStore,
        new: &'a NewVolume,
        class: &'a Class,
        link: &'a ClusterConnection,
        least: u64,
    ) -> Result<Self, ProvisionError> {
        let changeable = qos::modified(&new.mutable)?;
        let pools = class.pools(&new.accessibility)?;
        if let Some(encryption) = &class.encryption {
            let keeper = store.keeper(&new.secrets);
            keeper.check(encryption).map_err(RbdError::from)?;
            // A copy has the secret of its source.
            if new.source.is_none() {
                keeper.check_length(encryption).map_err(RbdError::from)?;
            }
        }
        let journal = link.named_pool(&pools.journal)?;
        if let Some(data) = &pools.data {
            link.named_pool(data)?;
        }
        Ok(Self {
            store,
            new,
            class,
            link,
            least,
            pools,
            journal,
            changeable,
        })
    }

    pub fn run(&self) -> Result<VolumeInfo, ProvisionError> {
        if let Some(volume) = self.made_elsewhere()? {
            return Ok(volume);
        }
        let journal = &self.store.volumes;
        let name = &self.new.name;
        // A repeat of a copy must not need the source, which may have been deleted.
        let mut known = match &self.new.source {
            Some(_) => journal.find(&self.journal, name).map_err(RbdError::from)?,
            None => None,
        };
        loop {
            if let Some(reserved) = known
                && let Some(volume) = self.resume(reserved)?
            {
                return Ok(volume);
            }
            let pool = self.pool_of(&self.pools.image)?;
            self.check_namespace(&pool)?;
            let origin = self.origin()?;
            let bytes = self.bytes(origin.as_ref())?;
            let wanted = NameEntry {
                uuid: Uuid::new_v4(),
                pool_id: (pool.pool_id() != self.journal.pool_id()).then(|| pool.pool_id()),
            };
            let reserved = journal.reserve(&self.journal, name, wanted);
            known = reserved.map_err(RbdError::from)?;
            if known.is_none() {
                return self.begin(&pool, wanted, origin.as_ref(), bytes);
            }
        }
    }

    /// The volume, if an earlier create of that name preferred another topology, and so another
    /// journal.
    fn made_elsewhere(&self) -> Result<Option<VolumeInfo>, ProvisionError> {
        for name in self.class.other_journals(&self.pools) {
            let pool = match self.link.named_pool(name) {
                Err(RbdError::NoPool { .. }) => continue,
                pool => pool?,
            };
            let reserved = match self.store.volumes.find(&pool, &self.new.name) {
                Ok(Some(reserved)) => reserved,
                Ok(None) => continue,
                // Then this user has made nothing there.
                Err(JournalError::Ceph(error)) if error.is_access_denied() => continue,
                Err(error) => return Err(RbdError::from(error).into()),
            };
            let there = Self {
                journal: pool,
                ..self.clone()
            };
            if let Some(volume) = there.resume(reserved)? {
                return Ok(Some(volume));
            }
        }
        Ok(None)
    }

    fn pool_of(&self, name: &str) -> Result<IoCtx, RbdError> {
        if name == self.journal.pool() {
            return Ok(self.journal.clone());
        }
        self.link.named_pool(name)
    }

    /// Refuses a namespace in which librbd creates no image: the journal's objects would be
    /// created in any.
    fn check_namespace(&self, pool: &IoCtx) -> Result<(), RbdError> {
        if rbd::has_namespace(pool)? {
            return Ok(());
        }
        Err(RbdError::NoNamespace {
            cluster_id: self.link.config.cluster_id.clone(),
            namespace: pool.namespace().to_owned(),
            pool: pool.pool().to_owned(),
        })
    }

    fn attempt<'s>(&'s self, pool: &'s IoCtx, reserved: NameEntry) -> Attempt<'s> {
        Attempt {
            store: self.store,
            link: self.link,
            journal: &self.store.volumes,
            directory: &self.journal,
            pool,
            name: &self.new.name,
            reserved,
            secrets: &self.new.secrets,
        }
    }

    fn begin(
        &self,
        pool: &IoCtx,
        reserved: NameEntry,
        origin: Option<&CopySource>,
        bytes: u64,
    ) -> Result<VolumeInfo, ProvisionError> {
        let attempt = self.attempt(pool, reserved);
        let new_image = self.new_image(pool, reserved, self.entry(reserved));
        let made = attempt
            .enter(&new_image.entry)
            .and_then(|()| self.make(&new_image, origin, bytes))
            .and_then(|()| self.complete(&new_image, origin, bytes));
        match made {
            Ok(()) => Ok(self.made(new_image, bytes)),
            Err(error) => Err(attempt.undo(&new_image.entry, error)),
        }
    }

    /// Continues the reserved volume, if it is complete or ceph-csi's. `None`: it was
    /// neither, and has been removed, or its pool does not exist.
    fn resume(&self, reserved: NameEntry) -> Result<Option<VolumeInfo>, ProvisionError> {
        let pool = match reserved.pool_id.map(|id| self.link.pool(id)) {
            None => self.journal.clone(),
            // The pool was deleted, with the image; ceph-csi decides alike.
            Some(Err(error)) if error.is_not_found() => {
                let (journal, name) = (&self.store.volumes, &self.new.name);
                let forgotten = journal.remove_name(&self.journal, name, reserved);
                forgotten.map_err(RbdError::from)?;
                return Ok(None);
            }
            Some(pool) => pool?,
        };
        let wanted = JournalEntry {
            state: journal::CreateState::None,
            ..self.entry(reserved)
        };
        let attempt = self.attempt(&pool, reserved);
        // A complete copy may have outlived its source.
        if let Some(ContentSource::Volume(handle)) = &self.new.source
            && !attempt.is_complete()?
        {
            match self.store.volume(handle, &self.new.secrets) {
                Err(ProvisionError::NoVolume(_)) => {}
                source => source?.refuse_secondary_source()?,
            }
        }
        let Some(entry) = attempt.there(&wanted)? else {
            return Ok(None);
        };
        let accessibility = &self.new.accessibility;
        let Some(pools) = self.class.pools_with(pool.pool(), accessibility) else {
            return Err(self.differs(format!("it is in pool {:?}", pool.pool())));
        };
        let here = Self {
            pools,
            ..self.clone()
        };
        here.resume_in(&pool, reserved, entry)
    }

    /// The same for its entry in the pool of its image.
    fn resume_in(
        &self,
        pool: &IoCtx,
        reserved: NameEntry,
        entry: JournalEntry,
    ) -> Result<Option<VolumeInfo>, ProvisionError> {
        let new_image = self.new_image(pool, reserved, entry);
        let image = match Image::open(pool, new_image.image(), OpenMode::ReadOnly) {
            Ok(image) => Some(image),
            Err(error) if error.is_not_found() => None,
            Err(error) => return Err(RbdError::from(error).into()),
        };
        if self.is_broken(&new_image, image.as_ref())? {
            let attempt = self.attempt(pool, reserved);
            attempt.give_up(&new_image.entry)?;
            return Ok(None);
        }
        self.compare(&new_image.entry, image.as_ref())?;
        if let Some(image) = &image
            && new_image.entry.is_complete()
        {
            let size = image.size().map_err(RbdError::from)?;
            // The request does not fix the size of a copy: it must be large enough.
            if !self.new.range.holds(size) {
                return Err(self.differs(format!("it has {size} bytes")));
            }
            return Ok(Some(self.made(new_image, size)));
        }
        let is_there = image.is_some();
        drop(image);
        let mut origin = self.origin()?;
        let bytes = self.bytes(origin.as_ref())?;
        if is_there {
            origin = origin.map(CopySource::of_earlier_copy);
            self.tidy(&new_image, origin.as_ref())?;
        } else {
            self.make(&new_image, origin.as_ref(), bytes)?;
        }
        self.complete(&new_image, origin.as_ref(), bytes)?;
        Ok(Some(self.made(new_image, bytes)))
    }

    /// Whether an image of that entry cannot be completed, since librbd was interrupted while
    /// it made the image or the one between a volume and its copy.
    fn is_broken(&self, new_image: &NewImage, image: Option<&Image>) -> Result<bool, RbdError> {
        let (pool, name) = (&new_image.pool, new_image.image());
        let source = self.new.source.as_ref();
        if let Some(image) = image {
            // A clone first lacks its parent.
            let may_be = new_image.entry.is_complete() || source.is_none();
            return Ok(!may_be && image.parent()?.is_none());
        }
        let is_of_volume = matches!(source, Some(ContentSource::Volume(_)));
        Ok(rbd::remains(pool, name)? != Remains::Nothing
            || is_of_volume && copies::is_half_made(pool, &copies::temporary(name))?)
    }

    fn differs(&self, how: String) -> ProvisionError {
        let name = self.new.name.clone();
        ProvisionError::Differs { name, how }
    }

    fn compare(&self, entry: &JournalEntry, image: Option<&Image>) -> Result<(), ProvisionError> {
        let source = self.new.source.as_ref();
        let is_same = match (entry.origin.as_str(), image) {
            // ceph-csi does not enter it.
            ("", Some(image)) => {
                copies::may_be_of(image, &entry.image, source).map_err(RbdError::from)?
            }
            ("", None) => true,
            (origin, _) => origin == name_of(source),
        };
        if !is_same {
            return Err(self.differs("its content source differs".to_owned()));
        }
        let how = |encryption: &Option<Encryption>| {
            let encryption = encryption.as_ref();
            encryption.map(|encryption| (encryption.kms.clone(), encryption.what))
        };
        if how(&Encryption::of_journal(entry)?) != how(&self.class.encryption) {
            return Err(self.differs("its encryption differs".to_owned()));
        }
        Ok(())
    }

    fn entry(&self, reserved: NameEntry) -> JournalEntry {
        let prefix = self.class.name_prefix.as_deref();
        let encryption = self.class.encryption.as_ref();
        JournalEntry {
            name: self.new.name.clone(),
            image: self.store.volumes.kind().image(prefix, reserved.uuid),
            journal_pool: reserved.pool_id.map(|_| self.journal.pool_id()),
            kms: encryption.map(|e| e.kms.clone()).unwrap_or_default(),
            encryption: encryption.map_or("", |e| e.what.as_str()).to_owned(),
            owner: self.class.owner.clone(),
            origin: name_of(self.new.source.as_ref()),
            state: journal::CreateState::UnderWay,
            ..JournalEntry::default()
        }
    }

    fn new_image(&self, pool: &IoCtx, reserved: NameEntry, entry: JournalEntry) -> NewImage {
        NewImage {
            pool: pool.clone(),
            reserved,
            handle: handle_of(self.link, pool, reserved.uuid),
            entry,
        }
    }

    /// The answer.
    fn made(&self, new_image: NewImage, bytes: u64) -> VolumeInfo {
        let found = FoundImage {
            handle: new_image.handle,
            link: self.link.clone(),
            pool: new_image.pool,
            image: new_image.entry.image.clone(),
            image_id: new_image.entry.image_id.clone(),
            stands_in: false,
            recorded: Some(Recorded {
                journal: self.journal.clone(),
                reserved: new_image.reserved,
                entry: new_image.entry,
            }),
        };
        let mut volume = found.volume(bytes);
        let mut context = self.class.context().clone();
        context.append(&mut volume.context);
        if let Some(data) = &self.pools.data {
            context.insert("dataPool".to_owned(), data.clone());
        }
        volume.context = context;
        volume.topology = self.pools.topology.clone();
        volume.source.clone_from(&self.new.source);
        volume
    }
}
