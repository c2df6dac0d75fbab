# Sourced by the demos and by run.sh: starts a node agent and a controller in a temporary
# directory, and removes everything at exit.
# shellcheck shell=bash

((EUID == 0)) || {
  echo "loop devices and mounts take root: run it with sudo" >&2
  exit 1
}
BIN_DIR=${BIN_DIR:-target/debug}
BIN_DIR=$(cd "$BIN_DIR" && pwd)
export PATH=$BIN_DIR:$PATH

# The volumes' backend: `loop`, `nbd`, `rbd` or `nfs`. It needs the driver of that name in this
# kernel.
backend=${BACKEND:-loop}

# Short, because a unix socket's path has at most 107 bytes.
work=$(mktemp -d "${TMPDIR:-/tmp}/uring-csi.XXXXXX")
pids=()
# The directories of the pools and of the NFS export, on file systems of their own.
pools=()
# Further flags of the agents, of the uringctl commands that create a volume, and of
# those that mount one.
node_flags=()
controller_flags=()
class=()
mounted=()
nfs_port=20490
export URING_CSI_NODE_ENDPOINT=unix://$work/run/node.sock
export URING_CSI_CONTROLLER_ENDPOINT=unix://$work/run/controller.sock

mounts_below() {
  # Deepest first. mountinfo writes a space as \040, but these paths have none.
  awk -v dir="$1/" 'index($5, dir) == 1 { print $5 }' /proc/self/mountinfo | sort -r
}

# The mounts of volumes.
volume_mounts() { mounts_below "$work" | grep -vxF "$(printf '%s\n' "${pools[@]}")"; }

# The attached devices of the pools' images, not those of the pools themselves.
devices() {
  local device pool
  for pool in "${pools[@]}"; do
    losetup --list --noheadings --output NAME,BACK-FILE |
      awk -v dir="$pool/" 'index($2, dir) == 1 { print $1 }'
  done
  for device in /sys/block/nbd*; do
    if grep -qsF "$work/" "$device/backend"; then echo "/dev/${device##*/}"; fi
  done
  for device in /sys/bus/rbd/devices/*; do
    if grep -qsx "${fsid:-none}" "$device/cluster_fsid"; then echo "/dev/rbd${device##*/}"; fi
  done
}

detach() {
  case $1 in
    /dev/loop*) losetup -d "$1" ;;
    /dev/nbd*) nbd-client -d "$1" ;;
    /dev/rbd*) echo "${1#/dev/rbd}" >/sys/bus/rbd/remove_single_major ;;
  esac
}

tidy() {
  local status=$? mount device
  trap - EXIT INT TERM
  set +e
  # The unmounts of a server that a demo killed wait for it.
  if [[ -n ${nbd_server:-} ]] && ! kill -0 "$nbd_server" 2>/dev/null; then start_nbd_server; fi
  # A failed run's mounts and devices, while the server still runs; the pools last,
  # because the devices' images are in them.
  for mount in $(volume_mounts); do umount "$mount"; done
  for device in $(devices); do detach "$device"; done
  if ((${#pids[@]})); then
    kill "${pids[@]}" 2>/dev/null
    wait "${pids[@]}" 2>/dev/null
  fi
  if [[ -n ${users:-} ]]; then exec {users}>&-; fi
  wait
  for mount in "${pools[@]}"; do umount "$mount"; done
  if ((status != 0)) && [[ -s $work/agents.log ]]; then
    echo "--- the agents' log:" >&2
    tail -n 40 "$work/agents.log" >&2
  fi
  rm -rf --one-file-system "$work"
  exit "$status"
}
trap tidy EXIT
trap 'exit 130' INT TERM

# An XFS of its own, which copies by reference, so that a snapshot can be taken of a volume
# in use.
make_xfs() {
  local dir=$work/$1
  mkdir "$dir"
  truncate -s 8G "$dir.img"
  mkfs.xfs -q -m reflink=1 "$dir.img"
  mount -o loop "$dir.img" "$dir"
  pools+=("$dir")
}

make_pool() {
  echo "making a pool, on an XFS of its own below $work"
  make_xfs "$1"
}

# serve_BACKEND prepares the source of volumes, and the flags for both agents and
# uringctl.
serve_loop() {
  make_pool pool
  node_flags+=(--pool "demo=$work/pool,local")
  controller_flags+=(--node-id demo --pool "demo=$work/pool,local")
}

serve_nbd() {
  make_pool pool
  echo "starting an NBD server of it"
  start_nbd_server
  controller_flags+=(--pool "demo=$work/pool,shared")
  class=(--nbd-server "nbd+unix:///?socket=$work/nbd.sock")
}

# Sets `nbd_server` to its process id.
start_nbd_server() {
  # nbdkit does not start where an old socket is left.
  rm -f "$work/nbd.sock"
  nbdkit --foreground --unix "$work/nbd.sock" file dir="$work/pool" 2>>"$work/agents.log" &
  nbd_server=$!
  pids+=("$nbd_server")
  until_there "$nbd_server" "$work/nbd.sock"
}

serve_rbd() {
  start_ceph
  node_flags+=(--ceph-config "$work/ceph.json")
  class=("${ceph_class[@]}")
}

# Adds the flags of a controller, and sets `ceph_class` of the uringctl commands that create
# a volume.
start_ceph() {
  local name value
  declare -A its
  echo "starting a Ceph cluster in memory: some seconds"
  mkdir "$work/ceph" "$work/secret"
  # The cluster runs while another process has this locked, so it must not inherit the
  # lock.
  exec {users}>"$work/ceph/users"
  flock --shared "$users"
  tests/ceph/cluster.py "$work/ceph" {users}>&- >>"$work/agents.log" 2>&1 &
  until_there $! "$work/ceph/ready"
  while IFS='=' read -r name value; do its[$name]=$value; done <"$work/ceph/ready"
  fsid=${its[fsid]}
  cat >"$work/ceph.json" <<JSON
[{"clusterID": "demo", "monitors": ["${its[monitors]}"]}]
JSON
  printf %s "${its[user]}" >"$work/secret/userID"
  printf %s "${its[key]}" >"$work/secret/userKey"
  export URING_CSI_SECRETS=$work/secret
  controller_flags+=(--ceph-config "$work/ceph.json" --ceph-secret "$work/secret")
  ceph_class=(--pool "${its[pool]}" --parameter clusterID=demo --parameter imageFeatures=layering)
}

serve_nfs() {
  local port=$nfs_port
  echo "starting an NFS server"
  mkdir "$work/recovery"
  # Since version 6, nfs-ganesha exports no tmpfs.
  make_xfs export
  cat >"$work/ganesha.conf" <<CONF
NFS_CORE_PARAM { NFS_Port = $port; Protocols = 4; Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false; }
NFSV4 { Graceless = true; RecoveryBackend = fs; RecoveryRoot = $work/recovery; }
NFS_KRB5 { Active_krb5 = false; }
EXPORT { Export_Id = 1; Path = $work/export; Pseudo = /share; Protocols = 4; Access_Type = RW; Squash = No_Root_Squash; SecType = sys; FSAL { Name = VFS; } }
CONF
  start_nfs_server
  controller_flags+=(--nfs-export "127.0.0.1:/share=$work/export")
  class=(--parameter server=127.0.0.1 --parameter share=/share)
  mounted=(--mount-option "port=$port")
}

# Sets `nfs_server` to its process id.
start_nfs_server() {
  ganesha.nfsd -F -f "$work/ganesha.conf" -p "$work/ganesha.pid" -L "$work/ganesha.log" &
  nfs_server=$!
  pids+=("$nfs_server")
  until_true "$nfs_server" listens "$nfs_port"
}

# Its process id is then the last of `pids`.
start_node() {
  uring-csi-node \
    --endpoint "$URING_CSI_NODE_ENDPOINT" \
    --node-id demo \
    --run-dir "$work/run" \
    --state-dir "$work/state" \
    --kubelet-dir "$work/kubelet" \
    --allow-path "$work/mnt" \
    "${node_flags[@]}" 2>>"$work/agents.log" &
  pids+=($!)
}

start_agents() {
  mkdir -p "$work"/{run,state,kubelet,mnt}
  "serve_$backend"
  echo "starting the agents"
  start_node
  uring-csi-controller \
    --endpoint "$URING_CSI_CONTROLLER_ENDPOINT" \
    "${controller_flags[@]}" 2>>"$work/agents.log" &
  pids+=($!)
  until_there "${pids[-1]}" "$work/run/controller.sock"
  until_there "${pids[-2]}" "$work/run/node.sock"
}

# Waits until the command succeeds, and fails if that process has ended.
until_true() {
  local pid=$1
  shift
  for _ in {1..300}; do
    if "$@"; then return; fi
    kill -0 "$pid" || return 1
    sleep 0.1
  done
  echo "not after half a minute: $*" >&2
  return 1
}

listens() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# Waits for the file, which the process makes.
until_there() { until_true "$1" test -e "$2"; }
