"""The plan of a step: whose rows it has, and who is counted as waiting for a first token."""

from __future__ import annotations

from tests.api.real_engine import make_engine
from tests.engine.test_fairness import request


def test_choices_that_will_fork_wait_for_a_first_token_and_have_their_seats() -> None:
    """Requests are counted as far as free seats would take them."""
    engine = make_engine(drafts=False, max_num_seqs=6)
    engine.submit(request("forks", "a", 200, n=3, max_tokens=9))
    engine.step()
    assert engine.scheduler.num_awaiting_first == 3, "its prompt takes two steps"
    for i in range(5):
        engine.submit(request(f"waits{i}", "a", 4, max_tokens=9))
    assert engine.scheduler.num_awaiting_first == 6, "three seats are free, not five"
    while engine.has_work:
        engine.step()
        engine.check()
    assert engine.scheduler.num_awaiting_first == 0
