#!/usr/bin/env bash
# dist.sh DIR PROGRAM...: builds programs as the images carry them, each with its own
# features alone, and installs them into DIR: stripped, and into DIR.debug what was stripped,
# for gdb, perf and addr2line, which find it by the programs' build ids. FEATURES=otel adds
# the feature. ARCH=arm64 or amd64
# builds for that architecture, with its compiler and libraries as scripts/build_tools.sh
# installs them.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=$1
shift
built=${CARGO_TARGET_DIR:-target}/dist
tools=

if [[ -n ${ARCH:-} && $ARCH != "$(dpkg --print-architecture)" ]]; then
  case $ARCH in
    amd64) machine=x86_64 ;;
    arm64) machine=aarch64 ;;
    *)
      echo "dist: $ARCH: must be amd64 or arm64" >&2
      exit 1
      ;;
  esac
  export CARGO_BUILD_TARGET=$machine-unknown-linux-gnu
  built=${CARGO_TARGET_DIR:-target}/$CARGO_BUILD_TARGET/dist
  tools=$machine-linux-gnu-
  linker=CARGO_TARGET_${CARGO_BUILD_TARGET^^}_LINKER
  export "${linker//-/_}=${tools}gcc"
  export PKG_CONFIG_ALLOW_CROSS=1 PKG_CONFIG_LIBDIR=/usr/lib/$machine-linux-gnu/pkgconfig
fi

# Relative relocations take a bit each, not 24 bytes (DT_RELR, glibc 2.36).
export RUSTFLAGS="${RUSTFLAGS:-} -C link-arg=-Wl,-z,pack-relative-relocs"

declare -A features=(
  [uring-csi-controller]=controller,kms
  [uring-csi-holder]=holder
  # One build with the node's, whose image has both; the controller's takes it from there.
  [uring-csi-node]="node,cli,kms"
  [uringctl]="node,cli,kms"
)

# The programs of each set of features, which are built together.
declare -A together=()
for program; do
  together[${features[$program]}]+=" --bin $program"
done

for set in "${!together[@]}"; do
  read -ra bins <<<"${together[$set]}"
  cargo build --profile dist --locked --no-default-features --features "$set${FEATURES:+,$FEATURES}" "${bins[@]}"
done

install -d "$dir" "$dir.debug"
for program; do
  "${tools}objcopy" --only-keep-debug "$built/$program" "$dir.debug/$program.debug"
  "${tools}strip" -o "$dir/$program" "$built/$program"
  "${tools}objcopy" --add-gnu-debuglink="$dir.debug/$program.debug" "$dir/$program"
done
