"""The Batch of plain decode steps is made by a shorter way than others: it is the same Batch."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import fields
from random import Random

import numpy as np
import pytest

from server.engine import build
from server.engine.batch import Batch
from server.engine.drafting import CheckedTree
from server.engine.plan import Built, Scheduled
from tests.engine.scenarios import compare, drive, make_drafter, make_engine, random_workload


def assert_same(a: Batch, b: Batch) -> None:
    for field in fields(Batch):
        one, two = getattr(a, field.name), getattr(b, field.name)
        if isinstance(one, np.ndarray):
            assert one.dtype == two.dtype and one.flags["C_CONTIGUOUS"]
            np.testing.assert_array_equal(one, two, field.name)
        else:
            assert one == two, field.name


def test_both_ways_build_the_same_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    real, num_plain = build.build_batch, 0

    def both(
        items: SequenceOf[Scheduled],
        trees: SequenceOf[CheckedTree | None],
        num_prefill_rows: int,
        masks: object = None,
        num_likely: int = 0,
    ) -> Built:
        nonlocal num_plain
        built = real(items, trees, num_prefill_rows, masks, num_likely)  # type: ignore[arg-type]
        if masks is None and all(map(build._is_plain, items, trees)):
            num_plain += 1
            nothing = [None] * len(items)  # as if there might be masks: the general way
            other = real(items, trees, num_prefill_rows, nothing, num_likely)
            assert_same(built.batch, other.batch)
            assert (built.spans, built.num_keys) == (other.spans, other.num_keys)
        return built

    monkeypatch.setattr("server.engine.engine.build_batch", both)
    for seed in range(12):
        work = random_workload(Random(seed))
        expected = work.expected()
        engine, _ = make_engine(work, make_drafter(work, expected))
        compare(work, expected, drive(work, engine))
    assert num_plain > 10
