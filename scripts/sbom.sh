#!/usr/bin/env bash
# sbom.sh FILE: writes what the programs together are made of: the crates, with versions,
# licences and checksums, as CycloneDX 1.5. It also lists the few crates that only features
# for the tests bring in.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v cargo-cyclonedx >/dev/null || {
  echo "sbom: cargo install cargo-cyclonedx" >&2
  exit 1
}

# cargo-cyclonedx writes a file beside each Cargo.toml of the workspace, and takes the
# features that any crate of it asks for: a list for one program alone would be wrong.
trap 'rm -f sbom.json tests/testkit/sbom.json' EXIT
cargo cyclonedx --quiet --format json --spec-version 1.5 --no-build-deps --override-filename sbom
mkdir -p "$(dirname "$1")"
mv sbom.json "$1"
