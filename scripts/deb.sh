#!/usr/bin/env bash
# deb.sh: builds the Debian package (Cargo.toml, package.metadata.deb) of the programs of
# scripts/dist.sh, with cargo-deb. It runs on this machine's release of Debian and later.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v cargo-deb >/dev/null || {
  echo "deb: cargo install cargo-deb" >&2
  exit 1
}
target=${CARGO_TARGET_DIR:-target}

# cargo-deb takes the programs from the build and strips them itself.
scripts/dist.sh "$target/sizes" uring-csi-node uring-csi-controller uring-csi-holder uringctl
for shell in bash zsh fish; do
  "$target/dist/uringctl" completions "$shell" >"$target/dist/uringctl.$shell"
done
scripts/sbom.sh "$target/dist/uring-csi.cdx.json"
cargo deb --no-build
