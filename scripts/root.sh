# shellcheck shell=bash
# Sourced: a minimal root file system of a Debian suite, and a mount namespace with it
# as the root. The kernel is this machine's.

# Prints the mirror that apt uses here.
debian_mirror() {
  # shellcheck disable=SC2016 # apt's own variable
  apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' |
    grep '/debian/\?$' | head -n1
}

# `make_root SUITE DIR [OPTION...]`: only the essential packages and apt, which gets this
# machine's access to the mirror; the options are mmdebstrap's.
make_root() {
  command -v mmdebstrap >/dev/null || {
    echo "root: install mmdebstrap" >&2
    return 1
  }
  local suite=$1 root=$2 access
  shift 2
  access=$(apt-config dump | grep -E '^Acquire::(Check-|https?|Retries)' || true)
  mmdebstrap --quiet --variant=apt ${access:+--aptopt="$access"} "$@" "$suite" "$root" "$(debian_mirror)"
}

# `network_access ROOT`: this machine's names of hosts, and its access to PyPI, as make_root
# passes apt's. The package ca-certificates replaces the list of authorities.
network_access() {
  cp --remove-destination /etc/resolv.conf "$1/etc/"
  [[ -e /etc/pip.conf ]] || return 0
  cp -L /etc/ssl/certs/ca-certificates.crt "$1/etc/pip-ca.crt"
  sed 's|^cert *=.*|cert = /etc/pip-ca.crt|' /etc/pip.conf >"$1/etc/pip.conf"
}

# Runs a script, by `bash -c` and with these arguments, in its own mount and process
# namespaces, so that no mount and no process remains, however it ends.
in_namespaces() {
  unshare --mount --pid --fork --kill-child --mount-proc bash -c "$@"
}

# Makes the directory this mount namespace's root. Before that, `MOUNT ROOT` mounts into
# it what the caller needs there.
enter_root() {
  local root=$1 mount=$2 dir
  # A mount point, so that it can become the namespace's root: paths in /proc then also
  # hold in the namespaces that tests create, unlike those in a chroot.
  mount --bind "$root" "$root"
  for dir in proc sys dev; do mount --rbind "/$dir" "$root/$dir"; done
  mount -t tmpfs run "$root/run"
  "$mount" "$root"
  cd "$root"
  pivot_root . mnt
  # No essential package has umount(8). 166 is umount2(2), 2 is MNT_DETACH.
  chroot . perl -e 'syscall(166, my $dir = "/mnt", 2) and die "umount: $!\n"'
}
