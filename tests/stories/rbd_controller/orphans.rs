//! `uringctl orphans`, against a controller of a cluster and one that is silent.

use super::*;
use crate::operator::Operator;

const UUID: &str = "6e2b2d1c-3f0e-4b3e-9c66-0d3c6f0f8f6a";

#[test]
fn an_operator_lists_orphans_and_removes_one() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let mut setup = ceph.setup(sandbox);
        setup.args.extend(ceph.own_secret(sandbox));
        let controller = Controller::start_with(sandbox, setup).await;
        let operator = Operator::with_sockets(controller.socket(), controller.socket());
        let made = controller.create(ceph.claim("healthy", MIB)).await.unwrap();
        // A name has no age; an image that was made a moment ago is too young.
        let directory = ["setomapval", "csi.volumes.default", "csi.volume.left", UUID];
        ceph.rados(&directory);
        let young = format!("{}/csi-vol-{UUID}", ceph.pool);
        let orphans = || {
            let (code, out, err) = operator.run(&["orphans", "--json"]);
            assert!(code == 0 || err.contains("incomplete"), "{err}");
            let answer: serde_json::Value = serde_json::from_str(&out).expect("JSON");
            let all = answer["orphans"].as_array().expect("a list").clone();
            // Other stories have pools in the same cluster.
            let own = all.into_iter().filter(|one| one["pool"] == ceph.pool);
            own.collect::<Vec<_>>()
        };
        let listed = orphans();
        assert_eq!(listed.len(), 1, "{listed:?}");
        assert_eq!(
            (&listed[0]["kind"], &listed[0]["cluster_id"]),
            (&"name".into(), &CEPH.into())
        );
        assert!(listed[0]["kept_because"] == "" && listed[0]["age_seconds"].is_null());
        let path = listed[0]["path"].as_str().expect("a path");
        let (_, table, _) = operator.run(&["orphans"]);
        assert!(table.contains(path) && table.starts_with("KIND"), "{table}");

        let remove = |path: &str, yes: &[&str]| {
            let args = [&["orphans", "--remove", path], yes].concat();
            operator.run(&args)
        };
        let (code, _, err) = remove(path, &[]);
        assert!(code == 2 && err.contains("--yes"), "{code}: {err}");
        assert_eq!(orphans().len(), 1);
        ceph.cluster.rbd(&["create", "--size", "1M", &young]);
        let volume = format!("{}/{}", ceph.pool, made.volume_context["imageName"]);
        for none in [&young, &volume] {
            let (code, _, err) = remove(none, &["--yes"]);
            assert!(code == 5 && err.contains("not removed"), "{code}: {err}");
        }
        ceph.cluster.rbd(&["rm", &young]);
        let (code, out, err) = remove(path, &["--yes"]);
        assert!(code == 0 && out.contains("removed"), "{code}: {err}");
        let (code, out, err) = remove(path, &["--yes"]);
        assert!(
            code == 0 && out.contains("nothing has the name"),
            "{code}: {err}"
        );
        assert!(orphans().is_empty());
        controller.delete(&made.volume_id).await.unwrap();

        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = silent.local_addr().unwrap().to_string();
        let monitors = &ceph.cluster.monitors;
        ceph.configure(&[(CEPH, monitors), ("dead", std::slice::from_ref(&address))]);
        ceph.rados(&directory);
        let (code, out, err) = operator.run(&["orphans"]);
        assert!(code == 1 && err.contains("\"dead\""), "{code}: {err}");
        assert!(out.contains(path), "{out}");
    });
}
