"""A screened head: the argmax of all logits to the bit, ties included, from a few of its rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.model.cpu import kernels
from server.model.cpu.head import FullHead, PackedHead
from server.model.cpu.integers.packed import integer_linear
from server.model.cpu.integers.weights import Part, from_ggml, pack
from server.model.cpu.linear import Arena, activations, new_work
from server.model.cpu.records import ALL_IDS, FAILED, Float32, Head, UInt8, UInt32, Work
from server.model.cpu.screen import make_screen

WIDTH, ROOM = 96, 8
_KEPT: list[Part] = []  # records have only the address of what is here


def _rows(weights: Float32) -> UInt8:
    """As a GGUF has them in q8_0: uint8 [outputs, bytes of a row]."""
    blocks = weights.reshape(weights.shape[0], -1, 32)
    scales = (np.abs(blocks).max(axis=2, keepdims=True) / 127).astype(np.float16)
    numbers = np.rint(blocks / np.maximum(scales.astype(np.float32), 1e-9)).astype(np.int8)
    parts = (scales.view(np.uint8), numbers.view(np.uint8))
    return np.concatenate(parts, axis=2).reshape(weights.shape[0], -1)


def _head(rows: UInt8) -> tuple[Head, Work]:
    """A head of these rows, with room for ROOM states."""
    part, inputs = pack(from_ggml("q8_0", rows), Arena()), activations(ROOM, WIDTH)
    _KEPT[:] = [part]

    def record(panels: Any, num: int) -> Any:
        own = Part(part.form, part.inputs, num * 32, panels)
        return integer_linear([[own]], inputs, np.zeros((1, 0), np.float32))

    work = new_work(2, inputs=WIDTH)
    packed = PackedHead(part.panels, 32, WIDTH, np.zeros((0, 3), np.int64), record)
    return FullHead(packed, rows.shape[0], work).record(ROOM), work


def _logits(
    head: Head, states: Float32, work: Work, *, screened: bool, words: UInt32 = ALL_IDS
) -> Float32:  # fmt: skip
    num = states.shape[0]
    head.states[:num] = states
    head.logits[:] = np.nan
    if screened:
        kernels.screened(num, head, words, work)
    else:
        kernels.product(head.states, num, head.weights, head.logits, 0.0, work)
    return head.logits[:num, : head.vocab_size].copy()


def _states(draws: Any, num: int) -> Float32:
    """A few inputs are many times the others, as in language models."""
    states: Float32 = draws.standard_normal((num, WIDTH)).astype(np.float32)
    states[:, [3, 40, 77]] *= 20.0
    return states


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), outputs=st.integers(33, 700), sharp=st.booleans())
def test_each_rows_largest_logit_is_the_heads_own(seed: int, outputs: int, sharp: bool) -> None:
    draws = np.random.default_rng(seed)
    weights = draws.standard_normal((outputs, WIDTH)).astype(np.float32)
    states = _states(draws, ROOM)
    if sharp:
        weights[draws.integers(0, outputs, ROOM)] += 0.3 * states
    rows = _rows(weights)
    head, work = _head(rows)
    full = _logits(head, states, work, screened=False)
    screen = make_screen(head, rows, states, work, always=True)
    assert screen is not None
    own = _logits(head._replace(screen=screen), states, work, screened=True)
    top = full.max(axis=1, keepdims=True)
    np.testing.assert_array_equal(own.argmax(axis=1), full.argmax(axis=1))
    np.testing.assert_array_equal(own.max(axis=1), full.max(axis=1))
    assert (own[own != full] < np.broadcast_to(top, own.shape)[own != full]).all()


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32), outputs=st.integers(33, 700),
    shares=st.lists(st.sampled_from([0.0, 0.004, 0.01, 0.5, 0.99, 1.0]), min_size=1, max_size=4),
)  # fmt: skip
def test_each_rows_likeliest_allowed_id_is_the_heads_own(
    seed: int, outputs: int, shares: list[float]
) -> None:
    draws = np.random.default_rng(seed)
    weights = draws.standard_normal((outputs, WIDTH)).astype(np.float32)
    weights[draws.integers(0, outputs, 20)] = weights[0]  # ties
    states, rows = _states(draws, len(shares)), _rows(weights)
    head, work = _head(rows)
    full = _logits(head, states, work, screened=False)
    screen = make_screen(head, rows, states, work, always=True)
    assert screen is not None
    num_words = -(-outputs // 32)
    allowed = draws.random((len(shares), 32 * num_words)) < np.array(shares)[:, None]
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.uint32)
    screened = head._replace(screen=screen)
    own = _logits(screened, states, work, screened=True, words=words)
    lines, drawn = np.arange(len(shares)), np.empty(len(shares), np.int32)
    kernels.greedy(lines, words, outputs, head.logits, head.states, drawn)
    for i, token in enumerate(drawn.tolist()):
        left = np.where(allowed[i, :outputs], full[i], -np.inf)
        if not allowed[i, :outputs].any():
            assert token == FAILED
            continue
        assert token == left.argmax() and own[i, token] == left.max()
        few = allowed.sum(axis=1).max() <= screen.limit
        if few:  # nothing else is computed
            assert np.isneginf(own[i][~allowed[i, :outputs]]).all()


def test_of_equal_logits_the_first_is_found() -> None:
    draws = np.random.default_rng(1)
    states = _states(draws, 2)
    weights = draws.standard_normal((600, WIDTH)).astype(np.float32)
    weights[[500, 70, 301]] = states[0] / 10
    rows = _rows(weights)
    head, work = _head(rows)
    screen = make_screen(head, rows, states, work, always=True)
    assert screen is not None
    own = _logits(head._replace(screen=screen), states, work, screened=True)
    assert own[0].argmax() == 70 and own[0, 500] == own[0, 301] == own[0, 70]


def test_most_of_the_head_is_left_alone() -> None:
    draws = np.random.default_rng(2)
    states = _states(draws, ROOM)
    weights = draws.standard_normal((4096, WIDTH)).astype(np.float32)
    weights[:ROOM] = states / 2
    rows = _rows(weights)
    head, work = _head(rows)
    screen = make_screen(head, rows, states, work)
    assert screen is not None and screen.num_found[::8].sum() < 0.02 * ROOM * 4096
    # Where all logits are alike, all rows would be multiplied twice.
    rows = _rows(weights[:1] + 0.01 * weights)
    head, work = _head(rows)
    assert make_screen(head, rows, states, work) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_states_that_are_no_numbers_break_nothing(bad: float) -> None:
    draws = np.random.default_rng(3)
    states = _states(draws, 3)
    weights = draws.standard_normal((200, WIDTH)).astype(np.float32)
    rows = _rows(weights)
    head, work = _head(rows)
    screen = make_screen(head, rows, states, work, always=True)
    assert screen is not None
    full = _logits(head, states, work, screened=False)
    states[1, 5] = bad
    own = _logits(head._replace(screen=screen), states, work, screened=True)
    assert own[0].argmax() == full[0].argmax() and own[2].argmax() == full[2].argmax()
