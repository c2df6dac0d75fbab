#!/usr/bin/env python3
"""Writes the table of the chart's values into docs/install.md, from values.yaml.

A comment that begins with `--` describes the key after it. With --check nothing is written,
and the program fails if the table is old.
"""

import json
import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
VALUES = ROOT / "deploy/chart/values.yaml"
DOCUMENT = ROOT / "docs/install.md"
BEGIN, END = "<!-- values: scripts/chart_values.py -->\n", "<!-- end of values -->\n"


def described(text):
    """The keys with a description, as `node.image`, and it."""
    path, description = [], None
    for line in text.splitlines():
        comment = re.fullmatch(r" *# (.*)", line)
        key = re.match(r"( *)([\w./-]+):", line)
        if comment and comment[1].startswith("-- "):
            description = comment[1].removeprefix("-- ")
        elif comment and description:
            description += f" {comment[1]}"
        elif key:
            path[len(key[1]) // 2 :] = [key[2]]
            if description:
                yield list(path), description
            description = None


def table():
    text = VALUES.read_text()
    values = yaml.safe_load(text)
    lines = ["| value | meaning | default |", "| --- | --- | --- |"]
    for path, description in described(text):
        default = values
        for key in path:
            default = default[key]
        shown = default if isinstance(default, str) and default else json.dumps(default)
        name, meaning = ".".join(path), description.replace("|", "\\|")
        lines.append(f"| `{name}` | {meaning} | `{shown}` |")
    return "\n".join(lines) + "\n"


def main():
    before, rest = DOCUMENT.read_text().split(BEGIN)
    old, after = rest.split(END)
    new = f"\n{table()}\n"
    if "--check" not in sys.argv[1:]:
        DOCUMENT.write_text(before + BEGIN + new + END + after)
    elif new != old:
        sys.exit("docs/install.md: the table of values is old: run scripts/chart_values.py")


if __name__ == "__main__":
    main()
