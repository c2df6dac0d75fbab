//! The checks of every request before its call runs: required fields, sizes, and
//! consistent capabilities (CSI specification, "Size Limits" and the `REQUIRED` marks of
//! each message).
//!
//! Every failure is `INVALID_ARGUMENT` and names the field.

use std::collections::HashMap;
#[cfg(feature = "node")]
use std::path::PathBuf;

use tonic::Status;

use crate::{
    capability::{AccessMode, AccessType, Capability, MAX_ID},
    proto::csi::{
        VolumeCapability,
        volume_capability::{AccessType as WireType, access_mode::Mode as WireMode},
    },
};

/// Bytes that a string may have unless a field says otherwise.
pub const MAX_STRING: usize = 128;
/// Bytes of a node id.
pub const MAX_NODE_ID: usize = 256;
/// Bytes of a map's keys and values together, and of mount flags together.
pub const MAX_COLLECTION: usize = 4096;
/// Bytes of a path: the kernel's own limit, with its terminating zero.
pub const MAX_PATH: usize = 4095;
/// Bytes of a plugin name.
pub const MAX_PLUGIN_NAME: usize = 63;

/// `INVALID_ARGUMENT` that names the field.
pub fn invalid(field: &str, why: impl std::fmt::Display) -> Status {
    Status::invalid_argument(format!("{field}: {why}"))
}

fn text<'a>(field: &str, value: &'a str, max: usize) -> Result<&'a str, Status> {
    if value.is_empty() {
        return Err(invalid(field, "is required"));
    }
    if value.len() > max {
        let why = format!("is {} bytes long, {max} are allowed", value.len());
        return Err(invalid(field, why));
    }
    if is_control(value) {
        return Err(invalid(field, "holds a control character"));
    }
    Ok(value)
}

/// A required id of a volume, snapshot or group.
pub fn id<'a>(field: &str, value: &'a str) -> Result<&'a str, Status> {
    text(field, value, MAX_ID)
}

/// A required string of ordinary length, as a name.
pub fn required<'a>(field: &str, value: &'a str) -> Result<&'a str, Status> {
    text(field, value, MAX_STRING)
}

/// A required node id.
pub fn node_id<'a>(field: &str, value: &'a str) -> Result<&'a str, Status> {
    text(field, value, MAX_NODE_ID)
}

/// A required path. Whether it is below an allowed directory is checked later.
pub fn path<'a>(field: &str, value: &'a str) -> Result<&'a str, Status> {
    text(field, value, MAX_PATH)
}

/// An optional path; absolute if present.
pub fn optional_path(field: &str, value: &str) -> Result<(), Status> {
    if value.is_empty() {
        return Ok(());
    }
    if !path(field, value)?.starts_with('/') {
        return Err(invalid(field, format!("{value:?} is not an absolute path")));
    }
    Ok(())
}

/// The path without a trailing slash, double slashes and dots, so that equal paths have
/// equal texts.
#[cfg(feature = "node")]
pub fn clean(path: &str) -> PathBuf {
    PathBuf::from(path).components().collect()
}

/// A map within its size limit, without control characters except the white space
/// of a YAML block in its values.
pub fn map(field: &str, map: &HashMap<String, String>) -> Result<(), Status> {
    size(field, map)?;
    refuse_control(field, map, |key, value| {
        is_control(key) || value.contains(|c: char| c.is_control() && !c.is_whitespace())
    })
}

/// Secrets within their size limit. Their values may be files, with lines.
pub fn secrets(map: &HashMap<String, String>) -> Result<(), Status> {
    let field = "secrets";
    size(field, map)?;
    refuse_control(field, map, |key, _| is_control(key))
}

fn is_control(text: &str) -> bool {
    text.contains(|c: char| c.is_control())
}

fn refuse_control(
    field: &str,
    map: &HashMap<String, String>,
    has: impl Fn(&str, &str) -> bool,
) -> Result<(), Status> {
    let bad = map.iter().filter(|(key, value)| has(key, value));
    // Sorted, so that of two mistakes the error always names the same one.
    match bad.map(|(key, _)| key).min() {
        None => Ok(()),
        Some(key) => Err(invalid(
            &format!("{field}.{}", key.escape_debug()),
            "holds a control character",
        )),
    }
}

fn size(field: &str, map: &HashMap<String, String>) -> Result<(), Status> {
    let bytes: usize = map.iter().map(|(key, value)| key.len() + value.len()).sum();
    if bytes > MAX_COLLECTION {
        let why = format!("holds {bytes} bytes, {MAX_COLLECTION} are allowed");
        return Err(invalid(field, why));
    }
    Ok(())
}

/// A plugin name: domain-like, beginning and ending with a letter or digit.
pub fn driver_name(name: &str) -> Result<String, String> {
    let inside = |c: char| c.is_ascii_alphanumeric() || "-.".contains(c);
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    if name.len() <= MAX_PLUGIN_NAME
        && name.chars().all(inside)
        && edge(name.chars().next())
        && edge(name.chars().last())
    {
        Ok(name.to_owned())
    } else {
        Err(format!(
            "a driver name has at most {MAX_PLUGIN_NAME} letters, digits, '-' and '.', and begins and ends with a letter or digit"
        ))
    }
}

/// Parses one capability; `field` is its name in the request.
pub fn capability(
    field: &'static str,
    capability: Option<&VolumeCapability>,
) -> Result<Capability, Status> {
    let capability = capability.ok_or_else(|| invalid(field, "is required"))?;
    let mode = capability
        .access_mode
        .as_ref()
        .ok_or_else(|| invalid(field, "access_mode is required"))?
        .mode;
    let mode = match WireMode::try_from(mode) {
        Ok(WireMode::SingleNodeWriter | WireMode::SingleNodeMultiWriter) => {
            AccessMode::SingleNodeWriter
        }
        Ok(WireMode::SingleNodeSingleWriter) => AccessMode::SingleNodeSingleWriter,
        Ok(WireMode::SingleNodeReaderOnly) => AccessMode::SingleNodeReader,
        Ok(WireMode::MultiNodeReaderOnly) => AccessMode::MultiNodeReader,
        Ok(WireMode::MultiNodeSingleWriter) => AccessMode::MultiNodeSingleWriter,
        Ok(WireMode::MultiNodeMultiWriter) => AccessMode::MultiNodeWriter,
        Ok(WireMode::Unknown) | Err(_) => {
            return Err(invalid(field, format!("access mode {mode} is unknown")));
        }
    };
    let access = match &capability.access_type {
        None => {
            return Err(invalid(field, "access_type is required: block or mount"));
        }
        Some(WireType::Block(_)) => AccessType::Block,
        Some(WireType::Mount(mount)) => {
            let bytes: usize = mount.mount_flags.iter().map(String::len).sum();
            if bytes > MAX_COLLECTION {
                let why = format!("mount_flags hold {bytes} bytes, {MAX_COLLECTION} are allowed");
                return Err(invalid(field, why));
            }
            for (name, value) in [
                ("fs_type", &mount.fs_type),
                ("volume_mount_group", &mount.volume_mount_group),
            ] {
                if !value.is_empty() {
                    text(&format!("{field}.mount.{name}"), value, MAX_STRING)?;
                }
            }
            AccessType::Mount {
                fs_type: mount.fs_type.clone(),
                flags: mount.mount_flags.clone(),
                group: mount.volume_mount_group.clone(),
            }
        }
    };
    Ok(Capability { access, mode })
}

/// Parses a required list of capabilities.
pub fn capabilities(
    field: &'static str,
    list: &[VolumeCapability],
) -> Result<Vec<Capability>, Status> {
    if list.is_empty() {
        return Err(invalid(field, "is required"));
    }
    list.iter()
        .map(|one| capability(field, Some(one)))
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::{prelude::*, sample::select};

    use super::*;
    use crate::proto::csi::volume_capability::{AccessMode as WireAccessMode, BlockVolume};

    #[test]
    fn limits_name_the_field() {
        assert!(required("name", &"x".repeat(128)).is_ok());
        assert!(id("volume_id", &"x".repeat(1024)).is_ok());
        for bad in [String::new(), "x".repeat(1025), "a\nb".to_owned()] {
            let status = id("volume_id", &bad).unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
            assert!(status.message().starts_with("volume_id: "));
        }
        assert!(required("name", &"x".repeat(129)).is_err());
        let big = HashMap::from([("k".to_owned(), "v".repeat(4096))]);
        assert!(map("parameters", &big).is_err() && secrets(&big).is_err());
    }

    #[test]
    fn control_characters_are_refused_but_in_the_values_of_secrets() {
        let of = |key: &str, value: &str| HashMap::from([(key.to_owned(), value.to_owned())]);
        for bad in [
            of("fsType", "ext4\0"),
            of("fsType\n", "ext4"),
            of("a\u{85}", ""),
        ] {
            let status = map("volume_context", &bad).unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
            let key = bad.keys().next().unwrap().escape_debug();
            let named = format!("volume_context.{key}: ");
            assert!(status.message().starts_with(&named), "{status:?}");
        }
        assert!(map("volume_context", &of("mkfsOptions", "-K\n-m 0\n")).is_ok());
        assert!(secrets(&of("cert", "one\ntwo\n")).is_ok());
        assert!(secrets(&of("a\nb", "x")).is_err());
    }

    #[test]
    fn a_path_that_may_be_left_out_is_absolute() {
        for good in ["", "/a"] {
            assert!(optional_path("staging_target_path", good).is_ok());
        }
        for bad in ["a", "/a\0", &format!("/{}", "x".repeat(4095))] {
            let status = optional_path("staging_target_path", bad).unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
            assert!(status.message().starts_with("staging_target_path: "));
        }
    }

    #[test]
    fn driver_names_are_domain_like() {
        assert!(driver_name(super::super::identity::DEFAULT_DRIVER_NAME).is_ok());
        for bad in ["", "-a", "a-", "a b", "a/b", &"x".repeat(64)] {
            assert!(driver_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn incomplete_capabilities_are_refused() {
        let field = "volume_capability";
        let block = || Some(WireType::Block(BlockVolume {}));
        let mode = |mode| Some(WireAccessMode { mode });
        for (bad, word) in [
            (None, "required"),
            (
                Some(VolumeCapability {
                    access_type: block(),
                    access_mode: None,
                }),
                "access_mode",
            ),
            (
                Some(VolumeCapability {
                    access_type: block(),
                    access_mode: mode(0),
                }),
                "mode 0",
            ),
            (
                Some(VolumeCapability {
                    access_type: None,
                    access_mode: mode(1),
                }),
                "access_type",
            ),
        ] {
            let status = capability(field, bad.as_ref()).unwrap_err();
            assert!(status.message().contains(word), "{}", status.message());
        }
        let good = VolumeCapability {
            access_type: block(),
            access_mode: mode(7),
        };
        let parsed = capability(field, Some(&good)).unwrap();
        assert_eq!(parsed.mode, AccessMode::SingleNodeWriter);
    }

    /// Ids and paths as an attacker writes them.
    fn hostile() -> impl Strategy<Value = String> {
        let parts = [
            "",
            ".",
            "..",
            "a",
            "pods",
            "mount",
            "kubelet\u{7f}",
            "a\0b",
            "a\nb",
            "\u{85}",
            "ö",
            "%2e%2e",
            "\\..",
            " ",
            "-rf",
            "$(id)",
        ];
        let path = prop::collection::vec(select(parts.to_vec()), 0..6);
        let path = (any::<bool>(), path).prop_map(|(is_absolute, parts)| {
            format!("{}{}", if is_absolute { "/" } else { "" }, parts.join("/"))
        });
        let lengths = select(vec![127, 128, 129, 256, 257, 1024, 1025, 4095, 4096]);
        prop_oneof![
            8 => path,
            2 => lengths.prop_map(|length| format!("/{}", "x".repeat(length - 1))),
            1 => ".*",
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn ids_and_paths_are_within_their_limits_or_refused_by_their_field(text in hostile()) {
            type Check = fn(&'static str, &str) -> Result<(), Status>;
            let checks: [(Check, usize); 5] = [
                (|field, text| id(field, text).map(drop), MAX_ID),
                (|field, text| required(field, text).map(drop), MAX_STRING),
                (|field, text| node_id(field, text).map(drop), MAX_NODE_ID),
                (|field, text| path(field, text).map(drop), MAX_PATH),
                (|field, text| optional_path(field, text), MAX_PATH),
            ];
            let bad = |max| text.len() > max || text.chars().any(char::is_control);
            for (number, (check, max)) in checks.into_iter().enumerate() {
                let is_optional = number == 4;
                let is_bad = bad(max)
                    || !is_optional && text.is_empty()
                    || is_optional && !text.is_empty() && !text.starts_with('/');
                match check("the_field", &text) {
                    Ok(()) => prop_assert!(!is_bad, "{:?}", text),
                    Err(status) => {
                        prop_assert!(is_bad, "{:?}: {:?}", text, status);
                        prop_assert_eq!(status.code(), tonic::Code::InvalidArgument);
                        let message = status.message();
                        prop_assert!(message.starts_with("the_field: "), "{}", message);
                        prop_assert!(!message.contains(char::is_control), "{}", message);
                    }
                }
            }
        }

        #[cfg(feature = "node")]
        #[test]
        fn paths_of_one_place_have_one_text(text in hostile()) {
            let cleaned = clean(&text);
            let shown = cleaned.to_str().expect("UTF-8");
            prop_assert_eq!(&clean(shown), &cleaned);
            prop_assert_eq!(clean(&format!("{text}/")).starts_with(&cleaned), true);
            prop_assert!(!shown.contains("//") && !shown.contains("/./"), "{}", shown);
            prop_assert!(shown.len() <= 1 || !shown.ends_with('/'), "{}", shown);
            prop_assert_eq!(shown.starts_with('/'), text.starts_with('/'));
            // What leads upwards is refused by where the path is resolved, not hidden here.
            let ups = |text: &str| text.split('/').filter(|part| *part == "..").count();
            prop_assert_eq!(ups(shown), ups(&text));
        }
    }
}
