"""DrawPlan: what one slab of draws needs of its Batch, made on the host with numpy alone.

Bias, allowed ids, grammar masks, banned ids and penalties are lists of any length for each draw;
here they become flat arrays that go to the device in one copy. sampler.py runs the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from server.engine.batch import Batch, DrawParams, places_of
from server.engine.reference_sampler import noise_stream, penalty_counts

Array = npt.NDArray[Any]


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
