"""The Screen of an LM head: which inputs its coarse copy has, its weights, and whether it pays.

What not: how logits are bounded (kernels/screen.py).
"""

from __future__ import annotations

import math

import numpy as np

from server.model.cpu import kernels
from server.model.cpu.head import with_room
from server.model.cpu.integers.forms import BLOCK, COARSE, PANEL, panels_of
from server.model.cpu.integers.packed import integer_linear
from server.model.cpu.integers.weights import Part, spread
from server.model.cpu.linear import activations, aligned
from server.model.cpu.records import (
    ALL_IDS,
    FLOAT32,
    INTEGERS,
    LANES,
    NO_ROWS,
    Float32,
    Head,
    Screen,
    Work,
)

_TWICE = 2 * BLOCK
"""At most so many inputs, the largest, come twice."""

_LESS = 8.0
"""So many times less is left of their weights than of the others': more, but the largest of a block
is not always one of them."""

_DEAR, _FEW = 3, 12
"""A line of the head, which lies anywhere, takes so many times longer than its share of the whole;
and of the time that the coarse head saves lines may take so much, _FEW / _DEAR times less, in the
states that a Screen is made of."""


def make_screen(head: Head, states: Float32, work: Work, *, always: bool = False) -> Screen | None:
    """The Screen of a head for states like these, float32 [n, H], for which it has room; None
    where it would not pay, unless `always`."""
    weights, num = head.weights, states.shape[0]
    is_spread, num_inputs = bool(weights.per_row[0]), -(-weights.inputs // BLOCK) * BLOCK
    squares = np.zeros(num_inputs, np.float32)
    squares[: states.shape[1]] = np.square(states).sum(axis=0)
    if is_spread:
        squares *= np.square(weights.factors[0])
    order = np.argsort(-squares, kind="stable").astype(np.int32)
    # |R||x| is smallest where an input counts by the root of its size over that of what is left.
    twice = min(_TWICE, num_inputs - BLOCK)
    rms = np.sqrt(np.maximum(squares[order], squares[order[twice:]].mean()))
    rms[:twice] *= _LESS
    less, order = np.sqrt(rms), np.concatenate((order, order[:twice]))
    num_panels, size = panels_of(head.vocab_size), COARSE.panel_bytes(order.shape[0])
    panel_bytes = PANEL * weights.inputs * (4 if weights.kind == FLOAT32 else 2)
    units = np.zeros((0, 0), np.float32)
    if weights.kind == INTEGERS:
        panel_bytes, count = weights.parts[0, 0, 2:4].tolist()
        units = np.eye(num_inputs // count, dtype=np.float32)
    if is_spread:  # the coarse head has the inputs as they were before
        units = spread(units, np.full(BLOCK, 1 / BLOCK, np.float32))
    num_lines = -(-head.vocab_size // LANES)
    saved = num_lines * (1 - size / panel_bytes)
    if saved <= 0:
        return None
    panels = aligned(num_panels * size).reshape(num_panels, size)
    part = Part(COARSE, order.shape[0], min(num_panels * PANEL, head.logits.shape[1]), panels)
    coarse = integer_linear([[part]], NO_ROWS, np.zeros((1, 0), np.float32))
    none, found = np.zeros((0, 0), np.float32), np.zeros((work.threads, 0), np.int64)
    bounds = np.zeros((2, num_panels * PANEL), np.float32)
    ones = np.ones(num_inputs if is_spread else 0, np.float32)
    limit = math.ceil(saved / (_DEAR * work.threads))
    screen = Screen(
        coarse, panels, order, none, bounds, none, less, ones, limit, found,
        np.zeros(8 * work.threads, np.int64),
    )  # fmt: skip
    screen = with_room(screen, head.states.shape[0])
    head = head._replace(screen=screen)
    size = PANEL * (2 * num_inputs + 3) + panel_bytes // 4
    room = np.zeros((work.threads, size), np.float32)
    kernels.build_screen(head, units, activations(*units.shape), room, work)
    head.states[:num] = states
    kernels.screened(num, head, ALL_IDS, 0.0, work)
    pays = _FEW * screen.num_found[::8].sum() <= saved * num
    return screen if always or pays else None
