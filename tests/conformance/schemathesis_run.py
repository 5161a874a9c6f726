"""Schemathesis against a running server: generated requests for every operation of /openapi.json.

    python tests/conformance/schemathesis_run.py --base-url http://127.0.0.1:8000/v1

Installs schemathesis from the package index at run time. What it checks: no 5xx, no status,
content type or body that the document does not tell, invalid requests refused, methods that do not
exist refused. Two passes: `wide` takes the server's own document, but for `model`, which is one of
the served names, and small max_tokens, n and the like; `deep` asks completions and chat for fewer
fields and simple prompts, so that most of its requests reach the model.

Left out, with reasons: see LEFT_OUT. The exit status is schemathesis's; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from environment import add_options, environment, run, work_folder

VERSION = "4.32.5"
ADMIN_PATHS = "^/v1/tasks"
LEFT_OUT = {
    f"paths {ADMIN_PATHS}": (
        "without an admin key they are refused with 403 whatever the method, before it is looked "
        "at; methods that do not exist are expected to get 405"
    ),
    "check positive_data_acceptance": (
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


_WORDS = {"type": "string", "minLength": 1, "maxLength": 60, "pattern": "^[ -~]*[a-z][ -~]*$"}
_SAYS = {
    "type": "object",
    "properties": {"role": {"enum": ["user", "assistant"]}, "content": _WORDS},
    "required": ["role", "content"],
    "additionalProperties": False,
}
DEEP_FIELDS: dict[str, dict[str, Any] | None] = {
    "prompt": {"anyOf": [_WORDS, {"type": "array", "items": _WORDS, "minItems": 1, "maxItems": 3}]},
    "messages": {"type": "array", "items": _SAYS, "minItems": 1, "maxItems": 3},
    **dict.fromkeys((
        "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "stream",
        "stop", "presence_penalty", "frequency_penalty", "seed", "user", "top_k", "min_p",
        "repetition_penalty", "ignore_eos", "return_token_ids", "cache_salt", "speculation",
        "include_speculation", "include_token_sources", "metadata", "store", "logprobs", "echo",
    )),
}  # fmt: skip
"""The fields of the deep pass, and the schema of those whose own is too wide for it."""


def deepened(document: dict[str, Any]) -> dict[str, Any]:
    """The document's two operations that generate text, with DEEP_FIELDS alone, in place."""
    paths = {
        path: operations
        for path, operations in document["paths"].items()
        if path.endswith("/completions")
    }
    for operations in paths.values():
        schema = operations["post"]["requestBody"]["content"]["application/json"]["schema"]
        schema["properties"] = {
            name: DEEP_FIELDS[name] or given
            for name, given in schema["properties"].items()
            if name in DEEP_FIELDS
        }
    return {**document, "paths": paths}


def narrowed(document: dict[str, Any], models: Sequence[str]) -> dict[str, Any]:
    """The document with the served names for `model` and small numbers, in place."""
    for operations in document["paths"].values():
        for operation in operations.values():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            properties = body.get("schema", {}).get("properties", {})
            if "model" in properties:
                may_be_null = {"type": "null"} in properties["model"].get("anyOf", ())
                properties["model"] = {"enum": [*models, None] if may_be_null else list(models)}
            for name, bounds in SMALL.items():
                for schema in _numbers(properties.get(name, {})):
                    schema.update(bounds)
            for parameter in operation.get("parameters", ()):
                if parameter["name"] == "model":
                    parameter["schema"] = {"enum": [*models, "nobody"]}
    return document


def _numbers(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [s for s in [schema, *schema.get("anyOf", ())] if s.get("type") == "integer"]


def statuses(har: Path) -> dict[str, int]:
    """How many requests were answered with each class of status, of a HAR file."""
    found: Counter[str] = Counter()
    for entry in json.loads(har.read_text())["log"]["entries"] if har.exists() else ():
        found[f"{entry['response']['status'] // 100}xx"] += 1
    return {"requests": found.total(), **dict(sorted(found.items()))}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--examples", type=int, default=250, help="generated per operation")
    parser.add_argument("--only", choices=("wide", "deep"), help="one pass")
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
    results: dict[str, dict[str, int]] = {}
    with work_folder(options.work_dir) as folder:
        python = environment(folder, "schemathesis", [f"schemathesis=={options.version}"])
        narrowed(document, models)
        for name in ("wide", "deep"):
            if options.only not in (None, name):
                continue
            file = folder / f"{name}.json"
            file.write_text(json.dumps(document if name == "wide" else deepened(document)))
            status = run(
                [
                    python.parent / "schemathesis", "run", file, "--url", root,
                    "--phases", "coverage,fuzzing" if name == "wide" else "fuzzing",
                    "--exclude-checks", "positive_data_acceptance",
                    "--exclude-path-regex", ADMIN_PATHS,
                    "--max-examples", str(options.examples), "--seed", str(options.seed),
                    "--workers", "1", "--request-timeout", "60", "--continue-on-failure",
                    "--no-color", "--report", "har",
                    "--report-har-path", folder / f"schemathesis-{name}.har",
                ],
                folder,
            )  # fmt: skip
            results[name] = {"exit_status": status, **statuses(folder / f"schemathesis-{name}.har")}
    worst = max(result["exit_status"] for result in results.values())
    for name, reason in LEFT_OUT.items():
        print(f"left out: {name}: {reason}")
    told = {"tool": "schemathesis", "version": options.version, "models": models}
    print(json.dumps({**told, "results": results, "left_out": list(LEFT_OUT)}))
    return worst


if __name__ == "__main__":
    sys.exit(main())
