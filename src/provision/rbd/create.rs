//! One CreateVolume.
//!
//! ```text
//! 1. reserve    the name gets a uuid              csi.volumes.<instance>
//! 2. enter      what is known of the image        csi.volume.<uuid>
//! 3. make       the image, blank or a copy        csi-vol-<uuid>
//! 4. complete   size, limits, encryption
//! 5. id         the image's id is entered: complete
//! ```
//!
//! A repeat, by whomever, finds the reservation and goes on with it; so a crash
//! needs no cleaning up. An image that was not completed may be half made, as
//! librbd takes several steps for each call: it is taken away and made anew, but
//! for what ceph-csi began, which is gone on with as ceph-csi does. A failure that
//! is certain is undone in reverse.

use uuid::Uuid;

use super::{
    super::{Error, NewVolume, Volume},
    class::{Class, Pools},
    copies,
    encryption::{BLOCK, Encryption},
    error::RbdError,
    found::{Found, Link, Recorded, handle_of, name_of},
    qos,
    store::Store,
};
use crate::{
    ceph::{
        journal::{Entry, Reserved},
        rados::IoCtx,
        rbd::{Access, Image},
    },
    chain,
};

mod build;

use build::Origin;

/// A request, with where it leads.
pub struct Creation<'a> {
    store: &'a Store,
    new: &'a NewVolume,
    class: &'a Class,
    link: &'a Link,
    least: u64,
    pools: Pools,
    journal: IoCtx,
    /// Notes for what may be changed later.
    changeable: Vec<(String, Option<String>)>,
}

/// What is being made.
struct Making {
    pool: IoCtx,
    reserved: Reserved,
    handle: String,
    entry: Entry,
}

impl Making {
    fn image(&self) -> &str {
        &self.entry.image
    }
}

impl<'a> Creation<'a> {
    pub fn new(
        store: &'a Store,
        new: &'a NewVolume,
        class: &'a Class,
        link: &'a Link,
        least: u64,
    ) -> Result<Self, Error> {
        let changeable = qos::modified(&new.mutable)?;
        let pools = class.pools(&new.places)?;
        if let Some(encryption) = &class.encryption {
            let keeper = store.keeper(&new.secrets);
            keeper.check(encryption).map_err(RbdError::from)?;
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

    pub fn run(&self) -> Result<Volume, Error> {
        let journal = &self.store.volumes;
        let name = &self.new.name;
        // A repeat of a copy must not need the source: it may be gone by now.
        let known = match &self.new.source {
            Some(_) => journal.find(&self.journal, name).map_err(RbdError::from)?,
            None => None,
        };
        if let Some(reserved) = known {
            return self.go_on(reserved);
        }
        let origin = self.origin()?;
        let bytes = self.bytes(origin.as_ref())?;
        let pool = self.pool_of(&self.pools.image)?;
        let wanted = Reserved {
            uuid: Uuid::new_v4(),
            pool_id: (pool.pool_id() != self.journal.pool_id()).then(|| pool.pool_id()),
        };
        match journal.reserve(&self.journal, name, wanted) {
            Ok(None) => {}
            Ok(Some(reserved)) => return self.go_on(reserved),
            Err(error) => return Err(RbdError::from(error).into()),
        }
        let made = self.begin(&pool, wanted, origin.as_ref(), bytes);
        if let Err(error) = &made
            && is_certain(error)
        {
            self.undo(&pool, wanted);
        }
        made
    }

    fn pool_of(&self, name: &str) -> Result<IoCtx, RbdError> {
        if name == self.journal.pool() {
            return Ok(self.journal.clone());
        }
        self.link.named_pool(name)
    }

    fn begin(
        &self,
        pool: &IoCtx,
        reserved: Reserved,
        origin: Option<&Origin>,
        bytes: u64,
    ) -> Result<Volume, Error> {
        let making = self.enter(pool, reserved)?;
        self.make(&making, origin, bytes)?;
        self.complete(&making, origin, bytes)?;
        Ok(self.made(making, bytes))
    }

    /// Goes on with what is reserved already: finished, or interrupted.
    fn go_on(&self, reserved: Reserved) -> Result<Volume, Error> {
        let pool = match reserved.pool_id {
            Some(id) => self.link.pool(id)?,
            None => self.journal.clone(),
        };
        if pool.pool() != self.pools.image {
            return Err(self.differs(format!("it is in pool {:?}", pool.pool())));
        }
        let making = self.enter(&pool, reserved)?;
        self.compare(&making.entry)?;
        let size = match Image::open(&pool, making.image(), Access::ReadOnly) {
            Ok(image) => Some(image.size().map_err(RbdError::from)?),
            Err(error) if error.is_not_found() => None,
            Err(error) => return Err(RbdError::from(error).into()),
        };
        if let (Some(size), false) = (size, making.entry.image_id.is_empty()) {
            // A copy's own size is not asked for, only that it is large enough.
            if !self.new.range.holds(size) {
                return Err(self.differs(format!("it has {size} bytes")));
            }
            return Ok(self.made(making, size));
        }
        let origin = self.origin()?;
        let bytes = self.bytes(origin.as_ref())?;
        if making.entry.making {
            self.store
                .take_back(&making.pool, &made_of(making.image()))?;
        }
        match size.filter(|_| !making.entry.making) {
            None => self.make(&making, origin.as_ref(), bytes)?,
            Some(_) => self.tidy(&making, origin.as_ref())?,
        }
        self.complete(&making, origin.as_ref(), bytes)?;
        Ok(self.made(making, bytes))
    }

    fn differs(&self, how: String) -> Error {
        let name = self.new.name.clone();
        Error::Differs { name, how }
    }

    fn compare(&self, entry: &Entry) -> Result<(), Error> {
        let asked = self.new.source.as_ref().map(name_of).unwrap_or_default();
        // ceph-csi does not enter it.
        let unknown = entry.origin.is_empty() && !entry.image_id.is_empty();
        if entry.origin != asked && !unknown {
            return Err(self.differs("its content source is another".to_owned()));
        }
        if Encryption::of_journal(&entry.kms) != self.class.encryption {
            return Err(self.differs("its encryption is another".to_owned()));
        }
        Ok(())
    }

    fn enter(&self, pool: &IoCtx, reserved: Reserved) -> Result<Making, RbdError> {
        let prefix = self.class.name_prefix.as_deref();
        let journal = &self.store.volumes;
        let encryption = self.class.encryption.as_ref();
        let entry = Entry {
            name: self.new.name.clone(),
            image: journal.kind().image(prefix, reserved.uuid),
            journal_pool: reserved.pool_id.map(|_| self.journal.pool_id()),
            kms: encryption.map(|e| e.kms.clone()).unwrap_or_default(),
            encryption: encryption.map(|_| BLOCK.to_owned()).unwrap_or_default(),
            owner: self.class.owner.clone(),
            origin: self.new.source.as_ref().map(name_of).unwrap_or_default(),
            making: true,
            ..Entry::default()
        };
        let entry = journal.write(pool, reserved.uuid, &entry)?;
        Ok(Making {
            pool: pool.clone(),
            reserved,
            handle: handle_of(self.link, pool, reserved.uuid),
            entry,
        })
    }

    /// The answer.
    fn made(&self, making: Making, bytes: u64) -> Volume {
        let found = Found {
            handle: making.handle,
            link: self.link.clone(),
            pool: making.pool,
            image: making.entry.image.clone(),
            image_id: making.entry.image_id.clone(),
            stands_in: false,
            recorded: Some(Recorded {
                journal: self.journal.clone(),
                reserved: making.reserved,
                entry: making.entry,
            }),
        };
        let mut volume = found.volume(bytes);
        let mut context = self.class.context().clone();
        context.append(&mut volume.context);
        if let Some(data) = &self.pools.data {
            context.insert("dataPool".to_owned(), data.clone());
        }
        volume.context = context;
        volume.place = self.pools.place.clone();
        volume.source.clone_from(&self.new.source);
        volume
    }

    /// Takes everything back that a failed create has made, the last first.
    fn undo(&self, pool: &IoCtx, reserved: Reserved) {
        let prefix = self.class.name_prefix.as_deref();
        let image = self.store.volumes.kind().image(prefix, reserved.uuid);
        let taken_back = self.store.take_back(pool, &made_of(&image));
        let undone = taken_back.and_then(|()| {
            let journal = &self.store.volumes;
            Ok(journal.undo(&self.journal, pool, &self.new.name, reserved)?)
        });
        if let Err(error) = undone {
            let (name, error) = (&self.new.name, chain(&error));
            tracing::warn!(
                name,
                error,
                "an unfinished volume stays until its next create"
            );
        }
    }
}

/// The images that a create may leave.
fn made_of(image: &str) -> [String; 2] {
    [image.to_owned(), copies::temporary(image)]
}

/// Whether nothing of what failed may be done yet, and a repeat would not go on
/// with it.
fn is_certain(error: &Error) -> bool {
    !matches!(error, Error::Rbd(error) if error.is_uncertain())
}
