//! The C library's heap.

/// Lets all threads allocate from two arenas (mallopt(3), `M_ARENA_MAX`). glibc gives each
/// thread its own, up to eight for each CPU, and an arena keeps the most that it ever had:
/// with the threads of a node's lanes that is more than all volumes take. To be called
/// before the second thread starts. Other C libraries have no such arenas.
pub fn limit_arenas() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt takes two numbers; no other thread allocates meanwhile. It fails only
    // for a number that it does not know, and then nothing changes.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 2);
    }
}
