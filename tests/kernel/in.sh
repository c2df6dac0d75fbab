#!/usr/bin/env bash
# in.sh [COMMAND...]: runs a command on a kernel that has nbd, rbd, dm_crypt, udevd
# and CAP_SYS_RESOURCE, which the machine's own may lack: User-Mode Linux, a kernel
# that is a program (fetch.sh, boot.sh); with HOST_KERNEL=1 on the machine's own,
# which must then have them all. Without a command it only sees to it that there is
# such a kernel.
#
# KERNEL_SUITE=trixie takes the kernel of that suite of Debian.
#
# Exits with the command's code, or with 125 and the reason where there is no such
# kernel and none can be had.
set -euo pipefail
cd "$(dirname "$0")/../.."
suite=${KERNEL_SUITE:-}
dir=$(realpath -m "${CARGO_TARGET_DIR:-target}")/kernel${suite:+-$suite}

none() {
  printf 'no test kernel: %s\n' "$*" >&2
  exit 125
}

((EUID == 0)) || none "it takes root"
if [[ ${HOST_KERNEL:-} == 1 ]]; then exec tests/kernel/equip.sh "$@"; fi

[[ $(uname -m) == x86_64 ]] || none "it is for x86_64, this is $(uname -m)"
unshare --mount --pid --fork true || none "this machine allows no namespaces"
mkdir -p "$dir"
tests/kernel/fetch.sh "$dir/uml" ${suite:+"$suite"} || none "Debian's User-Mode Linux could not be fetched"
if (($#)); then exec tests/kernel/boot.sh "$dir" tests/kernel/equip.sh "$@"; fi
