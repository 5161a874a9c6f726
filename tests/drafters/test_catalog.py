"""One row a drafter: what is derived from the catalog, and a drafter of a user's own.

    TAILOR_WRITE_README=1 python -m pytest tests/drafters/test_catalog.py

writes the table of docs/adding-a-drafter.md anew.
"""

from __future__ import annotations

import inspect
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from drafters.catalog import OURS, RESERVED, DrafterSpec, Need, catalog, make_drafter
from drafters.options import OptionError, check_options, option, options_of
from tests.processes import run_python

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding-a-drafter.md"


@pytest.mark.parametrize("spec", OURS, ids=lambda spec: spec.name)
def test_a_spec_says_what_its_class_takes(spec: DrafterSpec) -> None:
    drafter = spec.load()
    parameters = inspect.signature(drafter).parameters
    for one in spec.fields:
        assert parameters[one.name].default == one.default, one.name
    for need in spec.needs - {Need.PREDICTION}:
        assert need.value in parameters
    assert drafter.name == spec.name


def test_options_are_bounded_and_fit_together() -> None:
    for given, problem in (
        ({"n": 1}, "n must be in 2..64, not 1"),
        ({"n": True}, "n must be an integer, not True"),
        ({"n": 4, "prefix_length": 4}, "prefix_length must be below n"),
        ({"num_draft": 2.5}, "num_draft must be an integer, not 2.5"),
    ):
        with pytest.raises(OptionError, match=re.escape(problem)):
            make_drafter("trie", **given)
    with pytest.raises(OptionError, match=r"lambda must be in 0\.\.1, not 2"):
        make_drafter("mix", **{"lambda": 2})
    assert make_drafter("mix", **{"lambda": 0.25}).mixing == 0.25  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "given", "problem"),
    [
        ("auto", {"min_survival": 1.0}, "min_survival must be in"),
        ("auto", {"num_likely": 9}, "logits must be in"),
        ("auto", {"prior_depth": 99}, "prior must be in"),
        ("grammys", {"num_drafts": 0}, "num_drafts must be in"),
        ("grammys", {"strategy": "bigram"}, "needs a table"),
        ("grammys", {"strategy": "trigram"}, "strategy must be"),
        ("mix", {"horizon": 0}, "horizon must be in"),
        ("mix", {"mixing": float("nan")}, "lambda must be in"),
        ("mix", {"n_max": 0}, "n_max must be in"),
        ("prompt", {"max_ngram": 0}, "max_ngram must be at least 1"),
        ("prompt", {"num_tokens": 0}, "num_tokens must be at least 1"),
        ("trie", {"n": 4, "prefix_length": 4}, "prefix_length must be below n"),
        ("trie", {"num_draft": 0}, "num_draft must be in"),
    ],
)
def test_a_class_refuses_by_itself_what_it_cannot_do(
    name: str, given: dict[str, float | str], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        catalog()[name].load()(**given)


def test_what_cannot_be_a_drafter_is_refused() -> None:
    @dataclass(frozen=True)
    class Loose:
        depth: int = 3

    @dataclass(frozen=True)
    class Listed:
        depths: list[int] = option(None, help="several")

    for kind in (Loose, Listed):
        with pytest.raises(TypeError, match="is not an option"):
            options_of(kind)
    for name in ("", "Echo", "a.b", *RESERVED):
        with pytest.raises(ValueError, match="cannot be a drafter's name"):
            DrafterSpec(name, "echo:Echo", "")
    with pytest.raises(ValueError, match="is not module:Class"):
        DrafterSpec("echo", "echo", "")
    check_options(DrafterSpec("echo", "echo:Echo", "").options, {})


# --- a drafter of a user's own ---


def _install(folder: Path, module: str, source: str, points: str) -> None:
    """What `pip install` leaves: a module and its dist-info."""
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tailor.drafters]\n{points}\n")


_SERVED = Path(__file__).with_name("serve_own_drafter.py")


def _run(folder: Path, *arguments: str) -> str:
    return run_python("-W", "error", *arguments, PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")


def test_the_page_s_drafter_is_found_configured_and_served(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    source = next(re.finditer(r"```python\n(.*?)```", page, re.S)).group(1)
    point = next(re.finditer(r"```toml\n\[project[^\n]*\n(.*?)\n```", page, re.S)).group(1)
    _install(tmp_path, "echo_drafter", source, point.replace('"', ""))
    out = _run(tmp_path, str(_SERVED), str(tmp_path / "mine.yaml"))
    assert int(out.split()[-1]) > 0


def test_a_broken_or_rival_drafter_is_left_out_and_told(tmp_path: Path) -> None:
    source = (
        "from drafters.catalog import DrafterSpec\n"
        "RIVAL = DrafterSpec('auto', 'm:C', 'another auto')\n"
        "NUMBER = 3\n"
    )
    points = "gone = no_such_module:SPEC\nnumber = rivals:NUMBER\nrival = rivals:RIVAL"
    _install(tmp_path, "rivals", source, points)
    script = (
        "import logging, sys\n"
        "logging.basicConfig(stream=sys.stdout, format='%(message)s')\n"
        "from drafters import DRAFTER_NAMES\n"
        "from drafters.catalog import catalog\n"
        "print(catalog()['auto'].factory, *DRAFTER_NAMES)\n"
    )
    out = _run(tmp_path, "-c", script)
    assert "the drafter gone is left out: No module named 'no_such_module'" in out
    assert "the drafter number is left out: rivals:NUMBER is no DrafterSpec" in out
    assert "the drafter rival is left out: there is a drafter 'auto' already" in out
    assert out.splitlines()[-1] == (
        "drafters.auto.drafter:AutoDrafter off auto grammys mix prompt suffix trie"
    )


# --- the documents ---


def _table() -> str:
    rows = [
        "| drafter | what it drafts from | as published in | options | takes |",
        "|---" * 5 + "|",
    ]
    for spec in OURS:
        options = ", ".join(f"`{one.key}`" for one in spec.fields)
        needs = ", ".join(f"`{need.value}`" for need in Need if need in spec.needs)
        rows.append(f"| `{spec.name}` | {spec.summary} | {spec.paper} | {options} | {needs} |")
    return "\n".join(rows)


def test_the_table_of_the_page_is_the_catalog_s() -> None:
    text = PAGE.read_text(encoding="utf-8")
    begin = text.index("\n", text.index("<!-- drafters:begin")) + 1
    end = text.index("<!-- drafters:end")
    expected = _table() + "\n"
    if os.environ.get("TAILOR_WRITE_README"):
        PAGE.write_text(text[:begin] + expected + text[end:], encoding="utf-8")
        return
    assert text[begin:end] == expected, "run this test once with TAILOR_WRITE_README=1"
    told = re.findall(r"^\| `Need\.(\w+)` \| (?:`(\w+)`)?", text, re.MULTILINE)
    assert dict(told) == {n.name: n.value for n in Need} | {"PREDICTION": ""}
