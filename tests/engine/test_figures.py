"""Figures are read when somebody asks, and mean what they are declared as."""

from __future__ import annotations

from random import Random
from typing import cast

import pytest

from server.engine import figures
from server.engine.figures import StepTotals
from tests.engine.scenarios import drive, make_drafter, make_engine, random_workload


def test_every_value_has_the_shape_of_its_declaration() -> None:
    work = random_workload(Random(4))
    engine, runner = make_engine(work, make_drafter(work, work.expected()))
    drive(work, engine)
    told = dict(zip(figures.declared(), figures.values(engine), strict=True))
    assert engine.info.figures == tuple(told)
    assert len({figure.name for figure in told}) == len(told)
    for figure, value in told.items():
        if figure.kind == "histogram":
            counts, total = value
            assert len(counts) == len(figure.buckets) + 1 and total >= 0.0
            assert list(figure.buckets) == sorted(figure.buckets)
            assert sum(counts) == engine.steps.num_steps
        elif figure.labels:
            for labels, number in value or ():
                assert len(labels) == len(figure.labels) and number >= 0
        else:
            assert value is None or value >= 0
    values = {figure.name: value for figure, value in told.items()}
    assert values["engine_steps"] == runner.num_steps
    assert sum(num for _, num in values["engine_rows"]) == runner.num_rows
    assert values["step_rows"][1] == runner.num_rows
    assert values["kv_cache_usage_perc"] == values["num_requests_running"] == 0
    assert values["num_preemptions"] == engine.scheduler.num_preemptions


def test_a_bucket_s_upper_edge_belongs_to_it() -> None:
    totals = StepTotals()
    for value in (0.001, 0.0012, 700.0):
        totals.observe(value, value, value, value, 3)
    first, rows = (cast(tuple[tuple[int, ...], float], totals.histogram(i)) for i in (0, 4))
    counts, total = first
    assert (counts[0], counts[1], counts[-1], sum(counts)) == (1, 1, 1, 3)
    assert total == pytest.approx(700.0022) and rows[1] == 9
