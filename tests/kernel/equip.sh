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
udevadm settle
if (($#)); then exec "$@"; fi
