#!/usr/bin/env bash
# Shows the volume manager: files ask for three volumes, an image, an NBD export and a
# directory of an NFS server; the NFS server is killed, and files change. Needs root, and the
# kernel's drivers or the test kernel; removes everything at exit.
set -euo pipefail
cd "$(dirname "$0")/.."
for module in nbd nfsv4; do
  if ! modprobe -q "$module"; then
    echo "this kernel has no module $module: running on the test kernel"
    exec tests/kernel/in.sh env BIN_DIR="${BIN_DIR:-}" scripts/demo_manager.sh
  fi
done
# shellcheck source=scripts/agents.sh
source scripts/agents.sh
# shellcheck source=scripts/show.sh
source scripts/show.sh

# An NBD server of the pool, in which the image is as well, and an NFS server.
serve_manager() {
  serve_nbd
  serve_nfs
  node_flags+=(--pool "demo=$work/pool,local" --volumes "$work/volumes" --nfs-unmount-timeout 1)
  controller_flags=(--node-id demo --pool "demo=$work/pool,local")
  mkdir "$work/volumes" "$work/files"
  touch "$work/volumes/.uring-csi-volumes"
}
backend=manager

# file NAME KEYS OPTIONS…: writes NAME.toml, which asks for the source of these keys.
file() {
  local name=$1 keys=$2
  shift 2
  printf '[source]\n%s\n\n[mount]\npath = "%s"\n' "$keys" "$work/mnt/$name" >"$work/files/$name.toml"
  printf '%s\n' "$@" >>"$work/files/$name.toml"
}

# Shows the wanted volumes until the command succeeds: on a terminal one table that is drawn
# anew, else a line for each change.
converge() {
  local start=${EPOCHREALTIME/./} table='' before='' lines=0 code=1
  local until=$((SECONDS + 120)) width=500
  # A line that wraps would be two.
  if [[ -t 1 ]]; then width=$(tput cols 2>/dev/null || echo 80); fi
  while ((code != 0)); do
    code=0
    "$@" || code=$?
    table=$(uringctl wanted | cut -c "1-$width")
    if [[ $table != "$before" ]]; then
      if [[ -t 1 ]]; then
        ((lines == 0)) || printf '\033[%dA\033[J' "$lines"
        printf '%s\n' "$table"
        lines=$(wc -l <<<"$table")
      else
        diff <(echo "$before") <(echo "$table") | sed -n 's/^> //p' | grep -v '^NAME' |
          sed "s/^/$(printf '%6d ms  ' $(((${EPOCHREALTIME/./} - start) / 1000)))/" || true
      fi
      before=$table
    fi
    if ((SECONDS > until)); then
      echo "not after two minutes" >&2
      return 1
    fi
    sleep 0.1
  done
}

# Whether the volumes of these names are as their files ask.
ready() {
  local name wanted
  wanted=$(uringctl wanted)
  for name in "$@"; do
    grep -q "^$name *ready " <<<"$wanted" || return 1
  done
}
is_failed() { uringctl wanted | grep -q "^$1 *failed"; }
all_gone() { [[ $(uringctl wanted --json | grep -c '"name"') == 0 ]]; }

# The agent would mount again what is unmounted.
clean() {
  local status=$?
  set +e
  if [[ -n ${node:-} ]]; then kill "$node" && wait "$node"; fi
  (exit "$status")
  tidy
}
trap clean EXIT

title "A node agent that follows a directory of files"
start_agents
node=${pids[-2]}
show uringctl info

title "Files ask for an image, an NBD export and a directory of an NFS server"
truncate -s 512M "$work/pool/image.img" "$work/pool/export.img"
mkdir "$work/export/directory"
image=$'backend = "loop"\npool = "demo"\nimage = "image.img"'
export=$'backend = "nbd"\nexport = "export.img"\nsocket = "'$work$'/nbd.sock"'
directory=$'server = "127.0.0.1"\nshare = "/share"\nsubDir = "directory"\nmountOptions = "port='$nfs_port$'"'
file image "$image" 'fs = "xfs"'
file export "$export"
file directory "$directory"
show cat "$work/files/image.toml"
show uringctl plan "$work"/files/*.toml
show uringctl apply "$work"/files/*.toml
converge ready image export directory
for name in image export directory; do
  echo "written to $name" >"$work/mnt/$name/story"
done

title "The NFS server is killed"
kill -9 "$nfs_server"
wait "$nfs_server" 2>/dev/null || true
mkdir "$work/export/late"
echo "Meanwhile other files change, and one more asks for a directory of that server:"
file image "$image" 'fs = "xfs"' 'options = ["noatime", "noexec"]'
file export "$export" 'mode = "0750"'
file late "${directory/subDir = \"directory\"/subDir = \"late\"}"
show uringctl plan "$work"/files/*.toml
show uringctl apply "$work"/files/{image,export,late}.toml
is_as_far_as_it_gets() { ready image export && is_failed late; }
converge is_as_far_as_it_gets

title "The NFS server returns"
start_nfs_server
converge ready image export directory late
for name in image export directory; do show cat "$work/mnt/$name/story"; done

title "The files are removed; the data stays"
show uringctl remove image export directory late
converge all_gone
show ls "$work/pool" "$work/export/directory"

nothing_is_left
