#!/usr/bin/env python3
"""Copies what the benches printed into PERFORMANCE.md: `make bench UPDATE=1`.

The arguments are files with the output of one backend's bench each, named as the backend.
The rows of these backends replace theirs in the tables between the comments `<!-- cases -->`,
`<!-- faults -->`, `<!-- volumes BACKEND -->` and `<!-- end -->`; of the table of aims, each
row whose aim is a case that was measured gets its number. README.md's ratios are made of the
table of cases; `--check` fails where they are not its.
"""

import datetime
import itertools
import os
import re
import sys
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parent.parent / "PERFORMANCE.md"
README = DOCUMENT.parent / "README.md"
MANY = "a node with so many volumes"
# README.md's cases: backend, name, and what the reader is told of it.
SHOWN = [
    (
        "loop",
        "life of a 1 GiB ext4, formatted",
        "stage, publish, unpublish and unstage a formatted ext4 on a loop device",
    ),
    ("loop", "32 lives at once, formatted", "the same, 32 volumes at once"),
    ("ceph", "Ceph: CreateVolume, 1 at once", "CreateVolume in Ceph"),
]
SECONDS = {"s": 1, "ms": 1e-3, "µs": 1e-6}


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def row(these):
    return f"| {' | '.join(these)} |".replace("|  |", "| |")


def table_of(lines):
    """The lines of the table that they begin with."""
    return list(itertools.takewhile(lambda line: line.startswith("|"), lines))


class Run:
    """What the bench of one backend printed."""

    def __init__(self, file):
        self.backend = file.name
        lines = file.read_text().splitlines()
        self.cases = [
            line
            for line in lines
            if line.startswith(f"| {self.backend} |") and any(cells(line)[-2:])
        ]
        self.volumes = []
        self.faults = []
        self.measured = {}
        for number, line in enumerate(lines):
            ratio = re.fullmatch(rf"([\d.]+) {self.backend} (.*?)(  <- .*)?", line)
            if ratio:
                self.measured[ratio[2]] = ratio[1]
            if line.startswith("| ") and cells(line)[0].endswith(MANY):
                self.add_volumes(table_of(lines[number:]))
            if fault := re.match(r"\| \d+ volumes while \d+ hang ([^|]*) \|", line):
                self.add_fault(fault[1], table_of(lines[number:]))

    def add_fault(self, name, table):
        """A row of the calls of the others, which are the median and p99, each with a ratio."""
        calls = {call: values for call, *values in map(cells, table[2:])}
        p50, _, p50_ratio, p99, without, p99_ratio = calls["whole life"]
        these = [self.backend, name, p50, p50_ratio, p99, without, p99_ratio, calls["stage"][-1]]
        self.faults.append(row(these))

    def add_volumes(self, table):
        title, *numbers = cells(table[0])
        for line in table[2:]:
            name, *values = cells(line)
            for number, value in zip(numbers, values, strict=True):
                case = f"{title.removesuffix(MANY)}{name}, {number} volumes"
                self.measured[case] = value
        self.volumes += table

    def where(self):
        """The line that says how and where this was measured."""
        models = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
        kernel = f"Linux {os.uname().release}"
        if self.backend in ("nbd", "rbd", "nfs", "mapped") and os.environ.get("HOST_KERNEL") != "1":
            kernel = f"the test kernel on {kernel}"
        short = " QUICK=1" if os.environ.get("QUICK") else ""
        short += f" FAULTS={faults}" if (faults := os.environ.get("FAULTS")) else ""
        profile = os.environ.get("PROFILE", "")
        build = f" PROFILE={profile}" if profile and profile != "bench" else ""
        load = round(os.getloadavg()[2])
        return (
            f"- {self.backend}: `make bench ONLY={self.backend}{short}{build}`, {models[0]}, "
            f"{len(models)} CPUs, {kernel}, load average {load}, {datetime.date.today()}"
        )


def replaced(text, comment, make):
    """The text with what is after `comment` up to `<!-- end -->` made anew of its lines."""
    before, found, rest = text.partition(f"<!-- {comment} -->\n")
    if not found:
        sys.exit(f"there is no <!-- {comment} -->")
    old, end, after = rest.partition("<!-- end -->")
    new = "\n".join(make(old.strip().splitlines()))
    return f"{before}{found}\n{new}\n\n{end}{after}"


def with_rows(run, new):
    """A table of all backends, with the rows of the run in place of the backend's old ones."""

    def made(old):
        is_ours = re.compile(rf"(\| {run.backend} \||- {run.backend}:)").match
        kept = [line for line in old if line and not is_ours(line)]
        notes = sorted([*(line for line in kept if line.startswith("- ")), run.where()])
        table = [line for line in kept if line.startswith("|")]
        rows = sorted([*table[2:], *new], key=lambda line: cells(line)[0])
        return [*notes, "", *table[:2], *rows]

    return made


def with_aims(text, measured):
    before, found, rest = text.partition("<!-- aims -->\n")
    table, end, after = rest.partition("<!-- end -->")
    lines = table.splitlines()
    for number, line in enumerate(lines):
        of_line = cells(line)
        if of_line[0] in measured:
            of_line[2] = measured[of_line[0]]
            lines[number] = row(of_line)
    return before + found + "\n".join(lines) + "\n" + end + after


def seconds(median):
    number, unit = re.fullmatch(r"([\d.]+)(\D+)", median).groups()
    return float(number) * SECONDS[unit]


def ratios(text):
    """README.md's table: how many times longer the programs take than the agent."""
    medians = {tuple(line[:3]): line[3] for line in map(cells, text.splitlines()) if len(line) == 6}
    rows = []
    for backend, case, what in SHOWN:
        programs, agent = (seconds(medians[backend, case, way]) for way in ("exec", "socket"))
        rows.append(row([what, f"{programs / agent:.1f}"]))
    return rows


def with_ratios(text):
    """README.md with the ratios of PERFORMANCE.md's text."""
    return replaced(README.read_text(), "ratios", lambda old: [*old[:2], *ratios(text)])


def main():
    text = DOCUMENT.read_text()
    if sys.argv[1:] == ["--check"]:
        if with_ratios(text) != README.read_text():
            sys.exit("README.md's ratios are not PERFORMANCE.md's: run scripts/performance.py")
        return
    for run in map(Run, map(Path, sys.argv[1:])):
        for comment, rows in (("cases", run.cases), ("faults", run.faults)):
            if rows:
                text = replaced(text, comment, with_rows(run, rows))
        if run.volumes:
            text = replaced(text, f"volumes {run.backend}", lambda _, run=run: [run.where(), "", *run.volumes])
        text = with_aims(text, run.measured)
    readme = with_ratios(text)
    DOCUMENT.write_text(text)
    README.write_text(readme)


main()
