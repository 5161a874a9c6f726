"""loadtest.quality: forms, slices and adapters on tiny models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from loadtest import quality
from loadtest.quality import filled, in_ids, intent, make_rows, metrics_of, read_texts, slots
from loadtest.recordings import Ids
from loadtest.steps import forms_of, runner_of
from server import token_bytes
from server.commands.record import Answer, Failure, Prompt, in_order
from server.errors import ModelError
from server.model.scoring import Scores, Text, compare, score
from tests.api.tiny_tokenizers import byte_level_tokenizer
from tests.commands.command_line import Tailor
from tests.commands.conftest import data as data  # a fixture
from tests.json_lines import write_lines
from tests.loadtest.conftest import Ended
from vocab_store.slice import RequiredIds

# --- forms ----------------------------------------------------------------------------------------


def test_every_form_is_scored_and_integers_stay_near_float32(folder: Path) -> None:
    rng = np.random.default_rng(0)
    texts = [Text(tuple(rng.integers(3, 100, 30).tolist()), 10) for _ in range(6)]
    base, errors = None, {}
    for form in forms_of("int8,int8-blocks,int4,float32:int8"):
        with runner_of(str(folder), form, threads=2, max_rows=64) as (runner, _):
            assert runner.info.dtype == form.partition(":")[0]
            scores = score(runner, texts)
        base = base or scores
        figures = compare(scores, base)
        assert 0.0 <= figures["texts_agree"] <= figures["tokens_agree"] <= 1.0
        errors[form] = figures["logprob_error"]
    assert base is not None and len(base.ranks) == 6 * 20
    assert errors["float32"] == 0.0 < errors["int8-blocks"] < errors["int4"]
    assert errors["int8"] < 0.1 and 0.0 < errors["float32:int8"] < 0.1
    with pytest.raises(ModelError, match="none of"), runner_of(str(folder), "int3"):
        pass


def test_figures_of_known_scores() -> None:
    def scores(ranks: list[int], of: list[int]) -> Scores:
        logprobs = np.full(len(ranks), np.log(0.5))
        return Scores(logprobs, np.array(ranks), np.array(of), np.array([0, 0, 1, 1]))

    base = scores([1, 1, 1, 1], [5, 6, 7, 8])
    assert compare(base, base)["exact"] == compare(base, base)["texts_agree"] == 1.0
    found = compare(scores([1, 1, 2, 1], [5, 6, 9, 8]), base)
    assert found["exact"] == found["texts_agree"] == 0.5
    assert found["tokens_agree"] == 0.75 and found["perplexity"] == 2.0


def test_texts_are_read_with_their_end_and_the_command_writes_a_line(
    folder: Path, tmp_path: Path, ended: Ended
) -> None:
    data = tmp_path / "test.jsonl"
    data.write_text(
        '{"prompt": "ab", "completion": "c"}\n{"prompt": "abcdefghijk", "completion": "abc"}\n'
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    (text,) = read_texts(data, tokenizer, 2, 10, 8)
    assert text.ids[-1] == 2 and text.start == len(tokenizer.encode("ab").ids)
    with pytest.raises(ValueError, match="no text"):
        read_texts(data, tokenizer, 2, 10, 1)
    words = ["forms", "--data", data, "--model", folder, "--forms", "int8"]
    found = ended(quality.main, *words, "--threads", 1)
    assert found["texts"] == 2 and found["forms"]["float32"]["texts_agree"] == 1.0
    assert set(found["forms"]) == {"float32", "int8"}


# --- slices ---------------------------------------------------------------------------------------


def test_a_prompt_that_gets_no_answer_is_an_error() -> None:
    prompts = [Prompt(i, "x") for i in range(2)]
    with pytest.raises(RuntimeError, match="too long"):
        in_order([Answer(prompts[1], (1,), "stop", "x"), Failure(prompts[0], "it is too long")])


def test_rows_of_the_table() -> None:
    tokenizer = byte_level_tokenizer()
    tokens = token_bytes.build(tokenizer)
    required = RequiredIds.from_tokens(tokens, [0])
    pairs = [("the cat", "the dog"), ("a cat", "the cat"), ("the dog", "the end")]
    train = in_ids(pairs, tokenizer)
    rows = make_rows(train, ("en",), Ids(tokenizer, 0, tokens, required))
    assert not rows["static only, tau 0.01"].dynamic and rows["tau 0.1"].dynamic
    sizes = [rows[name].num_t for name in ("unfiltered", "+ input-aware", "tau 0.0", "tau 0.1")]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[1]
    assert rows["dynamic only"].num_t == 0
    assert rows["dynamic only"].slice.ids.tolist() == required.ids.tolist()
    pruned = rows["VP"]
    assert pruned.tokenizer is not None
    for prompt, _ in pairs:  # what the pruned tokenizer writes lies in VP, under the old ids
        old = pruned.slice.ids[pruned.tokenizer.encode(prompt).ids]
        assert tokenizer.decode(old.tolist()) == prompt
    test = in_ids([("the cat", "the cat")], tokenizer)
    only = rows["dynamic only"]
    assert only.figures(test)["recall"] > replace(only, dynamic=False).figures(test)["recall"]


def test_slices_of_a_model_with_and_without_its_texts(
    folder: Path, own_cache: Path, tmp_path: Path, ended: Ended
) -> None:
    for split in ("train", "test"):
        lines = [{"prompt": f"{i} abc:", "completion": f" {'xy'[i % 2]} ok"} for i in range(24)]
        write_lines(tmp_path / "towns" / f"{split}.jsonl", lines)
    words = ["slices", "--data", tmp_path, "--task", "towns", "--model", folder]
    rows = ended(quality.main, *words, "--ablations")["tasks"]["towns"]
    assert set(rows) == {*quality.ROWS, *quality.ABLATIONS}
    assert rows["tau 0.0"]["recall"] == 1.0 and rows["tau 0.0"]["num_prompts"] == 24
    more = ["--texts", 3, "--shots", 1, "--tokens", 4, "--threads", 1]
    found = ended(quality.main, *words, *more)
    for row in found["tasks"]["towns"].values():
        assert 0 <= row["same_texts"] <= row["num_prompts"] == 3
        assert set(row["scores"]["slice"]) >= {"exact", "f1", "rouge_l", "json"}


# --- adapters -------------------------------------------------------------------------------------


def test_intents_and_slots_are_judged_by_themselves() -> None:
    gold = "intent: play_music, slot fills: {song: one, two: and three, artist: u2}"
    assert filled(gold)[1] == {("song", "one"): 1, ("two", "and three"): 1, ("artist", "u2"): 1}
    other = " intent: play_music, slot fills: {artist: u2, song: two}"
    assert intent(gold, other) == 1.0 and intent(gold, "play_music") == 0.0
    assert slots(gold, other) == pytest.approx(2 / 5) and slots(gold, "no answer") == 0.0
    empty = "intent: a, slot fills: {}"
    assert slots(empty, empty) == slots(empty, "intent: b") == 1.0
    assert metrics_of([gold, empty])[2:] == (intent, slots) != metrics_of([gold, "7"])[2:] == ()


def test_both_adapters_are_measured_on_the_same_prompts(
    folder: Path, own_cache: Path, data: Path, tmp_path: Path, ended: Ended, tailor: Tailor
) -> None:
    pytest.importorskip("peft")
    shared = ["--model", folder, "--data", data]
    tokens, plain, enriched = (tmp_path / name for name in ("tokens.json", "base", "own"))
    tailor("tasks", "enrich", *shared, "--tokens", 4, "-o", tokens)
    recipe = ["--epochs", 12, "--learning-rate", 0.02, "--rows-learning-rate", 0.05,
              "--batch-size", 8, "--rank", 4, "--dropout", 0]  # fmt: skip
    tailor("tasks", "train", *shared, *recipe, "-o", plain)
    tailor("tasks", "train", *shared, *recipe, "--enrichment", tokens, "-o", enriched)
    found = ended(
        quality.main, "adapters", "--model", folder, "--base", plain, "--enriched", enriched,
        "--train", data, "--test", data, "--prompts", 8, "--tokens", 24,
    )  # fmt: skip
    base, own = found["base"], found["enriched"]
    assert own["exact"]["num"] == 8 and own["f1"]["mean"] > 0.5
    for metric in ("exact", "f1"):
        both = own[metric]["mean"] - base[metric]["mean"]
        assert found["difference"][metric]["mean"] == pytest.approx(both)
    assert base["ids"] == base["base_ids"]
    assert own["fewest_ids"] <= own["ids"] < 0.7 * own["base_ids"]
    assert 0.5 < own["adoption"] <= 1.0
    for side in (base, own):
        assert side["passes"]["0"] == pytest.approx(side["ids"])
        assert side["passes"]["16"] < side["passes"]["0"]
    # A base that holds the adapter keeps its bits; the adapter changes other texts.
    found = ended(quality.main, "damage", *shared, "--adapter", plain, "--threads", 1)
    assert found["same_bits"] and found["off"]["logprob_error"] == 0.0
    assert found["texts"] == 60 and found["on"]["logprob_error"] > 0.0
