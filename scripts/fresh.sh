#!/usr/bin/env bash
# fresh.sh [SUITE...]: runs the README's commands, `make demo` and `make test`, as if
# on a fresh machine: in a root of that suite of Debian (bookworm and trixie) where
# nothing is installed but what is essential, and apt. What is not committed runs, too.
#
# Not fresh are the kernel, which is this machine's, and the Rust toolchain and the
# sources of crates: both suites' own Rust is too old, so the running one is mounted
# into the root, read-only, and so is cargo's registry, in which it may write.
# As root, with mmdebstrap; takes some 15 GB below target/ for each suite, and an hour.
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

# In a mount and a process namespace of its own: whatever ends it, nothing is left
# mounted or running.
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
  # A mount, to be the namespace's root: below it, paths in /proc hold in the
  # namespaces that tests make of their own, which those of a chroot do not.
  mount --bind "$root" "$root"
  for dir in proc sys dev; do mount --rbind "/$dir" "$root/$dir"; done
  mount -t tmpfs run "$root/run"
  mount --bind "$toolchain" "$root/rust"
  mount -o remount,bind,ro "$root/rust"
  mount --bind "$registry" "$root/root/.cargo/registry"
  cp --remove-destination /etc/resolv.conf "$root/etc/"
  # How this machine reaches its mirror.
  apt-config dump | grep -E '^Acquire::(Check-|https?|Retries)' >"$root/etc/apt/apt.conf.d/99mirror" || true
  cd "$root"
  pivot_root . mnt
  # Nothing essential has umount(8). 166 is umount2(2), 2 is MNT_DETACH.
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
