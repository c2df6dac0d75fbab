#!/usr/bin/env bash
# Shows a volume's whole life by uringctl on this machine: create, mount, write,
# snapshot, clone, grow, publish raw, delete. Needs root; removes everything at exit.
# With BACKEND=nbd volumes are exports of an nbdkit, with BACKEND=rbd images of a small
# Ceph cluster; if this kernel lacks the driver, on the test kernel.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${BACKEND:=loop} in
  loop) ;;
  nbd | rbd)
    if ! modprobe -q "$BACKEND"; then
      echo "this kernel has no module $BACKEND: running on the test kernel"
      exec tests/kernel/in.sh env BACKEND="$BACKEND" BIN_DIR="${BIN_DIR:-}" scripts/demo.sh
    fi
    ;;
  *)
    echo "BACKEND=$BACKEND: must be loop, nbd or rbd" >&2
    exit 1
    ;;
esac
# shellcheck source=scripts/agents.sh
source scripts/agents.sh

# shellcheck source=scripts/show.sh
source scripts/show.sh

title "Start a node agent and a controller"
start_agents
show uringctl info

title "Create, format and mount a volume by one command"
show uringctl up data 1Gi "$work/mnt/data" --fs xfs "${class[@]}"
show findmnt --noheadings --output TARGET,SOURCE,FSTYPE,SIZE "$work/mnt/data"
echo "written before the snapshot" >"$work/mnt/data/story"
sync -f "$work/mnt/data"
show uringctl stats data

title "Snapshot the mounted volume, and restore it"
snapshot=$(uringctl snapshot create data before --json | sed -n 's/.*"snapshot_id": "\(.*\)".*/\1/p')
show uringctl snapshot list
echo "written after the snapshot" >>"$work/mnt/data/story"
show uringctl up restored 1Gi "$work/mnt/restored" --from-snapshot "$snapshot" "${class[@]}"
show cat "$work/mnt/restored/story"

title "Clone a volume"
sync -f "$work/mnt/data"
show uringctl clone data copy
show uringctl stage copy
show uringctl publish copy "$work/mnt/copy"
show cat "$work/mnt/copy/story"

title "Grow a mounted volume"
show uringctl expand data 3Gi
show df -h --output=target,size,used "$work/mnt/data"

title "Publish a raw block device"
show uringctl up disk 256Mi "$work/mnt/disk" --block "${class[@]}"
show blockdev --getsize64 "$work/mnt/disk"

title "List the volumes on the node"
show uringctl volumes
show uringctl health

title "Unpublish, unstage and delete"
show uringctl down data --delete
for volume in restored copy disk; do uringctl down "$volume" --delete >/dev/null; done
show uringctl snapshot delete "$snapshot"
show uringctl list
show uringctl volumes

nothing_is_left
