"""A screened head: the argmax of all logits to the bit, ties included, from a few of its rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.model.cpu import kernels
from server.model.cpu.head import FullHead, PackedHead, float_head
from server.model.cpu.integers.forms import BY_NAME, padded_inputs
from server.model.cpu.integers.packed import integer_linear
from server.model.cpu.integers.weights import Stored, pack, quantised, spread_weights
from server.model.cpu.linear import Arena, activations, new_work, packed
from server.model.cpu.records import ALL_IDS, FAILED, Float32, Head, Work
from server.model.cpu.screen import make_screen

ROOM = 8
WIDTHS = {
    "float32": 100,
    "bfloat16": 96,
    "int8": 240,
    "q8_0": 96,
    "file": 96,
    "q5_1": 288,
    "q6_k": 256,
}
FORMS = pytest.mark.parametrize("form", WIDTHS)
_KEPT: list[Any] = []  # records have only the address of what is here


def _stored(weights: Float32, form: str) -> Stored:
    """Rounded to one of the integer forms. file: q8_0, whose rows are those of a GGUF, too."""
    form = "q8_0" if form == "file" else form
    own = BY_NAME[form]
    if form in ("int8", "q8_0"):
        return quantised(own, weights)
    num = weights.shape[0]
    parts = weights.reshape(num, -1, own.sub)
    if form == "q5_1":
        low = parts.min(axis=2).astype(np.float16)
        scales = ((parts.max(axis=2) - low) / 31 + 1e-6).astype(np.float16)
        numbers = np.rint((parts - low[..., None]) / scales[..., None].astype(np.float32))
        return Stored(own, numbers.clip(0, 31).astype(np.uint8).reshape(num, -1), scales, low)
    top = (np.abs(weights).max(axis=1, keepdims=True) / (31 * 100)).astype(np.float16)
    wide = top.astype(np.float32)
    small = np.ceil(np.abs(parts).max(axis=2) / (31 * wide)).clip(1, 127).astype(np.int8)
    numbers = np.rint(parts / (small * wide)[..., None]) + 32
    numbers = numbers.clip(0, 63).astype(np.uint8).reshape(num, -1)
    return Stored(own, numbers, small, tops=top)


def _head(weights: Float32, form: str) -> tuple[Head, Work]:
    """A head of these rows, with room for ROOM states."""
    width, work = weights.shape[1], new_work(2, inputs=512)
    if "float" in form:
        bits = (weights.view(np.uint32) >> 16).astype(np.uint16)
        panels = packed(bits if form == "bfloat16" else weights)
        _KEPT[:] = [panels]
        return FullHead(float_head(panels), weights.shape[0], work).record(ROOM), work
    stored = _stored(weights, form)
    inputs = padded_inputs(stored.form, width)
    factors = np.linspace(0.5, 2, inputs if form == "int8" else 0, dtype=np.float32)
    if form == "int8":
        weights = spread_weights(weights, factors)
        stored = _stored(weights, form)
    part, rows = pack(stored, Arena()), activations(ROOM, inputs)
    _KEPT[:] = [part]

    def record(panels: Any, num: int) -> Any:
        own = part._replace(outputs=num * 32, panels=panels)
        return integer_linear([[own]], rows, factors[None])

    head = PackedHead(part.panels, 32, width, np.zeros((0, 3), np.int64), record)
    if form == "file":
        scales, numbers = stored.scales, stored.numbers ^ 128  # as signed bytes
        parts = scales[..., None].view(np.uint8), numbers.reshape(*scales.shape, -1)
        head.file_rows = np.concatenate(parts, axis=2).reshape(weights.shape[0], -1)
        _KEPT.append(head.file_rows)
    return FullHead(head, weights.shape[0], work).record(ROOM), work


def _logits(
    head: Head, states: Float32, work: Work, *, screened: bool, near: float = 0.0
) -> Float32:
    num = states.shape[0]
    head.states[:num] = states
    head.logits[:] = np.nan
    if screened:
        kernels.screened(num, head, ALL_IDS, near, work)
    else:
        kernels.product(head.states, num, head.weights, head.logits, 0.0, work)
    return head.logits[:num, : head.vocab_size].copy()


def _states(draws: Any, num: int, form: str) -> Float32:
    """A few inputs are many times the others, as in language models."""
    states: Float32 = draws.standard_normal((num, WIDTHS[form])).astype(np.float32)
    states[:, [3, 40, 77]] *= 20.0
    return states


@FORMS
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32), outputs=st.integers(33, 700), sharp=st.booleans())
def test_each_rows_largest_logit_is_the_heads_own(
    form: str, seed: int, outputs: int, sharp: bool
) -> None:
    draws = np.random.default_rng(seed)
    weights = draws.standard_normal((outputs, WIDTHS[form])).astype(np.float32)
    states = _states(draws, ROOM, form)
    if sharp:
        weights[draws.integers(0, outputs, ROOM)] += 0.3 * states
    head, work = _head(weights, form)
    full = _logits(head, states, work, screened=False)
    screen = make_screen(head, states, work, always=True)
    assert screen is not None
    own = _logits(head._replace(screen=screen), states, work, screened=True)
    top = full.max(axis=1, keepdims=True)
    np.testing.assert_array_equal(own.argmax(axis=1), full.argmax(axis=1))
    np.testing.assert_array_equal(own.max(axis=1), full.max(axis=1))
    assert (own[own != full] < np.broadcast_to(top, own.shape)[own != full]).all()
    own = _logits(head._replace(screen=screen), states, work, screened=True, near=8.0)
    assert (own == full)[own > top - 8.0].all()


@FORMS
@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32), outputs=st.integers(33, 700),
    shares=st.lists(st.sampled_from([0.0, 0.004, 0.01, 0.5, 0.99, 1.0]), min_size=1, max_size=4),
)  # fmt: skip
def test_each_rows_likeliest_allowed_id_is_the_heads_own(
    form: str, seed: int, outputs: int, shares: list[float]
) -> None:
    draws = np.random.default_rng(seed)
    weights = draws.standard_normal((outputs, WIDTHS[form])).astype(np.float32)
    weights[draws.integers(0, outputs, 20)] = weights[0]  # ties
    states = _states(draws, len(shares), form)
    head, work = _head(weights, form)
    full = _logits(head, states, work, screened=False)
    screen = make_screen(head, states, work, always=True)
    assert screen is not None
    screened = head._replace(screen=screen)
    allowed = draws.random((len(shares), -(-outputs // 32) * 32)) < np.array(shares)[:, None]
    allowed[:, outputs:] = False
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.uint32)
    lines, drawn = np.arange(len(shares)), np.empty(len(shares), np.int32)
    may = allowed[:, :outputs]
    want = np.where(may, full, -np.inf)
    for product, more in ((kernels.screened, (0.0,)), (kernels.allowed, ())):
        head.logits[:] = np.nan
        product(len(shares), screened, words, *more, work)
        own = head.logits[: len(shares), :outputs]
        if np.isnan(own).all():  # too many are allowed
            assert product is kernels.allowed and may.sum() > outputs / 100
            continue
        kernels.greedy(lines, words, outputs, head.logits, head.states, drawn)
        for i, token in enumerate(drawn.tolist()):
            if may[i].any():
                assert token == want[i].argmax() and own[i, token] == want[i].max()
            else:
                assert token == FAILED
        if product is kernels.allowed:
            np.testing.assert_array_equal(np.where(may, own, -np.inf), want)


@FORMS
def test_of_equal_logits_the_first_is_found(form: str) -> None:
    draws = np.random.default_rng(1)
    states = _states(draws, 2, form)
    weights = draws.standard_normal((600, WIDTHS[form])).astype(np.float32)
    weights[[500, 70, 301]] = states[0] / 10
    head, work = _head(weights, form)
    screen = make_screen(head, states, work, always=True)
    assert screen is not None
    own = _logits(head._replace(screen=screen), states, work, screened=True)
    assert own[0].argmax() == 70 and own[0, 500] == own[0, 301] == own[0, 70]


@FORMS
def test_most_of_the_head_is_left_alone(form: str) -> None:
    draws = np.random.default_rng(2)
    states = _states(draws, ROOM, form)
    weights = draws.standard_normal((4096, WIDTHS[form])).astype(np.float32)
    weights[:ROOM] = states / 2
    head, work = _head(weights, form)
    screen = make_screen(head, states, work)
    assert screen is not None and screen.num_found[::8].sum() < 0.02 * ROOM * 4096 / 16
    # Where all logits are alike, all rows would be multiplied twice.
    head, work = _head(weights[:1] + 0.01 * weights, form)
    assert make_screen(head, states, work) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
@FORMS
def test_states_that_are_no_numbers_break_nothing(form: str, bad: float) -> None:
    draws = np.random.default_rng(3)
    states = _states(draws, 3, form)
    weights = draws.standard_normal((200, WIDTHS[form])).astype(np.float32)
    head, work = _head(weights, form)
    screen = make_screen(head, states, work, always=True)
    assert screen is not None
    full = _logits(head, states, work, screened=False)
    states[1, 5] = bad
    own = _logits(head._replace(screen=screen), states, work, screened=True)
    assert own[0].argmax() == full[0].argmax() and own[2].argmax() == full[2].argmax()
