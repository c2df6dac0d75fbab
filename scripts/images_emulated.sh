#!/usr/bin/env bash
# images_emulated.sh ARCH TAG: called by images.sh, runs of images of another architecture what
# qemu-user can: each program's --version, the controller with a pool, a volume's create, list and
# delete, and uringctl's doctor. qemu-user has neither io_uring nor seccomp, so the node agent does
# not start; that it says why is all that is checked of it.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/containers.sh
arch=$1 tag=$2

# `inside IMAGE SCRIPT`: in a container of the image, without a network.
inside() {
  local container status=0
  container=$(buildah from --quiet --pull-never --arch "$arch" "localhost/uring-csi-$1:$tag")
  buildah run --network=none --user=0:0 "$container" -- bash -euc "$2" || status=$?
  buildah rm "$container" >/dev/null
  return "$status"
}

echo "the images for $arch, by qemu-user:"
for image in node controller holder; do inside "$image" "uring-csi-$image --version"; done
# shellcheck disable=SC2016 # for the container's shell
inside controller '
  export URING_CSI_CONTROLLER_ENDPOINT=unix:///run/controller.sock
  mkdir -p /srv/pool
  uring-csi-controller --endpoint="$URING_CSI_CONTROLLER_ENDPOINT" --pool=default=/srv/pool,shared &
  for ((tries = 0; tries < 300; tries++)); do
    if uringctl list >/dev/null 2>&1; then break; fi
    sleep 0.1
  done
  uringctl create emulated 16Mi --pool default
  uringctl list | grep -w emulated
  uringctl delete emulated
  kill %1
  wait %1'
# shellcheck disable=SC2016 # for the container's shell
inside node '
  uringctl doctor || test $? = 1
  if said=$(timeout 60 uring-csi-node --endpoint=unix:///run/node.sock --node-id=story 2>&1); then
    echo "the node agent ended by itself: $said" >&2
    exit 1
  fi
  tail -n 3 <<<"$said"
  grep -qE "io_uring|seccomp" <<<"$said"'
