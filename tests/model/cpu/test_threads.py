"""The thread that a runner's steps are computed on."""

from __future__ import annotations

import threading

import pytest

from server.model.cpu.threads import Worker


def test_calls_are_made_in_order_and_each_has_its_own_outcome() -> None:
    worker, gate, made = Worker("test"), threading.Event(), list[int]()

    def call(number: int) -> int:
        gate.wait(10)
        made.append(number)
        if number == 1:
            raise LookupError("one")
        return number

    outcomes = [worker.submit(call, number) for number in range(4)]
    gate.set()
    assert outcomes[3].result() == 3 and made == [0, 1, 2, 3]
    assert outcomes[0].result() == 0
    with pytest.raises(LookupError, match="one"):
        outcomes[1].result()
    worker.close()


def test_a_closed_one_has_done_what_it_was_given_and_takes_no_more() -> None:
    worker, made = Worker("test"), list[int]()
    for number in range(3):
        worker.submit(made.append, number)
    worker.close()
    worker.close()
    assert made == [0, 1, 2]
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(made.append, 3)
