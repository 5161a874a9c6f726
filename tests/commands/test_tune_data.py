"""What tuning says of the model's outputs, of its machine and of its data."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.numpy import load_file

from server.commands.options import ModelOptions, _bars
from server.commands.tasks import _tell, compare_forms, forms_of, head_share
from server.commands.tune import form_lines
from server.commands.tune_choice import _head_costs
from server.commands.tune_data import Compared, check_data, quality, quality_lines
from server.datasets import Fields
from server.engine.step_times import CostTable
from server.errors import ConfigError
from server.model.build import RunnerSpec, build_runner
from server.model.catalog import model_folder
from server.types import EngineSizes
from tests.json_lines import write_lines
from tests.model.gguf_models import BLOCKS, write_llama


def _compared(num: int, gold: str, output: str, *, hit_max: bool = False) -> list[Compared]:
    return [Compared(gold, output, hit_max)] * num


def test_wrong_answers_are_called_wrong() -> None:
    loop = "Sure! I am happy to help you. " * 20
    found = quality(_compared(40, "kind: town", loop, hit_max=True), stops=(), can_chat=True)
    assert found["exact_match"]["mean"] == 0 and found["f1"]["mean"] < 0.1
    assert (found["hit_max_tokens"], found["repeats_itself"]) == (1.0, 1.0)
    assert not found["does_the_task"]
    told = "\n".join(quality_lines(found))
    assert "The model does not do this task" in told and "tailor tasks train" in told
    assert "100% of the outputs were ended by max_tokens" in told and "chat template" in told
    assert "data   kind: town" in told and "model  Sure!" in told
    assert max(map(len, told.splitlines())) < 115


def test_a_stop_that_helps_is_found_and_one_in_the_data_is_not() -> None:
    right_but = _compared(30, "kind: town", " kind: town\nTown 8: kind: river and more of it")
    found = quality(right_but, stops=(), can_chat=False)
    assert found["does_the_task"] and found["begins_like_the_data"] == 1.0
    assert any(s.startswith('stop: ["\\n"] would bring F1 to 100%') for s in found["suggestions"])
    assert not quality(right_but, stops=("\n",), can_chat=False)["suggestions"]
    lines = _compared(30, "a\nb c", "a\nb c\n\nmore of other things here")
    (told,) = quality(lines, stops=(), can_chat=False)["suggestions"]
    assert told.startswith('stop: ["\\n\\n"]'), "a line's end is in the data"


def test_good_answers_need_nothing() -> None:
    found = quality(_compared(30, "kind: town", "kind: town"), stops=(), can_chat=True)
    assert found["exact_match"]["low"] == 1.0 and not found["suggestions"]
    assert quality([], stops=(), can_chat=True) == {} and quality_lines({}) == []


@pytest.mark.parametrize(("does_it", "told"), [(True, "next: tailor serve"), (False, "next: mend")])
def test_it_ends_with_what_was_written_and_what_is_next(
    does_it: bool, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "slots.yaml"
    file.write_text("name: slots\n")
    report = {
        "task": "slots", "file": str(file), "corpus": str(tmp_path / "slots.corpus"),
        "vocabulary": {"mode": "exact"}, "quality": {"does_the_task": does_it},
    }  # fmt: skip
    _tell(file, report)
    *_, written, following = capsys.readouterr().out.splitlines()
    names = [str(tmp_path / f"slots.{ending}") for ending in ("yaml", "corpus", "vocab")]
    assert written == f"written: {', '.join(names)}" and following.startswith(told)


# --- the machine ---


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
def test_the_heads_share_is_that_of_its_bytes(form: str, tiny_folder: Path) -> None:
    sizes = EngineSizes(max_num_seqs=1, max_num_batched_tokens=64, kv_bytes=1 << 20)
    runner = build_runner(RunnerSpec("tiny", str(tiny_folder), sizes, weights=form, threads=1))
    found = head_share(runner)
    runner.close()
    parts = load_file(tiny_folder / "model.safetensors")
    head = parts["model.embed_tokens.weight"].size  # which is tied
    share = head / sum(part.size for part in parts.values())
    # Panels are padded.
    assert found == (None if form == "int8" else pytest.approx(share, rel=0.03))


@pytest.mark.parametrize(("measured_s", "most"), [(0.99, 0.32), (0.49, 0.32), (0.2, 0.21)])
def test_a_head_measured_above_its_bytes_is_not_believed(measured_s: float, most: float) -> None:
    """A head with 21 % of the bytes came out as 49 % and 99 % of a step."""
    cost = CostTable([1, 64], [1.0, 2.0])
    costs, share = _head_costs(None, 1000, cost, (measured_s, 0.01), 0.21)
    assert share <= most and costs.full_s <= most
    assert _head_costs(None, 1000, cost, (measured_s, 0.01), None)[1] == pytest.approx(measured_s)


def test_each_form_is_scored_on_the_data_and_timed(tiny_folder: Path, own_cache: Path) -> None:
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


def test_nothing_is_fetched_or_converted_for_it(tmp_path: Path, own_cache: Path) -> None:
    file = tmp_path / "m.gguf"
    write_llama(file, *BLOCKS)
    assert forms_of(ModelOptions(model=str(file))) == []
    model_folder(str(file), "file")
    assert [form for form, _ in forms_of(ModelOptions(model=str(file)))] == ["file"]
    assert compare_forms(ModelOptions(model=str(file)), [([1], [2])], lambda *_: None) == {}
    assert forms_of(ModelOptions(model=str(tmp_path), device="cuda")) == []


# --- the data, before a model is loaded ---


_ROWS = '{"prompt": "x", "completion": "y"}\n' * 12


@pytest.mark.parametrize(
    ("name", "text", "outputs", "told"),
    [
        ("a.csv", "prompt,completion\n" + "x,y\n" * 9, "gold", "9 examples; tuning needs 10"),
        ("a.csv", "q,completion\nx,y\n", "gold", "a.csv:2: prompt: is missing"),
        ("a.jsonl", '{"prompt": "x"}\n' * 12, "gold", "a.jsonl:1: completion: is missing"),
        ("a.jsonl", '{"messages": []}\n' * 12, "gold", "a.jsonl:1: messages: nothing is asked"),
        ("a.jsonl", _ROWS + '{"completion": "y"}', "model", "a.jsonl:13: prompt: is missing"),
        ("a.jsonl", _ROWS + '{"prompt": ""}', "model", ":13: prompt: is empty; it must be a str"),
        ("a.jsonl", _ROWS + '{"prompt": 3}', "model", ":13: prompt: is no text"),
    ],
)
def test_data_is_checked(name: str, text: str, outputs: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=told):
        check_data(file, outputs, Fields())


def test_data_of_every_kind_is_taken(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "x", "completion": "y"},
        {"prompt_ids": [1], "output_ids": [2]},
    ]
    rows += [
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    ]
    check_data(write_lines(tmp_path / "a.jsonl", rows * 4), "gold", Fields())


# --- bars ---


@pytest.mark.parametrize("width", [80, 60])
def test_bars_fit(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    bars = _bars(console)
    bars.add_task(
        "loading the model (the first time here: compiling and measuring too)",
        total=None,
        note="",
    )
    bars.add_task("replaying drafters", total=100, completed=37, note="")
    with console.capture() as captured:
        console.print(bars)
    lines = captured.get().splitlines()
    assert len(lines) == 2 and max(map(len, lines)) <= width
    assert "37%" in lines[1] and "loading the model" in lines[0]
