"""Every family in the engine, on real arithmetic: drafts, prompts in chunks, a prefix cache that is
hit and too few blocks for all change no bit of what one sequence alone gives, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any, Literal

import numpy as np
import pytest

from drafters import make_drafter
from server.engine.engine import Engine
from server.engine.plan import EngineSettings
from server.engine.stops import StopTable
from server.model.cpu.runner import CpuRunner
from server.types import Request, SamplingParams, SpeculationParams, VocabularyParams
from tests.engine.scenarios import Result, run_requests
from tests.fakes.fake_drafters import liar_drafter
from tests.model import families
from tests.model.cpu_models import cpu_runner
from vocab_store.profile import VocabProfile
from vocab_store.slice import RequiredIds, VocabSlice

V = families.VOCAB_SIZE
EOS = 2
SAMPLINGS = [
    SamplingParams(temperature=0.0, num_logprobs=2),
    SamplingParams(temperature=0.7, top_p=0.9, num_logprobs=0),
    SamplingParams(temperature=1.3, top_k=20, min_p=0.02),
    SamplingParams(
        temperature=0.8,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.2,
        num_logprobs=1,
    ),
    SamplingParams(temperature=0.9, min_tokens=6, stop_token_ids=(9, 14, 77)),
    SamplingParams(temperature=0.9, stop=(b"<5", b"7><1")),
    SamplingParams(temperature=0.6, logit_bias=((5, 3.0), (8, -100.0)), num_logprobs=3),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, num_logprobs=0),
]


def _profile() -> VocabProfile:
    ids = sorted({EOS, *Random(1).sample(range(3, V), 90)})
    fill = np.setdiff1d(np.arange(3, V, dtype=np.int32), np.asarray(ids))
    made = VocabSlice.make(ids, RequiredIds.of(V, eos_ids=[EOS]))
    return VocabProfile(made, fill, np.zeros(fill.shape[0], np.float32))


PROFILE = _profile()


def _requests(seed: int) -> list[Request]:
    """Prompts that begin alike and repeat themselves, so that blocks are shared and drafts hit."""
    rng = Random(seed)
    shared = [rng.randrange(3, V) for _ in range(9)] * 4
    requests = []
    for i, sampling in enumerate(SAMPLINGS):
        own = [rng.randrange(3, V) for _ in range(3)] * rng.randint(1, 4)
        requests.append(
            Request(
                f"r{i}",
                "task",
                "tiny",
                tuple(shared + own),
                replace(sampling, max_tokens=rng.randint(10, 24), seed=rng.randrange(1 << 40)),
                num_choices=2 if i == 3 else 1,
            )
        )
    return requests


def _run(
    runner: CpuRunner,
    requests: list[Request],
    settings: EngineSettings,
    num_blocks: int,
    liar: Any = None,
) -> tuple[dict[tuple[str, int], Result], Engine]:
    runner.info = replace(runner.info, num_blocks=num_blocks)
    engine = Engine(
        runner,
        {"liar": liar, "auto": make_drafter("auto")} if liar else {},
        settings,
        stop_table=StopTable.from_list([b"<%d>" % i for i in range(V)], ()),
        profiles={"task": PROFILE}.__getitem__,
    )
    results = run_requests(engine, [(0, request) for request in requests])
    assert engine.num_failed_steps == 0 and engine.num_drafter_errors == 0
    for table in range(8):  # the runner lives on
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


def _in(mode: Literal["slice", "exact"], requests: list[Request]) -> list[Request]:
    return [
        replace(r, vocabulary=VocabularyParams(mode, "task", (0, 1, 3, 7)[i % 4]))
        for i, r in enumerate(requests)
    ]


def _same(got: dict[tuple[str, int], Result], want: dict[tuple[str, int], Result]) -> None:
    assert set(got) == set(want)
    for key, result in got.items():
        assert result.ids == want[key].ids
        assert result.finish_reason == want[key].finish_reason
        assert result.stop_reason == want[key].stop_reason
        assert result.logprobs == want[key].logprobs


def _drafted(
    requests: list[Request], want: dict[tuple[str, int], Result]
) -> tuple[list[Request], Any]:
    """Trees that follow the answer for a while and have wrong branches beside it, or likely ids."""
    texts = [[*r.prompt_ids, *want[r.request_id, 0].ids] for r in requests]
    drafted = [
        replace(r, speculation=SpeculationParams("auto" if i % 4 == 2 else "liar", 6))
        for i, r in enumerate(requests)
    ]
    return drafted, liar_drafter(3, texts, V)


def test_slices_are_the_same_alone_and_drafted_and_exact_is_the_full_head(
    runner: CpuRunner,
) -> None:
    requests = _requests(12)
    full, _ = _run(runner, requests, ALONE, 64)
    drafted, liar = _drafted(requests, full)
    got, _ = _run(runner, [*_in("exact", drafted[:-1]), drafted[-1]], TOGETHER, 24, liar)
    _same(got, full)
    slices = [count for result in got.values() for count in result.vocabulary]
    num_missed = sum(count.num_missed for count in slices)
    assert 0 < num_missed < sum(count.num_verifications for count in slices)
    sources = [source for r in got.values() for c in r.counts for source in c.by_source]
    assert sum(num for name, num, _ in sources if name == "logits") > 0
    sliced, _ = _run(runner, _in("slice", requests), ALONE, 64)
    drafted, liar = _drafted(requests, sliced)
    got, _ = _run(runner, _in("slice", drafted), TOGETHER, 24, liar)
    _same(got, sliced)
    assert any(got[key].ids != full[key].ids for key in got)


def test_drafts_chunks_shared_blocks_and_preemption_change_no_bit(runner: CpuRunner) -> None:
    requests = _requests(11)
    want, _ = _run(runner, requests, ALONE, 64)
    drafted, liar = _drafted(requests, want)
    got, engine = _run(runner, drafted, TOGETHER, 10, liar)
    _same(got, want)
    counts = [count for result in got.values() for count in result.counts]
    num_accepted = sum(count.num_accepted for count in counts)
    assert 10 < num_accepted < sum(count.num_drafted for count in counts)
    assert engine.scheduler.num_preemptions > 0 and engine.scheduler.prefix_hits > 0
