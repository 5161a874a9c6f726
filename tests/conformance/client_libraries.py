"""Client libraries of others, and OpenAI's Node client, against a running server.

    python tests/conformance/client_libraries.py --base-url http://127.0.0.1:8000/v1

Installs each library from the package index at run time, in an environment of its own, and runs
its program of clients/ there: a completion, a stream, an async call, a list of prompts,
usage, a bad field, and for chat the same, a JSON schema, and conversations of two turns and more,
in which the library sends its own messages, calls and results back. A program prints one line per
check.
`node` needs node and npm and is left out, with a word, where they are missing.
Exits 1 when a check failed; the last line is JSON.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from environment import environment, options_of, run, served_model, work_folder

PROGRAMS = Path(__file__).parent / "clients"
LIBRARIES = {
    "litellm": ["litellm", "mcp"],  # it wants mcp for tools
    "litellm_proxy": ["litellm[proxy]", "mcp"],
    "langchain": ["langchain-openai"],
    "instructor": ["instructor"],
    "openai_agents": ["openai-agents"],
    "pydantic_ai": ["pydantic-ai-slim[openai]"],
    "llama_index": ["llama-index-llms-openai-like"],
    "dspy": ["dspy"],
    "haystack": ["haystack-ai"],
    "llm": ["llm"],
}
"""What each program needs from the package index."""
NODE_PACKAGES = ["openai@7.59.0", "zod@4.6.7"]


def run_node(folder: Path, base_url: str, model: str) -> int:
    """The checks of OpenAI's Node client; the exit status of npm or of the checks.

    The program is copied beside its packages, as Node finds them from there.
    """
    place = folder / "node"
    place.mkdir(exist_ok=True)
    (place / "package.json").write_text('{"private": true, "type": "module"}')
    wanted = ["--no-audit", "--no-fund", "--loglevel=error", *NODE_PACKAGES]
    if status := run(["npm", "install", *wanted], place):
        return status
    shutil.copy(PROGRAMS / "openai_checks.mjs", place)
    return run(["node", "openai_checks.mjs"], place, BASE_URL=base_url, MODEL=model)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options_of(__doc__)
    parser.add_argument("--only", choices=sorted([*LIBRARIES, "node"]), help="one library")
    options = parser.parse_args(arguments)
    model = options.model or served_model(options.base_url)
    statuses: dict[str, int] = {}
    with work_folder(options.work_dir) as folder:
        for name, requirements in LIBRARIES.items():
            if options.only not in (None, name):
                continue
            python = environment(folder, name, requirements)
            statuses[name] = run(
                [python, PROGRAMS / f"{name}_checks.py"], folder,
                BASE_URL=options.base_url.rstrip("/"), MODEL=model,
                LITELLM_LOCAL_MODEL_COST_MAP="True",
            )  # fmt: skip
        if options.only in (None, "node"):
            if shutil.which("npm") and shutil.which("node"):
                statuses["node"] = run_node(folder, options.base_url.rstrip("/"), model)
            else:
                print("left out: node: it needs node and npm")
    print(json.dumps({"tool": "client_libraries", "model": model, **statuses}))
    return max(statuses.values(), default=0)


if __name__ == "__main__":
    sys.exit(main())
