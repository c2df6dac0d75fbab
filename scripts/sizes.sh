#!/usr/bin/env bash
# Builds the programs as the images carry them (scripts/dist.sh), prints their sizes, and
# fails where one is above its limit in scripts/sizes.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${CARGO_TARGET_DIR:-target}/sizes

mapfile -t programs < <(sed -n 's/^\([a-z][a-z-]*\) .*/\1/p' scripts/sizes.txt)
scripts/dist.sh "$dir" "${programs[@]}"

over=0
while read -r program limit; do
  bytes=$(stat -c %s "$dir/$program")
  note=
  if ((bytes > limit << 20)); then
    note=", too large"
    over=1
  fi
  printf '%-22s %5d KiB of %d%s\n' "$program" $((bytes >> 10)) $((limit << 10)) "$note"
done < <(grep -v '^#' scripts/sizes.txt)
exit "$over"
