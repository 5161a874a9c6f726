"""What a step costs beside the model: fitted to steps, whoever else used the machine."""

from __future__ import annotations

from random import Random

import pytest

from server.engine.engine import Engine
from server.engine.host_cost import HostCost, HostCosts, measure_host
from server.engine.settings import EngineSettings
from tests.fakes.fake_drafters import random_drafter
from tests.fakes.fake_runner import FakeModel, FakeRunner, fake_info


def test_the_cheaper_steps_tell_what_each_part_costs() -> None:
    true = HostCost(300e-6, 40e-6, 10e-6)
    random = Random(5)
    steps = []
    for i in range(400):
        draws, nodes = 1 + i % 8, random.randrange(9)
        disturbed_s = 2e-3 * random.random() if random.random() < 0.4 else 0.0
        steps.append((draws, nodes, true.seconds(draws, nodes) + disturbed_s))
    found = HostCost.fit(steps)
    for draws, nodes in ((1, 0), (1, 8), (8, 0), (8, 16)):
        expected = true.seconds(draws, nodes)
        assert found.seconds(draws, nodes) == pytest.approx(expected, rel=0.05)


def test_nothing_is_negative() -> None:
    found = HostCost.fit([(1, 0, 3.0), (2, 0, 2.0), (4, 0, 1.0), (4, 4, 1.0)])
    assert min(found.step_s, found.draw_s, found.node_s) >= 0.0
    assert HostCost.fit([]) == HostCost()
    assert HostCost.fit([(2, 0, 1.0)]).seconds(2, 0) == pytest.approx(1.0)


def test_an_engine_is_asked_and_left_idle() -> None:
    info = fake_info(vocab_size=9, num_blocks=256, max_model_len=256)
    settings = EngineSettings(max_num_seqs=8, max_num_batched_tokens=64)
    engine = Engine(
        FakeRunner(FakeModel(9, seed=1), info), {"auto": random_drafter(1, 9)}, settings
    )
    found = measure_host(engine, [[2, 3, 4, 5] * 30, []], "auto")
    for cost in (found.plain, found.drafted):
        assert 0.0 < cost.seconds(1, 0) <= cost.seconds(8, 16) < 1.0
    assert 0.0 < found.ask_s < 1.0, "a drafter was asked in steps of one choice"
    assert not engine.has_work and engine.num_open == 0 and engine.take_deltas() == []
    engine.check()
    assert measure_host(engine, [[]], "auto") == HostCosts()
