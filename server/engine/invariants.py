"""What must hold between steps: tests look after every step, the host after an error."""

from __future__ import annotations

from collections.abc import Iterable

from server.engine.blocks import BlockPool
from server.engine.plan import Scheduler
from server.engine.sequence import Sequence, Status


def check_state(
    pool: BlockPool, scheduler: Scheduler, open_requests: Iterable[list[Sequence]]
) -> None:
    """Raise AssertionError unless table, blocks, queues and open requests agree."""
    running, waiting = scheduler.running, scheduler.waiting
    alive = [s for sequences in open_requests for s in sequences]
    pool.check([s.blocks() for s in alive])
    assert {id(s) for s in running} == {id(s) for s in alive if s.status is Status.RUNNING}
    assert {id(s) for s in waiting} == {id(s) for s in alive if s.status is Status.WAITING}
    assert running == sorted(running, key=lambda s: s.order)
    assert len(waiting) == sum(s.status is Status.WAITING for s in alive)
    assert scheduler.num_waiting_tokens == sum(s.num_tokens for s in waiting)
    scheduler.table.check([s.seat for s in alive])
    for s in alive:
        assert s.last_id == s.ids[s.num_tokens - 1]
        assert s.status is Status.RUNNING or s.num_blocks == 0
