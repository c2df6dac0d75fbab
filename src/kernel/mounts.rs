//! mount_setattr, statmount, listmount.
