#!/usr/bin/env bash
# Runs tests on a kernel that has nbd, rbd, udevd and CAP_SYS_RESOURCE, which the
# machine's own may lack: User-Mode Linux, a kernel that is a program (fetch.sh,
# boot.sh), booted once for all tests. They are built here.
#
#   ONLY=NAME              only tests of one backend (ONLY=rbd), module or story
#   HOST_KERNEL=1          on this machine's own kernel, which must have them all
#   TEST_KERNEL=required   fail where the kernel cannot run; otherwise that is
#                          said and passed over
set -euo pipefail
cd "$(dirname "$0")/../.."

only=${ONLY:-}
dir=$(realpath -m "${CARGO_TARGET_DIR:-target}")/kernel

skip() {
  {
    echo "****"
    echo "**** NOT TESTED: $*."
    echo "**** What needs nbd, rbd, udevd or CAP_SYS_RESOURCE was left out."
    echo "****"
  } >&2
  [[ ${TEST_KERNEL:-} != required ]] || exit 1
  exit 0
}

((EUID == 0)) || skip "the test kernel takes root"
if [[ ${HOST_KERNEL:-} != 1 ]]; then
  [[ $(uname -m) == x86_64 ]] || skip "the test kernel is for x86_64, this is $(uname -m)"
  unshare --mount --pid --fork true || skip "this machine allows no namespaces"
  mkdir -p "$dir"
  tests/kernel/fetch.sh "$dir/uml" || skip "Debian's User-Mode Linux could not be fetched"
fi

binaries=$(
  cargo test --no-run --lib --test stories --message-format=json-render-diagnostics |
    sed -n '/"profile":{[^}]*"test":true/ s/.*"executable":"\([^"]*\)".*/\1/p'
)
# In the order in which they were built.
stories=$(grep '/stories-[^/]*$' <<<"$binaries")
library=$(grep -vxF "$stories" <<<"$binaries")

suite=(tests/kernel/suite.sh "$only" "$library" "$stories")
if [[ ${HOST_KERNEL:-} == 1 ]]; then exec "${suite[@]}"; fi
code=0
tests/kernel/boot.sh "$dir" "${suite[@]}" || code=$?
((code != 125)) || skip "the test kernel does not run here"
exit "$code"
