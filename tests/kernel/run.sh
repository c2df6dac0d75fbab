#!/usr/bin/env bash
# Runs tests on a kernel that has what the machine's own may lack (in.sh). It has one
# processor, so there are two of it, each with every other test. They are built here.
#
#   ONLY=NAME              only tests of one backend (ONLY=rbd), module or story
#   HOST_KERNEL=1          on this machine's own kernel, which must have it all
#   TEST_KERNEL=required   fail where the kernel cannot run; otherwise that is
#                          said and passed over
set -euo pipefail
cd "$(dirname "$0")/../.."

# Passes the exit code of in.sh on, unless it says that there is no kernel.
passed_over() {
  local code=$1
  ((code == 125)) || exit "$code"
  {
    echo "****"
    echo "**** NOT TESTED, for the reason above: what needs nbd, rbd, dm_crypt, udevd"
    echo "**** or CAP_SYS_RESOURCE was left out."
    echo "****"
  } >&2
  [[ ${TEST_KERNEL:-} != required ]] || exit 1
  exit 0
}
tests/kernel/in.sh || passed_over $?

binaries=$(
  cargo test --no-run --lib --test stories --message-format=json-render-diagnostics |
    sed -n '/"profile":{[^}]*"test":true/ s/.*"executable":"\([^"]*\)".*/\1/p'
)
# In the order in which they were built.
stories=$(grep '/stories-[^/]*$' <<<"$binaries")
library=$(grep -vxF "$stories" <<<"$binaries")

parts=2
if [[ ${HOST_KERNEL:-} == 1 ]] || (($(nproc) < parts)); then parts=1; fi
kernels=()
# Each ends with its script.
trap '((!${#kernels[@]})) || kill "${kernels[@]}" 2>/dev/null || true' EXIT
for ((part = 1; part <= parts; part++)); do
  NTH=$part tests/kernel/in.sh tests/kernel/suite.sh "${ONLY:-}" "$library" "$stories" \
    "$part" "$parts" &
  kernels+=($!)
done
code=0
for kernel in "${kernels[@]}"; do
  # A failure counts for more than a kernel that is missing.
  wait "$kernel" || { ended=$?; ((code && ended == 125)) || code=$ended; }
done
((code == 0)) || passed_over "$code"
