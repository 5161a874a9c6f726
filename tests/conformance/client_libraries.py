"""LiteLLM, LangChain's OpenAI classes and instructor, unchanged, against a running server.

    python tests/conformance/client_libraries.py --base-url http://127.0.0.1:8000/v1

Installs each library from the package index at run time, in an environment of its own, and runs
its program of clients/ there: a completion, a stream, an async call, a list of prompts,
usage, a bad field, and for chat the same and a JSON schema. A program prints one line per check.
Exits 1 when a check failed; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from environment import add_options, environment, run, served_model, work_folder

PROGRAMS = Path(__file__).parent / "clients"
LIBRARIES = {
    "litellm": ["litellm"],
    "langchain": ["langchain-openai"],
    "instructor": ["instructor"],
}
"""What each program needs from the package index."""


def answers_chat(base_url: str) -> bool:
    """Whether the server has the chat route at all."""
    root = base_url.rstrip("/").removesuffix("/v1")
    with urllib.request.urlopen(f"{root}/openapi.json", timeout=30) as response:
        return "/v1/chat/completions" in json.load(response)["paths"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--only", choices=sorted(LIBRARIES), help="one library")
    options = parser.parse_args(arguments)
    model = options.model or served_model(options.base_url)
    chat = answers_chat(options.base_url)
    statuses: dict[str, int] = {}
    with work_folder(options.work_dir) as folder:
        for name, requirements in LIBRARIES.items():
            if options.only not in (None, name):
                continue
            python = environment(folder, name, requirements)
            statuses[name] = run(
                [python, PROGRAMS / f"{name}_checks.py"], folder,
                BASE_URL=options.base_url.rstrip("/"), MODEL=model, CHAT="1" if chat else "0",
                LITELLM_LOCAL_MODEL_COST_MAP="True",
            )  # fmt: skip
    print(json.dumps({"tool": "client_libraries", "model": model, "chat": chat, **statuses}))
    return max(statuses.values(), default=0)


if __name__ == "__main__":
    sys.exit(main())
