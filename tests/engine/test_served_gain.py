"""What drafts gain, measured: the same prompts on two engines that begin with nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from server.engine.batch import Batch
from server.engine.engine import Engine
from server.engine.forecast import ratio_error
from server.engine.served_gain import TURN, GainMeter
from server.engine.settings import EngineSettings
from server.engine.step_times import CostTable, row_grid
from server.engine.task_store import TaskStore
from server.types import Request, SamplingParams, SpeculationParams
from tests.engine.one_token_loop import one_token_loop
from tests.fakes.fake_drafters import oracle_drafter
from tests.fakes.fake_runner import FakeModel, FakeRunner, fake_info

PROMPTS = [[3, 5, 2 + i // 10, 2 + i % 10] for i in range(20)]
SAMPLING = SamplingParams(temperature=0.7, max_tokens=12, seed=5)
DRAFTS = SpeculationParams("oracle", 4, learn_tokens=1000)


class FixedCost(CostTable):
    """A table that no step refreshes: a fake model's steps take no time."""

    def observe(self, num_rows: int, keys: float, seconds: float) -> None:
        """Nothing is noted."""


def _texts(model: FakeModel) -> list[list[int]]:
    """The answer to each prompt, by the rules alone."""
    found = []
    for at, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(temperature=0.7, max_tokens=12, seed=5 + at)
        request = Request("", "", "fake", tuple(prompt), sampling)
        rules: dict[str, Any] = {"eos": (1,), "max_model_len": 64, "token_bytes": []}
        found.append(one_token_loop(model, request, 0, **rules).ids)
    return found


def _meter(
    fail: Callable[[Batch], None] | None = None,
) -> tuple[GainMeter, list[list[int]], list[TaskStore | None]]:
    """A meter over a fake model whose drafts know its texts, and what its drafters were given."""
    model = FakeModel(13, seed=4)
    texts = _texts(model)
    info = fake_info(vocab_size=13, num_blocks=64, max_model_len=64, eos_token_ids=(1,))
    engine = Engine(FakeRunner(model, info, fail=fail), {}, EngineSettings(max_num_seqs=4))
    rows = row_grid(64)
    cost = FixedCost(rows, [100.0 + r for r in rows])
    given: list[TaskStore | None] = []

    def make(name: str, task: str, asked: SpeculationParams, memory: TaskStore | None) -> Any:
        assert (name, task, asked.learn_tokens) == ("oracle", "town", 1000)
        given.append(memory)
        return oracle_drafter([p + t for p, t in zip(PROMPTS, texts, strict=True)])

    return GainMeter(engine, make, cost, "town", SAMPLING, "f"), texts, given


@pytest.mark.parametrize("num_clients", [1, 3])
def test_both_sides_answer_alike_and_each_begins_with_nothing(num_clients: int) -> None:
    meter, texts, given = _meter()
    for _ in range(2):
        gain = meter.measure(PROMPTS, DRAFTS, num_clients=num_clients)
        assert gain.plain.outputs == gain.drafted.outputs == texts
        assert gain.plain.tokens_per_step == 1.0 and gain.plain.nodes_per_step == 0.0
        assert gain.drafted.tokens_per_step > 2.0
        assert sum(gain.drafted.sources.values()) > len(PROMPTS)
        for side in (gain.plain, gain.drafted):
            assert len(side.seconds) == len(PROMPTS) and min(side.seconds) > 0.0
        assert gain.speedup == sum(gain.plain.seconds) / sum(gain.drafted.seconds)
        assert not meter.engine.stats().num_cached_blocks
        meter.engine.check()
    # A drafter is made again when a layer was learned; what was learned is each side's own.
    assert None not in given and len(set(map(id, given))) == 2


def test_it_ends_behind_the_turn_in_which_the_time_is_over() -> None:
    meter, texts, _ = _meter()
    gain = meter.measure(PROMPTS, DRAFTS, most_s=0.0)
    assert gain.plain.outputs == gain.drafted.outputs == texts[:TURN]
    with pytest.raises(ValueError, match="no prompts"):
        meter.measure([], DRAFTS)


def test_a_request_that_fails_is_told() -> None:
    def fail(batch: Batch) -> None:
        raise MemoryError("no room")

    meter, _, _ = _meter(fail)
    with pytest.raises(RuntimeError, match=r"no room|failed"):
        meter.measure(PROMPTS, DRAFTS)


def test_the_error_of_a_ratio_is_what_resampling_finds() -> None:
    rng = np.random.default_rng(3)
    below = rng.gamma(4.0, 1.0, 400)
    above = below * rng.normal(1.4, 0.3, 400)
    picked = rng.integers(0, 400, (2000, 400))
    spread = float(np.std(above[picked].sum(1) / below[picked].sum(1)))
    assert ratio_error(list(above), list(below)) == pytest.approx(spread, rel=0.1)
    assert ratio_error([2.0, 4.0], [1.0, 2.0]) == ratio_error([2.0], [1.0]) == 0.0
