//! The functions of `<rados/librados.h>` that the driver uses.
//!
//! Handles are opaque pointers. Functions return a negative errno; those that fill a
//! buffer return `-ERANGE` if it is too small.

use std::ffi::{c_char, c_int, c_uchar, c_void};

use super::table;

/// `rados_t`, a cluster.
pub type Cluster = *mut c_void;
/// `rados_ioctx_t`, a pool and a namespace in it.
pub type IoCtx = *mut c_void;
/// `rados_write_op_t`, changes to one object, of which all are made or none.
pub type WriteOp = *mut c_void;
/// `rados_read_op_t`, reads of one object.
pub type ReadOp = *mut c_void;
/// `rados_completion_t`, an asynchronous call.
pub type Completion = *mut c_void;
/// `rados_omap_iter_t`, the keys and values that a read of an omap found.
pub type OmapIter = *mut c_void;

/// `LIBRADOS_CREATE_EXCLUSIVE`: the object must not exist.
pub const CREATE_EXCLUSIVE: c_int = 1;
/// `LIBRADOS_OPERATION_FULL_FORCE`: a full pool takes the operation, too.
pub const FULL_FORCE: c_int = 128;
/// `LIBRADOS_LOCK_FLAG_MAY_RENEW`: the caller may have the lock already.
pub const MAY_RENEW: u8 = 1;
/// `LIBRADOS_CMPXATTR_OP_EQ`, also for omap values.
pub const COMPARE_EQUAL: u8 = 1;

table! {
    "librados.so.2", "librados2";

    fn rados_create2(cluster: *mut Cluster, name: *const c_char, user: *const c_char, flags: u64) -> c_int;
    fn rados_conf_set(cluster: Cluster, option: *const c_char, value: *const c_char) -> c_int;
    fn rados_connect(cluster: Cluster) -> c_int;
    fn rados_shutdown(cluster: Cluster);
    fn rados_cluster_fsid(cluster: Cluster, text: *mut c_char, len: usize) -> c_int;
    fn rados_get_instance_id(cluster: Cluster) -> u64;
    fn rados_getaddrs(cluster: Cluster, addresses: *mut *mut c_char) -> c_int;
    fn rados_wait_for_latest_osdmap(cluster: Cluster) -> c_int;
    fn rados_pool_list(cluster: Cluster, names: *mut c_char, len: usize) -> c_int;
    fn rados_pool_lookup(cluster: Cluster, name: *const c_char) -> i64;
    fn rados_pool_reverse_lookup(cluster: Cluster, id: i64, name: *mut c_char, len: usize) -> c_int;
    fn rados_mon_command(
        cluster: Cluster,
        commands: *const *const c_char, count: usize,
        input: *const c_char, input_len: usize,
        output: *mut *mut c_char, output_len: *mut usize,
        status: *mut *mut c_char, status_len: *mut usize,
    ) -> c_int;
    fn rados_mgr_command(
        cluster: Cluster,
        commands: *const *const c_char, count: usize,
        input: *const c_char, input_len: usize,
        output: *mut *mut c_char, output_len: *mut usize,
        status: *mut *mut c_char, status_len: *mut usize,
    ) -> c_int;
    fn rados_buffer_free(buffer: *mut c_char);

    fn rados_ioctx_create2(cluster: Cluster, pool: i64, io: *mut IoCtx) -> c_int;
    fn rados_ioctx_set_namespace(io: IoCtx, namespace: *const c_char);
    fn rados_ioctx_destroy(io: IoCtx);

    fn rados_aio_create_completion2(
        argument: *mut c_void, callback: Option<unsafe extern "C" fn(Completion, *mut c_void)>,
        completion: *mut Completion,
    ) -> c_int;
    fn rados_aio_flush_async(io: IoCtx, completion: Completion) -> c_int;
    fn rados_aio_wait_for_complete(completion: Completion) -> c_int;
    fn rados_aio_release(completion: Completion);

    fn rados_stat(io: IoCtx, object: *const c_char, size: *mut u64, modified: *mut libc::time_t) -> c_int;
    fn rados_read(io: IoCtx, object: *const c_char, buffer: *mut c_char, len: usize, offset: u64) -> c_int;
    fn rados_exec(
        io: IoCtx, object: *const c_char, class: *const c_char, method: *const c_char,
        input: *const c_char, input_len: usize, output: *mut c_char, output_len: usize,
    ) -> c_int;
    fn rados_lock_exclusive(
        io: IoCtx, object: *const c_char, name: *const c_char, cookie: *const c_char,
        description: *const c_char, duration: *mut libc::timeval, flags: u8,
    ) -> c_int;
    fn rados_list_lockers(
        io: IoCtx, object: *const c_char, name: *const c_char, exclusive: *mut c_int,
        tag: *mut c_char, tag_len: *mut usize, clients: *mut c_char, clients_len: *mut usize,
        cookies: *mut c_char, cookies_len: *mut usize, addrs: *mut c_char, addrs_len: *mut usize,
    ) -> isize;
    fn rados_break_lock(
        io: IoCtx, object: *const c_char, name: *const c_char, client: *const c_char,
        cookie: *const c_char,
    ) -> c_int;
    fn rados_notify2(
        io: IoCtx, object: *const c_char, message: *const c_char, message_len: c_int,
        timeout_ms: u64, reply: *mut *mut c_char, reply_len: *mut usize,
    ) -> c_int;
    fn rados_create_write_op() -> WriteOp;
    fn rados_release_write_op(op: WriteOp);
    fn rados_write_op_create(op: WriteOp, exclusive: c_int, category: *const c_char);
    fn rados_write_op_assert_exists(op: WriteOp);
    fn rados_write_op_omap_cmp2(
        op: WriteOp, key: *const c_char, operator: u8, value: *const c_char,
        key_len: usize, value_len: usize, result: *mut c_int,
    );
    fn rados_write_op_omap_set2(
        op: WriteOp, keys: *const *const c_char, values: *const *const c_char,
        key_lens: *const usize, value_lens: *const usize, count: usize,
    );
    fn rados_write_op_omap_rm_keys2(
        op: WriteOp, keys: *const *const c_char, key_lens: *const usize, count: usize,
    );
    fn rados_write_op_exec(
        op: WriteOp, class: *const c_char, method: *const c_char,
        input: *const c_char, input_len: usize, result: *mut c_int,
    );
    fn rados_write_op_remove(op: WriteOp);
    fn rados_write_op_operate(
        op: WriteOp, io: IoCtx, object: *const c_char, modified: *mut libc::time_t, flags: c_int,
    ) -> c_int;

    fn rados_create_read_op() -> ReadOp;
    fn rados_release_read_op(op: ReadOp);
    fn rados_read_op_omap_get_vals2(
        op: ReadOp, after: *const c_char, prefix: *const c_char, max: u64,
        found: *mut OmapIter, more: *mut c_uchar, result: *mut c_int,
    );
    fn rados_read_op_omap_get_vals_by_keys2(
        op: ReadOp, keys: *const *const c_char, count: usize, key_lens: *const usize,
        found: *mut OmapIter, result: *mut c_int,
    );
    fn rados_read_op_operate(op: ReadOp, io: IoCtx, object: *const c_char, flags: c_int) -> c_int;
    fn rados_omap_get_next2(
        iter: OmapIter, key: *mut *mut c_char, value: *mut *mut c_char,
        key_len: *mut usize, value_len: *mut usize,
    ) -> c_int;
    fn rados_omap_get_end(iter: OmapIter);
    optional {
        fn rados_set_pool_full_try(io: IoCtx);
    }
}
