# Sourced by the demos: prints what they do.
# shellcheck shell=bash

# styled SGR TEXT: in a style on a terminal, plain in a file or a pipe.
styled() {
  if [[ -t 1 && -z ${NO_COLOR:-} ]]; then
    printf '\033[%sm%s\033[0m\n' "$1" "$2"
  else
    printf '%s\n' "$2"
  fi
}

title() { echo && styled 1 "== $*"; }

# Prints a command, runs it, prints the time that it took. Returns its exit code.
show() {
  local start=${EPOCHREALTIME/./} code=0 took
  styled 36 "\$ $*"
  "$@" || code=$?
  took=$((${EPOCHREALTIME/./} - start))
  styled 2 "$(printf '  (%d.%03d ms)' $((took / 1000)) $((took % 1000)))"
  return "$code"
}

# Fails if the command succeeds.
show_refused() { if show "$@"; then return 1; fi; }

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
