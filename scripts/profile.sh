#!/usr/bin/env bash
# Shows where the node agent's time on the CPU goes: samples it while uringctl puts volumes
# in a pool through whole lives, and draws a flame graph, docs/pictures/profile.svg:
# `make profile`. Needs root, the release build, perf (Debian's linux-perf) and
# `cargo install inferno`. CALLERS, SECONDS_LONG and SVG change the number of callers at
# once, the duration, and the picture's file.
set -euo pipefail
cd "$(dirname "$0")/.."
export BIN_DIR=target/release
for program in perf inferno-collapse-perf inferno-flamegraph; do
  command -v "$program" >/dev/null || {
    echo "$program is not installed" >&2
    exit 1
  }
done
# shellcheck source=scripts/agents.sh
source scripts/agents.sh

start_agents
node=${pids[-2]}
bench=(uringctl bench run --create 16 --kubelet-dir "$work/kubelet")
# The first cycles make the file systems.
perf record --quiet --pid "$node" --freq 4999 --event cpu-clock --call-graph dwarf,65528 \
  --output "$work/perf.data" &
perf=$!
"${bench[@]}" --callers "${CALLERS:-1}" --duration "${SECONDS_LONG:-10}s"
kill -INT "$perf"
wait "$perf" || true
perf script --no-inline --input "$work/perf.data" 2>/dev/null >"$work/stacks"
inferno-collapse-perf "$work/stacks" >"$work/folded"
# What has less than 0.5 % would make most of the file.
inferno-flamegraph --minwidth 0.5 --title "uring-csi-node: lives of formatted volumes" \
  --subtitle "time on the CPU, samples; a click zooms" "$work/folded" \
  >"${SVG:-docs/pictures/profile.svg}"
