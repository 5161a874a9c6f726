"""One budget a key for all ingresses: never more than the limit, whatever dies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable

import pytest

from server.api.keys import ApiKey
from server.errors import RateLimitedError
from server.fleet.budgets import YOUNG_S, Budgets, Claim, FleetUse, FleetUses, Grant


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Fleet:
    """Some ingresses and a desk, which can be lost. One key."""

    def __init__(self, num_ingresses: int = 3, **limits: int) -> None:
        self.clock = Clock()
        self.num = num_ingresses
        self.key = ApiKey("k", b"", **limits)  # type: ignore[arg-type]
        self.desk: Budgets | None = Budgets(num_ingresses, self.clock)
        self.num_asked = 0
        self.clock.now_s += YOUNG_S
        self.uses: list[FleetUse] = []
        self.ingresses: list[FleetUses] = []
        for i in range(num_ingresses):
            uses = FleetUses(f"i{i}", num_ingresses=num_ingresses, take=self.take, clock=self.clock)
            self.ingresses.append(uses)
            self.uses.append(uses.of(self.key))

    async def take(self, claim: Claim) -> Grant:
        await asyncio.sleep(0)
        self.num_asked += 1
        if self.desk is None:
            raise ConnectionError
        return self.desk.take(claim)

    def new_desk(self) -> None:
        self.desk = Budgets(self.num, self.clock)

    async def enters(self, i: int) -> bool:
        return await self._may(self.uses[i].enter())

    async def reserves(self, i: int, amount: int) -> bool:
        return await self._may(self.uses[i].reserve(amount))

    async def _may(self, asking: Awaitable[None]) -> bool:
        try:
            await asking
        except RateLimitedError:
            return False
        return True


@pytest.mark.parametrize("seed", range(4))
async def test_no_order_of_events_lets_in_more_than_a_bucket_would(seed: int) -> None:
    """Losses of the desk too: what its loss lets in beyond the bucket is paid back."""
    chance = random.Random(seed)

    fleet = Fleet(requests_per_minute=600, tokens_per_minute=60_000)
    start_s, requests, tokens, num_lost = fleet.clock.now_s, 0, 0, 0
    for _ in range(3000):
        fleet.clock.now_s += chance.random() * 0.05
        i = chance.randrange(3)
        event = chance.random()
        if event < 0.002 and fleet.desk is not None:
            fleet.desk = None
            num_lost += 1
        elif event < 0.01 and fleet.desk is None:
            fleet.new_desk()
        elif event < 0.2:
            await fleet.uses[i].tell()
        elif await fleet.enters(i):
            requests += 1
            fleet.uses[i].leave()
            amount = chance.randrange(1, 1500)
            if await fleet.reserves(i, amount):
                unused = chance.randrange(amount) if chance.random() < 0.3 else 0
                fleet.uses[i].give_back(unused)
                tokens += amount - unused
        past_s = fleet.clock.now_s - start_s
        extra = 1 + num_lost
        assert requests <= 600 * extra + 10.0 * past_s
        assert tokens <= 60_000 * extra + 1000.0 * past_s + 1500
        if num_lost == 0:
            assert requests <= 600 + 10.0 * past_s
    assert requests > 10.0 * past_s * 0.5  # and it does let in


async def test_a_large_limit_asks_seldom_and_what_was_taken_ahead_goes_back() -> None:
    fleet = Fleet(requests_per_minute=6000)
    for _ in range(1000):
        assert await fleet.enters(0)
        fleet.uses[0].leave()
    assert fleet.num_asked < 40
    await fleet.uses[0].tell()
    assert sum([await fleet.enters(1 + i % 2) for i in range(6000)]) == 5000


async def test_seats_are_of_the_whole_fleet() -> None:
    fleet = Fleet(max_concurrent_requests=2)
    assert await fleet.enters(0) and await fleet.enters(1)
    assert not await fleet.enters(2) and not await fleet.enters(0)
    fleet.uses[0].leave()
    await fleet.uses[0].tell()
    assert await fleet.enters(2) and not await fleet.enters(1)
    fleet.clock.now_s += 60.0  # ingresses that are gone hold nothing
    assert await fleet.enters(0) and await fleet.enters(0)


async def test_a_seat_that_is_on_its_way_back_is_waited_for() -> None:
    fleet = Fleet(2, max_concurrent_requests=1)
    assert await fleet.enters(0)
    telling = asyncio.create_task(fleet.ingresses[0].run())
    await asyncio.sleep(0)
    fleet.uses[0].leave()
    assert await fleet.enters(1)
    telling.cancel()
    await asyncio.gather(telling, return_exceptions=True)


async def test_one_of_two_that_wait_at_one_ingress_gets_the_last_seat() -> None:
    fleet = Fleet(1, max_concurrent_requests=1)
    assert await fleet.enters(0)
    waiting = [asyncio.create_task(fleet.enters(0)) for _ in range(2)]
    await asyncio.sleep(0.01)
    fleet.uses[0].leave()
    assert sorted(await asyncio.gather(*waiting)) == [False, True]


async def test_a_lost_desk_gives_nobody_a_full_bucket_again() -> None:
    fleet = Fleet(requests_per_minute=60)
    assert sum([await fleet.enters(0) for _ in range(60)]) == 60
    fleet.desk = None
    fleet.clock.now_s += 1.5
    assert not any([await fleet.enters(i) for i in range(3)])
    fleet.clock.now_s += 1.5  # each earns a third of the rate by itself
    assert sum([await fleet.enters(i % 3) for i in range(9)]) == 0
    fleet.clock.now_s += 2.0
    assert sum([await fleet.enters(i % 3) for i in range(9)]) == 3
    fleet.new_desk()
    fleet.clock.now_s += 1.1
    for use in fleet.uses:
        await use.tell()
    fleet.clock.now_s += YOUNG_S
    assert sum([await fleet.enters(i % 3) for i in range(60)]) < 8  # it knows of the sixty


async def test_an_update_gives_a_key_its_new_limit() -> None:
    """New ingresses have read another server.yaml; the desk stays."""
    before, fleet = Fleet(requests_per_minute=5), Fleet(requests_per_minute=2)
    fleet.desk = before.desk
    assert sum([await before.enters(0) for _ in range(9)]) == 5
    assert sum([await fleet.enters(i % 3) for i in range(9)]) == 2
    fleet = Fleet(requests_per_minute=8)
    fleet.desk = before.desk
    assert sum([await fleet.enters(i % 3) for i in range(9)]) == 8


async def test_the_desk_forgets_ingresses_that_were_replaced() -> None:
    """Each has an id of its own."""
    fleet = Fleet(requests_per_minute=60)
    assert fleet.desk is not None
    for i in range(20):
        fleet.clock.now_s += 100.0
        fleet.desk.take(Claim(f"new{i}", fleet.key, "requests", 1))
    [ledger] = fleet.desk.ledgers.values()
    assert len(ledger.open) < 5


async def test_unused_tokens_come_back_to_all() -> None:
    fleet = Fleet(2, tokens_per_minute=1000)
    assert await fleet.reserves(0, 900)
    assert not await fleet.reserves(1, 500)
    fleet.uses[0].give_back(700)
    await fleet.uses[0].tell()
    assert await fleet.reserves(1, 700)
    assert await fleet.reserves(0, 90) and not await fleet.reserves(1, 50)
