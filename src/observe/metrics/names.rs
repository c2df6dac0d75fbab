//! The names of the metrics, their units and meaning.

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};

/// Defines a constant for each name, and [`describe`].
macro_rules! metrics {
    ($($describe:ident $constant:ident $name:literal $unit:ident $help:literal)*) => {
        $(pub const $constant: &str = $name;)*

        /// Describes every metric to the recorder.
        pub fn describe() {
            $($describe!($constant, Unit::$unit, $help);)*
        }
    };
}

metrics! {
    describe_counter CALLS "uring_csi_calls_total" Count
        "Calls of CSI, and of the supervisor, that were answered, or cancelled by their callers, by method and gRPC code."
    describe_histogram CALL_DURATION "uring_csi_call_duration_seconds" Seconds
        "Time from reading a call to its answer, by method."
    describe_gauge CALLS_IN_FLIGHT "uring_csi_calls_in_flight" Count
        "Calls that are not answered yet, by method."
    describe_gauge OLDEST_CALL_AGE "uring_csi_oldest_call_age_seconds" Seconds
        "Time since the oldest call in flight came, by method; 0 without one."
    describe_histogram STEP_DURATION "uring_csi_step_duration_seconds" Seconds
        "Time of one step of the work on a volume, by step and backend."
    describe_counter STEP_FAILURES "uring_csi_step_failures_total" Count
        "Steps of the work on volumes that failed, by step and backend."
    describe_counter MKFS "uring_csi_mkfs_total" Count
        "File systems that were to be made, by outcome."
    describe_counter FSCK "uring_csi_fsck_total" Count
        "File systems that were checked before their mount, by outcome."
    describe_gauge VOLUMES "uring_csi_volumes" Count
        "Volumes that this node holds, by state."
    describe_gauge WANTED_VOLUMES "uring_csi_wanted_volumes" Count
        "Volumes that files of --volumes ask for, or that are still to go, by state."
    describe_gauge MANAGED_VOLUMES "uring_csi_managed_volumes" Count
        "Volumes that this node holds because files of --volumes asked for them."
    describe_gauge WANTED_AGE "uring_csi_wanted_volume_age_seconds" Seconds
        "How long the first of these volumes has not been as its file asks; 0 if all are."
    describe_gauge VOLUME_CONDITIONS "uring_csi_volume_conditions" Count
        "Volumes on this node that have the condition, by its reason."
    describe_gauge VOLUME_CONDITION_INFO "uring_csi_volume_condition_info" Count
        "Always 1, for each condition of a volume on this node, by its handle and the reason; of 100 volumes at most. There is none for a healthy volume."
    describe_counter NBD_CONNECTIONS_LOST "uring_csi_nbd_connections_lost_total" Count
        "Connections of attached volumes to NBD servers that were lost."
    describe_gauge SUPERVISED_VOLUMES "uring_csi_supervised_volumes" Count
        "Volumes of the supervisor, by state: a served, unhealthy or keyless one has a running rbd-nbd daemon, an unserved one has none."
    describe_counter DAEMON_RESTARTS "uring_csi_daemon_restarts_total" Count
        "Attempts to start another rbd-nbd daemon for an attached device, by reason and result."
    describe_gauge READY "uring_csi_ready" Count
        "1 if the agent is ready, else 0; /readyz gives the reason."
    describe_gauge BLOCKING_THREADS "uring_csi_blocking_threads" Count
        "Threads for calls that a device can block, idle ones included."
    describe_gauge STUCK_THREADS "uring_csi_stuck_threads" Count
        "Threads that a device has blocked for longer than any healthy device takes."
    describe_counter RING_OPERATIONS "uring_csi_ring_operations_total" Count
        "Operations submitted to io_uring, by operation: read (of a device that is probed), poll (for one event) or watch (for all)."
    describe_gauge RING_IN_FLIGHT "uring_csi_ring_operations_in_flight" Count
        "Operations on io_uring that have not ended, by operation; reads of a device that hangs stay."
    describe_counter LOG_LINES_DROPPED "uring_csi_log_lines_dropped_total" Count
        "Log lines that the agent dropped because stderr was not read."
    describe_gauge ADMISSION_PLACES "uring_csi_admission_places" Count
        "Volumes that may be in a step at once, by step."
    describe_gauge ADMISSION_IN_USE "uring_csi_admission_in_use" Count
        "Volumes in a step that a gate limits, by step."
    describe_gauge ADMISSION_STUCK "uring_csi_admission_stuck" Count
        "Volumes that hang in such a step and have lost their permit, by step."
    describe_gauge ADMISSION_WAITING "uring_csi_admission_waiting" Count
        "Volumes that wait for a permit, by step."
    describe_counter ADMISSION_REFUSED "uring_csi_admission_refused_total" Count
        "Calls refused because too many volumes wait for a permit, by step."
    describe_gauge POOL_SIZE_BYTES "uring_csi_pool_size_bytes" Bytes
        "Size of the pool's file system, by pool; NaN while the pool cannot be read."
    describe_gauge POOL_FREE_BYTES "uring_csi_pool_free_bytes" Bytes
        "Free bytes of the pool's file system, by pool."
    describe_gauge POOL_PROMISED_BYTES "uring_csi_pool_promised_bytes" Bytes
        "Bytes of images that are not written yet, by pool."
    describe_counter COPIED_BYTES "uring_csi_copied_bytes_total" Bytes
        "Bytes of images that were copied, holes included."
    describe_gauge COPY_REMAINING_BYTES "uring_csi_copy_remaining_bytes" Bytes
        "Bytes that the copies of images under way have left, holes included."
    describe_gauge CEPH_REACHABLE "uring_csi_ceph_cluster_reachable" Count
        "1 if the Ceph cluster answered the last call, else 0, by clusterID; NaN if nothing called it for minutes."
    describe_counter CEPH_ERRORS "uring_csi_ceph_errors_total" Count
        "Failures of connections to the Ceph cluster, by clusterID and reason: unanswered, refused, lost (fenced, or a call without an answer) or other."
    describe_gauge CEPH_TRASH_IMAGES "uring_csi_ceph_trash_images" Count
        "Deleted Ceph images that this controller has yet to remove."
    describe_gauge CEPH_FLATTEN_IMAGES "uring_csi_ceph_flatten_images" Count
        "Ceph images that this controller has yet to flatten."
    describe_counter CEPH_FENCES "uring_csi_ceph_fences_total" Count
        "Ceph clients of nodes that this controller has fenced."
    describe_counter HTTP_DROPPED "uring_csi_http_dropped_total" Count
        "HTTP connections closed before they were answered, by reason."
    describe_gauge BUILD_INFO "uring_csi_build_info" Count
        "Always 1; the labels describe the build."
}
