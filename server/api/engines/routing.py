"""Chooses which engine of a model serves a Request."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence

from server.api.engines.slot import EngineSlot
from server.errors import LoadingError, NoEngineError
from server.types import Request

BOUNDED_LOAD = 1.25
"""A task leaves its home engine when that has more than this times the mean load."""


def route(slots: Sequence[EngineSlot], request: Request) -> EngineSlot:
    """Rendezvous hashing by task with bounded load, then least load.

    The home engine of a task is the one with the highest hash of (task, engine). It is left
    while it holds more than BOUNDED_LOAD times the mean number of choices.
    slots: those of the Request's model. Raises LoadingError and NoEngineError.
    """
    ready = [slot for slot in slots if slot.state == "ready"]
    if not ready:
        if any(slot.state == "loading" for slot in slots):
            raise LoadingError("The model is still being loaded.", retry_after_s=2.0)
        back_s = min((s.retry_at_s for s in slots if s.state == "restarting"), default=None)
        raise NoEngineError(
            "No engine of this model is running.",
            retry_after_s=None
            if back_s is None
            else max(1.0, math.ceil(back_s - time.monotonic())),
        )
    # A hanging engine may recover: it gets Requests only when its model has no other.
    ready = [slot for slot in ready if slot.serves] or ready
    if len(ready) == 1:
        return ready[0]
    ranked = sorted(ready, key=lambda slot: _affinity(request, slot.spec.name))
    mean = (sum(slot.load for slot in ready) + request.num_choices) / len(ready)
    home = ranked[-1]
    if home.load + request.num_choices <= max(BOUNDED_LOAD * mean, request.num_choices):
        return home
    return min(reversed(ranked), key=lambda slot: slot.load)


def _affinity(request: Request, engine: str) -> bytes:
    own = f"{request.task}\0{engine}{request.adapter and chr(0)}{request.adapter}"
    return hashlib.blake2b(own.encode(), digest_size=8).digest()
