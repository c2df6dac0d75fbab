#!/usr/bin/env bash
# Shows a volume's whole life by uringctl on this machine: create, mount, write,
# snapshot, clone, grow, publish raw, delete. Needs root; removes everything at exit.
# With BACKEND=nbd volumes are exports of an nbdkit, which is killed in between, with
# BACKEND=rbd images of a small Ceph cluster, with BACKEND=nfs directories of an
# nfs-ganesha; if this kernel lacks the driver, on the test kernel.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${BACKEND:=loop} in
  loop) ;;
  nbd | rbd | nfs)
    if ! modprobe -q "${BACKEND/nfs/nfsv4}"; then
      echo "this kernel has no module $BACKEND: running on the test kernel"
      exec tests/kernel/in.sh env BACKEND="$BACKEND" BIN_DIR="${BIN_DIR:-}" scripts/demo.sh
    fi
    ;;
  *)
    echo "BACKEND=$BACKEND: must be loop, nbd, rbd or nfs" >&2
    exit 1
    ;;
esac
# shellcheck source=scripts/agents.sh
source scripts/agents.sh

# shellcheck source=scripts/show.sh
source scripts/show.sh

# What uringctl knows the volume of a name by. Lists have directories of NFS servers
# without their names.
id_of() {
  if [[ $BACKEND == nfs ]]; then echo "127.0.0.1#share#$1##"; else echo "$1"; fi
}

is_away() { [[ $(uringctl health 2>/dev/null || true) == *ServerAway* ]]; }
is_well() { uringctl health >/dev/null 2>&1; }

title "Start a node agent and a controller"
start_agents
show uringctl info

if [[ $BACKEND == nfs ]]; then
  title "Create and mount a volume by one command"
else
  title "Create, format and mount a volume by one command"
  mounted+=(--fs xfs)
fi
data=$(id_of data)
show uringctl up data 1Gi "$work/mnt/data" "${class[@]}" "${mounted[@]}"
show findmnt --noheadings --output TARGET,SOURCE,FSTYPE,SIZE "$work/mnt/data"
echo "written before the snapshot" >"$work/mnt/data/story"
sync -f "$work/mnt/data"
show uringctl stats "$data"

title "Snapshot the mounted volume, and restore it"
show uringctl snapshot create "$data" before
echo "written after the snapshot" >>"$work/mnt/data/story"
show uringctl up restored 1Gi "$work/mnt/restored" --from-snapshot before \
  "${class[@]}" "${mounted[@]}"
show cat "$work/mnt/restored/story"

title "Clone a volume"
sync -f "$work/mnt/data"
if [[ $BACKEND == nfs ]]; then
  show uringctl up copy 1Gi "$work/mnt/copy" --from-volume "$data" "${class[@]}" "${mounted[@]}"
else
  show uringctl clone "$data" copy
  show uringctl stage copy
  show uringctl publish copy "$work/mnt/copy"
fi
show cat "$work/mnt/copy/story"

title "Grow a mounted volume"
show uringctl expand "$data" 3Gi
show df -h --output=target,size,used "$work/mnt/data"

volumes=(restored copy)
if [[ $BACKEND != nfs ]]; then
  title "Publish a raw block device"
  show uringctl up disk 256Mi "$work/mnt/disk" --block "${class[@]}"
  show blockdev --getsize64 "$work/mnt/disk"
  volumes+=(disk)
fi

title "List the volumes on the node"
show uringctl volumes
show uringctl health

if [[ $BACKEND == nbd ]]; then
  title "The NBD server is killed: requests wait"
  disown "$nbd_server"
  show kill -9 "$nbd_server"
  (echo "written while the server was away" >>"$work/mnt/data/story" && sync -f "$work/mnt/data") &
  write=$!
  until_true $$ is_away
  show_refused uringctl health

  title "The NBD server returns: the node reconnects by itself"
  start_nbd_server
  show wait "$write"
  until_true $$ is_well
  show uringctl health
  show cat "$work/mnt/data/story"
fi

title "Unpublish, unstage and delete"
show uringctl down "$data" --delete
for volume in "${volumes[@]}"; do uringctl down "$(id_of "$volume")" --delete >/dev/null; done
show uringctl snapshot delete before
if [[ $BACKEND == nfs ]]; then show ls "$work/export"; else show uringctl list; fi
show uringctl volumes

nothing_is_left
if [[ $BACKEND == loop ]]; then
  echo "What becomes of volumes when something fails: make demo FAULTS=1"
fi
