//! An open image.

use std::{
    ffi::c_int,
    fmt, ptr,
    time::{Duration, SystemTime},
};

use super::{Features, abi};
use crate::ceph::client::{
    CephError,
    call::{LibraryCall, owned},
    rados::IoCtx,
};

/// The mode in which an image is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// To read it. No watch is set: this client is not among the watchers.
    ReadOnly,
    /// To change it. This client watches it, until it is closed.
    ReadWrite,
}

/// An open image. It is closed when dropped, which may block.
pub struct Image {
    raw: abi::Image,
    /// The name or id by which it was opened.
    name: String,
    io: IoCtx,
}

// SAFETY: an `rbd_image_t` may be used from any thread.
unsafe impl Send for Image {}
// SAFETY: librbd takes its own locks; no function is called that changes the handle itself.
// The snapshot to read is set before the image is shared.
unsafe impl Sync for Image {}

/// A client that has an image open for writing, or mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Watcher {
    /// Its address as Ceph shows it, `10.0.0.5:0/1234567`, by which it is blocklisted.
    pub address: String,
    /// Its number in the cluster.
    pub client: i64,
    /// The number of its watch.
    pub cookie: u64,
    /// Whether it is this connection.
    pub own: bool,
}

/// The type of `rbd_open` and its variants.
type OpenFn = unsafe extern "C" fn(
    crate::ceph::client::library::rados::IoCtx,
    *const std::ffi::c_char,
    *mut abi::Image,
    *const std::ffi::c_char,
) -> c_int;

impl Image {
    /// Opens the image of that name.
    pub fn open(io: &IoCtx, name: &str, access: OpenMode) -> Result<Self, CephError> {
        let functions = &io.cluster().libraries().rbd;
        let open = match access {
            OpenMode::ReadOnly => functions.rbd_open_read_only,
            OpenMode::ReadWrite => functions.rbd_open,
        };
        Self::open_by(open, io, name)
    }

    /// Opens the image with that id, whatever its name, also in the trash.
    pub fn open_by_id(io: &IoCtx, id: &str, access: OpenMode) -> Result<Self, CephError> {
        let functions = &io.cluster().libraries().rbd;
        let open = match access {
            OpenMode::ReadOnly => functions.rbd_open_by_id_read_only,
            OpenMode::ReadWrite => functions.rbd_open_by_id,
        };
        Self::open_by(open, io, id)
    }

    /// Opens the image of that name as a snapshot of it shows it.
    pub fn open_at(io: &IoCtx, name: &str, snapshot: u64) -> Result<Self, CephError> {
        let image = Self::open(io, name, OpenMode::ReadOnly)?;
        // SAFETY: the image is open, and nobody else has it.
        let answer = unsafe { (image.functions().rbd_snap_set_by_id)(image.raw, snapshot) };
        image.call("read a snapshot of").check(answer)?;
        Ok(image)
    }

    fn open_by(open: OpenFn, io: &IoCtx, name: &str) -> Result<Self, CephError> {
        let call = io.call("open", "image", name);
        let text = call.text(name)?;
        let mut raw = ptr::null_mut();
        // SAFETY: the name ends in NUL, `raw` outlives the call; no snapshot.
        call.check(unsafe { open(io.raw(), text.as_ptr(), &raw mut raw, ptr::null()) })?;
        Ok(Self {
            raw,
            name: name.to_owned(),
            io: io.clone(),
        })
    }

    /// Its pool and namespace.
    pub fn io(&self) -> &IoCtx {
        &self.io
    }

    pub(super) fn raw(&self) -> abi::Image {
        self.raw
    }

    pub(super) fn functions(&self) -> &'static abi::Functions {
        &self.io.cluster().libraries().rbd
    }

    /// A call on this image.
    pub(super) fn call(&self, operation: &'static str) -> LibraryCall<'_, impl Fn() -> String> {
        self.io.call(operation, "image", &self.name)
    }

    /// A call on a part of this image, such as a snapshot.
    pub(super) fn call_on(
        &self,
        operation: &'static str,
        kind: &'static str,
        name: &str,
    ) -> LibraryCall<'_, impl Fn() -> String> {
        let object = move || format!("{kind} {name} of image {self}");
        self.io.cluster().call(operation, object)
    }

    /// The id, which it keeps when it is renamed.
    pub fn id(&self) -> Result<String, CephError> {
        self.call("read the id of").string(|id, len| {
            // SAFETY: the library writes at most `len` bytes at `id`.
            unsafe { (self.functions().rbd_get_id)(self.raw, id, len) }
        })
    }

    /// A number that the function `read` of the library writes.
    fn number(
        &self,
        operation: &'static str,
        read: unsafe extern "C" fn(abi::Image, *mut u64) -> c_int,
    ) -> Result<u64, CephError> {
        let mut number = 0;
        // SAFETY: the image is open, `number` outlives the call.
        let answer = unsafe { read(self.raw, &raw mut number) };
        self.call(operation).check(answer).map(|()| number)
    }

    /// The size in bytes.
    pub fn size(&self) -> Result<u64, CephError> {
        self.number("read the size of", self.functions().rbd_get_size)
    }

    /// The features, as the cluster has them now.
    pub fn features(&self) -> Result<Features, CephError> {
        let read = self.functions().rbd_get_features;
        self.number("read the features of", read).map(Features)
    }

    /// The time of its creation.
    pub fn created(&self) -> Result<SystemTime, CephError> {
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: the image is open, `time` outlives the call.
        let answer =
            unsafe { (self.functions().rbd_get_create_timestamp)(self.raw, &raw mut time) };
        self.call("read the creation time of").check(answer)?;
        Ok(system_time(time))
    }

    /// The pool of its data, if that is another than its own.
    pub fn data_pool(&self) -> Result<Option<String>, CephError> {
        // SAFETY: the image is open.
        let answer = unsafe { (self.functions().rbd_get_data_pool_id)(self.raw) };
        let id = self.call("read the data pool of").check64(answer)?;
        if id == self.io.pool_id() {
            return Ok(None);
        }
        self.io.cluster().pool_name(id).map(Some)
    }

    /// Grows it to this size in bytes, if it is smaller. A smaller size is invalid
    /// ([`CephError::is_invalid`]).
    pub fn grow(&self, size: u64) -> Result<(), CephError> {
        let resize = self.functions().rbd_resize2;
        // SAFETY: the image is open; the progress callback is optional.
        let answer = unsafe { resize(self.raw, size, false, None, ptr::null_mut()) };
        self.call("grow").changed(answer)
    }

    /// Copies the data that is still read from the parent, and unlinks the parent: the time
    /// grows with the parent's size. Without a parent it is invalid
    /// ([`CephError::is_invalid`]).
    pub fn flatten(&self) -> Result<(), CephError> {
        // SAFETY: the image is open.
        let answer = unsafe { (self.functions().rbd_flatten)(self.raw) };
        self.call("flatten").changed(answer)
    }

    /// Removes its objects that hold nothing but zeros. Reads the whole image.
    pub fn sparsify(&self) -> Result<(), CephError> {
        let mut info = abi::ImageInfo {
            size: 0,
            object_size: 0,
            objects: 0,
            order: 0,
            block_name_prefix: [0; 24],
            parent_pool: 0,
            parent_name: [0; 96],
        };
        let functions = self.functions();
        // SAFETY: the image is open; the library writes one structure of that size.
        let answer = unsafe { (functions.rbd_stat)(self.raw, &raw mut info, size_of_val(&info)) };
        self.call("read the size of the objects of").check(answer)?;
        let object_size = usize::try_from(info.object_size).unwrap_or(usize::MAX);
        // SAFETY: the image is open.
        let answer = unsafe { (functions.rbd_sparsify)(self.raw, object_size) };
        self.call("sparsify").changed(answer)
    }

    /// The clients that have it open or mapped for writing: the kernel's driver sets no watch
    /// for a read-only map.
    pub fn watchers(&self) -> Result<Vec<Watcher>, CephError> {
        let functions = self.functions();
        let mut rows: Vec<abi::Watcher> =
            self.call("list the watchers of").rows(|watchers, count| {
                // SAFETY: there is room for `count` rows at `watchers`.
                unsafe { (functions.rbd_watchers_list)(self.raw, watchers, count) }
            })?;
        let own = self.io.cluster().instance_id();
        let watcher = |row: &abi::Watcher| Watcher {
            // SAFETY: the library filled the row; its text ends in NUL.
            address: unsafe { owned(row.address) },
            client: row.id,
            cookie: row.cookie,
            own: u64::try_from(row.id) == Ok(own),
        };
        let watchers = rows.iter().map(watcher).collect();
        // SAFETY: the library filled the rows, and they are not used any more.
        unsafe { (functions.rbd_watchers_list_cleanup)(rows.as_mut_ptr(), rows.len()) };
        Ok(watchers)
    }
}

/// Converts a time of the library; one before 1970 becomes 1970.
pub(super) fn system_time(time: libc::timespec) -> SystemTime {
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    let nanos = u32::try_from(time.tv_nsec).unwrap_or_default();
    SystemTime::UNIX_EPOCH + Duration::new(seconds, nanos)
}

impl fmt::Display for Image {
    /// `pool[/namespace]/image`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.io, self.name)
    }
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Image({self})")
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // The callback that opened it locks its state once more after `rbd_open` has returned
        // (`ImageState::complete_action_unlock`), and `rbd_close` does not wait for that:
        // librbd 18.2.7 aborted or hung where an image was closed at once.
        self.io.wait_for_callbacks();
        // SAFETY: the last user of the image is gone. The library closes it even if it
        // returns an error.
        unsafe { (self.functions().rbd_close)(self.raw) };
    }
}
