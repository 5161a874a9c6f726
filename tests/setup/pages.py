"""The documents that the tests of this folder read: README.md, CONTRIBUTING.md and docs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

GENERATED = "command-line.md"

# Pages whose blocks are run by a test of their own.
RUN_ELSEWHERE = {
    "adding-a-drafter.md": "tests/drafters",
    "adding-a-model.md": "tests/model",
    "first-hour.md": "tests/setup/test_first_hour.py",
}


def every_page() -> list[Path]:
    """All documents, README first, but for the one that `make docs` writes."""
    pages = sorted(page for page in DOCS.rglob("*.md") if page.name != GENERATED)
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *pages]


def followed_pages() -> list[Path]:
    """The pages whose commands and examples a reader would run now. Benchmarks name the commands of
    their day; their overview names today's."""
    return [
        page
        for page in every_page()
        if page.name not in RUN_ELSEWHERE
        and (page.parent.name != "benchmarks" or page.stem == "index")
    ]


def text() -> str:
    """`followed_pages`, joined."""
    return "\n".join(page.read_text(encoding="utf-8") for page in followed_pages())


def blocks(language: str) -> list[str]:
    """Every fenced block of `language`, in order, each once."""
    return list(dict.fromkeys(re.findall(rf"^```{language}\n(.*?)^```", text(), re.S | re.M)))


def commands() -> list[str]:
    """Every command line of a shell block, continued lines joined, in order, each once."""
    joined = "".join(blocks("sh")).replace("\\\n", " ")
    return list(dict.fromkeys(line for line in joined.splitlines() if line.strip()))
