#!/usr/bin/env bash
# suite.sh ONLY LIBRARY_TESTS STORIES PART PARTS: runs tests in the test kernel, or on
# a machine whose own kernel has what they need. ONLY names a backend, a module or a
# story; without it they are those that another kernel may be another matter to:
# every story, also what is ignored elsewhere, and of the library's tests those
# that attach, mount or call the kernel. Of these it takes every PARTS-th, from the
# PART-th on.
#
# Of the ring's tests not those of its runtime: they ask for the thread's own
# time, for which rustix wants a vDSO with getcpu, and User-Mode Linux has none.
set -euo pipefail
only=$1 library=$2 stories=$3 part=$4 parts=$5

# A test that lacks something here fails.
export TEST_ALL=1
# Every operation is some ten system calls of 10 µs there.
export SOAK_OPERATIONS=${SOAK_OPERATIONS:-300}

case $only in
  "") of_library='^(device|fs|holder|kernel|mount|ring::(child|file|poll|probe))::' of_stories=. ;;
  rbd) of_library='(^|::)(rbd|ceph)' of_stories=$of_library ;;
  *) of_library="(^|::)$only" of_stories=$of_library ;;
esac

# `list BINARY [--ignored]`: its tests' names.
list() {
  "$@" --list --format terse | sed -n 's/: test$//p'
}

# The threads that wait for a device, which may be why a test did.
waiting() {
  echo "Waiting for devices:"
  ps -eLo pid,tid,stat,wchan:32,args | awk 'NR == 1 || $3 ~ /^D/'
  dmesg | tail -n 20
}
export -f waiting

# What did nothing here, and why (tests/left_out.rs).
not_tested=$(mktemp -d)
trap 'rm -rf "$not_tested"' EXIT
export not_tested

# Runs one test, in a process of its own: where many share one, a child that a
# test starts has every other's descriptors until its exec, and keeps what they
# have just closed busy. Says what it said only if it fails.
one() {
  local binary=$1 name=$2 start=${EPOCHREALTIME/./} said code=0 time
  local why=$not_tested/$name
  said=$(NOT_TESTED=$why timeout -k 5 "$longest" "$binary" --include-ignored --exact "$name" 2>&1) || code=$?
  time=$(((${EPOCHREALTIME/./} - start) / 1000))
  if ((code == 0)) && [[ -s $why ]]; then
    return
  elif ((code == 0)); then
    printf 'ok     %6d ms  %s\n' "$time" "$name"
    return
  fi
  printf 'FAILED %6d ms  %s (exit code %d)\n%s\n' "$time" "$name" "$code" "$said"
  case $code in 124 | 137) waiting ;; esac
  # Who shows only the end of it shows why.
  grep -A 3 '^thread .* panicked at' <<<"$said" || true
  return 1
}
export -f one
# What takes longer exits with 124, or 137 where it had to be killed.
export longest=300
# A test that has every file system, or every step at which an agent may be killed.
[[ -z ${EVERY_FS:-} ]] || longest=1800
[[ -z ${EVERY_STEP:-} ]] || longest=7200

# How many tests may share a Ceph cluster. User-Mode Linux has a mapping of the
# machine's for each page of a process, of which there may be 65530 (vm.max_map_count).
# An OSD, with its data in memory, has 20000 after four minutes; after twelve, one
# process was refused more, and the cluster stood still.
together=60

# Lets the cluster that tests share go, which nobody uses. On the machine's own kernel
# there may be others.
without_cluster() {
  for ((i = 0; i < 50; i++)); do
    pgrep -f tests/ceph/cluster.py >/dev/null || break
    sleep 0.2
  done
}

# Runs those of a binary's tests that match: `tests BINARY PATTERN [NOT]`.
matched=0 ran=0 failed=0
tests() {
  local listed names
  listed=$(list "$1")
  mapfile -t names < <(grep -E "$2" <<<"$listed" | grep -vxF -f <(printf '%s\n' "${3:-}"))
  if ((!${#names[@]})); then
    [[ -n $only ]] && return
    echo "$1 has no test to run here" >&2
    exit 1
  fi
  matched=$((matched + ${#names[@]}))
  mapfile -t names < <(printf '%s\n' "${names[@]}" | awk "NR % $parts == $part % $parts")
  ran=$((ran + ${#names[@]}))
  while ((${#names[@]})); do
    printf '%s\n' "${names[@]:0:together}" |
      xargs -P 4 -I {} bash -c 'one "$@"' - "$1" {} || failed=1
    names=("${names[@]:together}")
    without_cluster
  done
}
tests "$library" "$of_library" "$(list "$library" --ignored)"
tests "$stories" "$of_stories"

if ((!matched)); then
  echo "no test is called '$only'" >&2
  exit 1
fi
for name in $(find "$not_tested" -size +0 -printf '%P\n' | sort); do
  ran=$((ran - 1))
  echo "**** NOT TESTED: $name: $(sort -u "$not_tested/$name" | paste -sd ';')"
done
((failed)) || echo "$ran tests passed on Linux $(uname -r)"
exit "$failed"
