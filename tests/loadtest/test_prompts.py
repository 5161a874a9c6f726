from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from loadtest.prompts import (
    distinct_prompts,
    mixed_examples,
    parse_mix,
    read_examples,
    spread_examples,
)
from tests.json_lines import write_lines


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    for name, number in (("alpha", 4), ("beta", 2)):
        lines = [
            {"id": f"{name}-{i}", "prompt": f"{name} {i}" * (i + 1), "completion": "x"}
            for i in range(number)
        ]
        write_lines(tmp_path / name / "test.jsonl", lines)
        with (tmp_path / name / "test.jsonl").open("a") as file:
            file.write("\n")
    (tmp_path / "notes").mkdir()
    return tmp_path


def test_mix_follows_the_weights_and_uses_every_example_before_repeating(data_dir: Path) -> None:
    chosen = mixed_examples(data_dir, {"alpha": 3.0, "beta": 1.0}, 400)
    counts = Counter(example.task for example in chosen)
    assert 260 <= counts["alpha"] <= 340  # Binomial(400, 0.75): 300 +- 8.7
    firsts = [example.example_id for example in chosen if example.task == "alpha"][:4]
    assert len(set(firsts)) == 4
    assert chosen == mixed_examples(data_dir, {"alpha": 3.0, "beta": 1.0}, 400)
    assert chosen != mixed_examples(data_dir, {"alpha": 3.0, "beta": 1.0}, 400, seed=1)


def test_spread_takes_the_data_sets_in_turn(data_dir: Path) -> None:
    chosen = spread_examples(data_dir, 5)
    assert [example.example_id for example in chosen] == [
        "alpha-0", "beta-0", "alpha-1", "beta-1", "alpha-2",
    ]  # fmt: skip
    assert len(spread_examples(data_dir, 100)) == 6
    short = spread_examples(data_dir, 100, max_prompt_chars=7)
    assert [example.example_id for example in short] == ["alpha-0", "beta-0"]


def test_a_data_set_without_short_enough_prompts_is_named(data_dir: Path) -> None:
    with pytest.raises(ValueError, match="beta"):
        mixed_examples(data_dir, {"beta": 1.0}, 3, max_prompt_chars=2)
    with pytest.raises(OSError, match="gamma"):
        list(read_examples(data_dir, "gamma"))


def test_parse_mix() -> None:
    assert parse_mix("a=2, b") == {"a": 2.0, "b": 1.0}
    for bad in ("", "a=0", "a=-1", "a=x", "a,a", "a=inf", "a=nan"):
        with pytest.raises(ValueError):
            parse_mix(bad)


def test_concurrent_prompts_share_no_first_word() -> None:
    prompts = distinct_prompts(32)
    assert len({prompt.split()[0] for prompt in prompts}) == 32
    lengths = [len(prompt) for prompt in prompts]
    assert max(lengths) - min(lengths) < 20
