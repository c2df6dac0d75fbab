use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

fn write(dir: &TempDir, text: &str) -> PathBuf {
    // A new file each time, as a ConfigMap is mounted.
    let (draft, path) = (dir.path().join("draft"), dir.path().join("config.json"));
    fs::write(&draft, text).unwrap();
    fs::rename(&draft, &path).unwrap();
    path
}

#[test]
fn a_file_is_read_and_read_again_when_it_changes() {
    let dir = TempDir::new().unwrap();
    let path = write(&dir, r#"[{"clusterID": "a", "monitors": ["h:6789"]}]"#);
    let clusters = Clusters::new(&path);
    assert_eq!(clusters.get("a").unwrap().monitors, ["h:6789"]);
    let error = clusters.get("b").unwrap_err().to_string();
    assert!(
        error.contains("config.json has no cluster \"b\""),
        "{error}"
    );
    write(&dir, r#"[{"clusterID": "b", "monitors": ["i:6789", "j"]}]"#);
    assert_eq!(clusters.get("b").unwrap().monitors, ["i:6789", "j"]);
    assert!(clusters.get("a").is_err());
    write(&dir, "[");
    assert!(matches!(
        clusters.get("b"),
        Err(ConfigError::Malformed { .. })
    ));
    fs::remove_file(&path).unwrap();
    assert!(matches!(
        clusters.get("b"),
        Err(ConfigError::Unreadable { .. })
    ));
}

#[test]
fn all_that_concerns_rbd_is_read() {
    let dir = TempDir::new().unwrap();
    let text = r#"[
        {"clusterID": "full", "monitors": ["h"], "cephFS": {"subvolumeGroup": "g"},
         "rbd": {"netNamespaceFilePath": "/run/netns/a", "radosNamespace": "ns", "mirrorDaemonCount": 2},
         "readAffinity": {"enabled": true, "crushLocationLabels": ["zone"]}},
        {"clusterID": "older", "monitors": ["h"], "radosNamespace": "top", "rbd": null},
        {"clusterID": "none", "monitors": null}]"#;
    let clusters = Clusters::new(write(&dir, text));
    let full = ClusterConfig {
        cluster_id: "full".into(),
        monitors: vec!["h".into()],
        rados_namespace: Some("ns".into()),
        net_namespace_file: Some("/run/netns/a".into()),
        read_affinity: ReadAffinity {
            enabled: true,
            crush_location_labels: vec!["zone".to_owned()],
        },
    };
    assert_eq!(clusters.get("full").unwrap(), full);
    let older = clusters.get("older").unwrap();
    assert_eq!(older.rados_namespace.as_deref(), Some("top"));
    assert_eq!(older.net_namespace_file, None);
    let error = clusters.get("none").unwrap_err().to_string();
    assert!(
        error.contains("no monitors for the cluster \"none\""),
        "{error}"
    );
}

#[test]
fn cluster_mappings_apply_in_both_directions() {
    let dir = TempDir::new().unwrap();
    let mappings = Mappings::new(dir.path().join("config.json"));
    assert_eq!(mappings.of("site1", 1).unwrap(), []);
    let text = r#"[{"clusterIDMapping": {"site1": "site2"}, "RBDPoolIDMapping": [{"1": "2", "11": "12"}]},
                   {"clusterIDMapping": {"site3": "site2"}, "RBDPoolIDMapping": [{"5": "2"}]}]"#;
    write(&dir, text);
    assert_eq!(mappings.of("site1", 1).unwrap(), [("site2".to_owned(), 2)]);
    let both = [("site1".to_owned(), 1), ("site3".to_owned(), 5)];
    assert_eq!(mappings.of("site2", 2).unwrap(), both);
    assert_eq!(mappings.of("site2", 3).unwrap(), []);
}

#[test]
fn keys_have_any_case_as_ceph_csi_reads_them() {
    let dir = TempDir::new().unwrap();
    let mappings = Mappings::new(dir.path().join("config.json"));
    for (clusters, pools) in [
        // Rook's, and ceph-csi-operator's.
        ("ClusterIDMapping", "RBDPoolIDMapping"),
        ("clusterIdMapping", "RBDPoolIDMapping"),
        ("clusteridmapping", "rbdPoolIDMapping"),
    ] {
        let text = format!(r#"[{{"{clusters}": {{"Rook": "rook"}}, "{pools}": [{{"3": "4"}}]}}]"#);
        write(&dir, &text);
        assert_eq!(mappings.of("Rook", 3).unwrap(), [("rook".to_owned(), 4)]);
        // Ids are letter for letter.
        assert_eq!(mappings.of("ROOK", 3).unwrap(), []);
    }
    let text = r#"[{"ClusterId": "a", "MONITORS": ["h"], "RBD": {"RadosNamespace": "ns"},
                    "ReadAffinity": {"Enabled": true, "crushlocationLabels": ["zone"]}}]"#;
    let a = Clusters::new(write(&dir, text)).get("a").unwrap();
    assert_eq!(a.rados_namespace.as_deref(), Some("ns"));
    assert!(a.read_affinity.enabled);
    assert_eq!(a.read_affinity.crush_location_labels, ["zone"]);
}

#[test]
fn a_mapping_without_clusters_is_refused_by_its_number() {
    let dir = TempDir::new().unwrap();
    let mappings = Mappings::new(dir.path().join("config.json"));
    for entry in [
        r#"{"RBDPoolIDMapping": [{"1": "2"}]}"#,
        r#"{"clusterIDMapping": null}"#,
        "null",
    ] {
        write(&dir, &format!(r#"[{{"clusterIDMapping": {{}}}}, {entry}]"#));
        let error = mappings.of("a", 1).unwrap_err().to_string();
        assert!(error.starts_with("entry 2 of "), "{error}");
        assert!(
            error.contains("config.json has no clusterIDMapping"),
            "{error}"
        );
    }
}

proptest! {
    #[test]
    fn any_names_are_read_back(ids in prop::collection::vec("\\PC{0,12}", 0..6), monitor in "\\PC{1,20}") {
        let dir = TempDir::new().unwrap();
        let entries = ids.iter().enumerate().map(|(nr, id)| {
            serde_json::json!({"clusterID": id, "monitors": [monitor, nr.to_string()]})
        });
        let text = entries.collect::<serde_json::Value>().to_string();
        let clusters = Clusters::new(write(&dir, &text));
        for id in &ids {
            let first = ids.iter().position(|other| other == id).unwrap();
            prop_assert_eq!(&clusters.get(id).unwrap().monitors, &[monitor.clone(), first.to_string()]);
        }
    }

    #[test]
    fn any_text_is_read_or_refused(text in "[\\[\\]{}\":,a-zA-Z0-9 ]{0,60}") {
        let dir = TempDir::new().unwrap();
        let _ = Clusters::new(write(&dir, &text)).all();
        let _ = Mappings::new(dir.path().join("config.json")).of("a", 1);
    }
}
