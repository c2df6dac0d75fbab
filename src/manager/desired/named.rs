//! Files that name a volume as the controller knows it. uringctl completes them: the agent
//! takes only files with a handle and a source, so it mounts without a controller.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{BadDesired, Desired, DesiredFile, VolumeTable, parse_as};

/// A file as an operator writes it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "DesiredFile")]
pub enum VolumeFile {
    /// With its source.
    Complete(Desired),
    /// With the name of its volume.
    Named(NamedFile),
}

/// A file whose handle and source the controller knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedFile {
    pub volume: VolumeTable,
    /// Without handle and source.
    pub desired: Desired,
}

impl NamedFile {
    /// The file with a source like that of the volume, while there is none yet: to be checked,
    /// not to be written.
    pub fn before_its_volume(&self) -> Desired {
        let parameters = self.volume.parameters.iter().flatten();
        let of_server = parameters
            .filter(|(key, _)| {
                ["server", "share"]
                    .iter()
                    .any(|it| key.eq_ignore_ascii_case(it))
            })
            .map(|(key, value)| (key.clone(), value.clone()));
        let mut source: BTreeMap<_, _> = of_server.collect();
        if source.is_empty() {
            let image = [("backend", "loop"), ("pool", "none"), ("image", "none.img")];
            source.extend(image.map(|(key, value)| (key.to_owned(), value.to_owned())));
        }
        Desired {
            source,
            ..self.desired.clone()
        }
    }

    /// The file of the volume with this handle and volume context.
    pub fn complete(self, handle: String, source: BTreeMap<String, String>) -> Desired {
        Desired {
            handle: Some(handle),
            source,
            ..self.desired
        }
    }
}

impl TryFrom<DesiredFile> for VolumeFile {
    type Error = String;

    fn try_from(mut file: DesiredFile) -> Result<Self, String> {
        let Some(volume) = file.volume.take() else {
            return file.try_into().map(Self::Complete);
        };
        if file.source.is_some() {
            return Err(
                "has both [source] and [volume]; the controller knows the source".to_owned(),
            );
        }
        if file.handle.is_some() {
            return Err("handle: the controller gives its volumes their handles".to_owned());
        }
        if volume.parameters.is_some() && file.size.is_none() {
            return Err("size: a volume that may have to be created needs one".to_owned());
        }
        file.source = Some(BTreeMap::new());
        let desired = file.try_into()?;
        Ok(Self::Named(NamedFile { volume, desired }))
    }
}

/// Reads a file's text. `name` is the file's name without `.toml`.
pub fn parse(name: &str, text: &str) -> Result<VolumeFile, BadDesired> {
    parse_as(name, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMED: &str = "size = '1Gi'\n\
        [volume]\nname = 'data-1'\nparameters.pool = 'fast'\n\
        [mount]\npath = '/srv/data'\n";

    #[test]
    fn a_named_volume_gets_the_controllers_handle_and_source() {
        let VolumeFile::Named(file) = parse("data", NAMED).unwrap() else {
            panic!("it is complete");
        };
        assert_eq!(file.volume.name, "data-1");
        assert_eq!(file.volume.parameters.clone().unwrap()["pool"], "fast");
        let before = file.before_its_volume();
        assert_eq!((&*before.source["backend"], before.handle), ("loop", None));
        let of_server = NAMED.replace(".pool = 'fast'", " = { server = 'srv', Share = '/x' }");
        let VolumeFile::Named(of_server) = parse("data", &of_server).unwrap() else {
            panic!("it is complete");
        };
        let keys = of_server.before_its_volume().source.into_keys();
        assert_eq!(keys.collect::<Vec<_>>(), ["Share", "server"]);
        let source: BTreeMap<_, _> = [("backend".to_owned(), "loop".to_owned())].into();
        let complete = file.complete("id-1".to_owned(), source.clone());
        assert_eq!(complete.handle("data"), "id-1");
        let text = toml::to_string(&complete).unwrap();
        assert_eq!(super::super::parse("data", &text), Ok(complete.clone()));
        assert_eq!(parse("data", &text), Ok(VolumeFile::Complete(complete)));
        let error = super::super::parse("data", NAMED).unwrap_err().to_string();
        assert!(error.contains("uringctl apply"), "{error}");
    }

    #[test]
    fn a_named_volume_has_nothing_that_the_controller_knows() {
        for (from, to, words) in [
            ("[mount]", "[source]\n[mount]", "both [source]"),
            ("size = '1Gi'", "size = '1Gi'\nhandle = 'x'", "handle: "),
            ("size = '1Gi'\n", "", "size: "),
            ("name = 'data-1'\n", "", "name"),
            ("parameters.pool", "pool", "pool"),
        ] {
            let error = parse("data", &NAMED.replace(from, to)).unwrap_err();
            let error = error.to_string();
            assert!(error.contains(words), "{to}: {error}");
        }
    }
}
