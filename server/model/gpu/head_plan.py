"""Plans what goes through the LM head in a step: slabs of rows, by the part that their draws see,
and what each slab of draws needs of its Batch (DrawPlan).

Planned on the host, with numpy, before anything is launched: bias, allowed ids, grammar masks,
banned ids and penalties are lists of any length for each draw; here they become flat arrays that go
to the device in one copy. head_run.py multiplies what is planned here, sampler.py draws it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from server.engine.batch import Batch, DrawParams, Int32, places_of
from server.engine.reference_sampler import noise_stream, penalty_counts
from server.model.gpu.adapters import OwnRows, spans_of
from server.model.gpu.lm_head import FullHead, Placed, TorchSlices

Array = npt.NDArray[Any]

LOGIT_BYTES = 64
"""Peak bytes of one logit of a slab whose draws are processed: 4 for its float32, float64 copies,
sorted values with their indices and running sums; int64 order keys for logprobs."""

STREAMED_BYTES = 128 << 20
"""Memory of the logits that share one pass over a head in CPU memory."""


@dataclass(frozen=True, slots=True)
class DrawPlan:
    """Host side of one slab of draws: arrays to copy to the device, and what work there is.

    arrays (n = draws of the slab, m = processed draws among them; rows are indices into the slab's
    logits):
      plain_rows, plain_at: int32: logits row and index in the slab of the argmax-only draws.
      rows, at: int32 [m]: the same for processed draws.
      bias_row, bias_id int32, bias float64; allow_rows int32 (processed rows restricted to ids),
      allow_row, allow_id int32; mask_rows int32, masks int32 [., words]; ban_row, ban_id int32;
      penalty_row, penalty_id int32, repetition, subtract float64; `*_row` index processed draws.
      temperature float64 [m] (1 for greedy); top_k int64 [m] (the logits' width when off); top_p
      float64 [m]; log_min_p float64 [m] (-inf when off); noise int64 [m, 3]: the bits of
      reference_sampler.noise_stream, the position of the token that is drawn, and 1 where noise is
      added. ordered int32: processed draws with top-k or top-p.
      logprob_rows, logprob_at int32: draws whose logprobs are wanted.
    Every `*_id` is a column of the logits: a vocabulary id, or an id's place in the draw's slice.
    num_draws: n. plain_is_all: draw i is the argmax of logits row i, for every i.
    num_top: most top logprobs of any draw, -1 when no draw wants logprobs.
    noisy: whether a draw is not greedy.
    """

    arrays: Mapping[str, Array]
    num_draws: int
    plain_is_all: bool
    num_top: int
    noisy: bool


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


def has_choice(batch: Batch, draw_id: int, ids: Array) -> bool:
    """Whether a draw's constraints leave any of these ids (ascending, of a slice).

    Where they leave none the full head draws. The host can tell, because nothing but ids decides.
    """
    params = batch.params[batch.draw_params[draw_id]]
    s = params.sampling
    excluded = [t for t, b in s.logit_bias if b <= -100.0]
    banned: Array = np.empty(0, np.int32)
    if params.num_generated + len(batch.path_tokens(draw_id)) < s.min_tokens:
        banned = params.banned_until
    mask_id = int(batch.draw_mask[draw_id])
    is_free = mask_id < 0 and s.allowed_token_ids is None
    if is_free and len(excluded) + banned.shape[0] < ids.shape[0]:
        return True
    left = np.ones(ids.shape[0], bool)
    for gone in (excluded, banned):
        left[places_of(ids, np.asarray(gone, np.int64))[0]] = False
    if mask_id >= 0:
        left &= (batch.masks[mask_id][ids >> 5] >> (ids & 31).astype(np.uint32)) & 1 != 0
    if s.allowed_token_ids is not None:
        allowed = np.zeros(ids.shape[0], bool)
        allowed[places_of(ids, np.asarray(s.allowed_token_ids, np.int64))[0]] = True
        left &= allowed
    return bool(left.any())


def plan_draws(
    batch: Batch,
    draw_ids: Array,
    logits_rows: Array,
    width: int,
    slice_ids: Sequence[Array] | None = None,
) -> DrawPlan:
    """Plan the draws `draw_ids` of a Batch; draw i of the slab reads row logits_rows[i].

    width: columns of the logits. slice_ids: None where a column is a vocabulary id, else for each
    draw the ids of its first columns, ascending; the others are -inf.
    """
    plain_rows: list[int] = []
    plain_at: list[int] = []
    logprob_rows: list[int] = []
    logprob_at: list[int] = []
    num_top = -1
    processed = _Processed(batch, width)
    for at, (draw_id, row) in enumerate(zip(draw_ids.tolist(), logits_rows.tolist(), strict=True)):
        params = batch.params[batch.draw_params[draw_id]]
        s = params.sampling
        if s.num_logprobs is not None and not batch.is_kept(draw_id):
            logprob_rows.append(row)
            logprob_at.append(at)
            num_top = max(num_top, s.num_logprobs)
        path = batch.path_tokens(draw_id) if s.min_tokens or s.has_penalties else []
        if params.takes_argmax(int(batch.draw_mask[draw_id]), len(path)):
            plain_rows.append(row)
            plain_at.append(at)
        else:
            own = None if slice_ids is None else slice_ids[at]
            processed.add(at, row, draw_id, params, path, own)
    arrays: dict[str, Array] = {
        "plain_rows": np.asarray(plain_rows, np.int32),
        "plain_at": np.asarray(plain_at, np.int32),
        "logprob_rows": np.asarray(logprob_rows, np.int32),
        "logprob_at": np.asarray(logprob_at, np.int32),
    }
    num_draws = int(draw_ids.shape[0])
    is_all = not processed.num and bool((logits_rows == np.arange(num_draws)).all())
    if processed.num:
        arrays |= processed.arrays()
    return DrawPlan(arrays, num_draws, is_all, num_top, processed.noisy)


class _Processed:
    """The draws of a slab that are more than an argmax, one after the other. width: as above."""

    def __init__(self, batch: Batch, width: int) -> None:
        self._batch = batch
        self._width = width
        self.num = 0
        self.noisy = False
        self._columns: dict[str, list[Any]] = {name: [] for name in _DTYPES}

    def add(
        self, at: int, row: int, draw_id: int, params: DrawParams, path: list[int],
        slice_ids: Array | None,
    ) -> None:  # fmt: skip
        """at, row: index in the slab, logits row. path: Batch.path_tokens of the draw."""
        s = params.sampling
        self._append(at=at, rows=row)
        self._restrict(draw_id, params, len(path), slice_ids)
        if s.has_penalties:
            ids, out, prompt = penalty_counts(params, path)
            if slice_ids is not None:
                ids, found = places_of(slice_ids, ids)
                out, prompt = out[found], prompt[found]
            repetition = np.where((out > 0) | (prompt > 0), s.repetition_penalty, 1.0)
            subtract = s.frequency_penalty * out + s.presence_penalty * (out > 0)
            self._extend(len(ids), "penalty_row", penalty_id=ids, repetition=repetition,
                         subtract=subtract)  # fmt: skip
        self._set_noise(draw_id, params)
        self.num += 1

    def arrays(self) -> dict[str, Array]:
        """DrawPlan.arrays of these draws."""
        made = {name: np.asarray(self._columns[name], dtype) for name, dtype in _DTYPES.items()}
        masks = self._batch.masks[made["masks"]]
        lacking = max(0, -(-self._width // 32) - masks.shape[1])  # ids of other adapters' own
        made["masks"] = np.pad(masks, ((0, 0), (0, lacking))).view(np.int32)
        made["noise"] = made["noise"].reshape(-1, 3).view(np.int64)
        return made

    def _append(self, **values: Any) -> None:
        for name, value in values.items():
            self._columns[name].append(value)

    def _extend(self, num: int, row_name: str, **values: Any) -> None:
        """num values of each column, under this draw's number."""
        self._columns[row_name].extend([self.num] * num)
        for name, array in values.items():
            self._columns[name].extend(array.tolist())

    def _restrict(
        self, draw_id: int, params: DrawParams, num_path: int, slice_ids: Array | None
    ) -> None:
        """Bias, allowed ids, the grammar's mask and banned ids."""
        s = params.sampling

        def places(ids: Array) -> tuple[Array, Array | slice]:
            return (ids, slice(None)) if slice_ids is None else places_of(slice_ids, ids)

        if s.logit_bias:
            ids, found = places(np.asarray([t for t, _ in s.logit_bias], np.int64))
            bias = np.asarray([b if b > -100.0 else -np.inf for _, b in s.logit_bias])[found]
            self._extend(len(ids), "bias_row", bias_id=ids, bias=bias)
        if s.allowed_token_ids is not None:
            ids, _ = places(np.asarray(s.allowed_token_ids, np.int64))
            self._append(allow_rows=self.num)
            self._extend(len(ids), "allow_row", allow_id=ids)
        if self._batch.draw_mask[draw_id] >= 0:
            self._append(mask_rows=self.num, masks=int(self._batch.draw_mask[draw_id]))
        if params.num_generated + num_path < s.min_tokens:
            ids, _ = places(params.banned_until)
            self._extend(len(ids), "ban_row", ban_id=ids)

    def _set_noise(self, draw_id: int, params: DrawParams) -> None:
        """Temperature, top-k, top-p, min-p and the noise; a greedy draw has none of them."""
        s, width = params.sampling, self._width
        if s.temperature == 0.0:
            self._append(temperature=1.0, top_k=width, top_p=1.0, log_min_p=-np.inf)
            self._columns["noise"].extend((0, 0, 0))
            return
        top_k = s.top_k if 0 < s.top_k < width else width
        log_min_p = np.log(s.min_p) if s.min_p > 0.0 else -np.inf
        self._append(temperature=s.temperature, top_k=top_k, top_p=s.top_p, log_min_p=log_min_p)
        stream = noise_stream(s.seed, params.choice_id)
        self._columns["noise"].extend((stream, int(self._batch.draw_positions[draw_id]), 1))
        self.noisy = True
        if s.top_p < 1.0 or top_k < width:
            self._append(ordered=self.num)


_DTYPES: dict[str, type[np.generic]] = {
    "at": np.int32, "rows": np.int32,
    "bias_row": np.int32, "bias_id": np.int32, "bias": np.float64,
    "allow_rows": np.int32, "allow_row": np.int32, "allow_id": np.int32,
    "mask_rows": np.int32, "masks": np.int32,
    "ban_row": np.int32, "ban_id": np.int32,
    "penalty_row": np.int32, "penalty_id": np.int32,
    "repetition": np.float64, "subtract": np.float64,
    "temperature": np.float64, "top_k": np.int64, "top_p": np.float64, "log_min_p": np.float64,
    "noise": np.uint64, "ordered": np.int32,
}  # fmt: skip
"""Columns of the processed draws as DrawPlan describes them; `masks` as the rows of Batch.masks."""
