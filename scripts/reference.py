#!/usr/bin/env python3
"""Writes what docs/ takes from the code, between the comments that name this program: the
tables of flags, metrics, codes, error messages and values of the chart, and uringctl's help.
It also writes the descriptions in the schema of the chart's values.
With --check it writes nothing, and fails where a text is old.

It also checks that each error has a cause and a remedy, and what docs/reference has written by
hand: each table of parameters has the keys that the code reads, no fewer and no more, the chart
has a value for each flag, and one version is everywhere.

The programs must be built (BIN_DIR, by default target/debug). Run it by
target/python/bin/python, where `scripts/setup.sh lint` installs what it imports.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import chart_values
from chart_values import SCHEMA
from manifests import problem, report

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
REFERENCE = ROOT / "docs/reference"
BIN_DIR = Path(os.environ.get("BIN_DIR", ROOT / "target" / "debug"))
STRING = r"\"((?:[^\"\\]|\\[\s\S])*)\""
CHART = ROOT / "deploy/chart"
# The parts of the chart with the flags of a program.
PROGRAMS = ("node", "controller", "holder")
# Flags without a value in the chart: paths that are where the chart mounts them, and a file of
# flags, which are all values.
NOT_IN_CHART = {"config", "kms-secrets", "kms-token"}
# Keys that the code reads in any case.
IN_ANY_CASE = re.compile("NFS")
# The modules of the errors, by whom they concern.
ERRORS = {
    "Volumes by files": ["manager"],
    "Requests, volumes and their devices": ["volume", "device", "nbd", "nfs", "admission", "size"],
    "File systems and mounts": ["fs", "mount"],
    "Pools, images and the controller": ["pool", "provision/error", "provision/nfs"],
    "Ceph": ["ceph", "provision/rbd"],
    "rbd-nbd": ["supervisor"],
    "The start of a program, and its sockets": ["csi", "endpoint", "kernel", "observe", "ring"],
    "uringctl": ["cli"],
}


def source(path):
    return (SRC / path).read_text()


def table(heads, rows):
    def line(cells):
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(heads), line(["---"] * len(heads)), *map(line, rows)]) + "\n"


def help_of(program, *command, flag="--help"):
    """Of the same width on every terminal."""
    return subprocess.check_output(
        [BIN_DIR / program, *command, flag], text=True, env=os.environ | {"COLUMNS": "92"}
    )


def flags(program):
    """The rows of a program's flags, from its long help."""
    rows = []
    for option in re.split(r"\n(?=      --)", help_of(program))[1:]:
        name, *lines = option.split("\n")
        text = re.split(r"\n\S", "\n".join(lines))[0]
        variable = re.search(r"\[env: (\w+)=.*\]", text)
        default = re.search(r"\[default: (.*)\]", text)
        values = re.findall(r"^ *- (\w+): (.*)$", text, re.MULTILINE)
        meaning = " ".join(re.split(r"\[env:|\[default:|Possible values:", text)[0].split())
        meaning += "".join(f"; `{value}`: {what}" for value, what in values)
        rows.append(
            [
                f"`{name.strip()}`",
                meaning,
                f"`{default[1]}`" if default else "",
                f"`{variable[1]}`" if variable else "",
            ]
        )
    return rows


def commands(*above):
    """The help of each of uringctl's commands, without the options that all have."""
    text = help_of("uringctl", *above, flag="-h" if above else "--help")
    below = re.search(r"Commands:\n(.*?)\n\n", text, re.DOTALL)
    for name in re.findall(r"^  ([a-z]+) ", below[1] if below else "", re.MULTILINE):
        if name != "help":
            path = [*above, name]
            head = "#" * min(len(path) + 1, 3)
            yield f"{head} uringctl {' '.join(path)}\n", help_of("uringctl", *path, flag="-h")
            yield from commands(*path)


def uringctl():
    parts = [f"```text\n{help_of('uringctl').strip()}\n```\n"]
    for head, text in commands():
        own = re.sub(r"\nOptions of every command:\n( .*\n|\n(?= ))*", "", text)
        parts.append(f"{head}\n```text\n{own.strip()}\n```\n")
    return "\n".join(parts)


def metrics():
    text = source("observe/metrics.rs") + source("observe/metrics/calls.rs")
    recorded = r"\b(?:histogram|gauge|counter)!\(\s*name::(\w+)([^)]*)\)"
    labels = {
        constant: re.findall(r'"(\w+)" =>', arguments)
        for constant, arguments in re.findall(recorded, text)
    }
    described = rf'^    describe_(\w+) (\w+) "(uring_csi_\w+)" \w+\s+{STRING}'
    rows = [
        [f"`{name}`", kind, ", ".join(f"`{label}`" for label in labels[constant]), what]
        for kind, constant, name, what in re.findall(described, source("observe/metrics/names.rs"), re.M)
    ]
    return table(["metric", "type", "labels", "meaning"], rows)


def codes_of_kinds():
    pairs = re.findall(r"Kind::(\w+) => Code::(\w+)", source("csi/status.rs"))
    return {kind: re.sub(r"(?<=[a-z])(?=[A-Z])", "_", code).upper() for kind, code in pairs}


def codes():
    meanings = dict(
        (name, " ".join(re.findall(r"/// (.*)", doc)))
        for doc, name in re.findall(r"((?: *///.*\n)+) *(\w+),", source("kind.rs"))
    )
    rows = [[code, meanings[kind]] for kind, code in codes_of_kinds().items()]
    return table(["code", "what the caller may do"], rows)


def code_of(text, variant, by_kind=codes_of_kinds()):
    """The code of an error's variant by `fn kind` of its file; empty if it has none, or if
    more than the variant decides."""
    found, rest = set(), ""
    for body in re.findall(r"^    pub fn kind\(&self\) -> Kind \{(.*?)^    }\n", text, re.M | re.S):
        for patterns, answer in re.findall(r"^ {12}((?:Self::|_)[^=]*?)=> *(.*)$", body, re.M):
            kind = re.fullmatch(r"Kind::(\w+),", answer)
            code = by_kind[kind[1]] if kind else ""
            if patterns.strip() == "_":
                rest = code
            for more in re.findall(rf"Self::{variant}\b([^|]*)", patterns):
                found.add(code if re.fullmatch(r"\s*(\{ \.\. }|\(_\))?\s*(//.*\s*)*", more) else "")
    return found.pop() if len(found) == 1 else "" if found else rest


def plain(literal):
    """A Rust string's text, with … for what is filled in."""
    text = re.sub(r"\\\n\s*", "", literal).replace('\\"', '"').replace("\\\\", "\\")
    text = re.sub(r"\{(\w*)[^}]*\}", lambda m: m[1].upper() if m[1][:1].isalpha() else "…", text)
    return text.strip()


def paragraphs(doc):
    """An error's cause and its remedy, if its doc comment has one."""
    lines = re.findall(r"^ *///(.*)$", doc, re.MULTILINE)
    cause, _, remedy = " ".join(line.strip() for line in lines).partition("  Remedy: ")
    return cause, remedy.removesuffix(".")


def messages(modules):
    """What follows a message's semicolon is its remedy, where its doc comment has no other."""
    rows = []
    for module in modules:
        paths = sorted([*SRC.glob(f"{module}.rs"), *SRC.glob(f"{module}/**/*.rs")])
        for path in paths:
            text = path.read_text()
            pattern = rf"((?:^ *///.*\n)*)(?:^ *#\[derive.*\n)?^ *#\[error\(\s*{STRING}[^]]*?\)\]\n(?:.*\n)*? *(?:pub struct )?(\w+)"
            for doc, literal, variant in re.findall(pattern, text, re.MULTILINE):
                message = plain(literal)
                if re.search("[a-z]{3}", message):
                    cause, remedy = paragraphs(doc)
                    before, _, after = message.partition("; ")
                    if not remedy:
                        remedy = after
                        message = before if re.search("[a-z]{3}", before) else message
                    for what, it in [("cause", cause), ("remedy", remedy)]:
                        if not it:
                            problem(path.relative_to(ROOT), f"the error {variant} has no {what}")
                    rows.append([f"*{message.replace('*', '')}*", code_of(text, variant), cause, remedy])
    return table(["message", "code", "cause", "what to do"], rows)


def errors():
    documented = {m for modules in ERRORS.values() for m in modules}
    for path in SRC.rglob("*.rs"):
        module = str(path.relative_to(SRC).with_suffix(""))
        if "#[error(" in path.read_text() and not any(
            module == known or module.startswith(f"{known}/") for known in documented
        ):
            problem("scripts/reference.py", f"no heading for the errors of {module}")
    return "\n".join(f"### {head}\n\n{messages(modules)}" for head, modules in ERRORS.items())


def strings(path, before):
    """The string literals of the list after `before`, to its end."""
    text = source(path)
    start = text.index(before) + len(before)
    return set(re.findall(STRING, text[start : text.index("]", start)]))


def ceph_class():
    text = source("provision/rbd/class.rs")
    arms = text[text.index("match name.as_str() {") : text.index("_ => match UNSUPPORTED")]
    keys = set(re.findall(r'^ *"(\w+)"', arms, re.MULTILINE)) | {"thickProvision"}
    qos = source("provision/rbd/qos.rs")
    keys |= set(re.findall(r'(?:base|per_gib): "(\w+)"', qos)) | {"BaseVolSizeBytes"}
    keys |= strings("provision/rbd/class.rs", "FOR_THE_NODE: &[&str] = &[")
    return keys | strings("provision/rbd/class.rs", "UNSUPPORTED: [&str; 4] = [")


def parameters():
    """The keys that the code reads, by the heading of their table."""
    common = strings("device/context.rs", "COMMON: [&str; 4] = [")
    nfs = source("provision/nfs/class.rs")
    nfs = nfs[nfs.index("pub fn snapshot_share(") : nfs.index("fn bad(")]
    own = strings("provision/params/export.rs", "OWN: [&str; 4] = [") | {"nbdServer"}
    return {
        "StorageClasses of image pools": strings("provision/params.rs", "KNOWN: [&str; 8] = [") | own,
        "StorageClasses of Ceph pools": ceph_class(),
        "Snapshot classes of Ceph pools": strings(
            "provision/rbd/snapshots.rs", "const KNOWN: [&str; 3] = ["
        ),
        "Group snapshot classes of Ceph pools": strings(
            "provision/rbd/groups.rs", "const KNOWN: [&str; 3] = ["
        ),
        "StorageClasses of NFS shares": strings("provision/nfs/class.rs", "KEYS: [&str; 6] = ["),
        "Snapshot classes of NFS shares": set(re.findall(r'^ +"(\w+)" =>', nfs, re.MULTILINE)),
        "Volume context of NFS directories": strings("device/nfs.rs", "KEYS: [&str; 7] = ["),
        "VolumeAttributesClasses of Ceph pools": strings(
            "provision/rbd/qos.rs", "MODIFIABLE: [&str; 12] = ["
        ),
        "Volume context of image files": common | strings("device/images.rs", "refuse_unlisted(&["),
        "Volume context of NBD exports": common | strings("device/exports.rs", "refuse_unlisted(&["),
        "Volume context of Ceph images": common
        | strings("device/ceph/source.rs", "KNOWN: [&str; 27] = ["),
        "Inline volumes of NFS shares": {
            key.lower() for key in strings("device/nfs.rs", "INLINE_KEYS: [&str; 3] = [")
        },
        "Inline volumes": strings("csi/node/inline.rs", "ATTRIBUTES: [&str; 3] = ["),
    }


def check_parameters():
    text = (REFERENCE / "parameters.md").read_text()
    sections = dict(re.findall(r"^## (.*)\n((?:(?!^## ).*\n?)*)", text, re.MULTILINE))
    for head, keys in parameters().items():
        cells = re.findall(r"^\| (`[^|]*) \|", sections.get(head, ""), re.MULTILINE)
        listed = {key for cell in cells for key in re.findall(r"`([\w./-]+)", cell) if "/" not in key}
        if IN_ANY_CASE.search(head):
            listed = {key.lower() for key in listed}
        for key in sorted(keys ^ listed):
            where = "the code does not read" if key in listed else "the table lacks"
            problem(f"docs/reference/parameters.md, {head}", f"{where} {key}")


def check_conditions():
    """The table of health conditions has each, and no others."""
    made = set()
    for path in SRC.rglob("*.rs"):
        made |= set(re.findall(r'Severity::\w+,\s*ConditionReason::(\w+)|reason: "(\w+)"', path.read_text()))
    text = (REFERENCE / "errors.md").read_text()
    section = text[text.index("## Health conditions") : text.index("## All messages")]
    listed = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    for name in sorted({a or b for a, b in made} ^ listed):
        problem("docs/reference/errors.md", f"the code and the table differ in the condition {name}")


def check_chart_config():
    """The chart's `config` of each program has each flag that no other value sets, and no
    others."""
    schema = json.loads(SCHEMA.read_text())
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    for part in PROGRAMS:
        known = schema["properties"][part]["properties"]["config"]["properties"]
        left = set()
        for option in re.split(r"\n(?=      --)", help_of(f"uring-csi-{part}"))[1:]:
            flag, valued = re.match(r" *--([a-z-]+)( <)?", option).groups()
            variable = re.search(r"\[env: (\w+)=", option)
            if f"--{flag}=" not in templates and not (variable and f" {variable[1]}\n" in templates):
                left.add(flag)
            if flag in known and bool(valued) is (known[flag].get("type") == "boolean"):
                problem("deploy/chart/values.schema.json", f"{part}.config.{flag} has the wrong type")
        for flag in sorted((left - NOT_IN_CHART) ^ known.keys()):
            problem("deploy/chart/values.schema.json", f"{part}.config and --help differ in {flag}")


def check_versions():
    """The version of Cargo.toml is everywhere."""
    version = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)[1]
    named = r"(?:newTag: |^version: |appVersion: |VERSION=|uring-csi-[a-z-]+:)\"?(\d+\.\d+\.\d+)"
    places = [*ROOT.glob("deploy/**/*"), ROOT / "docs/install.md", ROOT / "docs/releases.md"]
    for path in places:
        if path.is_file() and set(re.findall(named, path.read_text(), re.MULTILINE)) - {version}:
            problem(path.relative_to(ROOT), f"names another version than {version}")


def replace(document, name, text, check):
    """Puts the text between the document's comments of that name."""
    begin, end = f"<!-- {name}: scripts/reference.py -->\n", f"<!-- end of {name} -->\n"
    path = ROOT / "docs" / document
    before, rest = path.read_text().split(begin)
    old, after = rest.split(end)
    new = f"\n{text}\n"
    if not check:
        path.write_text(before + begin + new + end + after)
    elif new != old:
        problem(f"docs/{document}", f"{name} is old: run scripts/reference.py")


def describe_values(meanings, check):
    """Puts the meanings of values and flags into the chart's schema."""
    old = SCHEMA.read_text()
    new = chart_values.with_descriptions(old, meanings)
    if not check:
        SCHEMA.write_text(new)
    elif new != old:
        problem(SCHEMA.relative_to(ROOT), "descriptions are old: run scripts/reference.py")
    for path, names in chart_values.missing():
        for name in names:
            problem(path.relative_to(ROOT), f"{name} has no description")


def main():
    check = "--check" in sys.argv[1:]
    meanings = {}
    for program in PROGRAMS:
        rows = flags(f"uring-csi-{program}")
        meanings[program] = {re.match(r"`--([a-z-]+)", row[0])[1]: row[1] for row in rows}
        replace("reference/flags.md", program, table(["flag", "meaning", "default", "variable"], rows), check)
    describe_values(meanings, check)
    replace("reference/uringctl.md", "commands", uringctl(), check)
    replace("reference/metrics.md", "metrics", metrics(), check)
    replace("reference/errors.md", "codes", codes(), check)
    replace("reference/errors.md", "messages", errors(), check)
    replace("chart.md", "values", chart_values.table(), check)
    check_parameters()
    check_conditions()
    check_chart_config()
    check_versions()
    report("reference: docs/ agrees with the code")


if __name__ == "__main__":
    main()
