#!/usr/bin/env bash
# build_tools.sh ARCH [PACKAGE...]: in the build stage of an image, installs what
# scripts/dist.sh needs to build for that architecture (dpkg's name), and these packages
# of it.
set -euo pipefail
arch=$1
shift

tools=(pkg-config)
if [[ $arch != "$(dpkg --print-architecture)" ]]; then
  case $arch in
    amd64) machine=x86_64 ;;
    arm64) machine=aarch64 ;;
    *)
      echo "build_tools: no images are built for $arch" >&2
      exit 1
      ;;
  esac
  dpkg --add-architecture "$arch"
  tools+=("gcc-${machine/_/-}-linux-gnu" "libc6-dev:$arch")
  rustup target add "$machine-unknown-linux-gnu"
fi
apt-get update
apt-get install -y --no-install-recommends "${tools[@]}" "${@/%/:$arch}"
rm -rf /var/lib/apt/lists/*
