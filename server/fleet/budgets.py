"""One budget per key for all ingresses, as server.api.keys.OwnUse is for a single server.

The desk holds each key's buckets and seats (Budgets). An ingress takes what a request needs before
it lets the request in, and a little more where the limit is large, so that most requests of such a
key need no call. So no more than the limit is ever let in; an ingress gives back within TELL_S what
it has taken and not used.

Without the desk, an ingress lets in its share of what was left when it last heard, and of the rate.
Each ingress tells a new desk what it has let in, and the desk grants nothing before all had the
time to tell it. So the death of a desk does not refill a key's bucket.

This module does not import Ray. Each side belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Literal

from server.api.keys import ApiKey, Bucket, too_many_open, too_many_requests, too_many_tokens

TELL_S = 1.0
"""How often an ingress tells what it has open and gives back what it has left."""
YOUNG_S = 2.0
"""A desk gives nothing out for so long after its start: until every ingress has told it."""
_GONE_S = 5.0  # seats of an ingress that tells nothing for so long are free
_FORGOTTEN_S = 300.0  # who tells nothing for so long owes nothing either
_AHEAD = 0.01  # of a minute's worth that is taken beyond what is needed
_ANSWER_S = 1.0  # the desk's time for an answer
_SEAT_AGAIN_S = 0.04  # a seat that another ingress has just given back may be on its way
_SEAT_TRIES = 3
_PAUSE_S = 0.02  # between two tellings, which are of all that was given back meanwhile
_AWAY_S = 1.0  # a desk that did not answer is left alone for so long


Limit = Literal["requests", "tokens"]
"""Of a minute. Each has a ledger of its own; the seats are in that of requests."""


def _per_minute(key: ApiKey, limit: Limit) -> int | None:
    return key.requests_per_minute if limit == "requests" else key.tokens_per_minute


@dataclass(frozen=True, slots=True)
class Claim:
    """An ingress's claim on one limit of a key.

    wanted: what is negative is given back. seat: whether num_open, the key's open
    requests at this ingress, holds one that is not let in yet. turn: of this ingress's claims for
    the limit, ascending. desk_id: of the desk that answered it last, which alone takes things back.
    spent: what it let in without asking. owed: of all that it let in, what its share of the rate
    has not earned again, a minute's worth at most; for a desk that does not know it.
    """

    ingress_id: str
    key: ApiKey
    limit: Limit
    turn: int
    desk_id: str = ""
    wanted: float = 0.0
    seat: bool = False
    num_open: int = 0
    spent: float = 0.0
    owed: float = 0.0


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer. given: what the ingress may use now, at least what it wanted; or nothing.

    left: for all. wait_s: when to ask again, 0.0 where it was granted.
    has_seat: False where no seat is free. is_young: the desk gives nothing out yet. desk_id:
    another one after each start.
    """

    desk_id: str
    given: float = 0.0
    left: float = 0.0
    wait_s: float = 0.0
    has_seat: bool = True
    is_young: bool = False


class _Ledger:
    """What all ingresses have of one limit of a key."""

    def __init__(self, key: ApiKey, limit: Limit, now_s: float) -> None:
        self.seats = key.max_concurrent_requests
        self.most = _per_minute(key, limit)
        self.bucket = Bucket(self.most, now_s)
        self.open: dict[str, tuple[int, int, float]] = {}  # turn, requests, when, by ingress

    def note(self, claim: Claim, now_s: float) -> None:
        """What the ingress has open and has let in without asking."""
        before = self.open.get(claim.ingress_id)
        if before is None:  # each that is replaced or started again has another id
            self.open = {i: o for i, o in self.open.items() if now_s - o[2] < _FORGOTTEN_S}
        self.bucket.take(claim.owed if before is None else claim.spent)
        if before is None or claim.turn > before[0]:
            self.open[claim.ingress_id] = (claim.turn, claim.num_open, now_s)

    def has_seat(self, claim: Claim, now_s: float) -> bool:
        """Whether the request that claim.num_open counts in may stay."""
        if self.seats is None or not claim.seat:
            return True
        others = sum(
            num_open
            for ingress_id, (_, num_open, told_s) in self.open.items()
            if ingress_id != claim.ingress_id and now_s - told_s < _GONE_S
        )
        return others + claim.num_open <= self.seats


class Budgets:
    """The desk's side. num_ingresses: how many there are. clock: seconds."""

    def __init__(self, num_ingresses: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.desk_id = secrets.token_hex(8)
        self._num_ingresses = num_ingresses
        self._clock = clock
        self._started_s = clock()
        # A key with new limits gets new ones.
        self.ledgers: dict[tuple[ApiKey, Limit], _Ledger] = {}

    def take(self, claim: Claim) -> Grant:
        """Answer a claim. All of it is granted or nothing."""
        now_s, amount = self._clock(), claim.wanted
        new = _Ledger(claim.key, claim.limit, now_s)
        ledger = self.ledgers.setdefault((claim.key, claim.limit), new)
        bucket = ledger.bucket
        ledger.note(claim, now_s)
        if claim.desk_id == self.desk_id:
            bucket.take(min(0.0, amount))
        if now_s - self._started_s < YOUNG_S:
            return Grant(self.desk_id, is_young=True)
        if not ledger.has_seat(claim, now_s):
            turn, num_open, told_s = ledger.open[claim.ingress_id]
            ledger.open[claim.ingress_id] = (turn, max(0, num_open - 1), told_s)
            return Grant(self.desk_id, has_seat=False)
        wait_s, given = bucket.wait_s(amount, now_s), 0.0
        if wait_s == 0.0 and ledger.most is not None and amount > 0.0:
            # Ahead for the next requests, too, where there is enough.
            left = bucket.level(now_s) - amount
            ahead = max(0.0, min(_AHEAD * ledger.most, left / (4 * self._num_ingresses)))
            given = amount + int(ahead)
            bucket.take(given)
        return Grant(self.desk_id, given, max(0.0, bucket.level(now_s)), wait_s)


class _Account:
    """One limit of a key at one ingress, which the desk keeps. num_open: the key's requests there,
    where seats are limited. held: taken and not used. spent: let in without asking."""

    def __init__(self, key: ApiKey, limit: Limit, uses: FleetUses) -> None:
        per_minute, now_s = _per_minute(key, limit), uses.clock()
        self._key = replace(key, digest=b"")  # nothing of a secret leaves the process
        self._limit = limit
        self._uses = uses
        self.is_limited = per_minute is not None
        self.seats = key.max_concurrent_requests if limit == "requests" else None
        self.num_open = self._told_open = 0
        self._held = self._spent = 0.0
        self._turn = 0
        self._desk_id = ""
        self._most = float(per_minute or 1)
        self._share = self._most / uses.num_ingresses
        self._used = Bucket(self._share, now_s)
        self._own: Bucket | None = None  # while the desk is away
        self._left, self._heard_s = 0.0, -1e9

    async def take(self, amount: float) -> None:
        """Take of the limit, and a seat. Raises RateLimitedError."""
        amount, most = amount if self.is_limited else 0.0, self.seats
        if self._held >= amount and most is None:
            self._held -= amount
            self._use(amount)
            return
        grant = await self._claim(amount, seat=most is not None)
        for _ in range(_SEAT_TRIES):
            if grant is None or grant.has_seat:
                break
            self.num_open -= 1  # who waits holds no seat that another's claim would count
            try:
                await asyncio.sleep(_SEAT_AGAIN_S)
            finally:
                self.num_open += 1
            grant = await self._claim(amount, seat=True)
        if grant is None or grant.is_young:
            if most is not None and self.num_open > max(1, most // self._uses.num_ingresses):
                raise too_many_open(most)
            wait_s = self._wait_s(amount)
        elif most is not None and not grant.has_seat:
            raise too_many_open(most)
        else:
            wait_s = grant.wait_s
            if wait_s == 0.0:
                self._held += grant.given - amount
                self._use(amount)
        if wait_s > 0.0:
            is_requests = self._limit == "requests"
            raise too_many_requests(self._key, wait_s) if is_requests else too_many_tokens(wait_s)

    def give_back(self, amount: float) -> None:
        """It was taken and not used."""
        if self.is_limited:
            self._use(-amount)
            self._held += amount
            self._uses.news.set()

    async def tell(self, *, is_open: bool) -> None:
        """Tell the desk what is open, and give back what is left of what was taken. is_open:
        whether the key has any request here."""
        left, owes = self._held, self._spent or self._owed() > 0.0
        if not (owes or left or is_open or self._told_open):
            return
        self._held = 0.0
        if await self._claim(-left) is None:  # it is away: ours still
            self._held += left

    async def _claim(self, wanted: float, *, seat: bool = False) -> Grant | None:
        """Ask the desk; None while it is away."""
        self._turn += 1
        spent, self._spent = self._spent, 0.0
        grant = await self._uses.ask(
            Claim(
                self._uses.ingress_id, self._key, self._limit, self._turn, self._desk_id,
                wanted, seat, self.num_open, spent, self._owed(),
            )
        )  # fmt: skip
        if grant is None:
            self._spent += spent
            return None
        if grant.desk_id != self._desk_id:
            # What was taken of another desk is not in this one's books: it is owed.
            if self._desk_id:
                self._held = 0.0
            self._desk_id = grant.desk_id
        if not grant.is_young and grant.has_seat:  # it is there, and so much is left
            self._left, self._heard_s, self._own = grant.left, self._uses.clock(), None
        self._told_open = self.num_open
        return grant

    def _owed(self) -> float:
        """See Claim."""
        return self._share - self._used.level(self._uses.clock()) if self.is_limited else 0.0

    def _use(self, amount: float) -> None:
        """A request was let in. Negative: it was not used after all."""
        least = self._share - self._most
        self._used.take(amount)
        self._used.take(min(0.0, self._used.level(self._uses.clock()) - least))

    def _wait_s(self, amount: float) -> float:
        """Let in without the desk; 0.0, or the seconds to wait."""
        if not self.is_limited or amount <= 0.0:
            return 0.0
        now_s = self._uses.clock()
        if self._own is None:
            self._own = Bucket(self._share, now_s)
            is_fresh = now_s - self._heard_s < 2.0 * TELL_S
            self._own.take(self._share - (self._left / self._uses.num_ingresses * is_fresh))
        wait_s = self._own.wait_s(amount, now_s)
        if wait_s == 0.0:
            self._own.take(amount)
            self._use(amount)
            self._spent += amount
        return wait_s


class FleetUse:
    """A server.api.keys.KeyUse whose accounts the desk keeps. See FleetUses."""

    def __init__(self, key: ApiKey, uses: FleetUses) -> None:
        self._requests = _Account(key, "requests", uses)
        self._tokens = _Account(key, "tokens", uses)
        self._news = uses.news
        both = (self._requests, self._tokens)
        self.told = [one for one in both if one.is_limited or one.seats is not None]

    async def enter(self) -> None:
        self._requests.num_open += 1
        try:
            await self._requests.take(1.0)
        except BaseException:
            self._requests.num_open -= 1
            raise

    def leave(self) -> None:
        self._requests.num_open -= 1
        if self._requests.seats is not None:
            self._news.set()

    async def reserve(self, amount: int) -> None:
        await self._tokens.take(amount)

    def give_back(self, amount: int) -> None:
        self._tokens.give_back(amount)

    async def tell(self) -> None:
        """Tell the desk what is open and what is left of what was taken."""
        is_open = self._requests.num_open > 0
        await asyncio.gather(*(account.tell(is_open=is_open) for account in self.told))


class FleetUses:
    """The accounts of all keys at one ingress.

        uses = FleetUses("ingress-1", num_ingresses=4, take=desk.take)
        keyring = Keyring(keys, uses.of)
        await uses.run()      # until cancelled

    take: Budgets.take of the desk, wherever it is; may raise anything while that is away.
    """

    def __init__(
        self,
        ingress_id: str,
        *,
        num_ingresses: int,
        take: Callable[[Claim], Awaitable[Grant]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ingress_id = ingress_id
        self.num_ingresses = num_ingresses
        self.clock = clock
        self._take = take
        self._uses: list[FleetUse] = []
        self.news = asyncio.Event()  # something is to be told soon
        self._away_until_s = 0.0

    def of(self, key: ApiKey) -> FleetUse:
        """The account of a key."""
        use = FleetUse(key, self)
        if use.told:
            self._uses.append(use)
        return use

    async def ask(self, claim: Claim) -> Grant | None:
        """The desk's answer; None while it is away."""
        if self.clock() < self._away_until_s:
            return None
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await self._take(claim)
        except Exception:
            self._away_until_s = self.clock() + _AWAY_S
            return None

    async def run(self) -> None:
        """Tell the desk, each TELL_S and when something was given back."""
        while True:
            self.news.clear()
            await asyncio.gather(*(use.tell() for use in self._uses))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TELL_S):
                    await self.news.wait()
            await asyncio.sleep(_PAUSE_S)
