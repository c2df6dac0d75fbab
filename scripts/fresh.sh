#!/usr/bin/env bash
# fresh.sh [SUITE...]: runs the README's commands, `make demo` and `make test`, as on a
# fresh machine: in a root file system of that Debian suite (bookworm and trixie) with
# only the essential packages and apt. Uncommitted changes are included.
#
# The kernel is this machine's. So are the Rust toolchain and the sources of crates,
# because both suites' Rust is too old: the toolchain is mounted read-only into the
# root, cargo's registry writable. Run as root, with mmdebstrap; it takes some 15 GB
# below target/ for each suite, and an hour.
set -euo pipefail
cd "$(dirname "$0")/.."
(($#)) || set -- bookworm trixie

command -v mmdebstrap >/dev/null || {
  echo "fresh: install mmdebstrap" >&2
  exit 1
}
# shellcheck disable=SC2016 # apt's own variable
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' |
  grep '/debian/\?$' | head -n1)
toolchain=$(rustc --print sysroot)
registry=${CARGO_HOME:-$HOME/.cargo}/registry
root=$(realpath -m "${CARGO_TARGET_DIR:-target}")/fresh
export mirror toolchain registry root

# In its own mount and process namespaces, so that no mount and no process remains,
# however it ends.
# shellcheck disable=SC2317 # called by name
inside() {
  set -euo pipefail
  local suite=$1 dir
  rm -rf --one-file-system "$root"
  mkdir -p "$root"
  mmdebstrap --quiet --variant=apt "$suite" "$root" "$mirror"
  mkdir -p "$root"/{rust,root/.cargo/registry,root/uring-csi}
  git ls-files -z --cached --others --exclude-standard |
    tar -c --null --files-from=- | tar -x -C "$root/root/uring-csi"
  # A mount point, so that it can become the namespace's root: paths in /proc then also
  # hold in the namespaces that tests create, unlike those in a chroot.
  mount --bind "$root" "$root"
  for dir in proc sys dev; do mount --rbind "/$dir" "$root/$dir"; done
  mount -t tmpfs run "$root/run"
  mount --bind "$toolchain" "$root/rust"
  mount -o remount,bind,ro "$root/rust"
  mount --bind "$registry" "$root/root/.cargo/registry"
  cp --remove-destination /etc/resolv.conf "$root/etc/"
  # apt's access to this machine's mirror.
  apt-config dump | grep -E '^Acquire::(Check-|https?|Retries)' >"$root/etc/apt/apt.conf.d/99mirror" || true
  cd "$root"
  pivot_root . mnt
  # No essential package has umount(8). 166 is umount2(2), 2 is MNT_DETACH.
  chroot . perl -e 'syscall(166, my $dir = "/mnt", 2) and die "umount: $!\n"'
  # The README's commands, in its order.
  env -i HOME=/root TERM="${TERM:-dumb}" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/rust/bin \
    chroot . bash -euc '
    cd /root/uring-csi
    { apt-get update && apt-get install -y make git; } >/dev/null
    make demo
    make --keep-going test'
}
export -f inside

failed=0
for suite; do
  printf '===== a fresh machine: %s =====\n' "$suite"
  unshare --mount --pid --fork --kill-child --mount-proc bash -c 'inside "$1"' - "$suite" ||
    failed=1
  rm -rf --one-file-system "$root"
  ((failed)) || printf '===== %s: all passed =====\n' "$suite"
done
exit "$failed"
