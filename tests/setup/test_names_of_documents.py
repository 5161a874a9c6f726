"""What the design, the architecture and the guides name is in the code, under that name."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from server.types import StepCounts

ROOT = Path(__file__).parents[2]
PAGES = ("DESIGN.md", "architecture.md", "adding-a-drafter.md", "adding-a-model.md")
CLASS = re.compile(r"[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)*(?:\.\w+)?")


@cache
def classes() -> dict[str, list[str]]:
    """Name of every class of the code -> the texts of the files that define one."""
    found: dict[str, list[str]] = {}
    for part in ("server", "drafters", "vocab_store", "tests/fakes"):
        for path in (ROOT / part).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            for name in re.findall(r"^ *class (\w+)[(:]", text, re.MULTILINE):
                found.setdefault(name, []).append(text)
    return found


def members(name: str) -> set[str]:
    """What is defined or annotated inside the classes of this name."""
    found: set[str] = set()
    for node in (node for text in classes()[name] for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(inner.name)
                elif isinstance(inner, ast.Name | ast.Attribute):
                    found.add(inner.id if isinstance(inner, ast.Name) else inner.attr)
    return found


def named(text: str) -> set[str]:
    """The classes that a page names in code spans."""
    spans = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))
    return {span for span in spans if CLASS.fullmatch(span)}


def words(design: str) -> set[str]:
    """The words of section 2 of the design."""
    table = design.split("## 2. Words", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| ([A-Z][^|]*) \|", table, flags=re.MULTILINE)
    return {word for row in rows for word in row.split(", ")} - {"Word"}


def remarks(text: str) -> Iterator[str]:
    """Comments and docstrings of a source."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and token.string.startswith('"""')
        if is_docstring or token.type == tokenize.COMMENT:
            yield token.string


def test_files_that_comments_name_exist() -> None:
    """A path ends as that of a file does; a bare name is of a file near by: in the same folder,
    below it, or beside a folder above it."""
    files = [
        path.relative_to(ROOT).as_posix()
        for part in ("server", "drafters", "vocab_store", "loadtest", "tests")
        for path in (ROOT / part).rglob("*.py")
    ]
    endings = {name.split("/", n)[-1] for name in files for n in range(name.count("/") + 1)}
    near: dict[str, set[str]] = {}  # names in a folder and below it
    beside: dict[str, set[str]] = {}
    for name in files:
        folder, _, leaf = name.rpartition("/")
        beside.setdefault(folder, set()).add(leaf)
        while folder:
            near.setdefault(folder, set()).add(leaf)
            folder = folder.rpartition("/")[0]
    missing = []
    for name in files:
        folder = name.rpartition("/")[0]
        above = [folder.rsplit("/", n)[0] for n in range(1, folder.count("/") + 1)]
        known = near[folder].union(*(beside.get(one, ()) for one in above))

        def unknown(text: str, name: str = name, known: set[str] = known) -> list[str]:
            told = re.findall(r"(?<![\w/.*])[\w/]*\b[a-z_]\w*\.py\b", text)
            if name.startswith("tests/"):  # a bare name is of what they test
                told = [one for one in told if "/" in one]
            return [one for one in told if one not in (endings if "/" in one else known)]

        text = (ROOT / name).read_text(encoding="utf-8")
        if unknown(text):  # perhaps in a string that is no remark
            missing += [f"{name}: {one}" for told in remarks(text) for one in unknown(told)]
    assert not missing


def test_a_sampling_parameter_is_three_files() -> None:
    """Its row, and what it does to a draw on each device."""
    named = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "server").rglob("*.py")
        if re.search(r"\bmin_p\b", path.read_text(encoding="utf-8"))
    }
    assert named == {
        "server/types.py", "server/model/cpu/kernels/sampling.py", "server/model/gpu/sampler.py"
    }  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_classes_that_a_page_names_exist(page: str) -> None:
    missing = []
    for name in sorted(named((ROOT / "docs" / page).read_text(encoding="utf-8"))):
        owner, _, member = name.partition(".")
        if owner not in classes() or (member and member not in members(owner)):
            missing.append(name)
    assert not missing, f"docs/{page} names what the code does not have: {missing}"


def test_words_of_the_design_are_names_of_the_code() -> None:
    found = words((ROOT / "docs/DESIGN.md").read_text(encoding="utf-8"))
    assert {"Request", "Batch", "Runner", "DraftSession", "VocabSlice"} <= found
    # A task is its file (TaskConfig); a row is a place in a Batch's arrays; a Block is its number.
    assert not found - set(classes()) - {"Task", "Row", "Block"}


def test_every_reason_for_no_draft_has_one_cause_on_its_page() -> None:
    said = (StepCounts.__doc__ or "").split("docs/no-drafts.md:")[1].split(".", 1)[0]
    reasons = set(re.findall(r'"(\w+)"', said))
    page = (ROOT / "docs/no-drafts.md").read_text(encoding="utf-8")
    assert reasons == set(re.findall(r"^\| \[`(\w+)`\]\(#\1\) \|", page, re.M))
    assert reasons == set(re.findall(r"^## (\w+)$", page, re.M))
    panels = (ROOT / "configs/grafana/dashboards/speculation.json").read_text(encoding="utf-8")
    (panel,) = re.findall(r'"description": "([^"]*docs/no-drafts.md[^"]*)"', panels)
    assert reasons <= set(re.findall(r"\w+", panel))


def test_modules_that_a_page_names_alone_exist() -> None:
    parts = ("server", "drafters", "vocab_store", "tests", "loadtest", "configs")
    known = {path.name for part in parts for path in (ROOT / part).rglob("*.py")}
    for page in PAGES:
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        missing = set(re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", text)) - known
        assert not missing, f"docs/{page}: {missing}"
        for name, path in re.findall(r"`(\w+)` in\s+`([\w/]+/\w+\.py)`", text):
            assert re.search(rf"\b{name}\b", (ROOT / path).read_text("utf-8")), (page, name, path)
