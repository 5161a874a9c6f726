"""Draws: one id per draw of a Batch, with logprobs where they are asked for.

It reads a Batch's constraints, penalties and paths, and gives the sampler (kernels/sampling.py)
what one draw needs. The caller gives the logits: of the full head or of a slice (head.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from server.engine.batch import (
    NO_TOKEN_LEFT,
    Batch,
    Drawn,
    Int32,
    UInt32,
    likeliest_first,
    places_of,
)
from server.model.cpu import kernels
from server.model.cpu.head import FullLogits, padded
from server.model.cpu.records import ALL_IDS, FAILED, LANES, Float32
from server.model.draws import adjustments, allowed_words, noise_key, undrawn

_ALL_IDS = np.empty(0, np.int32)  # the ids of the full head
_FIRST = np.zeros(1, np.int64)

SlicedLogits = dict[int, tuple[Float32, Float32]]
"""SlicedHead.logits_of: per draw its row's logits over the table and the dynamic rows."""


class _View(NamedTuple):
    """What a draw sees. logits: float32 of `num` columns, then -inf up to whole vectors. ids: int32
    of the columns of a slice, ascending; empty: a column is an id. state: its hidden state."""

    logits: Float32
    num: int
    ids: Int32
    state: Float32


class Draws:
    """Draws ids from logits. Used from one thread at a time.

    vocab_size: real ids of a request whose adapter is at a place; -1: without one.
    """

    def __init__(self, vocab_size: Callable[[int], int]) -> None:
        self._vocab_size = vocab_size
        self._wide = np.zeros(vocab_size(-1), np.float64)
        self._compact = np.zeros(LANES, np.float32)

    def draw(
        self,
        batch: Batch,
        hidden: Float32,
        full: FullLogits,
        sliced: SlicedLogits,
        full_logits: Callable[[Int32], FullLogits],
    ) -> Drawn:
        """All draws and scores of a batch.

        hidden: final states of the batch's rows. full: logits of the rows whose draws need the full
        head's, and of the score rows. full_logits: those of other rows; called last, because it may
        overwrite `full`.
        """
        num = batch.num_draws
        result = undrawn(batch)
        empty: list[int] = []  # whose constraints leave nothing of their slice
        chosen = [-1] * num if batch.draw_slice is None else batch.draw_slice.tolist()
        whole = [d for d in range(num) if chosen[d] < 0]
        rows = [full.places[r] for r in batch.draw_rows[whole].tolist()]
        self.draw_full(batch, whole, rows, full, result)
        for d in range(num):
            if chosen[d] >= 0:
                view = self._slice(batch, d, sliced.get(d), full, hidden)
                plain = batch.params[batch.draw_params[d]].takes_argmax(batch.draw_mask[d])
                column = self._draw_one(batch, d, view, plain)
                if column == FAILED and kernels.is_finite_row(view.state):
                    empty.append(d)
                else:
                    self._note(result, batch, d, column, view)
        scores = zip(batch.score_rows, batch.score_targets, batch.score_top, strict=True)
        for c, (r, target, num_top) in enumerate(scores):
            view = self._full(batch, int(r), full, full.places[int(r)])
            told = self._logprob(view, int(target), int(num_top))
            result.score_logprobs[c], result.score_ranks[c], result.score_top[c] = told
        if empty:
            full = full_logits(batch.draw_rows[empty])
            rows = [full.places[int(batch.draw_rows[d])] for d in empty]
            self.draw_full(batch, empty, rows, full, result)
        return result

    def tell_failed(self, states: Float32, result: Drawn) -> None:
        """Why draws that a step took itself have no answer. states[d]: the hidden state of draw
        d."""
        for d, token in enumerate(result.token_ids.tolist()):
            if token == FAILED:
                result.problems[d] = _reason(states[d])

    def draw_full(
        self,
        batch: Batch,
        draws: Sequence[int],
        rows: list[int],
        full: FullLogits,
        result: Drawn,
        *,
        keeps: bool = True,
    ) -> None:
        """Draws from the full head; rows[i]: the place in `full` of draws[i].

        keeps: whether draws that Batch.draw_keep names go without logprobs.
        """
        params = [batch.params[p] for p in batch.draw_params[list(draws)].tolist()]
        plain = [p.takes_argmax(batch.draw_mask[d]) for p, d in zip(params, draws, strict=True)]
        views = [
            self._full(batch, int(batch.draw_rows[d]), full, row)
            for d, row in zip(draws, rows, strict=True)
        ]
        if all(plain):
            drawn = np.empty(len(rows), np.int32)
            at = np.array(rows, np.int64)
            kernels.greedy(at, ALL_IDS, 0, full.logits, full.states, drawn)
            ids = drawn.tolist()
        else:
            ids = [
                self._draw_one(batch, d, view, is_plain)
                for d, view, is_plain in zip(draws, views, plain, strict=True)
            ]
        for d, view, token in zip(draws, views, ids, strict=True):
            self._note(result, batch, d, token, view, keeps=keeps)

    def _note(
        self, result: Drawn, batch: Batch, d: int, column: int, view: _View, *, keeps: bool = True
    ) -> None:
        """What is told of a draw of a column."""
        ids = view.ids
        sliced = ids.shape[0] > 0
        result.token_ids[d] = ids[column] if sliced and column != FAILED else column
        if result.likely is not None:
            kernels.likeliest(
                np.array([d]), _FIRST, view.logits[None], view.state[None], result.likely.ids,
                result.likely.chances,
            )  # fmt: skip
            if sliced:
                likely = result.likely.ids[d]
                likely[likely >= 0] = ids[likely[likely >= 0]]
        own = batch.params[batch.draw_params[d]].sampling
        if column == FAILED:
            result.problems[d] = _reason(view.state)
        if column == FAILED or own.num_logprobs is None or (keeps and batch.is_kept(d)):
            return
        result.logprobs[d], result.ranks[d], top = self._logprob(view, column, own.num_logprobs)
        if own.logprob_token_ids:
            columns = np.array(own.logprob_token_ids, np.int32)
            if sliced:
                at, found = places_of(ids, columns)
                columns[found], columns[~found] = at, -1
            values = np.empty(columns.shape[0], np.float32)
            kernels.logprobs_at(view.logits, columns, values)
            top = likeliest_first(own.logprob_token_ids, values.tolist())
        elif sliced:
            top = tuple((int(ids[i]), lp) for i, lp in top)
        result.top[d] = top

    def _full(self, batch: Batch, row: int, full: FullLogits, place: int) -> _View:
        """What a row of the batch sees of the full head, at a place in `full`."""
        adapters = batch.seq_adapters
        num = self._vocab_size(-1 if adapters is None else int(adapters[batch.seq_ids[row]]))
        return _View(full.logits[place], num, _ALL_IDS, full.states[place])

    def _slice(
        self,
        batch: Batch,
        d: int,
        cached: tuple[Float32, Float32] | None,
        full: FullLogits,
        hidden: Float32,
    ) -> _View:
        """What draw d sees: the logits of its slice in id order. Logprobs are over the slice.

        cached: from SlicedHead, or None: its row has full logits.
        """
        assert batch.draw_slice is not None
        slice_, row = batch.slices[int(batch.draw_slice[d])], int(batch.draw_rows[d])
        num = slice_.ids.shape[0]
        size = padded(num)
        if size > self._compact.shape[0]:
            self._compact = np.zeros(2 * size, np.float32)
        logits = self._compact[:size]
        if cached is None:
            logits[:num] = full.logits[full.places[row]][slice_.ids]
            logits[num:] = -np.inf
        else:
            kernels.gather_logits(*cached, slice_.columns, slice_.num_static, logits)
        return _View(logits, num, slice_.ids, hidden[row])

    def _draw_one(self, batch: Batch, d: int, view: _View, plain: bool) -> int:
        """The column that is drawn, or FAILED."""
        logits, num, ids, state = view
        if not kernels.is_finite_row(state):
            return FAILED
        if plain:
            return int(kernels.argmax(logits))
        params = batch.params[batch.draw_params[d]]
        s, path = params.sampling, batch.path_tokens(d)
        constraints, counts = adjustments(batch, d, path, num, ids if ids.shape[0] else None)
        words = constraints.words
        if not ids.shape[0] and words.shape[0] and params.takes_argmax(-1, len(path)):
            return int(kernels.masked_argmax(logits, words, num))  # but for its grammar
        if num > self._wide.shape[0]:
            self._wide = np.zeros(num, np.float64)
        key = noise_key(s.seed, params.choice_id, int(batch.draw_positions[d]))
        return int(kernels.draw(logits, self._wide[:num], s.numbers, constraints, counts, key, ids))

    def _logprob(
        self, view: _View, column: int, num_top: int
    ) -> tuple[float, int, tuple[tuple[int, float], ...]]:
        """(logprob, rank, top) of a column: of a log-softmax of the raw logits that are seen."""
        num_top = min(num_top, view.num)
        ids, logprobs = np.empty(num_top, np.int64), np.empty(num_top, np.float32)
        value, rank = kernels.logprob(view.logits, view.num, column, num_top, ids, logprobs)
        top = zip(ids.tolist(), logprobs.tolist(), strict=True)
        return float(value), int(rank), tuple(top)


def _reason(hidden: Float32) -> str:
    """Why no id could be drawn from a hidden state."""
    if kernels.is_finite_row(hidden):
        return NO_TOKEN_LEFT
    return "the model produced values that are not finite"


def words_of(batch: Batch, num_ids: int) -> UInt32 | None:
    """Which of the base model's num_ids ids each draw may give (Wanted.words), where all that a
    step tells is the likeliest of them; else None."""
    if (
        batch.draw_slice is not None
        or batch.draw_keep is not None
        or batch.score_rows.shape[0]
        or not all(params.is_greedy for params in batch.params)
    ):
        return None
    if not batch.masks.shape[0] and not any(params.excludes for params in batch.params):
        return ALL_IDS
    words = np.full((batch.num_draws, -(-num_ids // 32)), 0xFFFFFFFF, np.uint32)
    for d, at in enumerate(batch.draw_params.tolist()):
        path = batch.path_tokens(d) if batch.params[at].sampling.min_tokens else ()
        own = allowed_words(batch, d, path, num_ids)
        if own is not None:
            words[d] = own
    return words
