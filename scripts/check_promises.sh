#!/usr/bin/env bash
# Checks that every test in docs/reliability.md, security.md and upgrades.md exists, and that
# every promise and every input of their tables names one, or has "not tested: " with the
# reason. The documents name a test as `module::test_name`.
set -euo pipefail
cd "$(dirname "$0")/.."

missing=0 named=0
while IFS=: read -r document line test; do
  name=${test##*::}
  module=${test%::*}
  named=$((named + 1))
  # The innermost module's file, in any directory.
  if ! grep -rlE "fn $name\b" --include='*.rs' src tests | grep -qE "(^|/)${module##*::}(\.rs|/)"; then
    echo "$document:$line: there is no test $test" >&2
    missing=1
  fi
done < <(grep -noE '`[a-z_0-9]+(::[a-z_0-9]+)+`' docs/reliability.md docs/security.md docs/upgrades.md | tr -d '`' |
  sed -E 's/^([^:]*):([^:]*):/\1:\2:/')
while read -r place; do
  echo "$place: the row names no test, nor why there is none" >&2
  missing=1
done < <(awk '
  /^\| (promise|input) \|/ { rows = 1; next }
  !/^\|/ { rows = 0 }
  rows && !/^\| ---/ && !/`[a-z_0-9]+(::[a-z_0-9]+)+`/ && !/not tested: / { print FILENAME ":" FNR }
' docs/reliability.md docs/security.md)
((named)) || { echo "no document names a test" >&2; missing=1; }
exit "$missing"
