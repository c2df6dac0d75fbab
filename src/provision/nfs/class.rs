//! The parameters of a StorageClass, csi-driver-nfs'.

use std::{
    collections::{BTreeMap, HashMap},
    str::FromStr,
};

use super::handle::{DirectoryHandle, is_refused};
use crate::{
    nfs::{Directory, parse_mode},
    provision::ProvisionError,
};

/// The parameters that the class itself may have, in lower case.
const KEYS: [&str; 6] = [
    "backend",
    "mountpermissions",
    "ondelete",
    "server",
    "share",
    "subdir",
];

/// What external-provisioner adds with `--extra-create-metadata`, and its place in `subDir`.
const TEMPLATES: [(&str, &str); 3] = [
    ("csi.storage.k8s.io/pvc/name", "${pvc.metadata.name}"),
    (
        "csi.storage.k8s.io/pvc/namespace",
        "${pvc.metadata.namespace}",
    ),
    ("csi.storage.k8s.io/pv/name", "${pv.metadata.name}"),
];

/// What becomes of a directory when its volume is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDelete {
    /// It is removed with its content.
    Delete,
    /// It stays.
    Retain,
    /// It is renamed.
    Archive,
}

impl FromStr for OnDelete {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Self::parse(text).filter(|_| !text.is_empty());
        known.ok_or_else(|| "it is delete, retain or archive".to_owned())
    }
}

impl OnDelete {
    /// The word in a new handle; none for the default of csi-driver-nfs.
    pub fn word(self) -> &'static str {
        match self {
            Self::Delete => "",
            Self::Retain => "retain",
            Self::Archive => "archive",
        }
    }

    /// Parses the parameter, in any case; an empty one is the default.
    pub fn parse(text: &str) -> Option<Self> {
        match &text.to_ascii_lowercase()[..] {
            "" | "delete" => Some(Self::Delete),
            "retain" => Some(Self::Retain),
            "archive" => Some(Self::Archive),
            _ => None,
        }
    }
}

/// Whether the parameters are those of directories: a `server` and a `share`.
pub fn is_ours(parameters: &HashMap<String, String>) -> bool {
    if let Some(name) = parameters.get("backend") {
        return name == "nfs";
    }
    let has = |key: &str| parameters.keys().any(|it| it.eq_ignore_ascii_case(key));
    has("server") && has("share")
}

/// A new volume, as its class describes it.
#[derive(Debug)]
pub struct NewDirectory {
    pub handle: DirectoryHandle,
    /// The permission bits, if not the default ones.
    pub mode: Option<u32>,
    /// The volume context.
    pub context: BTreeMap<String, String>,
}

impl NewDirectory {
    /// What names its directory in the request.
    pub fn field(&self) -> &'static str {
        field(&self.handle.uuid)
    }

    /// The volume of that name.
    pub fn parse(name: &str, parameters: &HashMap<String, String>) -> Result<Self, ProvisionError> {
        let class = by_key(parameters)?;
        let get = |key: &str| class.get(key).copied().unwrap_or_default();
        for key in ["server", "share"] {
            if get(key).is_empty() {
                return Err(bad(key, "", "is required".to_owned()));
            }
        }
        let (sub_dir, uuid) = match get("subdir") {
            "" => (name.to_owned(), ""),
            template => (filled(template, parameters)?, name),
        };
        let directory = Directory::new(get("server"), get("share"), &sub_dir);
        let directory = directory.map_err(|error| bad(error.key, &sub_dir, error.to_string()))?;
        if is_refused(directory.sub_dir()) {
            return Err(ProvisionError::BadParameter {
                name: field(uuid),
                value: sub_dir,
                why: "begins with a name that the driver keeps for itself in a share".to_owned(),
            });
        }
        let on_delete = get("ondelete");
        let kept = match OnDelete::parse(on_delete) {
            Some(OnDelete::Delete) => "",
            Some(OnDelete::Retain | OnDelete::Archive) => on_delete,
            None => {
                let why = "must be delete, retain or archive".to_owned();
                return Err(bad("onDelete", on_delete, why));
            }
        };
        let handle = DirectoryHandle::new(directory, uuid, kept).ok_or_else(|| {
            let why = "names the share itself, or there is a '#' in a path, or '..' in the name";
            bad("subDir", &sub_dir, why.to_owned())
        })?;
        let text = get("mountpermissions");
        let mode = match text {
            "" => None,
            text => parse_mode(text).map_err(|why| bad("mountPermissions", text, why))?,
        };
        let it = &handle.directory;
        let share = format!("/{}", it.share());
        let context = [
            ("server", it.server()),
            ("share", &share),
            ("subDir", it.sub_dir()),
            ("onDelete", on_delete),
            ("mountPermissions", text),
        ];
        let context = context.into_iter().filter(|(_, value)| !value.is_empty());
        let owned = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
        let context = context.map(owned).collect();
        Ok(Self {
            handle,
            mode,
            context,
        })
    }
}

/// The server and the share of a class.
pub fn share(parameters: &HashMap<String, String>) -> Result<Directory, ProvisionError> {
    let class = by_key(parameters)?;
    let get = |key: &str| class.get(key).copied().unwrap_or_default();
    let share = Directory::new(get("server"), get("share"), "");
    share.map_err(|error| bad(error.key, "", error.to_string()))
}

/// The share for a snapshot: that of its class, by default the volume's. The controller
/// mounts nothing, so it has no use for csi-driver-nfs' `mountOptions`.
pub fn snapshot_share(
    parameters: &HashMap<String, String>,
    volume: &Directory,
) -> Result<Directory, ProvisionError> {
    let (mut server, mut share) = (volume.server(), volume.share());
    for (key, value) in parameters {
        match &key.to_ascii_lowercase()[..] {
            "server" => server = value,
            "share" => share = value,
            "mountoptions" => {}
            other if other.starts_with("csi.storage.k8s.io/") => {}
            _ => {
                return Err(ProvisionError::UnknownParameter {
                    name: key.clone(),
                    known: "server and share".to_owned(),
                });
            }
        }
    }
    let share = Directory::new(server, share, "");
    share.map_err(|error| bad(error.key, "", error.to_string()))
}

/// What names a directory: with a `subDir`, the handle has the name beside it.
fn field(uuid: &str) -> &'static str {
    if uuid.is_empty() { "name" } else { "subDir" }
}

fn bad(key: &str, value: &str, why: String) -> ProvisionError {
    let spelled = ["mountPermissions", "onDelete", "server", "share", "subDir"];
    let name = spelled.into_iter().find(|it| it.eq_ignore_ascii_case(key));
    ProvisionError::BadParameter {
        name: name.expect("one of a class"),
        value: value.to_owned(),
        why,
    }
}

/// The class' own parameters by their keys in lower case.
fn by_key(parameters: &HashMap<String, String>) -> Result<HashMap<String, &str>, ProvisionError> {
    let mut class = HashMap::new();
    for (key, value) in parameters {
        let lower = key.to_ascii_lowercase();
        // For templates, logs and other drivers; never refused (CSI specification).
        if lower.starts_with("csi.storage.k8s.io/") {
            continue;
        }
        if !KEYS.contains(&&lower[..]) || class.insert(lower, value.as_str()).is_some() {
            return Err(ProvisionError::UnknownParameter {
                name: key.clone(),
                known: "backend, server, share, subDir, onDelete, mountPermissions, each once"
                    .to_owned(),
            });
        }
    }
    Ok(class)
}

/// The template with the claim's and the volume's names in it.
fn filled(template: &str, parameters: &HashMap<String, String>) -> Result<String, ProvisionError> {
    let mut text = template.to_owned();
    for (metadata, place) in TEMPLATES {
        if let Some(name) = parameters.get(metadata) {
            text = text.replace(place, name);
        }
    }
    if text.contains("${") {
        let why = "has a place that is not filled in: there are ${pvc.metadata.name}, \
                   ${pvc.metadata.namespace} and ${pv.metadata.name}, and the provisioner needs \
                   --extra-create-metadata";
        return Err(bad("subDir", template, why.to_owned()));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parameters(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        pairs.iter().map(owned).collect()
    }

    const CLASS: [(&str, &str); 2] = [("server", "srv"), ("share", "/export")];

    fn parse(more: &[(&str, &str)]) -> Result<NewDirectory, ProvisionError> {
        let pairs: Vec<_> = CLASS.iter().chain(more).copied().collect();
        NewDirectory::parse("pvc-1", &parameters(&pairs))
    }

    #[test]
    fn handles_are_those_of_csi_driver_nfs() {
        let claim = [
            ("csi.storage.k8s.io/pvc/name", "data"),
            ("csi.storage.k8s.io/pvc/namespace", "team"),
            ("csi.storage.k8s.io/pv/name", "pvc-1"),
            (
                "csi.storage.k8s.io/pvc/annotations",
                "none that the driver knows",
            ),
        ];
        let with_claim = |more: &[(&'static str, &'static str)]| {
            let all: Vec<_> = claim.iter().chain(more).copied().collect();
            parse(&all).expect("a volume")
        };
        let template = "${pvc.metadata.namespace}/${pvc.metadata.name}-${pv.metadata.name}";
        for (new, handle) in [
            (parse(&[]).expect("a volume"), "srv#export#pvc-1##"),
            (with_claim(&[]), "srv#export#pvc-1##"),
            (with_claim(&[("onDelete", "Delete")]), "srv#export#pvc-1##"),
            (
                with_claim(&[("ondelete", "Retain")]),
                "srv#export#pvc-1##Retain",
            ),
            (
                with_claim(&[("subDir", template), ("onDelete", "archive")]),
                "srv#export#team/data-pvc-1#pvc-1#archive",
            ),
        ] {
            assert_eq!(new.handle.to_string(), handle);
            assert_eq!(new.context["subDir"], new.handle.directory.sub_dir());
        }
        let new = parse(&[("MountPermissions", "0750")]).expect("a volume");
        assert_eq!(
            (new.mode, &new.context["mountPermissions"][..]),
            (Some(0o750), "0750")
        );
    }

    #[test]
    fn a_snapshot_class_names_a_share_or_is_refused() {
        let volume = Directory::new("srv", "/export", "v").expect("a directory");
        let of = |pairs: &[(&str, &str)]| {
            let share = snapshot_share(&parameters(pairs), &volume);
            share.map(|share| share.to_string())
        };
        let unused = [
            ("csi.storage.k8s.io/volumesnapshot/name", "daily"),
            ("mountOptions", "nfsvers=4.1"),
        ];
        assert_eq!(of(&unused).expect("the volume's"), "srv:/export");
        let other = of(&[("Server", "other"), ("share", "/snapshots")]);
        assert_eq!(other.expect("another"), "other:/snapshots");
        for (key, value) in [
            ("subDir", "x"),
            ("pool", "main"),
            ("kubernetes.io", "x"),
            ("share", "/x/../y"),
            ("server", ""),
        ] {
            let refused = of(&[(key, value)]).expect_err("refused").to_string();
            assert!(refused.contains(key), "{refused}");
        }
    }

    #[test]
    fn bad_parameters_are_refused_by_name() {
        for (key, value) in [
            ("subDir", "/"),
            ("subDir", "../x"),
            ("subDir", "a#b"),
            ("subDir", ".uring-csi/volumes"),
            ("subDir", "/.making-x"),
            ("subDir", "archived-team/data"),
            ("subDir", "${pvc.metadata.name}"),
            ("onDelete", "keep"),
            ("mountPermissions", "rwx"),
            ("mountOptions", "hard"),
            ("Server", "other"),
        ] {
            let message = parse(&[(key, value)]).expect_err("refused").to_string();
            assert!(
                message.to_lowercase().contains(&key.to_lowercase()),
                "{message}"
            );
        }
        for name in [".deleted-x", "archived-pvc-1"] {
            let named = NewDirectory::parse(name, &parameters(&CLASS));
            let message = named.expect_err("refused").to_string();
            assert!(message.contains("name ="), "{message}");
        }
        parse(&[("subDir", "team/archived-data")]).expect("no archive has it");
        let lonely = NewDirectory::parse("pvc-1", &parameters(&[("server", "srv")]));
        assert!(lonely.expect_err("refused").to_string().contains("share"));
    }

    proptest! {
        #[test]
        fn a_volume_is_below_its_share(
            name in "[a-z./#$\\{\\}]{1,9}",
            sub_dir in "([a-z./#]|\\.\\.|\\$\\{pvc\\.metadata\\.name\\}){0,9}",
            claim in "[a-z./#]{0,9}",
        ) {
            let mut all = parameters(&CLASS);
            all.insert("subDir".to_owned(), sub_dir);
            all.insert("csi.storage.k8s.io/pvc/name".to_owned(), claim);
            if let Ok(new) = NewDirectory::parse(&name, &all) {
                let written = new.handle.to_string();
                prop_assert!(written.starts_with("srv#export#"), "{}", written);
                let again: DirectoryHandle = written.parse().expect("a handle");
                prop_assert!(!again.directory.sub_dir().is_empty());
                prop_assert!(!written.split(['/', '#']).any(|part| part == ".."), "{}", written);
            }
        }
    }
}
