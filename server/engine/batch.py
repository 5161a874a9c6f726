"""Batch: all rows of one step and its draws, and the Runner that turns it into ids.

A *Row* is one position fed to the model: a prompt token, a last token or a tree node. There is
no separate prefill mode. The keys a row attends to are exactly

    slots of positions [0, prefix_len) of its sequence, through its block table,
    then the slots of its ancestors inside the draft tree and its own, root's child first:
    path_slots[path_start : path_start + path_len].

A prompt or last-token row writes its KV into the slot of its own position, so it has
prefix_len = position + 1 and an empty path. A tree node at depth d (1-based) under a root at
position p has prefix_len = p + 1, position p + d and a path of d slots ending in its own.

Everything here is numpy and frozen. A Batch may be launched again once it was waited for, as the
next step of the same choices (build.py): then its arrays hold other numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from server.types import BANNED, DeviceFigures, ModelInfo, SamplingParams, TokenLogprob

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt32 = npt.NDArray[np.uint32]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DrawParams:
    """What the sampler needs of one sequence beyond the row's logits. One per (sequence, version).

    sampling: the request's parameters.
    choice_id: mixed into the noise key.
    banned_until: EOS and stop ids, ascending: banned while fewer than sampling.min_tokens tokens
        are generated. Empty when min_tokens is 0.
    count_ids / count_out / count_prompt: int32 [u], ids ascending: how often the id was generated
        and whether it is in the prompt (0/1). Empty without penalties.
    num_generated: tokens generated so far, the root of this step included when it is one of them;
        of any earlier step where sampling.min_tokens is 0.
    is_greedy: whether a draw is the likeliest of the ids that it may give, by the raw logits, and
        nothing more is told of it. excludes: whether it may lack ids without a mask.
    allowed_ids: int64, sampling.allowed_token_ids: maybe 10^5, which each draw would read again.
    """

    sampling: SamplingParams
    choice_id: int
    banned_until: Int32
    count_ids: Int32
    count_out: Int32
    count_prompt: Int32
    num_generated: int
    is_greedy: bool = field(init=False)
    excludes: bool = field(init=False)
    allowed_ids: Int64 | None = field(init=False)

    def __post_init__(self) -> None:
        s, allowed = self.sampling, self.sampling.allowed_token_ids
        banned = all(bias <= BANNED for _, bias in s.logit_bias)
        is_greedy = s.takes_likeliest and s.num_logprobs is None and not s.has_penalties and banned
        excludes = bool(s.logit_bias) or allowed is not None or s.min_tokens > 0
        object.__setattr__(self, "is_greedy", is_greedy)
        object.__setattr__(self, "excludes", excludes)
        object.__setattr__(
            self, "allowed_ids", None if allowed is None else np.array(allowed, np.int64)
        )

    def takes_argmax(self, mask_id: int, num_path: int = 0) -> bool:
        """Whether a draw is the argmax of the raw logits: greedy, nothing excluded, no penalty.

        mask_id: its Batch.draw_mask. num_path: drafted tokens before it.
        """
        s = self.sampling
        return (
            s.takes_likeliest
            and mask_id < 0
            and not s.logit_bias
            and s.allowed_token_ids is None
            and not s.has_penalties
            and self.num_generated + num_path >= s.min_tokens
        )


@dataclass(frozen=True, slots=True, eq=False)
class HeadSlice:
    """The part of the LM head that some draws see: a VocabSlice and where its rows lie.

    ids: int32 [n], ascending: the only ids that can be drawn (but see Batch.draw_slice). columns:
    int32 [n]: where each id's row lies in [rows of `table` | dynamic rows]. table: a number the
    runner was given with `load_table`, or -1: the rows are not cached, the full head is computed
    and looked at in `ids` alone, with the same logits. num_static: rows of the table.
    """

    ids: Int32
    columns: Int32
    table: int
    num_static: int


def places_of(
    ids: npt.NDArray[np.integer], wanted: npt.NDArray[np.integer]
) -> tuple[Int64, npt.NDArray[np.bool_]]:
    """Where the wanted ids stand in ascending `ids`.

    Returns (int64 indexes into `ids` of the wanted ids that it holds, bool, for each wanted id
    whether `ids` holds it).
    """
    at = np.searchsorted(ids, wanted)
    found = at < ids.shape[0]
    found[found] = ids[at[found]] == wanted[found]
    return at[found].astype(np.int64, copy=False), found


def _none() -> Int32:
    return np.empty(0, np.int32)


def _no_masks() -> UInt32:
    return np.empty((0, 0), np.uint32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """All rows of one step. Frozen flat arrays; R rows, S sequences, D draws, C scores. What is
    left out is empty.

    Rows (each int32 [R] unless said):
      token_ids; positions (depth, not slot); seq_ids (index into block_tables); slots (where this
      row's K and V are written; unique in the batch); prefix_len; path_start, path_len (into
      path_slots).
    path_slots: int32 [P].
    block_tables: int32 [S, max_blocks], unused entries 0. Slot of position p of sequence s =
      block_tables[s, p // block_size] * block_size + p % block_size.

    Draws, one id each (int32 [D]): draw_rows (the row whose logits are drawn from; several draws
      may share a row: the choices of one prompt), draw_params (index into params), draw_parent
      (index of the draw of the tree parent, or -1: the node's path of drafted tokens adds to the
      penalty counts and to num_generated; the token that is added is token_ids[draw_rows[d]] for
      each d on the path), draw_positions (absolute position of the token being drawn = the row's
      position + 1).
    draw_mask: int32 [D], -1 or a row of `masks`; masks: uint32 [G, ceil(V / 32)], bit set = id
      allowed (grammar).
    params: DrawParams of the sequences that draw.
    draw_slice: None, or int32 [D], -1 (the full head) or an index into slices. Where a draw's
      constraints exclude every id of its slice, it is drawn from the full head.
    draw_keep: None, or int32 [D], -1 or the place where the runner keeps the hidden state that the
      draw is made from, for `verify`; such a draw gives no logprobs.
    num_likely: so many likeliest ids of each draw's row are wanted for drafters (Drawn.likely); 0:
      none are, and nothing is computed for them.

    Scores, for prompt logprobs: score_rows, score_targets int32 [C]: the logprob of `target` under
      the logits of `row`, with score_top[c] most likely ids beside it.

    num_draft_rows: of the R rows, for metrics and the cost table.

    seq_adapters: None, or int32 [S]: the place of each sequence's adapter (Runner), -1 for
      the base model. None in a step without adapters.
    """

    token_ids: Int32
    positions: Int32
    seq_ids: Int32
    slots: Int32
    prefix_len: Int32
    path_start: Int32
    path_len: Int32
    path_slots: Int32 = field(default_factory=_none)
    block_tables: Int32
    draw_rows: Int32 = field(default_factory=_none)
    draw_params: Int32 = field(default_factory=_none)
    draw_parent: Int32 = field(default_factory=_none)
    draw_positions: Int32 = field(default_factory=_none)
    draw_mask: Int32 = field(default_factory=_none)
    masks: UInt32 = field(default_factory=_no_masks)
    params: tuple[DrawParams, ...] = ()
    score_rows: Int32 = field(default_factory=_none)
    score_targets: Int32 = field(default_factory=_none)
    score_top: Int32 = field(default_factory=_none)
    num_draft_rows: int = 0
    draw_slice: Int32 | None = None
    slices: tuple[HeadSlice, ...] = ()
    draw_keep: Int32 | None = None
    seq_adapters: Int32 | None = None
    num_likely: int = 0

    @property
    def num_rows(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_draws(self) -> int:
        return int(self.draw_rows.shape[0])

    def is_kept(self, draw: int) -> bool:
        """Whether a draw's hidden state waits for `verify`: such a draw gives no logprobs."""
        return self.draw_keep is not None and bool(self.draw_keep[draw] >= 0)

    def path_tokens(self, draw: int) -> list[int]:
        """Drafted tokens between the root and the row of a draw, root's child first."""
        tokens: list[int] = []
        while (parent := int(self.draw_parent[draw])) >= 0:
            tokens.append(int(self.token_ids[self.draw_rows[draw]]))
            draw = parent
        tokens.reverse()
        return tokens


@dataclass(frozen=True, slots=True)
class Likely:
    """The likeliest next ids of some draws' rows, as the model's raw logits have them.

    ids: int32 [D, K], chance descending, -1 where there are fewer. chances: float32 [D, K], softmax
    of the raw logits over all ids that the draw sees (its slice, or all), before bias, grammar,
    penalties and temperature; 0 for -1 and for a row that is not finite. A runner may leave out
    ids that a grammar forbids.
    """

    ids: Int32
    chances: Float32


@dataclass(slots=True)
class Drawn:
    """What a Runner returns for a Batch, and writes; it may be the same object for the same Batch.

    token_ids: int32 [D]; -1 for a draw without an answer. For draws whose params ask for logprobs
    (else NaN / rank 0 / empty): logprobs float32 [D] = log-softmax of the *raw* logits (fp32) at
    the drawn id; ranks int32 [D], 1 = most likely; top[d] = tuple of (id, logprob), (logprob
    descending, id ascending): the likeliest ids, or those that the params name
    (logprob_token_ids), -inf where the draw's slice lacks one.
    score_*: the same for the Batch's scores. model_s: seconds of the forward pass and the draws;
    head_s: those of them that the LM head's product took, 0.0 where they are not known.
    likely: of every draw, where Batch.num_likely asks; None where it does not. problems: by draw,
    why it has no answer: NaN logits, or constraints that exclude every id. The others are good, so
    that a failed request fails alone.
    """

    token_ids: Int32
    logprobs: Float32
    ranks: Int32
    top: list[tuple[tuple[int, float], ...]]
    score_logprobs: Float32
    score_ranks: Int32
    score_top: list[tuple[tuple[int, float], ...]]
    model_s: float = 0.0
    head_s: float = 0.0
    likely: Likely | None = None
    problems: dict[int, str] = field(default_factory=dict)

    def problem(self, draw: int) -> str:
        """Why a draw has no answer."""
        return self.problems.get(draw, NO_TOKEN_LEFT)

    def logprob(self, draw: int) -> TokenLogprob:
        """The logprob of a drawn id and the likeliest beside it."""
        return TokenLogprob(
            int(self.token_ids[draw]),
            float(self.logprobs[draw]),
            int(self.ranks[draw]),
            tuple(self.top[draw]),
        )


def likeliest_first(ids: Sequence[int], logprobs: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """The pairs as Drawn.top has them. ids: ascending."""
    return tuple(sorted(zip(ids, logprobs, strict=True), key=lambda pair: -pair[1]))


class PackedAdapter(Protocol):
    """An adapter as its runner computes it. vocab_size: ids that a request with it may have.
    num_bytes: its memory."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


class Runner(Protocol):
    """Batch -> one id per draw. Owns the device, the weights and the paged KV memory.

    It restricts its LM head to slices, and verifies what was drawn from one. For that it holds
    tables (one T each, in id order, under the engine's number) and one pool of dynamic rows. And it
    computes several adapters of its base model in one Batch; a row of a sequence without adapter
    has the bits that it has in a Batch without any. Calls that change tables, rows or adapters are
    ordered after the last launched step and before the next one; none may be made while a step is
    in flight.
    """

    info: ModelInfo
    head_row_bytes: int
    """Bytes of one row of the LM head."""

    def launch(self, batch: Batch) -> None:
        """Start a step, where none is in flight. Returns as soon as it can; no host sync on a GPU.
        On a CPU `wait` computes it. What it raises leaves no step in flight."""

    def wait(self) -> Drawn:
        """The result of the step in flight. Raises what the step raised."""

    def move_slots(self, src: Int32, dst: Int32) -> None:
        """Copy KV of slots src[i] to dst[i] in all layers: gather to a temporary, then scatter.

        No step is in flight.
        """

    def copy_blocks(self, src: Int32, dst: Int32) -> None:
        """Copy whole blocks (the tail block of a fork). Same order as move_slots."""

    def load_table(self, table: int, token_ids: Int32) -> None:
        """Make the head rows of ascending ids resident under a number that is free."""

    def drop_table(self, table: int) -> None:
        """Forget a table; unknown numbers are fine."""

    def load_rows(self, token_ids: Int32, places: Int32) -> None:
        """Copy head rows into places of the dynamic pool, which grows as needed. Raises
        MemoryError when there is no room; what is in the pool stays."""

    def verify(self, batch: Batch, kept: Int32) -> Drawn:
        """Draw again from kept hidden states with the full head.

        batch: no forward pass; row r's hidden state is the one kept at place kept[r]. token_ids,
        the draws, params and masks are read: draw r of row r, its parent the draw before it where
        that belongs to the same sequence.
        """

    def check_adapter(self, folder: str) -> bool:
        """Whether an adapter's head has rows of its own; reads no weights. From any thread.
        Raises ModelError and its kin for one that this runner cannot compute."""

    def pack_adapter(self, folder: str) -> PackedAdapter:
        """Read an adapter; changes nothing, and may be called from any thread while a step is in
        flight. Raises ModelError and its kin."""

    def hold_adapter(self, place: int, adapter: Any) -> None:
        """Put what pack_adapter gave at a free place."""

    def drop_adapter(self, place: int) -> None:
        """Forget what is at a place; an empty one is fine."""

    def close(self) -> None:
        """Release the device. Idempotent."""


@runtime_checkable
class StateRunner(Runner, Protocol):
    """A Runner that tells what its LM head was given, for drafters that read it
    (drafters.base.StateSession). Nothing is computed for it. The one on CUDA does not tell: its
    states stay on the device."""

    def last_states(self, draws: Int32 | int) -> Float32:
        """The LM head's inputs, float32 [n, hidden size], of draws of the step that was last waited
        for; [hidden size] of one draw. A copy. Called before the next launch."""


@runtime_checkable
class MeasuredRunner(Runner, Protocol):
    """A Runner that may be on an accelerator."""

    def device_figures(self) -> DeviceFigures | None:
        """How full and how busy its device is; None on a CPU. For whoever reads metrics: the
        driver's answer may take as long as a step."""


NO_TOKEN_LEFT = "no token is left to draw: the request's constraints exclude all ids"
"""The message of a failed draw whose constraints leave nothing; any other means broken numbers."""
