"""The Screen of an LM head: which inputs its coarse copy has, its weights, and whether it pays.

What not: how logits are bounded (kernels/screen.py).
"""

from __future__ import annotations

import numpy as np

from server.model.cpu import kernels
from server.model.cpu.head import with_room
from server.model.cpu.integers.forms import BLOCK, COARSE, PANEL, panels_of
from server.model.cpu.integers.packed import integer_linear
from server.model.cpu.integers.weights import Part
from server.model.cpu.linear import activations, aligned
from server.model.cpu.records import ALL_IDS, Float32, Head, Screen, UInt8, Work

_TWICE = 2
"""Blocks of the largest inputs, which come twice. Of SmolLM2's outputs 0.5 % may then be the
largest, with 1 block 0.8 %, for 5 % fewer bytes."""

_FEW = 48
"""Of a head's outputs, one of so many may be a row's largest before all are multiplied: of texts
that models write, ten times fewer are."""


def make_screen(
    head: Head, rows: UInt8, states: Float32, work: Work, *, always: bool = False
) -> Screen | None:  # fmt: skip
    """The Screen of a head in the form q8_0, for states like these, float32 [n, H], for which it
    has room; None where it would not pay, unless `always`. rows: the head's as a GGUF has them,
    uint8 [vocab_size, bytes of a row], which the caller keeps."""
    num, num_inputs = states.shape
    order = np.argsort(-np.square(states).sum(axis=0), kind="stable").astype(np.int32)
    order = np.concatenate((order, order[: _TWICE * BLOCK]))
    num_panels, size = panels_of(head.vocab_size), COARSE.panel_bytes(order.shape[0])
    panels = aligned(num_panels * size).reshape(num_panels, size)
    part = Part(COARSE, order.shape[0], num_panels * PANEL, panels)
    buffer = activations(head.weights.rows.q.shape[0], order.shape[0])
    weights = integer_linear([[part]], buffer, np.zeros((1, 0), np.float32))
    none, found = np.zeros((0, 0), np.float32), np.zeros((work.threads, 0), np.int64)
    bounds = np.zeros((2, num_panels * PANEL), np.float32)
    limit = -(-head.vocab_size // (_FEW * work.threads))
    screen = Screen(
        weights, panels, order, none, bounds, none, rows.ctypes.data, rows.strides[0], limit, found,
        np.zeros(8 * work.threads, np.int64),
    )  # fmt: skip
    room = np.zeros((work.threads, PANEL * (2 * num_inputs + 3) + num_inputs), np.float32)
    kernels.build_screen(head.vocab_size, num_inputs, screen, room, work)
    screen = with_room(screen, num)
    head.states[:num] = states
    kernels.screened(num, head._replace(screen=screen), ALL_IDS, work)
    pays = screen.num_found[::8].max() <= screen.limit * num
    return screen if always or pays else None
