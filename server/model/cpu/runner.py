"""CpuRunner: the Runner for CPUs. Weights in panels, the fused forward pass, draws.

What: owns the packed weights, the paged KV cache and the step buffers; a Batch in, one id per
draw out. Models: Llama, Qwen2, Qwen3, Mistral, Gemma 3 (shape.py). dtype float32, or bfloat16
for the *stored weights*: activations, sums and logits are float32 either way.

`launch` runs the whole step on a worker thread of its own (numba releases the interpreter lock),
so the engine's host work overlaps with it as on a GPU. Bits do not depend on the thread count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from server.engine.batch import (
    NO_TOKEN_LEFT,
    Batch,
    DrawError,
    Drawn,
    DrawParams,
    HeadSlice,
    Int32,
)
from server.engine.reference_sampler import noise_key
from server.model.cpu import forward as cpu_forward
from server.model.cpu import sampler as cpu_sampler
from server.model.cpu.kernels import LANES, PANEL, pack_panels
from server.model.cpu.kv_pages import KvPages
from server.model.cpu.slices import SlicedHead, gather, padded
from server.model.cpu.threads import KernelThreads
from server.model.shape import ModelShape
from server.types import ModelInfo

Float32 = npt.NDArray[np.float32]

BLOCK_SIZE = LANES
"""Slots per block: one vector of keys."""

VERIFY_ROWS = 48
"""Rows of one product of `verify`: bounds the memory of its logits (1 MB a row at 262,144 ids)."""

_ALL_IDS = np.empty(0, np.int32)  # the ids of the full head, for cpu_sampler
_EMPTY_ROW = np.empty(0, np.float32)
_EMPTY_IDS = np.empty(0, np.int64)
_EMPTY_MASK = np.empty(0, np.uint32)
_EMPTY_BIAS = np.empty(0, np.float64)


class Weights(Protocol):
    """Named tensors read one at a time (loader.WeightReader)."""

    def names(self) -> Sequence[str]:
        """Names as transformers' state dict has them."""

    def get(self, name: str) -> Any:
        """The tensor, on the CPU."""


def default_threads() -> int:
    """Threads for the products: the cores this process may run on."""
    return len(os.sched_getaffinity(0))


def kv_bytes_per_block(shape: ModelShape) -> int:
    """Bytes of K and V that one block of 16 slots takes, all layers, float32."""
    width = -(-shape.head_dim // LANES) * LANES
    per_layer = shape.num_kv_heads * BLOCK_SIZE * (shape.head_dim + width)
    return 4 * shape.num_layers * per_layer


def _as_stored(tensor: Any, bf16: bool) -> npt.NDArray[Any]:
    """A torch tensor as float32, or as the bits of its bfloat16 rounding (uint16)."""
    import torch

    if bf16:
        stored: npt.NDArray[Any] = tensor.to(torch.bfloat16).view(torch.int16).numpy()
        return stored.view(np.uint16)
    as_float: npt.NDArray[Any] = tensor.float().numpy()
    return as_float


def _panels(num_outputs: int) -> int:
    return -(-num_outputs // PANEL)


class PackedWeights:
    """All weights of a model in the kernels' layout, in one arena. Read-only after construction.

    Peak memory while packing is the arena and one tensor. num_bytes: arena and norms; head_bytes:
    the LM head's panels, a second copy of a tied embedding table (which stays in its file).
    head: those panels, [panels, hidden_size, PANEL].
    """

    def __init__(
        self,
        shape: ModelShape,
        weights: Weights,
        *,
        dtype: str = "float32",
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"the CPU runner stores weights as float32 or bfloat16, not {dtype}")
        names = set(weights.names())
        if any(name.endswith("mlp.down_proj.bias") for name in names):
            raise ValueError("MLP biases are not supported on the CPU")
        self.bf16 = dtype == "bfloat16"
        s = shape
        qkv = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim
        attended = s.num_heads * s.head_dim
        pairs = _panels(s.intermediate_size)
        self.inner_size = pairs * PANEL
        self.panels = np.array(
            [_panels(qkv), _panels(s.hidden_size), 2 * pairs, _panels(s.hidden_size)], np.int64
        )
        widths = [s.hidden_size, attended, s.hidden_size, self.inner_size]
        sizes = [int(p) * k * PANEL for p, k in zip(self.panels, widths, strict=True)]
        self.head_panels = _panels(s.vocab_size)
        head_size = self.head_panels * s.hidden_size * PANEL
        item = np.uint16 if self.bf16 else np.float32
        self._arena = np.zeros(s.num_layers * sum(sizes) + head_size + 64, item)
        # Vectors that straddle cache lines cost a tenth of the bandwidth.
        skip = (-self._arena.ctypes.data % 64) // self._arena.itemsize
        arena = self._arena[skip:]
        self.addresses = np.zeros((s.num_layers, 4), np.int64)
        self.norms = np.zeros((s.num_layers, 4, s.hidden_size), np.float32)
        self.qk_norms = np.zeros((s.num_layers, 2, s.head_dim), np.float32)
        has_bias = "model.layers.0.self_attn.q_proj.bias" in names
        has_out_bias = "model.layers.0.self_attn.o_proj.bias" in names
        self.qkv_bias = np.zeros((s.num_layers, qkv if has_bias else 0), np.float32)
        self.out_bias = np.zeros((s.num_layers, s.hidden_size if has_out_bias else 0), np.float32)
        norm_names = {
            cpu_forward.NORM_IN: "input_layernorm",
            cpu_forward.NORM_MLP: "post_attention_layernorm",
        }
        if s.sandwich_norms:
            norm_names[cpu_forward.NORM_MLP] = "pre_feedforward_layernorm"
            norm_names[cpu_forward.NORM_POST_ATTENTION] = "post_attention_layernorm"
            norm_names[cpu_forward.NORM_POST_MLP] = "post_feedforward_layernorm"

        def vector(name: str) -> Float32:
            value: Float32 = weights.get(name).float().numpy()
            return value

        at = 0
        for layer in range(s.num_layers):
            prefix = f"model.layers.{layer}."
            attention = prefix + "self_attn."
            views = []
            for column, (num, k) in enumerate(zip(self.panels, widths, strict=True)):
                view = arena[at : at + sizes[column]].reshape(int(num), k, PANEL)
                self.addresses[layer, column] = view.ctypes.data
                views.append(view)
                at += sizes[column]
            parts = [
                _as_stored(weights.get(f"{attention}{n}_proj.weight"), self.bf16) for n in "qkv"
            ]
            pack_panels(np.concatenate(parts), views[cpu_forward.QKV])
            out = _as_stored(weights.get(f"{attention}o_proj.weight"), self.bf16)
            pack_panels(out, views[cpu_forward.OUT])
            for half, part in enumerate(("gate", "up")):
                weight = _as_stored(weights.get(f"{prefix}mlp.{part}_proj.weight"), self.bf16)
                pack_panels(weight, views[cpu_forward.GATE_UP][half::2])
            down = _as_stored(weights.get(f"{prefix}mlp.down_proj.weight"), self.bf16)
            padded = np.zeros((s.hidden_size, self.inner_size), down.dtype)
            padded[:, : s.intermediate_size] = down
            pack_panels(padded, views[cpu_forward.DOWN])
            for row, name in norm_names.items():
                self.norms[layer, row] = vector(f"{prefix}{name}.weight") + s.norm_offset
            if s.qk_norm:
                self.qk_norms[layer, 0] = vector(f"{attention}q_norm.weight") + s.norm_offset
                self.qk_norms[layer, 1] = vector(f"{attention}k_norm.weight") + s.norm_offset
            if has_bias:
                self.qkv_bias[layer] = np.concatenate(
                    [vector(f"{attention}{n}_proj.bias") for n in "qkv"]
                )
            if has_out_bias:
                self.out_bias[layer] = vector(f"{attention}o_proj.bias")
            if progress is not None:
                progress(layer + 1, s.num_layers + 1)
        head = arena[at : at + head_size].reshape(self.head_panels, s.hidden_size, PANEL)
        self.head = head
        self.head_address = head.ctypes.data
        head_name = "lm_head.weight" if "lm_head.weight" in names else "model.embed_tokens.weight"
        table = weights.get(head_name)
        for first in range(0, self.head_panels, 256):
            rows = table[first * PANEL : min((first + 256) * PANEL, s.vocab_size)]
            pack_panels(_as_stored(rows, self.bf16), head, first_panel=first)
        self.final_norm = vector("model.norm.weight") + np.float32(s.norm_offset)
        self.embedding = weights.get("model.embed_tokens.weight")
        self.head_bytes = head.nbytes
        self.num_bytes = self._arena.nbytes + self.norms.nbytes
        if progress is not None:
            progress(s.num_layers + 1, s.num_layers + 1)


class CpuRunner:
    """Runner on a CPU. One step in flight, on a worker thread of its own.

    num_blocks: blocks of 16 KV slots. max_rows: most rows a Batch may have. max_model_len: most
    positions a sequence may reach. Raises ValueError for sizes that do not fit together.
    """

    def __init__(
        self,
        shape: ModelShape,
        weights: PackedWeights,
        cos: Float32,
        sin: Float32,
        info: ModelInfo,
        *,
        num_blocks: int,
        max_rows: int,
        max_model_len: int,
        num_threads: int | None = None,
    ) -> None:
        if shape.num_heads % shape.num_kv_heads:
            raise ValueError("num_heads is not a multiple of num_kv_heads")
        if cos.shape[1] < max_model_len:
            raise ValueError(f"rope tables end at {cos.shape[1]}, before {max_model_len}")
        self.info = info
        self._shape = shape
        self._weights = weights
        self._threads = num_threads or default_threads()
        s, t = shape, self._threads
        self._cos, self._sin = cos, sin
        self._rope_ids = np.asarray(s.rope_ids, np.int64)
        self._windows = np.asarray(s.windows, np.int64)
        width = -(-s.head_dim // LANES) * LANES
        self._keys = np.zeros(
            (s.num_layers, s.num_kv_heads, num_blocks, s.head_dim, BLOCK_SIZE), np.float32
        )
        self._values = np.zeros(
            (s.num_layers, s.num_kv_heads, num_blocks, BLOCK_SIZE, width), np.float32
        )
        self._pages = KvPages((self._keys, self._values))
        group = s.num_heads // s.num_kv_heads
        room = -(-max_model_len // LANES) * LANES + 4 * LANES + max_rows // LANES * LANES
        self._scores = np.zeros((t, group, room), np.float32)
        self._acc = np.zeros((t, group, width + LANES), np.float32)
        panels = weights.panels
        self._x = np.zeros((max_rows, s.hidden_size), np.float32)
        self._normed = np.zeros_like(self._x)
        self._hidden = np.zeros_like(self._x)
        self._qkv = np.zeros((max_rows, int(panels[cpu_forward.QKV]) * PANEL), np.float32)
        self._attended = np.zeros((max_rows, s.num_heads * s.head_dim), np.float32)
        self._projected = np.zeros((max_rows, int(panels[cpu_forward.OUT]) * PANEL), np.float32)
        self._inner = np.zeros((max_rows, weights.inner_size), np.float32)
        self._scratch = np.zeros((t, 2 * cpu_forward.ROW_SPAN * PANEL), np.float32)
        self._counter = np.zeros(8, np.int64)
        self._head_rows = np.zeros((0, s.hidden_size), np.float32)
        self._logits = np.zeros((0, weights.head_panels * PANEL), np.float32)
        self._wide = np.zeros(s.vocab_size, np.float64)
        self._top_ids = np.zeros(32, np.int64)
        self._top_logprobs = np.zeros(32, np.float32)
        self._last_ids = np.zeros(0, np.int32)
        self._kept = np.zeros((0, s.hidden_size), np.float32)
        self._compact = np.zeros(LANES, np.float32)
        self._slices = SlicedHead(weights.head, t, self._counter)
        self.head_row_bytes = s.hidden_size * weights.head.itemsize
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="cpu-runner")
        self._kernel_threads = self._worker.submit(KernelThreads, s.hidden_size, t).result()
        self._in_flight: Future[Drawn] | None = None
        self.body_s = 0.0
        self.head_s = 0.0
        self.draw_s = 0.0

    def launch(self, batch: Batch) -> None:
        """Start a step on the worker thread. Raises RuntimeError when one is in flight."""
        if self._in_flight is not None:
            raise RuntimeError("a step is in flight already")
        if batch.num_rows > self._x.shape[0]:
            raise ValueError(f"{batch.num_rows} rows, at most {self._x.shape[0]} fit")
        if batch.num_rows:
            self._pages.use(int(batch.slots.max()) // BLOCK_SIZE)
        self._in_flight = self._worker.submit(self._step, batch)

    def wait(self) -> Drawn:
        """The ids of the step in flight; raises what the step raised."""
        if self._in_flight is None:
            raise RuntimeError("no step is in flight")
        try:
            return self._in_flight.result()
        finally:
            self._in_flight = None

    def move_slots(self, src: Int32, dst: Int32) -> None:
        """Copy KV of slots src[i] to dst[i]. No step may be in flight."""
        num, s = src.shape[0], self._shape
        keys = np.empty((num, s.head_dim), np.float32)
        values = np.empty((num, self._values.shape[4]), np.float32)
        cpu_forward.move_slots(src, dst, self._keys, self._values, keys, values)

    def copy_blocks(self, src: Int32, dst: Int32) -> None:
        """Copy KV of blocks src[i] to dst[i]. No step may be in flight."""
        cpu_forward.copy_blocks(src, dst, self._keys, self._values)

    @property
    def slice_bytes(self) -> int:
        """Bytes of head rows that were copied for slices."""
        return self._slices.num_bytes

    def load_table(self, table: int, token_ids: Int32) -> None:
        """Pack the head rows of ascending ids. No step may be in flight."""
        self._slices.load_table(table, token_ids)

    def drop_table(self, table: int) -> None:
        """Forget a table. No step may be in flight."""
        self._slices.drop_table(table)

    def load_rows(self, token_ids: Int32, places: Int32) -> None:
        """Copy head rows into the dynamic pool. No step may be in flight."""
        self._slices.load_rows(token_ids, places)

    def verify(self, batch: Batch, kept: Int32) -> Drawn:
        """Draw again from kept hidden states with the full head; see SlicingRunner.

        Runs on the worker thread, so that the products' threads are the same ones.
        """
        if self._in_flight is not None:
            raise RuntimeError("a step is in flight")
        return self._worker.submit(self._verify, batch, kept).result()

    def close(self) -> None:
        """Stop the worker thread. Idempotent."""
        self._worker.shutdown(wait=True)
        self._pages.close()

    def _step(self, batch: Batch) -> Drawn:
        started = time.perf_counter()
        self._kernel_threads.wake()
        self._forward(batch)
        after_body = time.perf_counter()
        if batch.draw_keep is not None:
            self._keep(batch, batch.draw_keep)
        rows = np.concatenate((_full_rows(batch), batch.score_rows))
        places = self._head(rows, self._hidden)
        sliced = self._sliced_head(batch)
        after_head = time.perf_counter()
        try:
            drawn = self._draw(batch, places, started, after_head - after_body, sliced)
        except DrawError as error:
            self._last_ids = error.drawn.token_ids
            raise
        finally:
            self._kernel_threads.rest()
        self._last_ids = drawn.token_ids
        self.body_s = after_body - started
        self.head_s = after_head - after_body
        self.draw_s = time.perf_counter() - after_head
        return drawn

    def _forward(self, batch: Batch) -> None:
        """Fill _hidden[: num_rows] with the final-normed states."""
        s, w, num = self._shape, self._weights, batch.num_rows
        ids = batch.token_ids
        if (batch.token_from >= 0).any():
            ids = np.where(batch.token_from >= 0, self._last_ids[batch.token_from], ids)
        import torch

        gathered = w.embedding[torch.from_numpy(ids.astype(np.int64))]
        self._x[:num] = gathered.float().numpy()
        if s.embedding_scale != 1.0:
            self._x[:num] *= np.float32(s.embedding_scale)
        cpu_forward.forward(
            num, self._x, batch.positions, batch.slots, batch.seq_ids, batch.prefix_len,
            batch.path_start, batch.path_len, batch.path_slots, batch.block_tables,
            w.addresses, w.bf16, w.panels, w.norms, w.qk_norms, w.qkv_bias, w.out_bias,
            w.final_norm, self._cos, self._sin, self._rope_ids, self._windows, self._keys,
            self._values, s.num_heads, s.head_dim, np.float32(s.attention_scale),
            np.float32(s.norm_eps), s.qk_norm, s.sandwich_norms, s.activation != "silu",
            self._normed, self._qkv, self._attended, self._projected, self._inner,
            self._scratch, self._scores, self._acc, self._hidden, self._counter, self._threads,
        )  # fmt: skip

    def _keep(self, batch: Batch, draw_keep: Int32) -> None:
        """Copy the hidden states of kept draws to their places."""
        draws = np.flatnonzero(draw_keep >= 0)
        if not draws.size:
            return
        most = int(draw_keep.max()) + 1
        if most > self._kept.shape[0]:
            grown = np.zeros((max(most, 2 * self._kept.shape[0]), self._kept.shape[1]), np.float32)
            grown[: self._kept.shape[0]] = self._kept
            self._kept = grown
        self._kept[draw_keep[draws]] = self._hidden[batch.draw_rows[draws]]

    def _head(self, rows: npt.NDArray[Any], states: Float32) -> dict[int, int]:
        """Full logits of states[rows], each row once; row -> place in _logits."""
        rows = np.unique(rows)
        num = rows.shape[0]
        if num > self._head_rows.shape[0]:
            room = max(num, 2 * self._head_rows.shape[0])
            self._head_rows = np.zeros((room, self._shape.hidden_size), np.float32)
            self._logits = np.zeros((room, self._logits.shape[1]), np.float32)
        if num:
            self._head_rows[:num] = states[rows]
            cpu_forward.product(
                self._head_rows, num, self._weights.head_address, self._weights.head_panels,
                self._logits, self._weights.bf16, self._counter, self._threads,
            )  # fmt: skip
            self._logits[:num, self._shape.vocab_size :] = -np.inf
        return {int(row): i for i, row in enumerate(rows)}

    def _sliced_head(self, batch: Batch) -> dict[int, tuple[Float32, Float32]]:
        """Per draw from a cached slice: its row's logits over the table and the dynamic rows.

        One product for each table and one over the dynamic rows, whatever the number of slices.
        """
        if batch.draw_slice is None:
            return {}
        by_table: dict[int, list[int]] = {}
        num_pool = 0
        for d, i in enumerate(batch.draw_slice.tolist()):
            if i >= 0 and batch.slices[i].table >= 0:
                by_table.setdefault(batch.slices[i].table, []).append(d)
        for slice_ in batch.slices:
            if slice_.columns.shape[0]:
                num_pool = max(num_pool, int(slice_.columns.max()) + 1 - slice_.num_static)
        views: dict[int, tuple[Float32, Float32]] = {}
        for table, draws in by_table.items():
            rows, where = np.unique(batch.draw_rows[draws], return_inverse=True)
            num = rows.shape[0]
            states = self._hidden[rows]
            static = self._slices.static_logits(table, states, num)
            pool = None
            if num_pool > 0:
                pool = self._slices.pool_logits(num_pool, states, num)
                if len(by_table) > 1:  # the next table's rows overwrite it
                    pool = pool[:num].copy()
            for d, place in zip(draws, where.tolist(), strict=True):
                views[d] = static[place], _EMPTY_ROW if pool is None else pool[place]
        return views

    def _verify(self, batch: Batch, kept: Int32) -> Drawn:
        started = time.perf_counter()
        num = batch.num_draws
        result = _Answers(num)
        head_s = 0.0
        for first in range(0, num, VERIFY_ROWS):
            draws = range(first, min(first + VERIFY_ROWS, num))
            began = time.perf_counter()
            wanted = kept[batch.draw_rows[draws.start : draws.stop]]
            places = self._head(wanted, self._kept)
            head_s += time.perf_counter() - began
            rows = [places[int(k)] for k in wanted]
            self._draw_full(batch, draws, rows, result, keeps=False)
        return result.drawn(None, time.perf_counter() - started, head_s)

    def _draw(
        self,
        batch: Batch,
        places: dict[int, int],
        started: float,
        head_s: float,
        sliced: dict[int, tuple[Float32, Float32]],
    ) -> Drawn:
        num = batch.num_draws
        result = _Answers(num)
        empty: list[int] = []
        if batch.draw_slice is None:
            rows = [places[r] for r in batch.draw_rows.tolist()]
            self._draw_full(batch, range(num), rows, result)
        else:
            chosen = batch.draw_slice.tolist()
            full = [d for d in range(num) if chosen[d] < 0]
            self._draw_full(batch, full, [places[int(batch.draw_rows[d])] for d in full], result)
            for d in range(num):
                if chosen[d] >= 0:
                    slice_ = batch.slices[chosen[d]]
                    if not self._draw_sliced(batch, d, slice_, sliced.get(d), places, result):
                        empty.append(d)
        scored = [
            self._logprob(self._logits[places[int(r)]], self._shape.vocab_size, int(t), int(k))
            for r, t, k in zip(batch.score_rows, batch.score_targets, batch.score_top, strict=True)
        ]
        if empty:  # last, because it takes the place of the other rows' logits
            places = self._head(batch.draw_rows[empty], self._hidden)
            self._draw_full(batch, empty, [places[int(batch.draw_rows[d])] for d in empty], result)
        return result.drawn(scored, time.perf_counter() - started, head_s)

    def _draw_full(
        self,
        batch: Batch,
        draws: Sequence[int],
        rows: list[int],
        result: _Answers,
        *,
        keeps: bool = True,
    ) -> None:
        """Draws from the full head; rows[i]: the place in _logits of draws[i].

        keeps: whether draws that Batch.draw_keep names go without logprobs.
        """
        params = [batch.params[p] for p in batch.draw_params[list(draws)].tolist()]
        plain = [
            _is_plain_greedy(p, batch.draw_mask[d]) for p, d in zip(params, draws, strict=True)
        ]
        if all(plain):
            ids = np.empty(len(rows), np.int32)
            cpu_sampler.greedy(np.array(rows, np.int64), self._logits, self._head_rows, ids)
            result.token_ids[list(draws)] = ids
        else:
            for d, row, is_plain in zip(draws, rows, plain, strict=True):
                result.token_ids[d] = self._draw_one(
                    batch, d, self._logits[row], self._shape.vocab_size, _ALL_IDS,
                    self._head_rows[row], is_plain,
                )  # fmt: skip
        for d, row, own in zip(draws, rows, params, strict=True):
            token = int(result.token_ids[d])
            if token == cpu_sampler.FAILED:
                result.failed.append((d, _reason(self._head_rows[row])))
            elif own.sampling.num_logprobs is not None and not (keeps and _is_kept(batch, d)):
                result.logprobs[d], result.ranks[d], result.top[d] = self._logprob(
                    self._logits[row], self._shape.vocab_size, token, own.sampling.num_logprobs
                )

    def _draw_sliced(
        self,
        batch: Batch,
        d: int,
        slice_: HeadSlice,
        view: tuple[Float32, Float32] | None,
        places: dict[int, int],
        result: _Answers,
    ) -> bool:
        """A draw from a slice; False when the request's constraints leave nothing of it.

        The sampler works on the slice's columns; the result is a vocabulary id. view: from
        _sliced_head, or None: the slice is not cached and its row has full logits. Logprobs are
        over the slice: log-softmax of its raw logits alone.
        """
        num = slice_.ids.shape[0]
        size = padded(num)
        if size > self._compact.shape[0]:
            self._compact = np.zeros(2 * size, np.float32)
        logits = self._compact[:size]
        row = int(batch.draw_rows[d])
        hidden = self._hidden[row]
        if view is None:
            logits[:num] = self._logits[places[row]][slice_.ids]
            logits[num:] = -np.inf
        else:
            gather(view[0], view[1], slice_, self._compact)
        own = batch.params[batch.draw_params[d]]
        plain = _is_plain_greedy(own, batch.draw_mask[d])
        column = self._draw_one(batch, d, logits, num, slice_.ids, hidden, plain)
        if column == cpu_sampler.FAILED:
            if cpu_sampler.is_finite_row(hidden):
                return False
            result.token_ids[d] = column
            result.failed.append((d, _reason(hidden)))
            return True
        result.token_ids[d] = slice_.ids[column]
        if own.sampling.num_logprobs is not None and not _is_kept(batch, d):
            value, rank, top = self._logprob(logits, num, column, own.sampling.num_logprobs)
            ids = slice_.ids
            result.logprobs[d], result.ranks[d] = value, rank
            result.top[d] = tuple((int(ids[i]), lp) for i, lp in top)
        return True

    def _draw_one(
        self,
        batch: Batch,
        d: int,
        logits: Float32,
        num: int,
        ids: Int32,
        hidden: Float32,
        plain: bool,
    ) -> int:
        """The column drawn from `num` logits; ids: empty, or the ids of the columns (a slice)."""
        if not cpu_sampler.is_finite_row(hidden):
            return cpu_sampler.FAILED
        if plain:
            return int(cpu_sampler.argmax(logits))
        params = batch.params[batch.draw_params[d]]
        mask_id = int(batch.draw_mask[d])
        mask = batch.masks[mask_id] if mask_id >= 0 else _EMPTY_MASK
        if not ids.shape[0] and _is_plain_greedy(params, -1):  # but for its grammar
            return int(cpu_sampler.masked_argmax(logits, mask, num))
        s = params.sampling
        path = _path_tokens(batch, d)
        counted, out, prompt = _EMPTY_IDS, _EMPTY_IDS, _EMPTY_IDS
        if s.has_penalties:
            counted, out, prompt = _counts(params, path)
        banned = _EMPTY_IDS
        if params.num_generated + len(path) < s.min_tokens:
            banned = params.banned_until.astype(np.int64)
        bias_ids, biases = _EMPTY_IDS, _EMPTY_BIAS
        if s.logit_bias:
            bias_ids = np.array([i for i, _ in s.logit_bias], np.int64)
            biases = np.array([b for _, b in s.logit_bias], np.float64)
        allowed = _EMPTY_IDS
        if s.allowed_token_ids is not None:
            allowed = np.array(s.allowed_token_ids, np.int64)
        if ids.shape[0]:  # from ids to columns; what is not in the slice cannot be drawn anyway
            bias_ids, found = _columns(ids, bias_ids)
            biases = biases[found]
            allowed, _ = _columns(ids, allowed)
            banned, _ = _columns(ids, banned)
            counted, found = _columns(ids, counted)
            out, prompt = out[found], prompt[found]
        key = noise_key(s.seed, params.choice_id, int(batch.draw_positions[d]))
        return int(
            cpu_sampler.draw(
                logits, num, float(s.temperature), int(s.top_k),
                float(s.top_p), float(s.min_p), np.uint32(key[0]), np.uint32(key[1]), bias_ids,
                biases, allowed, s.allowed_token_ids is not None, mask, banned, counted, out,
                prompt, float(s.repetition_penalty), float(s.frequency_penalty),
                float(s.presence_penalty), self._wide[:num], ids,
            )
        )  # fmt: skip

    def _logprob(
        self, logits: Float32, num: int, column: int, num_top: int
    ) -> tuple[float, int, tuple[tuple[int, float], ...]]:
        """(logprob, rank, top) of a column of `num` logits that end in -inf pads."""
        num_top = min(num_top, num)
        if num_top > self._top_ids.shape[0]:
            self._top_ids = np.zeros(num_top, np.int64)
            self._top_logprobs = np.zeros(num_top, np.float32)
        value, rank = cpu_sampler.logprob(
            logits, num, column, num_top, self._top_ids, self._top_logprobs
        )
        top = zip(
            self._top_ids[:num_top].tolist(), self._top_logprobs[:num_top].tolist(), strict=True
        )
        return float(value), int(rank), tuple(top)


class _Answers:
    """The parts of a Drawn while it is made."""

    def __init__(self, num: int) -> None:
        self.token_ids = np.empty(num, np.int32)
        self.logprobs = np.full(num, np.nan, np.float32)
        self.ranks = np.zeros(num, np.int32)
        self.top: list[tuple[tuple[int, float], ...]] = [()] * num
        self.failed: list[tuple[int, str]] = []

    def drawn(
        self,
        scored: Sequence[tuple[float, int, tuple[tuple[int, float], ...]]] | None,
        model_s: float,
        head_s: float,
    ) -> Drawn:
        """The whole. Raises DrawError when some draws failed."""
        scored = scored or ()
        result = Drawn(
            self.token_ids,
            self.logprobs,
            self.ranks,
            self.top,
            np.array([x[0] for x in scored], np.float32),
            np.array([x[1] for x in scored], np.int32),
            [x[2] for x in scored],
            model_s,
            head_s,
        )
        if self.failed:
            raise DrawError(tuple(sorted(self.failed)), result)
        return result


def _reason(hidden: Float32) -> str:
    """Why no id could be drawn from a hidden state."""
    if cpu_sampler.is_finite_row(hidden):
        return NO_TOKEN_LEFT
    return "the model produced values that are not finite"


def _full_rows(batch: Batch) -> Int32:
    """Rows whose draws need the full head's logits."""
    if batch.draw_slice is None:
        return batch.draw_rows
    uncached = np.array([s.table < 0 for s in batch.slices] + [True])  # -1 is the full head
    rows: Int32 = batch.draw_rows[uncached[batch.draw_slice]]
    return rows


def _is_kept(batch: Batch, d: int) -> bool:
    return batch.draw_keep is not None and bool(batch.draw_keep[d] >= 0)


def _columns(
    ids: Int32, wanted: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """(columns of the wanted ids that a slice has, which ones those are)."""
    at = np.searchsorted(ids, wanted)
    found = at < ids.shape[0]
    found[found] = ids[at[found]] == wanted[found]
    return at[found].astype(np.int64), found


def _is_plain_greedy(params: DrawParams, mask_id: int) -> bool:
    """Whether the draw is the argmax of the raw logits."""
    s = params.sampling
    return (
        s.temperature == 0.0
        and mask_id < 0
        and not s.logit_bias
        and s.allowed_token_ids is None
        and not s.has_penalties
        and s.min_tokens == 0
    )


def _path_tokens(batch: Batch, d: int) -> list[int]:
    """Drafted tokens between the root and the row of draw d."""
    tokens = []
    while batch.draw_parent[d] >= 0:
        tokens.append(int(batch.token_ids[batch.draw_rows[d]]))
        d = int(batch.draw_parent[d])
    return tokens


def _counts(
    params: DrawParams, path: list[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Penalty counts of a node: its sequence's, plus its path's."""
    ids = params.count_ids.astype(np.int64)
    out = params.count_out.astype(np.int64)
    prompt = params.count_prompt.astype(np.int64)
    if not path:
        return ids, out, prompt
    # A path is short and the sampler does not need the ids in order: known ids are counted in
    # place, new ones appended.
    new: dict[int, int] = {}
    for token in path:
        at = int(np.searchsorted(ids, token))
        if at < ids.shape[0] and ids[at] == token:
            out[at] += 1
        else:
            new[token] = new.get(token, 0) + 1
    if not new:
        return ids, out, prompt
    return (
        np.concatenate((ids, np.fromiter(new.keys(), np.int64))),
        np.concatenate((out, np.fromiter(new.values(), np.int64))),
        np.concatenate((prompt, np.zeros(len(new), np.int64))),
    )
