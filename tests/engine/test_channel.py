"""What crosses the channel arrives as it was sent, with the same types."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest

from server import channel
from server.types import (
    Delta,
    GrammarSpec,
    ModelInfo,
    Request,
    SamplingParams,
    SpeculationParams,
    StepCounts,
    TokenLogprob,
    VocabularyCounts,
    VocabularyParams,
)

REQUEST = Request(
    request_id="r-1",
    task="tagging",
    model="m",
    prompt_ids=(1, 2, 49151),
    sampling=SamplingParams(
        temperature=0.7,
        logit_bias=((3, -100.0), (7, 2.5)),
        allowed_token_ids=(1, 3),
        stop_token_ids=(9,),
        stop=(b"\n", "é".encode()),
        seed=(1 << 64) - 1,
        num_logprobs=5,
        logprob_token_ids=(4, 8),
    ),
    speculation=SpeculationParams(
        "auto", 16, (("mix.lambda", 0.5), ("trie.n", 13)), "a.corpus", (4, 5, 6), (0, 2)
    ),
    vocabulary=VocabularyParams("exact", "p", 8),
    num_choices=3,
    echo_logprobs=2,
    cache_salt="salt",
    priority=-1,
    arrival_s=12.5,
    report_sources=True,
    label_ids=(4, 9),
    report_rejected=True,
)
DELTA = Delta(
    "r-1",
    2,
    (5, 6),
    logprobs=(TokenLogprob(5, -0.5, 1, ((5, -0.5),)), TokenLogprob(6, -1.5, 2, ())),
    prompt_logprobs=(None, TokenLogprob(2, -3.0, 9, ())),
    finish_reason="stop",
    stop_reason=b"\n",
    num_cached_tokens=16,
    queue_s=0.25,
    counts=StepCounts(1, 1, 4, 1, (1,), (1,), (("prompt", 4, 1),), "", 0, 0, 1.5, ((3, 4, 1),)),
    sources=("prompt", ""),
    label_logprobs=(-0.5, -2.0),
    rejected_drafts=((1, "prompt", (7, 8)),),
)


BARE = Request("r", "t", "m", (1,), SamplingParams())
MESSAGES: dict[str, tuple[object, ...]] = {
    "a request": ("submit", REQUEST),
    "a request with nothing set": ("submit", BARE),
    "a grammar": ("submit", replace(BARE, grammar=GrammarSpec("json_schema", "{}", " "))),
    "Deltas": (
        "deltas",
        [
            DELTA,
            Delta("r", 0, (), error="e", error_code="c", finish_reason="error"),
            DELTA._replace(stop_reason=7, vocabulary=VocabularyCounts(5, 1, verify_s=0.5)),
            DELTA._replace(counts=StepCounts(expected_accepted=math.inf)),
        ],
    ),
    "a model": ("ready", ModelInfo("m", 9, 8, (0, 1), 4, 16, "cpu", "float32", "f", 8, 64)),
    "a stop": ("stop",),
    "an abort": ("abort", "r"),
    "a control": ("control", 3, "reload", {"task": "t", "ids": [1, 2]}),
}


def _there(*message: object) -> tuple[object, ...]:
    return channel.decode(channel.encode(message))


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_what_is_sent_arrives(message: tuple[object, ...]) -> None:
    assert _there(*message) == message


def test_types_are_kept_to_the_last() -> None:
    """1 is not 1.0 and not True, and ids come as tuples: drafters and caches compare them."""
    options = (("a", 1), ("b", 1.0), ("c", True), ("d", "1"))
    request = replace(REQUEST, speculation=SpeculationParams("auto", 4, options))
    (_, found) = _there("submit", request)
    assert isinstance(found, Request) and found.speculation.options == options
    assert [type(v) for _, v in found.speculation.options] == [int, float, bool, str]
    assert type(found.prompt_ids) is tuple and type(found.sampling.stop[0]) is bytes


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="prompt_ids"):
        _there("submit", replace(REQUEST, prompt_ids=("x",)))  # type: ignore[arg-type]
    for message in (("submit",), ("deltas", [DELTA], None)):
        with pytest.raises(ValueError, match="zip"):
            _there(*message)
    with pytest.raises(ValueError, match="unsupported"):
        channel.encode(("submit", object()))
