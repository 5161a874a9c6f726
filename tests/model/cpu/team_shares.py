"""Shares that test_team.py runs: compiled functions of its own."""
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from drafters.jit import borrowing, entry_run_by
from server.model.cpu.kernels.team import (
    barrier,
    barrier_reading,
    begin_items,
    run,
    take,
    take_near,
    take_run,
)
from server.model.cpu.records import Int64, Int64x2, Work


@entry_run_by(run)
@borrowing
def all_items(
    thread: int, rounds: int, items: Int64x2, sums: Int64, fails: bool, work: Work
) -> None:
    """Each round takes all items, then checks that all were taken before anyone went on."""
    for k in range(rounds):
        item = take(work)
        while item < items.shape[1]:
            items[k, item] += thread + 1
            item = take(work)
        barrier(work)
        for item in range(items.shape[1]):
            sums[thread] += items[k, item] > 0
    if fails:
        raise ValueError("as told")


@entry_run_by(run)
@borrowing
def near_items(
    thread: int, rounds: int, items: Int64x2, order: int, runs: bool, work: Work
) -> None:
    """Each round takes all items by take_near or take_run; the last thread is late to its own."""
    work = Work(work.sync, work.pairs, work.threads, thread)
    for k in range(rounds):
        begin_items(work)
        barrier_reading(work, items.ctypes.data, items.ctypes.data + 8 * items.size)
        if thread == work.threads - 1 and thread > 0:
            done = 0
            while done < order:  # somebody else's work
                take(work)
                done = 0
                for item in range(items.shape[1]):
                    done += items[k, item]
        if runs:
            item, end = take_run(work, items.shape[1])
            while item < end:
                for i in range(item, end):
                    items[k, i] += 1
                item, end = take_run(work, items.shape[1])
        else:
            item = take_near(work, items.shape[1])
            while item >= 0:
                items[k, item] += 1
                item = take_near(work, items.shape[1])
        barrier(work)
