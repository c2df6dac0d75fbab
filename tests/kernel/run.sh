#!/usr/bin/env bash
# Builds the tests and runs them on a kernel with drivers that this machine's may lack
# (in.sh). Such a kernel has one processor, so two run, each with every other test.
#
#   ONLY=NAME              only tests of one backend (ONLY=rbd), module or story
#   HOST_KERNEL=1          on this machine's kernel, which must have all drivers
#   TEST_KERNEL=required   fail if the kernel cannot run; otherwise print that and
#                          succeed
#   LEFT_FOR_KERNEL=FILE   only the tests that it names, if it exists, and those that are
#                          ignored elsewhere
#   LIBRARY=FILE STORIES=FILE  run these test programs instead of building them
set -euo pipefail
cd "$(dirname "$0")/../.."

# Exits with in.sh's code; for 125, no kernel, prints that and succeeds unless required.
passed_over() {
  local code=$1
  ((code == 125)) || exit "$code"
  {
    echo "****"
    echo "**** NOT TESTED, for the reason above: all that needs nbd, rbd, dm_crypt, nfs, udevd"
    echo "**** or CAP_SYS_RESOURCE."
    echo "****"
  } >&2
  [[ ${TEST_KERNEL:-} != required ]] || exit 1
  exit 0
}
tests/kernel/in.sh || passed_over $?

if [[ -z ${LIBRARY:-} ]]; then . tests/kernel/build.sh; fi

left=${LEFT_FOR_KERNEL:-}
[[ -f $left ]] || left=

parts=2
if [[ ${HOST_KERNEL:-} == 1 ]] || (($(nproc) < parts)); then parts=1; fi
kernels=()
# Killing its script ends a kernel.
trap '((!${#kernels[@]})) || kill "${kernels[@]}" 2>/dev/null || true' EXIT
for ((part = 1; part <= parts; part++)); do
  NTH=$part tests/kernel/in.sh tests/kernel/suite.sh "${ONLY:-}" "$LIBRARY" "$STORIES" \
    "$part" "$parts" "$left" &
  kernels+=($!)
done
code=0
for kernel in "${kernels[@]}"; do
  # A failure takes precedence over a missing kernel.
  wait "$kernel" || { ended=$?; ((code && ended == 125)) || code=$ended; }
done
((code == 0)) || passed_over "$code"
