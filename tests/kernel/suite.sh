#!/usr/bin/env bash
# suite.sh ONLY LIBRARY_TESTS STORIES PART PARTS [LEFT]: runs tests in the test kernel, or on a
# machine whose kernel has the drivers. ONLY names a backend, a module or a story;
# without it, the suite runs the tests that depend on the kernel: the stories, also
# most of those ignored elsewhere, and the library's tests that attach, mount or call the
# kernel. The file LEFT has the names of those that another kernel did not pass in full: then
# it runs only these, and those that are ignored elsewhere. Of all it runs every PARTS-th,
# starting with the PART-th.
#
# It omits the tests of the ring's runtime: they measure thread time, for which rustix
# needs a vDSO with getcpu, and User-Mode Linux has none.
set -euo pipefail
only=$1 library=$2 stories=$3 part=$4 parts=$5 left=${6:-}

[[ -z $left || -r $left ]] || {
  echo "cannot read $left" >&2
  exit 1
}

# A test whose prerequisites are missing here fails.
export TEST_ALL=1
# Each operation takes some ten system calls of 10 µs here.
export SOAK_OPERATIONS=${SOAK_OPERATIONS:-300}

case $only in
  "") of_library='^(ceph::krbd|device|fs|kernel|mount|ring::(child|file|poll|probe)|supervisor)::' of_stories=. ;;
  rbd) of_library='(^|::)(rbd|ceph)' of_stories=$of_library ;;
  *) of_library="(^|::)$only" of_stories=$of_library ;;
esac

# `list BINARY [--ignored]`: prints the names of its tests.
list() {
  "$@" --list --format terse | sed -n 's/: test$//p'
}

# Prints the threads that wait for a device, a likely cause of a test's timeout.
waiting() {
  echo "Waiting for devices:"
  ps -eLo pid,tid,stat,wchan:32,args | awk 'NR == 1 || $3 ~ /^D/'
  dmesg | tail -n 20
}
export -f waiting

# Tests that did nothing here, and the reasons (tests/testkit/src/skipped.rs).
not_tested=$(mktemp -d) outputs=$(mktemp -d)
trap 'rm -rf "$not_tested" "$outputs"' EXIT
export not_tested outputs

# Runs one test, in its own process: in a shared one, a child of one test inherits the
# descriptors of all others until its exec, and keeps closed devices busy. Prints the
# test's output only if it fails. One that takes too long is killed, and left alone if it
# waits for a device and cannot be killed.
one() {
  local binary=$1 name=$2 start=${EPOCHREALTIME/./} code=0 time test timer ended
  local why=$not_tested/$name said=$outputs/$name
  # With its children in a process group of its own.
  NOT_TESTED=$why setsid "$binary" --include-ignored --exact "$name" >"$said" 2>&1 &
  test=$!
  sleep "$longest" &
  timer=$!
  wait -n -p ended "$test" "$timer" || code=$?
  if ((ended == timer)); then
    code=137
    kill -KILL -- "-$test"
    sleep 5 &
    wait -n -p ended "$test" "$!" || true
    ((ended == test)) || echo "the test cannot be killed" >>"$said"
  fi
  kill "$timer" 2>/dev/null || true
  time=$(((${EPOCHREALTIME/./} - start) / 1000))
  if ((code == 0)) && [[ -s $why ]]; then
    return
  elif ((code == 0)); then
    printf 'ok     %6d ms  %s\n' "$time" "$name"
    return
  fi
  printf 'FAILED %6d ms  %s (exit code %d)\n' "$time" "$name" "$code"
  cat "$said"
  ((code != 137)) || waiting
  # Repeats the panic at the end, for readers of only the last lines.
  grep -A 3 '^thread .* panicked at' "$said" || true
  return 1
}
export -f one
# In seconds. A test that takes longer exits with 137.
export longest=600
# A test with every file system, or with every step at which an agent may be killed.
[[ -z ${EVERY_FS:-} ]] || longest=1800
[[ -z ${EVERY_STEP:-} ]] || longest=7200

# How many tests may share a Ceph cluster. User-Mode Linux needs host mappings for the pages
# of a process, and the host limits these to 65530 (vm.max_map_count): beyond that an OSD,
# with its data in memory, hangs. The memory of one grows with every test.
together=10
# An OSD of 18.2 took 1.6 times as many mappings in the same tests as that of 16.2.
release=$(ceph-osd --version 2>/dev/null | cut -d' ' -f3 || true)
[[ ! $release =~ ^[0-9]+ ]] || ((BASH_REMATCH[0] < 17)) || together=6

# How many run at once. With every file system the stories of faults format some hundred
# volumes each, on the kernel's one CPU, and the calls have kubelet's two minutes: these run
# one by one.
jobs=4

# Waits for the end of the tests' shared cluster, which no test uses any more. On the
# machine's own kernel others may run.
without_cluster() {
  for ((i = 0; i < 50; i++)); do
    pgrep -f tests/ceph/cluster.py >/dev/null || break
    sleep 0.2
  done
}

# Runs the matching tests of a binary: `tests BINARY PATTERN [NOT]`.
matched=0 ran=0 failed=0
tests() {
  local listed names
  listed=$(list "$1")
  if [[ -n $left ]]; then
    listed=$(grep -xF -f <(list "$1" --ignored && cat "$left") <<<"$listed" || true)
  fi
  mapfile -t names < <(grep -E "$2" <<<"$listed" | grep -vxF -f <(printf '%s\n' "${3:-}"))
  if ((!${#names[@]})); then
    [[ -n $only || -n $left ]] && return
    echo "$1 has no test to run here" >&2
    exit 1
  fi
  matched=$((matched + ${#names[@]}))
  mapfile -t names < <(printf '%s\n' "${names[@]}" | awk "NR % $parts == $part % $parts")
  ran=$((ran + ${#names[@]}))
  while ((${#names[@]})); do
    printf '%s\n' "${names[@]:0:together}" |
      xargs -P "$jobs" -I {} bash -c 'one "$@"' - "$1" {} || failed=1
    names=("${names[@]:together}")
    without_cluster
  done
}
# Most ignored tests of the library are run by others. These take minutes, for matrix.sh, and
# so does one story.
minutes='::(mirrored|lost_daemons)::|::all_of_three_monitors_'
ignored=$(list "$library" --ignored)
left_out=$(list "$stories" --ignored | grep -E "$minutes" || true)
if [[ -n ${MATRIX:-} ]]; then ignored=$(grep -vE "$minutes" <<<"$ignored") left_out=; fi
tests "$library" "$of_library" "$ignored"
[[ -z ${EVERY_FS:-} ]] || left_out+=$'\n'$(list "$stories" | grep '^faults::')
tests "$stories" "$of_stories" "$left_out"
if [[ -n ${EVERY_FS:-} ]]; then
  jobs=1
  tests "$stories" '^faults::' "$(list "$stories" | grep -vE "$of_stories" || true)"
fi

if ((!matched)); then
  echo "no test matches '$only'" >&2
  exit 1
fi
for name in $(find "$not_tested" -size +0 -printf '%P\n' | sort); do
  ran=$((ran - 1))
  echo "**** NOT TESTED: $name: $(cut -f2 "$not_tested/$name" | sort -u | paste -sd ';')"
done
((failed)) || echo "$ran tests passed on Linux $(uname -r)"
exit "$failed"
