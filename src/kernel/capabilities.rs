//! The capabilities that the node agent needs, for itself and for `uringctl doctor`.

use rustix::thread::CapabilitySet;

/// The capabilities of the node agent.
pub const NODE_NEEDS: CapabilitySet = CapabilitySet::SYS_ADMIN // mounts, loop devices
    .union(CapabilitySet::SYS_RESOURCE) // ext4's online resize
    .union(CapabilitySet::DAC_OVERRIDE) // paths and images of others
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::CHOWN) // fsGroup
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::SYS_PTRACE) // a device's openers: /proc/PID/fd, mountinfo
    .union(CapabilitySet::MKNOD) // cryptsetup's /dev/mapper/NAME
    .union(CapabilitySet::NET_ADMIN); // the uevent socket's buffer
