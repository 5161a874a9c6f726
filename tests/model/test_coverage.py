"""The table of docs/models.md is what the tests run; `python -m tests.model.test_coverage --write`
writes it anew."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

from server.model.families import FAMILIES
from server.model.gguf_config import ARCHITECTURES
from tests.model import families, test_families, test_gguf_families, test_hf_equality
from tests.model.cpu import test_family_engines
from tests.model.cpu import test_generic as cpu_generic
from tests.model.generic_models import GENERIC
from tests.model.gguf_models import MODELS
from tests.model.gpu import test_generic as gpu_generic

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- families -->\n", "<!-- /families -->"
OTHERS, OTHERS_END = "<!-- generic -->\n", "<!-- /generic -->"


def _models(*tests: Any) -> set[str]:
    """The models that tests are parametrized over, as transformers names them."""
    kinds = ("family", "name", "runner")
    marks = [mark for test in tests for mark in test.pytestmark if mark.args[0] in kinds]
    assert len(marks) == len(tests)
    return {families.model_type(name) for mark in marks for name in mark.args[1]}


@cache
def columns() -> dict[str, set[str]]:
    """What the tests run of which models."""
    served = _models(
        test_families.test_a_saved_model_of_every_family_is_served_and_an_adapter_merged
    )
    engines = _models(test_family_engines, cpu_generic.test_drafts_slices_and_exact_change_no_bit)
    return {
        "CPU": served | set(GENERIC),
        "CUDA": {families.model_type(name) for name in test_hf_equality.FAMILIES}
        | _models(gpu_generic.test_logits_are_those_of_transformers_in_chunks_and_trees),
        **dict.fromkeys(("drafts", "slices", "exact"), engines),
        "adapters": served
        | _models(cpu_generic.test_an_adapter_is_merged_and_bfloat16_is_the_rounded_model),
        "GGUF": _models(
            test_gguf_families.test_a_file_gives_transformers_logits_in_both_forms,
            test_gguf_families.test_a_file_of_a_generic_model_is_served_from_floats,
        ),
    }


def _runs(name: str) -> str:
    """What the tests run of a model, in words: "all" or the names of columns."""
    found = [column for column, models in columns().items() if name in models]
    return "all" if len(found) == len(columns()) else ", ".join(found)


def table() -> str:
    """The families and what the tests run of each, as Markdown."""
    lines = ["| Family | class | tests run | weights |", "|---|---|---|---|"]
    for name, family in FAMILIES.items():
        known, weights = ", ".join(family.known_as), family.real_weights or "-"
        lines.append(f"| {known} | `{family.architecture}` | {_runs(name)} | {weights} |")
    return "\n".join(lines) + "\n"


def others() -> str:
    """The models of the generic path and what the tests run of each, as Markdown."""
    lines = ["| Models | class | tests run |", "|---|---|---|"]
    for name, (known, make) in GENERIC.items():
        lines.append(f"| {known} | `{type(make()).__name__}` | {_runs(name)} |")
    return "\n".join(lines) + "\n"


def _between(text: str, begin: str, end: str, what: str) -> str:
    before, rest = text.split(begin)
    return f"{before}{begin}{what}{end}{rest.split(end)[1]}"


def _with_table(text: str) -> str:
    return _between(_between(text, BEGIN, END, table()), OTHERS, OTHERS_END, others())


def test_the_table_of_families_is_what_the_tests_run() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == _with_table(text), "python -m tests.model.test_coverage --write"


def test_a_gguf_file_is_written_of_every_family_and_architecture() -> None:
    assert set(MODELS) == set(FAMILIES)
    written = {model.kind for model in MODELS.values()}
    assert written | {"granitehybrid"} == set(ARCHITECTURES)  # a second name of granite's


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    PAGE.write_text(_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
