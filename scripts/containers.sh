# shellcheck shell=bash
# Sourced after root.sh: images and containers in a storage of their own below the
# target directory, apart from the machine's, and base images that need no registry.

dir=$(realpath -m "${CARGO_TARGET_DIR:-target}")/images
mkdir -p "$dir"/{tmp,run}
# Buildah keeps its cache of crates and of what cargo built there.
export TMPDIR=$dir/tmp
export CONTAINERS_STORAGE_CONF=$dir/storage.conf BUILDAH_ISOLATION=chroot
driver=overlay
[[ $(stat --file-system --format %T "$dir") != overlayfs ]] || driver=vfs
cat >"$CONTAINERS_STORAGE_CONF" <<TOML
[storage]
driver = "$driver"
graphroot = "$dir/storage"
runroot = "$dir/run"
TOML
export CONTAINERS_CONF=$dir/containers.conf
cat >"$CONTAINERS_CONF" <<TOML
[containers]
# A limit takes a controller that some machines lack.
pids_limit = 0
[engine]
tmp_dir = "$dir/run/libpod"
TOML

# shellcheck disable=SC2034 # read by those who source this
{
  native=$(dpkg --print-architecture)
  version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n1)
}
# What the Containerfiles name.
debian=docker.io/library/debian:trixie-slim

# Makes Debian's base image for an architecture where it is missing, and gives it the name
# that the Containerfiles use.
use_debian() {
  local arch=$1 suite path slim=() keep_nothing
  suite=${debian##*:}
  podman image exists "$debian-$arch" || {
    # What Debian's slim images leave out.
    for path in doc groff info linda lintian locale man; do
      slim+=(--dpkgopt="path-exclude=/usr/share/$path/*")
    done
    slim+=(--dpkgopt="path-include=/usr/share/doc/*/copyright")
    # Nor does apt keep in them what it has downloaded.
    keep_nothing='DPkg::Post-Invoke {"rm -f /var/cache/apt/archives/*.deb || true";};
      Dir::Cache::pkgcache ""; Dir::Cache::srcpkgcache "";'
    echo "making the base image of $arch by mmdebstrap"
    # mmdebstrap takes usrmerge, which brings all of Perl, where Debian's images have
    # usr-is-merged.
    # shellcheck disable=SC2016 # for mmdebstrap's shell
    make_root "${suite%-slim}" "$dir/root.tar" --variant=minbase --architectures="$arch" "${slim[@]}" \
      --aptopt="$keep_nothing" \
      --customize-hook='chroot "$1" apt-get install --yes usr-is-merged usrmerge-' \
      --customize-hook='chroot "$1" apt-get purge --yes "^libperl5" "^perl-modules"'
    podman import --quiet --arch "$arch" --change CMD=bash "$dir/root.tar" "$debian-$arch"
    rm "$dir/root.tar"
  }
  podman tag "$debian-$arch" "$debian"
}

# The steps of a volume's life, by the uringctl that a command runs, such as `podman exec
# NAME`, at $target, where the agent may publish and the command sees it.
target=/mnt/story
volume_is_used() {
  "$@" uringctl info
  "$@" uringctl create story 64Mi --pool default --fs ext4
  "$@" uringctl stage story
  "$@" uringctl publish story "$target"
  "$@" sh -c "echo written >$target/file"
  "$@" uringctl unpublish story "$target"
  "$@" uringctl unstage story
  "$@" uringctl stage story
  "$@" uringctl publish story "$target"
  "$@" grep -qx written "$target/file"
}

volume_is_removed() {
  "$@" uringctl unpublish story "$target"
  "$@" uringctl unstage story
  "$@" uringctl delete story
}

# Waits half a minute for a command to succeed, and then prints its errors.
until_it_succeeds() {
  local tries
  for ((tries = 0; tries < 300; tries++)); do
    "$@" >/dev/null 2>&1 && return
    sleep 0.1
  done
  "$@" >/dev/null
}

# Starts a story in namespaces of its own, in which no process and no mount outlives it:
# `story NAME FUNCTION`. The function finds an empty directory $story, whose mounts
# containers can share, and an empty pool in $story/pool.
story() {
  local status=0
  story=$dir/story-$1
  export story
  mkdir -p "$story"/{pool,mnt}
  # shellcheck disable=SC2016 # for the inner shell
  in_namespaces 'set -euo pipefail
    cd "$PWD"
    . scripts/root.sh
    . scripts/containers.sh
    mount --bind "$story" "$story"
    mount --make-shared "$story"
    # The state of running containers, which ends with them.
    mkdir -p /run/crun
    for place in "$dir/run" /run/crun; do mount -t tmpfs tmpfs "$place"; done
    # Those of a story that was killed.
    podman rm --force --all >/dev/null 2>&1 || true
    # crun runs with either version of cgroups, not with both.
    ! mountpoint --quiet /sys/fs/cgroup/unified || umount /sys/fs/cgroup/unified
    "$1"' - "$2" || status=$?
  local image device
  for image in "$story"/{pool,srv/uring-csi}/*.img; do
    for device in $(losetup --noheadings --output NAME --associated "$image"); do
      echo "$1: $device was left attached" >&2
      losetup --detach "$device"
      status=1
    done
  done
  rm -rf --one-file-system "$story"
  return "$status"
}
