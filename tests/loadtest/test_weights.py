"""The weights_* tools: their figures on tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from loadtest.memory_speed import MemoryReader
from loadtest.weight_forms import forms_of, runner_of
from loadtest.weights_quality import read_texts
from loadtest.weights_speed import measure
from server.errors import ModelError, UnsupportedModelError
from server.model.build import RunnerSpec, build_runner
from server.model.scoring import Scores, Text, compare, score
from tests.model.tiny_models import save_tiny, save_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save_tiny(made, "llama", vocab_size=128)
    save_tokenizer(made)
    return made


def test_every_form_is_scored_and_integers_stay_near_float32(folder: Path) -> None:
    rng = np.random.default_rng(0)
    texts = [Text(tuple(rng.integers(3, 100, 30).tolist()), 10) for _ in range(6)]
    base = None
    errors = {}
    for form in forms_of("int8,int8-blocks,int4"):
        runner, _ = runner_of(str(folder), form, adapter=None, threads=2, max_rows=64)
        assert runner.info.dtype == form
        kv_dtype = "float32" if form == "float32" else "float16"
        assert runner.info.kv_dtype == kv_dtype
        assert runner.info.fingerprint.endswith(f":{form}" + ":kv-float16" * (form != "float32"))
        scores = score(runner, texts)
        runner.close()
        base = base or scores
        figures = compare(scores, base)
        assert 0.0 <= figures["texts_agree"] <= figures["tokens_agree"] <= 1.0
        errors[form] = figures["logprob_error"]
    assert base is not None
    assert len(base.ranks) == 6 * 20
    assert errors["float32"] == 0.0 < errors["int8-blocks"] < errors["int4"]
    assert errors["int8"] < 0.1


def test_a_smaller_cache_takes_its_share_of_the_memory_and_stays_near(folder: Path) -> None:
    rng = np.random.default_rng(0)
    texts = [Text(tuple(rng.integers(3, 100, 60).tolist()), 10) for _ in range(4)]
    errors, sizes = {}, {}
    base = None
    for form in ("float32:float32", "float32:float16", "float32:int8"):
        runner, _ = runner_of(str(folder), form, adapter=None, threads=1, max_rows=64)
        sizes[form] = runner.info.kv_block_bytes
        scores = score(runner, texts)
        runner.close()
        base = base or scores
        errors[form] = compare(scores, base)["logprob_error"]
    whole, half, quarter = sizes.values()
    # Heads of 8 take 24 numbers a slot: values are padded to 16; int8 has two float32 scales.
    assert (half * 2, quarter * 24 * 4) == (whole, whole * (24 + 8))
    assert errors["float32:float32"] == 0.0 < errors["float32:int8"] < 0.1
    assert errors["float32:float16"] < errors["float32:int8"]


def test_figures_of_known_scores() -> None:
    def scores(ranks: list[int], best: list[int]) -> Scores:
        logprobs = np.full(len(ranks), np.log(0.5))
        return Scores(logprobs, np.array(ranks), np.array(best), np.array([0, 0, 1, 1]))

    base = scores([1, 1, 1, 1], [5, 6, 7, 8])
    assert compare(base, base)["exact"] == compare(base, base)["texts_agree"] == 1.0
    found = compare(scores([1, 1, 2, 1], [5, 6, 9, 8]), base)
    assert found["exact"] == found["texts_agree"] == 0.5
    assert found["tokens_agree"] == 0.75
    assert found["perplexity"] == 2.0


def test_a_step_is_timed_in_every_form(folder: Path) -> None:
    runners = {
        form: runner_of(str(folder), form, adapter=None, threads=1, max_rows=64)[0]
        for form in ("float32", "int8")
    }
    reader = MemoryReader(1 << 20, 2)
    found = measure(runners, 4, 16, 3, reader)
    reader.close()
    for runner in runners.values():
        runner.close()
    assert found["int8"]["of_reading"] > 0 < found["int8"]["read_gb_s"]
    assert found["float32"]["speed"]["median"] == 1.0
    assert found["int8"]["speed"]["num_pairs"] == 3
    assert found["int8"]["best_ms"] <= found["int8"]["ms"]


def test_texts_are_read_with_their_end_and_cut_to_those_that_fit(
    folder: Path, tmp_path: Path
) -> None:
    data = tmp_path / "test.jsonl"
    data.write_text(
        '{"prompt": "ab", "completion": "c"}\n{"prompt": "abcdefghijk", "completion": "abc"}\n'
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    (text,) = read_texts(data, tokenizer, 2, 10, 8)
    assert text.ids[-1] == 2
    assert text.start == len(tokenizer.encode("ab").ids)
    with pytest.raises(ValueError, match="no text"):
        read_texts(data, tokenizer, 2, 10, 1)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"weights": "int8", "dtype": "bfloat16"}, ValueError, "give one of them"),
        ({"weights": "file", "device": "cuda"}, UnsupportedModelError, "`weights: int8-blocks`"),
        ({"kv_dtype": "int8", "device": "cuda"}, UnsupportedModelError, "kv_cache_dtype"),
    ],
)
def test_what_cannot_be_kept_so_is_refused(
    folder: Path, given: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        build_runner(RunnerSpec(name="m", folder=str(folder), **given))
    with pytest.raises(ModelError, match="none of"):
        runner_of(str(folder), "int3", adapter=None, threads=1, max_rows=64)
