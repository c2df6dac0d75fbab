//! The number of descriptors that this process may have open.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors that an agent may have open beside those of its volumes: sockets, rings,
/// records, connections to `/metrics`, and the pipes of children.
const OF_ITS_OWN: u64 = 512;

/// Descriptors that the work on a volume may have open at once: its device, its mount,
/// files of its pool, and the connections of an NBD device.
const OF_A_VOLUME: u64 = 16;

/// The volumes that a node without a maximum is expected to have.
const EXPECTED_VOLUMES: u64 = 256;

/// Raises the soft limit to the hard one (setrlimit(2), RLIMIT_NOFILE), and returns it;
/// none where there is no limit.
pub fn raise() -> io::Result<Option<u64>> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let raised = Rlimit {
            current: limit.maximum,
            ..limit
        };
        setrlimit(Resource::Nofile, raised)?;
    }
    Ok(limit.maximum)
}

/// A message if `limit` descriptors are too few for the maximum of volumes, or without one (0)
/// for [`EXPECTED_VOLUMES`]; none if they suffice.
pub fn too_few(limit: Option<u64>, max_volumes: u64) -> Option<String> {
    let volumes = match max_volumes {
        0 => EXPECTED_VOLUMES,
        maximum => maximum,
    };
    let needed = volumes
        .saturating_mul(OF_A_VOLUME)
        .saturating_add(OF_ITS_OWN);
    let limit = limit.filter(|limit| *limit < needed)?;
    let enough = limit.saturating_sub(OF_ITS_OWN) / OF_A_VOLUME;
    Some(format!(
        "{volumes} volumes may need {needed} file descriptors, and this process may have {limit} (RLIMIT_NOFILE), which are enough for {enough} volumes: raise the container's limit, or set --max-volumes to at most {enough}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_descriptor_limit_is_raised_to_the_hard_limit() {
        let before = getrlimit(Resource::Nofile);
        let lower = before.maximum.map_or(1024, |hard| hard - 1);
        let lowered = Rlimit {
            current: Some(lower),
            ..before
        };
        setrlimit(Resource::Nofile, lowered).unwrap();
        assert_eq!(raise().unwrap(), before.maximum);
        assert_eq!(getrlimit(Resource::Nofile).current, before.maximum);
    }

    #[test]
    fn volumes_are_counted_against_it() {
        assert_eq!(too_few(None, u64::MAX), None);
        assert_eq!(too_few(Some(20_000), 1_000), None);
        assert_eq!(too_few(Some(5_000), 0), None);
        assert!(too_few(Some(1024), 0).unwrap().contains("256 volumes"));
        let why = too_few(Some(1024), 100).unwrap();
        for word in [
            "100 volumes",
            "2112",
            "1024",
            "for 32 volumes",
            "--max-volumes to at most 32",
        ] {
            assert!(why.contains(word), "{word}: {why}");
        }
    }
}
