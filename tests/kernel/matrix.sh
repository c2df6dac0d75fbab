#!/usr/bin/env bash
# Runs on several kernels the test kernel's suite (run.sh) with every file system, the tests
# of Ceph that take minutes, and all tests of Ceph with several releases of it; and writes
# the results to target/kernel/matrix.md, for docs/compatibility.md.
#
#   KERNELS="forky trixie"  the Debian suites whose User-Mode Linux is used
#   SUITES="trixie sid"     the Debian suites whose Ceph is used, beside this machine's; empty:
#                           none
#   ONLY=NAME               as in run.sh
#
# A suite's Ceph, its libraries, daemons and tools, runs in a root file system of that
# suite (in_suite.sh).
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
for kernel in ${KERNELS:-forky trixie}; do
  export KERNEL_SUITE=$kernel
  # Fetches it with this machine's tools.
  tests/kernel/in.sh
  on="Linux $(tests/kernel/in.sh uname -r), User-Mode Linux of Debian $kernel"
  EVERY_FS=1 tests/kernel/run.sh 2>&1 | tee "$out/matrix-$kernel.log" || code=1
  row "$kernel" "$on" "${ONLY:-all}"
  # They need no driver, so the suite has them only where it is for Ceph.
  if [[ -z ${ONLY:-} ]]; then
    slow='(mirrored|lost_daemons)::'
    ONLY=$slow tests/kernel/run.sh 2>&1 | tee "$out/matrix-$kernel-slow.log" || code=1
    row "$kernel-slow" "the same" "mirrored, lost_daemons"
  fi
  for suite in ${SUITES-trixie sid}; do
    ONLY=${ONLY:-rbd} tests/kernel/in_suite.sh "$suite" tests/kernel/run.sh 2>&1 |
      tee "$out/matrix-$kernel-ceph-$suite.log" || code=1
    ceph=$(tests/kernel/in_suite.sh "$suite" ceph --version | cut -d' ' -f3)
    row "$kernel-ceph-$suite" "the same, Ceph $ceph of Debian $suite" "${ONLY:-rbd}"
  done
done
cat "$out/matrix.md"
exit "$code"
