# Sourced by demo.sh and run.sh: a node agent and a controller of their own, in a
# directory of their own, and tidying that leaves nothing behind.
# shellcheck shell=bash

((EUID == 0)) || {
  echo "loop devices and mounts take root: run it with sudo" >&2
  exit 1
}
BIN_DIR=${BIN_DIR:-target/debug}
BIN_DIR=$(cd "$BIN_DIR" && pwd)
export PATH=$BIN_DIR:$PATH

# Short, because the path of a unix socket has at most 107 bytes.
work=$(mktemp -d "${TMPDIR:-/tmp}/uring-csi.XXXXXX")
pids=()
# Further flags of the node agent.
node_flags=()
export URING_CSI_NODE_ENDPOINT=unix://$work/run/node.sock
export URING_CSI_CONTROLLER_ENDPOINT=unix://$work/run/controller.sock

mounts_below() {
  # Deepest first; spaces are \040 in mountinfo, and there are none here.
  awk -v dir="$1/" 'index($5, dir) == 1 { print $5 }' /proc/self/mountinfo | sort -r
}

loops_below() {
  losetup --list --noheadings --output NAME,BACK-FILE |
    awk -v dir="$1/" 'index($2, dir) == 1 { print $1 }'
}

tidy() {
  local status=$? mount loop
  trap - EXIT INT TERM
  set +e
  if ((${#pids[@]})); then
    kill "${pids[@]}" 2>/dev/null
    wait "${pids[@]}" 2>/dev/null
  fi
  # What a failed run left; the pool last, because images in it were attached.
  for mount in $(mounts_below "$work" | grep -vx "$work/pool"); do umount "$mount"; done
  for loop in $(loops_below "$work/pool"); do losetup -d "$loop"; done
  mountpoint -q "$work/pool" && umount "$work/pool"
  if ((status != 0)) && [[ -s $work/agents.log ]]; then
    echo "--- the agents' log:" >&2
    tail -n 40 "$work/agents.log" >&2
  fi
  rm -rf --one-file-system "$work"
  exit "$status"
}
trap tidy EXIT
trap 'exit 130' INT TERM

# A pool on an XFS of its own: there a snapshot is a copy by reference, so that
# it can be taken of a volume in use.
make_pool() {
  mkdir "$work/pool"
  truncate -s 8G "$work/pool.img"
  mkfs.xfs -q -m reflink=1 "$work/pool.img"
  mount -o loop "$work/pool.img" "$work/pool"
}

start_agents() {
  mkdir -p "$work"/{run,state,kubelet,mnt}
  uring-csi-node \
    --endpoint "$URING_CSI_NODE_ENDPOINT" \
    --node-id demo \
    --run-dir "$work/run" \
    --state-dir "$work/state" \
    --kubelet-dir "$work/kubelet" \
    --allow-path "$work/mnt" \
    --pool "demo=$work/pool,local" \
    "${node_flags[@]}" 2>>"$work/agents.log" &
  pids+=($!)
  uring-csi-controller \
    --endpoint "$URING_CSI_CONTROLLER_ENDPOINT" \
    --node-id demo \
    --pool "demo=$work/pool,local" 2>>"$work/agents.log" &
  pids+=($!)
  wait_for_agents
}

# Until both sockets are there, or one of the agents is not.
wait_for_agents() {
  local pid
  for _ in {1..100}; do
    if [[ -S $work/run/node.sock && -S $work/run/controller.sock ]]; then return; fi
    for pid in "${pids[@]}"; do kill -0 "$pid" || return 1; done
    sleep 0.1
  done
  echo "the agents do not listen" >&2
  return 1
}
