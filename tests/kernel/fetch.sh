#!/usr/bin/env bash
# fetch.sh DIR [SUITE...]: puts User-Mode Linux into DIR: `linux`, the kernel as a
# program, and `modules`. Both come from Debian's package user-mode-linux, of the first
# suite that has it (forky, sid), with the C library that it is linked to
# (scripts/unpack.sh).
#
# A newer suite than this one, because since Linux 6.16 it can run processes under
# seccomp and with vector registers of any size. trixie's, 6.12, traces its processes by
# ptrace, which takes longer.
set -euo pipefail

dir=$1
suites=("${@:2}")
((${#suites[@]})) || suites=(forky sid)
# Fails if the directory has moved since: its paths are absolute.
"$dir/linux" --version &>/dev/null && exit 0

fail() {
  printf 'fetch: %s\n' "$*" >&2
  exit 1
}

echo "fetch: getting User-Mode Linux and its modules: some 60 MB"
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
