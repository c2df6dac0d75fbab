//! The line by which the driver maps an image:
//! `<monitors> <options> <pool> <image> <snapshot>`.
//!
//! The driver splits it at blanks, so no name may have one. Maps with equal options share
//! one client of the cluster, so the options differ between volumes only where they must.
//!
//! Source: drivers/block/rbd.c, `rbd_add_parse_args`.

use super::{KrbdError, Mark, Wanted, monitors};
use crate::ceph::csi_format::map_options::{MapOption, is_word};

/// Seconds that a cluster whose monitors fail may delay all maps of the node: well
/// below the deadlines of calls.
const MOUNT_TIMEOUT: u32 = 30;

/// The longest line that sysfs takes is a page; some room is left.
const LONGEST: usize = 4000;

/// The line.
pub fn of(wanted: &Wanted<'_>, mark: &Mark) -> Result<String, KrbdError> {
    let image = wanted.image;
    let unsuited = |what| KrbdError::Unsuited {
        image: image.to_string(),
        what,
    };
    let words = [
        (
            &*image.pool,
            "the driver takes no pool whose name has blanks",
        ),
        (
            &*image.name,
            "the driver takes no image whose name has blanks",
        ),
        (
            image.snapshot.as_deref().unwrap_or("-"),
            "the driver takes no snapshot whose name has blanks",
        ),
    ];
    for (word, why) in words {
        if !is_word(word) {
            return Err(unsuited(why));
        }
    }
    if image.snapshot.as_deref() == Some("-") {
        return Err(unsuited("the driver takes no snapshot of the name -"));
    }
    let option =
        |name: &str, value: &str, why| MapOption::new(name, value).map_err(|_| unsuited(why));
    let monitors = wanted.monitors.for_driver(wanted.options)?;
    let user = &wanted.credentials.user;
    let mut ours = vec![
        option("name", user, "the user's id has blanks or commas")?,
        option("key", &mark.to_string(), "the volume's handle is unfit")?,
        option("mount_timeout", &MOUNT_TIMEOUT.to_string(), "no such time")?,
    ];
    if !image.namespace.is_empty() {
        let why = "the driver takes no RADOS namespace whose name has blanks or commas";
        ours.push(option("_pool_ns", &image.namespace, why)?);
    }
    if let Some(mode) = monitors.ms_mode {
        ours.push(option("ms_mode", mode, "no such mode")?);
    }
    if let Some(location) = wanted.location {
        let why = "its node's crush location has blanks or commas";
        ours.push(option("read_from_replica", "localize", why)?);
        ours.push(option("crush_location", location, why)?);
    }
    let mut texts: Vec<_> = ours
        .iter()
        .chain(wanted.options.iter())
        .map(ToString::to_string)
        .collect();
    if wanted.read_only {
        texts.push("ro".to_owned());
    }
    let [(pool, _), (name, _), (snapshot, _)] = words;
    let monitors = monitors::list(monitors.addresses);
    let line = format!("{monitors} {} {pool} {name} {snapshot}", texts.join(","));
    if line.len() > LONGEST {
        return Err(unsuited(
            "its names and options make too long a line for the driver",
        ));
    }
    Ok(line)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::{
        ceph::{
            client::{Credentials, rbd::Features},
            csi_format::map_options::MapOptions,
            krbd::{ImageSpec, Monitors},
        },
        secret::Secrets,
    };

    /// A key's header, and sixteen zeros.
    const KEY: &str = "AQAAAAAAAAAAABAAAAAAAAAAAAAAAAAAAAAAAA==";

    fn line(image: &ImageSpec, options: &str, location: Option<&str>) -> Result<String, KrbdError> {
        let given = [("userID", "csi"), ("userKey", KEY)];
        let given = given.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let secrets = Secrets::from(HashMap::from(given));
        let wanted = Wanted {
            image,
            volume_id: "v 1",
            pool_id: None,
            fsid: None,
            features: Features::default(),
            monitors: &Monitors::resolve(&["10.0.0.1".to_owned()]).unwrap(),
            credentials: &Credentials::from_secrets(&secrets).unwrap(),
            options: &MapOptions::parse(options).unwrap(),
            location,
            read_only: true,
            net_namespace: None,
        };
        let mut mark = Mark::new("c", "v 1");
        "n".clone_into(&mut mark.nonce);
        of(&wanted, &mark)
    }

    fn image(name: &str) -> ImageSpec {
        ImageSpec {
            cluster_id: "c".to_owned(),
            pool: "p".to_owned(),
            namespace: "ns".to_owned(),
            name: name.to_owned(),
            snapshot: None,
        }
    }

    #[test]
    fn the_map_line_ends_with_the_volumes_own_options() {
        assert_eq!(
            line(&image("i"), "ms_mode=crc,notrim", Some("zone:a|host:b")).unwrap(),
            "10.0.0.1:3300 name=csi,key=uring-csi:c:v%201:n,mount_timeout=30,_pool_ns=ns,\
             read_from_replica=localize,crush_location=zone:a|host:b,ms_mode=crc,notrim,ro p i -"
        );
    }

    #[test]
    fn text_that_would_break_the_map_line_is_refused() {
        for name in ["", "a b", "a\nb"] {
            assert!(line(&image(name), "", None).is_err(), "{name:?}");
        }
        assert!(line(&image("i"), "", Some("zone:a,secret=x")).is_err());
        assert!(line(&image(&"x".repeat(5000)), "", None).is_err());
    }
}
