#!/usr/bin/env bash
# fetch.sh DIR [SUITE...]: puts User-Mode Linux into DIR: `linux`, the kernel as a program,
# and `modules`. Both come from Debian's package user-mode-linux of the first of
# the suites that has it (forky, sid), through the mirror and the keys that apt uses already, and with the C library it
# is linked against; nothing is installed and no source of the system changes.
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

keys=/usr/share/keyrings/debian-archive-keyring.gpg
if ! command -v apt-get >/dev/null || [[ ! -f $keys ]]; then fail "this is no Debian"; fi
# shellcheck disable=SC2016 # apt's own variable
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' |
  grep '/debian/\?$' | head -n1) || fail "apt knows no mirror of Debian"

work=$dir.new
rm -rf "$work"
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/apt/{lists,cache/archives}/partial "$work"/{debs,root}
touch "$work/apt/status"

# Runs apt-get as if on a bare machine of that suite.
apt_of() {
  local suite=$1
  shift
  echo "deb [signed-by=$keys] $mirror $suite main" >"$work/apt/sources"
  apt-get -qq -o APT::Update::Error-Mode=any -o Dir::Etc::sourcelist="$work/apt/sources" -o Dir::Etc::sourceparts=- \
    -o Dir::State::lists="$work/apt/lists" -o Dir::State::status="$work/apt/status" \
    -o Dir::Cache="$work/apt/cache" -o APT::Sandbox::User=root "$@"
}

for suite in "${suites[@]}"; do
  (cd "$work/debs" && apt_of "$suite" update && apt_of "$suite" download user-mode-linux libc6) && break
done || fail "no user-mode-linux of ${suites[*]} to be had from $mirror; is it in reach?"

for package in "$work"/debs/*.deb; do dpkg-deb -x "$package" "$work/root"; done

mv "$work/root/usr/bin/linux.uml" "$work/linux"
mv "$work"/root/usr/lib/uml/modules/* "$work/modules"
mv "$work/root/usr/lib/x86_64-linux-gnu" "$work/lib"
lib=$dir/lib
patchelf --set-interpreter "$lib/ld-linux-x86-64.so.2" --set-rpath "$lib" "$work/linux"
rm -rf "$dir" "$work"/{apt,debs,root}
mv "$work" "$dir"
printf 'fetch: User-Mode Linux %s\n' "$("$dir/linux" --version)"
