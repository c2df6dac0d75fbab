//! Block-device ioctls.
