"""The linters' exceptions are needed: a rule that a file no longer breaks applies to it again."""

from __future__ import annotations

import ast
import functools
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GIVEN = re.compile(r"^\(?(\w[\w, ]*?)(?:: .*|\)? = .*)$", re.MULTILINE)
"""A line at a module's edge that may give a name a value, and those names."""


_TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
EXCEPTIONS: dict[str, list[str]] = _TOOLS["ruff"]["lint"]["per-file-ignores"]


@functools.cache
def _breaches() -> Counter[tuple[str, str]]:
    """(file, rule) -> how often it breaks the rule when no exception applies: of those that have
    exceptions, and SLF001."""
    if shutil.which("ruff", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("ruff is not installed")
    rules = {rule for rules in EXCEPTIONS.values() for rule in rules} | {"SLF001"}
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--output-format", "json",
         "--select", ",".join(sorted(rules)), "--config", "lint.per-file-ignores={}", "."],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    return Counter(
        (Path(found["filename"]).relative_to(ROOT).as_posix(), found["code"])
        for found in json.loads(done.stdout)
    )


def test_every_exception_in_pyproject_is_needed() -> None:
    found = _breaches()
    idle = [
        f"{files}: {rule}"
        for files, rules in EXCEPTIONS.items()
        for rule in rules
        if not any(fnmatch(file, files) for file, code in found if code.startswith(rule))
    ]
    assert not idle, f"take these out of per-file-ignores in pyproject.toml: {idle}"


def test_private_attributes_are_read_in_few_places_of_tests() -> None:
    """What reads another's inside breaks when that is written anew: the bound may only fall."""
    num = Counter[str]()
    for (file, rule), times in _breaches().items():
        num[file.partition("/")[0]] += times * (rule == "SLF001")
    assert num["tests"] <= 30


def test_no_module_gives_a_name_twice() -> None:
    """The later value would be everybody's: files that were merged had two of one name."""
    told = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, cwd=ROOT)
    if told.returncode:
        pytest.skip("this is no checkout")
    twice = []
    for file in told.stdout.split():
        text = (ROOT / file).read_text(encoding="utf-8")
        begun = Counter(name for line in GIVEN.findall(text) for name in line.split(","))
        if max(begun.values(), default=0) < 2:
            continue  # nothing that begins a line does so again: it need not be parsed
        nodes = ast.parse(text).body
        targets = [t for n in nodes if isinstance(n, ast.Assign) for t in n.targets]
        targets += [n.target for n in nodes if isinstance(n, ast.AnnAssign)]
        found = [n for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
        names = [name.id for name in found if isinstance(name.ctx, ast.Store)]
        twice += [
            f"{file}: {name}" for name, num in Counter(names).items() if num > 1 and name != "_"
        ]
    assert not twice
