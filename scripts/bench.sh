#!/usr/bin/env bash
# Runs the benches (bench/), each on a kernel that has what it needs: `loop`, and
# `ceph`, which is Ceph in the controller, on the machine's own; `nbd`, and `rbd`,
# which is Ceph on the node, on the test kernel (tests/kernel/in.sh), or on the
# machine's own, too, with HOST_KERNEL=1. ONLY=nbd runs one of them, QUICK=1 all
# in short form. PROFILE=dev takes what the tests have built, which says whether they
# run and not how fast.
set -euo pipefail
cd "$(dirname "$0")/.."

bench=$(
  cargo bench --profile "${PROFILE:-bench}" --bench node --no-run --message-format=json-render-diagnostics |
    sed -n 's/.*"executable":"\([^"]*\/node-[^/"]*\)".*/\1/p'
)
command=("$bench" --bench)
if [[ -n ${QUICK:-} ]]; then command+=(--quick); fi

known=
for backend in loop ceph nbd rbd; do
  [[ ${ONLY:-$backend} == "$backend" ]] || continue
  known=1
  if [[ $backend == loop || $backend == ceph ]]; then
    BACKEND=$backend "${command[@]}"
    continue
  fi
  code=0
  tests/kernel/in.sh env BACKEND="$backend" CRITERION_HOME=/tmp/criterion "${command[@]}" || code=$?
  if ((code == 125)); then
    echo "**** NOT MEASURED, for the reason above: $backend" >&2
  elif ((code)); then
    exit "$code"
  fi
done
[[ -n $known ]] || {
  echo "no backend that is measured is called '$ONLY'" >&2
  exit 1
}
