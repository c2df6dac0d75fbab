#!/usr/bin/env bash
# fresh.sh [SUITE...]: runs the commands of docs/start.md, `make demo` and `make test`, as on a
# fresh machine: in a root file system of that Debian suite (bookworm and trixie) with
# only the essential packages and apt. Uncommitted changes are included. With ONLY=demo it
# runs only the demos, with ONLY="lint monitoring" these targets in place of `test`.
#
# The kernel is this machine's. So are the Rust toolchain and the sources of crates,
# because both suites' Rust is too old: the toolchain is mounted read-only into the
# root, cargo's registry writable. Run as root, with mmdebstrap; it takes some 15 GB
# below target/ for each suite, and an hour.
set -euo pipefail
cd "$(dirname "$0")/.."
(($#)) || set -- bookworm trixie
. scripts/root.sh

toolchain=$(rustc --print sysroot)
registry=${CARGO_HOME:-$HOME/.cargo}/registry
root=$(realpath -m "${CARGO_TARGET_DIR:-target}")/fresh
export toolchain registry root

# shellcheck disable=SC2317 # called by name
toolchain_and_registry() {
  mount --bind "$toolchain" "$1/rust"
  mount -o remount,bind,ro "$1/rust"
  mount --bind "$registry" "$1/root/.cargo/registry"
}

# shellcheck disable=SC2317 # called by name
inside() {
  set -euo pipefail
  rm -rf --one-file-system "$root"
  mkdir -p "$root"
  make_root "$1" "$root"
  mkdir -p "$root"/{rust,root/.cargo/registry,root/uring-csi}
  git ls-files -z --cached --others --exclude-standard |
    tar -c --null --files-from=- | tar -x -C "$root/root/uring-csi"
  network_access "$root"
  enter_root "$root" toolchain_and_registry
  local tests="make --keep-going ${ONLY:-test}"
  [[ ${ONLY:-} != demo ]] || tests=true
  # The commands of docs/start.md, in its order.
  env -i HOME=/root TERM="${TERM:-dumb}" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/rust/bin \
    chroot . bash -euc '
    cd /root/uring-csi
    { apt-get update && apt-get install -y make git; } >/dev/null
    TIMEFORMAT="make demo: %0R s"
    time make demo
    make demo FAULTS=1
    $1' - "$tests"
}
export -f debian_mirror make_root network_access enter_root toolchain_and_registry inside

failed=0
for suite; do
  printf '===== a fresh machine: %s =====\n' "$suite"
  # shellcheck disable=SC2016 # for the inner shell
  in_namespaces 'inside "$1"' - "$suite" || failed=1
  rm -rf --one-file-system "$root"
  ((failed)) || printf '===== %s: all passed =====\n' "$suite"
done
exit "$failed"
