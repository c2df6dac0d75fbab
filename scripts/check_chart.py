#!/usr/bin/env python3
"""Checks that the Helm chart makes the objects of the Kustomize manifests.

deploy/*/ is the source: it has the reasons, and check_deploy.py checks it. For each file of
deploy/chart/examples, `helm template` must give the same objects as the overlay that it
names, in any order. Values that no overlay has are checked by check_deploy.py's rules. The
values that the chart refuses are listed here, too.

Helm is the library of helm-python-sdk (scripts/requirements.txt).
"""

import re
import shutil
import tempfile
from pathlib import Path

import helm_python
import yaml

from check_deploy import check
from manifests import DEPLOY, by_name, compare, kustomize, objects, problem, report
from pod_rules import check_ports

CHART = DEPLOY / "chart"
RELEASE = {"name": "uring-csi", "namespace": "uring-csi"}
# The overlay and its components that each example equals.
EXAMPLES = {
    "ceph": ("examples/ceph-overlay", []),
    "classes": ("examples/classes-overlay", []),
    "csi-addons": ("ceph", ["network-policy", "csi-addons"]),
    "inline": ("local-pools", ["inline", "snapshots", "pod-monitor"]),
    "local-pools": ("examples/overlay", []),
    "nbd": ("examples/nbd-overlay", []),
    "nfs": ("examples/nfs-overlay", []),
    "nfs-inline": ("examples/nfs-overlay", ["nfs-inline"]),
    "node-labels": ("ceph", ["node-labels"]),
    "node-labels-api": ("ceph", ["node-labels-api"]),
    "openshift": ("ceph", ["openshift", "rbd-nbd"]),
    "priority-quota": ("local-pools", ["priority-quota"]),
    "rbd-nbd": ("ceph", ["rbd-nbd", "snapshots", "pod-monitor", "network-policy"]),
    "rook": ("examples/rook-overlay", []),
    "shared-pool": ("base", ["snapshots", "pod-monitor", "network-policy"]),
    "takeover": ("examples/takeover-overlay", []),
    "vault": ("examples/vault-overlay", []),
}
SHARED = {"name": "default", "path": "/srv/uring-csi", "scope": "shared"}
LOCAL = SHARED | {"scope": "local"}
EXPORT = {"server": "nfs.example.com", "share": "/export"}
NFS = {"pools": [], "nfs": {"exports": [EXPORT]}}
NBD = {"pools": [SHARED], "nbd": {"enabled": True}}
CEPH = {"pools": [], "ceph": {"enabled": True}}
CEPH_CLASS = {"clusterID": "ceph", "pool": "rbd"}
NBD_CLASS = {"pool": "default", "backend": "nbd", "nbdServer": "10.20.0.1"}
# An additional container, volume and mount of it.
MORE_CONTAINERS = {
    "image": "registry.example.com/more:1",
    "resources": {"requests": {"cpu": "1m", "memory": "1Mi"}},
    "securityContext": {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    },
}
MORE_VOLUMES = {"name": "mapping", "configMap": {"name": "mapping"}}
MORE_MOUNTS = {"name": "mapping", "mountPath": "/etc/mapping"}
# Values that no overlay has.
OTHER = {
    "name": "other",
    "driverName": "other.example.com",
    "images": {"registry": "registry.example.com/csi", "tag": "9", "pullPolicy": "Always"},
    "pools": [LOCAL | {"path": "/mnt/a", "mounted": True}, LOCAL | {"name": "b"}],
    "snapshots": {"enabled": True, "classes": []},
    "storageClasses": [
        {
            "name": "other",
            "mountOptions": ["nosuid"],
            "parameters": {"pool": "b"},
        }
    ],
    "node": {
        "kubeletDir": "/var/lib/k0s/kubelet",
        "topology": ["zone=a"],
        "maxVolumes": 100,
        "allowPaths": ["/mnt/c", "/mnt/d"],
        "volumesDir": "/etc/uring-csi/volumes",
        "config": {
            "block-lock": True,
            "max-waiting": 1000000,
            "volume-mount-group": True,
            "alpha-capabilities": False,
        },
        "extraArgs": ["--max-mkfs=2"],
        "extraContainers": [MORE_CONTAINERS | {"name": "more"}],
        "extraVolumes": [MORE_VOLUMES],
        "extraVolumeMounts": [MORE_MOUNTS],
    },
    "controller": {
        "image": {"digest": f"sha256:{'0' * 64}"},
        "config": {"max-copies": 2},
        "extraContainers": [MORE_CONTAINERS | {"name": "even-more"}],
    },
    "sidecars": {"resizer": {"enabled": False}},
    "log": {"level": "debug"},
}
# Everything that one release can have beside another backend.
BOTH = {
    "pools": [SHARED],
    "nbd": {"enabled": True, "nodeSelector": {"storage": "yes"}},
    "ceph": {"enabled": True, "instanceId": "a", "fenceAfter": 60, "rbdNbd": {"enabled": True}},
    "storageClasses": [
        {"name": "ceph", "parameters": CEPH_CLASS | {"mounter": "rbd-nbd"}},
        {"name": "nbd", "parameters": NBD_CLASS},
    ],
    "csiAddons": {"enabled": True},
    "openshift": {"enabled": True},
    # So many that a template prints them as 1e+07.
    "priorityQuota": {"enabled": True, "pods": 10000000},
    "snapshots": {
        "enabled": True,
        "groupClasses": [{"name": "uring-csi", "parameters": CEPH_CLASS}],
    },
    "attributesClasses": [{"name": "slow", "parameters": {"rbd_qos_iops_limit": "100"}}],
    "metrics": {"nodeAddress": "[$(HOST_IP)]", "controllerAddress": "[::]"},
    "node": {
        "crushLocation": "zone:a",
        "nodeSelector": {"disk": "yes"},
        "kubeletDir": "/var/lib/k0s/kubelet",
    },
    "controller": {
        "config": {"nfs-quota": "off", "cluster-mapping": "/etc/mapping/cluster-mapping.json"},
        "extraContainers": [MORE_CONTAINERS | {"name": "more"}],
        "extraVolumes": [MORE_VOLUMES],
        "extraVolumeMounts": [MORE_MOUNTS],
    },
    "holder": {"config": {"rbd-nbd": "rbd-nbd-2"}},
}


def classed(values, **parameters):
    """With one class of these parameters."""
    return values | {"storageClasses": [{"name": "a", "parameters": parameters}]}


# Classes that the controller accepts as well, though they are spelled in another way.
ACCEPTED = [
    classed(NFS, SERVER="[NFS.example.com]", Share="/export/"),
    classed(NFS, server="nfs.example.com", share="/export", backend="nfs"),
    classed({"pools": [LOCAL]}),
    classed({"pools": [SHARED]}, backend="nbd", nbdServer="elsewhere"),
    classed(CEPH, clusterID="ceph", topologyConstrainedPools="[]"),
]
# Values that contradict each other or the schema, and a word of the error.
REFUSED = [
    (NFS, "no server and share"),
    (classed(NFS, server="nfs.example.com"), "no server and share"),
    (classed(NFS, Server="other", share="/export"), "none of nfs.exports"),
    (classed(NFS, **EXPORT, **{"csi.storage.k8s.io/fstype": "ext4"}), "not that of an NFS"),
    (classed({}, **EXPORT), "without nfs.exports"),
    (NBD, "backend nbd and nbdServer"),
    (classed(NBD, backend="nbd"), "needs nbdServer"),
    (classed({}, **NBD_CLASS), "needs a shared pool"),
    (classed({}, backend="iscsi"), "no backend iscsi"),
    (CEPH, "no clusterID"),
    (classed(CEPH, backend="rbd", pool="rbd"), "without a clusterID"),
    (classed(CEPH, clusterID="ceph"), "neither pool nor"),
    (classed(CEPH, **CEPH_CLASS, mounter="rbd-nbd"), "without ceph.rbdNbd.enabled"),
    (
        classed(
            {"pools": [], "ceph": {"enabled": True, "clusters": [{"clusterID": "b", "monitors": []}]}},
            **CEPH_CLASS,
        ),
        "none of ceph.clusters",
    ),
    (classed({}, **CEPH_CLASS), "without ceph.enabled"),
    (
        {"snapshots": {"enabled": True, "classes": [{"name": "a", "parameters": CEPH_CLASS}]}},
        "without ceph.enabled",
    ),
    ({"pools": [LOCAL | {"name": "fast"}]}, "none of pools"),
    (classed({"pools": [LOCAL, LOCAL | {"name": "b", "path": "/srv/b"}]}), "names no pool"),
    ({"pools": [LOCAL, LOCAL]}, "two have the name"),
    ({"pools": [LOCAL, LOCAL | {"name": "b"}]}, "two have the path"),
    ({"pools": [LOCAL], "controller": {"networkPolicy": {"enabled": True}}}, "no policy restricts"),
    ({"ports": {"health": 9809}}, "ports: health and metrics"),
    ({"storageClasses": [{"name": "a"}, {"name": "a"}]}, "storageClasses: two have the name"),
    ({"csiAddons": {"enabled": True}}, "one sidecar of a pod"),
    ({"node": {"config": {"max-mkf": 4}}}, "additional properties"),
    ({"node": {"config": {"max-mkfs": 0}}}, "minimum"),
    ({"controller": {"config": {"max-mkfs": 4}}}, "additional properties"),
    ({"holder": {"config": {"max-mkfs": 4}}}, "additional properties"),
    ({"snapshots": {"groupClasses": [{"name": "a"}]}}, "without snapshots.enabled"),
    (
        {
            "storageClasses": [{"name": "a", "allowVolumeExpansion": True}],
            "sidecars": {"resizer": {"enabled": False}},
        },
        "without sidecars.resizer.enabled",
    ),
    (
        classed(CEPH, **CEPH_CLASS)
        | {
            "attributesClasses": [{"name": "a", "parameters": {}}],
            "sidecars": {"resizer": {"enabled": False}},
        },
        "without sidecars.resizer.enabled",
    ),
    ({"priorityQuota": {"pods": 0}}, "minimum"),
    ({"pools": []}, "no place for volumes"),
    ({"nfs": {"exports": [EXPORT]}}, "a release of their own"),
    ({"pools": [], "nfs": {"exports": [EXPORT | {"share": "relative"}]}}, "pattern"),
    ({"nfs": {"inline": [EXPORT]}}, "with nfs.exports"),
    ({"pools": [], "nfs": {"exports": [EXPORT], "inline": [EXPORT | {"share": "/"}]}}, "directories of claims"),
    (
        {
            "pools": [],
            "nfs": {"exports": [EXPORT | {"address": "10.0.0.7"}], "inline": [EXPORT | {"server": "10.0.0.7"}]},
        },
        "directories of claims",
    ),
    ({"pools": [LOCAL, SHARED | {"name": "b", "path": "/srv/b"}]}, "all are local or all are shared"),
    ({"pools": [LOCAL], "ceph": {"enabled": True}}, "two releases"),
    ({"pools": [LOCAL], "nbd": {"enabled": True}}, "one shared pool"),
    ({"pools": [LOCAL], "node": {"labelsFromApi": {"enabled": True}}}, "domainLabels"),
    ({"pools": [SHARED], "inline": {"enabled": True}}, "inline volumes need local pools"),
    ({"pools": [LOCAL | {"path": "/pool", "mounted": True}]}, "must not be /"),
    ({"ceph": {"rbdNbd": {"enabled": True}}}, "without ceph.enabled"),
    ({"ceph": {"vault": {"audience": "https://kubernetes.default.svc"}}}, "audience"),
    ({"ceph": {"kmsSecrets": [{"namespace": "a/b", "name": "c", "secret": "d"}]}}, "pattern"),
    ({"ceph": {"vault": {"enabled": True}}}, "without ceph.enabled"),
    ({"attributesClasses": [{"name": "a", "parameters": {}}]}, "only volumes in Ceph"),
    ({"pools": [{"name": "default", "path": "relative", "scope": "local"}]}, "pattern"),
    ({"pool": [LOCAL]}, "additional properties"),
    ({"node": {"tolerations": "none"}}, "array"),
]


def render(chart, values):
    rendered = chart.render(values, **RELEASE)
    return [
        doc
        for path, text in rendered.items()
        if path.endswith(".yaml")
        for doc in objects(text)
    ]


def needed_by(docs):
    """The Secrets and ConfigMaps that pods wait for, and that the chart does not make."""
    made = {(doc["kind"], doc["metadata"]["name"]) for doc in docs}
    needed = set()
    for doc in docs:
        for volume in doc.get("spec", {}).get("template", {}).get("spec", {}).get("volumes", []):
            sources = [volume, *volume.get("projected", {}).get("sources", [])]
            for source in sources:
                for field, kind, key in (("secret", "Secret", "secretName"), ("configMap", "ConfigMap", "name")):
                    if field in source and not source[field].get("optional"):
                        needed.add((kind, source[field][key]))
    # Each namespace has this one.
    return needed - made - {("ConfigMap", "kube-root-ca.crt")}


def as_text(needs):
    return {name: sorted(map(" ".join, of)) for name, of in needs.items()}


def with_set(values, settings):
    """As Helm's `--set` has it, for what the documents set."""
    for name, value in settings:
        *path, last = name.split(".")
        at = values
        for key in path:
            at = at.setdefault(key, {})
        at[last] = yaml.safe_load(value)
    return values


def check_documented(chart, files):
    """docs/chart.md tells what each example needs first; and its commands name the registry, and
    leave a namespace alone that exists because of that."""
    text = (DEPLOY.parent / "docs/chart.md").read_text()
    documented = {}
    for names, needs in re.findall(r"^\| (`[\w-]+\.yaml`.*?) \| (.*) \|$", text, re.MULTILINE):
        for name in re.findall(r"`([\w-]+)\.yaml`", names):
            documented[name] = set(re.findall(r"(Secret|ConfigMap) `([\w-]+)`", needs))
    needed = {
        name: needed_by(render(chart, yaml.safe_load((CHART / f"examples/{name}.yaml").read_text())))
        for name in files
    }
    compare("docs/chart.md", as_text(documented), as_text(needed), ("the table", "the chart"))
    commands = re.findall(r"^helm install (?:.*\\\n)*.*", text, re.MULTILINE)
    for command in commands:
        settings = re.findall(r"--set (\S+?)=(\S+)", command)
        for name in re.findall(r"--values deploy/chart/examples/([\w-]+)\.yaml", command):
            values = yaml.safe_load((CHART / f"examples/{name}.yaml").read_text())
            docs = render(chart, with_set(values, settings))
            for image in re.findall(r"image: (\S+)", yaml.safe_dump_all(docs, width=1000)):
                if not re.match(r"REGISTRY/|[\w-]+\.[\w.-]+/", image) or "registry.example" in image:
                    problem("docs/chart.md", f"by the command for {name}.yaml {image} is nowhere")
            if needed[name] and any(doc["kind"] == "Namespace" for doc in docs):
                problem("docs/chart.md", f"the command for {name}.yaml creates a namespace that exists")


def check_example(chart, name):
    values = yaml.safe_load((CHART / f"examples/{name}.yaml").read_text())
    overlay, components = EXAMPLES[name]
    chart.validate_schema(values)
    made = by_name(render(chart, values))
    wanted = by_name(kustomize([overlay], components))
    compare(f"chart/examples/{name}.yaml", made, wanted, ("the chart", "the overlay"))


def check_settings(where, docs, name, values, more):
    """The container of this name has the flags and mounts of the values, and its pod these
    further containers."""
    for doc in docs:
        spec = doc.get("spec", {}).get("template", {}).get("spec", {})
        containers = {container["name"]: container for container in spec.get("containers", [])}
        if name in containers:
            break
    container = containers[name]
    flags = {key.lstrip("-") for key in container["args"]}
    for flag, value in values["config"].items():
        given = flag if value is True else f"{flag}={value}"
        if (given in flags) is (value is False):
            problem(where, f"{name} and its config differ in {flag}")
    for lost in {*values.get("extraArgs", [])} - {*container["args"]}:
        problem(where, f"{name} has no {lost}")
    for mount in values.get("extraVolumeMounts", []):
        if mount not in container["volumeMounts"]:
            problem(where, f"{name} does not mount {mount}")
    for lost in {*more} - {*containers}:
        problem(where, f"beside {name} there is no container {lost}")


def check_image(chart):
    """The image that reads labels is another's, with a digest."""
    image = f"registry.example.com/curl@sha256:{'0' * 64}"
    labels = {"domainLabels": ["rack"], "labelsFromApi": {"enabled": True, "image": image}}
    docs = render(chart, classed(CEPH, **CEPH_CLASS) | {"node": labels})
    check("chart, labels by another image", docs)
    if image not in yaml.safe_dump_all(docs, width=1000):
        problem("chart", f"node.labelsFromApi.image is not {image}")


def affinity(key):
    """To nodes with this label, as Kubernetes has it."""
    terms = [{"matchExpressions": [{"key": key, "operator": "Exists"}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"nodeAffinity": required}


def check_placement(chart):
    """Each pod is where its values say, and where it must be beside another."""
    spread = {"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}
    values = classed(NBD | {"ceph": {"enabled": True, "rbdNbd": {"enabled": True}}}, **NBD_CLASS) | {
        "node": {"nodeSelector": {"disk": "yes"}, "affinity": affinity("node")},
    }
    own = {"affinity": affinity("own"), "nodeSelector": {"rbd": "yes"}}
    storage = values | {"nbd": values["nbd"] | {"affinity": affinity("storage")}}
    for where, given, name, field, wanted in (
        ("as the agent", values, "holder", "affinity", affinity("node")),
        ("as the agent", values, "holder", "nodeSelector", {"kubernetes.io/os": "linux", "disk": "yes"}),
        ("its own", values | {"holder": own}, "holder", "affinity", own["affinity"]),
        ("its own", values | {"holder": own}, "holder", "nodeSelector", {"kubernetes.io/os": "linux", "rbd": "yes"}),
        ("NBD", values, "controller", "affinity", None),
        ("NBD", values, "controller", "topologySpreadConstraints", None),
        ("NBD", storage, "controller", "affinity", affinity("storage")),
        ("NBD", storage, "nbd-server", "affinity", affinity("storage")),
        ("its own", {"pools": [SHARED], "controller": {"affinity": affinity("own")}}, "controller", "affinity", affinity("own")),
        (
            "its own",
            {"pools": [SHARED], "controller": {"topologySpreadConstraints": [spread]}},
            "controller",
            "topologySpreadConstraints",
            [spread],
        ),
    ):
        docs = render(chart, given)
        check("chart, placement", docs)
        (spec,) = (
            doc["spec"]["template"]["spec"]
            for doc in docs
            if doc["metadata"]["name"] == f"uring-csi-{name}" and "template" in doc.get("spec", {})
        )
        if spec.get(field) != wanted:
            problem(f"chart, {name}", f"{where}: {field} is {spec.get(field)}")


def check_monitoring(chart):
    """The chart's rules and dashboard are those of deploy/monitoring."""
    values = {"metrics": {"rules": {"enabled": True}, "dashboard": {"enabled": True}}}
    docs = render(chart, values)
    check("chart, rules and dashboard", docs)
    wanted = by_name(kustomize(["monitoring"]))
    # Those have the namespace of who applies them.
    for doc in docs:
        doc["metadata"].pop("namespace", None)
    made = {name: doc for name, doc in by_name(docs).items() if name in wanted}
    compare("chart, rules and dashboard", made, wanted, ("the chart", "deploy/monitoring"))
    values["metrics"]["rules"]["labels"] = {"release": "prometheus"}
    (rules,) = (doc for doc in render(chart, values) if doc["kind"] == "PrometheusRule")
    if rules["metadata"]["labels"].get("release") != "prometheus":
        problem("chart, rules", "have not the label of metrics.rules.labels")


def check_kms_key(chart):
    """Both agents read the key, or the whole ConfigMap."""
    at = "--kms-config=/etc/ceph-csi-encryption-kms-config"
    for key, flag in (("kms.json", f"{at}/kms.json"), ("", at)):
        docs = render(chart, classed({"pools": [], "ceph": {"enabled": True, "kmsConfigMapKey": key}}, **CEPH_CLASS))
        check("chart, another key of the KMS", docs)
        for doc in docs:
            if doc["kind"] in ("DaemonSet", "Deployment"):
                if flag not in doc["spec"]["template"]["spec"]["containers"][0]["args"]:
                    problem(f"chart, {doc['metadata']['name']}", f"has no {flag}")


def check_address(chart):
    """kubelet mounts an export from its address, and nodes from its server."""
    server, address = "nfs-server.default.svc.cluster.local", "10.96.0.7"
    export = {"server": server, "share": "/", "address": address}
    values = classed({"pools": [], "nfs": {"exports": [export]}}, server=server, share="/")
    docs = render(chart, values)
    check("chart, a server in the cluster", docs)
    (spec,) = (doc["spec"]["template"]["spec"] for doc in docs if doc["kind"] == "Deployment")
    if f"--nfs-export={server}:/=/share,mounted" not in spec["containers"][0]["args"]:
        problem("chart, a server in the cluster", "the controller does not know its name")
    if {"name": "share", "nfs": {"server": address, "path": "/"}} not in spec["volumes"]:
        problem("chart, a server in the cluster", "kubelet does not mount from its address")


def check_others(chart):
    check("chart", render(chart, {}))
    other, both = render(chart, OTHER), render(chart, BOTH)
    check("chart, other values", other, OTHER["name"])
    check_settings("chart, other values", other, "agent", OTHER["node"], ["more", "even-more"])
    check_settings("chart, other values", other, "controller", OTHER["controller"], [])
    if any(doc.get("allowVolumeExpansion") for doc in other):
        problem("chart, other values", "volumes grow without a resizer")
    check("chart, Ceph and a pool by NBD", both)
    check_settings("chart, Ceph", both, "controller", BOTH["controller"], ["more"])
    check_settings("chart, Ceph", both, "holder", BOTH["holder"], [])
    check_image(chart)
    check_placement(chart)
    check_kms_key(chart)
    check_address(chart)
    check_monitoring(chart)
    for values in ACCEPTED:
        render(chart, values)


def host_directories(docs):
    """Where the nodes' pods keep files of their own."""
    return {
        volume["hostPath"]["path"]
        for doc in docs
        if doc["kind"] == "DaemonSet"
        for volume in doc["spec"]["template"]["spec"]["volumes"]
        if volume.get("hostPath", {}).get("type") == "DirectoryOrCreate"
    } - {"/run/udev"}


def check_two_releases(chart):
    """The second driver's objects, files and ports differ from the first's."""
    values = yaml.safe_load((CHART / "examples/second-driver.yaml").read_text())
    first, second = render(chart, {"snapshots": {"enabled": True}}), render(chart, values)
    check("chart/examples/second-driver.yaml", second, values["name"])
    taken = {}
    for doc in first + second:
        if doc["kind"] == "DaemonSet":
            check_ports("chart, two releases", doc["spec"]["template"]["spec"], taken)
    shared = by_name(first).keys() & by_name(second).keys()
    shared |= host_directories(first) & host_directories(second)
    for name in shared:
        problem("chart, two releases", f"both have {name}")


def check_refusals(chart):
    for values, why in REFUSED:
        try:
            chart.validate_schema(values)
            chart.render(values, **RELEASE)
        except helm_python.HelmError as error:
            if why not in str(error):
                problem("chart", f"refuses {values} by another error: {error}")
        else:
            problem("chart", f"accepts {values}")


def check_chart(directory):
    for message in helm_python.lint(directory, strict=True)["messages"]:
        if message["severity"] > 1:
            problem("chart", message["error"])
    with helm_python.Chart.load(directory) as chart:
        files = {path.stem for path in (CHART / "examples").glob("*.yaml")}
        if files != {*EXAMPLES, "second-driver"}:
            problem("chart/examples", "the files and check_chart.py's table differ")
        check_documented(chart, files)
        for name in EXAMPLES:
            check_example(chart, name)
        check_others(chart)
        check_two_releases(chart)
        check_refusals(chart)


def main():
    with tempfile.TemporaryDirectory() as made:
        # With the files that its links name, as `helm package` makes it.
        check_chart(shutil.copytree(CHART, Path(made) / "uring-csi"))
    report(f"chart: {', '.join(EXAMPLES)} equal their overlays")


if __name__ == "__main__":
    main()
