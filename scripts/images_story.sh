#!/usr/bin/env bash
# Called by images.sh, in namespaces of its own: runs a volume's life in containers of this
# machine's images, started as the manifests of deploy/ have them (scripts/container_of.py). The
# mounts must reach the host, here this script's namespace.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/root.sh
. scripts/containers.sh

python=${CARGO_TARGET_DIR:-target}/python/bin/python
image() { echo "localhost/uring-csi-$1:$version-${tag:?}"; }

# Podman's own limits take a privilege that some machines lack.
limits=("--ulimit=nofile=$(ulimit -Sn):$(ulimit -Hn)" "--ulimit=nproc=$(ulimit -Su):$(ulimit -Hu)")
run() { podman run --detach --quiet --log-driver=k8s-file "${limits[@]}" "$@" >/dev/null; }

# `start NAME OVERLAY WORKLOAD CONTAINER IMAGE [VARIABLE=VALUE...]`, with the host's directories
# below $story.
start() {
  local name=$1 overlay=$2 workload=$3 container=$4 image=$5 rendered arguments
  shift 5
  rendered=$story/arguments-$name
  "$python" scripts/container_of.py "$overlay" "$workload" "$container" "$story" \
    "$(image "$image")" "$@" >"$rendered"
  mapfile -d "" -t arguments <"$rendered"
  run --name "$name" "${arguments[@]}"
}

start_node() {
  start node base DaemonSet/uring-csi-node agent node
  until_it_succeeds podman exec client uringctl info
}

show_logs() {
  local name
  for name in node controller ceph holder nbd; do
    ! podman container exists "$name" || podman logs "$name" 2>&1 | tail -n 20 || true
  done
}
# `sleep` takes no SIGTERM as a container's first process.
trap '(($? == 0)) || show_logs
  podman rm --force --ignore --time=0 client >/dev/null || true
  podman rm --force --time=10 --all >/dev/null' EXIT

# What the manifests have of type Directory.
kubelet=$story/var/lib/kubelet pool=$story/srv/uring-csi socket=$story/uring-csi-controller/socket
mkdir -p "$kubelet" "$pool" /run/udev
start controller base Deployment/uring-csi-controller controller controller
# kubelet, the sidecars and a pod in one: uringctl with the sockets of both, which sees what is
# mounted below kubelet's directory, in another mount namespace than the agent's.
mkdir -p "$story/run/uring-csi"
run --name client --network=none --entrypoint=sleep \
  --volume="$story/run/uring-csi:/run/uring-csi:rslave" --volume="$socket:/csi" \
  --volume="$kubelet:/var/lib/kubelet:rslave" \
  --env=URING_CSI_CONTROLLER_ENDPOINT=unix:///csi/controller.sock "$(image node)" infinity
start_node
target=/var/lib/kubelet/story

echo "a volume's life in containers of the images"
volume_is_used podman exec client
podman exec controller uringctl list | grep -q story
podman exec node uringctl volumes | grep -q story
[[ $(findmnt --noheadings --output FSTYPE "$kubelet/story") == ext4 ]]
grep -qx written "$kubelet/story/file"

echo "the node agent's container is replaced while the volume is in use"
podman rm --force --time=30 node >/dev/null
grep -qx written "$kubelet/story/file"
start_node
volume_is_removed podman exec client
[[ -z $(findmnt --noheadings "$kubelet/story") ]]
podman rm --force --time=30 controller >/dev/null

echo "the controller of Ceph starts, as the user of its image; the supervisor and the NBD server do"
rm -rf "$socket"
start ceph ceph Deployment/uring-csi-controller controller controller
until_it_succeeds test -S "$socket/controller.sock"
[[ $(stat --format=%u "$socket/controller.sock") == "$(podman image inspect --format '{{.User}}' "$(image controller)" | cut -d: -f1)" ]]
start holder ceph,rbd-nbd DaemonSet/uring-csi-holder holder holder
until_it_succeeds test -S "$story/run/uring-csi-holder/holder.sock"
start nbd nbd Deployment/uring-csi-nbd-server nbdkit nbd-server ADDRESS=127.77.0.1
# The first bytes of a server's greeting.
greeting() {
  # shellcheck disable=SC2016 # for the container's shell
  [[ $(podman exec nbd bash -c 'head -c 8 </dev/tcp/127.77.0.1/10809') == NBDMAGIC ]]
}
until_it_succeeds greeting
