"""Choices that are not asked for drafts: steps are not looked at, and what repeats is asked again.
That their texts stay is held by test_lossless.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from drafters import make_drafter as make_any
from server.engine.engine import Engine
from server.engine.plan import EngineSettings
from server.engine.step_times import CostTable
from server.types import SpeculationParams, StepCounts
from tests.engine.requests import engine_over, finish, ids_of, in_the_table_s_time, request_of
from tests.engine.scenarios import make_drafter, make_engine, random_workload
from tests.fakes.fake_runner import FakeModel


def some_choices(num: int, dear: bool) -> tuple[list[StepCounts], int, dict[str, list[int]]]:
    """So many equal answers of 40 tokens: the counts of every Delta, how often it was weighed who
    is asked, and the texts."""
    work = random_workload(Random(0))
    work.num_blocks, work.max_model_len, work.drafter = 400, 96, "oracle"
    spec = SpeculationParams("oracle", 4)
    work.requests = [
        (0, request_of(str(i), (3 + i, 4, 5), max_tokens=40, speculation=spec), None)
        for i in range(num)
    ]
    work.settings = EngineSettings(max_num_seqs=8, max_num_batched_tokens=64, max_draft_rows=64)
    engine, _ = make_engine(work, make_drafter(work, work.expected()))
    asked, ask = 0, engine.gain.ask

    def counted(*arguments: Any) -> tuple[list[str], int]:
        nonlocal asked
        asked += 1
        return (["cooldown"] * len(arguments[0]), 0) if dear else ask(*arguments)

    engine.gain.ask = counted  # type: ignore[method-assign,assignment]
    told = finish(engine, *(request for _, request, _ in work.requests))
    counts = [delta.counts for deltas in told.values() for delta in deltas]
    return counts, asked, {name: ids_of(deltas) for name, deltas in told.items()}


def test_who_is_asked_is_not_weighed_in_every_step() -> None:
    counts, asked, texts = some_choices(8, dear=True)
    assert sum(c.num_steps for c in counts) == 8 * 40, "nobody drafted"
    assert asked <= 7, "one look for some steps, not one for each"
    reasons = Counter(c.no_draft_reason for c in counts)
    assert reasons["length"] == 8 and reasons["cooldown"] >= 8 * 36
    cheap, _, same = some_choices(8, dear=False)
    assert same == texts and sum(c.num_accepted for c in cheap) > 100


def _repeating(seed: int, boost: float, seconds: list[float]) -> Engine:
    """One whose texts repeat themselves, drafted by `auto`. seconds: of steps of 1 row and of 8."""
    return engine_over(
        FakeModel(24, seed=seed, context=2, boost=boost),
        {"auto": lambda task, speculation: make_any("auto", num_likely=0)},
        num_blocks=200, max_model_len=256, eos_token_ids=(0,), max_num_seqs=4,
        cost=CostTable([1, 8], seconds),
    )[0]  # fmt: skip


def test_steps_of_a_rest_are_booked_before_its_choices_leave() -> None:
    """A scope whose only answer ends by EOS, amid a rest."""
    engine = _repeating(3, 2.0, [1.0, 8.0])
    rested, leave, left, num_rested = engine.gain.rested, engine.gain.leave, set[int](), 0

    def booked(seats: Sequence[int], num_steps: int) -> None:
        nonlocal num_rested
        assert not left.intersection(seats)
        num_rested += num_steps
        rested(seats, num_steps)

    def gone(seat: int) -> None:
        left.add(seat)
        leave(seat)

    engine.gain.rested, engine.gain.leave = booked, gone  # type: ignore[method-assign]
    ended = 0
    for i in range(12):
        left.clear()
        sampling = {"temperature": 1.0, "max_tokens": 200, "seed": i, "ignore_eos": False}
        spec = SpeculationParams("auto", 8)
        told = finish(engine, request_of("r", (3, 4), speculation=spec, **sampling))["r"]
        ended += told[-1].finish_reason == "stop"
    assert ended > 6 and num_rested > 20


@pytest.mark.parametrize("seed", range(8, 16))
def test_a_text_is_asked_for_in_the_step_behind_its_first_repeat(seed: int) -> None:
    engine = _repeating(seed, 20.0, [1.0, 1.1])
    in_the_table_s_time(engine)
    engine.submit(request_of("r", max_tokens=200, speculation=SpeculationParams("auto", 8)))
    text, behind, pairs = [3, 4, 5], list[str](), dict[tuple[int, int], int]()
    while engine.has_work and not behind:
        for delta in engine.step():
            repeats = False
            for token in delta.token_ids:
                pair = text[-2], text[-1]
                repeats |= pairs.get(pair) == token
                pairs[pair] = token
                text.append(token)
            if repeats:
                behind = [after.counts.no_draft_reason for after in engine.step()]
    assert behind and behind != ["cooldown"]
