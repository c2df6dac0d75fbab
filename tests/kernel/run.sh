#!/usr/bin/env bash
# Runs tests on a kernel that has what the machine's own may lack (in.sh), booted
# once for all of them. They are built here.
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

tests/kernel/in.sh tests/kernel/suite.sh "${ONLY:-}" "$library" "$stories" ||
  passed_over $?
