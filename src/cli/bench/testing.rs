//! What the tests of several files use.

use serde_json::{Value, json};

/// A report of one call.
pub fn sample() -> Value {
    let usage = json!({
        "anonymous_kib": 4096, "resident_kib": 8192, "peak_resident_kib": 16384,
        "threads": 2, "descriptors": 20,
    });
    json!({
        "format": 1,
        "driver": {"name": "d", "version": "1", "endpoint": "unix:///x"},
        "load": {
            "callers": 1, "volumes": 2, "created": true, "kept_connection": false,
            "access": "ext4", "mount_options": [], "timeout_seconds": 120.0,
            "origin": {"size_bytes": 4096, "parameters": {}},
        },
        "seconds": 2.0, "cycles": 10, "failed_cycles": 1, "cycles_per_second": 5.0,
        "interrupted": false,
        "calls": [{
            "call": "NodeStageVolume", "succeeded": 10, "per_second": 5.0,
            "errors": [{"code": "ABORTED", "count": 3, "first_message": "busy"}],
            "milliseconds": {
                "min": 1.0, "mean": 2.0, "p50": 2.0, "p90": 3.0, "p99": 4.0,
                "p999": 5.0, "max": 123.45,
            },
        }],
        "process": {
            "pid": 7, "cpu_seconds": 0.1, "children_cpu_seconds": 0.1,
            "before": usage, "after": usage,
        },
        "own_cpu_seconds": 0.5,
        "left": [],
    })
}
