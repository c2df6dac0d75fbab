#!/usr/bin/env python3
"""Checks the export of traces by running agents: `make traces`. As root.

The collector is a stand-in, because neither Debian nor PyPI has one: an HTTP server that
decodes what it gets by OpenTelemetry's own definitions of OTLP. The agents are built with
the feature `otel`; uringctl calls them within a trace. Then the collector takes connections
and answers nothing: calls and the end of the agents must not wait for it.

Run it by target/python/bin/python, with opentelemetry-proto; BIN_DIR has the programs.
"""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from manifests import problem, report

ROOT = Path(__file__).resolve().parent.parent
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"

# Each line of the input is a command to run; the end of it ends the agents, and the time
# that this takes is printed, in milliseconds.
AGENTS = """
source scripts/agents.sh
start_agents >&2
cp "$work/agents.log" "$LOG"
echo started
while read -r line; do
  code=0
  eval "$line" </dev/null >/dev/null 2>&1 || code=$?
  echo "$code"
done
cp "$work/agents.log" "$LOG"
start=${EPOCHREALTIME/./}
kill "${pids[@]}"
wait "${pids[@]}" || true
echo $(((${EPOCHREALTIME/./} - start) / 1000))
"""


class Collector(BaseHTTPRequestHandler):
    """Keeps (service, span) of all that it gets."""

    spans = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        request = ExportTraceServiceRequest.FromString(body)
        if self.path != "/v1/traces" or self.headers["content-type"] != "application/x-protobuf":
            problem("the request", f"{self.path}, {self.headers['content-type']}")
        for resource in request.resource_spans:
            service = attributes(resource.resource)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [(service, span) for span in scope.spans]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def attributes(it):
    values = {entry.key: entry.value for entry in it.attributes}
    return {key: getattr(value, value.WhichOneof("value")) for key, value in values.items()}


class Agents:
    """Both agents, which export to a port."""

    def __init__(self, port, log):
        env = {**os.environ, "LOG": str(log), "OTEL_BSP_SCHEDULE_DELAY": "100"}
        env["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{port}/"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = ["bash", "-euo", "pipefail", "-c", AGENTS]
        self.process = subprocess.Popen(command, cwd=ROOT, env=env, **pipes)
        if self.process.stdout.readline() != "started\n":
            sys.exit("the agents have not started")

    def do(self, command):
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def end(self):
        """Milliseconds until both have ended."""
        self.process.stdin.close()
        took = int(self.process.stdout.readline())
        if self.process.wait():
            problem("the agents", f"their script ended with {self.process.returncode}")
        return took


def until(what, condition):
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.1)
    problem(what, f"not there after 30 s, among {sorted({span.name for _, span in Collector.spans})}")
    return None


def span_of(service, name, is_failed=False):
    def found():
        for of, span in list(Collector.spans):
            if (of, span.name) == (service, name):
                if (span.status.code == Status.STATUS_CODE_ERROR) == is_failed:
                    return span
        return None

    return until(f"{name} of {service}", found)


def check_spans(log):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    agents = Agents(server.server_port, log)
    traced = f"TRACEPARENT=00-{TRACE}-{PARENT}-01"
    if agents.do(f"{traced} uringctl up data 64Mi $work/mnt/data"):
        problem("uringctl up", "it has failed")
    if not agents.do("uringctl up other 64Mi $work/mnt/other -o nosuchoption"):
        problem("uringctl up", "it has not failed")
    agents.do("uringctl down data --delete")
    made = span_of("uring-csi-controller", "CreateVolume")
    staged = span_of("uring-csi-node", "NodeStageVolume")
    failed = span_of("uring-csi-node", "NodeStageVolume", is_failed=True)
    unstaged = span_of("uring-csi-node", "NodeUnstageVolume")
    agents.end()
    server.shutdown()
    if None in (made, staged, failed, unstaged):
        return
    for span in (made, staged):
        if (span.trace_id.hex(), span.parent_span_id.hex()) != (TRACE, PARENT):
            problem(span.name, "it is not a child of its caller's span")
        if span.kind != Span.SPAN_KIND_SERVER or attributes(span)["rpc.grpc.status_code"] != 0:
            problem(span.name, f"kind {span.kind}, {attributes(span)}")
    for span in (failed, unstaged):
        if span.trace_id.hex() == TRACE or span.parent_span_id:
            problem(span.name, "it has a parent, and its caller has no span")
    if "nosuchoption" not in failed.status.message:
        problem(failed.name, f"its status is {failed.status.message!r}")
    steps = {span.name for _, span in Collector.spans if span.parent_span_id == staged.span_id}
    for step in ("attach", "probe", "mkfs", "mount"):
        if step not in steps:
            problem(staged.name, f"step {step} is not among its children {sorted(steps)}")
    # The failed call's log line leads to its trace.
    found = re.findall(r'NodeStageVolume" trace_id=(\w+)', log.read_text())
    if failed.trace_id.hex() not in found:
        problem("the log", f"no line has trace_id={failed.trace_id.hex()}")


def check_silent_collector(log):
    """Against a collector that takes connections and answers nothing."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=100)
    agents = Agents(listener.getsockname()[1], log)
    begun = time.monotonic()
    for _ in range(10):
        if agents.do("uringctl up data 64Mi $work/mnt/data && uringctl down data --delete"):
            problem("the silent collector", "a call has failed")
    took = time.monotonic() - begun
    # The agents' timeout for one request to the collector is 10 s.
    if took > 8:
        problem("the silent collector", f"20 commands took {took:.1f} s")
    ended = agents.end()
    if ended > 4000:
        problem("the silent collector", f"the agents took {ended} ms to end")
    listener.close()


def main():
    log = Path(os.environ["BIN_DIR"]) / "traces.log"
    check_spans(log)
    check_silent_collector(log)
    log.unlink()
    report(f"traces: {len(Collector.spans)} spans, as the calls were; a silent collector delays nothing")


if __name__ == "__main__":
    main()
