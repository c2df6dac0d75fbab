//! Which error becomes which gRPC code: the one table.
//!
//! Kubelet takes every code as final except CANCELLED, DEADLINE_EXCEEDED,
//! UNAVAILABLE, RESOURCE_EXHAUSTED and ABORTED: after a final one it may never
//! call unstage. So a final code is given only where everything was undone and
//! a repeat would meet the same refusal; what may pass by itself is UNAVAILABLE.

#[cfg(any(feature = "node", feature = "controller"))]
use tonic::Code;

#[cfg(feature = "controller")]
use crate::chain;

#[cfg(feature = "controller")]
use crate::provision;
#[cfg(feature = "node")]
use crate::{
    device::{CephImageError, DeviceError, loopdev::LoopError},
    fs::{fsck::FsckError, grow::GrowError},
    mount, pool, volume,
};

#[cfg(feature = "controller")]
impl From<provision::Error> for tonic::Status {
    fn from(error: provision::Error) -> Self {
        use provision::Kind as K;
        let code = match error.kind() {
            K::InvalidArgument => Code::InvalidArgument,
            K::NotFound => Code::NotFound,
            K::AlreadyExists => Code::AlreadyExists,
            K::OutOfRange => Code::OutOfRange,
            K::FailedPrecondition => Code::FailedPrecondition,
            K::ResourceExhausted => Code::ResourceExhausted,
            K::Aborted => Code::Aborted,
            K::Unauthenticated => Code::Unauthenticated,
            K::Unavailable => Code::Unavailable,
            K::Internal => Code::Internal,
        };
        Self::new(code, chain(&error))
    }
}

/// The code of a failed call on a volume of this node.
#[cfg(feature = "node")]
pub fn of_volume(error: &volume::Error) -> Code {
    use volume::Error as E;
    match error {
        E::Invalid { .. } | E::Source(_) | E::Option(_) => Code::InvalidArgument,
        E::Path { source, .. } => of_path(source),
        E::NotFound { .. } => Code::NotFound,
        E::Incompatible { .. } => Code::AlreadyExists,
        E::Precondition { .. } | E::Foreign { .. } => Code::FailedPrecondition,
        E::Pending { .. } | E::Occupied { .. } | E::Busy { .. } => Code::Aborted,
        E::Deadline { .. } => Code::DeadlineExceeded,
        E::Mkfs { may_pass, .. } if *may_pass => Code::Unavailable,
        E::Mkfs { .. } => Code::Internal,
        E::Fsck { source, .. } => match source {
            FsckError::Uncorrected { .. } => Code::FailedPrecondition,
            FsckError::Failed { .. } => Code::Unavailable,
        },
        E::Device { source, .. } => of_device(source),
        E::Mount { source, .. } => match source {
            mount::attach::MountError::BadOption { .. } => Code::InvalidArgument,
            mount::attach::MountError::Busy { .. } => Code::Aborted,
            mount::attach::MountError::OtherOptions { .. }
            | mount::attach::MountError::Twin { .. }
            | mount::attach::MountError::WriteProtected { .. }
            | mount::attach::MountError::BadSuperblock { .. }
            | mount::attach::MountError::Unsupported { .. } => Code::FailedPrecondition,
            _ => Code::Unavailable,
        },
        E::Unmount { source, .. } => match source {
            mount::unmount::UnmountError::Busy { .. } => Code::Aborted,
            mount::unmount::UnmountError::Io { .. } => Code::Unavailable,
        },
        // Kubelet tries no more before the volume is mounted anew: somebody has to do
        // something first.
        E::Grow { source, .. } => match source {
            GrowError::NeedsCapability { .. }
            | GrowError::HasErrors
            | GrowError::SeveralDevices { .. } => Code::FailedPrecondition,
            GrowError::Busy { .. } | GrowError::Io { .. } => Code::Unavailable,
        },
        E::Full { .. } | E::Overloaded { .. } => Code::ResourceExhausted,
        E::Range { .. } => Code::OutOfRange,
        E::Bind { .. }
        | E::Ownership { .. }
        | E::Io { .. }
        | E::Kept(_)
        // Not OUT_OF_RANGE: kubelet takes that as infeasible and tries no more.
        | E::NotGrown { .. }
        | E::NotTakenUp { .. }
        | E::NotUndone { .. } => Code::Unavailable,
    }
}

#[cfg(feature = "node")]
fn of_path(error: &mount::path::PathError) -> Code {
    use mount::path::PathError as P;
    match error {
        P::NotAbsolute(_)
        | P::DotDot(_)
        | P::Outside { .. }
        | P::TooLong { .. }
        | P::Symlink { .. } => Code::InvalidArgument,
        P::MissingParent { .. } | P::WrongKind { .. } | P::NotEmpty { .. } | P::Mounted { .. } => {
            Code::FailedPrecondition
        }
        P::Io { .. } => Code::Unavailable,
    }
}

#[cfg(feature = "node")]
fn of_device(error: &DeviceError) -> Code {
    match error {
        DeviceError::Pool(error) | DeviceError::Claim(pool::claim::ClaimError::Pool(error)) => {
            of_pool(error)
        }
        DeviceError::Claim(pool::claim::ClaimError::HeldBy { .. })
        | DeviceError::AttachedOtherwise { .. }
        | DeviceError::TooSmall { .. } => Code::FailedPrecondition,
        DeviceError::Loop(LoopError::NoneFree { .. }) => Code::ResourceExhausted,
        DeviceError::Busy { .. } => Code::Aborted,
        DeviceError::Nbd(error) if error.is_no_export() => Code::NotFound,
        DeviceError::Nbd(error) if error.is_final() => Code::FailedPrecondition,
        DeviceError::Ceph(error) => of_ceph(error),
        DeviceError::Claim(_)
        | DeviceError::Loop(_)
        | DeviceError::Nbd(_)
        | DeviceError::Note(_)
        | DeviceError::Changed { .. }
        | DeviceError::Io { .. } => Code::Unavailable,
        DeviceError::Extend { source, .. } => match source.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
                Code::ResourceExhausted
            }
            _ => Code::Unavailable,
        },
    }
}

#[cfg(feature = "node")]
fn of_ceph(error: &CephImageError) -> Code {
    use crate::{ceph::config::ConfigError, device::rbd::RbdError};
    match error {
        CephImageError::Config(ConfigError::Unknown { .. }) => Code::InvalidArgument,
        CephImageError::Rbd(RbdError::UnderWay) | CephImageError::Coming => Code::Aborted,
        CephImageError::Holder(error) if error.code() == Some(Code::Aborted) => Code::Aborted,
        error if error.is_authentication() => Code::Unauthenticated,
        error if error.is_missing() => Code::NotFound,
        error if error.is_final() => Code::FailedPrecondition,
        _ => Code::Unavailable,
    }
}

/// A pool that is not there may come back; a name that is wrong stays wrong.
#[cfg(feature = "node")]
fn of_pool(error: &pool::PoolError) -> Code {
    use pool::PoolError as P;
    match error {
        P::BadSpec { .. }
        | P::Twice(_)
        | P::Unknown { .. }
        | P::Unnamed { .. }
        | P::NotLocal { .. }
        | P::BadName { .. } => Code::InvalidArgument,
        P::NoRoom { .. } => Code::ResourceExhausted,
        P::NoImage { .. } => Code::NotFound,
        // Somebody has to make room first; kubelet mounts the volume as large as it is.
        P::OtherScope { .. } | P::NoRoomToGrow { .. } => Code::FailedPrecondition,
        P::NotReady { .. } | P::NotMounted { .. } | P::Away { .. } | P::Io { .. } => {
            Code::Unavailable
        }
    }
}

#[cfg(all(test, feature = "node"))]
mod tests {
    use super::*;

    #[test]
    fn a_growth_that_somebody_has_to_make_possible_is_not_tried_again() {
        let code = |source| {
            let volume = "v".to_owned();
            of_volume(&volume::Error::Grow { volume, source })
        };
        for source in [
            GrowError::HasErrors,
            GrowError::SeveralDevices { devices: 2 },
        ] {
            assert_eq!(code(source), Code::FailedPrecondition);
        }
        let fs = crate::fs::FsType::Btrfs;
        assert_eq!(code(GrowError::Busy { fs }), Code::Unavailable);
    }
}
