#!/usr/bin/env python3
"""Checks that the manifests in deploy/ are consistent.

Builds each kustomization (by kubectl or kustomize), validates its objects by Kubernetes'
schemas, and checks for errors that the API server accepts and that only a failing pod
would show: mounts of undefined volumes, mounts
that would keep a volume busy, missing access to the host, privileges beyond
docs/security.md, secrets that no role may read, undefined roles and accounts, roles that
no sidecar needs, ports that collide or that nothing serves, images without a tag, classes
of another driver, unknown flags of the sidecars, and unknown flags and variables of our
programs (if they are built: BIN_DIR, by default target/debug).
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from manifests import DEPLOY, kustomize, schema_errors

BIN_DIR = Path(os.environ.get("BIN_DIR", DEPLOY.parent / "target" / "debug"))
# Each with its components.
OVERLAYS = [
    ("base", []),
    ("base", ["snapshots", "pod-monitor", "network-policy"]),
    ("local-pools", []),
    ("local-pools", ["snapshots"]),
    ("local-pools", ["inline", "snapshots", "pod-monitor"]),
    ("nbd", []),
    ("nbd", ["snapshots"]),
    ("ceph", []),
    ("ceph", ["snapshots"]),
    ("ceph", ["rbd-nbd", "snapshots", "pod-monitor", "network-policy"]),
    ("examples/overlay", []),
    ("examples/nbd-overlay", []),
    ("examples/ceph-overlay", []),
    ("examples/ceph-overlay", ["rbd-nbd"]),
    ("examples/takeover-overlay", []),
    ("examples/rook-overlay", []),
    ("examples/rook-overlay", ["rbd-nbd"]),
]
# The programs' requirements on the host, which otherwise only a volume would show:
# fields of the pod, and directories at the host's own paths. Neither agent needs
# hostIPC: cryptsetup runs without udevd, and so without semaphores.
NEEDS = {
    "uring-csi-node": (
        # Sockets to NBD servers, and krbd's, belong to the namespace of their creation.
        ["hostNetwork", "hostPID"],
        ["/dev", "/sys", "/run/udev"],
    ),
    "uring-csi-holder": (["hostNetwork", "hostPID"], ["/dev", "/sys"]),
    "modprobe": ([], ["/lib/modules"]),
}
# The node agent's directories, which must be on the host, at the same path.
DIRECTORIES = {
    "--run-dir": "/run/uring-csi",
    "--state-dir": "/var/lib/uring-csi",
    "--kubelet-dir": "/var/lib/kubelet",
}
# The programs that need devices and capabilities (src/kernel/privileges.rs). All others
# drop the container's capabilities, except these.
PRIVILEGED = ["uring-csi-node", "uring-csi-holder"]
CAPABILITIES = {"modprobe": ["SYS_MODULE"]}
# Where a program listens that kubelet reaches at the pod's address.
AT_POD = {"", "0.0.0.0", "[::]", "$(HOST_IP)", "[$(HOST_IP)]"}
# The flags of the sidecars' releases that the manifests name; their deprecated ones, such
# as --health-port, are left out.
ELECTING = """--csi-address --timeout --leader-election --leader-election-namespace
    --leader-election-lease-duration --leader-election-renew-deadline
    --leader-election-retry-period --kube-api-qps --kube-api-burst --http-endpoint
    --metrics-path --retry-interval-start --retry-interval-max --automaxprocs
    --feature-gates"""
SIDECARS = {
    "csi-provisioner": f"""{ELECTING} --worker-threads --volume-name-prefix --default-fstype
        --extra-create-metadata --enable-capacity --capacity-poll-interval
        --capacity-ownerref-level --strict-topology --immediate-topology --node-deployment
        --controller-publish-readonly --prevent-volume-mode-conversion
        --snapshot-orphan-sweep-interval""",
    "csi-attacher": f"""{ELECTING} --worker-threads --default-fstype --reconcile-sync --resync
        --max-entries""",
    "csi-resizer": f"""{ELECTING} --workers --handle-volume-inuse-error
        --extra-modify-metadata --resync-period""",
    "csi-snapshotter": f"""{ELECTING} --worker-threads --extra-create-metadata
        --node-deployment --resync-period""",
    "csi-node-driver-registrar": """--csi-address --timeout --kubelet-registration-path
        --plugin-registration-path --http-endpoint""",
    "livenessprobe": "--csi-address --probe-timeout --http-endpoint --metrics-path",
}
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount"
problems = []


def problem(where, what):
    problems.append(f"{where}: {what}")


def flags_of(program):
    """The long flags of a sidecar, or the long flags and variables in our program's
    --help; None if it is neither, or not built."""
    if program in SIDECARS:
        return set(SIDECARS[program].split())
    if not program.startswith("uring-csi"):
        return None
    path = BIN_DIR / program
    if not path.exists():
        return None
    text = subprocess.run([path, "--help"], capture_output=True, text=True, check=False).stdout
    return set(re.findall(r"--[a-z][a-z-]+|URING_CSI_\w+", text))


def check_propagation(where, spec):
    """A container without propagation keeps the mounts of its start below a directory
    where another container mounts, and so keeps their devices busy."""
    mounts = [
        (container["name"], mount)
        for container in spec["containers"]
        for mount in container.get("volumeMounts", [])
    ]
    mounted_in = {m["name"] for _, m in mounts if m.get("mountPropagation") == "Bidirectional"}
    for container, mount in mounts:
        if mount["name"] in mounted_in and "mountPropagation" not in mount:
            problem(f"{where}/{container}", f"mounts {mount['name']} without mountPropagation")


def check_needs(name, program, spec, container):
    paths = {v["name"]: v.get("hostPath", {}).get("path") for v in spec.get("volumes", [])}
    mounts = {m["mountPath"]: paths.get(m["name"]) for m in container.get("volumeMounts", [])}
    for arg in container.get("args", []):
        for path in re.findall(r"(?:=|unix://)(/[^,/][^,]*)", arg):
            if not any(Path(path).is_relative_to(mount) for mount in mounts):
                problem(name, f"{arg} is not on a volume")
    fields, needed = NEEDS.get(program, ([], []))
    for field in fields:
        if not spec.get(field):
            problem(name, f"{program} needs {field}")
    if program == "uring-csi-node":
        given = dict(arg.split("=", 1) for arg in container["args"] if "=" in arg)
        needed = needed + [given.get(flag, default) for flag, default in DIRECTORIES.items()]
    for path in needed:
        if mounts.get(path) != path:
            problem(name, f"{program} needs the host's {path} at the same path")
    if program in PRIVILEGED and not container.get("securityContext", {}).get("privileged"):
        problem(name, f"{program} must be privileged")


def check_privileges(name, program, spec, container):
    context = container.get("securityContext", {})
    if not context.get("readOnlyRootFilesystem"):
        problem(name, "has a writable root file system")
    if context.get("privileged"):
        if program not in PRIVILEGED:
            problem(name, f"{program} must not be privileged")
        tokens = {
            volume["name"]
            for volume in spec.get("volumes", [])
            for source in volume.get("projected", {}).get("sources", [])
            if "serviceAccountToken" in source
        }
        mounts = container.get("volumeMounts", [])
        if (
            spec.get("automountServiceAccountToken") is not False
            or any(mount["name"] in tokens or mount["mountPath"] == TOKEN for mount in mounts)
        ):
            problem(name, "is privileged and has a token of its service account")
        return
    capabilities = context.get("capabilities", {})
    if capabilities.get("drop") != ["ALL"]:
        problem(name, "does not drop all capabilities")
    if capabilities.get("add", []) != CAPABILITIES.get(program, []):
        problem(name, f"must not add the capabilities {capabilities.get('add', [])}")
    if context.get("allowPrivilegeEscalation") is not False:
        problem(name, "may escalate its privileges")
    if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        problem(name, "lacks the runtime's seccomp profile")


def check_modprobe(name, command):
    """The pod must start without the module, and where there is no such program."""
    with tempfile.TemporaryDirectory() as empty:
        shell = [shutil.which(command[0]), *command[1:]]
        if subprocess.run(shell, env={"PATH": empty}, stderr=subprocess.DEVNULL).returncode:
            problem(name, "keeps the pod from starting where a module is missing")


def served_ports(container):
    """The addresses, by their ports, at which a container answers HTTP."""
    matches = (
        re.fullmatch(r"--(?:metrics-listen|http-endpoint)=(.*):(\d+)", arg)
        for arg in container.get("args", [])
    )
    return {int(match[2]): match[1] for match in matches if match}


def check_ports(where, spec, taken):
    """`taken`: the owners of ports in the network of this pod."""
    served = {}
    for container in spec["containers"]:
        name = f"{where}/{container['name']}"
        ports = served_ports(container)
        if "--port=10809" in container.get("args", []):
            ports[10809] = "$(ADDRESS)"
        for port in ports:
            if port in taken:
                problem(name, f"serves port {port}, as does {taken[port]}")
            taken[port] = name
        served |= ports
        for port in container.get("ports", []):
            if port["containerPort"] not in ports:
                problem(name, f"does not serve its port {port['name']}")
    for container in spec["containers"]:
        named = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        for kind in ("livenessProbe", "readinessProbe"):
            if kind not in container:
                continue
            probe = container[kind]["httpGet"]
            address = served.get(named.get(probe["port"], probe["port"]))
            if address not in ({probe["host"]} if "host" in probe else AT_POD):
                problem(f"{where}/{container['name']}", f"nothing serves its {kind}'s address")


def check_pod(where, template):
    spec = template["spec"]
    check_propagation(where, spec)
    if spec.get("nodeSelector", {}).get("kubernetes.io/os") != "linux":
        problem(where, "may be scheduled to nodes without Linux")
    of_host = any("hostPath" in volume for volume in spec.get("volumes", []))
    if not of_host and not spec["securityContext"].get("runAsNonRoot"):
        problem(where, "runs as root without a need: it has no files of the host")
    volumes = {volume["name"] for volume in spec.get("volumes", [])}
    for container in spec.get("initContainers", []) + spec["containers"]:
        name = f"{where}/{container['name']}"
        if ":" not in container["image"].rsplit("/", 1)[-1]:
            problem(name, f"image {container['image']} has no tag")
        mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
        for missing in sorted(mounts - volumes):
            problem(name, f"mounts {missing}, which the pod does not define")
        program = container["image"].rsplit("/", 1)[-1].split(":")[0]
        command = container.get("command", [program])
        if "modprobe" in command[-1]:
            program = "modprobe"
            check_modprobe(name, command)
        check_needs(name, program, spec, container)
        check_privileges(name, program, spec, container)
        known = flags_of(program)
        for arg in container.get("args", []):
            if known is not None and arg.split("=")[0] not in known:
                problem(name, f"{program} has no flag {arg}")
        for variable in container.get("env", []):
            given = variable["name"]
            if known is not None and given.startswith("URING_CSI_") and given not in known:
                problem(name, f"{program} does not know {given}")


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


def inline_allowed(driver):
    return "Ephemeral" in driver["spec"]["volumeLifecycleModes"]


def inline_made(docs):
    """Whether the node agents allow inline volumes."""
    return any(
        variable["name"] == "URING_CSI_INLINE_MAX_SIZE"
        for doc in docs
        if doc["kind"] == "DaemonSet"
        for container in doc["spec"]["template"]["spec"]["containers"]
        for variable in container.get("env", [])
    )


def check_roles(overlay, docs, prefix):
    """A sidecar's role is there where the sidecar is."""
    sidecars = {
        container["name"].removeprefix("csi-")
        for doc in docs
        if doc["kind"] in ("DaemonSet", "Deployment")
        for container in doc["spec"]["template"]["spec"]["containers"]
        if container["name"] in SIDECARS
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
        if doc["kind"] == "CSIDriver" and inline_allowed(doc) != inline_made(docs):
            problem(where, "mode Ephemeral and the node's URING_CSI_INLINE_MAX_SIZE differ")
        if doc["kind"] == "CSIDriver" and inline_allowed(doc) != doc["spec"]["podInfoOnMount"]:
            problem(where, "only inline volumes need podInfoOnMount, and all of them do")
        if doc["kind"].endswith("RoleBinding"):
            role = doc["roleRef"]
            if role["name"] not in names.get(role["kind"], ()):
                problem(where, f"{role['kind']} {role['name']} is not defined")
            for subject in doc["subjects"]:
                if (subject["namespace"], subject["name"]) not in accounts:
                    problem(where, f"service account {subject['name']} is not defined")
        if doc["kind"].endswith("Class"):
            check_secrets(where, doc.get("parameters", {}), docs)
        driver = doc.get("provisioner") or doc.get("driver")
        if driver and drivers and driver not in drivers:
            problem(where, f"belongs to driver {driver}, not to {drivers}")
    check_roles(overlay, docs, prefix)
    check_driver(overlay, docs, pods)
    check_disruptions(overlay, docs)


def check_reasons():
    """Each rule of a role has its reason in a comment."""
    for path in sorted(DEPLOY.glob("*/rbac.yaml")):
        lines = path.read_text().splitlines()
        for before, line in zip(lines, lines[1:]):
            if line.startswith("  - apiGroups") and not before.startswith("  # "):
                problem(path.relative_to(DEPLOY), f"a rule has no reason: after {before.strip()}")


def check_restricted(where, spec):
    """Kubernetes' Pod Security Standard `restricted`, for what the examples have."""
    for container in spec["containers"]:
        context = spec.get("securityContext", {}) | container.get("securityContext", {})
        if not (
            context.get("runAsNonRoot")
            and context.get("runAsUser")
            and context.get("allowPrivilegeEscalation") is False
            and context.get("capabilities") == {"drop": ["ALL"]}
            and context.get("seccompProfile") == {"type": "RuntimeDefault"}
        ):
            problem(where, "is refused in namespaces with Pod Security `restricted`")


def check_examples(classes):
    for path in sorted((DEPLOY / "examples").glob("*.yaml")):
        for doc in yaml.safe_load_all(path.read_text()):
            for error in schema_errors(doc):
                problem(path.name, error)
            # Empty means no class: the claim names its volume.
            wanted = doc["spec"].get("storageClassName")
            if doc["kind"] == "Pod":
                check_restricted(path.name, doc["spec"])
            if wanted and wanted not in classes:
                problem(path.name, f"storage class {wanted} is not defined")


def report(success):
    for line in problems:
        print(line, file=sys.stderr)
    if problems:
        sys.exit(1)
    print(success)


def main():
    classes = set()
    names = [" with ".join([overlay, *components]) for overlay, components in OVERLAYS]
    for name, (overlay, components) in zip(names, OVERLAYS):
        docs = kustomize([overlay], components)
        check(name, docs)
        classes |= {d["metadata"]["name"] for d in docs if d["kind"] == "StorageClass"}
    check_examples(classes)
    check_reasons()
    report(f"deploy: {', '.join(names)} and the examples are consistent")


if __name__ == "__main__":
    main()
