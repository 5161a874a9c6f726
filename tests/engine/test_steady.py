"""Decode steps of the same choices: one Batch is written anew in place, and the texts stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from server.engine.batch import Batch
from server.engine.engine import Engine
from server.types import Request
from tests.engine.requests import engine_over, request_of
from tests.engine.scenarios import run_requests
from tests.fakes.fake_runner import FakeModel, FakeRunner
from tests.fakes.token_table import table_of

MODEL = FakeModel(16, seed=5)


def _counted(runner: FakeRunner) -> list[int]:
    """[0], where steps are counted from now on whose Batch is the last one, written anew."""
    launch, num = runner.launch, [0]
    last: list[Batch | None] = [None]

    def counting(batch: Batch) -> None:
        num[0] += batch is last[0]
        last[0] = batch
        launch(batch)

    runner.launch = counting  # type: ignore[method-assign]
    return num


def _engine(**runner: Any) -> tuple[Engine, FakeRunner]:
    table = table_of([b"%x" % i for i in range(16)])
    return engine_over(MODEL, num_blocks=256, max_model_len=256, stop_table=table, **runner)


def _request(name: str, num: int = 100, **sampling: Any) -> Request:
    return request_of(name, (3, 4, ord(name) % 16), max_tokens=num, **sampling)


def _alone(request: Request) -> list[int]:
    """Its text, every Batch of it made anew."""
    engine, runner = _engine()
    num = _counted(runner)

    def forget(_: int) -> None:
        engine._builder._seats = None

    results = run_requests(engine, [(0, request)], each_step=forget)
    assert num == [0]
    return results[request.request_id, 0].ids


def test_most_steps_are_like_the_one_before() -> None:
    """Nor is who comes, leaves or ends kept waiting for one: their texts are those of each alone,
    and their blocks are published as they are filled."""
    requests = {
        "a": _request("a"),
        "b": _request("b", 90, temperature=1.0, seed=3),
        "c": _request("c", 80, num_logprobs=2),
        "d": _request("d", 70, stop=(b"3a",)),
        "e": _request("e", 60),
    }
    engine, runner = _engine()
    num = _counted(runner)
    arrivals = [(9 * at, request) for at, request in enumerate(requests.values())]
    results = run_requests(engine, arrivals, aborts=[(60, "e")])
    for name, request in requests.items():
        want, got = _alone(request), results[name, 0].ids
        assert got == (want if name != "e" else want[: len(got)]) and len(got) > 9
    assert num[0] > runner.num_steps - 25 > 60
    size = engine.info.block_size
    text = (*requests["a"].prompt_ids, *results["a", 0].ids)
    engine.submit(request_of("x", text, max_tokens=1))
    engine.step()
    assert engine.scheduler.prefix_hits >= 102 // size * size


@pytest.mark.parametrize("nth", [12, 40])
def test_a_failed_step_is_computed_again(nth: int) -> None:
    seen = [0]

    def fail(batch: Batch) -> None:
        seen[0] += 1
        if seen[0] == nth:
            raise RuntimeError("a passing fault")

    engine, runner = _engine(fail=fail)
    num = _counted(runner)
    a, b = _request("a"), _request("b")
    results = run_requests(engine, [(0, a), (0, b)])
    assert engine.recovery.num_failed_steps == 1 and num[0] > 60
    assert [results["a", 0].ids, results["b", 0].ids] == [_alone(a), _alone(b)]


def test_what_is_raised_meanwhile_loses_no_token() -> None:
    """The step is done before it is raised; its Deltas come with the next one's."""
    engine, _ = _engine()
    a, b = _request("a"), _request("b")
    engine.submit(a)
    engine.submit(b)
    for _ in range(10):
        engine.step()

    def fail() -> None:
        raise OSError("nobody listens")

    ids = []
    for _ in range(3):
        with pytest.raises(OSError, match="nobody"):
            engine.step(fail)
        ids += [token for delta in engine.step() for token in delta.token_ids if token >= 0]
    with pytest.raises(OSError, match="nobody"):
        engine.step(fail)
    engine.abort("a")
    results = run_requests(engine, [])
    assert len(ids) == 12
    assert results["b", 0].ids == _alone(b)[16:]


def test_a_prompt_s_batch_is_never_changed() -> None:
    """Those of the decode steps behind it are one, whose positions move on."""
    engine, runner = _engine()
    seen: list[tuple[Batch, np.ndarray]] = []
    launch = runner.launch

    def noting(batch: Batch) -> None:
        seen.append((batch, batch.positions.copy()))
        launch(batch)

    runner.launch = noting  # type: ignore[method-assign]
    run_requests(engine, [(0, _request("a", 20))])
    (prompt, positions), *decoded = seen
    assert prompt.positions.tolist() == positions.tolist() == [0, 1, 2]
    assert len({id(batch) for batch, _ in decoded}) == 1
    assert [int(at[0]) for _, at in decoded] == list(range(3, 22))
