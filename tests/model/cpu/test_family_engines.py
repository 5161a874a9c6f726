"""Every family in the engine, on real arithmetic: drafts, prompts in chunks, a prefix cache that is
hit and too few blocks for all change no bit of what one sequence alone gives, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any, Literal

import pytest

from drafters import make_drafter
from server.model.cpu.runner import CpuRunner
from server.types import Request, SamplingParams, SpeculationParams, VocabularyParams
from tests.engine.scenarios import Result
from tests.fakes.fake_drafters import liar_drafter
from tests.model import families, slice_engines
from tests.model.cpu_models import cpu_runner
from tests.model.slice_engines import assert_same, serve

V = families.VOCAB_SIZE
SAMPLINGS = (
    *slice_engines.SAMPLINGS,
    SamplingParams(temperature=0.0, repetition_penalty=1.2, num_logprobs=0),
)


def requests() -> list[Request]:
    """Prompts that begin alike and repeat themselves, so that blocks are shared and drafts hit."""
    rng = Random(11)
    shared = [rng.randrange(3, V) for _ in range(9)] * 2
    made = []
    for i, sampling in enumerate(SAMPLINGS):
        own = [rng.randrange(3, V) for _ in range(3)] * rng.randint(1, 4)
        made.append(
            Request(
                f"r{i}",
                "task",
                "tiny",
                tuple(shared + own),
                replace(sampling, max_tokens=rng.randint(7, 12), seed=rng.randrange(1 << 40)),
                num_choices=2 if i == 3 else 1,
            )
        )
    return made


def _run(runner: CpuRunner, requests: list[Request], num_blocks: int, liar: Any) -> Any:
    """Together, in chunks, with drafts."""
    drafters = {"liar": liar, "auto": make_drafter("auto")}
    return serve(
        runner, requests, num_blocks=num_blocks, max_num_seqs=6, max_num_batched_tokens=48,
        drafters=drafters,
    )  # fmt: skip


def alone(runner: CpuRunner, asked: list[Request]) -> dict[tuple[str, int], Result]:
    return serve(
        runner, asked, num_blocks=64, max_num_seqs=1, max_num_batched_tokens=256,
        chunked_prefill_rows=None, prefix_cache=False,
    )[0]  # fmt: skip


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


Plain = tuple[list[Request], dict[tuple[str, int], Result]]
"""Requests, and what each gives alone with the full head."""


@pytest.fixture(scope="module")
def plain(runner: CpuRunner) -> Plain:
    return requests(), alone(runner, requests())


def _in(mode: Literal["slice", "exact"], requests: list[Request]) -> list[Request]:
    return [
        replace(r, vocabulary=VocabularyParams(mode, "medium", (0, 1, 3, 7)[i % 4]))
        for i, r in enumerate(requests)
    ]


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
    runner: CpuRunner, plain: Plain
) -> None:
    asked, full = plain
    drafted, liar = _drafted(asked, full)
    got, _ = _run(runner, [*_in("exact", drafted[:-1]), drafted[-1]], 24, liar)
    assert_same(got, full, 0.0)
    slices = [count for result in got.values() for count in result.vocabulary]
    num_missed = sum(count.num_missed for count in slices)
    assert 0 < num_missed < sum(count.num_verifications for count in slices)
    sources = [source for r in got.values() for c in r.counts for source in c.by_source]
    assert sum(num for name, num, _ in sources if name == "logits") > 0
    sliced = alone(runner, _in("slice", asked))
    drafted, liar = _drafted(asked, sliced)
    got, _ = _run(runner, _in("slice", drafted), 24, liar)
    assert_same(got, sliced, 0.0)
    assert any(got[key].ids != full[key].ids for key in got)


def test_drafts_chunks_shared_blocks_and_preemption_change_no_bit(
    runner: CpuRunner, plain: Plain
) -> None:
    asked, full = plain
    drafted, liar = _drafted(asked, full)
    got, engine = _run(runner, drafted, 5, liar)
    assert_same(got, full, 0.0)
    counts = [count for result in got.values() for count in result.counts]
    num_accepted = sum(count.num_accepted for count in counts)
    assert 10 < num_accepted < sum(count.num_drafted for count in counts)
    assert engine.scheduler.num_preemptions > 0 and engine.scheduler.prefix_hits > 0
