#!/usr/bin/env bash
# in.sh [COMMAND...]: runs a command on a kernel with nbd, rbd, dm_crypt, nfs, udevd and
# CAP_SYS_RESOURCE, which this machine's kernel may lack: User-Mode Linux, a kernel that
# is a program (fetch.sh, boot.sh); with HOST_KERNEL=1 on this machine's kernel, which
# must then have them all. Without a command it only fetches the kernel.
#
# KERNEL_SUITE=trixie selects the kernel of that Debian suite.
#
# Exits with the command's code, or with 125 and the reason if no such kernel is
# available.
set -euo pipefail
cd "$(dirname "$0")/../.."
suite=${KERNEL_SUITE:-}
dir=$(realpath -m "${CARGO_TARGET_DIR:-target}")/kernel${suite:+-$suite}

none() {
  printf 'no test kernel: %s\n' "$*" >&2
  exit 125
}

((EUID == 0)) || none "it needs root"
if [[ ${HOST_KERNEL:-} == 1 ]]; then exec tests/kernel/equip.sh "$@"; fi

[[ $(uname -m) == x86_64 ]] || none "it is for x86_64, this is $(uname -m)"
unshare --mount --pid --fork true || none "this machine does not allow namespaces"
mkdir -p "$dir"
tests/kernel/fetch.sh "$dir/uml" ${suite:+"$suite"} || none "cannot fetch Debian's User-Mode Linux"
if (($#)); then exec tests/kernel/boot.sh "$dir" tests/kernel/equip.sh "$@"; fi
