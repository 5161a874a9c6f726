"""Team: every thread runs a job's share once, meets the others at barriers, and ends with it."""

from __future__ import annotations

import gc
import os
import threading
import time

import numpy as np
import pytest

from drafters.jit import entry_of
from server.model.cpu.linear import new_work
from server.model.cpu.records import EACH, SPINS, THREADS, Work
from server.model.cpu.threads import Team
from tests.waiting import wait_until

_go = entry_of("tests.model.cpu.team_shares", "all_items")
_go_near = entry_of("tests.model.cpu.team_shares", "near_items")


@pytest.mark.parametrize("spins", [0, 1000])
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_every_item_is_taken_once_and_no_thread_passes_a_barrier_early(
    threads: int, spins: int
) -> None:
    work = new_work(threads)
    work.sync[SPINS // 8] = spins
    for _ in range(5):
        items = np.zeros((200, 7), np.int64)
        sums = np.zeros(threads, np.int64)
        _go(200, items, sums, False, work)
        assert ((items >= 1) & (items <= threads)).all()
        assert (sums == items.size).all()


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("num_items", [0, 1, 4, 23])
@pytest.mark.parametrize("runs", [False, True])
def test_near_items_are_taken_once_also_those_of_a_thread_that_is_late(
    threads: int, num_items: int, runs: bool
) -> None:
    work = new_work(threads)
    items = np.zeros((50, num_items), np.int64)
    # The late thread begins when the others have taken all, its own items too.
    _go_near(50, items, num_items, runs, work)
    assert (items == 1).all()


def test_a_share_that_raises_is_told_and_the_team_goes_on() -> None:
    work = new_work(2)
    items, sums = np.zeros((1, 3), np.int64), np.zeros(2, np.int64)
    with pytest.raises(ValueError, match="as told"):
        _go(1, items, sums, True, work)
    _go(1, items, sums, False, work)
    assert (sums == 6).all()


@pytest.mark.parametrize(("policy", "spin"), [("active", True), ("Passive", False), (None, True)])
def test_threads_spin_unless_the_environment_says_that_threads_sleep(
    policy: str | None, spin: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.model.cpu.threads.cores", lambda: 2)
    monkeypatch.delenv("OMP_WAIT_POLICY")
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    assert (Team(2).sync[SPINS // 8] > 0) == spin
    assert Team(3).sync[SPINS // 8] == 0


def test_the_threads_end_with_the_work_and_sleep_between_jobs() -> None:
    before = set(threading.enumerate())

    def members() -> int:
        new = set(threading.enumerate()) - before
        return sum(t.name.startswith("cpu-team") for t in new)

    work: Work | None = new_work(3)
    assert members() == 2
    _go(1, np.zeros((1, 3), np.int64), np.zeros(3, np.int64), False, work)
    time.sleep(0.05)
    began = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - began < 0.15, "who waits for a job does not spin for long"
    del work
    wait_until(lambda: gc.collect() >= 0 and members() == 0, 10.0)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_thread_leaves_the_core_of_an_earlier_one_and_may_use_the_same_cores_as_before() -> None:
    own = os.sched_getaffinity(0)
    core = min(own)
    work = new_work(2)
    member = next(t for t in reversed(threading.enumerate()) if t.name == "cpu-team-1")
    assert member.native_id is not None
    work.sync[SPINS // 8] = 1000  # as where each thread can have a core
    try:
        os.sched_setaffinity(0, {core})
        for _ in range(20):
            os.sched_setaffinity(member.native_id, {core})
            os.sched_setaffinity(member.native_id, own)
            _go(1, np.zeros((1, 3), np.int64), np.zeros(2, np.int64), False, work)
            first, second = work.sync[THREADS // 8 :: EACH // 8][:2].tolist()
            assert first == core != second
            assert os.sched_getaffinity(member.native_id) == own
    finally:
        os.sched_setaffinity(0, own)
