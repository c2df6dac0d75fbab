#!/usr/bin/env bash
# Runs the test kernel's suite (run.sh) with every file system on several kernels, and
# writes the results to target/kernel/matrix.md, for docs/compatibility.md.
#
#   KERNELS="forky trixie"  the Debian suites whose User-Mode Linux is used
#   ONLY=NAME               as in run.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
export EVERY_FS=1 TEST_KERNEL=required LONGEST=${LONGEST:-6h}
out=${CARGO_TARGET_DIR:-target}/kernel
mkdir -p "$out"

printf '| kernel | tests | passed | failed |\n| --- | --- | ---: | --- |\n' >"$out/matrix.md"
code=0
for suite in ${KERNELS:-forky trixie}; do
  log=$out/matrix-$suite.log
  KERNEL_SUITE=$suite tests/kernel/run.sh | tee "$log" || code=1
  kernel=$(KERNEL_SUITE=$suite tests/kernel/in.sh uname -r)
  failed=$(sed -n 's/^FAILED *[0-9]* ms  \([^ ]*\).*/`\1`/p' "$log" | paste -sd ' ')
  printf '| %s, User-Mode Linux of Debian %s | %s | %s | %s |\n' "$kernel" "$suite" \
    "${ONLY:-all}" "$(grep -c '^ok ' "$log")" "${failed:-none}" >>"$out/matrix.md"
done
cat "$out/matrix.md"
exit "$code"
