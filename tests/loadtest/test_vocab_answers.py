"""Agreement and quality of vocabulary modes: the benchmarks' own logic, on a FakeRunner."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console

from loadtest import vocab_lossless, vocab_quality
from loadtest.answers import Answer, ModelFiles, answer_all, total
from loadtest.prompts import Example
from loadtest.vocab_table import Row, make_rows
from server import token_bytes
from server.engine.batch import Batch, Drawn, Int32
from server.engine.engine import Engine
from server.engine.settings import EngineSettings
from server.engine.stops import StopTable
from server.types import Request, SamplingParams
from tests.fakes.fake_drafters import oracle_drafter
from tests.fakes.fake_runner import FakeModel, FakeRunner, fake_info
from tests.vocab_store.test_slice import Texts as Letters
from vocab_store.documents import tokenize_pairs
from vocab_store.profile import VocabProfile
from vocab_store.slice import RequiredIds, VocabSlice

V = 40
REQUIRED = RequiredIds.of(V, eos_ids=[1])
LETTERS = Letters([b"<%d>" % i for i in range(V)], [1])


def _slice(*ids: int) -> VocabSlice:
    return VocabSlice.make([1, *ids], REQUIRED)


def _profile(made: VocabSlice) -> VocabProfile:
    none = np.empty(0, np.int32)
    return VocabProfile(made, none, none.astype(np.float32))


def _console() -> Console:
    return Console(file=io.StringIO())


def _engine(
    profiles: dict[str, VocabProfile],
    runner: FakeRunner | None = None,
    *,
    texts: list[list[int]] | None = None,
    **settings: Any,
) -> Engine:
    runner = runner or FakeRunner(FakeModel(V, seed=4, alphabet=12), fake_info(vocab_size=V))
    return Engine(
        runner,
        {"auto": oracle_drafter(texts or [])},
        EngineSettings(max_num_seqs=3, max_num_batched_tokens=64, **settings),
        stop_table=StopTable.from_list(LETTERS.pieces, (1,)),
        profiles=profiles.__getitem__,
    )


PROMPTS = [[2, 3, 4], [20, 21], [7, 8, 9, 30], [5], [31, 2, 6]]
EXAMPLES = [Example("p", f"e{i}", "", "") for i in range(len(PROMPTS))]


class LyingRunner(FakeRunner):
    """Verifies, but lets the wrong token stand once in a while."""

    num_lies = 0

    def verify(self, batch: Batch, kept: Int32) -> Drawn:
        drawn = super().verify(batch, kept)
        if self.num_verifies % 7 == 3:
            self.num_lies += 1
            ids = drawn.token_ids.copy()
            ids[0] = (ids[0] + 1) % V
            drawn = replace(drawn, token_ids=ids)
        return drawn


def test_exact_is_compared_with_full_for_every_verify_every() -> None:
    plain = answer_all(
        _engine({}),
        [
            vocab_lossless.request_of(str(p), "p", prompt, p, "greedy", 14, "fake")
            for p, prompt in enumerate(PROMPTS)
        ],
        "full",
        _console(),
    )
    texts = [[*prompt, *plain[str(p)].ids] for p, prompt in enumerate(PROMPTS)]
    engine = _engine(
        {"p": _profile(_slice(2, 3, 4, 5, 6, 7))}, texts=texts, may_use_full_head=False
    )
    found = vocab_lossless.check(
        engine, EXAMPLES, PROMPTS, ("greedy", "temperature"), ("off", "auto"),
        max_tokens=14, console=_console(),
    )  # fmt: skip
    assert (found["num_compared"], found["num_different"]) == (20, 0)
    exact = found["exact"]
    assert exact["all"]["num_missed"] > 5 and exact["all"]["num_accepted"] > 10
    assert (
        sum(
            exact[f"verify_every {w or 'adapted'}"]["num_answers"]
            for w in vocab_lossless.VERIFY_EVERY
        )
        == 20
    )
    per_verification = {
        w: exact[f"verify_every {w}"]["num_checked"]
        / exact[f"verify_every {w}"]["num_verifications"]
        for w in (1, 3, 7)
    }
    assert per_verification[1] < per_verification[3], "neighbours have the same verify_every"
    assert found["full"]["num_verifications"] == 0


def test_a_wrong_answer_of_exact_is_found() -> None:
    runner = LyingRunner(FakeModel(V, seed=4, alphabet=12), fake_info(vocab_size=V))
    engine = _engine({"p": _profile(_slice(2, 3, 4, 5, 6, 7))}, runner, may_use_full_head=False)
    found = vocab_lossless.check(
        engine, EXAMPLES, PROMPTS, ("greedy",), ("off",), max_tokens=14, console=_console()
    )
    assert runner.num_lies > 0 and found["num_different"] > 0
    assert found["differences"][0]["difference"].startswith("token ")


def test_the_first_difference_is_named() -> None:
    a = Answer((1, 2), "stop")
    assert vocab_lossless.first_difference(a, Answer((1, 3), "stop")).startswith("token 1: 2 in")
    assert vocab_lossless.first_difference(a, Answer((1,), "stop")).startswith("2 tokens in full")
    assert vocab_lossless.first_difference(a, Answer((1, 2), "length")).startswith("ends with stop")
    with pytest.raises(ValueError, match="do not differ"):
        vocab_lossless.first_difference(a, Answer((1, 2), "stop"))


def test_a_request_that_fails_is_told() -> None:
    engine = _engine({})
    request = Request("r", "t", "fake", (300,), SamplingParams(max_tokens=2))
    with pytest.raises(RuntimeError, match="r: "):
        answer_all(engine, [request], "x", _console())


def test_totals_are_sums() -> None:
    found = total([Answer((1, 2), num_steps=2, num_drafted=3), Answer((4,), num_steps=1)])
    assert (found["num_answers"], found["num_tokens"], found["num_decode_steps"]) == (2, 3, 3)
    assert (found["num_drafted"], found["num_missed"]) == (3, 0)


# -- texts over fewer ids ------------------------------------------------------------------------


def _texts(ask_all: bool) -> vocab_quality.Texts:
    profiles: dict[str, VocabProfile] = {}
    files = ModelFiles(Path("."), None, cast(Any, None), cast(Any, LETTERS), REQUIRED)
    return vocab_quality.Texts(
        _engine(profiles), profiles, files, max_tokens=10, ask_all=ask_all, console=_console()
    )


def test_texts_that_are_taken_over_are_those_that_would_be_computed() -> None:
    rng = Random(3)
    rows = [
        Row(_slice(*rng.sample(range(2, V), num)), num, dynamic)
        for num in (38, 30, 20, 14, 8)
        for dynamic in (True, False)
    ]
    rows += [Row(_slice(*range(2, top)), top - 2) for top in (14, 12, 9)]
    lazy, eager = _texts(False), _texts(True)
    for row in (None, *rows, None):
        a, b = lazy.of(PROMPTS, row, "lazy"), eager.of(PROMPTS, row, "eager")
        assert [x.ids for x in a] == [x.ids for x in b]
        for answer, prompt in zip(a, PROMPTS, strict=True):
            if row is not None:
                allowed = set(row.slice.ids.tolist()) | (set(prompt) if row.dynamic else set())
                assert set(answer.ids) <= allowed
    assert eager.num_known == 0 and eager.num_wrong == 0
    assert lazy.num_known > 10 and lazy.num_asked > 10
    assert lazy.num_known + lazy.num_asked == eager.num_asked


def test_ask_all_finds_a_text_that_should_be_another() -> None:
    texts = _texts(True)
    (answer, *_) = texts.of(PROMPTS, None, "full")
    assert texts.num_wrong == 0
    texts._known[tuple(PROMPTS[0])] = [(None, replace(answer, ids=answer.ids[:-1]))]
    texts.of(PROMPTS, None, "full")
    assert texts.num_wrong == 1


def test_a_text_ends_at_its_line() -> None:
    letters = Letters([b"<s>", b"</s>", b" a", b"b\nc", b"d"], [0, 1])
    files = ModelFiles(Path("."), None, cast(Any, None), cast(Any, letters), REQUIRED)
    texts = vocab_quality.Texts(
        _engine({}), {}, files, max_tokens=4, ask_all=False, console=_console()
    )
    assert texts.text(Answer((2, 4, 1))) == "ad"
    assert texts.text(Answer((2, 3, 4))) == "ab"


# -- metrics and rows ----------------------------------------------------------------------------


def test_metrics() -> None:
    assert vocab_quality.exact_match(["A  b", "c"], ["a b ", "d"]) == 0.5
    assert vocab_quality.labels_of(" x; Y ;x;") == Counter({"x": 1, "y": 1})
    # 2 right of 3 found and 3 wanted: 2*2 / 6.
    assert vocab_quality.label_f1(["x;y", "z"], ["x;q", "z"]) == pytest.approx(2 / 3)
    assert vocab_quality.entities_of('{"person": ["A", "A"], "n": 3}') == Counter(
        {("person", "A"): 2}
    )
    assert vocab_quality.entities_of('{"person": ["A"') == vocab_quality.entities_of("[1]") == {}
    assert vocab_quality.entity_f1(['{"p": ["A"]}', "no"], ['{"p": ["A", "B"]}', "{}"]) == (
        pytest.approx(2 / 3)
    )
    assert vocab_quality.label_f1(["", ""], ["", ""]) == 0.0


def test_library_metrics() -> None:
    pytest.importorskip("rouge_score")
    pytest.importorskip("sacrebleu")
    assert vocab_quality.rouge_l(["the cat sat"], ["the cat sat"]) == pytest.approx(1.0)
    assert vocab_quality.rouge_l(["a c"], ["a b c"]) == pytest.approx(0.8)
    assert vocab_quality.chrf(["ciao mondo"], ["ciao mondo"]) == pytest.approx(1.0)


def test_rows_of_the_table() -> None:
    from tests.api.tiny_tokenizers import byte_level_tokenizer

    tokenizer = byte_level_tokenizer()
    tokens = token_bytes.build(tokenizer)
    required = RequiredIds.from_tokens(tokens, [0])
    pairs = [("the cat", "the dog"), ("a cat", "the cat"), ("the dog", "the end")]
    train = tokenize_pairs(pairs, tokenizer)
    rows = make_rows(train, ("en",), tokens, required, tokenizer)
    assert not rows["static only, tau 0.01"].dynamic and rows["tau 0.1"].dynamic
    sizes = [rows[name].num_t for name in ("unfiltered", "+ input-aware", "tau 0.0", "tau 0.1")]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[1]
    assert rows["dynamic only"].num_t == 0
    assert rows["dynamic only"].slice == VocabSlice.make(required.ids, required)
    pruned = rows["VP"]
    assert pruned.tokenizer is not None
    for prompt, _ in pairs:  # what the pruned tokenizer writes lies in VP, under the old ids
        old = pruned.slice.ids[pruned.tokenizer.encode(prompt).ids]
        assert tokenizer.decode(old.tolist()) == prompt
    test = tokenize_pairs([("the cat", "the cat")], tokenizer)
    only = rows["dynamic only"]
    assert only.figures(test)["recall"] > replace(only, dynamic=False).figures(test)["recall"]
