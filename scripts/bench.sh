#!/usr/bin/env bash
# Runs the benches (bench/), each on a kernel with its drivers: `loop`, `pools` and `ceph`
# (image files, and Ceph, in the controller) on this machine's kernel; `nbd`, `rbd` (Ceph on
# the node), `nfs` and `mapped` (device-mapper), on the test kernel (tests/kernel/in.sh), or
# with HOST_KERNEL=1 on this machine's. The last two only see what others wait for while they
# hang, and do not run with QUICK=1 or FAULTS=0 unless ONLY names them.
# ONLY=nbd runs one of them, QUICK=1 a short form; FAULTS=0 leaves out the volumes that hang,
# FAULTS=only all else, FAULTS=growth also those that hang in other phases of their lives.
# PROFILE=dev uses the tests' build, which shows that the benches run, but gives no usable
# numbers. UPDATE=1 copies the numbers into PERFORMANCE.md.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${FAULTS:-} in
  "" | 0 | only) ;;
  probe | mount | publish | use | unpublish | unmount | growth)
    # The rows of a backend are replaced together.
    [[ -z ${UPDATE:-} ]] || {
      echo "UPDATE=1 takes every phase: FAULTS=only" >&2
      exit 1
    }
    ;;
  *)
    echo "FAULTS=$FAULTS: there are 0, only, and the phases of a volume's life" >&2
    exit 1
    ;;
esac

bench=$(
  cargo bench --profile "${PROFILE:-bench}" --bench node --no-run --message-format=json-render-diagnostics |
    sed -n 's/.*"executable":"\([^"]*\/node-[^/"]*\)".*/\1/p'
)
# The OSD alone stops 160 times, which takes longer than the test kernel may run by default.
export LONGEST=${LONGEST:-6h}
command=("$bench" --bench)
if [[ -n ${QUICK:-} ]]; then command+=(--quick); fi

output=$(mktemp -d)
trap 'rm -r "$output"' EXIT
known=
measured=()
# A backend that fails does not stop the others.
failed=()
for backend in loop pools ceph nbd rbd nfs mapped; do
  [[ ${ONLY:-$backend} == "$backend" ]] || continue
  if [[ $backend == nfs || $backend == mapped ]] && [[ -z ${ONLY:-} ]] &&
    [[ -n ${QUICK:-} && -z ${FAULTS:-} || ${FAULTS:-} == 0 ]]; then continue; fi
  # Nothing of these hangs.
  if [[ $backend == pools || $backend == ceph ]] && [[ ${FAULTS:-0} != 0 ]]; then continue; fi
  known=1
  if [[ $backend == loop || $backend == pools || $backend == ceph ]]; then
    run=(env BACKEND="$backend" "${command[@]}")
  else
    run=(tests/kernel/in.sh env BACKEND="$backend" FAULTS="${FAULTS:-}" CRITERION_HOME=/tmp/criterion "${command[@]}")
  fi
  code=0
  "${run[@]}" | tee "$output/$backend" || code=$?
  if ((code == 125)); then
    echo "**** NOT MEASURED, for the reason above: $backend" >&2
  elif ((code)); then
    failed+=("$backend")
  fi
  # One that is above a limit has measured nevertheless.
  if grep -q -e '^| backend | case' -e '^| [0-9]* volumes while' "$output/$backend"; then measured+=("$output/$backend"); fi
done
[[ -n $known ]] || {
  echo "there is no bench for the backend '$ONLY'" >&2
  exit 1
}
if [[ -n ${UPDATE:-} ]] && ((${#measured[@]})); then
  scripts/performance.py "${measured[@]}"
fi
if ((${#failed[@]})); then
  echo "**** FAILED: ${failed[*]}" >&2
  exit 1
fi
