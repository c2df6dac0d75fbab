#!/usr/bin/env bash
# Runs the test kernel's suite (run.sh) with every file system on several kernels, and its
# tests of Ceph with several releases of Ceph, and writes the results to
# target/kernel/matrix.md, for docs/compatibility.md.
#
#   KERNELS="forky trixie"  the Debian suites whose User-Mode Linux is used
#   SUITES="trixie sid"     the Debian suites whose Ceph is used, beside this machine's
#   ONLY=NAME               as in run.sh
#
# A suite's Ceph, its libraries, daemons and tools, runs in a root file system of that
# suite (in_suite.sh). An empty KERNELS or SUITES omits these runs.
set -euo pipefail
cd "$(dirname "$0")/../.."
export TEST_KERNEL=required MATRIX=1 LONGEST=${LONGEST:-6h}
out=$(realpath -m "${CARGO_TARGET_DIR:-target}")/kernel
mkdir -p "$out"
. tests/kernel/build.sh

printf '| with | tests | passed | failed |\n| --- | --- | ---: | --- |\n' >"$out/matrix.md"
code=0
# `row NAME WITH TESTS`: adds a line for the run whose output is matrix-NAME.log.
row() {
  local log=$out/matrix-$1.log failed
  failed=$(sed -n 's/^FAILED *[0-9]* ms  \([^ ]*\).*/`\1`/p' "$log" | paste -sd ' ')
  printf '| %s | %s | %s | %s |\n' "$2" "$3" "$(grep -c '^ok ' "$log")" "${failed:-none}" >>"$out/matrix.md"
}
for suite in ${KERNELS-forky trixie}; do
  export KERNEL_SUITE=$suite
  EVERY_FS=1 tests/kernel/run.sh 2>&1 | tee "$out/matrix-$suite.log" || code=1
  row "$suite" "Linux $(tests/kernel/in.sh uname -r), User-Mode Linux of Debian $suite" "${ONLY:-all}"
done
unset KERNEL_SUITE
# Fetches it with this machine's tools.
tests/kernel/in.sh
for suite in ${SUITES-trixie sid}; do
  ONLY=${ONLY:-rbd} tests/kernel/in_suite.sh "$suite" tests/kernel/run.sh 2>&1 |
    tee "$out/matrix-ceph-$suite.log" || code=1
  row "ceph-$suite" "Ceph $(tests/kernel/in_suite.sh "$suite" ceph --version | cut -d' ' -f3), Debian $suite" "${ONLY:-rbd}"
done
cat "$out/matrix.md"
exit "$code"
