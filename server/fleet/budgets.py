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


Pair = tuple[float, float]
"""Of requests, and of tokens."""


@dataclass(frozen=True, slots=True)
class Claim:
    """An ingress's claim on a key's budget.

    wanted: what is negative is given back. seat: whether num_open, the key's open
    requests at this ingress, holds one that is not let in yet. turn: of this ingress's claims for
    the key, ascending. desk_id: of the desk that answered it last, which alone takes things back.
    spent: what it let in without asking. owed: of all that it let in, what its share of the rate
    has not earned again, a minute's worth at most; for a desk that does not know it.
    """

    ingress_id: str
    key: ApiKey
    turn: int
    desk_id: str = ""
    wanted: Pair = (0.0, 0.0)
    seat: bool = False
    num_open: int = 0
    spent: Pair = (0.0, 0.0)
    owed: Pair = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer. given: what the ingress may use now, at least what it wanted; or nothing.

    left: for all. wait_s: when to ask again, 0.0 where it was granted.
    has_seat: False where no seat is free. is_young: the desk gives nothing out yet. desk_id:
    another one after each start.
    """

    desk_id: str
    given: Pair = (0.0, 0.0)
    left: Pair = (0.0, 0.0)
    wait_s: float = 0.0
    has_seat: bool = True
    is_young: bool = False


class _Ledger:
    """What all ingresses have of one key."""

    def __init__(self, key: ApiKey, now_s: float) -> None:
        self.seats = key.max_concurrent_requests
        self.mosts = (key.requests_per_minute, key.tokens_per_minute)
        self.buckets = tuple(Bucket(most, now_s) for most in self.mosts)
        self.open: dict[str, tuple[int, int, float]] = {}  # turn, requests, when, by ingress

    def note(self, claim: Claim, now_s: float) -> None:
        """What the ingress has open and has let in without asking."""
        before = self.open.get(claim.ingress_id)
        if before is None:  # each that is replaced or started again has another id
            self.open = {i: o for i, o in self.open.items() if now_s - o[2] < _FORGOTTEN_S}
        passed = claim.owed if before is None else claim.spent
        for bucket, amount in zip(self.buckets, passed, strict=True):
            bucket.take(amount)
        if before is None or claim.turn > before[0]:
            self.open[claim.ingress_id] = (claim.turn, claim.num_open, now_s)

    def left(self, now_s: float) -> Pair:
        """What can be taken."""
        requests, tokens = (max(0.0, bucket.level(now_s)) for bucket in self.buckets)
        return requests, tokens

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
        self.ledgers: dict[ApiKey, _Ledger] = {}  # a key with new limits gets a new one

    def take(self, claim: Claim) -> Grant:
        """Answer a claim. All of it is granted or nothing."""
        now_s = self._clock()
        ledger = self.ledgers.setdefault(claim.key, _Ledger(claim.key, now_s))
        ledger.note(claim, now_s)
        limits = list(zip(ledger.buckets, ledger.mosts, claim.wanted, strict=True))
        if claim.desk_id == self.desk_id:
            for bucket, _, amount in limits:
                bucket.take(min(0.0, amount))
        if now_s - self._started_s < YOUNG_S:
            return Grant(self.desk_id, is_young=True)
        if not ledger.has_seat(claim, now_s):
            turn, num_open, told_s = ledger.open[claim.ingress_id]
            ledger.open[claim.ingress_id] = (turn, max(0, num_open - 1), told_s)
            return Grant(self.desk_id, has_seat=False)
        wait_s = max(bucket.wait_s(amount, now_s) for bucket, _, amount in limits)
        if wait_s > 0.0:
            return Grant(self.desk_id, left=ledger.left(now_s), wait_s=wait_s)
        given = [0.0, 0.0]
        for i, (bucket, most, amount) in enumerate(limits):
            if most is not None and amount > 0.0:
                # Ahead for the next requests, too, where there is enough.
                left = bucket.level(now_s) - amount
                ahead = max(0.0, min(_AHEAD * most, left / (4 * self._num_ingresses)))
                given[i] = amount + int(ahead)
                bucket.take(given[i])
        return Grant(self.desk_id, (given[0], given[1]), ledger.left(now_s))


class _Part:
    """One limit of a key at one ingress. held: taken and not used. spent: let in without asking."""

    def __init__(self, per_minute: int | None, num_ingresses: int, now_s: float) -> None:
        self.is_limited = per_minute is not None
        self.held = 0.0
        self.spent = 0.0
        self._num_ingresses = num_ingresses
        self._most = float(per_minute or 1)
        self._share = self._most / num_ingresses
        self._used = Bucket(self._share, now_s)
        self._own: Bucket | None = None  # while the desk is away
        self._left, self._heard_s = 0.0, -1e9

    def hear(self, left: float, now_s: float) -> None:
        """The desk is there, and so much is left."""
        self._left, self._heard_s, self._own = left, now_s, None

    def owed(self, now_s: float) -> float:
        """See Claim."""
        return self._share - self._used.level(now_s) if self.is_limited else 0.0

    def use(self, amount: float, now_s: float) -> None:
        """A request was let in. Negative: it was not used after all."""
        least = self._share - self._most
        self._used.take(amount)
        self._used.take(min(0.0, self._used.level(now_s) - least))

    def wait_s(self, amount: float, now_s: float) -> float:
        """Let in without the desk; 0.0, or the seconds to wait."""
        if not self.is_limited or amount <= 0.0:
            return 0.0
        if self._own is None:
            self._own = Bucket(self._share, now_s)
            is_fresh = now_s - self._heard_s < 2.0 * TELL_S
            self._own.take(self._share - (self._left / self._num_ingresses if is_fresh else 0.0))
        wait_s = self._own.wait_s(amount, now_s)
        if wait_s == 0.0:
            self._own.take(amount)
            self.use(amount, now_s)
            self.spent += amount
        return wait_s


class FleetUse:
    """A server.api.keys.KeyUse whose account the desk keeps. See FleetUses."""

    def __init__(self, key: ApiKey, uses: FleetUses) -> None:
        now_s = uses.clock()
        self._key = replace(key, digest=b"")  # nothing of a secret leaves the process
        self._seats = key.max_concurrent_requests
        self._uses = uses
        self._open = 0
        self._turn = 0
        self._told_open = 0
        self._desk_id = ""
        self._requests = _Part(key.requests_per_minute, uses.num_ingresses, now_s)
        self._tokens = _Part(key.tokens_per_minute, uses.num_ingresses, now_s)
        self._parts = (self._requests, self._tokens)
        self.is_limited = any(p.is_limited for p in self._parts) or self._seats is not None

    async def enter(self) -> None:
        self._open += 1
        try:
            await self._take(self._requests, 1.0, seat=self._seats is not None)
        except BaseException:
            self._open -= 1
            raise

    def leave(self) -> None:
        self._open -= 1
        if self._seats is not None:
            self._uses.news.set()

    async def reserve(self, amount: int) -> None:
        await self._take(self._tokens, amount)

    def give_back(self, amount: int) -> None:
        if self._tokens.is_limited:
            self._tokens.use(-amount, self._uses.clock())
            self._tokens.held += amount
            self._uses.news.set()

    async def tell(self) -> None:
        """Tell the desk what is open, and give back what is left of what was taken."""
        now_s = self._uses.clock()
        left = [part.held for part in self._parts]
        owes = any(part.spent or part.owed(now_s) > 0.0 for part in self._parts)
        if not (owes or any(left) or self._open or self._told_open):
            return
        for part in self._parts:
            part.held = 0.0
        if await self._claim((-left[0], -left[1])) is None:  # it is away: ours still
            for part, amount in zip(self._parts, left, strict=True):
                part.held += amount

    # -- parts -----------------------------------------------------------------------------

    async def _take(self, part: _Part, amount: float, *, seat: bool = False) -> None:
        """Take of one limit, and a seat. Raises RateLimitedError."""
        amount = amount if part.is_limited else 0.0
        if part.held >= amount and not seat:
            part.held -= amount
            part.use(amount, self._uses.clock())
            return
        is_requests = part is self._requests
        wanted = (amount, 0.0) if is_requests else (0.0, amount)
        grant = await self._claim(wanted, seat=seat)
        for _ in range(_SEAT_TRIES):
            if grant is None or grant.has_seat:
                break
            self._open -= 1  # who waits holds no seat that another's claim would count
            try:
                await asyncio.sleep(_SEAT_AGAIN_S)
            finally:
                self._open += 1
            grant = await self._claim(wanted, seat=seat)
        most = self._seats if seat else None
        if grant is None or grant.is_young:
            if most is not None and self._open > max(1, most // self._uses.num_ingresses):
                raise too_many_open(most)
            wait_s = part.wait_s(amount, self._uses.clock())
        elif most is not None and not grant.has_seat:
            raise too_many_open(most)
        else:
            wait_s = grant.wait_s
            if wait_s == 0.0:
                part.held += sum(grant.given) - amount
                part.use(amount, self._uses.clock())
        if wait_s > 0.0:
            raise too_many_requests(self._key, wait_s) if is_requests else too_many_tokens(wait_s)

    async def _claim(self, wanted: Pair, *, seat: bool = False) -> Grant | None:
        """Ask the desk; None while it is away."""
        now_s = self._uses.clock()
        self._turn += 1
        requests, tokens = self._parts
        spent = (requests.spent, tokens.spent)
        owed = (requests.owed(now_s), tokens.owed(now_s))
        requests.spent = tokens.spent = 0.0
        grant = await self._uses.ask(
            Claim(
                self._uses.ingress_id, self._key, self._turn, self._desk_id,
                wanted, seat, self._open, spent, owed,
            )
        )  # fmt: skip
        if grant is None:
            requests.spent += spent[0]
            tokens.spent += spent[1]
            return None
        if grant.desk_id != self._desk_id:
            # What was taken of another desk is not in this one's books: it is owed.
            if self._desk_id:
                requests.held = tokens.held = 0.0
            self._desk_id = grant.desk_id
        if not grant.is_young and grant.has_seat:
            for part, left in zip(self._parts, grant.left, strict=True):
                part.hear(left, self._uses.clock())
        self._told_open = self._open
        return grant


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
        if use.is_limited:
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
