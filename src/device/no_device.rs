//! A source without a block device: nothing is attached, so nothing is found or detached.

use super::{
    AttachOptions, Attachment, Condition, Device, Purpose, backend::BackendVolume,
    error::DeviceError,
};
use crate::{Detached, Done};

/// A directory of a server.
#[derive(Debug)]
pub struct NoDevice;

impl BackendVolume for NoDevice {
    fn attach(&self, _: &AttachOptions) -> Result<(Attachment, Done), DeviceError> {
        Err(DeviceError::NoDevice)
    }

    fn condition(&self, _: &Device) -> Option<Condition> {
        None
    }

    fn is_claimed_for(&self, _: &str) -> Result<bool, DeviceError> {
        Ok(false)
    }

    fn attached(&self) -> Result<Option<Device>, DeviceError> {
        Ok(None)
    }

    fn detach(&self, _: &Device, _: &str, _: Purpose) -> Result<Detached, DeviceError> {
        Ok(Detached::Already)
    }

    fn release(&self, _: &str) -> Result<(), DeviceError> {
        Ok(())
    }

    fn grow(&self, _: &Device, _: u64) -> Result<u64, DeviceError> {
        Err(DeviceError::NoDevice)
    }
}
