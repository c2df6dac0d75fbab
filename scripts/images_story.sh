#!/usr/bin/env bash
# Called by images.sh, in namespaces of its own: runs a volume's life in containers of this
# machine's images, started with the privileges of the manifests in deploy/base. The
# mounts must reach the host, here this script's namespace.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/root.sh
. scripts/containers.sh

image() { echo "localhost/uring-csi-$1:$version-$native"; }

# Podman's own limits take a privilege that some machines lack.
limits=("--ulimit=nofile=$(ulimit -Sn):$(ulimit -Hn)" "--ulimit=nproc=$(ulimit -Su):$(ulimit -Hu)")
# The flags of a container whose program needs no privilege.
files_only=(--cap-drop=all --security-opt=no-new-privileges)

# `start NAME IMAGE FLAG... -- ARGUMENT...`: with a read-only root.
start() {
  local name=$1 image=$2 flags=()
  shift 2
  while [[ $1 != -- ]]; do
    flags+=("$1")
    shift
  done
  shift
  podman run --detach --quiet --name "$name" --read-only --read-only-tmpfs=false \
    --log-driver=k8s-file "${limits[@]}" "${flags[@]}" "$image" "$@" >/dev/null
}

start_node() {
  start node "$(image node)" --privileged --network=host --pid=host \
    --volume="$story/run:/run/uring-csi:rshared" \
    --volume="$story/kubelet:/var/lib/kubelet:rshared" \
    --volume="$story/mnt:/mnt:rshared" \
    --volume="$story/state:/var/lib/uring-csi" \
    --volume="$story/pool:/srv/uring-csi:rslave" \
    --volume="$story/csi:/csi" \
    --volume=/dev:/dev --volume=/sys:/sys --volume=/run/udev:/run/udev:ro \
    --env=URING_CSI_CONTROLLER_ENDPOINT=unix:///csi/controller.sock \
    -- --endpoint=unix:///run/uring-csi/node.sock --node-id=story \
    --pool=default=/srv/uring-csi,shared --allow-path=/mnt --log-format=json
  until_it_succeeds podman exec node uringctl info
}

show_logs() {
  local name
  for name in node controller own holder nbd; do podman logs "$name" 2>&1 | tail -n 20; done
}
trap '(($? == 0)) || show_logs; podman rm --force --time=10 --all >/dev/null' EXIT

mkdir -p "$story"/{run,kubelet,state,csi,holder} /run/udev
start controller "$(image controller)" "${files_only[@]}" --user=0:0 --network=none \
  --volume="$story/csi:/csi" --volume="$story/pool:/srv/uring-csi:rslave" \
  --env=URING_CSI_CONTROLLER_ENDPOINT=unix:///csi/controller.sock \
  -- --endpoint=unix:///csi/controller.sock --pool=default=/srv/uring-csi,shared --log-format=json
start_node

echo "a volume's life in containers of the images"
volume_is_used podman exec node
podman exec controller uringctl list | grep -q story
# The pod's view: another mount namespace than the agent's.
[[ $(findmnt --noheadings --output FSTYPE "$story/mnt/story") == ext4 ]]
grep -qx written "$story/mnt/story/file"

echo "the node agent's container is replaced while the volume is in use"
podman rm --force --time=30 node >/dev/null
grep -qx written "$story/mnt/story/file"
start_node
volume_is_removed podman exec node
[[ -z $(findmnt --noheadings "$story/mnt/story") ]]

echo "a controller as its image's user, without root's rights, starts; the supervisor and the NBD server do"
mkdir -p "$story"/own/{csi,pool}
chown 65532:65532 "$story"/own/*
start own "$(image controller)" "${files_only[@]}" --network=none \
  --volume="$story/own/csi:/csi" --volume="$story/own/pool:/srv/uring-csi" \
  -- --endpoint=unix:///csi/controller.sock --pool=default=/srv/uring-csi,shared
until_it_succeeds test -S "$story/own/csi/controller.sock"
start holder "$(image holder)" --privileged --network=host --pid=host \
  --volume="$story/holder:/run/uring-csi-holder" --volume=/dev:/dev --volume=/sys:/sys \
  -- --endpoint=unix:///run/uring-csi-holder/holder.sock --run-dir=/run/uring-csi-holder
until_it_succeeds test -S "$story/holder/holder.sock"
start nbd "$(image nbd-server)" "${files_only[@]}" --network=none \
  --volume="$story/pool:/srv/uring-csi:rslave" \
  -- --ipaddr=127.0.0.1 --port=10809 --threads=1 file dir=/srv/uring-csi
# The first bytes of a server's greeting.
greeting() {
  # shellcheck disable=SC2016 # for the container's shell
  [[ $(podman exec nbd bash -c 'head -c 8 </dev/tcp/127.0.0.1/10809') == NBDMAGIC ]]
}
until_it_succeeds greeting

