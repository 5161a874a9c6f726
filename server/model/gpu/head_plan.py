"""Plans what goes through the LM head in a step: slabs of rows, by the part that their draws see.

Planned on the host, with numpy, before anything is launched; head_run.py multiplies what is planned
here, sampler.py says what a slab's draws need and draws them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from server.engine.batch import Batch, Int32, places_of
from server.model.draws import allowed_words
from server.model.gpu.adapters import OwnRows, spans_of
from server.model.gpu.lm_head import FullHead, Placed, TorchSlices
from server.model.gpu.sampler import DrawPlan, plan_draws

Array = npt.NDArray[Any]

LOGIT_BYTES = 64
"""Peak bytes of one logit of a slab whose draws are processed: 4 for its float32, float64 copies,
sorted values with their indices and running sums; int64 order keys for logprobs."""

STREAMED_BYTES = 128 << 20
"""Memory of the logits that share one pass over a head in CPU memory."""


@dataclass(frozen=True, slots=True, eq=False)
class SliceView:
    """How a slab's draws see slices: of which table (-1: in the full head's logits), and of each
    draw the row of the slab, the slot of its slice and its number of ids. width: the most ids,
    rounded up; pool_width: dynamic rows of the product."""

    table: int
    rows: Int32
    slots: Int32
    nums: Int32
    width: int
    pool_width: int


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """Rows (ascending, unique) that go through the head together, and what reads their logits.

    start: where its rows begin among the step's head rows; slabs of the same rows have the same.
    view: None for the whole vocabulary. own_places: None; or int32 of the rows, head_places of
    OwnRows: its draws and scores see the rows' wide logits.
    """

    rows: Int32
    start: int
    draw_ids: Array
    plan: DrawPlan
    score_ids: Array
    num_score_top: int
    view: SliceView | None = None
    own_places: Int32 | None = None

    @property
    def end(self) -> int:
        return self.start + int(self.rows.shape[0])

    @property
    def only_draws(self) -> bool:
        """Whether nothing is scored, and no logprobs are wanted."""
        return not self.plan.arrays["logprob_at"].shape[0] and not self.score_ids.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Rows (ascending, unique) that go through the full head together; start: of a Slab; draws, and
    of each draw, and of each of the batch's scores, its row's place among the rows, if there."""

    batch: Batch
    rows: Int32
    start: int
    draws: Array
    draw_at: Array
    score_at: Array

    def slab(
        self, width: int, chosen: Array | None = None, own_places: Int32 | None = None
    ) -> Slab:
        """What reads `width` columns of logits: of all rows, or of the chosen ones (bool)."""
        is_read = np.ones(self.rows.shape[0], bool) if chosen is None else chosen

        def those(at: Array) -> Array:
            inside = (at >= 0) & (at < is_read.shape[0])
            return np.flatnonzero(inside & is_read[np.where(inside, at, 0)])

        own, scores = those(self.draw_at), those(self.score_at)
        draws = self.draws[own]
        plan = plan_draws(self.batch, draws, self.draw_at[own], width)
        num_top = int(self.batch.score_top[scores].max()) if scores.shape[0] else 0
        return Slab(
            self.rows, self.start, draws, plan, scores, num_top, own_places=own_places
        )  # fmt: skip


class HeadPlanner:
    """Divides a step's head rows into slabs.

    vocab_size: of the head. head_bytes: memory that a slab of logits and the work on it may take;
    more rows go through the head in several slabs. own: adapters' own rows, if there may be some.
    """

    def __init__(
        self,
        slices: TorchSlices,
        vocab_size: int,
        head_bytes: int,
        own: OwnRows | None = None,
    ) -> None:
        self._slices = slices
        self._own = own
        self._vocab_size = vocab_size
        self.head_bytes = head_bytes

    def plan(self, batch: Batch) -> tuple[list[Slab], list[Placed]]:
        """(what goes through the head, in order; slices whose slots must be written first)."""
        draws = np.arange(batch.num_draws)
        if batch.draw_slice is None:
            return self.full(batch, draws, 0), []
        cached, new = self._slices.place(batch.slices)
        places = {id(p.slice): p for p in cached}
        by_table: dict[int, list[int]] = {}
        full: list[int] = []
        for d, nth in enumerate(batch.draw_slice.tolist()):
            if nth >= 0 and has_choice(batch, d, batch.slices[nth].ids):
                by_table.setdefault(batch.slices[nth].table, []).append(d)
            else:
                full.append(d)
        slabs = self.full(batch, np.asarray(full, np.int64), 0)
        for table, chosen in sorted(by_table.items()):
            start = slabs[-1].end if slabs else 0
            slabs += self._sliced(batch, table, np.asarray(chosen), places, start)
        return slabs, new

    def full(self, batch: Batch, draws: Array, first: int) -> list[Slab]:
        """Slabs of the draws from the full head and of all scores. Where adapters have own head
        rows, their draws are a slab of their own over the same rows, so that the others' work is
        what it is without them; but not where all of it is an argmax, which is the same in wide
        logits."""
        all_rows = np.unique(np.concatenate([batch.draw_rows[draws], batch.score_rows]))
        places = None if self._own is None else self._own.head_places(batch, all_rows)
        if places is not None and not (places >= 0).any():
            places = None
        draw_at = np.searchsorted(all_rows, batch.draw_rows[draws])
        score_at = np.searchsorted(all_rows, batch.score_rows)
        width = self._vocab_size
        if self._own is not None and places is not None:
            width += 2 * self._own.width  # logits, and wide ones beside them
        at_once = max(1, self.head_bytes // (width * bytes_per_logit(batch)))
        slabs = []
        for start in range(0, all_rows.shape[0], at_once):
            rows = all_rows[start : start + at_once].astype(np.int32)
            part = _Part(batch, rows, first + start, draws, draw_at - start, score_at - start)
            end = start + rows.shape[0]
            if self._own is None or places is None or not (places[start:end] >= 0).any():
                slabs.append(part.slab(self._vocab_size))
                continue
            own, width = places[start:end], self._own.width
            whole = part.slab(width, own_places=own)
            is_argmax = whole.plan.plain_is_all and whole.only_draws and not batch.num_likely
            if is_argmax or (own >= 0).all():
                slabs.append(whole)
                continue
            slabs.append(part.slab(self._vocab_size, own < 0))
            slabs.append(part.slab(width, own >= 0, own))
        return slabs

    def _sliced(
        self,
        batch: Batch,
        table: int,
        draws: Array,
        places: Mapping[int, Placed],
        first: int,
    ) -> list[Slab]:
        """Slabs of draws from slices of one table, or of none (-1)."""
        assert batch.draw_slice is not None
        own = [places[id(batch.slices[int(batch.draw_slice[d])])] for d in draws]
        most = max(p.num_ids for p in own)
        width = -(-most // 16) * 16
        pool_width = max(p.pool_width for p in own)
        per_row = width * (bytes_per_logit(batch) + 24)
        if table >= 0:
            per_row += 4 * self._slices.num_columns(table, pool_width)
        else:
            per_row += 4 * self._vocab_size
        at_once = max(1, self.head_bytes // per_row)
        order = np.argsort(batch.draw_rows[draws], kind="stable")
        none = np.empty(0, np.int64)
        slabs: list[Slab] = []
        for start in range(0, draws.shape[0], at_once):
            part = order[start : start + at_once]
            rows, at = np.unique(batch.draw_rows[draws[part]], return_inverse=True)
            placed = [own[i] for i in part]
            view = SliceView(
                table,
                at.astype(np.int32),
                np.asarray([p.slot for p in placed], np.int32),
                np.asarray([p.num_ids for p in placed], np.int32),
                width,
                pool_width,
            )
            plan = plan_draws(
                batch, draws[part], np.arange(part.shape[0]), width, [p.slice.ids for p in placed]
            )
            begin = slabs[-1].end if slabs else first
            slabs.append(Slab(rows.astype(np.int32), begin, draws[part], plan, none, 0, view))
        return slabs


def slab_arrays(batch: Batch, slabs: Sequence[Slab]) -> dict[str, Array]:
    """What the slabs read, by slab."""
    of_slabs = {slab.start: slab.rows for slab in slabs}
    none = np.empty(0, np.int32)
    arrays: dict[str, Array] = {"head_rows": np.concatenate((none, *of_slabs.values()))}
    for i, slab in enumerate(slabs):
        arrays.update({f"{i}.{name}": a for name, a in slab.plan.arrays.items()})
        if slab.own_places is not None:
            arrays[f"{i}.own_places"] = slab.own_places
            arrays[f"{i}.own_spans"] = spans_of(slab.own_places)
        named = _named_columns(batch, slab)
        if named.shape[1]:
            arrays[f"{i}.named_columns"] = named
        if slab.view is not None:
            arrays[f"{i}.slice_rows"] = slab.view.rows
            arrays[f"{i}.slice_slots"] = slab.view.slots
            arrays[f"{i}.slice_nums"] = slab.view.nums
        else:
            rows = batch.score_rows[slab.score_ids]
            arrays[f"{i}.score_rows"] = np.searchsorted(slab.rows, rows).astype(np.int32)
            arrays[f"{i}.score_targets"] = batch.score_targets[slab.score_ids]
        if batch.num_likely and slab.view is not None:  # a row of logits for each draw
            arrays[f"{i}.likely_rows"] = np.arange(slab.draw_ids.shape[0], dtype=np.int32)
        elif batch.num_likely:
            at = np.searchsorted(slab.rows, batch.draw_rows[slab.draw_ids])
            arrays[f"{i}.likely_rows"] = at.astype(np.int32)
    return arrays


def _named_columns(batch: Batch, slab: Slab) -> Array:
    """int32 [draws with logprobs, k]: the columns of their logprob_token_ids in the slab's logits,
    -1 where a slice lacks one and behind the last."""
    draws = slab.draw_ids[slab.plan.arrays["logprob_at"]].tolist()
    named = [batch.params[batch.draw_params[d]].sampling.logprob_token_ids for d in draws]
    columns = np.full((len(draws), max(map(len, named), default=0)), -1, np.int32)
    for row, d, token_ids in zip(columns, draws, named, strict=True):
        own = row[: len(token_ids)]
        if slab.view is not None and batch.draw_slice is not None:
            ids = batch.slices[int(batch.draw_slice[d])].ids
            at, found = places_of(ids, np.asarray(token_ids))
            own[found] = at
        else:
            own[:] = token_ids
    return columns


def rows_of(
    hidden: torch.Tensor, slabs: Sequence[Slab], tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """The rows of `hidden` that consecutive slabs take, without a copy where they lie together."""
    start, end = slabs[0].start, slabs[-1].end
    first, last = int(slabs[0].rows[0]), int(slabs[-1].rows[-1])
    if slabs[0].start == slabs[-1].start and last - first + 1 == end - start:
        return hidden[first : last + 1]
    return hidden.index_select(0, tensors["head_rows"][start:end])


def sharing(slabs: Sequence[Slab], head: FullHead) -> list[Slab]:
    """The first of these slabs, and those after it that go through the full head with it: those of
    the same rows, others only where a pass over the head costs more than the memory of their
    logits."""
    shared = [slabs[0]]
    for slab in slabs[1:]:
        num_rows = slab.end - shared[0].start
        is_cached = slab.view is not None and slab.view.table >= 0
        has_room = head.is_streamed and 4 * num_rows * head.vocab_size <= STREAMED_BYTES
        if is_cached or not (slab.start == shared[0].start or has_room):
            break
        shared.append(slab)
    return shared


def kept_draws(batch: Batch) -> Array:
    """int64: the draws whose row's hidden state is to be kept (`Batch.draw_keep`)."""
    if batch.draw_keep is None:
        return np.empty(0, np.int64)
    return np.flatnonzero(batch.draw_keep >= 0)


def bytes_per_logit(batch: Batch) -> int:
    """Peak bytes for one logit of a slab: 4 for its float32 where only the argmax is taken, two
    more float32 where the likeliest ids are wanted; LOGIT_BYTES where draws are processed."""
    params = (p.sampling for p in batch.params)
    only_argmax = all(s.temperature == 0.0 and s.num_logprobs is None for s in params)
    least = 12 if batch.num_likely else 4
    return least if only_argmax and batch.score_rows.shape[0] == 0 else LOGIT_BYTES


def has_choice(batch: Batch, draw: int, ids: Int32) -> bool:
    """Whether a draw's constraints leave any of these ids (of a slice).

    Where they leave none the full head draws. The host can tell, because nothing but ids decides.
    """
    words = allowed_words(batch, draw, batch.path_tokens(draw), int(ids[-1]) + 1)
    return words is None or bool(((words[ids >> 5] >> (ids & 31).astype(np.uint32)) & 1).any())
