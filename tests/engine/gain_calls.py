"""What Gain takes of all choices at once, of one: tests tell a choice's story one by one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from server.engine.gain import Gain, StepShape

Claims = npt.NDArray[np.float64]


def note_ask(gain: Gain, seat: int, claims: Claims) -> None:
    """A choice was asked and proposed nodes with these claims; it has a session."""
    gain.opened(seat)
    gain.observe_asks(np.array([seat]), *_columns([claims]))


def note_drafts(gain: Gain, seat: int, claims: Claims, accepted: Sequence[int]) -> None:
    """The nodes with these claims were verified. accepted: indexes of those that came true."""
    came = np.zeros(len(claims), np.int32)
    came[list(accepted)] = 1
    gain.observe_drafts(np.array([seat]), *_columns([claims]), came)


def choose(
    gain: Gain,
    seats: Sequence[int],
    claims: Sequence[Claims],
    shape: StepShape,
    room: int,
    certain: Sequence[int] = (),
) -> list[int]:
    """How many nodes of each tree are verified, if all were asked. certain: of each, where a
    grammar forces some."""
    columns = _columns(claims, certain)
    found = gain.choose(np.array(seats, np.int64), *columns, shape, room, len(seats))
    return [int(num) for num in found]


def _columns(
    claims: Sequence[Claims], certain: Sequence[int] = ()
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], Claims]:
    start = np.array([*accumulate(map(len, claims), initial=0)], np.int32)
    flat = np.concatenate(claims) if claims else np.empty(0)
    return start, np.array(certain or [0] * len(claims), np.int32), flat
