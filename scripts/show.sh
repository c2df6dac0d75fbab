# Sourced by the demos: prints what they do.
# shellcheck shell=bash

title() { printf '\n\033[1m== %s\033[0m\n' "$*"; }

# Prints a command, runs it, prints the time that it took. Returns its exit code.
show() {
  local start=${EPOCHREALTIME/./} code=0
  printf '\033[36m$ %s\033[0m\n' "$*"
  "$@" || code=$?
  printf '\033[2m  (%d.%03d ms)\033[0m\n' \
    $(((${EPOCHREALTIME/./} - start) / 1000)) $(((${EPOCHREALTIME/./} - start) % 1000))
  return "$code"
}

# Fails if a mount or a device of a volume is left.
nothing_is_left() {
  local left
  left=$(
    volume_mounts || true
    devices
  )
  [[ -z $left ]] || {
    echo "left behind: $left" >&2
    return 1
  }
  printf '\nNo mount and no device is left.\n'
}
