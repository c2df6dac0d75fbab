#!/usr/bin/env bash
# images.sh [ARCH...]: builds the images of deploy/ for these architectures (dpkg's names;
# by default this machine's), prints their sizes, lists what they are made of, and runs a
# volume's life in this machine's ones (scripts/images_story.sh). No registry is needed: the base images are made
# here, by mmdebstrap and of this machine's Rust toolchain, under the names that the
# Containerfiles use, and only where they are missing.
#
# QUICK=1: of the programs that are built already (BIN_DIR, by default target/debug), for this
# machine alone, and without sizes and lists: some minutes in place of half an hour.
#
# Run as root, with buildah, podman, crun, mmdebstrap, rustup, Syft, cargo-cyclonedx and what
# scripts/container_of.py imports; for another architecture, with arch-test and qemu-user-static.
# Images, base images and the build's cache stay below target/images, apart from the machine's own.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/root.sh
. scripts/containers.sh
(($#)) || set -- "$native"
revision=$(git rev-parse HEAD)
created=$(git log -1 --format=%cI)
rust=$(sed -n 's/^FROM .*\(docker.io.library.rust[^ ]*\).*/\1/p' deploy/Containerfile.node)

# Debian with a compiler, and with the toolchain that builds this project here.
make_rust() {
  local toolchain context=$dir/rust
  echo "making the base image $rust of Debian and this machine's toolchain"
  toolchain=$(rustc --print sysroot)
  rm -rf "$context"
  mkdir -p "$context"/cargo/bin "$context/rustup/toolchains"
  cp --dereference "$(command -v rustup)" "$context/cargo/bin/rustup"
  for proxy in cargo rustc; do ln -s rustup "$context/cargo/bin/$proxy"; done
  cp -a "$toolchain" "$context/rustup/toolchains/"
  rm -rf "$context/rustup/toolchains/$(basename "$toolchain")/share"
  # This machine's access to registries.
  cp -rL /etc/ssl/certs "$context/certs"
  buildah build --quiet --pull-never --tag "$rust" --file - "$context" <<END
FROM $debian
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev
COPY certs /etc/ssl/certs
COPY cargo /usr/local/cargo
COPY rustup /usr/local/rustup
ENV RUSTUP_HOME=/usr/local/rustup CARGO_HOME=/usr/local/cargo PATH=/usr/local/cargo/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
RUN rustup default $(basename "$toolchain") && cargo --version
END
  rm -rf "$context"
}

name_of() {
  echo "localhost/uring-csi-$1:$version-$2"
}

build() {
  local arch=$1 image=$2
  # Debian 12's buildah does not set BUILDPLATFORM by itself.
  buildah build --platform "linux/$arch" --build-arg "BUILDPLATFORM=linux/$native" \
    --pull-never --file "deploy/Containerfile.$image" \
    --build-arg "VERSION=$version" --build-arg "REVISION=$revision" \
    --build-arg "CREATED=$created" \
    --tag "$(name_of "$image" "$arch")" .
  check_labels "$(name_of "$image" "$arch")"
}

# An image of the last stage of its Containerfile, of programs that are built already.
build_quickly() {
  local image=$1 context=$dir/quick program stage programs=()
  rm -rf "$context"
  mkdir "$context"
  read -ra programs < <(sed -n 's|.*scripts/dist.sh /out ||p' "deploy/Containerfile.$image") || true
  for program in "${programs[@]}"; do
    strip -o "$context/$program" "${BIN_DIR:-${CARGO_TARGET_DIR:-target}/debug}/$program"
  done
  stage=$(tac "deploy/Containerfile.$image" | sed '/^FROM /q' | tac)
  buildah build --platform "linux/$native" --pull-never --layers --quiet \
    --build-arg "VERSION=$version" --build-arg "REVISION=$revision" \
    --build-arg "CREATED=$created" \
    --tag "$(name_of "$image" "$tag")" --file - "$context" \
    <<<"${stage/--from=build \/out\//.}" >/dev/null
  check_labels "$(name_of "$image" "$tag")"
}

# The image says what it is made of, and of which commit.
check_labels() {
  local labels wanted
  labels=$(podman image inspect --format '{{range $key, $value := .Labels}}{{$key}}={{$value}}{{"\n"}}{{end}}' "$1")
  for wanted in version="$version" revision="$revision" created="$created" base.name="$debian"; do
    grep -qxF "org.opencontainers.image.$wanted" <<<"$labels" || {
      echo "$1 has no label $wanted, but: $labels" >&2
      return 1
    }
  done
}

# The Debian packages of an image as CycloneDX; those of the programs' crates are one list
# for all images.
list_packages() {
  local arch=$1 image=$2 root name
  name=$(name_of "$image" "$arch")
  root=$(podman image mount "$name")
  SYFT_CHECK_FOR_APP_UPDATE=false "$syft" scan --quiet "dir:$root" \
    --source-name "uring-csi-$image" --source-version "$version" \
    --output "cyclonedx-json=$sbom/uring-csi-$image-$arch.cdx.json"
  podman image unmount "$name" >/dev/null
}

[[ -x ${CARGO_TARGET_DIR:-target}/python/bin/python ]] || {
  echo "images: target/python is missing, by which the manifests are read: scripts/setup.sh" \
    "containers installs it, from PyPI" >&2
  exit 1
}
# The images that the story starts.
export tag=$native
if [[ -n ${QUICK:-} ]]; then
  tag=quick
  use_debian "$native"
  for image in node controller holder nbd-server; do
    echo "building the image $image of programs that are built already"
    build_quickly "$image"
  done
  story images scripts/images_story.sh
  exit
fi

# Without a list there is nothing to release, and the build takes long.
sbom=$dir/sbom syft=$(realpath -m "${CARGO_TARGET_DIR:-target}")/syft/bin/syft
[[ -x $syft ]] || {
  echo "images: $syft is missing, which lists the packages of the images: scripts/setup.sh" \
    "images installs it, from PyPI" >&2
  exit 1
}
command -v cargo-cyclonedx >/dev/null || {
  echo "images: cargo-cyclonedx is missing, which lists the crates of the programs: make images" \
    "builds it, from crates.io, or: cargo install cargo-cyclonedx" >&2
  exit 1
}
for arch; do
  [[ $arch == "$native" ]] || arch-test "$arch" >/dev/null || {
    echo "images: this machine runs no programs of $arch; register qemu-user-static, by" \
      "systemd-binfmt, or where systemd does not run by" \
      "'mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc' and" \
      "'cat /usr/lib/binfmt.d/qemu-*.conf >/proc/sys/fs/binfmt_misc/register'" >&2
    exit 1
  }
done
# The build runs on this machine for every architecture.
use_debian "$native"
podman image exists "$rust" || make_rust
for arch; do
  use_debian "$arch"
  for image in node controller holder nbd-server; do build "$arch" "$image"; done
done

printf '\n%-24s %-6s %9s\n' image "" MiB
for arch; do
  for image in node controller holder nbd-server; do
    printf '%-24s %-6s %9.1f\n' "uring-csi-$image" "$arch" "$(
      podman image inspect --format '{{.Size}}' "$(name_of "$image" "$arch")" |
        awk '{ print $1 / 1048576 }'
    )"
  done
done

mkdir -p "$sbom"
for arch; do
  for image in node controller holder nbd-server; do list_packages "$arch" "$image"; done
done
scripts/sbom.sh "$sbom/uring-csi.cdx.json"
for list in "$sbom"/*.cdx.json; do
  echo "$list: $(grep -o '"purl":' "$list" | wc -l) components"
done

for arch; do
  if [[ $arch == "$native" ]]; then
    story images scripts/images_story.sh
  else
    scripts/images_emulated.sh "$arch" "$version-$arch"
  fi
done
