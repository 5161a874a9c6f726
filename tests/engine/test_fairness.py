"""One key's flood leaves another key's first token within twice its unloaded time plus one step.
Who waits for a first token is counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest

from server.engine.engine import Engine
from server.engine.sequence import Status
from server.types import Delta, Request
from tests.api.real_engine import make_engine
from tests.engine.requests import engine_over, finish, request_of
from tests.fakes.fake_runner import FakeModel

SEATS = 16


def request(name: str, tenant: str, prompt_len: int, n: int = 1, max_tokens: int = 1) -> Request:
    prompt = [5 + (len(name) + i) % 90 for i in range(prompt_len)]
    return request_of(name, prompt, max_tokens=max_tokens, num_choices=n, tenant=tenant)


def engine_of() -> Engine:
    return make_engine(drafts=False, max_num_seqs=SEATS)


def steps_to_first(engine: Engine, request_id: str) -> tuple[int, list[Delta]]:
    """Steps until a request has its first token, and all that was told until then."""
    told: list[Delta] = []
    for num in range(1, 100):
        told += engine.step()
        if any(delta.request_id == request_id and delta.token_ids for delta in told):
            return num, told
    raise AssertionError("no token in 100 steps")


@pytest.mark.parametrize("prompt_len", [4, 200])
@pytest.mark.parametrize(
    ("num", "choices", "max_tokens", "flood_len"),
    [
        (12, 128, 1, 1),  # choices that end at their first token
        (100, 1, 200, 4),  # every seat is taken for long
        (100, 1, 20, 250),  # prompts that take whole steps
        (4, 128, 100, 30),
    ],
)
def test_a_flood_leaves_another_key_its_turn(
    num: int, choices: int, max_tokens: int, flood_len: int, prompt_len: int
) -> None:
    late = request("late", "b", prompt_len)
    alone = engine_of()
    alone.submit(late)
    unloaded, _ = steps_to_first(alone, "late")
    engine = engine_of()
    for i in range(num):
        engine.submit(request(f"flood{i}", "a", flood_len, n=choices, max_tokens=max_tokens))
    for _ in range(7):
        engine.step()
    engine.submit(late)
    loaded, _ = steps_to_first(engine, "late")
    assert loaded <= 2 * unloaded + 1
    engine.abort_all()


def test_a_key_owes_nothing_for_rows_that_nobody_else_wanted() -> None:
    """Another key's flood, of choices that end at their first token, does not come before it."""
    engine = engine_of()
    engine.submit(request("before", "b", 40, max_tokens=200))
    assert list(_finished(engine)) == ["before"]
    for i in range(32):
        engine.submit(request(f"flood{i}", "a", 1, n=16))
    for name in ("late", "later", "last"):
        engine.submit(request(name, "b", 40))
        assert steps_to_first(engine, name)[0] <= 3
    engine.abort_all()


@pytest.mark.parametrize("prompt_len", [4, 200])
def test_a_flood_that_holds_all_kv_leaves_another_key_its_share(prompt_len: int) -> None:
    """Its choices make way when another key's begins, and when that grows; none is lost."""
    late = request("late", "b", prompt_len, max_tokens=50)

    def until_the_end(engine: Engine) -> tuple[int, int]:
        engine.submit(late)
        first, told = steps_to_first(engine, "late")
        rest = 0
        while not any(d.request_id == "late" and d.finish_reason for d in told):
            told, rest = engine.step(), rest + 1
        return first, rest

    alone = engine_of()
    unloaded, rest = until_the_end(alone)
    engine = engine_of()
    for i in range(40):
        engine.submit(request(f"flood{i}", "a", 100, max_tokens=150))
    ended: list[Delta] = []
    while engine.pool.num_free > 3 or len(engine.scheduler.running) == SEATS:
        ended += engine.step()
    engine.step()
    before = engine.scheduler.num_preemptions
    loaded, loaded_rest = until_the_end(engine)
    assert loaded <= 2 * unloaded + 1 and loaded_rest == rest
    assert engine.scheduler.num_preemptions > before
    ended += [d for _ in range(2000) if engine.has_work for d in engine.step()]
    assert all(d.finish_reason != "error" for d in ended) and not engine.has_work
    engine.check()


@pytest.mark.parametrize("repeats", [True, False])
def test_what_a_key_finds_in_the_cache_does_not_tell_what_another_asks(repeats: bool) -> None:
    """Prompts that come again need no further blocks, others fill the pool: the first key finds its
    own in either case."""
    engine = engine_of()

    def cached(name: str, tenant: str, first: int) -> int:
        ids = tuple(5 + (first + i * (1 + first)) % 90 for i in range(120))
        engine.submit(replace(request(name, tenant, 120), prompt_ids=ids))
        told = [d for _ in range(50) if engine.has_work for d in engine.step()]
        return sum(delta.num_cached_tokens for delta in told)

    assert cached("first", "a", 0) == 0
    whole = cached("again", "a", 0)
    assert whole >= 112
    for i in range(60):
        cached(f"b{i}", "b", 1 if repeats else 1 + i)
    assert cached("last", "a", 0) == whole
    engine.check()


def test_a_key_keeps_its_one_choice_whatever_that_holds() -> None:
    """Else a long one would begin again each time that another key asks."""
    engine = engine_of()
    engine.submit(request("long", "a", 180, max_tokens=70))
    steps_to_first(engine, "long")
    for i in range(15):
        engine.submit(request(f"b{i}", f"b{i}", 120, max_tokens=100))  # the last lacks blocks
    (long,) = (s for s in engine.scheduler.running if s.request.request_id == "long")
    ended: list[str] = []
    while engine.has_work:
        assert ended or long.status is Status.RUNNING
        ended += [delta.request_id for delta in engine.step() if delta.finish_reason]
    assert ended[0] == "long" and len(ended) == 16


def test_a_prompt_under_way_counts_as_all_that_it_will_take() -> None:
    """Else the key of a long one takes nearly all blocks from those that have theirs already."""
    engine, _ = engine_over(FakeModel(96), num_blocks=40, chunked_prefill_rows=1)
    for i in range(3):
        engine.submit(request(f"b{i}", "b", 3, max_tokens=60))
    steps_to_first(engine, "b2")
    engine.submit(request("a", "a", 3, max_tokens=60))
    engine.submit(request("long", "a", 90, max_tokens=9))
    ended: list[str] = []
    while not engine.scheduler.num_preemptions:
        ended += [delta.request_id for delta in engine.step() if delta.finish_reason]
    (waits,) = engine.scheduler.waiting
    assert waits.request.request_id == "long" and not ended
    ended += _finished(engine)
    assert len(ended) == 5


def test_keys_that_have_their_shares_take_nothing_from_each_other() -> None:
    """Of sixteen seats one is left over for three keys, and who has it keeps it. Else each would
    take it from another in every step, and their choices would begin again and again."""
    engine = engine_of()
    for i in range(20):
        for key in "abc":
            engine.submit(request(f"{key}{i}", key, 4, max_tokens=120))
    for _ in range(30):
        engine.step()
    assert len(engine.scheduler.running) == SEATS and engine.scheduler.num_preemptions == 0
    engine.abort_all()


@pytest.mark.parametrize("later_s", [0.0, 100.0])
@pytest.mark.parametrize(
    ("running", "comes", "place"), [(1, 0, 0), (0, 0, 0), (-1, 0, SEATS), (80, 70, 0)]
)
def test_a_priority_gives_no_seat_to_a_key_of_a_later_one(
    running: int, comes: int, place: int, later_s: float
) -> None:
    """Beyond 64 all are one. Who makes way does so once, though its turn comes first by now."""
    engine = engine_of()
    for i in range(SEATS):
        engine.submit(replace(request(f"a{i}", "a", 4, max_tokens=30), priority=running))
    steps_to_first(engine, "a0")
    engine.submit(replace(request("b", "b", 4), priority=comes, arrival_s=later_s))
    assert list(_finished(engine)).index("b") == place
    assert engine.scheduler.num_preemptions == (place == 0)


def _finished(engine: Engine) -> Iterator[str]:
    while engine.has_work:
        for delta in engine.step():
            if delta.finish_reason:
                yield delta.request_id


@pytest.mark.parametrize("num_before", [0, 40])
def test_keys_that_ask_for_as_much_are_served_as_fast(num_before: int) -> None:
    """Also where one was served alone before the other came, which saved nothing up."""
    engine = engine_of()
    for key, num in (("a", num_before + 40), ("b", 40)):
        for i in range(num):
            engine.submit(request(f"{key}{i}", key, 10, max_tokens=10))
        if key == "a":
            assert len(list(islice(_finished(engine), num_before))) == num_before
    ended = list(_finished(engine))
    assert 70 < len(ended) <= 80
    of_b = [name.startswith("b") for name in ended[:40]]
    assert 14 <= sum(of_b) <= 26  # not 0, as in order of arrival


def test_what_does_not_wait_cannot_be_taken() -> None:
    engine = engine_of()
    for i in range(SEATS + 1):
        engine.submit(request(f"{i}", "a", 4, max_tokens=9))
    engine.step()
    with pytest.raises(ValueError, match="does not wait"):
        engine.scheduler.waiting.remove(engine.scheduler.running[0])
    engine.abort_all()


def test_a_request_of_more_choices_than_seats_ends_beside_others() -> None:
    """Some other request always runs; it does not wait until nobody does."""
    engine = engine_of()
    engine.submit(request("other0", "b", 4, max_tokens=30))
    engine.submit(request("many", "a", 4, n=100, max_tokens=3))
    assert "many" in {delta.request_id for _ in range(2) for delta in engine.step()}
    ended: list[str] = []
    for i in range(1, 400):
        ended += [delta.request_id for delta in engine.step() if delta.finish_reason]
        if i % 10 == 0:
            engine.submit(request(f"other{i}", "b", 4, max_tokens=30))
        if ended.count("many") == 100:
            break
    assert ended.count("many") == 100 and engine.has_work
    engine.abort_all()


def test_choices_that_will_fork_wait_for_a_first_token_and_have_their_seats() -> None:
    """Requests are counted as far as free seats would take them."""
    engine = make_engine(drafts=False, max_num_seqs=6)
    engine.submit(request("forks", "a", 200, n=3, max_tokens=9))
    engine.step()
    assert engine.scheduler.num_awaiting_first == 3, "its prompt takes two steps"
    for i in range(5):
        engine.submit(request(f"waits{i}", "a", 4, max_tokens=9))
    assert engine.scheduler.num_awaiting_first == 6, "three seats are free, not five"
    finish(engine)
    assert engine.scheduler.num_awaiting_first == 0
