#!/usr/bin/env python3
"""container_of.py OVERLAY[,COMPONENT...] WORKLOAD CONTAINER DIR IMAGE [VARIABLE=VALUE...]:
prints, each ended by a NUL, the arguments of `podman run` that start a container of a workload,
such as DaemonSet/uring-csi-node, as the manifests of deploy/ have it: its arguments, environment,
mounts and their propagation, user, capabilities, privileges and namespaces.

The host's directories are below DIR, except those of the machine's devices, and so is what the
pod has of its own: a directory of DIR for each volume of Kubernetes (DIR/WORKLOAD's name/VOLUME),
which is left as it is where the caller has filled it. A network of the pod's own is none at all.
The variables replace those of the manifest.

It fails where the manifest has what it knows no argument for, so that nothing is left out unseen;
left out are resources, probes, scheduling, and other containers. Run it by
target/python/bin/python, where `scripts/setup.sh containers` installs what it imports.
"""

import os
import re
import sys
from pathlib import Path

from manifests import kustomize

# Of the machine itself.
DEVICES = {"/dev", "/sys", "/run/udev", "/lib/modules"}
# An address of this machine whose ports no other program takes.
FIELDS = {"spec.nodeName": "story", "status.hostIP": "127.77.0.1", "metadata.namespace": "uring-csi"}
PROPAGATION = {"Bidirectional": "rshared", "HostToContainer": "rslave", "None": "rprivate"}
NAMESPACES = {"hostNetwork": "network", "hostPID": "pid", "hostIPC": "ipc"}
LEFT_OUT_OF_POD = {
    "affinity",
    "automountServiceAccountToken",
    "containers",
    "dnsPolicy",
    "initContainers",
    "nodeSelector",
    "priorityClassName",
    "serviceAccountName",
    "tolerations",
    "topologySpreadConstraints",
    "volumes",
}
LEFT_OUT_OF_CONTAINER = {"image", "livenessProbe", "name", "ports", "readinessProbe", "resources"}


def take(fields, known, what):
    unknown = fields.keys() - known
    if unknown:
        sys.exit(f"container_of.py: no argument of podman for {', '.join(sorted(unknown))} of {what}")


def the(items, name):
    found = [item for item in items if item["name"] == name]
    if len(found) != 1:
        sys.exit(f"container_of.py: {name} is there {len(found)} times")
    return found[0]


def namespaces(pod):
    for field, flag in NAMESPACES.items():
        if pod.get(field):
            yield f"--{flag}=host"
        elif flag == "network":
            yield "--network=none"


def privileges(pod, container):
    """The container's fields come before the pod's."""
    own = container.get("securityContext", {})
    context = pod.get("securityContext", {}) | own
    take(
        context,
        {
            "allowPrivilegeEscalation",
            "capabilities",
            "fsGroup",
            "privileged",
            "readOnlyRootFilesystem",
            "runAsGroup",
            "runAsNonRoot",
            "runAsUser",
            "seLinuxOptions",
            "seccompProfile",
        },
        "the security context",
    )
    if context.get("privileged"):
        yield "--privileged"
    if context.get("allowPrivilegeEscalation") is False:
        yield "--security-opt=no-new-privileges"
    for option, value in context.get("seLinuxOptions", {}).items():
        yield f"--security-opt=label={option}:{value}"
    profile = context.get("seccompProfile", {}).get("type", "RuntimeDefault")
    if profile == "Unconfined":
        yield "--security-opt=seccomp=unconfined"
    elif profile != "RuntimeDefault":
        sys.exit(f"container_of.py: no argument of podman for the seccomp profile {profile}")
    for action in ("drop", "add"):
        for capability in context.get("capabilities", {}).get(action, []):
            yield f"--cap-{action}={capability.lower()}"
    if context.get("readOnlyRootFilesystem"):
        yield from ["--read-only", "--read-only-tmpfs=false"]
    if "runAsUser" in context:
        group = context.get("runAsGroup")
        yield f"--user={context['runAsUser']}" + ("" if group is None else f":{group}")
    if "fsGroup" in context:
        yield f"--group-add={context['fsGroup']}"


def directory(volume, workload, base, group):
    """Where the volume is on this machine; what Kubernetes or kubelet would make is made."""
    (kind, source), *more = [item for item in volume.items() if item[0] != "name"]
    if more:
        sys.exit(f"container_of.py: volume {volume['name']} has several sources")
    if kind == "hostPath":
        path = source["path"]
        place = Path(path) if path in DEVICES else base / path.lstrip("/")
        if source.get("type") == "DirectoryOrCreate":
            place.mkdir(parents=True, exist_ok=True)
        return place
    if kind not in ("emptyDir", "configMap", "secret", "projected"):
        sys.exit(f"container_of.py: no argument of podman for a volume of {kind}")
    place = base / workload / volume["name"]
    place.mkdir(parents=True, exist_ok=True)
    if kind == "emptyDir":
        place.chmod(0o777)
        if group is not None:
            os.chown(place, -1, group)
    return place


def mounts(pod, container, workload, base):
    group = pod.get("securityContext", {}).get("fsGroup")
    for mount in container.get("volumeMounts", []):
        take(mount, {"mountPath", "mountPropagation", "name", "readOnly"}, f"the mount {mount['name']}")
        place = directory(the(pod["volumes"], mount["name"]), workload, base, group)
        options = [PROPAGATION[mount.get("mountPropagation", "None")]]
        if mount.get("readOnly"):
            options.append("ro")
        yield f"--volume={place}:{mount['mountPath']}:{','.join(options)}"


def variables(container, given):
    """The environment, with the given values in place of the manifest's."""
    values = {}
    for variable in container.get("env", []):
        if "value" in variable:
            values[variable["name"]] = variable["value"]
        else:
            values[variable["name"]] = FIELDS[variable["valueFrom"]["fieldRef"]["fieldPath"]]
    unknown = given.keys() - values.keys()
    if unknown:
        sys.exit(f"container_of.py: the manifest has no variable {', '.join(sorted(unknown))}")
    return values | given


def expand(text, values):
    """As Kubernetes does: a name that it does not know stays."""
    return re.sub(r"\$\((\w+)\)", lambda name: values.get(name[1], name[0]), text)


def main():
    overlay, workload, name, base, image, *given = sys.argv[1:]
    base = Path(base).resolve()
    given = dict(pair.split("=", 1) for pair in given)
    overlay, *components = overlay.split(",")
    kind, workload = workload.split("/")
    docs = [
        doc
        for doc in kustomize([overlay], components)
        if (doc["kind"], doc["metadata"]["name"]) == (kind, workload)
    ]
    if len(docs) != 1:
        sys.exit(f"container_of.py: {overlay} has no {kind} {workload}")
    pod = docs[0]["spec"]["template"]["spec"]
    take(
        pod,
        LEFT_OUT_OF_POD | {"securityContext", "terminationGracePeriodSeconds", *NAMESPACES},
        f"the pod of {workload}",
    )
    container = the(pod.get("initContainers", []) + pod["containers"], name)
    take(
        container,
        LEFT_OUT_OF_CONTAINER | {"args", "command", "env", "securityContext", "volumeMounts"},
        f"the container {name}",
    )
    values = variables(container, given)
    flags = [
        *namespaces(pod),
        *privileges(pod, container),
        *mounts(pod, container, workload, base),
        *(f"--env={variable}={value}" for variable, value in values.items()),
        f"--stop-timeout={pod.get('terminationGracePeriodSeconds', 30)}",
    ]
    command = [expand(word, values) for word in container.get("command", [])]
    if command:
        flags.append(f"--entrypoint={command[0]}")
    args = [expand(word, values) for word in container.get("args", [])]
    sys.stdout.write("".join(f"{word}\0" for word in [*flags, image, *command[1:], *args]))


if __name__ == "__main__":
    main()
