"""API keys: who sends a request, what they may call, and how much.

A key is known by the SHA-256 of its secret and compared with all keys in constant time; the secret
itself is not kept. Its limits are token buckets (a minute's worth may be saved up) and a number of
open requests; a request above them is a 429 with Retry-After.

All state is touched from the event loop's thread only.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from starlette.types import Scope

from server.api.engines.submission import RequestAccount, Submission
from server.config import DEFAULT_TASK, KeyConfig
from server.errors import (
    AuthenticationError,
    ConfigError,
    PermissionDeniedError,
    RateLimitedError,
)
from server.types import Request

ADMIN_PREFIX = "/v1/tasks"
"""Everything at and below this path needs an admin key, whatever the method."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key by its name and digest; the key itself is not kept.

    tasks: names of tasks and models that it may use; None is all. The limits: None is none.
    """

    key_id: str
    digest: bytes
    admin: bool = False
    tasks: frozenset[str] | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None

    @staticmethod
    def from_config(config: KeyConfig) -> ApiKey:
        """The ApiKey of one entry of server.yaml. Raises ConfigError when it has no secret."""
        return ApiKey(
            config.id,
            hashlib.sha256(config.secret().encode()).digest(),
            config.admin,
            tasks=None if config.tasks is None else frozenset(config.tasks),
            requests_per_minute=config.requests_per_minute,
            tokens_per_minute=config.tokens_per_minute,
            max_concurrent_requests=config.max_concurrent_requests,
        )

    def may_use(self, task: str, model: str) -> bool:
        """Whether the key may run `task` on `model`.

        A model's name in the list allows the default task on that model: that is what a request
        whose `model` field names a model runs.
        """
        if self.tasks is None or task in self.tasks:
            return True
        return task == DEFAULT_TASK and model in self.tasks


class Bucket:
    """A token bucket: `per_minute` flow in each minute, and at most so many are saved up. None is
    no limit.

    A full bucket lets an amount above a minute's worth through and goes below zero: so the mean
    rate holds, and no request is refused for ever.
    """

    def __init__(self, per_minute: float | None, now_s: float) -> None:
        self.is_limited = per_minute is not None
        self._most = float(per_minute or 0.0)
        self._rate = self._most / 60.0
        self._level = self._most
        self._at_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount` can be taken; 0.0 is now."""
        if not self.is_limited or amount <= 0.0:
            return 0.0
        return max(0.0, (min(amount, self._most) - self.level(now_s)) / self._rate)

    def level(self, now_s: float) -> float:
        """What can be taken; negative after an amount above a minute's worth."""
        self._level = min(self._most, self._level + (now_s - self._at_s) * self._rate)
        self._at_s = now_s
        return self._level

    def take(self, amount: float) -> None:
        """Take it. A negative amount gives back what was taken and not used."""
        self._level = min(self._most, self._level - amount)


class KeyUse(Protocol):
    """What one key has open and has used. OwnUse keeps it for one process; a fleet for many."""

    async def enter(self) -> None:
        """Take a seat and one request. Raises RateLimitedError and takes neither then."""

    def leave(self) -> None:
        """Give the seat back."""

    async def reserve(self, amount: int) -> None:
        """Take so many tokens. Raises RateLimitedError and takes none then."""

    def give_back(self, amount: int) -> None:
        """So many of the reserved tokens were not used."""


class OwnUse:
    """The account of a key that is used in this process alone. A KeyUse that never waits."""

    def __init__(self, key: ApiKey) -> None:
        self._key = key
        self._num_open = 0
        now_s = time.monotonic()
        self._requests = Bucket(key.requests_per_minute, now_s)
        self._tokens = Bucket(key.tokens_per_minute, now_s)

    async def enter(self) -> None:
        most = self._key.max_concurrent_requests
        if most is not None and self._num_open >= most:
            raise too_many_open(most)
        wait_s = self._requests.wait_s(1, time.monotonic())
        if wait_s > 0:
            raise too_many_requests(self._key, wait_s)
        self._requests.take(1)
        self._num_open += 1

    def leave(self) -> None:
        self._num_open -= 1

    async def reserve(self, amount: int) -> None:
        wait_s = self._tokens.wait_s(amount, time.monotonic())
        if wait_s > 0:
            raise too_many_tokens(wait_s)
        self._tokens.take(amount)

    def give_back(self, amount: int) -> None:
        self._tokens.take(-amount)


def too_many_open(most: int) -> RateLimitedError:
    """The key has as many requests open as it may."""
    return RateLimitedError(
        f"The key may have {most} requests open at once. Try again later.", retry_after_s=1.0
    )


def too_many_requests(key: ApiKey, wait_s: float) -> RateLimitedError:
    """The key has sent as many requests as it may."""
    return RateLimitedError(
        f"The key may send {key.requests_per_minute} requests a minute. Try again later.",
        retry_after_s=math.ceil(wait_s),
    )


def too_many_tokens(wait_s: float) -> RateLimitedError:
    """The key has used as many tokens as it may."""
    return RateLimitedError(
        "The key's tokens per minute are used up. Try again later.",
        retry_after_s=math.ceil(wait_s),
    )


class Caller:
    """One HTTP request from the gate to its last byte: who calls, and what it has at the engines.

    task, model: what it asked for, for the log.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.started_s = time.monotonic()
        self.key: ApiKey | None = None  # written by Keyring.enter, as _use
        self.task = ""
        self.model = ""
        self.submissions: list[Submission] = []
        self._use: KeyUse | None = None
        self._reserved = 0

    @property
    def tenant(self) -> str:
        """The key's id, "" without keys."""
        return "" if self.key is None else self.key.key_id

    @property
    def may_use(self) -> Callable[[str, str], bool] | None:
        """Whether it may run a task on a model; None without keys."""
        return None if self.key is None else self.key.may_use

    @property
    def accounts(self) -> list[RequestAccount]:
        """Of all that it has at the engines."""
        return [account for submission in self.submissions for account in submission.accounts]

    async def reserve(self, requests: Sequence[Request]) -> None:
        """Take the tokens of prompts and of all that may be generated from the key's rate; `leave`
        gives back what was not. Raises RateLimitedError when the key has used up its tokens."""
        if self._use is not None:
            amount = sum(
                len(r.prompt_ids) + r.num_choices * r.sampling.max_tokens for r in requests
            )
            await self._use.reserve(amount)
            self._reserved = amount

    def leave(self) -> None:
        """The response has ended: give back the key's seat and unused tokens. Called once."""
        use = self._use
        if use is None:
            return
        use.leave()
        used = sum(a.num_prompt_tokens + a.num_completion_tokens for a in self.accounts)
        if used < self._reserved:
            use.give_back(self._reserved - used)


class Keyring:
    """All keys of the server, and what each has used. Raises ConfigError for equal secrets.

    use: makes the account of a key.
    """

    def __init__(self, keys: Iterable[ApiKey], use: Callable[[ApiKey], KeyUse] = OwnUse) -> None:
        self._keys = tuple(keys)
        if len({key.digest for key in self._keys}) != len(self._keys):
            raise ConfigError("keys: two keys have the same secret")
        self._uses = {key.key_id: use(key) for key in self._keys}

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, scope: Scope, from_browser: bool = False) -> ApiKey:
        """The key of a request, compared with all keys. Raises AuthenticationError.

        from_browser: what is asked for is a page, or read by one: then the key may also be the
        password of HTTP's Basic authentication, which browsers ask for. Elsewhere it may be where
        the browser says that a page of this server asks: it sends it on behalf of others, too.
        """
        given = b""
        headers = scope["headers"]
        sent = [value for name, value in headers if name == b"authorization"]
        if len(sent) == 1:  # of several, a proxy and we might each believe another one
            scheme, _, rest = sent[0].partition(b" ")
            if scheme.lower() == b"bearer":
                given = rest.strip()
            elif scheme.lower() == b"basic" and (
                from_browser or (b"sec-fetch-site", b"same-origin") in headers
            ):
                with contextlib.suppress(ValueError):
                    given = base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
        digest = hashlib.sha256(given).digest()
        found: ApiKey | None = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None:
            raise AuthenticationError(
                "No API key was given: send it as 'Authorization: Bearer KEY'."
                if not given
                else "The API key is not valid.",
                headers=(
                    ("www-authenticate", 'Basic realm="Tailor"' if from_browser else "Bearer"),
                ),
            )
        return found

    async def enter(self, caller: Caller, key: ApiKey) -> None:
        """The caller has this key, and takes one of its seats until `leave`.

        Raises RateLimitedError above the key's limits.
        """
        caller.key = key
        use = self._uses[key.key_id]
        await use.enter()
        caller._use = use


def check_admin(path: str, key: ApiKey | None, further: frozenset[str] = frozenset()) -> None:
    """Raise PermissionDeniedError for an admin path without an admin key.

    path: decoded, as the router matches it. further: more admin paths. Without any key configured
    these routes are closed: they change the server for everyone.
    """
    is_admin = path == ADMIN_PREFIX or path.startswith(f"{ADMIN_PREFIX}/") or path in further
    if is_admin and (key is None or not key.admin):
        raise PermissionDeniedError(
            "This route needs an admin key, and the server has none (set TAILOR_ADMIN_KEY)."
            if key is None
            else "This route needs an admin key."
        )
