"""What both devices read of a Batch: its rows; of its draws the key of their noise, the ids that
they may give and their penalty counts; and a Drawn without answers."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from server.engine.batch import (
    Batch,
    Drawn,
    DrawParams,
    Int32,
    Int64,
    Likely,
    UInt32,
    places_of,
)
from server.model.cpu.records import Constraints, Counts, Rows
from server.types import BANNED


def batch_rows(batch: Batch) -> Rows:
    """A Batch's arrays as the forward pass takes them."""
    return Rows(
        batch.num_rows, batch.positions, batch.slots, batch.seq_ids, batch.prefix_len,
        batch.path_start, batch.path_len, batch.path_slots, batch.block_tables,
    )  # fmt: skip


_U64 = (1 << 64) - 1
_U32 = (1 << 32) - 1


def _splitmix64(z: int) -> int:
    """One round of SplitMix64 (Steele, Lea, Flood 2014) on Python ints."""
    z = (z + 0x9E3779B97F4A7C15) & _U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return z ^ (z >> 31)


def noise_key(seed: int, choice_id: int, position: int) -> tuple[int, int]:
    """Two uint32 words that key the noise of one draw (docs/DESIGN.md 1.1).

    position is the absolute position of the token being drawn (prompt length for the first one).
    """
    z = _splitmix64(seed & _U64)
    z = _splitmix64(z ^ ((choice_id * 0xD1342543DE82EF95) & _U64))
    z = _splitmix64(z ^ ((position * 0xDABA0B6EB09322E3) & _U64))
    return z >> 32, z & _U32


def allowed_words(batch: Batch, draw: int, path: Sequence[int], num_ids: int) -> UInt32 | None:
    """The ids below num_ids that a draw may give: uint32 [ceil(num_ids / 32)], bit set = allowed;
    None where nothing is excluded.

    Excluded are what the grammar's mask lacks, a bias of -100 and less, ids beside
    allowed_token_ids, and EOS and stop ids before min_tokens. path: Batch.path_tokens of the draw.
    """
    params = batch.params[batch.draw_params[draw]]
    s, mask_id = params.sampling, int(batch.draw_mask[draw])
    gone = [i for i, bias in s.logit_bias if bias <= BANNED]
    if params.num_generated + len(path) < s.min_tokens:
        gone += params.banned_until.tolist()
    num = -(-num_ids // 32)
    if mask_id < 0:
        if not gone and s.allowed_token_ids is None:
            return None
        words = np.full(num, _U32, np.uint32)
    else:
        words = batch.masks[mask_id][:num]
        if words.shape[0] < num:  # ids of other adapters' own
            words = np.pad(words, (0, num - words.shape[0]))
        elif gone or s.allowed_token_ids is not None:
            words = words.copy()
    if params.allowed_ids is not None:
        words &= _words_of(params.allowed_ids, num)
    if gone:
        words &= ~_words_of(np.array(gone, np.int64), num)
    return words


def _words_of(ids: Int64, num: int) -> UInt32:
    """uint32 [num] with the bits of those of the ids that have one."""
    bits = np.zeros(32 * num, bool)
    bits[ids[ids < 32 * num]] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


def penalty_counts(params: DrawParams, path: Sequence[int]) -> Counts:
    """Those of a node: its sequence's and its path's. Ids are unique, and not sorted."""
    ids = params.count_ids.astype(np.int64)
    out = params.count_out.astype(np.int64)
    prompt = params.count_prompt.astype(np.int64)
    new: dict[int, int] = {}
    for token in path:
        at = int(np.searchsorted(ids, token))
        if at < ids.shape[0] and ids[at] == token:
            out[at] += 1
        else:
            new[token] = new.get(token, 0) + 1
    if not new:
        return Counts(ids, out, prompt)
    return Counts(
        np.concatenate((ids, np.fromiter(new.keys(), np.int64))),
        np.concatenate((out, np.fromiter(new.values(), np.int64))),
        np.concatenate((prompt, np.zeros(len(new), np.int64))),
    )


_ALL_WORDS = np.empty(0, np.uint32)
_NO_COUNTS = Counts(*(np.empty(0, np.int64),) * 3)


def adjustments(
    batch: Batch, draw: int, path: Sequence[int], width: int, column_ids: Int32 | None = None
) -> tuple[Constraints, Counts]:
    """What a request changes of a draw's logits of `width` columns: ids are those of columns, or
    their places in a slice; no Counts without penalties. path: Batch.path_tokens of the draw.
    column_ids: of the columns, ascending, where they are not 0, 1, ...: what is not among them
    cannot be drawn anyway."""
    params = batch.params[batch.draw_params[draw]]
    s = params.sampling
    num_ids = width if column_ids is None else int(column_ids[-1]) + 1
    added = [(i, bias) for i, bias in s.logit_bias if bias > BANNED]
    bias_ids = np.array([i for i, _ in added], np.int64)
    biases = np.array([bias for _, bias in added], np.float64)
    ids, out, prompt = penalty_counts(params, path) if s.has_penalties else _NO_COUNTS
    if column_ids is not None:
        bias_ids, found = places_of(column_ids, bias_ids)
        biases = biases[found]
        ids, found = places_of(column_ids, ids)
        out, prompt = out[found], prompt[found]
    words = allowed_words(batch, draw, path, num_ids)
    constraints = Constraints(bias_ids, biases, _ALL_WORDS if words is None else words)
    return constraints, Counts(ids, out, prompt)


Top = tuple[tuple[int, float], ...]


def undrawn(batch: Batch, *, is_plain: bool = False) -> Drawn:
    """A Batch's Drawn while it is made: -1, NaN, 0 and () in its arrays and lists until they are
    written. is_plain: nobody writes any but ids and what is likely, which are all written."""
    num, likely = batch.num_draws, None
    if batch.num_likely:
        shape = num, batch.num_likely
        likely = Likely(np.empty(shape, np.int32), np.empty(shape, np.float32))
    if is_plain:
        return Drawn(np.empty(num, np.int32), *_never_told(num), *_never_told(0), likely=likely)
    if likely is not None:
        likely.ids[:], likely.chances[:] = -1, 0.0
    scores = _untold(int(batch.score_rows.shape[0]))
    return Drawn(np.full(num, -1, np.int32), *_untold(num), *scores, likely=likely)


def _untold(num: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], list[Top]]:
    """Logprobs, ranks and tops that nobody asked for."""
    return np.full(num, np.nan, np.float32), np.zeros(num, np.int32), [()] * num


@functools.lru_cache(maxsize=64)
def _never_told(num: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], list[Top]]:
    """The same, for any Batch: nobody writes to them."""
    logprobs, ranks, top = _untold(num)
    logprobs.flags.writeable = ranks.flags.writeable = False
    return logprobs, ranks, top
