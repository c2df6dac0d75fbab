#!/usr/bin/env python3
"""Checks that the modules of src/ use each other as docs/architecture.md says, that
neither they nor the files within one use each other in a circle, that no module of the
runtime thread calls the blocking std::fs, and that no two types share a name.

A module uses another where its code, tests left out, has a path into it: `crate::fs::probe`
in src/volume is an arrow from `volume` to `fs`.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src"
DOCUMENT = ROOT / "docs/architecture.md"
TEST = re.compile(r"(^|/)(tests|testing|scratch)(/|\.rs$)")
# From here to the end, as rustfmt and clippy (items_after_test_module) leave it.
UNIT_TESTS = re.compile(r"^#\[cfg\(test\)\]\n(?:#\[.*\]\n)*mod tests \{", re.MULTILINE)
TEST_USE = re.compile(r"^#\[cfg\(test\)\]\n(?:pub(?:\(.*?\))? )?(?:use .*?;|mod \w+;)$", re.M | re.S)
COMMENT = re.compile(r"//.*")
USE = re.compile(r"^ *(?:pub(?:\([^)]*\))? )?use ([^;]+);", re.MULTILINE)
PATH = re.compile(r"\b((?:crate|super)(?:::\w+)+)")

BLOCKING = re.compile(r"(?<!rustix::)\bfs::[a-z_]+\(|\bFile::(?:open|create|options)\b")
RUNTIME = {"admission", "csi", "endpoint", "manager", "observe", "ring", "volume"}
# Files of the agent's own, on a tmpfs or used on lanes, and what is read at its start.
OWN_FILES = {"csi/run_dir.rs", "endpoint.rs", "ring.rs", "volume/record.rs"}
OWN_FILES |= {"manager/directory.rs", "manager/maps.rs", "manager/records.rs"}

TYPE = re.compile(r"^ *(?:pub(?:\([^)]*\))? )?(?:struct|enum|trait) (\w+)", re.MULTILINE)
# The commands of uringctl have the names of the calls that they make, C's structures those
# of their Rust types.
NAMED_ALIKE = re.compile(r"cli(/|\.rs$)|ceph/client/library/")


def module_of(path):
    parts = list(path.relative_to(SRC).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "mod" else parts


def leaves(tree, prefix=""):
    """The paths of a use declaration."""
    depth, start = 0, 0
    for at, char in enumerate(tree + ","):
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            item = tree[start:at].strip()
            start = at + 1
            if "{" in item:
                head, inner = item.split("{", 1)
                yield from leaves(inner.rsplit("}", 1)[0], prefix + head)
            elif item:
                yield prefix + item.split(" as ")[0]


def code_of(path):
    text = path.read_text()
    if tests := UNIT_TESTS.search(text):
        text = text[: tests.start()]
    return COMMENT.sub("", TEST_USE.sub("", text))


def targets(path, module):
    """The modules, from the root, that the code of a file names."""
    code = code_of(path)
    names = [name for use in USE.findall(code) for name in leaves(" ".join(use.split()))]
    for name in names + PATH.findall(USE.sub("", code)):
        parts = name.replace(" ", "").split("::")
        if parts[0] in ("crate", "uring_csi"):
            yield parts[1:]
        elif parts[0] == "super":
            ups = sum(1 for part in parts if part == "super")
            yield module[: len(module) - ups] + parts[ups:]


def product():
    """The files of src/, tests left out."""
    files = [path for path in sorted(SRC.rglob("*.rs")) if not TEST.search(str(path.relative_to(SRC)))]
    return [path for path in files if path.name != "lib.rs"]


def arrows():
    """{(from, to): a file that has the arrow}, between modules and between files"""
    files = product()
    names = {"::".join(module_of(path)) for path in files}
    of_modules, of_files = {}, {}
    for path in files:
        module = module_of(path)
        for target in targets(path, module):
            # The last parts of a path are items of a file.
            while target and "::".join(target) not in names:
                target = target[:-1]
            if not target or target == module:
                continue
            found = path.relative_to(ROOT)
            of_files.setdefault(("::".join(module), "::".join(target)), found)
            if target[0] != module[0]:
                of_modules.setdefault((module[0], target[0]), found)
    return of_modules, of_files


def circle(edges):
    """One circle, as the list of its modules, or nothing."""
    after = {}
    for one, other in edges:
        after.setdefault(one, set()).add(other)
    done = set()

    def walk(node, way):
        if node in way:
            return way[way.index(node) :]
        if node in done:
            return None
        for following in sorted(after.get(node, ())):
            if way_round := walk(following, [*way, node]):
                return way_round
        done.add(node)
        return None

    return next(filter(None, (walk(node, []) for node in sorted(after))), None)


def documented():
    """{(from, to)} of the table of arrows, and the modules that any other may use."""
    text = DOCUMENT.read_text()
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", text, re.MULTILINE)
    common = re.search(r"^Any module may use: (.*)\.$", text, re.MULTILINE).group(1)
    listed = {(one, other) for one, uses in rows for other in re.findall(r"`(\w+)`", uses)}
    return listed, set(re.findall(r"`(\w+)`", common))


def shared_names():
    files = {}
    for path in product():
        if not NAMED_ALIKE.match(str(path.relative_to(SRC))):
            for name in TYPE.findall(code_of(path)):
                files.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return {name: paths for name, paths in files.items() if len(paths) > 1}


def main():
    found, of_files = arrows()
    wrong = []
    for edges in found, of_files:
        if way := circle(edges):
            steps = [f"  {pair[0]} → {pair[1]}: {edges[pair]}" for pair in zip(way, way[1:] + way[:1])]
            wrong.append("\n".join(["a circle:", *steps]))
    listed, common = documented()
    real = {pair for pair in found if pair[1] not in common}
    wrong += [f"{one} → {other}, in {found[one, other]}, is not in {DOCUMENT.name}" for one, other in sorted(real - listed)]
    wrong += [f"{one} → {other} is in {DOCUMENT.name}, but not in the code" for one, other in sorted(listed - real)]
    for path in (path for path in product() if module_of(path)[0] in RUNTIME):
        if str(path.relative_to(SRC)) not in OWN_FILES:
            wrong += [f"{path.relative_to(ROOT)} blocks the runtime thread: {call}" for call in BLOCKING.findall(code_of(path))]
    wrong += [f"{name} is a type in {' and '.join(paths)}" for name, paths in sorted(shared_names().items())]
    if wrong:
        print(*wrong, sep="\n", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
