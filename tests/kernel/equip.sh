#!/usr/bin/env bash
# equip.sh [COMMAND...]: loads the drivers that the running kernel has as modules, and
# then runs the command. If one is missing, it names it and fails.
set -euo pipefail

missing=()
for module in loop "nbd max_part=0" rbd dm_crypt fuse nfsv4; do
  read -ra load <<<"$module"
  [[ -d /sys/module/${load[0]} ]] || modprobe -q "${load[@]}" || missing+=("${load[0]}")
done
if ((${#missing[@]})); then
  echo "this kernel, $(uname -r), lacks ${missing[*]} (modprobe finds no such modules)" >&2
  exit 1
fi
# nfs-ganesha 4.3 answers requests for delegations of directories by errors that make every
# list of a directory fail.
delegations=/sys/module/nfsv4/parameters/directory_delegations
[[ ! -e $delegations ]] || echo N >"$delegations"
udevadm settle
if (($#)); then exec "$@"; fi
