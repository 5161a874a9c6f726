"""CpuRunner: the Runner for CPUs: the fused forward pass, the LM head and the draws of a Batch.

It owns the packed weights (weights.py), the paged KV cache and the step buffers. It takes a Batch
and gives one id per draw, for the models of shape.py.

`wait` computes the step that `launch` was given, on the thread that calls it: the team's threads
take every core that the engine may use, so nothing else could run meanwhile. On a thread of its own
a step of a small model lost 0.1 to 0.2 ms, in which one thread woke the other and back. Compiled
code runs without the interpreter's lock. Bits do not depend on the thread count.
"""

from __future__ import annotations

import math
import operator
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from server.engine.batch import Batch, Drawn, Int32
from server.machine import cores
from server.model.adapter import check_adapter
from server.model.cpu import kernels
from server.model.cpu.adapters import AdapterBank, CpuAdapter, pack_adapter
from server.model.cpu.draws import Draws, words_of
from server.model.cpu.head import FullHead, FullLogits, SlicedHead, padded
from server.model.cpu.kv_pages import KvPages
from server.model.cpu.linear import aligned, grown, new_work
from server.model.cpu.records import (
    ALL_IDS,
    FAILED,
    KV_BYTES,
    KV_TYPES,
    LANES,
    NO_LIKELY,
    PANEL,
    Cache,
    Ends,
    Float32,
    Positions,
    Rows,
    Scratch,
    Shape,
    UInt32,
    Wanted,
    one_layer,
    tile_rows,
)
from server.model.cpu.screen import make_screen
from server.model.cpu.threads import KernelThreads, Team
from server.model.cpu.weights import RunnerWeights
from server.model.draws import batch_rows, undrawn
from server.model.shape import ModelShape, query_scales
from server.types import ModelInfo

BLOCK_SIZE = LANES
"""Slots per block: one vector of keys."""

_PAGE = 4096

_NOTHING = np.zeros(0, np.int32)
_EVERY_ROW = Ends(False, np.zeros((0, 0), np.int32))

VERIFY_ROWS = 48
"""Rows of one product of `verify`: bounds the memory of its logits (1 MB a row at 262,144 ids)."""


def kv_bytes_per_block(shape: ModelShape, kv_dtype: str = "float32") -> int:
    """Bytes that one block of 16 slots takes in all layers: K and V, with their scales, or the
    inputs of short convolutions, which are float32. kv_dtype: a key of KV_TYPES."""
    return sum(array.nbytes for array in _cache(shape, 1, kv_dtype)[1:])


def _cache(shape: ModelShape, num_blocks: int, kv_dtype: str) -> Cache:
    convolutions, kind = sum(shape.convolutions), list(KV_TYPES).index(kv_dtype)
    head_bytes = (shape.head_dim + padded(shape.head_dim)) * BLOCK_SIZE * KV_BYTES[kind]
    if kv_dtype == "int8":
        head_bytes += 2 * BLOCK_SIZE * 4
    kv = (shape.num_layers - convolutions, num_blocks, shape.num_kv_heads, head_bytes)
    return Cache(
        kind,
        aligned(math.prod(kv), _PAGE).reshape(kv),
        np.zeros((convolutions, num_blocks, BLOCK_SIZE, shape.kept_width), np.float32),
    )


def _kv_planes(cache: Cache, head_dim: int) -> tuple[npt.NDArray[Any], ...]:
    """Views of what a Cache keeps: keys [attention layers, blocks, kv_heads, head_dim, 16] and
    values [attention layers, blocks, kv_heads, 16, head_dim rounded up to 16] of its type; scales
    float32 [attention layers, blocks, kv_heads, 2, 16], or 0 instead of 2."""
    kind: Any = list(KV_TYPES.values())[cache.kind]
    places, ends = cache.kv.shape[:3], KV_BYTES[cache.kind] * BLOCK_SIZE
    middle = head_dim * ends
    end = middle + padded(head_dim) * ends
    keys, values = cache.kv[..., :middle].view(kind), cache.kv[..., middle:end].view(kind)
    scales = cache.kv[..., end:].view(np.float32)
    return (
        keys.reshape(*places, head_dim, BLOCK_SIZE),
        values.reshape(*places, BLOCK_SIZE, padded(head_dim)),
        scales.reshape(*places, -1 if scales.size else 0, BLOCK_SIZE),
    )


def _ends(batch: Batch, rows: Rows) -> Ends:
    """The rows that something is drawn from or scored, where they are less than half of all: most
    rows of a prompt are there for their keys and values."""
    if 2 * (batch.num_draws + batch.score_rows.shape[0]) >= batch.num_rows:
        return _EVERY_ROW
    numbers = np.unique(np.concatenate((batch.draw_rows, batch.score_rows)))
    return Ends(True, np.stack((numbers, *(array[numbers] for array in rows[1:7]))))


def _scratch(
    shape: ModelShape, inner_size: int, threads: int, max_rows: int, max_model_len: int
) -> Scratch:
    """Buffers of a step: max_rows rows, and per thread the scores of max_model_len keys."""
    s = shape
    group = s.num_heads // s.num_kv_heads
    tile = group * tile_rows(group)
    room = padded(max_model_len) + 4 * LANES + max_rows // LANES * LANES

    def rows(width: int) -> Float32:
        return np.zeros((max_rows, width), np.float32)

    def outputs(num: int) -> Float32:
        return rows(-(-num // PANEL) * PANEL)

    return Scratch(
        x=rows(s.hidden_size),
        normed=rows(s.hidden_size),
        qkv=outputs((s.num_heads + 2 * s.num_kv_heads) * s.head_dim),
        attended=rows(s.num_heads * s.head_dim),
        projected=outputs(s.hidden_size),
        conv_projected=outputs(3 * s.hidden_size if any(s.convolutions) else 0),
        convolved=rows(s.hidden_size if any(s.convolutions) else 0),
        inner=rows(inner_size),
        hidden=rows(s.hidden_size),
        queries=np.zeros((threads, tile, s.head_dim), np.float32),
        scores=np.zeros((threads, tile, room), np.float32),
        acc=np.zeros((threads, tile, padded(s.head_dim) + LANES), np.float32),
    )


def _record_shape(shape: ModelShape) -> Shape:
    return Shape(
        num_heads=shape.num_heads,
        head_dim=shape.head_dim,
        scale=np.float32(shape.attention_scale),
        cap=np.float32(shape.attention_cap),
        eps=np.float32(shape.norm_eps),
        norm_after_rope=shape.qk_norm == "head_after_rope",
        norms_before=shape.norms != "after",
        norms_after=shape.norms != "before",
        residual_scale=np.float32(shape.residual_scale),
        gelu=shape.activation != "silu",
    )


@dataclass(slots=True)
class _Held:
    """A plain step whose Batch may be launched again, with other numbers in its arrays. answers:
    what it fills. bound: what `call`, the whole step, was made of.

    Reading some twenty arrays from Python's objects takes 25 us where the step before has pushed
    them out of the caches, so what such a step is given is written down once.
    """

    batch: Batch
    wanted: Wanted
    answers: Drawn
    bound: Any = None
    call: Any = None


class CpuRunner:
    """Runner on a CPU. One thread at a time calls it, best that which made it (KernelThreads).

    ropes: (cos, sin) of shape.rope_tables, of at least info's max_model_len. info: the sizes; its
    kv_dtype is what K and V are kept as.
    """

    def __init__(
        self,
        shape: ModelShape,
        weights: RunnerWeights,
        ropes: tuple[Float32, Float32],
        info: ModelInfo,
        *,
        num_threads: int | None = None,
    ) -> None:
        cos, sin = ropes
        max_rows, max_model_len = info.max_num_batched_tokens, info.max_model_len
        self.info = info
        self._shape = shape
        self._weights = weights
        self._threads = num_threads or cores()
        rope_ids = np.asarray(shape.rope_ids, np.int64)
        windows = np.asarray(shape.windows, np.int64)
        scales = query_scales(shape, max_model_len)
        self._positions = Positions(cos, sin, rope_ids, windows, scales)
        self._cache = _cache(shape, info.num_blocks, info.kv_dtype)
        self._planes = _kv_planes(self._cache, shape.head_dim)
        self._pages = KvPages([array for array in self._cache[1:] if array.size])
        self._scratch = _scratch(shape, weights.inner_size, self._threads, max_rows, max_model_len)
        self._memory = (self._positions, self._cache, self._scratch)
        self._record_shape = _record_shape(shape)
        team = Team(self._threads)
        widest = max(weights.inner_size, shape.hidden_size, shape.num_heads * shape.head_dim)
        self._work = new_work(self._threads, team, widest)
        self._head = FullHead(weights.packed_head, shape.vocab_size, self._work, shape.logit_cap)
        self._slices = SlicedHead(weights.packed_head, self._work, shape.logit_cap)
        self._adapters = AdapterBank(shape, weights.layers, max_rows, self._work)
        self._draws = Draws(self._adapters.vocab_size)
        self._clock = np.zeros(2, np.int64)
        scale = np.float32(shape.embedding_scale)
        self._table = weights.table._replace(scale=scale)
        self._kept = np.zeros((0, shape.hidden_size), np.float32)
        self.head_row_bytes = weights.packed_head.row_bytes
        self._kept_arguments: tuple[Any, ...] = (None,) * 6
        self._step_bound: Any = None
        self._held: _Held | None = None  # the last step, if its Batch may come again
        self._kernel_threads = KernelThreads(team.thread_ids)
        self._in_flight: Batch | None = None
        self._last_draws: Int32 = _NOTHING  # rows of the last step that ids were drawn from
        # A cap may make equal what was not: then the first of all that are near is the largest.
        if shape.logit_cap == 0.0 and not self._head.in_file and weights.table.num_rows:
            self._screen()

    def _screen(self) -> None:
        """Give the head a Screen, for states like those of texts that the model goes on with."""
        info = self.info
        num, steps = 4, min(BLOCK_SIZE, info.max_model_len)
        if num > min(info.num_blocks, info.max_num_batched_tokens):
            return
        rows = np.arange(num, dtype=np.int32)
        token_ids, states = rows * (self._shape.vocab_size // num), list[Float32]()
        self._pages.use(num)
        self._kernel_threads.wake()
        try:
            for position in range(steps):
                at, zeros = np.full(num, position, np.int32), np.zeros(num, np.int32)
                batch = Batch(
                    token_ids=token_ids, positions=at, seq_ids=rows, slots=rows * BLOCK_SIZE + at,
                    prefix_len=at + 1, path_start=zeros, path_len=zeros,
                    block_tables=rows[:, None], draw_rows=rows,
                )  # fmt: skip
                token_ids = np.zeros(num, np.int32)
                wanted = Wanted(rows, token_ids, ALL_IDS, *NO_LIKELY, self._clock)
                self._compute(batch, wanted, None)
                states.append(self._head.record(num).states[:num].copy())
            half = np.concatenate(states[steps // 2 :])[: info.max_num_batched_tokens]
            screen = make_screen(self._head.record(half.shape[0]), half, self._work)
        finally:
            self._kernel_threads.rest()
        if screen is not None:
            self._head.use(screen)

    def release(self) -> None:
        """Give back what steps of many rows have grown; the next one takes it again. Not while a
        step is in flight."""
        self._head.release()
        self._held = None

    def launch(self, batch: Batch) -> None:
        """Take a step, which `wait` computes. Raises RuntimeError when one is in flight."""
        if self._in_flight is not None:
            raise RuntimeError("a step is in flight already")
        if batch.num_rows > self._scratch.x.shape[0]:
            raise ValueError(f"{batch.num_rows} rows, at most {self._scratch.x.shape[0]} fit")
        if batch.num_rows:
            self._pages.use(max(batch.slots.tolist()) // BLOCK_SIZE)
        self._last_draws = batch.draw_rows
        self._in_flight = batch

    def wait(self) -> Drawn:
        """The ids of the step in flight, which is computed now."""
        batch, self._in_flight = self._in_flight, None
        if batch is None:
            raise RuntimeError("no step is in flight")
        return self._step(batch)

    def last_states(self, draws: Int32 | int) -> Float32:
        """See StateRunner."""
        states: Float32 = self._scratch.hidden[self._last_draws[draws]].copy()
        return states

    def move_slots(self, src: Int32, dst: Int32) -> None:
        """Copy KV of slots src[i] to dst[i]. No step may be in flight."""
        (block, lane), (to, to_lane) = divmod(src, LANES), divmod(dst, LANES)
        keys, values, scales = self._planes
        for lanes_last in (keys, scales):
            lanes_last[:, to, ..., to_lane] = lanes_last[:, block, ..., lane]
        values[:, to, :, to_lane] = values[:, block, :, lane]
        self._cache.inputs[:, to, to_lane] = self._cache.inputs[:, block, lane]

    def copy_blocks(self, src: Int32, dst: Int32) -> None:
        """Copy KV of blocks src[i] to dst[i]. No step may be in flight."""
        for array in self._cache[1:]:  # each [layers, blocks, ...]
            array[:, dst] = array[:, src]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that products multiply by: a step reads them all."""
        return self._weights.num_bytes

    @property
    def head_bytes(self) -> int:
        """Those of them that are the LM head's."""
        return self._weights.packed_head.row_bytes * self.info.vocab_size

    def load_table(self, table: int, token_ids: Int32) -> None:
        """Pack the head rows of ascending ids. No step may be in flight."""
        self._slices.load_table(table, token_ids)

    def drop_table(self, table: int) -> None:
        """Forget a table. No step may be in flight."""
        self._slices.drop_table(table)

    def load_rows(self, token_ids: Int32, places: Int32) -> None:
        """Copy head rows into the dynamic pool. No step may be in flight."""
        self._slices.load_rows(token_ids, places)

    def check_adapter(self, folder: str) -> bool:
        """Whether an adapter's head has rows of its own. From any thread."""
        return check_adapter(Path(folder), self._shape, self._weights.num_embeddings)

    def pack_adapter(self, folder: str) -> CpuAdapter:
        """Read an adapter. From any thread; a step may be in flight."""
        weights = self._weights
        return pack_adapter(Path(folder), self._shape, weights.num_embeddings, weights.layers)

    def hold_adapter(self, place: int, adapter: CpuAdapter) -> None:
        """Put a packed adapter at a free place. No step may be in flight."""
        self._adapters.hold(place, adapter)
        self._head.widen(self._adapters.max_vocab_size)

    def drop_adapter(self, place: int) -> None:
        """Forget the adapter at a place. No step may be in flight."""
        self._adapters.drop(place)

    def verify(self, batch: Batch, kept: Int32) -> Drawn:
        """Draw again from kept hidden states with the full head; see Runner."""
        if self._in_flight is not None:
            raise RuntimeError("a step is in flight")
        started = time.perf_counter()
        num = batch.num_draws
        result = undrawn(batch)
        head_s = 0.0
        for first in range(0, num, VERIFY_ROWS):
            draws = range(first, min(first + VERIFY_ROWS, num))
            began = time.perf_counter()
            wanted = kept[batch.draw_rows[draws.start : draws.stop]]
            full = self._head.logits_of(wanted, self._kept)
            head_s += time.perf_counter() - began
            rows = [full.places[int(k)] for k in wanted]
            self._draws.draw_full(batch, draws, rows, full, result, keeps=False)
        result.model_s, result.head_s = time.perf_counter() - started, head_s
        return result

    def embed(self, batch: Batch) -> Scratch:
        """Fill x of the runner's own buffers with the rows' embeddings, own ones of adapters
        included. No step may be in flight."""
        x = self._scratch.x
        kernels.embed_rows(0, batch.num_rows, batch.token_ids, self._table, x, 1)
        self._adapters.embed(batch, x)
        return self._scratch

    def run_layer(self, batch: Batch, layer: int) -> Scratch:
        """Compute one layer on x, which the layers before it have left. hidden is x with the final
        norm: after the last layer, what the head is given. No step may be in flight. For
        measurements of what goes into products."""
        memory = (one_layer(self._positions, layer), self._cache, self._scratch)
        layers, adapters = one_layer(self._weights.layers, layer), self._adapters
        nothing = Wanted(_NOTHING, _NOTHING, ALL_IDS, *NO_LIKELY, self._clock)
        spans = adapters.spans(batch)
        kernels.step(
            self._table, layers, memory, self._record_shape, adapters.record, self._head.record(0),
            False, batch.token_ids, batch_rows(batch), _EVERY_ROW, spans, nothing, self._work,
        )  # fmt: skip
        return self._scratch

    def close(self) -> None:
        """End the thread that makes KV pages ready. Idempotent."""
        self._pages.close()

    def _step(self, batch: Batch) -> Drawn:
        held, self._held = self._held, None
        if held is not None and held.batch is not batch:
            held = None
        started = time.perf_counter()
        self._kernel_threads.wake()
        words, own = (ALL_IDS, False) if held is not None else self._words(batch)
        plain = words is not None and not own
        if held is not None:
            wanted, answers = held.wanted, held.answers
        elif words is not None:
            answers = undrawn(batch, is_plain=True)
            likely = answers.likely
            wanted = Wanted(
                batch.draw_rows, answers.token_ids, words,
                *(NO_LIKELY if likely is None else (likely.ids, likely.chances)), self._clock,
            )  # fmt: skip
        else:
            rows = batch.draw_rows
            if batch.draw_slice is not None:  # -1 is the full head
                uncached = np.array([s.table < 0 for s in batch.slices] + [True])
                rows = rows[uncached[batch.draw_slice]]
            rows = np.unique(np.concatenate((rows, batch.score_rows)))
            wanted = Wanted(rows, _NOTHING, ALL_IDS, *NO_LIKELY, self._clock)
        try:
            self._compute(batch, wanted, held)
            began, ended = self._clock.tolist()
            if not plain:
                answers = self._draw(batch, wanted.rows)
            elif FAILED in answers.token_ids.tolist():
                self._draws.tell_failed(self._head.found().states, answers)
            answers.model_s = time.perf_counter() - started
            answers.head_s = 1e-9 * (ended - began)
        finally:
            self._kernel_threads.rest()
        # Ends are made of what the arrays hold now: of a step in which every row is drawn from.
        is_alike = plain and not (wanted.words.size or batch.num_likely or answers.problems)
        if is_alike and batch.num_draws == batch.num_rows and self._table.num_rows:
            self._held = held or _Held(batch, wanted, answers)
        return answers

    def _words(self, batch: Batch) -> tuple[UInt32 | None, bool]:
        """(what draws may give, where a step needs no more than the likeliest of it, as Wanted has
        it, else None; whether adapters' own rows of the head are still to be looked at)."""
        num_ids = self._shape.vocab_size
        words, own = words_of(batch, num_ids), self._adapters.head_ids(batch)
        if own:
            # A row in place of one of the base's may be less likely than that was, and one row's
            # logits are one draw's then.
            is_other = min(ids[0] for ids in own) < num_ids
            if is_other or np.unique(batch.draw_rows).shape[0] < batch.num_draws:
                words = None
        return words, bool(own)

    def _draw(self, batch: Batch, rows: Int32) -> Drawn:
        """The draws of a step that gave the full head's logits of these rows."""
        if batch.draw_keep is not None:
            self._keep(batch, batch.draw_keep)
        hidden, full = self._scratch.hidden, self._head.found(rows)
        self._adapters.put_head(batch, full)
        sliced = self._slices.logits_of(batch, hidden)
        return self._draws.draw(batch, hidden, full, sliced, lambda r: self._logits(batch, r))

    def _logits(self, batch: Batch, rows: Int32) -> FullLogits:
        """Full logits of rows of the batch, adapters' own rows of the head included."""
        full = self._head.logits_of(rows, self._scratch.hidden)
        self._adapters.put_head(batch, full)
        return full

    def _compute(self, batch: Batch, wanted: Wanted, held: _Held | None) -> None:
        """The layers on the rows, and the head on what is wanted."""
        if self._head.in_file and wanted.rows.shape[0]:
            nothing = Wanted(_NOTHING, _NOTHING, ALL_IDS, *NO_LIKELY, self._clock)
            self._compute(batch, nothing, None)
            self._head.fill(wanted, self._scratch.hidden)
            return
        if held is None and self._adapters.brings_embeddings(batch):
            self.embed(batch)
            self._bound(wanted)(*self._given(batch, wanted, embeds=False))
            return
        bound = self._bound(wanted)
        if held is None:
            bound(*self._given(batch, wanted, embeds=True))
            return
        if held.bound is not bound:
            held.bound = bound
            held.call = bound.bound(*self._given(batch, wanted, embeds=True))
        held.call()

    def _bound(self, wanted: Wanted) -> Any:
        """kernels.step with what stays the same from step to step; another one where any of it has
        changed."""
        kept = (
            self._table, self._weights.layers, self._memory, self._record_shape,
            self._adapters.record, self._head.record(wanted.rows.shape[0]),
        )  # fmt: skip
        if not all(map(operator.is_, self._kept_arguments, kept)):
            self._step_bound = kernels.step.bound(*kept)
            self._kept_arguments = kept
        return self._step_bound

    def _given(self, batch: Batch, wanted: Wanted, *, embeds: bool) -> tuple[Any, ...]:
        """The arguments of kernels.step that a step has of its own."""
        rows = batch_rows(batch)
        spans = self._adapters.spans(batch)
        return embeds, batch.token_ids, rows, _ends(batch, rows), spans, wanted, self._work

    def _keep(self, batch: Batch, draw_keep: Int32) -> None:
        """Copy the hidden states of kept draws to their places."""
        draws = np.flatnonzero(draw_keep >= 0)
        if not draws.size:
            return
        most = int(draw_keep.max()) + 1
        if most > self._kept.shape[0]:
            self._kept = grown(self._kept, max(most, 2 * self._kept.shape[0]))
        self._kept[draw_keep[draws]] = self._scratch.hidden[batch.draw_rows[draws]]
