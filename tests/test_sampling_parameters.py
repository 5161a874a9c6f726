"""A sampling parameter is one row and what each device's sampler does with it: three files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.types import DRAW_NUMBERS

ROOT = Path(__file__).parents[1]
ROOMS = ("server", "drafters", "vocab_store")
USERS = ("server/commands/", "server/client/", "server/api/faces/")
"""Who asks a server as a client does, and the shapes of answers that other documents fix."""


def _named(file: Path) -> Iterator[str]:
    """Every field, attribute and string of a module that has the letters of a parameter."""
    text = file.read_text(encoding="utf-8")
    if not any(name in text for name in DRAW_NUMBERS):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


@pytest.fixture(scope="module")
def named() -> dict[str, set[str]]:
    """{path: what the module names} of all that serves a request."""
    files = (file for room in ROOMS for file in (ROOT / room).rglob("*.py"))
    paths = {str(file.relative_to(ROOT)): file for file in files}
    return {path: set(_named(file)) for path, file in paths.items() if not path.startswith(USERS)}


@pytest.mark.parametrize("name", DRAW_NUMBERS)
def test_a_sampling_parameter_stands_in_three_files(name: str, named: dict[str, set[str]]) -> None:
    found = sorted(path for path, words in named.items() if name in words)
    assert "server/types.py" in found
    assert len(found) <= 3, found
