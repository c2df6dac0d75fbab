#!/usr/bin/env bash
# in_suite.sh SUITE COMMAND...: runs a command, in this directory, with the programs and
# libraries of that Debian suite, its Ceph above all: in a root file system that holds
# the packages of setup.sh and PyKMIP, made at the first call and kept in target/suites. Programs
# built here run in it if its libc is not older. Run as root, with mmdebstrap.
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/root.sh
suite=$1
shift

target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
root=$target/suites/$suite
if [[ ! -d $root ]]; then
  rm -rf "$root.new"
  mkdir -p "$root.new"
  make_root "$suite" "$root.new" --include="$(scripts/setup.sh --list test | paste -sd ,)" >&2
  # This machine's is for its own release of Python.
  network_access "$root.new"
  env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot "$root.new" \
    bash -s /usr/local/lib/pykmip <scripts/pykmip.sh >&2
  ln -s ../lib/pykmip/pykmip-python "$root.new/usr/local/bin/"
  mv "$root.new" "$root"
fi
export root target

# shellcheck disable=SC2317 # called by name
checkout_and_target() {
  mkdir -p "$1$PWD" "$1$target"
  mount --rbind "$PWD" "$1$PWD"
  [[ $target == "$PWD"/* ]] || mount --rbind "$target" "$1$target"
}
# shellcheck disable=SC2317 # called by name
inside() {
  set -euo pipefail
  local dir=$PWD
  enter_root "$root" checkout_and_target
  exec chroot . bash -euc 'cd "$1"; shift; exec "$@"' - "$dir" "$@"
}
export -f enter_root checkout_and_target inside
# shellcheck disable=SC2016 # for the inner shell
in_namespaces 'inside "$@"' - "$@"
