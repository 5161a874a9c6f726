"""The forms of a model's weights on a task's own data, as `tailor tasks tune` tells them."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.commands.options import ModelOptions
from server.commands.tasks import compare_forms, forms_of
from server.commands.tune import form_lines
from server.model.catalog import model_folder
from tests.model.gguf_models import BLOCKS, write_llama

pytestmark = pytest.mark.usefixtures("own_cache")


def test_each_form_is_scored_on_the_data_and_timed(tiny_folder: Path) -> None:
    model = ModelOptions(model=str(tiny_folder), threads=1)
    examples = [(list(range(3, 20)), list(range(40, 48))), ([], [1]), ([5] * 600, [6])]
    told: list[str] = []
    found = compare_forms(model, examples, lambda stage, done, total: told.append(stage))
    assert list(found) == ["float32", "bfloat16", "int8", "int8-blocks", "int4"]
    assert told
    for figures in found.values():
        assert figures["perplexity"] > 1 and 0 <= figures["exact"] <= 1
        assert figures["step_ms"] > 0 and figures["step_16_rows_ms"] > 0
    near = abs(found["bfloat16"]["perplexity"] / found["float32"]["perplexity"] - 1)
    assert near < 0.05
    lines = form_lines(found, "int8")
    assert [line for line in lines if line.endswith("as tuned")] == [lines[3]]
    assert all(len(line) <= 100 for line in lines)
    assert compare_forms(model, [], lambda *_: None) == {}
    assert form_lines({}, "int8") == []


def test_nothing_is_fetched_or_converted_for_it(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_llama(file, *BLOCKS)
    assert forms_of(ModelOptions(model=str(file))) == []
    model_folder(str(file), "file")
    assert [form for form, _ in forms_of(ModelOptions(model=str(file)))] == ["file"]
    assert compare_forms(ModelOptions(model=str(file)), [([1], [2])], lambda *_: None) == {}
    assert forms_of(ModelOptions(model=str(tmp_path), device="cuda")) == []
