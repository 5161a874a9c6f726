"""What crosses the channel arrives as it was sent, and is plain enough to be marshalled."""

from __future__ import annotations

import marshal

from server import channel
from server.types import (
    Delta,
    EngineStats,
    Request,
    SamplingParams,
    SpeculationParams,
    StepCounts,
    TokenLogprob,
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


def test_requests() -> None:
    plain = marshal.loads(marshal.dumps(channel.pack_request(REQUEST)))
    assert channel.unpack_request(plain) == REQUEST


def test_a_request_with_nothing_set() -> None:
    bare = Request("r", "t", "m", (1,), SamplingParams())
    plain = marshal.loads(marshal.dumps(channel.pack_request(bare)))
    assert channel.unpack_request(plain) == bare


def test_deltas() -> None:
    for delta in (DELTA, Delta("r", 0, (), error="e", error_code="c", finish_reason="error")):
        plain = marshal.loads(marshal.dumps(channel.pack_delta(delta)))
        assert channel.unpack_delta(plain) == delta


def test_stats() -> None:
    stats = EngineStats(num_running=3, step_s=0.5, draft_budget=7)
    plain = marshal.loads(marshal.dumps(channel.pack_stats(stats)))
    assert channel.unpack_stats(plain) == stats
