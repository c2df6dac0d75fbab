#!/usr/bin/env bash
# fetch.sh DIR [SUITE...]: puts User-Mode Linux into DIR: `linux`, the kernel as a program,
# and `modules`. Both come from Debian's package user-mode-linux of the first of
# the suites that has it (forky, sid), with the C library that it is linked against
# (scripts/unpack.sh).
#
# Of a newer suite than this, because Linux 6.16 taught it to run processes under
# seccomp and to keep vector registers of any size. That of trixie, 6.12, traces its
# processes by ptrace, which takes longer.
set -euo pipefail

dir=$1
suites=("${@:2}")
((${#suites[@]})) || suites=(forky sid)
# Fails where the directory has moved since: the paths in it are absolute.
"$dir/linux" --version &>/dev/null && exit 0

fail() {
  printf 'fetch: %s\n' "$*" >&2
  exit 1
}

work=$dir.new
rm -rf "$work"
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"

for suite in "${suites[@]}"; do
  scripts/unpack.sh "$suite" "$work/root" user-mode-linux libc6 && break
done || fail "no user-mode-linux of ${suites[*]}"

mv "$work/root/usr/bin/linux.uml" "$work/linux"
mv "$work"/root/usr/lib/uml/modules/* "$work/modules"
mv "$work/root/usr/lib/x86_64-linux-gnu" "$work/lib"
lib=$dir/lib
patchelf --set-interpreter "$lib/ld-linux-x86-64.so.2" --set-rpath "$lib" "$work/linux"
rm -rf "$dir" "$work/root"
mv "$work" "$dir"
printf 'fetch: User-Mode Linux %s\n' "$("$dir/linux" --version)"
