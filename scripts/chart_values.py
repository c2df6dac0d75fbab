"""The table of the chart's values, from values.yaml: a comment that begins with `--`
describes the key after it. And the descriptions in the values' schema of the programs' flags."""

import json
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
VALUES = ROOT / "deploy/chart/values.yaml"


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


def with_descriptions(schema, meanings):
    """The schema's text, each flag of a part's `config` with its meaning; `meanings`: by part and
    flag. A flag has one line."""
    for part, of_flags in meanings.items():

        def described(line, of_flags=of_flags):
            indent, flag, rules = line.groups()
            kept = {key: rule for key, rule in json.loads(rules).items() if key != "description"}
            new = {"description": of_flags.get(flag, "")} | kept
            return f'{indent}"{flag}": {json.dumps(new, ensure_ascii=False)}'

        config = rf'^    "{part}": {{\n(?:.*\n)*?        "config": {{\n((?:          .*\n)*)'
        begin, end = re.search(config, schema, re.MULTILINE).span(1)
        lines = re.sub(r'^( {12})"([a-z-]+)": ({.*})', described, schema[begin:end], flags=re.MULTILINE)
        schema = schema[:begin] + lines + schema[end:]
    return schema


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
