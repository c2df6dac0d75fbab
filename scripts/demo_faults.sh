#!/usr/bin/env bash
# Shows what becomes of volumes when something fails, on this machine's kernel: a disk that
# stops answering, a volume that another mount namespace keeps mounted, an agent that is killed
# in the middle of a stage, a call that is made twice, a device with foreign data. Needs root
# and takes seconds; removes everything at exit.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/agents.sh
source scripts/agents.sh
# shellcheck source=scripts/show.sh
source scripts/show.sh

# Two pools, each on a disk of its own. A frozen file system is a disk that does not answer:
# whoever writes to it waits in the kernel, and no signal ends the wait.
serve_two_pools() {
  make_pool good
  make_pool bad
  node_flags=(--pool "good=$work/good,local" --pool "bad=$work/bad,local")
  controller_flags=(--node-id demo "${node_flags[@]}")
}
backend=two_pools

thaw() { fsfreeze --unfreeze "$work/bad"; }
clean() {
  local status=$?
  set +e
  thaw 2>/dev/null
  if [[ -n ${writer:-} ]]; then kill "$writer" && wait "$writer"; fi
  (exit "$status")
  tidy
}
trap clean EXIT

title "Two volumes, each in a pool on its own disk; one is in use"
start_agents
node=${pids[-2]}
uringctl create stuck 1Gi --pool bad >/dev/null
show uringctl up data 1Gi "$work/mnt/data" --pool good --fs xfs
(while echo tick >>"$work/mnt/data/written"; do sleep 0.01; done) 2>/dev/null &
writer=$!

title "The disk of pool bad stops answering, and a stage on it hangs"
show fsfreeze --freeze "$work/bad"
uringctl stage stuck --fs xfs &
hangs=$!
until uringctl volumes --json | grep -q '"step": "[a-z]'; do sleep 0.1; done
sleep 1
show uringctl volumes
echo "A different call is told what is under way:"
show_refused uringctl unstage stuck

title "Other volumes are served meanwhile"
show uringctl up other 1Gi "$work/mnt/other" --pool good --fs xfs

title "A volume that is mounted elsewhere, too, is not detached, and the error names by whom"
unshare --mount sleep infinity &
elsewhere=$!
until [[ $(readlink "/proc/$elsewhere/ns/mnt") != "$(readlink /proc/self/ns/mnt)" ]]; do sleep 0.01; done
show_refused uringctl down other
show kill "$elsewhere"
wait "$elsewhere" || true
show uringctl down other --delete

title "The agent is killed in the middle of that stage, and started again"
before=$(wc -l <"$work/mnt/data/written")
disown "$node"
show kill -9 "$node"
# Its thread stays in the kernel, and with it the connection of the caller.
kill "$hangs"
wait "$hangs" || true
rm "$work/run/node.sock"
start_node
until_there "${pids[-1]}" "$work/run/node.sock"
show uringctl volumes
show uringctl publish data "$work/mnt/again"
echo "lines written to data before the kill and now: $before, $(wc -l <"$work/mnt/again/written")"

title "The disk answers again: the same call, made twice, finishes one stage"
uringctl stage stuck --fs xfs &
twice=$!
uringctl stage stuck --fs xfs &
twice+=" $!"
until uringctl volumes --json | grep -q '"step": "[a-z]'; do sleep 0.1; done
sleep 0.5
show thaw
for call in $twice; do wait "$call"; done
echo "stages of it that the agents logged: $(grep -c ' staged .*volume_id=[^ ]*\.bad\.' "$work/agents.log")"
show uringctl unstage stuck

title "A device with foreign data is not formatted"
image=$(find "$work/bad" -maxdepth 1 -name '*.img')
show mkswap --quiet "$image"
show_refused uringctl up stuck 1Gi "$work/mnt/stuck" --pool bad --fs xfs
show blkid --probe "$image"

title "Delete"
kill "$writer"
wait "$writer" || true
writer=
uringctl down data --delete >/dev/null
uringctl delete stuck >/dev/null
nothing_is_left
