"""Engines over small models whose requests ask for slices of the vocabulary, for tests of both
runners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from drafters import Drafter, make_drafter
from server.engine.batch import Runner
from server.engine.engine import Engine
from server.engine.plan import EngineSettings
from server.types import Request, SamplingParams, SpeculationParams, VocabularyParams
from tests.engine.scenarios import Result, run_requests
from tests.fakes.token_table import table_of
from tests.model import families
from vocab_store.profile import VocabProfile
from vocab_store.slice import RequiredIds, VocabSlice

V = families.VOCAB_SIZE

SPECULATIONS = (SpeculationParams(), SpeculationParams("suffix", 6), SpeculationParams("auto", 6))
SAMPLINGS = (
    SamplingParams(temperature=0.0, num_logprobs=2),
    SamplingParams(temperature=0.7, top_p=0.9, num_logprobs=0),
    SamplingParams(temperature=1.3, top_k=20, min_p=0.02),
    SamplingParams(
        temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2,
        num_logprobs=1,
    ),
    SamplingParams(temperature=0.9, min_tokens=6, stop_token_ids=(9, 14, 77)),
    SamplingParams(temperature=0.9, stop=(b"<5", b"7><1")),
    SamplingParams(temperature=0.6, logit_bias=((5, 3.0), (8, -100.0)), num_logprobs=3),
)  # fmt: skip

Results = Mapping[tuple[str, int], Result]


def profile(seed: int, num: int, vocab_size: int = V) -> VocabProfile:
    """A random one of so many ids."""
    ids = sorted({2, *Random(seed).sample(range(3, vocab_size), num)})
    fill = np.setdiff1d(np.arange(3, vocab_size, dtype=np.int32), np.asarray(ids))
    made = VocabSlice.make(ids, RequiredIds.of(vocab_size, eos_ids=[2]))
    return VocabProfile(made, fill, np.zeros(fill.shape[0], np.float32))


PROFILES = {"small": profile(1, 40), "medium": profile(1, 90), "large": profile(2, 150)}


def requests_of(seed: int, times: int = 1) -> list[Request]:
    """One of each sampling, `times` over."""
    rng = Random(seed)
    requests = []
    for i, own in enumerate(SAMPLINGS * times):
        prompt = ([rng.randrange(3, V) for _ in range(5)] * 4)[: rng.randint(3, 18)]
        own = replace(own, max_tokens=rng.randint(6, 12), seed=rng.randrange(1 << 40))
        requests.append(Request(f"r{i}", "task", "tiny", tuple(prompt), own,
                                num_choices=2 if i == 3 else 1))  # fmt: skip
    return requests


def asking(requests: list[Request], rng: Random, modes: tuple[str, ...]) -> list[Request]:
    """The requests with a mode, a profile, an N and drafts of any kind."""
    return [
        replace(
            request,
            vocabulary=VocabularyParams(
                rng.choice(modes),  # type: ignore[arg-type]
                rng.choice(("small", "large")),
                rng.choice((0, 1, 3, 7)),
            ),
            speculation=rng.choice(SPECULATIONS),
        )
        for request in requests
    ]


def serve(
    runner: Runner,
    requests: list[Request],
    *,
    num_blocks: int = 48,
    max_num_seqs: int = 8,
    drafters: Mapping[str, Drafter] | None = None,
    profiles: Mapping[str, VocabProfile] = PROFILES,
    **settings: Any,
) -> tuple[dict[tuple[str, int], Result], Engine]:
    """What an engine over the runner, which lives on, answers. settings: of EngineSettings."""
    runner.info = replace(runner.info, num_blocks=num_blocks)
    given = {"max_num_batched_tokens": 64, "chunked_prefill_rows": 16} | settings
    engine = Engine(
        runner,
        drafters or {name: make_drafter(name) for name in ("suffix", "auto")},
        EngineSettings(max_num_seqs=max_num_seqs, **given),
        stop_table=table_of([b"<%d>" % i for i in range(runner.info.vocab_size)]),
        profiles=profiles.__getitem__,
    )
    results = run_requests(engine, [(0, request) for request in requests])
    assert engine.recovery.num_failed_steps == 0 and engine.drafts.num_errors == 0
    assert len(engine.slices.index.num_users) == 0, "a head row was never unpinned"
    for table in range(8):
        runner.drop_table(table)
    return results, engine


def assert_same(got: Results, want: Results, atol: float) -> None:
    """Ids, finish reasons, and logprobs to `atol` (0: all that is told of them)."""
    assert set(got) == set(want)
    for key, result in got.items():
        full = want[key]
        assert result.ids == full.ids
        assert (result.finish_reason, result.stop_reason) == (full.finish_reason, full.stop_reason)
        assert atol or result.logprobs == full.logprobs
        np.testing.assert_allclose(
            [x.logprob for x in result.logprobs], [x.logprob for x in full.logprobs], 0, atol
        )
