#!/usr/bin/env python3
"""Checks that setup.sh installs the package of every program that the code runs.

A developer's machine has many more packages, and a test that uses one of them fails only
on a fresh machine. So each word of the scripts, and each string of the Rust and Python
code, that is the name of a program must belong to a package that setup.sh installs, to one
of its dependencies, or to an essential package of Debian (`make fresh` runs everything on
such a machine). A program that the code runs by name must be installed.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

# Words that are also names of programs.
WORDS = {"file", "groff", "look", "man", "node", "rdma", "red", "time", "write"}
# setup.sh installs curl and cargo if needed, docs/start.md make and git, and ip is busybox's.
SEEN_TO = {"curl", "git", "ip", "make"}
# Run if they are installed; otherwise the code prints that they are missing.
OPTIONAL = {"bao", "kubectl", "kustomize", "perf", "prometheus", "promtool"}

ROOT = Path(__file__).parent.parent
SHELL = ["Makefile", ".ci/run", *ROOT.glob("scripts/*.sh"), *ROOT.glob("tests/kernel/*.sh")]
RUST = [path for top in ("src", "tests", "bench") for path in (ROOT / top).rglob("*.rs")]
PYTHON = [path for top in ("scripts", "tests") for path in (ROOT / top).rglob("*.py")]
# Functions that run a program: its name is the first argument, or the first of a list.
RUNS = {"run", "Popen", "check_output", "output", "tool"}


def output(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout


def names(relations):
    """The package names in a field like `a (>= 1), b:any | c`."""
    return re.findall(r"(?:^|[,|])\s*([a-z0-9][a-z0-9+.-]+)", relations)


def allowed():
    """The packages of a machine after setup.sh."""
    fields = "${Package}\\t${Essential}\\t${Pre-Depends}, ${Depends}\\t${Provides}\\n"
    depends, provides, wanted = {}, {}, {"apt"}
    for line in output("dpkg-query", "-W", "-f", fields).splitlines():
        package, essential, needs, offers = line.split("\t")
        depends[package] = names(needs)
        for name in names(offers):
            provides.setdefault(name, []).append(package)
        if essential == "yes":
            wanted.add(package)
    for listed in re.findall(r"^  [a-z]+=\((.+)\)$", (ROOT / "scripts/setup.sh").read_text(), re.M):
        wanted.update(listed.split())
    found = set()
    while wanted:
        package = wanted.pop()
        found.add(package)
        more = {*depends.get(package, []), *provides.get(package, [])}
        wanted |= more - found
    return found


def programs():
    """Each program of an installed package, with its packages."""
    found = {}
    dirs = ("/bin/", "/sbin/", "/usr/bin/", "/usr/sbin/")
    for line in output("dpkg-query", "-S", *(d + "*" for d in dirs)).splitlines():
        if line.startswith("diversion by"):
            continue
        packages, path = line.split(": ", 1)
        if path.startswith(dirs):
            found.setdefault(os.path.basename(path), set()).update(
                package.split(":")[0] for package in packages.split(", "))
    return found


def words():
    """Each word that may be a program's name, its location, and whether the code
    certainly runs it."""
    for path in map(ROOT.joinpath, SHELL):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for word in re.findall(r"(?<![\w./$-])[a-z][\w.-]*(?![\w/=-])", re.sub(r"(^|\s)#.*", "", line)):
                yield word, f"{path.relative_to(ROOT)}:{number}", False
    for path in RUST:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line.strip().startswith("//"):
                continue
            for run, word in re.findall(r"(Command::new\()?\"([a-z][\w.-]*)(?=[\" ])", line):
                yield word, f"{path.relative_to(ROOT)}:{number}", bool(run)
    for path in PYTHON:
        for word, number, is_run in texts(ast.parse(path.read_text())):
            yield word, f"{path.relative_to(ROOT)}:{number}", is_run


def texts(tree):
    """The first word of each string of a Python program, its line, and whether it is run."""
    run, said = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            first = node.args[0]
            if isinstance(first, ast.List) and first.elts:
                first = first.elts[0]
            if name in RUNS:
                run.add(first)
        elif isinstance(node, ast.Expr):
            # Docstrings.
            said.add(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in said:
            if word := re.match(r"[a-z][\w.-]*(?=\s|$)", node.value):
                yield word[0], node.lineno, node in run


def main():
    ours, known = allowed(), programs()
    wrong = {}
    for word, where, is_run in words():
        packages = known.get(word, set())
        if word in WORDS | SEEN_TO | OPTIONAL or packages & ours:
            continue
        if packages:
            said = f"comes with {' or '.join(sorted(packages))}, which scripts/setup.sh does not install"
        elif is_run:
            said = "is not installed here"
        else:
            continue
        wrong.setdefault(word, f"{where}: {word} {said}")
    for line in wrong.values():
        print(line, file=sys.stderr)
    if wrong:
        sys.exit(f"{Path(__file__).name}: add its package to setup.sh; if it is not a program, add it to WORDS here")


if __name__ == "__main__":
    main()
