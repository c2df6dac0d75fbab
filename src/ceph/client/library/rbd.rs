//! The functions and structures of `<rbd/librbd.h>` that the driver uses.
//!
//! The structures have been the same since Ceph 14. Asserted are the sizes of the two
//! that are passed with their size, and of those in arrays.

use std::ffi::{c_char, c_int, c_void};

use super::{rados::IoCtx, table};

/// `rbd_image_t`, an open image.
pub type Image = *mut c_void;
/// `rbd_image_options_t`.
pub type Options = *mut c_void;

/// `rbd_image_spec_t`.
#[repr(C)]
pub struct ImageSpec {
    pub id: *mut c_char,
    pub name: *mut c_char,
}

/// `rbd_linked_image_spec_t`: a parent or a child.
#[repr(C)]
pub struct LinkedImage {
    pub pool_id: i64,
    pub pool_name: *mut c_char,
    pub pool_namespace: *mut c_char,
    pub image_id: *mut c_char,
    pub image_name: *mut c_char,
    pub trash: bool,
}

/// `rbd_snap_spec_t`.
#[repr(C)]
pub struct SnapSpec {
    pub id: u64,
    pub namespace_type: c_int,
    pub name: *mut c_char,
}

/// `rbd_snap_info_t`.
#[repr(C)]
pub struct SnapInfo {
    pub id: u64,
    pub size: u64,
    pub name: *const c_char,
}

/// `rbd_image_info_t`.
#[repr(C)]
pub struct ImageInfo {
    pub size: u64,
    pub object_size: u64,
    pub objects: u64,
    pub order: c_int,
    pub block_name_prefix: [c_char; 24],
    pub parent_pool: i64,
    pub parent_name: [c_char; 96],
}

/// `rbd_image_watcher_t`.
#[repr(C)]
pub struct Watcher {
    pub address: *mut c_char,
    pub id: i64,
    pub cookie: u64,
}

/// `rbd_trash_image_info_t`.
#[repr(C)]
pub struct TrashInfo {
    pub id: *mut c_char,
    pub name: *mut c_char,
    pub source: c_int,
    pub deleted: libc::time_t,
    pub deferred_until: libc::time_t,
}

/// `rbd_mirror_image_info_t`.
#[repr(C)]
pub struct MirrorInfo {
    pub global_id: *mut c_char,
    pub state: c_int,
    pub primary: bool,
}

/// `rbd_mirror_image_site_status_t`.
#[repr(C)]
pub struct SiteStatus {
    pub mirror_uuid: *mut c_char,
    pub state: c_int,
    pub description: *mut c_char,
    pub updated: libc::time_t,
    pub up: bool,
}

/// `rbd_mirror_image_global_status_t`.
#[repr(C)]
pub struct MirrorStatus {
    pub name: *mut c_char,
    pub info: MirrorInfo,
    pub count: usize,
    pub sites: *mut SiteStatus,
}

/// `rbd_group_info_t`.
#[repr(C)]
pub struct GroupInfo {
    pub name: *mut c_char,
    pub pool: i64,
}

/// `rbd_snap_group_namespace_t`.
#[repr(C)]
pub struct GroupSnap {
    pub group_pool: i64,
    pub group: *mut c_char,
    pub snapshot: *mut c_char,
}

/// The callback of `rbd_diff_iterate2`: offset, length, whether there is data.
pub type DiffFn = unsafe extern "C" fn(u64, usize, c_int, *mut c_void) -> c_int;

/// `RBD_MIRROR_IMAGE_DISABLING`.
pub const MIRRORING_ENDS: c_int = 0;
/// `RBD_MIRROR_IMAGE_ENABLED`.
pub const MIRRORED: c_int = 1;
/// `RBD_MIRROR_MODE_DISABLED`, of a pool.
pub const MIRROR_MODE_DISABLED: c_int = 0;
/// `RBD_MIRROR_IMAGE_MODE_JOURNAL`.
pub const BY_JOURNAL: c_int = 0;
/// `RBD_MIRROR_IMAGE_MODE_SNAPSHOT`.
pub const BY_SNAPSHOT: c_int = 1;
/// `MIRROR_IMAGE_STATUS_STATE_UNKNOWN` and those after it.
pub const UNKNOWN: c_int = 0;
pub const ERROR: c_int = 1;
pub const SYNCING: c_int = 2;
pub const REPLAYING: c_int = 4;
pub const STOPPED: c_int = 6;

#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<ImageInfo>() == 160);
    assert!(size_of::<MirrorInfo>() == 16);
    assert!(size_of::<SiteStatus>() == 40);
    assert!(size_of::<MirrorStatus>() == 40);
    assert!(size_of::<GroupInfo>() == 16);
    assert!(size_of::<GroupSnap>() == 24);
    assert!(size_of::<ImageSpec>() == 16);
    assert!(size_of::<LinkedImage>() == 48);
    assert!(size_of::<SnapSpec>() == 24);
    assert!(size_of::<SnapInfo>() == 24);
    assert!(size_of::<Watcher>() == 24);
    assert!(size_of::<TrashInfo>() == 40);
};

/// `RBD_IMAGE_OPTION_…`.
pub mod option {
    use std::ffi::c_int;

    pub const FEATURES: c_int = 1;
    pub const ORDER: c_int = 2;
    pub const STRIPE_UNIT: c_int = 3;
    pub const STRIPE_COUNT: c_int = 4;
    pub const DATA_POOL: c_int = 10;
    pub const CLONE_FORMAT: c_int = 12;
}

table! {
    "librbd.so.1", "librbd1";

    fn rbd_image_options_create(options: *mut Options);
    fn rbd_image_options_destroy(options: Options);
    fn rbd_image_options_set_string(options: Options, option: c_int, value: *const c_char) -> c_int;
    fn rbd_image_options_set_uint64(options: Options, option: c_int, value: u64) -> c_int;
    fn rbd_create4(io: IoCtx, name: *const c_char, size: u64, options: Options) -> c_int;
    fn rbd_clone3(
        parent_io: IoCtx, parent: *const c_char, snapshot: *const c_char,
        io: IoCtx, name: *const c_char, options: Options,
    ) -> c_int;
    fn rbd_remove(io: IoCtx, name: *const c_char) -> c_int;
    fn rbd_list2(io: IoCtx, images: *mut ImageSpec, count: *mut usize) -> c_int;
    fn rbd_image_spec_list_cleanup(images: *mut ImageSpec, count: usize);
    #[cfg(test)]
    fn rbd_namespace_create(io: IoCtx, name: *const c_char) -> c_int;

    fn rbd_trash_move(io: IoCtx, name: *const c_char, delay: u64) -> c_int;
    fn rbd_trash_get(io: IoCtx, id: *const c_char, info: *mut TrashInfo) -> c_int;
    fn rbd_trash_get_cleanup(info: *mut TrashInfo);
    fn rbd_trash_remove(io: IoCtx, id: *const c_char, force: bool) -> c_int;

    fn rbd_open(io: IoCtx, name: *const c_char, image: *mut Image, snapshot: *const c_char) -> c_int;
    fn rbd_open_read_only(io: IoCtx, name: *const c_char, image: *mut Image, snapshot: *const c_char) -> c_int;
    fn rbd_open_by_id(io: IoCtx, id: *const c_char, image: *mut Image, snapshot: *const c_char) -> c_int;
    fn rbd_open_by_id_read_only(io: IoCtx, id: *const c_char, image: *mut Image, snapshot: *const c_char) -> c_int;
    fn rbd_close(image: Image) -> c_int;

    fn rbd_get_size(image: Image, size: *mut u64) -> c_int;
    fn rbd_get_features(image: Image, features: *mut u64) -> c_int;
    fn rbd_get_id(image: Image, id: *mut c_char, len: usize) -> c_int;
    fn rbd_get_data_pool_id(image: Image) -> i64;
    fn rbd_get_create_timestamp(image: Image, time: *mut libc::timespec) -> c_int;
    fn rbd_resize2(
        image: Image, size: u64, allow_shrink: bool,
        progress: Option<unsafe extern "C" fn(u64, u64, *mut c_void) -> c_int>, data: *mut c_void,
    ) -> c_int;
    fn rbd_flatten(image: Image) -> c_int;
    fn rbd_stat(image: Image, info: *mut ImageInfo, info_size: usize) -> c_int;
    fn rbd_sparsify(image: Image, sparse_size: usize) -> c_int;
    fn rbd_watchers_list(image: Image, watchers: *mut Watcher, count: *mut usize) -> c_int;
    fn rbd_watchers_list_cleanup(watchers: *mut Watcher, count: usize);

    fn rbd_get_parent(image: Image, parent: *mut LinkedImage, snapshot: *mut SnapSpec) -> c_int;
    fn rbd_linked_image_spec_cleanup(image: *mut LinkedImage);
    fn rbd_snap_spec_cleanup(snapshot: *mut SnapSpec);
    fn rbd_list_children3(image: Image, children: *mut LinkedImage, count: *mut usize) -> c_int;
    fn rbd_linked_image_spec_list_cleanup(images: *mut LinkedImage, count: usize);

    fn rbd_snap_create(image: Image, name: *const c_char) -> c_int;
    fn rbd_snap_remove(image: Image, name: *const c_char) -> c_int;
    fn rbd_snap_list(image: Image, snapshots: *mut SnapInfo, count: *mut c_int) -> c_int;
    fn rbd_snap_list_end(snapshots: *mut SnapInfo);
    fn rbd_snap_get_namespace_type(image: Image, id: u64, kind: *mut c_int) -> c_int;

    fn rbd_snap_set_by_id(image: Image, id: u64) -> c_int;
    fn rbd_diff_iterate2(
        image: Image, from: *const c_char, offset: u64, len: u64, include_parent: u8, whole_object: u8,
        each: DiffFn, data: *mut c_void,
    ) -> c_int;
    fn rbd_read(image: Image, offset: u64, len: usize, data: *mut c_char) -> isize;
    fn rbd_write(image: Image, offset: u64, len: usize, data: *const c_char) -> isize;
    fn rbd_write_zeroes(image: Image, offset: u64, len: usize, zero_flags: c_int, op_flags: c_int) -> isize;

    fn rbd_metadata_set(image: Image, key: *const c_char, value: *const c_char) -> c_int;
    fn rbd_metadata_remove(image: Image, key: *const c_char) -> c_int;
    fn rbd_metadata_list(
        image: Image, after: *const c_char, max: u64,
        keys: *mut c_char, keys_len: *mut usize, values: *mut c_char, values_len: *mut usize,
    ) -> c_int;

    optional {
        fn rbd_trash_list(io: IoCtx, entries: *mut TrashInfo, count: *mut usize) -> c_int;
        fn rbd_trash_list_cleanup(entries: *mut TrashInfo, count: usize);
        fn rbd_mirror_image_get_info(image: Image, info: *mut MirrorInfo, info_size: usize) -> c_int;
        fn rbd_mirror_image_get_info_cleanup(info: *mut MirrorInfo);
        fn rbd_mirror_image_get_global_status(image: Image, status: *mut MirrorStatus, status_size: usize) -> c_int;
        fn rbd_mirror_image_global_status_cleanup(status: *mut MirrorStatus);
        fn rbd_mirror_mode_get(io: IoCtx, mode: *mut c_int) -> c_int;
        fn rbd_mirror_image_enable2(image: Image, mode: c_int) -> c_int;
        fn rbd_mirror_image_disable(image: Image, force: bool) -> c_int;
        fn rbd_mirror_image_promote(image: Image, force: bool) -> c_int;
        fn rbd_mirror_image_demote(image: Image) -> c_int;
        fn rbd_mirror_image_resync(image: Image) -> c_int;
        fn rbd_get_group(image: Image, group: *mut GroupInfo, group_size: usize) -> c_int;
        fn rbd_group_info_cleanup(group: *mut GroupInfo, group_size: usize) -> c_int;
        fn rbd_group_create(io: IoCtx, group: *const c_char) -> c_int;
        fn rbd_group_remove(io: IoCtx, group: *const c_char) -> c_int;
        fn rbd_group_image_add(io: IoCtx, group: *const c_char, image_io: IoCtx, image: *const c_char) -> c_int;
        fn rbd_group_snap_create(io: IoCtx, group: *const c_char, snapshot: *const c_char) -> c_int;
        fn rbd_snap_get_group_namespace(image: Image, id: u64, group: *mut GroupSnap, group_size: usize) -> c_int;
        fn rbd_snap_group_namespace_cleanup(group: *mut GroupSnap, group_size: usize) -> c_int;
    }
}
