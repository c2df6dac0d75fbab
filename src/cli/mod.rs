//! uringctl.
