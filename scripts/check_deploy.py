#!/usr/bin/env python3
"""Checks that the manifests in deploy/ are consistent.

Builds each kustomization (by kubectl or kustomize), validates its objects by Kubernetes'
schemas, and custom resources by those of custom_resources.json, compares it with the same components in reverse order, and checks for errors that the
API server accepts and that only a failing pod would show: mounts of undefined volumes, mounts that would keep a volume busy, missing access
to the host, privileges beyond docs/security.md, secrets that no role may read, undefined
roles and accounts, roles that no sidecar needs, ports that collide or that nothing serves,
images without a tag, classes of another driver, unknown flags of the sidecars, and unknown
flags and variables of our programs (if they are built: BIN_DIR, by default target/debug).

Run it by target/python/bin/python, where `scripts/setup.sh lint` installs what it imports.
"""

import re

import yaml

from manifests import CUSTOM, DEPLOY, by_name, compare, kustomize, problem, report, schema_errors
from pod_rules import SIDECARS, check_pod, check_ports, check_restricted, served_ports

# Each with its components.
OVERLAYS = [
    ("base", []),
    ("base", ["snapshots", "pod-monitor", "network-policy"]),
    ("local-pools", []),
    ("local-pools", ["snapshots"]),
    ("local-pools", ["inline", "snapshots", "pod-monitor"]),
    ("local-pools", ["openshift", "priority-quota"]),
    ("nbd", []),
    ("nbd", ["snapshots"]),
    ("nbd", ["openshift", "priority-quota"]),
    ("nfs", []),
    ("nfs", ["snapshots"]),
    ("nfs", ["nfs-inline"]),
    ("ceph", []),
    ("ceph", ["snapshots"]),
    ("ceph", ["rbd-nbd", "snapshots", "pod-monitor", "network-policy"]),
    ("ceph", ["csi-addons"]),
    ("ceph", ["rbd-nbd", "network-policy", "csi-addons"]),
    ("nbd", ["csi-addons"]),
    ("nfs", ["csi-addons", "network-policy", "nfs-inline", "openshift", "snapshots"]),
    ("ceph", ["node-labels"]),
    ("ceph", ["node-labels-api"]),
    (
        "ceph",
        [
            "csi-addons",
            "network-policy",
            "node-labels-api",
            "openshift",
            "pod-monitor",
            "priority-quota",
            "rbd-nbd",
            "snapshots",
            "vault",
        ],
    ),
    ("examples/overlay", []),
    ("examples/nbd-overlay", []),
    ("examples/nfs-overlay", []),
    ("examples/ceph-overlay", []),
    ("examples/ceph-overlay", ["rbd-nbd"]),
    ("examples/classes-overlay", []),
    ("examples/vault-overlay", []),
    ("examples/takeover-overlay", []),
    ("examples/takeover-overlay", ["vault"]),
    ("examples/rook-overlay", []),
    ("examples/rook-overlay", ["rbd-nbd"]),
]


def check_secrets(where, parameters, docs):
    """Each sidecar reads the class's secret for its calls; kubelet reads the nodes'
    secrets."""
    readers = {
        doc["metadata"].get("namespace")
        for doc in docs
        if doc["kind"] == "Role" and any("secrets" in rule["resources"] for rule in doc["rules"])
    }
    for name, namespace in parameters.items():
        of = re.fullmatch(r"csi.storage.k8s.io/(.*)-secret-namespace", name)
        if of and not of[1].startswith("node-") and namespace not in readers:
            problem(where, f"no role may read the secrets in {namespace} for {of[1]}")


INLINE_VARIABLES = ("URING_CSI_INLINE_MAX_SIZE", "URING_CSI_NFS_INLINE")


def inline_allowed(driver):
    return "Ephemeral" in driver["spec"]["volumeLifecycleModes"]


def inline_made(docs):
    """Whether the node agents allow inline volumes."""
    return any(
        variable["name"] in INLINE_VARIABLES
        for doc in docs
        if doc["kind"] == "DaemonSet"
        for container in doc["spec"]["template"]["spec"]["containers"]
        for variable in container.get("env", [])
    )


def containers_of(spec):
    return spec.get("initContainers", []) + spec["containers"]


def check_roles(overlay, docs, prefix):
    """A sidecar's role is there where the sidecar is."""
    sidecars = {
        container["name"].removeprefix("csi-")
        for doc in docs
        if doc["kind"] in ("DaemonSet", "Deployment")
        for container in containers_of(doc["spec"]["template"]["spec"])
        if container["name"] in (*SIDECARS, "csi-addons", "node-labels")
    }
    roles = {
        doc["metadata"]["name"].removeprefix(f"{prefix}-")
        for doc in docs
        if doc["kind"] == "ClusterRole"
    }
    for name in roles ^ sidecars:
        problem(overlay, f"there is a role {name} without the sidecar, or the other way round")


def check_monitor(where, monitor, pods):
    """It scrapes each HTTP port that has a name."""
    named = {
        port["name"]
        for pod in pods
        for container in pod["spec"]["containers"]
        for port in container.get("ports", [])
        if port["containerPort"] in served_ports(container)
    }
    scraped = {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]}
    if named - scraped:
        problem(where, f"does not scrape the ports {sorted(named - scraped)}")


def check_driver(overlay, docs, pods):
    """Both agents have the CSIDriver's name; or, without a CSIDriver, one name."""
    names = {doc["metadata"]["name"] for doc in docs if doc["kind"] == "CSIDriver"}
    for pod in pods:
        for container in pod["spec"]["containers"]:
            if container["name"] in ("agent", "controller"):
                env = {v["name"]: v.get("value") for v in container.get("env", [])}
                names.add(env.get("URING_CSI_DRIVER_NAME", "block.uring-csi.dev"))
    if len(names) != 1:
        problem(overlay, f"its parts have different drivers: {sorted(names)}")


def check_disruptions(overlay, docs):
    budgets = [
        doc["spec"]["selector"]["matchLabels"]
        for doc in docs
        if doc["kind"] == "PodDisruptionBudget"
    ]
    replicated = [
        doc["spec"]["template"]["metadata"]["labels"]
        for doc in docs
        if doc["kind"] == "Deployment" and doc["spec"]["replicas"] > 1
    ]
    for labels in replicated:
        if not any(budget.items() <= labels.items() for budget in budgets):
            problem(overlay, f"no PodDisruptionBudget selects the pods {labels}")


# The classes that some clusters admit only in namespaces with a quota for them, and the pods
# that the largest cluster has of them: the node agent and the supervisor on each node.
CRITICAL = {"system-node-critical", "system-cluster-critical"}
MOST_PODS = 2 * 5000


def check_quota(where, quota, namespaces):
    """It admits the pods with critical classes, and limits none."""
    if quota["metadata"]["namespace"] not in namespaces:
        problem(where, "is in another namespace than the pods")
    (scope,) = quota["spec"]["scopeSelector"]["matchExpressions"]
    if (scope["scopeName"], scope["operator"]) != ("PriorityClass", "In"):
        problem(where, f"has the scope {scope['scopeName']} {scope['operator']}")
    if set(scope["values"]) != CRITICAL:
        problem(where, f"is for the classes {scope['values']}")
    hard = quota["spec"]["hard"]
    if hard.keys() != {"pods"} or not hard["pods"].isdigit() or int(hard["pods"]) <= MOST_PODS:
        problem(where, f"limits the pods: {hard}")


# Those with pods, in one variant or another.
PARTS = ("node", "controller", "holder", "nbd-server")


def check_constraints(where, binding, docs):
    """OpenShift's default constraints refuse each pod here: all choose their SELinux type."""
    bound = {(subject["namespace"], subject["name"]) for subject in binding["subjects"]}
    for doc in docs:
        if doc["kind"] in ("DaemonSet", "Deployment"):
            name = doc["spec"]["template"]["spec"]["serviceAccountName"]
            if (doc["metadata"]["namespace"], name) not in bound:
                problem(where, f"OpenShift would refuse the pods of {name}")


def check(overlay, docs, prefix="uring-csi"):
    """`prefix`: that of the objects' names."""
    names, accounts = {}, set()
    taken = {}
    pods = [d["spec"]["template"] for d in docs if d["kind"] in ("DaemonSet", "Deployment")]
    for doc in docs:
        meta = doc["metadata"]
        names.setdefault(doc["kind"], set()).add(meta["name"])
        if doc["kind"] == "ServiceAccount":
            accounts.add((meta.get("namespace"), meta["name"]))
    namespaces = {d["metadata"].get("namespace") for d in docs if d["kind"] == "DaemonSet"}
    # Without one, the overlay takes over another driver's.
    drivers = names.get("CSIDriver")
    for doc in docs:
        meta = doc["metadata"]
        where = f"{overlay}: {doc['kind']} {meta['name']}"
        for error in schema_errors(doc):
            problem(where, error)
        if meta.get("labels", {}).get("app.kubernetes.io/part-of") != prefix:
            problem(where, "has no label app.kubernetes.io/part-of")
        if doc["kind"] in ("DaemonSet", "Deployment"):
            if not meta.get("namespace"):
                problem(where, "has no namespace")
            check_pod(where, doc["spec"]["template"])
            spec = doc["spec"]["template"]["spec"]
            check_ports(where, spec, taken if spec.get("hostNetwork") else {})
            account = doc["spec"]["template"]["spec"]["serviceAccountName"]
            if (meta.get("namespace"), account) not in accounts:
                problem(where, f"service account {account} is not defined")
        if doc["kind"] == "PodMonitor":
            check_monitor(where, doc["spec"], pods)
        if doc["kind"] == "ResourceQuota":
            check_quota(where, doc, namespaces)
        if doc["kind"] == "CSIDriver" and inline_allowed(doc) != inline_made(docs):
            problem(where, "mode Ephemeral and the node's variables of inline volumes differ")
        if doc["kind"] == "CSIDriver" and inline_allowed(doc) != doc["spec"]["podInfoOnMount"]:
            problem(where, "only inline volumes need podInfoOnMount, and all of them do")
        if doc["kind"].endswith("RoleBinding"):
            role = doc["roleRef"]
            if role["name"] not in names.get(role["kind"], ()):
                problem(where, f"{role['kind']} {role['name']} is not defined")
            needed = accounts
            if role["name"] == f"{prefix}-privileged":
                check_constraints(where, doc, docs)
                needed = {(meta["namespace"], f"{prefix}-{part}") for part in PARTS}
            for subject in doc["subjects"]:
                if (subject["namespace"], subject["name"]) not in needed:
                    problem(where, f"service account {subject['name']} is not defined")
        if doc["kind"].endswith("Class"):
            check_secrets(where, doc.get("parameters", {}), docs)
        driver = doc.get("provisioner") or doc.get("driver")
        if driver and drivers and driver not in drivers:
            problem(where, f"belongs to driver {driver}, not to {drivers}")
    check_roles(overlay, docs, prefix)
    check_driver(overlay, docs, pods)
    check_disruptions(overlay, docs)


def check_order(name, docs, overlay, components):
    """The order of components changes nothing: kustomize drops a patch without a word if its
    target comes later. The reverse order swaps every two of them."""
    if len(components) < 2:
        return
    compare(
        f"{name}, in reverse order",
        by_name(kustomize([overlay], components[::-1])),
        by_name(docs),
        ("the reverse order", "the order here"),
    )


def check_reasons():
    """Each rule of a role has its reason in a comment."""
    for path in sorted(DEPLOY.glob("*/rbac.yaml")):
        lines = path.read_text().splitlines()
        for before, line in zip(lines, lines[1:]):
            if line.startswith("  - apiGroups") and not before.startswith("  # "):
                problem(path.relative_to(DEPLOY), f"a rule has no reason: after {before.strip()}")


# Fields whose keys are anyone's.
FREE = ("annotations", "labels", "matchLabels", "parameters")


def misspelt(value):
    """Copies of an object, each with another key misspelt."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in ("apiVersion", "kind"):
                yield {f"{name}s" if name == key else name: of for name, of in value.items()}
            if key not in FREE:
                yield from ({**value, key: changed} for changed in misspelt(item))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from ([*value[:index], changed, *value[index + 1 :]] for changed in misspelt(item))


def check_schemas(docs):
    """The schemas of custom resources, which are ours, find each misspelt field."""
    of_kinds = {f"{doc['apiVersion']} {doc['kind']}": doc for doc in docs}
    for kind in (name for name in CUSTOM["$defs"] if " " in name):
        if kind not in of_kinds:
            problem("custom_resources.json", f"nothing is a {kind}")
            continue
        for changed in misspelt(of_kinds[kind]):
            if not any(schema_errors(changed)):
                problem("custom_resources.json", f"{kind} may be {changed}")


def check_monitoring():
    """No variant has it."""
    docs = kustomize(["monitoring"])
    for doc in docs:
        for error in schema_errors(doc):
            problem(f"monitoring: {doc['kind']}", error)
    return docs


def check_examples(classes):
    made = []
    for path in sorted((DEPLOY / "examples").glob("*.yaml")):
        for doc in yaml.safe_load_all(path.read_text()):
            made.append(doc)
            for error in schema_errors(doc):
                problem(path.name, error)
            # Empty means no class: the claim names its volume.
            wanted = doc.get("spec", {}).get("storageClassName")
            if doc["kind"] == "Pod":
                check_restricted(path.name, doc["spec"])
            if wanted and wanted not in classes:
                problem(path.name, f"storage class {wanted} is not defined")
    return made


def main():
    classes, custom = set(), check_monitoring()
    names = [" with ".join([overlay, *components]) for overlay, components in OVERLAYS]
    for name, (overlay, components) in zip(names, OVERLAYS):
        docs = kustomize([overlay], components)
        check(name, docs)
        check_order(name, docs, overlay, components)
        classes |= {d["metadata"]["name"] for d in docs if d["kind"] == "StorageClass"}
        custom += docs
    check_schemas(custom + check_examples(classes))
    check_reasons()
    report(f"deploy: {', '.join(names)} and the examples are consistent")


if __name__ == "__main__":
    main()
