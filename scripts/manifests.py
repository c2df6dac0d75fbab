"""Builds and validates Kubernetes' objects, and collects what is wrong with them."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
# From this release on the API server keeps every field of the manifests by default (the
# last to come was CSIDriver's seLinuxMount); and the newest release with a schema.
KUBERNETES = ["1.27", kubernetes_validate.latest_version()]
# Kinds that came later than the oldest release.
LATER = {"VolumeAttributesClass"}
# The fields of custom resources that we use, as their definitions have them.
CUSTOM = json.loads((Path(__file__).parent / "custom_resources.json").read_text())
problems = []


def problem(where, what):
    problems.append(f"{where}: {what}")


def report(success):
    for line in problems:
        print(line, file=sys.stderr)
    if problems:
        sys.exit(1)
    print(success)


def kustomize(resources, components=()):
    """The objects of these directories of deploy/."""
    for tool in (["kubectl", "kustomize"], ["kustomize", "build"]):
        if shutil.which(tool[0]):
            break
    else:
        sys.exit("manifests.py: neither kubectl nor kustomize is installed")
    with tempfile.TemporaryDirectory() as made:
        made = Path(made).resolve()

        def paths(names):
            return [os.path.relpath(DEPLOY / name, made) for name in names]

        kustomization = {"resources": paths(resources), "components": paths(components)}
        (made / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return objects(subprocess.check_output([*tool, str(made)], text=True))


def objects(text):
    return [doc for doc in yaml.safe_load_all(text) if doc]


def as_line(error):
    return f"{'.'.join(map(str, error.absolute_path))}: {error.message}"


def schema_errors(doc):
    """What Kubernetes' API refuses or drops: wrong types, unknown fields."""
    name = f"{doc['apiVersion']} {doc['kind']}"
    if name in CUSTOM["$defs"]:
        schema = {"$defs": CUSTOM["$defs"], **CUSTOM["$defs"][name]}
        yield from map(as_line, jsonschema.Draft202012Validator(schema).iter_errors(doc))
        return
    for version in KUBERNETES:
        try:
            kubernetes_validate.validate(doc, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"Kubernetes {version}: {as_line(error)}"
        except kubernetes_validate.SchemaNotFoundError:
            if doc["kind"] not in LATER or version != KUBERNETES[0]:
                yield f"Kubernetes {version} has no {name}"


def unordered(value, field=""):
    """Without an order where Kubernetes ignores it, and without a JSON text's spelling."""
    if isinstance(value, dict):
        return {key: unordered(item, key) for key, item in value.items()}
    if isinstance(value, list):
        items = [unordered(item) for item in value]
        if field in ("args", "command"):
            # Of programs whose last arguments are positional, too, the order is the same.
            return items
        return sorted(items, key=lambda item: json.dumps(item, sort_keys=True))
    if field == "config.json":
        return json.loads(value)
    return value


def by_name(docs):
    named = {(doc["kind"], doc["metadata"]["name"]): unordered(doc) for doc in docs}
    assert len(named) == len(docs), "two objects have one kind and name"
    return named


def compare(where, made, wanted, names, path=""):
    """Reports the innermost differences; `names`: what the two are."""
    if isinstance(made, dict) and isinstance(wanted, dict):
        for key in sorted(made.keys() | wanted.keys(), key=str):
            at = f"{path}.{key}"
            if key not in wanted:
                problem(where, f"{names[1]} has no {at}")
            elif key not in made:
                problem(where, f"{names[0]} has no {at}")
            else:
                compare(where, made[key], wanted[key], names, at)
    elif isinstance(made, list) and isinstance(wanted, list) and len(made) == len(wanted):
        for index, pair in enumerate(zip(made, wanted)):
            compare(where, *pair, names, f"{path}.{index}")
    elif made != wanted:
        first, second = json.dumps(made), json.dumps(wanted)
        problem(where, f"{path}: {first} in {names[0]}, {second} in {names[1]}")
