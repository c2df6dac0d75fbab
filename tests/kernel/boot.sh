#!/usr/bin/env bash
# boot.sh DIR COMMAND...: boots the kernel that fetch.sh put into DIR/uml, runs the
# command in it as root, powers it off, and exits with the command's code; with 1 if the
# kernel ended before the command, and with 125 if it did not boot. Output streams; the
# kernel's own messages go to DIR/NTH/console.log. NTH, by default 1, distinguishes
# kernels that run at the same time.
#
# The command sees the machine's files at their own paths, so it can run programs built
# outside; its writes are lost at the end (init.sh). When this script ends, for any
# reason, the kernel and all its processes end.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=$1
nth=${NTH:-1}
own=$dir/$nth
shift

# Untouched memory costs nothing.
memory=4G
# An OSD keeps what the story of an encrypted image writes, with every step more than 4 GiB.
[[ -z ${EVERY_STEP:-} ]] || memory=10G
# For the whole run. With every step of the crash matrix, one krbd story alone takes a
# quarter of an hour; with every file system the stories of faults run one by one.
[[ -z ${EVERY_STEP:-}${EVERY_FS:-} ]] || LONGEST=${LONGEST:-6h}
longest=${LONGEST:-50m}

# A blank would end a kernel parameter.
case $here$dir$PWD in *[[:space:]]*)
  echo "boot: the test kernel does not support blanks in paths: $PWD, $dir" >&2
  exit 125
  ;;
esac

mkdir -p "$own/run"
exec {lock}>"$own/lock"
flock -n "$lock" || {
  echo "boot: waiting for another run in $own" >&2
  flock "$lock"
}

# User-Mode Linux has one CPU, and consists of many processes that take turns. In a
# virtual machine a switch between processes on different CPUs takes ten times as long,
# so all run on one.
mapfile -t cpus < <(
  for range in $(sed -n 's/^Cpus_allowed_list:\s*//p' /proc/self/status | tr , ' '); do
    seq "${range%-*}" "${range#*-}"
  done
)
cpu=${cpus[nth % ${#cpus[@]}]}

rm -rf "$own/share"
mkdir -p "$own/share"
{
  printf 'cd %q\nexport PATH=%q\n' "$PWD" "$PATH"
  for name in SOAK_OPERATIONS STORY_SEED EVERY_STEP EVERY_FS MATRIX ENDS PROPTEST_CASES; do
    [[ ! -v $name ]] || printf 'export %s=%q\n' "$name" "${!name}"
  done
  printf '%q ' "$@"
} >"$own/share/job"

# User-Mode Linux keeps a descriptor for each process in it; without one more, its fork(2)
# fails with ENOMEM.
ulimit -Sn "$(ulimit -Hn)"

# Runs in its own namespaces. The kernel keeps its memory in a file, on a private tmpfs
# to which no limit of /dev/shm applies.
# shellcheck disable=SC2317 # called by name
boot() {
  mount -t tmpfs -o "size=$memory" memory "$own/run"
  # Not by exec: coreutils 9.10's timeout refuses to be a namespace's first process.
  TMPDIR=$own/run timeout --foreground -s KILL "$longest" \
    "$dir/uml/linux" umid=test uml_dir="$own/run/" mem="$memory" seccomp=on panic=-1 \
    root=/dev/root rootfstype=hostfs rootflags=/ ro quiet \
    init="$here/init.sh" checkout="$PWD" target="${dir%/*}" \
    modules="$dir/uml/modules" share="$own/share" \
    con=null con0=null,fd:4 ssl=null ssl0=null,fd:3 \
    3>&1 4>"$own/console.log" >&4 2>&4
}
export -f boot
export here dir own memory longest

# Killing it ends the process namespace, and with that the kernel.
taskset --cpu-list "$cpu" setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child --mount-proc \
  bash -c boot </dev/null &
kernel=$!
trap 'kill -KILL "$kernel" 2>/dev/null || true' EXIT
trap 'exit 130' INT TERM

wait "$kernel" || true
if [[ -s $own/share/status ]]; then exit "$(<"$own/share/status")"; fi
echo "boot: the test kernel ended by itself, or ran for $longest; its last messages:" >&2
tail -n 20 "$own/console.log" >&2
if [[ -e $own/share/began ]]; then exit 1; fi
exit 125
