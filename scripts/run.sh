#!/usr/bin/env bash
# Runs both agents with a new pool until ^C. Needs root; removes everything at exit.
# With BACKEND=nbd it starts an nbdkit, with BACKEND=rbd a small Ceph cluster, with
# BACKEND=nfs an nfs-ganesha.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/agents.sh
source scripts/agents.sh

node_flags=(--metrics-listen 127.0.0.1:9809)
start_agents
cat <<TEXT
The agents run. In another shell, as root:

  export PATH=$BIN_DIR:\$PATH
  export URING_CSI_NODE_ENDPOINT=$URING_CSI_NODE_ENDPOINT
  export URING_CSI_CONTROLLER_ENDPOINT=$URING_CSI_CONTROLLER_ENDPOINT
${URING_CSI_SECRETS:+  export URING_CSI_SECRETS=$URING_CSI_SECRETS
}
  uringctl up data 1Gi $work/mnt/data ${class[*]@Q} ${mounted[*]@Q}
  uringctl volumes
  uringctl down $work/mnt/data --delete
  curl http://127.0.0.1:9809/metrics

Their log follows; ^C ends them and removes everything.

TEXT
trap 'exit 0' INT TERM
tail -f "$work/agents.log" &
pids+=($!)
wait -n "${pids[@]}"
