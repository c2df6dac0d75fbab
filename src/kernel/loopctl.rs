//! Loop-device ioctls.
