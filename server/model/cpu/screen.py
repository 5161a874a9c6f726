"""The Screen of an LM head: which inputs its coarse copy has, its weights, and whether it pays.

What not: how logits are bounded (kernels/screen.py).
"""

from __future__ import annotations

import numpy as np

from server.model.cpu import kernels
from server.model.cpu.head import with_room
from server.model.cpu.integers.forms import BLOCK, COARSE, PANEL
from server.model.cpu.integers.packed import integer_linear
from server.model.cpu.integers.weights import Part
from server.model.cpu.linear import activations, aligned
from server.model.cpu.records import Activations, Float32, Head, Int32, Linear, Screen, UInt8, Work

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
    num = states.shape[0]
    head.states[:num] = states
    kernels.product(head.states, num, head.weights, head.logits, 0.0, work)
    inputs = _inputs(head.weights.rows, num)
    order = np.argsort(-np.square(inputs).sum(axis=0), kind="stable").astype(np.int32)
    order = np.concatenate((order, order[: _TWICE * BLOCK]))
    screen = with_room(_coarse(head.weights, rows, order, work), num)
    kernels.screened(num, head._replace(screen=screen), work)
    pays = screen.num_found[::8].max() <= screen.limit * num
    return screen if always or pays else None


def _inputs(rows: Activations, num: int) -> Float32:
    """What the head's product has made of the first `num` rows: float32 [num, inputs]."""
    blocks = rows.q[:num].reshape(num, -1, BLOCK)
    scales = rows.figures[:num, :, 0].copy().view(np.float32)
    inputs: Float32 = (blocks * scales[..., None]).reshape(num, -1)
    return inputs


def _unit(num_inputs: int) -> Activations:
    """A row for each input: 1 there, 0 elsewhere."""
    rows, place = activations(num_inputs, num_inputs), np.arange(num_inputs)
    rows.q[place, place] = 1
    figures, scales = rows.figures, rows.figures.view(np.float32)
    scales[:, :, 0] = 1.0
    block = place // BLOCK
    figures[place, block, 1] = place % BLOCK < BLOCK // 2
    figures[place, block, 2] = 1
    scales[place, block, 3] = 1.0
    return rows


def _coarse(head: Linear, head_rows: UInt8, order: Int32, work: Work) -> Screen:
    """The coarse copy of a head, and its bounds."""
    num_panels = -(-head.outputs // PANEL)
    size = COARSE.panel_bytes(order.shape[0])
    panels = aligned(num_panels * size).reshape(num_panels, size)
    bounds = np.zeros((2, num_panels * PANEL), np.float32)
    room = np.zeros((work.threads, (2 * head.inputs + 3) * PANEL), np.float32)
    unit = _unit(head.inputs)
    kernels.build_screen(head, unit, order, panels, bounds, room, work)
    part = Part(COARSE, order.shape[0], num_panels * PANEL, panels)
    rows = activations(head.rows.q.shape[0], order.shape[0])
    weights = integer_linear([[part]], rows, np.zeros((1, 0), np.float32))
    none, own = np.zeros((0, 0), np.float32), head_rows.ctypes.data
    limit = -(-head.outputs // (_FEW * work.threads))
    found = np.zeros((work.threads, 0), np.int64)
    num_found = np.zeros(8 * work.threads, np.int64)
    return Screen(
        weights, panels, order, none, bounds, none, own, head_rows.strides[0], limit, found,
        num_found,
    )  # fmt: skip
