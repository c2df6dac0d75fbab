#!/usr/bin/env bash
# unpack.sh SUITE DIR PACKAGE...: unpacks packages of that Debian suite into DIR,
# without their dependencies. It uses apt's configured mirror and keys, installs
# nothing, and changes no package source of the system.
set -euo pipefail
. "$(dirname "$0")/root.sh"
suite=$1 dir=$2
shift 2

fail() {
  printf 'unpack: %s\n' "$*" >&2
  exit 1
}

keys=/usr/share/keyrings/debian-archive-keyring.gpg
if ! command -v apt-get >/dev/null || [[ ! -f $keys ]]; then fail "this is not Debian"; fi
mirror=$(debian_mirror) || fail "apt has no Debian mirror"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{lists,cache/archives}/partial "$work/debs"
touch "$work/status"
echo "deb [signed-by=$keys] $mirror $suite main" >"$work/sources"

# Runs apt-get as on an empty machine of that suite.
apt_of_suite() {
  apt-get -qq -o APT::Update::Error-Mode=any -o Dir::Etc::sourcelist="$work/sources" \
    -o Dir::Etc::sourceparts=- -o Dir::State::lists="$work/lists" \
    -o Dir::State::status="$work/status" -o Dir::Cache="$work/cache" \
    -o APT::Sandbox::User=root "$@"
}

if ! (cd "$work/debs" && apt_of_suite update && apt_of_suite download "$@"); then
  fail "cannot get $* of $suite from $mirror; is it reachable?"
fi
mkdir -p "$dir"
for package in "$work"/debs/*.deb; do dpkg-deb -x "$package" "$dir"; done
