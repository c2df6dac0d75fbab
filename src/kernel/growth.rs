//! The ioctls that grow a mounted file system.
