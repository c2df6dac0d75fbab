//! What classes say, and what they may not.

use proptest::prelude::*;

use super::*;

fn parse(more: &[(&str, &str)]) -> Result<Class, ProvisionError> {
    let base = [("clusterID", "ceph"), ("pool", "rbd")];
    let all = base.iter().chain(more);
    let own = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    Class::parse(&all.map(own).collect())
}

#[test]
fn a_class_of_ceph_csi_is_understood() {
    let class = parse(&[
        ("imageFeatures", "layering,exclusive-lock"),
        ("dataPool", "ec"),
        ("objectSize", "8M"),
        ("stripeUnit", "65536"),
        ("stripeCount", "4"),
        ("volumeNamePrefix", "team-"),
        ("mapOptions", "krbd:ms_mode=prefer-crc;nbd:try-netlink"),
        ("csi.storage.k8s.io/fstype", "ext4"),
        ("csi.storage.k8s.io/pvc/namespace", "tenant"),
        ("csi.storage.k8s.io/provisioner-secret-name", "secret"),
    ])
    .unwrap();
    assert_eq!(class.options.object_size, Some(8 << 20));
    assert_eq!(class.options.striping, Some((65536, 4)));
    assert_eq!(class.owner, "tenant");
    let pools = class.pools(&AccessibilityRequirements::default()).unwrap();
    assert_eq!(
        (pools.journal.as_str(), pools.image.as_str()),
        ("rbd", "rbd")
    );
    let passed = class.context();
    assert_eq!(passed["imageFeatures"], "layering,exclusive-lock");
    assert!(passed.keys().all(|key| !key.starts_with("csi.")));
}

/// What the examples of ceph-csi, its Helm chart and Rook's have in their classes,
/// with comments taken for what they offer.
#[test]
fn classes_that_are_in_use_are_taken() {
    let rook = [
        ("imageFormat", "2"),
        (
            "imageFeatures",
            "layering,fast-diff,object-map,deep-flatten,exclusive-lock",
        ),
        ("mapOptions", "lock_on_read,queue_depth=1024"),
        ("unmapOptions", "force"),
        ("encrypted", "true"),
        ("encryptionKMSID", "a-kms"),
        ("dataPool", "ec-data-pool"),
        (
            "csi.storage.k8s.io/controller-modify-secret-name",
            "rook-csi-rbd-provisioner",
        ),
        (
            "csi.storage.k8s.io/node-publish-secret-name",
            "rook-csi-rbd-node",
        ),
        ("csi.storage.k8s.io/fstype", "ext4"),
    ];
    assert!(parse(&rook).unwrap().encryption.is_some());
    let ceph_csi = [
        (
            "imageFeatures",
            "layering,journaling,exclusive-lock,object-map,fast-diff",
        ),
        ("mounter", "rbd-nbd"),
        ("tryOtherMounters", "false"),
        ("mkfsOptions", "-m0 -Ediscard -i1024"),
        (
            "mapOptions",
            "krbd:lock_on_read,queue_depth=1024;nbd:try-netlink",
        ),
        ("unmapOptions", "krbd:force;nbd:force"),
        ("cephLogDir", "/var/log/ceph"),
        ("cephLogStrategy", "remove"),
        ("volumeNamePrefix", "foo-bar-"),
        ("encrypted", "true"),
        ("encryptionType", "block"),
        ("encryptionKMSID", "a-kms"),
        ("stripeUnit", "4096"),
        ("stripeCount", "8"),
        ("objectSize", "4194304"),
        // Of releases 3.3 to 3.5.
        ("thickProvision", "false"),
    ];
    assert!(parse(&ceph_csi).unwrap().encryption.is_some());
}

#[test]
fn an_unknown_parameter_is_passed_on() {
    let class = parse(&[("colour", "red")]).unwrap();
    assert_eq!(class.context()["colour"], "red");
}

#[test]
fn pools_of_parts_of_the_cluster_need_no_other() {
    let pools = r#"[{"poolName":"east","domainSegments":[{"domainLabel":"zone","value":"e"}]}]"#;
    let given = [("clusterID", "ceph"), ("topologyConstrainedPools", pools)];
    let class = Class::parse(&given.map(|(k, v)| (k.to_owned(), v.to_owned())).into()).unwrap();
    let zone = ("topology.rbd.csi.ceph.com/zone".to_owned(), "e".to_owned());
    let mut accessibility = AccessibilityRequirements::default();
    assert!(
        class
            .pools(&accessibility)
            .unwrap_err()
            .to_string()
            .contains("pool")
    );
    accessibility.requisite.push([zone].into());
    let chosen = class.pools(&accessibility).unwrap();
    assert_eq!((&*chosen.journal, &*chosen.image), ("east", "east"));
}

#[test]
fn invalid_parameters_are_named() {
    for (name, value, word) in [
        ("pool", "", "pool"),
        ("imageFeatures", "", "imageFeatures"),
        ("imageFeatures", "layering,colour", "colour"),
        ("imageFeatures", "object-map", "exclusive-lock"),
        ("imageFeatures", "exclusive-lock,journaling", "rbd-nbd"),
        ("imageFeatures", "data-pool", "data-pool"),
        ("objectSize", "4X", "objectSize"),
        ("objectSize", "5000", "power of two"),
        ("objectSize", "64M", "32M"),
        ("stripeCount", "4", "stripeUnit"),
        ("mounter", "fuse", "rbd-nbd"),
        ("integrityMode", "hmac-sha256", "integrityMode"),
        ("encryptionCipher", "aes-xts-plain64", "encryptionCipher"),
        ("topologyConstrainedPools", "{", "topologyConstrainedPools"),
        ("volumeNamePrefix", "", "volumeNamePrefix"),
        ("volumeNamePrefix", "team/", "volumeNamePrefix"),
        ("volumeNamePrefix", "team@", "volumeNamePrefix"),
        ("volumeNamePrefix", "a team", "volumeNamePrefix"),
        ("volumeNamePrefix", "a\u{a0}team", "volumeNamePrefix"),
        ("volumeNamePrefix", "team\n", "volumeNamePrefix"),
        ("volumeNamePrefix", "-team", "volumeNamePrefix"),
        ("encrypted", "perhaps", "encrypted"),
        ("imageFormat", "1", "imageFormat"),
        ("mapOptions", "secret=x", "secret"),
        ("mapOptions", "tcmu:a", "tcmu"),
        ("unmapOptions", "tcmu:a", "unmapOptions"),
        ("tryOtherMounters", "perhaps", "tryOtherMounters"),
        ("thickProvision", "true", "thickProvision"),
        ("thickProvision", "thin", "thickProvision"),
    ] {
        let error = parse(&[(name, value)]).unwrap_err().to_string();
        assert!(error.contains(word), "{name}={value}: {error}");
    }
    let of_nbd = ("mapOptions", "nbd:quiesce-hook=/bin/sh");
    // It is for nobody.
    parse(&[of_nbd]).unwrap();
    for nbd in [("mounter", "rbd-nbd"), ("tryOtherMounters", "1")] {
        let error = parse(&[nbd, of_nbd]).unwrap_err().to_string();
        assert!(error.contains("quiesce_hook"), "{error}");
    }
    let options = parse(&[("mkfsOptions", "-K -s size=4096")]).unwrap();
    options.check_mkfs(&["xfs"]).unwrap();
    options.check_mkfs(&[]).unwrap();
    let error = options.check_mkfs(&["xfs", "ext4"]).unwrap_err();
    assert!(error.to_string().contains("mkfsOptions"), "{error}");
    let none = Class::parse(&HashMap::new()).unwrap_err();
    assert!(none.to_string().contains("clusterID"));
}

proptest! {
    #[test]
    fn any_number_is_read_or_refused(text in "[0-9]{0,22}[KMGTiB]{0,3}|.{0,9}") {
        if let Ok(bytes) = number("objectSize", &text) {
            prop_assert!(bytes > 0);
        }
    }
}
