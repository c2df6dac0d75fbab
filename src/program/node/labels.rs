//! The labels of this Kubernetes node, from a file: the agent has no access to the API.

use std::{collections::BTreeMap, path::Path};

use serde::Deserialize;

use crate::csi::identity::Segment;

/// The Node object, as far as it is read.
#[derive(Deserialize)]
struct KubernetesNode {
    metadata: NodeMetadata,
}

#[derive(Deserialize)]
struct NodeMetadata {
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

/// Reads `KEY="VALUE"` lines, as the downward API writes labels; a value may lack the quotes.
/// Or the Node object in JSON, as the API of Kubernetes answers it.
pub fn read(path: &Path) -> Result<BTreeMap<String, String>, String> {
    let of_file = |why: &dyn std::fmt::Display| format!("--node-labels {}: {why}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| of_file(&error))?;
    if text.starts_with('{') {
        let node: Result<KubernetesNode, _> = serde_json::from_str(&text);
        return Ok(node.map_err(|error| of_file(&error))?.metadata.labels);
    }
    let lines = text.lines().filter(|line| !line.is_empty());
    let label = |line: &str| {
        let (key, value) = line.split_once('=')?;
        // The value of a label has no character that is escaped.
        let bare = value
            .strip_prefix('"')
            .and_then(|value| value.strip_suffix('"'));
        Some((key.to_owned(), bare.unwrap_or(value).to_owned()))
    };
    lines
        .map(|line| label(line).ok_or_else(|| of_file(&format!("{line:?} is not KEY=\"VALUE\""))))
        .collect()
}

/// The topology segments of these labels, all of which the node must have: it would be taken
/// for another topology.
pub fn segments(
    labels: &BTreeMap<String, String>,
    names: &[String],
) -> Result<Vec<Segment>, String> {
    let segment = |name: &String| {
        let of_label = |why: &str| format!("--domain-labels {name}: {why}");
        let value = labels.get(name);
        let value = value.ok_or_else(|| of_label("this node has no such label"))?;
        let key = name.rsplit('/').next().unwrap_or_default();
        let parsed = format!("{key}={value}").parse();
        parsed.map_err(|why: String| of_label(&why))
    };
    names.iter().map(segment).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<BTreeMap<String, String>, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        read(file.path())
    }

    #[test]
    fn labels_become_segments() {
        let text = "topology.kubernetes.io/zone=\"a\"\nrack=r_1.x\nempty=\"\"\n";
        let labels = read_text(text).unwrap();
        assert_eq!(labels["rack"], "r_1.x");
        let names =
            |names: &[&str]| -> Vec<String> { names.iter().map(|&name| name.to_owned()).collect() };
        let made = segments(&labels, &names(&["topology.kubernetes.io/zone", "rack"]));
        let expected = ["zone=a", "rack=r_1.x"].map(|one| one.parse().unwrap());
        assert_eq!(made.unwrap(), expected);
        for (name, why) in [
            ("kubernetes.io/zone", "no such label"),
            ("empty", "no label"),
        ] {
            let refused = segments(&labels, &names(&[name])).unwrap_err();
            assert!(refused.contains(name) && refused.contains(why), "{refused}");
        }
        let node = r#"{"kind": "Node", "metadata": {"name": "n", "labels": {"rack": "r_1.x"}}}"#;
        assert_eq!(read_text(node).unwrap()["rack"], "r_1.x");
        let bare = read_text(r#"{"metadata": {"name": "n"}}"#).unwrap();
        assert!(bare.is_empty());
        let status = read_text(r#"{"kind": "Status", "code": 403}"#).unwrap_err();
        assert!(status.contains("metadata"), "{status}");
        let refused = read_text("zone: a\n").unwrap_err();
        assert!(refused.contains("zone: a"), "{refused}");
        let missing = read(Path::new("/nonexistent/labels")).unwrap_err();
        assert!(missing.contains("/nonexistent/labels"), "{missing}");
    }
}
