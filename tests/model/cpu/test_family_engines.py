"""Every family in the engine, on real arithmetic: drafts, prompts in chunks, a prefix cache that is
hit and too few blocks for all change no bit of what one sequence alone gives, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any, Literal

import numpy as np
import pytest

from server.engine.engine import Engine
from server.engine.plan import EngineSettings
from server.model.cpu.runner import CpuRunner
from server.types import Request, SamplingParams, SpeculationParams, VocabularyParams
from tests.engine.scenarios import Result, run_requests
from tests.fakes.fake_drafters import liar_drafter
from tests.model import families
from tests.model.cpu_models import cpu_runner
from vocab_store.profile import VocabProfile
from vocab_store.slice import RequiredIds, VocabSlice

V = families.VOCAB_SIZE
SAMPLINGS = [
    SamplingParams(temperature=0.0, num_logprobs=2),
    SamplingParams(temperature=0.0, num_logprobs=0),
    SamplingParams(temperature=0.8, top_p=0.9, num_logprobs=1),
    SamplingParams(temperature=0.7, top_k=12, repetition_penalty=1.2),
]


def _profile() -> VocabProfile:
    ids = sorted({2, *Random(1).sample(range(3, V), 90)})
    fill = np.setdiff1d(np.arange(3, V, dtype=np.int32), np.asarray(ids))
    made = VocabSlice.make(ids, RequiredIds.of(V, eos_ids=[2]))
    return VocabProfile(made, fill, np.zeros(fill.shape[0], np.float32))


PROFILE = _profile()


def _requests(seed: int) -> list[Request]:
    """Prompts that begin alike and repeat themselves, so that blocks are shared and drafts hit."""
    rng = Random(seed)
    shared = [rng.randrange(3, V) for _ in range(9)] * 4
    requests = []
    for i, sampling in enumerate(SAMPLINGS * 2):
        own = [rng.randrange(3, V) for _ in range(3)] * rng.randint(1, 4)
        requests.append(
            Request(
                f"r{i}",
                "task",
                "tiny",
                tuple(shared + own),
                replace(sampling, max_tokens=rng.randint(10, 24), seed=rng.randrange(1 << 40)),
            )
        )
    return requests


def _run(
    runner: CpuRunner,
    requests: list[Request],
    settings: EngineSettings,
    num_blocks: int,
    drafters: dict[str, Any],
) -> tuple[dict[tuple[str, int], Result], Engine]:
    runner.info = replace(runner.info, num_blocks=num_blocks)
    engine = Engine(runner, drafters, settings, profiles={"task": PROFILE}.__getitem__)
    results = run_requests(engine, [(0, request) for request in requests])
    assert engine.num_failed_steps == 0 and engine.num_drafter_errors == 0
    for table in range(4):  # the runner lives on
        runner.drop_table(table)
    return results, engine


ALONE = EngineSettings(max_num_seqs=1, max_num_batched_tokens=256, prefix_cache=False)
TOGETHER = EngineSettings(max_num_seqs=6, max_num_batched_tokens=48, chunked_prefill_rows=16)


# Of every test here, so that docs/models.md can be written from it (tests/model/test_coverage.py).
pytestmark = [
    pytest.mark.parametrize("family", list(families.FAMILIES), scope="module", indirect=True)
]


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def runner(family: str) -> Iterator[CpuRunner]:
    made = cpu_runner(families.build(family), num_blocks=64)
    yield made
    made.close()


def _in(mode: Literal["full", "slice", "exact"], requests: list[Request]) -> list[Request]:
    return [replace(r, vocabulary=VocabularyParams(mode, "task", 0)) for r in requests]


def _same(got: dict[tuple[str, int], Result], want: dict[tuple[str, int], Result]) -> None:
    assert set(got) == set(want)
    for key, result in got.items():
        assert result.ids == want[key].ids
        assert result.finish_reason == want[key].finish_reason
        assert result.logprobs == want[key].logprobs


def _drafted(
    requests: list[Request], want: dict[tuple[str, int], Result]
) -> tuple[list[Request], dict[str, Any]]:
    """Trees that follow the answer for a while and have wrong branches beside it."""
    texts = [[*r.prompt_ids, *want[r.request_id, 0].ids] for r in requests]
    drafted = [replace(r, speculation=SpeculationParams("liar", 6)) for r in requests]
    return drafted, {"liar": liar_drafter(3, texts, V)}


def test_slices_are_the_same_alone_and_drafted_and_exact_is_the_full_head(
    runner: CpuRunner,
) -> None:
    requests = _requests(12)
    full, _ = _run(runner, requests, ALONE, 64, {})
    drafted, liar = _drafted(requests, full)
    got, _ = _run(runner, _in("exact", drafted), TOGETHER, 24, liar)
    _same(got, full)
    assert sum(count.num_missed for result in got.values() for count in result.vocabulary) > 0
    sliced, _ = _run(runner, _in("slice", requests), ALONE, 64, {})
    drafted, liar = _drafted(requests, sliced)
    got, _ = _run(runner, _in("slice", drafted), TOGETHER, 24, liar)
    _same(got, sliced)
    assert any(got[key].ids != full[key].ids for key in got)


def test_drafts_chunks_shared_blocks_and_preemption_change_no_bit(runner: CpuRunner) -> None:
    requests = _requests(11)
    want, _ = _run(runner, requests, ALONE, 64, {})
    drafted, liar = _drafted(requests, want)
    got, engine = _run(runner, drafted, TOGETHER, 10, liar)
    _same(got, want)
    counts = [count for result in got.values() for count in result.counts]
    num_accepted = sum(count.num_accepted for count in counts)
    assert 10 < num_accepted < sum(count.num_drafted for count in counts)
    assert engine.scheduler.num_preemptions > 0 and engine.scheduler.prefix_hits > 0
