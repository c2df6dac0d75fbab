#!/usr/bin/env bash
# Installs the missing packages for the build, the tests and the demo: on Debian and
# Ubuntu as root; elsewhere it lists them. Returns at once when none is missing. With
# `lint` also rustfmt, clippy, and a tool that builds the manifests.
#
# Rust comes from the first of these that is new enough: the distribution's cargo, the
# distribution's rustup, rustup's own installer.
set -euo pipefail

packages=(
  build-essential pkg-config libudev-dev  # to build
  e2fsprogs xfsprogs btrfs-progs          # to make and check file systems
  util-linux mount fdisk procps kmod      # for tests and the demo
  nbdkit qemu-utils                       # servers of NBD exports, for tests
  nbd-client strace                       # for comparison in the benches
  ceph-mon ceph-mgr ceph-osd ceph-common  # a Ceph cluster, for tests
  rbd-nbd librbd1 librados2               # and to map its images
  python3 python3-yaml                    # to check the manifests
  busybox-static patchelf udev            # for the test kernel
)

fail() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

# Root on Debian or Ubuntu.
can_install() {
  ((EUID == 0)) && command -v apt-get >/dev/null
}

# A fresh machine or container has no package lists.
update_lists() {
  [[ -n ${updated:-} ]] || apt-get update -qq
  updated=yes
}

install() {
  printf 'setup: installing %s\n' "$*"
  update_lists
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@"
}

install_packages() {
  command -v dpkg-query >/dev/null || {
    command -v cc >/dev/null && command -v mkfs.xfs >/dev/null && return
    fail "this is neither Debian nor Ubuntu; install the contents of these packages: ${packages[*]}"
  }
  local missing=() package
  for package in "${packages[@]}"; do
    dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null |
      grep -qx installed || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  can_install || fail "as root: apt-get install ${missing[*]}"
  install "${missing[@]}"
}

# True if version $1 is not newer than $2.
at_most() {
  [[ $(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n1) == "$1" ]]
}

# The version of a package that apt would install; empty if there is none.
candidate() {
  apt-cache policy "$1" | sed -n 's/^ *Candidate: \([0-9][0-9.]*\).*/\1/p'
}

# The version of the installed cargo; empty if none works (rustup's proxy fails without
# a toolchain).
cargo_version() {
  cargo --version 2>/dev/null | cut -d' ' -f2
}

install_rust() {
  local wanted=$1 packaged
  can_install ||
    fail "Rust $wanted or newer is needed; get it from https://rustup.rs, with clippy and rustfmt"
  update_lists
  packaged=$(candidate cargo)
  if [[ -n $packaged ]] && at_most "$wanted" "$packaged"; then
    install cargo rustfmt rust-clippy
  elif command -v rustup >/dev/null || [[ -n $(candidate rustup) ]]; then
    command -v rustup >/dev/null || install rustup ca-certificates
    rustup toolchain install stable --profile minimal --component clippy --component rustfmt
    rustup default stable
  else
    install curl ca-certificates
    # As https://rustup.rs says. The distribution's old cargo may stay: the Makefile
    # searches ~/.cargo/bin first.
    curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs |
      RUSTUP_INIT_SKIP_PATH_CHECK=yes sh -s -- -y --no-modify-path \
        --profile minimal --component clippy --component rustfmt
  fi
  hash -r
}

check_cargo() {
  local wanted found
  wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
  found=$(cargo_version) || found=
  [[ -n $found ]] && at_most "$wanted" "$found" && return
  # The user updates an existing rustup toolchain.
  [[ -n $found ]] && command -v rustup >/dev/null &&
    fail "cargo is $found, Rust $wanted or newer is needed: rustup update stable"
  install_rust "$wanted"
  found=$(cargo_version) || found=
  if [[ -z $found ]] || ! at_most "$wanted" "$found"; then
    fail "cargo is ${found:-missing} after installing it; Rust $wanted or newer is needed"
  fi
}

check_linters() {
  cargo fmt --version >/dev/null 2>&1 && cargo clippy --version >/dev/null 2>&1 && return
  if command -v rustup >/dev/null; then
    rustup component add clippy rustfmt
  elif can_install && [[ $(command -v cargo) == /usr/bin/cargo ]]; then
    install rustfmt rust-clippy
  else
    fail "rustfmt and clippy are missing; install those that belong to $(command -v cargo)"
  fi
}

# kubectl since 1.21, or kustomize, builds manifests with components. Debian 12 has an
# older kubectl and no kustomize; Debian 13's runs there.
check_kustomize() {
  command -v kubectl >/dev/null || command -v kustomize >/dev/null && return
  if can_install && update_lists && [[ -n $(candidate kustomize) ]]; then
    install kustomize
    return
  fi
  printf 'setup: unpacking kustomize of Debian trixie into %s\n' "$kustomize"
  scripts/unpack.sh trixie "$kustomize" kustomize ||
    echo "setup: without kubectl or kustomize the manifests are not checked" >&2
}

cd "$(dirname "$0")/.."
kustomize=${CARGO_TARGET_DIR:-target}/kustomize
PATH=$PATH:$(realpath -m "$kustomize/usr/bin")
PATH=${CARGO_HOME:-$HOME/.cargo}/bin:$PATH
install_packages
check_cargo
if [[ ${1:-} == lint ]]; then
  check_linters
  check_kustomize
fi
