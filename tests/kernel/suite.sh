#!/usr/bin/env bash
# suite.sh PREFIX LIBRARY_TESTS STORIES: runs the tests whose names begin with
# PREFIX (all of them if it is empty), in the test kernel or on a machine whose
# own kernel has what they need. Of the library's tests those that attach, mount
# or call the kernel; of the stories also those that are ignored elsewhere.
set -euo pipefail
prefix=$1 library=$2 stories=$3

# Every operation is some ten system calls of 10 µs there.
export SOAK_OPERATIONS=${SOAK_OPERATIONS:-300}

modprobe -a loop nbd rbd fuse
udevadm settle

# Runs those of a binary's tests whose names begin with PREFIX and match $2.
found=0 failed=0
tests() {
  local binary=$1 names
  mapfile -t names < <("$binary" --list --format terse 2>/dev/null |
    sed -n 's/: test$//p' | grep "^$prefix" | grep -E "$2")
  ((${#names[@]})) || return 0
  found=1
  "$binary" --color never --test-threads 4 "${@:3}" --exact "${names[@]}" || failed=1
}
tests "$library" '^(device|fs|kernel|mount)::'
tests "$stories" . --include-ignored

if ((!found)); then
  echo "no test begins with '$prefix'" >&2
  exit 1
fi
exit "$failed"
