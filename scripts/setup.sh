#!/usr/bin/env bash
# Installs what building, testing and the demo need, where it is missing: on
# Debian and Ubuntu as root, elsewhere it names what to install. Does nothing,
# and quickly, when everything is there.
set -euo pipefail

packages=(
  build-essential pkg-config libudev-dev  # to build
  e2fsprogs xfsprogs btrfs-progs          # to make and check file systems
  util-linux mount procps kmod            # for tests and the demo
  python3 python3-yaml                    # to check the manifests
)

fail() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

install_packages() {
  command -v dpkg-query >/dev/null || {
    command -v cc >/dev/null && command -v mkfs.xfs >/dev/null && return
    fail "this is no Debian or Ubuntu; install what these packages hold: ${packages[*]}"
  }
  local missing=() package
  for package in "${packages[@]}"; do
    dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null |
      grep -qx installed || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  ((EUID == 0)) || fail "as root: apt-get install ${missing[*]}"
  printf 'setup: installing %s\n' "${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}"
}

# The smaller of two versions is $1.
at_most() {
  [[ $(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n1) == "$1" ]]
}

check_cargo() {
  local wanted found candidate
  wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
  if ! command -v cargo >/dev/null; then
    candidate=$(apt-cache policy cargo 2>/dev/null | sed -n 's/^ *Candidate: \([0-9.]*\).*/\1/p')
    if ((EUID == 0)) && [[ -n $candidate ]] && at_most "$wanted" "$candidate"; then
      apt-get install -qq -y --no-install-recommends cargo
    else
      fail "cargo is missing, and the distribution's is older than Rust $wanted (${candidate:-none});" \
        "get it from https://rustup.rs, then: rustup component add clippy rustfmt"
    fi
  fi
  found=$(cargo --version | cut -d' ' -f2)
  at_most "$wanted" "$found" ||
    fail "cargo is $found, Rust $wanted or newer is needed: rustup update stable"
}

cd "$(dirname "$0")/.."
install_packages
check_cargo
