"""What the pods of deploy/ must be: for their programs, and for docs/security.md."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from manifests import DEPLOY, problem

BIN_DIR = Path(os.environ.get("BIN_DIR", DEPLOY.parent / "target" / "debug"))
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
        --extra-modify-metadata --resync-period --resize-timeout --modify-timeout""",
    "csi-snapshotter": f"""{ELECTING} --worker-threads --extra-create-metadata
        --node-deployment --resync-period""",
    "csi-node-driver-registrar": """--csi-address --timeout --kubelet-registration-path
        --plugin-registration-path --http-endpoint""",
    "livenessprobe": "--csi-address --probe-timeout --http-endpoint --metrics-path",
    # That of csi-addons. Not --controller-ip, with which the manager cannot find the pod.
    "k8s-sidecar": """--csi-addons-address --node-id --controller-port --pod
        --namespace --pod-uid --stagingpath --timeout --enable-auth
        --leader-election-namespace --leader-election-lease-duration
        --leader-election-renew-deadline --leader-election-retry-period --automaxprocs
        --enable-volume-condition --volume-condition-interval --volume-condition-recorders""",
}
# Where uringctl looks for the agents: its variable, and its default.
SOCKETS = {
    "uring-csi-node": ("URING_CSI_NODE_ENDPOINT", "unix:///run/uring-csi/node.sock"),
    "uring-csi-controller": (
        "URING_CSI_CONTROLLER_ENDPOINT",
        "unix:///run/uring-csi/controller.sock",
    ),
}
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount"


def flags_of(program):
    """The long flags of a sidecar, or the long flags and variables in our program's
    --help; None if it is neither, or not built."""
    if program in SIDECARS:
        return set(SIDECARS[program].split())
    if not program.startswith("uring"):
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
        if arg.startswith("--stagingpath="):
            # kubelet's, for the agent.
            continue
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
        needed += [arg.split("=")[1] for arg in container["args"] if re.match("--(allow-path|volumes)=", arg)]
        shown = [path for path in needed if f"--allow-path={path}" in container["args"]]
        for mount in container["volumeMounts"]:
            if mount["mountPath"] in shown and mount.get("mountPropagation") != "Bidirectional":
                problem(name, f"the host does not see what is mounted below {mount['mountPath']}")
    for path in needed:
        if mounts.get(path) != path:
            problem(name, f"{program} needs the host's {path} at the same path")
    if program in PRIVILEGED and not container.get("securityContext", {}).get("privileged"):
        problem(name, f"{program} must be privileged")


def opens_api(token):
    """Whether the API server accepts a projected token: one without an audience, or with the
    API server's, `https://kubernetes.default.svc…` unless the cluster has another."""
    if token is None:
        return False
    audience = token.get("audience")
    return not audience or "kubernetes.default" in audience


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
            if opens_api(source.get("serviceAccountToken"))
        }
        mounts = container.get("volumeMounts", [])
        if (
            spec.get("automountServiceAccountToken") is not False
            or any(mount["name"] in tokens or mount["mountPath"] == TOKEN for mount in mounts)
        ):
            problem(name, "is privileged and has a token for the Kubernetes API")
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


def check_modprobe(name, command, volumes):
    """The pod must start without a module, also where there is no such program or directory, and
    the log names the module; but not one that the kernel has already."""
    modules = [argument.split()[0] for argument in command[4:]]
    if not modules:
        problem(name, "loads no module")
    if any("type" in volume.get("hostPath", {}) for volume in volumes if volume["name"] == "modules"):
        problem(name, "needs or makes the directory /lib/modules")
    with tempfile.TemporaryDirectory() as empty:
        # Without modprobe, and first without modules in the kernel.
        shell = [shutil.which(command[0]), *(arg.replace("/sys/module", empty) for arg in command[1:])]
        for loaded in (False, True):
            made = subprocess.run(
                shell, env={"PATH": empty}, capture_output=True, text=True, check=False
            )
            if made.returncode:
                problem(name, "keeps the pod from starting where a module is missing")
            for module in modules:
                if (f"modprobe {module}," in made.stdout) is loaded:
                    problem(name, f"its log names {module}" if loaded else f"nothing names {module}")
                Path(empty, module).mkdir(exist_ok=True)


def check_label_reader(name, command):
    """It tries again, for some time, and reports what it could not read: the agent must not start
    without its node's labels. Here with a curl that succeeds or fails."""
    node = {"KUBERNETES_SERVICE_PORT": "443", "NODE_NAME": "node-1"}
    for host, at, fails in (("10.0.0.1", "10.0.0.1", 0), ("fd00::1", "[fd00::1]", 22)):
        with tempfile.TemporaryDirectory() as made:
            curl = Path(made, "curl")
            curl.write_text(f'#!/bin/sh\ncat >{made}/stdin\necho "$@" >{made}/arguments\nexit {fails}\n')
            curl.chmod(0o755)
            Path(made, "token").write_text("secret")
            run = subprocess.run(
                [arg.replace(TOKEN, made) for arg in command],
                env=node | {"KUBERNETES_SERVICE_HOST": host, "PATH": f"{made}:{os.environ['PATH']}"},
                capture_output=True,
                text=True,
                check=False,
            )
            arguments = Path(made, "arguments").read_text()
            header = Path(made, "stdin").read_text()
        url = f"https://{at}:443/api/v1/nodes/node-1"
        if url not in arguments or header != "Authorization: Bearer secret":
            problem(name, f"does not ask for {url} with its token: {arguments}")
        for flag in ("--retry ", "--retry-all-errors", "--retry-max-time", "--max-time"):
            if flag not in arguments:
                problem(name, f"calls curl without {flag}")
        if bool(run.returncode) is not bool(fails):
            problem(name, f"ends with {run.returncode} where curl does with {fails}")
        if fails and not ("node-1" in run.stdout and url in run.stdout):
            problem(name, "fails without the names of node and server")


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
        # nbdkit's, and that of csi-addons' sidecar.
        for arg in container.get("args", []):
            if other := re.fullmatch(r"--(?:controller-)?port=(\d+)", arg):
                ports[int(other[1])] = None
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


def program_of(container):
    return container["image"].rsplit("/", 1)[-1].split(":")[0].split("@")[0]


def check_sockets(where, spec):
    """uringctl, in the agents' containers, finds each agent of the pod."""
    agents = {program_of(c): c for c in spec["containers"] if program_of(c) in SOCKETS}
    for container in agents.values():
        env = {v["name"]: v.get("value") for v in container.get("env", [])}
        for program, agent in agents.items():
            variable, default = SOCKETS[program]
            if f"--endpoint={env.get(variable, default)}" not in agent["args"]:
                problem(f"{where}/{container['name']}", f"uringctl does not find {program}")


def check_resources(name, container, ends):
    """So that the scheduler counts it. No volume in use notices the failure of one that ends, so it
    has a limit, too; the manifests say why others have none."""
    resources = container.get("resources", {})
    for field, needed in (("requests", {"cpu", "memory"}), ("limits", {"memory"} if ends else set())):
        if missing := needed - resources.get(field, {}).keys():
            problem(name, f"has no {field} of {', '.join(sorted(missing))}")


def check_pod(where, template):
    spec = template["spec"]
    check_propagation(where, spec)
    check_sockets(where, spec)
    if spec.get("nodeSelector", {}).get("kubernetes.io/os") != "linux":
        problem(where, "may be scheduled to nodes without Linux")
    # Root's own files: the host's, and those that it makes for others on a server.
    needs_root = any({"hostPath", "nfs"} & volume.keys() for volume in spec.get("volumes", []))
    if not needs_root and not spec["securityContext"].get("runAsNonRoot"):
        problem(where, "runs as root without a need: it has no files of the host or a server")
    # The controller's image has another user.
    if needs_root and spec["securityContext"].get("runAsUser") != 0:
        problem(where, "needs root, and leaves its user to the images")
    volumes = {volume["name"] for volume in spec.get("volumes", [])}
    for container in spec.get("initContainers", []) + spec["containers"]:
        name = f"{where}/{container['name']}"
        if ":" not in container["image"].rsplit("/", 1)[-1]:
            problem(name, f"image {container['image']} has no tag")
        mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
        for missing in sorted(mounts - volumes):
            problem(name, f"mounts {missing}, which the pod does not define")
        program = program_of(container)
        if container["name"] == "modprobe":
            program = "modprobe"
            check_modprobe(name, container["command"], spec["volumes"])
        if container["name"] == "node-labels":
            check_label_reader(name, container["command"])
        check_resources(name, container, container in spec.get("initContainers", []))
        check_needs(name, program, spec, container)
        check_privileges(name, program, spec, container)
        known = flags_of(program)
        for arg in container.get("args", []):
            if known is not None and arg.split("=")[0] not in known:
                problem(name, f"{program} has no flag {arg}")
        for variable in container.get("env", []):
            given = variable["name"]
            known_to = (known or set()) | (flags_of("uringctl") or set())
            if known is not None and given.startswith("URING_CSI_") and given not in known_to:
                problem(name, f"{program} does not know {given}")


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
