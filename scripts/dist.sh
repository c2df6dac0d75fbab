#!/usr/bin/env bash
# dist.sh DIR PROGRAM...: builds programs as the images carry them, each with its own
# features alone, and installs them into DIR: stripped, and into DIR.debug what was stripped,
# for gdb, perf and addr2line, which find it by the programs' build ids.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=$1
shift
target=${CARGO_TARGET_DIR:-target}

declare -A features=(
  [uring-csi-controller]=controller,kms
  [uring-csi-holder]=holder
  # One build with the node's, whose image has both.
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
  cargo build --profile dist --locked --no-default-features --features "$set" "${bins[@]}"
done

install -d "$dir" "$dir.debug"
for program; do
  objcopy --only-keep-debug "$target/dist/$program" "$dir.debug/$program.debug"
  strip -o "$dir/$program" "$target/dist/$program"
  objcopy --add-gnu-debuglink="$dir.debug/$program.debug" "$dir/$program"
done
