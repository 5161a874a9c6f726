"""Schemathesis against a running server: generated requests for every operation of /openapi.json.

    python tests/conformance/schemathesis_run.py --base-url http://127.0.0.1:8000/v1

Installs schemathesis from the package index at run time. What it checks: no 5xx, no status,
content type or body that the document does not tell, invalid requests refused, methods that do not
exist refused. The document is the server's own, narrowed in one way so that requests reach the
model and end soon: `model` is one of the served names, and max_tokens, n and the like are small.

Left out, with reasons: see LEFT_OUT. The exit status is schemathesis's; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from environment import add_options, environment, run, work_folder

VERSION = "4.32.5"
LEFT_OUT = {
    "positive_data_acceptance": (
        "a schema cannot say all that is checked: ids below the vocabulary size, stream_options "
        "only with stream, best_of of at least n, prompts that fit the context"
    ),
}
SMALL: dict[str, dict[str, Any]] = {
    "max_tokens": {"maximum": 3},
    "max_completion_tokens": {"maximum": 3},
    "min_tokens": {"maximum": 2},
    "n": {"maximum": 2},
    "best_of": {"maximum": 2},
}
"""Bounds that keep generated requests cheap, by field."""


def narrowed(document: dict[str, Any], models: Sequence[str]) -> dict[str, Any]:
    """The document with the served names for `model` and small numbers, in place."""
    for operations in document["paths"].values():
        for operation in operations.values():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            properties = body.get("schema", {}).get("properties", {})
            if "model" in properties:
                properties["model"] = {"enum": list(models)}
            for name, bounds in SMALL.items():
                for schema in _numbers(properties.get(name, {})):
                    schema.update(bounds)
            for parameter in operation.get("parameters", ()):
                if parameter["name"] == "model":
                    parameter["schema"] = {"enum": [*models, "nobody"]}
    return document


def _numbers(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [s for s in [schema, *schema.get("anyOf", ())] if s.get("type") == "integer"]


def counted(report: Path) -> dict[str, int]:
    """Tests, failures and errors of a JUnit report."""
    counts = {"tests": 0, "failures": 0, "errors": 0}
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        for key in counts:
            counts[key] += int(suite.get(key, "0"))
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--examples", type=int, default=250, help="generated per operation")
    parser.add_argument("--version", default=VERSION, help=f"of schemathesis ({VERSION})")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    base_url = options.base_url.rstrip("/")
    root = base_url.removesuffix("/v1")
    with urllib.request.urlopen(f"{root}/openapi.json", timeout=30) as response:
        document = json.load(response)
    with urllib.request.urlopen(f"{base_url}/models", timeout=30) as response:
        models = [model["id"] for model in json.load(response)["data"]]
    if options.model is not None:
        models = [options.model]
    with work_folder(options.work_dir) as folder:
        python = environment(folder, "schemathesis", [f"schemathesis=={options.version}"])
        (folder / "openapi.json").write_text(json.dumps(narrowed(document, models)))
        report = folder / "schemathesis.xml"
        status = run(
            [
                python.parent / "schemathesis", "run", "openapi.json", "--url", root,
                "--phases", "examples,coverage,fuzzing",
                "--exclude-checks", ",".join(LEFT_OUT),
                "--max-examples", str(options.examples), "--seed", str(options.seed),
                "--workers", "2", "--request-timeout", "60", "--continue-on-failure",
                "--report", "junit", "--report-junit-path", str(report), "--no-color",
            ],
            folder,
        )  # fmt: skip
        counts = counted(report) if report.exists() else {}
    for name, reason in LEFT_OUT.items():
        print(f"left out: {name}: {reason}")
    told = {"tool": "schemathesis", "version": options.version, "models": models, **counts}
    print(json.dumps({**told, "status": status, "left_out": list(LEFT_OUT)}))
    return status


if __name__ == "__main__":
    sys.exit(main())
