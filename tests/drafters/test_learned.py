"""Learned outputs: bounded, fading, kept; and the layer that is drafted from."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from drafters.array_file import ArrayFileError, FingerprintError
from drafters.auto.drafter import AutoDrafter
from drafters.corpus import build_corpus
from drafters.learned import LearnedOutputs
from drafters.published.mix import MixDrafter
from tests.drafters.trees import likeliest


def _outputs(held: LearnedOutputs) -> list[list[int]]:
    return [output.tolist() for _, output in held.examples()]


def test_what_is_held_is_bounded_in_outputs_and_prompts() -> None:
    held = LearnedOutputs(100, max_prompt=50, max_output=40)
    rng = Random(1)
    for i in range(500):
        held.add([i] * rng.randrange(90), [i] * rng.randrange(60 if i < 250 else 3))
        examples = held.examples()
        assert held.num_tokens == sum(o.shape[0] for _, o in examples) <= 100
        assert held.num_prompt_tokens == sum(p.shape[0] for p, _ in examples) <= 400
        assert all(p.shape[0] <= 50 and 0 < o.shape[0] <= 40 for p, o in examples)
    held.add([1, 2], [7] * 1000)
    assert _outputs(held)[-1] == [7] * 40, "the newest is always there, without its end"
    held.add(range(60), [8])
    assert held.examples()[-1][0].tolist() == list(range(10, 60)), "a prompt loses its start"
    held.max_tokens = 9
    held.add([3], range(20))
    assert _outputs(held) == [[*range(9)]], "a bound that was lowered is one of each output, too"
    held.add(range(60), [8])
    assert held.num_prompt_tokens <= 4 * 9, "and of each prompt"
    before = held.num_seen
    held.add([1], [])
    assert held.num_seen == before, "no output, nothing seen"


def test_older_outputs_fade_out_exponentially() -> None:
    """A biased reservoir of 200 places: what is k additions old is there with (1 - 1/200)^k."""
    ages = np.zeros(1200)
    for seed in range(25):
        held = LearnedOutputs(200, seed=seed)
        for i in range(1200):
            held.add([], [i])
        for output in _outputs(held):
            ages[1199 - output[0]] += 1
    for age in (100, 300, 600):
        share = ages[age - 50 : age + 50].mean() / 25
        assert abs(share - (1 - 1 / 200) ** age) < 0.04


def test_a_text_that_comes_again_is_held_once_and_another_request_is_found() -> None:
    held = LearnedOutputs(400)
    others = [([1, 2, 100 + i, 200 + i], [5, 300 + i, 9]) for i in range(8)]
    for prompt, output in others:
        assert held.add(prompt, output)
        for _ in range(5):  # one request in six is another
            held.add([1, 2, 7, 8], [5, 6, 9])
    assert len(held) == 9 and held.num_seen == 48 and held.num_tokens == 27
    assert not held.add([1, 2, 7, 8], [5, 6, 9]) and held.add([1, 2, 7, 8], [5, 6, 6, 9])
    layer = build_corpus(held.examples(), fingerprint="f")
    for at, (prompt, _) in {1: ([1, 2, 7, 8], []), 3: others[2]}.items():
        assert layer.nearest.find(prompt, 1)[0].tolist() == [at]
    whole = LearnedOutputs(400, repeats=True)
    assert whole.add([1], [2]) and whole.add([1], [2]) and len(whole) == 2
    for i in range(300):  # what was driven out may come again
        held.add([i], [i] * 4)
    assert held.add([1, 2, 7, 8], [5, 6, 9])
    # The same output of another prompt is another text, wherever the prompt ends.
    assert held.add([3], [5, 6, 9]) and held.add([3, 5], [6, 9])


def test_the_same_additions_hold_the_same_outputs(tmp_path: Path) -> None:
    first, second = LearnedOutputs(50, seed=3), LearnedOutputs(50, seed=3)
    for held in (first, second):
        for i in range(300):
            held.add([i, i], [i] * (1 + i % 5))
    assert _outputs(first) == _outputs(second)

    first.save(tmp_path / "kept.bin", fingerprint="f", scope="s")
    again = LearnedOutputs(50)
    for _ in range(2):  # in place of what there is
        again.restore(tmp_path / "kept.bin", fingerprint="f", scope="s")
    assert _outputs(again) == _outputs(first) and again.num_seen == 300
    assert [p.tolist() for p, _ in again.examples()] == [p.tolist() for p, _ in first.examples()]
    smaller = LearnedOutputs(20)
    smaller.restore(tmp_path / "kept.bin", fingerprint="f", scope="s")
    assert 0 < smaller.num_tokens <= 20
    with pytest.raises(FingerprintError, match="build it again"):
        again.restore(tmp_path / "kept.bin", fingerprint="other", scope="s")
    with pytest.raises(ArrayFileError, match="another task or client"):
        again.restore(tmp_path / "kept.bin", fingerprint="f", scope="other")
    data = (tmp_path / "kept.bin").read_bytes()
    (tmp_path / "kept.bin").write_bytes(data[: len(data) // 2])
    with pytest.raises(ArrayFileError):
        again.restore(tmp_path / "kept.bin", fingerprint="f", scope="s")
    assert _outputs(again) == _outputs(first), "a file that is refused changes nothing"


ANSWER = [40, 41, 42, 43, 44, 45, 46, 47, 9]
OTHER = [50, 51, 52, 53, 54, 55, 9]


def _first_path(
    drafter: AutoDrafter | MixDrafter, prompt: list[int], output: list[int] | None = None
) -> list[int]:
    session = drafter.open(prompt)
    session.settle()
    session.extend(output or [])
    path = likeliest(session.propose(16, 16))
    session.close()
    return path


@pytest.mark.parametrize("max_merged", [10_000, 0], ids=["indexed together", "large corpus"])
def test_a_layer_adds_to_the_corpus_and_takes_nothing_away(max_merged: int) -> None:
    corpus = build_corpus([([1, 2, i], OTHER) for i in range(20)], fingerprint="f", p_min=1)
    learned = [(np.array([5, 6, i], np.int32), np.array(ANSWER, np.int32)) for i in range(60, 80)]
    layer = build_corpus(learned, base=corpus, fingerprint="f", max_merged_tokens=max_merged)
    drafter = AutoDrafter(corpus=corpus, learned=layer, eos_token_ids=[9])
    assert _first_path(drafter, [1, 2, 3])[:4] == OTHER[:4]
    assert _first_path(drafter, [5, 6, 62], ANSWER[:2])[:2] == ANSWER[2:4]
    alone = AutoDrafter(corpus=corpus, eos_token_ids=[9])
    assert _first_path(alone, [5, 6, 62], ANSWER[:2])[:2] != ANSWER[2:4]
    if max_merged:
        assert _first_path(drafter, [5, 6, 62])[:4] == ANSWER[:4], "the output's very start too"
        mixed = MixDrafter(corpus=corpus, learned=layer)
        assert _first_path(mixed, [5, 40, 41])[:3] == [42, 43, 44]


def test_a_layer_needs_no_corpus_and_no_prompts() -> None:
    learned = [(np.empty(0, np.int32), np.array(ANSWER, np.int32))] * 5
    layer = build_corpus(learned, base=None, fingerprint="f")
    drafter = AutoDrafter(learned=layer, eos_token_ids=[9])
    assert _first_path(drafter, [3, 4])[:4] == ANSWER[:4]
