"""The table of the chart's values, from values.yaml: a comment that begins with `--` describes the
key after it. The values' schema has the same descriptions, and those of the programs' flags."""

import json
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
VALUES = ROOT / "deploy/chart/values.yaml"
SCHEMA = ROOT / "deploy/chart/values.schema.json"
WIDTH = 100


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


def dumped(value, indent=0, before=0):
    """JSON, what fits into a line on one; `before`: the length of what is on the line already."""
    line = json.dumps(value, ensure_ascii=False)
    if not value or not isinstance(value, (dict, list)) or before + len(line) < WIDTH:
        return line
    inner = " " * (indent + 2)
    if isinstance(value, dict):
        items = [
            f"{inner}{json.dumps(key)}: {dumped(item, indent + 2, indent + len(key) + 6)}"
            for key, item in value.items()
        ]
    else:
        items = [f"{inner}{dumped(item, indent + 2, indent + 2)}" for item in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return "\n".join([opening, ",\n".join(items), " " * indent + closing])


def describe(properties, name, description):
    known = {key: rule for key, rule in properties[name].items() if key != "description"}
    properties[name] = {"description": description} | known


def with_descriptions(schema, meanings):
    """The schema's text with the descriptions of values.yaml, and with the meaning of each flag of a
    part's `config`; `meanings`: by part and flag."""
    schema = json.loads(schema)
    for path, description in described(VALUES.read_text()):
        at = schema["properties"]
        for key in path[:-1]:
            at = at[key]["properties"]
        describe(at, path[-1], description)
    for part, of_flags in meanings.items():
        config = schema["properties"][part]["properties"]["config"]["properties"]
        for flag in config:
            describe(config, flag, of_flags.get(flag, ""))
    return dumped(schema) + "\n"


def undescribed(schema, of=None, path=""):
    """The values, and the fields of their items, without a description: neither where they are nor
    in what they refer to."""
    for name, value in (of or schema)["properties"].items():
        at = f"{path}.{name}".removeprefix(".")
        items = value.get("items", {})
        for here in (value, items):
            referred = schema["$defs"].get(here.get("$ref", "").removeprefix("#/$defs/"), {})
            for fields in (here, referred, referred.get("items", {})):
                if "properties" in fields:
                    yield from undescribed(schema, fields, at)
        if "properties" not in value and not value.get("description"):
            yield at


def uncommented(values, known, path=()):
    """The values of values.yaml without a description."""
    for name, value in values.items():
        at = (*path, name)
        if at in known:
            continue
        if value and isinstance(value, dict):
            yield from uncommented(value, known, at)
        else:
            yield ".".join(at)


def missing():
    """The values without a description, in values.yaml and in the schema."""
    text = VALUES.read_text()
    known = {tuple(path) for path, _ in described(text)}
    yield VALUES, uncommented(yaml.safe_load(text), known)
    yield SCHEMA, undescribed(json.loads(SCHEMA.read_text()))


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
