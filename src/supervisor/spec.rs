//! The image that a daemon serves, and its options; all but the key.
//!
//! All of it goes into the arguments of a program that runs as root, so a value that the
//! program could read as another option is refused.
//!
//! Source: rbd-nbd(8).

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::NbdOptions;
use crate::ceph::{
    client::monitor,
    csi_format::map_options::{OptionError, is_spec_part, is_text},
    krbd::ImageSpec,
};

/// How long a daemon that starts may look for a monitor, seconds.
const FIND_CLUSTER_FOR: u32 = 30;

/// A mapped image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// The volume's handle, and the device's cookie.
    pub volume_id: String,
    pub image: ImageSpec,
    /// The addresses of the cluster's monitors, as `mon_host` takes them.
    pub monitors: Vec<String>,
    /// The user's id, without `client.`.
    pub user: String,
    /// The daemon's options.
    pub options: NbdOptions,
    /// The device refuses writes.
    pub read_only: bool,
    /// If the controller fences: under which key to register the daemon's client.
    #[serde(default)]
    pub fencing: Option<RegistrationKey>,
}

/// The key under which clients are registered ([`crate::ceph::fencing`]).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegistrationKey {
    pub node_id: String,
    /// The volume's, in its journal.
    pub volume: Uuid,
}

/// A value that cannot be passed to the program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// A name has characters that the program would read otherwise.
    ///
    /// Remedy: map the image by krbd (mounter rbd), or take another name.
    #[error("rbd-nbd would misread {text:?} as the {what}")]
    Unsuited {
        /// The kind of name.
        what: &'static str,
        /// The name.
        text: String,
    },
    #[error(transparent)]
    Option(#[from] OptionError),
}

/// What a daemon is started for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verb<'a> {
    /// To attach to a new device, by its node.
    Map(&'a str),
    /// To serve an existing device, by its node.
    Attach(&'a str),
}

impl Spec {
    /// Checks that all of it can be passed to the program.
    pub fn check(&self) -> Result<(), SpecError> {
        let ImageSpec {
            pool,
            namespace,
            name,
            snapshot,
            ..
        } = &self.image;
        // POOL/[NAMESPACE/]IMAGE[@SNAPSHOT] is parted at the first of each.
        let part = is_spec_part;
        // An entry may have a list of its own: all of them become one.
        let host = |text: &String| is_text(text) && !text.contains(char::is_whitespace);
        let parts = [
            ("volume handle", &self.volume_id, is_text(&self.volume_id)),
            ("pool", pool, part(pool)),
            (
                "RADOS namespace",
                namespace,
                namespace.is_empty() || part(namespace),
            ),
            ("image", name, part(name)),
            (
                "user",
                &self.user,
                is_text(&self.user) && !self.user.starts_with('-'),
            ),
        ];
        let mut bad = parts.into_iter().filter(|(_, _, good)| !good);
        let bad = bad.next().map(|(what, text, _)| (what, text.clone()));
        let snapshot = snapshot.iter().find(|text| !part(text));
        let bad = bad.or(snapshot.map(|text| ("snapshot", text.clone())));
        let host = match self.monitors.iter().find(|text| !host(text)) {
            None if self.monitors.is_empty() => Some(String::new()),
            bad => bad.cloned(),
        };
        match bad.or(host.map(|text| ("monitors", text))) {
            Some((what, text)) => Err(SpecError::Unsuited { what, text }),
            None => Ok(()),
        }
    }

    /// Whether its image, although of the same name, may have other data: after a fail-over
    /// both clusters have it. A cluster that was only renamed has the same monitors.
    pub fn is_of_another_cluster_than(&self, other: &Self) -> bool {
        let [one, two] = [self, other].map(|spec| &spec.image.cluster_id);
        let [mine, others] =
            [self, other].map(|spec| monitor::addresses(&spec.monitors).unwrap_or_default());
        let is_renamed = mine.iter().any(|monitor| others.contains(monitor));
        one != two && !one.is_empty() && !two.is_empty() && !is_renamed
    }

    /// The image as Ceph's programs name it.
    pub fn name(&self) -> String {
        let anywhere = ImageSpec {
            cluster_id: String::new(),
            ..self.image.clone()
        };
        anywhere.to_string()
    }

    /// The program's arguments; it reads its key from its standard input.
    ///
    /// It fetches the monitors' configuration, since without that a wrong key looks like a
    /// missing image; and it reads no configuration file, which would name other monitors.
    pub fn arguments(&self, verb: &Verb<'_>) -> Vec<String> {
        let mut arguments = vec![
            match verb {
                Verb::Map(_) => "map".to_owned(),
                Verb::Attach(_) => "attach".to_owned(),
            },
            self.name(),
            "-f".to_owned(),
            "--conf=/dev/null".to_owned(),
            format!("--mon-host={}", self.monitors.join(",")),
            format!("--id={}", self.user),
            "--keyfile=/proc/self/fd/0".to_owned(),
            "--log-to-stderr=true".to_owned(),
            "--log-to-file=false".to_owned(),
            "--admin-socket=".to_owned(),
            format!("--client-mount-timeout={FIND_CLUSTER_FOR}"),
            "--try-netlink".to_owned(),
            format!("--cookie={}", self.volume_id),
        ];
        arguments.extend(self.options.arguments());
        // At this level it logs its client id. The last option of a name counts.
        arguments.push("--debug-monc=5".to_owned());
        if self.read_only {
            arguments.push("--read-only".to_owned());
        }
        let (Verb::Map(node) | Verb::Attach(node)) = verb;
        arguments.push(format!("--device={node}"));
        arguments
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(volume_id: &str, pool: &str, image: &str) -> Spec {
        Spec {
            volume_id: volume_id.to_owned(),
            image: ImageSpec {
                cluster_id: "lab".to_owned(),
                pool: pool.to_owned(),
                namespace: String::new(),
                name: image.to_owned(),
                snapshot: None,
            },
            monitors: vec!["10.0.0.1:6789".to_owned(), "[fd00::1]:6789".to_owned()],
            user: "csi".to_owned(),
            options: NbdOptions::default(),
            read_only: false,
            fencing: None,
        }
    }

    #[test]
    fn a_cluster_of_another_name_is_known_by_its_monitors() {
        let known = spec("a handle", "pool", "image");
        for (cluster_id, monitors, is_another) in [
            ("lab", "10.0.0.9:6789", false),
            ("mirror", "10.0.0.9:6789", true),
            ("renamed", "10.0.0.9:6789,10.0.0.1:6789", false),
            ("", "10.0.0.9:6789", false),
        ] {
            let mut given = known.clone();
            given.image.cluster_id = cluster_id.to_owned();
            given.monitors = vec![monitors.to_owned()];
            assert_eq!(
                known.is_of_another_cluster_than(&given),
                is_another,
                "{cluster_id}"
            );
            assert_eq!(
                given.is_of_another_cluster_than(&known),
                is_another,
                "{cluster_id}"
            );
        }
    }

    #[test]
    fn a_spec_becomes_arguments_of_rbd_nbd() {
        let mut spec = spec("a handle", "pool", "image");
        spec.image.namespace = "ns".to_owned();
        spec.image.snapshot = Some("snap".to_owned());
        spec.options = NbdOptions::parse("noshare;nbd:exclusive,io-timeout=7,try-netlink").unwrap();
        spec.read_only = true;
        spec.check().unwrap();
        let arguments = spec.arguments(&Verb::Attach("/dev/nbd7"));
        assert_eq!(arguments[..2], ["attach", "pool/ns/image@snap"]);
        for word in [
            "--mon-host=10.0.0.1:6789,[fd00::1]:6789",
            "--id=csi",
            "--cookie=a handle",
            "--exclusive",
            "--io-timeout=7",
            "--reattach-timeout=300",
            "--read-only",
            "--device=/dev/nbd7",
        ] {
            assert!(
                arguments.iter().any(|argument| argument == word),
                "{arguments:?}"
            );
        }
        assert_eq!(
            arguments
                .iter()
                .filter(|word| word.contains("io-timeout"))
                .count(),
            1
        );
        spec.fencing = Some(RegistrationKey {
            node_id: "node".to_owned(),
            volume: Uuid::new_v4(),
        });
        let mut json = serde_json::to_value(&spec).unwrap();
        assert_eq!(serde_json::from_value::<Spec>(json.clone()).unwrap(), spec);
        // As earlier releases wrote it.
        json.as_object_mut().unwrap().remove("fencing");
        spec.fencing = None;
        assert_eq!(serde_json::from_value::<Spec>(json).unwrap(), spec);
    }

    #[test]
    fn monitors_are_whatever_the_configuration_takes() {
        let mut spec = spec("v", "p", "i");
        let entries = ["a:6789,b:6789", "[v2:10.0.0.3:3300/0,v1:10.0.0.3:6789/0]"];
        spec.monitors = entries.map(str::to_owned).to_vec();
        spec.check().unwrap();
        let argument = format!("--mon-host={}", entries.join(","));
        assert!(spec.arguments(&Verb::Map("/dev/nbd0")).contains(&argument));
    }

    #[test]
    fn names_that_rbd_nbd_would_misread_are_refused() {
        let good = || spec("v", "p", "i");
        good().check().unwrap();
        let refused = |change: fn(&mut Spec)| {
            let mut spec = good();
            change(&mut spec);
            spec.check().unwrap_err()
        };
        refused(|spec| spec.volume_id = "a\nb".to_owned());
        refused(|spec| spec.volume_id.clear());
        refused(|spec| spec.image.pool = "-x".to_owned());
        refused(|spec| spec.image.name = "a@b".to_owned());
        refused(|spec| spec.image.namespace = "a/b".to_owned());
        refused(|spec| spec.image.snapshot = Some(String::new()));
        refused(|spec| spec.monitors.clear());
        refused(|spec| spec.monitors = vec!["a b".to_owned()]);
        refused(|spec| spec.user = "-x".to_owned());
    }
}
