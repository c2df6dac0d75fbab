#!/usr/bin/env python3
"""Checks deploy/monitoring: Prometheus' rules and Grafana's dashboard.

Without an argument: by promtool the rules and their tests; that each alert has a test that
raises it and one that does not, and stands in docs/operations.md; that the Prometheus
Operator's object has the same rules; that the dashboard and the rules use metrics that the
agents have.

--live    runs both agents, the supervisor and a Prometheus that scrapes them, and all queries against it:
          each must be understood, and each must find data unless it is listed here. As
          root. The agents' metrics pass `promtool check metrics`.
--write   writes the Prometheus Operator's object.

promtool and prometheus come from the PATH.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import yaml

from manifests import DEPLOY, kustomize, problem, problems, report

ROOT = DEPLOY.parent
DIR = DEPLOY / "monitoring"
RULES, TESTS = DIR / "rules.yaml", DIR / "rules_test.yaml"
OBJECT, DASHBOARD = DIR / "prometheus-rule.yaml", DIR / "dashboard.json"
DOCUMENT = ROOT / "docs/operations.md"
NAMES = ROOT / "src/observe/metrics/names.rs"
# With its labels; a histogram's parts have suffixes.
SELECTOR = re.compile(r"\b((?:uring_csi|process)_\w+)(\{[^}]*\})?")
SUFFIX = re.compile(r"_(?:bucket|sum|count)$")


def object_of(rules):
    groups = rules[rules.index("groups:") :]
    return f"""# Written by scripts/check_monitoring.py --write: rules.yaml for the Prometheus Operator.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: uring-csi
spec:
{textwrap.indent(groups, "  ")}"""


def rules():
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels():
    listed = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in listed if panel["type"] != "row"]


def replaced(expr, interval):
    """A query of the dashboard, with its variables replaced."""
    return expr.replace("$__rate_interval", interval).replace("$instance", ".*")


def queries():
    """(where, query) of the dashboard."""
    for panel in panels():
        for target in panel["targets"]:
            query = replaced(target["expr"], "1m")
            yield f"panel {panel['title']!r}", query


def check_alerts():
    """Each alert has a test that raises it and one that does not, and is documented."""
    tested = set()
    for test in yaml.safe_load(TESTS.read_text())["tests"]:
        for expected in test["promql_expr_test"]:
            name = re.search(r'alertname="(\w+)"', expected["expr"])[1]
            tested.add((name, bool(expected["exp_samples"])))
    names = {rule["alert"] for rule in rules() if "alert" in rule}
    for name in sorted(names):
        for raised in (True, False):
            if (name, raised) not in tested:
                problem(TESTS.name, f"no test in which {name} is {'raised' if raised else 'not raised'}")
    documented = set(re.findall(r"`(UringCsi\w+)`", DOCUMENT.read_text()))
    for name in sorted(names - documented):
        problem(DOCUMENT.name, f"does not name {name}")
    for name in sorted((documented | {name for name, _ in tested}) - names):
        problem(RULES.name, f"there is no alert {name}")


def check_names():
    """Rules and dashboard use metrics that there are."""
    known = set(re.findall(r'"(uring_csi_\w+)"', NAMES.read_text()))
    used = [(rule.get("alert") or rule["record"], str(rule["expr"])) for rule in rules()]
    for where, query in [*used, *queries()]:
        for name, _ in SELECTOR.findall(query):
            is_record = f"{name}:" in query
            if name.startswith("uring_csi_") and SUFFIX.sub("", name) not in known and not is_record:
                problem(where, f"there is no metric {name}")


def check_layout():
    """No two panels have one id, or overlap; and each panel says what it shows."""
    listed = json.loads(DASHBOARD.read_text())["panels"]
    for panel in panels():
        if not panel.get("description", "").endswith("."):
            problem(f"panel {panel['title']!r}", "has no description")
    if len({panel["id"] for panel in listed}) < len(listed):
        problem(DASHBOARD.name, "two panels have one id")
    cells = {}
    for panel in listed:
        at = panel["gridPos"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                other = cells.setdefault((x, y), panel["title"])
                if other != panel["title"]:
                    problem(DASHBOARD.name, f"panel {panel['title']!r} is over {other!r}")
                    return


def check_kustomization():
    docs = kustomize([DIR.name])
    kinds = sorted(doc["kind"] for doc in docs)
    if kinds != ["ConfigMap", "PrometheusRule"]:
        problem(DIR.name, f"the kustomization makes {kinds}")
    for doc in docs:
        if "namespace" in doc["metadata"]:
            problem(DIR.name, f"{doc['kind']} has a namespace: kubectl refuses another by -n")


def check_files():
    for command in (["check", "rules", RULES], ["test", "rules", TESTS]):
        if subprocess.run(["promtool", *command], check=False).returncode:
            problem(f"promtool {' '.join(command[:2])}", "it has failed, as it says above")
    check_alerts()
    check_names()
    check_layout()
    check_kustomization()
    if OBJECT.read_text() != object_of(RULES.read_text()):
        problem(OBJECT.name, f"it is not {RULES.name}: run scripts/check_monitoring.py --write")


def free_ports(count):
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


PROGRAMS = ("uring-csi-node", "uring-csi-holder", "uring-csi-controller")
# They run in a directory of their own, with a volume that a file asks for and one whose image
# was renamed. Repeated, so that rates see it: an image file comes and goes, with one call that
# fails, and an image of Ceph, with one that the cluster refuses. The last line of its input
# ends it.
AGENTS = """
source scripts/agents.sh
node_flags=(--metrics-listen 127.0.0.1:$NODE_PORT --volumes "$work/volumes")
mkdir "$work/volumes"
touch "$work/volumes/.uring-csi-volumes"
start_ceph
mkdir "$work/refused"
echo -n nobody >"$work/refused/userID"
cp "$work/secret/userKey" "$work/refused"
start_agents
uring-csi-holder --endpoint "unix://$work/run/holder.sock" --run-dir "$work/holder" \
  --metrics-listen "127.0.0.1:$HOLDER_PORT" 2>>"$work/agents.log" &
pids+=($!)
uringctl up wanted 64Mi "$work/mnt/wanted" --persist
uringctl up renamed 64Mi "$work/mnt/renamed"
image=$(losetup -nO BACK-FILE "$(findmnt -no SOURCE "$work/mnt/renamed")")
mv "$image" "$work/pool/renamed"
echo started
while ! read -r -t 0.2 _; do
  uringctl up data 64Mi "$work/mnt/data"
  uringctl down data --delete
  uringctl up data 64Mi "$work/mnt/data" -o nosuchoption && exit 1
  uringctl delete data
  uringctl create image 64Mi "${ceph_class[@]}"
  URING_CSI_SECRETS=$work/refused uringctl create image 64Mi "${ceph_class[@]}" && exit 1
  uringctl delete image
done >/dev/null 2>&1
mv "$work/pool/renamed" "$image"
uringctl down renamed --delete
uringctl remove wanted
timeout 60 bash -c 'until uringctl delete wanted 2>/dev/null; do sleep 0.1; done'
"""


def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def ask(server, query, **window):
    """What a query finds now, or in a window; an error of the query is a problem."""
    parameters = urllib.parse.urlencode({"query": query, **window})
    url = f"{server}/api/v1/query{'_range' if window else ''}?{parameters}"
    try:
        return json.loads(get(url))["data"]["result"]
    except urllib.error.HTTPError as error:
        problem(query, json.loads(error.read())["error"])
        return None


def wanted():
    """(where, query) of all that must find data."""
    yield from queries()
    for rule in rules():
        if "record" in rule:
            yield rule["record"], rule["expr"]
            continue
        # An alert finds nothing; what it looks at is there.
        for name, labels in SELECTOR.findall(rule["expr"]):
            if f"{name}:" not in rule["expr"]:
                yield rule["alert"], name + labels


def check_queries(server):
    """Repeats queries that find nothing, until they do: a rate needs several scrapes."""
    left = list(wanted())
    until = time.monotonic() + 30
    while left and not problems and time.monotonic() < until:
        left = [(where, query) for where, query in left if not ask(server, query)]
        time.sleep(0.5)
    if not problems:
        for where, query in left:
            problem(where, f"no data for {query}")
    for rule in rules():
        if "alert" in rule:
            ask(server, rule["expr"])
    for group in json.loads(get(f"{server}/api/v1/rules"))["data"]["groups"]:
        for rule in group["rules"]:
            if rule.get("lastError"):
                problem(rule["name"], rule["lastError"])


def prometheus(made, targets):
    """A Prometheus' process and address."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": "uring-csi",
                "static_configs": [
                    {"targets": [target], "labels": {"instance": program}}
                    for program, target in zip(PROGRAMS, targets)
                ],
            }
        ],
    }
    (made / "prometheus.yml").write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)
    server = f"127.0.0.1:{port}"
    flags = [f"--config.file={made}/prometheus.yml", f"--storage.tsdb.path={made}/data"]
    command = ["prometheus", *flags, f"--web.listen-address={server}", "--log.level=error"]
    return subprocess.Popen(command), f"http://{server}"


def check_scrapes(targets):
    for target in targets:
        scrape = get(f"http://{target}/metrics")
        checked = subprocess.run(["promtool", "check", "metrics"], input=scrape, text=True, check=False)
        if checked.returncode:
            problem(target, "promtool check metrics has failed, as it says above")


@contextlib.contextmanager
def running():
    """The programs at work, and a Prometheus: its address, and what it scrapes."""
    ports = free_ports(3)
    targets = [f"127.0.0.1:{port}" for port in ports]
    # A flag comes before the variable.
    env = {**os.environ, "NODE_PORT": str(ports[0]), "HOLDER_PORT": str(ports[1])}
    env["URING_CSI_METRICS_LISTEN"] = targets[2]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    agents = subprocess.Popen(["bash", "-euo", "pipefail", "-c", AGENTS], cwd=ROOT, env=env, **pipes)
    server = None
    try:
        while agents.stdout.readline() not in ("started\n", ""):
            pass
        with tempfile.TemporaryDirectory() as made:
            server, address = prometheus(Path(made), targets)
            until = time.monotonic() + 30
            while True:
                try:
                    get(f"{address}/-/ready")
                    break
                except OSError:
                    if server.poll() is not None or time.monotonic() > until:
                        raise
                    time.sleep(0.1)
            yield address, targets
            server.terminate()
            server.wait()
    finally:
        if server and server.poll() is None:
            server.kill()
        agents.communicate("\n")
    if agents.returncode:
        problem("the agents", f"their script ended with {agents.returncode}")


def check_live():
    with running() as (address, targets):
        check_queries(address)
        check_scrapes(targets)


def main():
    argument = sys.argv[1] if len(sys.argv) > 1 else ""
    if argument == "--write":
        OBJECT.write_text(object_of(RULES.read_text()))
        return
    is_live = argument == "--live"
    check_live() if is_live else check_files()
    counts = f"{len(rules())} rules and {len(list(queries()))} queries of the dashboard"
    report(f"monitoring: {counts} {'find data of running agents' if is_live else 'are consistent'}")


if __name__ == "__main__":
    main()
