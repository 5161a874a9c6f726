"""TorchRunner: Batch -> ids with transformers' own modules as the body. The general path.

It serves every supported family on "cuda", and on "cpu" as the reference of the CPU fast path. A
step is: one upload of everything the Batch holds (one pinned copy), the body on all rows with our
paged attention, the LM head on the rows that draw or are scored, the sampler, one download.

On CUDA nothing in `launch` waits for the device; `wait` waits for an event behind the download.
Two steps may be in flight, so that a row can take the id that the previous step draws
(Batch.token_from); with the embedding in CPU memory such a row's `launch` waits for that step,
because its id is needed there. All work is queued on one stream of the runner, KV moves included,
but for copies of the LM head's rows, which have a second one (transfers.py).

Vocabulary slices: draws are sorted by what they see, the full head or a table's slices; each kind
goes through the head and the sampler in slabs of rows (torch_slices.py). `verify` draws again from
kept hidden states with the full head, on the device, streamed to it, or on the CPU.

What ran where: the whole path with the torch attention runs in CI on the CPU; the Triton kernels
run there under the interpreter. Nothing here was run on a GPU by its author: run
`python loadtest/gpu_check.py` on one before trusting it.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from server.engine.batch import NO_TOKEN_LEFT, Batch, DrawError, Drawn, DrawParams, Int32
from server.model.gpu import attention as paged
from server.model.gpu.graphs import DecodeGraphs, row_bucket
from server.model.gpu.kv_cache import KvCache
from server.model.gpu.lm_head import FullHead, LmHead, StreamedHead
from server.model.gpu.sampler import (
    NAN_LOGITS,
    DrawPlan,
    Sampler,
    has_choice,
    plan_draws,
    token_logprobs,
)
from server.model.gpu.slices import Placed, TorchSlices, gathered
from server.model.gpu.transfers import TURNS, HostTable, SideStream, Upload
from server.types import ModelInfo, SamplingParams

Array = npt.NDArray[Any]

MAX_IN_FLIGHT = TURNS
STREAMED_BYTES = 128 << 20
"""Memory of the logits that share one pass over a head in CPU memory."""


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
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
class _Slab:
    """Rows (ascending, unique) that go through the head together, and what reads their logits.

    start: where its rows begin among the step's head rows. cut: None for the whole vocabulary.
    """

    rows: Int32
    start: int
    draw_ids: Array
    plan: DrawPlan
    score_ids: Array
    num_score_top: int
    cut: _Cut | None = None

    @property
    def end(self) -> int:
        return self.start + int(self.rows.shape[0])


@dataclass(slots=True)
class _Segment:
    """Results of one kind, to be read back: device tensors of 4-byte items, in order."""

    kind: Literal["draw", "logprob", "score"]
    index: Array
    tensors: tuple[torch.Tensor, ...]


@dataclass(slots=True)
class _InFlight:
    """A launched step until `wait` returns it.

    products: begin and end of each product of the head, as events on a GPU, else in seconds.
    placed: slices that it was the first to see.
    """

    batch: Batch
    begin_s: float
    products: list[tuple[Any, Any]] = field(default_factory=list)
    placed: Sequence[Placed] = ()
    segments: list[_Segment] = field(default_factory=list)
    results: torch.Tensor | None = None
    begin: torch.cuda.Event | None = None
    done: torch.cuda.Event | None = None
    model_s: float = 0.0
    head_s: float = 0.0
    drawn: Drawn | DrawError | None = None
    error: Exception | None = None

    def finish(self) -> Drawn:
        """Its results, once they are there. Raises DrawError."""
        if self.drawn is None:
            if self.done is not None and self.begin is not None:
                self.done.synchronize()
                self.model_s = self.begin.elapsed_time(self.done) / 1e3
                self.head_s = sum(a.elapsed_time(b) for a, b in self.products) / 1e3
            else:
                self.head_s = sum(b - a for a, b in self.products)
            try:
                self.drawn = _read_back(self)
            except DrawError as error:
                self.drawn = error
        if isinstance(self.drawn, DrawError):
            raise self.drawn
        return self.drawn


class TorchRunner:
    """server.engine.batch.SlicingRunner on torch.

    module: a causal LM of transformers, in eval mode, on `device`; the runner takes it over and
    switches its attention. attention: "triton" (the default on CUDA) or "torch". cuda_graphs:
    replay captured graphs for decode-shaped steps. head_bytes: memory that a slab of logits and the
    work on it may take; more rows go through the head in several slabs. partial_bytes: memory for
    split attention.

    embedding: [rows, hidden_size] in CPU memory, from which the step's rows are gathered into its
    upload; None: the module's own, on the device. head: [rows, hidden_size] in CPU memory, where
    the full head stays; None: the module's own, on the device. What is given here may be on the
    meta device in the module. verify_on_cpu: `verify` multiplies there, instead of copying the head
    through the device; only with `head`.

    Raises ValueError when a number does not fit the model, MemoryError when CPU memory cannot be
    page-locked.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        *,
        name: str,
        device: torch.device,
        num_blocks: int,
        block_size: int = 16,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        eos_token_ids: Sequence[int] = (),
        num_token_ids: int | None = None,
        fingerprint: str = "",
        attention: paged.AttentionName | None = None,
        cuda_graphs: bool = False,
        head_bytes: int = 512 << 20,
        partial_bytes: int = 256 << 20,
        embedding: torch.Tensor | None = None,
        head: torch.Tensor | None = None,
        verify_on_cpu: bool = False,
        side: SideStream | None = None,
    ) -> None:
        config = module.config
        if max_model_len > config.max_position_embeddings:
            raise ValueError(
                f"max_model_len {max_model_len} is above the model's "
                f"{config.max_position_embeddings} positions"
            )
        if block_size & (block_size - 1) or block_size < 1:
            raise ValueError(f"block_size must be a power of two, not {block_size}")
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._attention = attention or ("triton" if self._on_gpu else "torch")
        if cuda_graphs and self._attention != "triton":
            raise ValueError("CUDA graphs need the triton attention")
        paged.register()
        module.config._attn_implementation = paged.NAME
        self._body = module.base_model
        self._side = side or SideStream(device)
        self._host_head: HostTable | None = None
        self._cpu_head: LmHead | None = None
        self._head = self._make_head(module, head, num_token_ids, verify_on_cpu)
        dtype = self._head.weight.dtype
        self.head_row_bytes = int(self._head.weight.shape[1]) * dtype.itemsize
        if embedding is not None and self._host_head is not None and embedding is head:
            embedding = self._host_head.tensor
        self._embedding = embedding
        embed: Any = module.get_input_embeddings()
        # Gemma's scale, rounded as transformers' own embedding does.
        scale = getattr(embed, "embed_scale", None)
        self._embed_scale = None if scale is None else scale.to(device=device, dtype=dtype)
        if embedding is not None and embedding.dtype != dtype:
            raise ValueError(f"the embedding is {embedding.dtype}, the head {dtype}")
        self._sampler = Sampler(use_triton=self._on_gpu)
        self._cpu_sampler = Sampler()
        self._slices = TorchSlices(self._head, device, self._side)
        self._kept = torch.zeros((0, self._head.weight.shape[1]), dtype=dtype, device=device)
        num_heads = config.num_attention_heads
        num_kv_heads = config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        self._cache = KvCache(
            num_layers=config.num_hidden_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype,
            device=device,
        )
        self._block_size = block_size
        self._max_blocks = -(-max_model_len // block_size)
        self._shape = paged.TileShape.of(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_model_len=max_model_len,
            num_bytes=partial_bytes,
        )
        self._partials: Any = None
        if self._attention == "triton":
            from server.model.gpu.triton_kernels import Partials

            self._partials = Partials(self._shape, num_heads, head_dim, device)
        self._head_bytes = head_bytes
        self._previous_ids = torch.zeros(max(1, max_num_seqs), dtype=torch.int32, device=device)
        self._num_previous = 0
        row_bytes = 4 * (12 + paged.TILE_FIELDS) * max_num_batched_tokens
        table_bytes = 4 * max_num_seqs * self._max_blocks
        if embedding is not None:
            row_bytes += self.head_row_bytes * max_num_batched_tokens
        self._upload = Upload(device, row_bytes + table_bytes + (1 << 16))
        self._graphs = DecodeGraphs(device, max_num_seqs) if cuda_graphs else None
        self._graph_generation = self._upload.generation
        self._stream: torch.cuda.Stream | None = None
        if self._on_gpu:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._in_flight: deque[_InFlight] = deque()
        self._last: _InFlight | None = None  # the step launched last, for `token_from`
        self._closed = False
        self.info = ModelInfo(
            name=name,
            vocab_size=self._head.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=tuple(eos_token_ids),
            num_blocks=num_blocks,
            block_size=block_size,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            fingerprint=fingerprint,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )

    def _make_head(
        self,
        module: PreTrainedModel,
        table: torch.Tensor | None,
        num_token_ids: int | None,
        verify_on_cpu: bool,
    ) -> FullHead:
        own: Any = module.get_output_embeddings()  # type: ignore[no-untyped-call]
        if own is None:
            raise ValueError(f"{type(module).__name__} has no LM head")
        bias = getattr(own, "bias", None)
        if table is None:
            if verify_on_cpu:
                raise ValueError("verify_on_cpu needs a head in CPU memory")
            return LmHead(own.weight, bias, num_token_ids)
        self._host_head = HostTable(table, self._device)
        if verify_on_cpu:
            cpu_bias = None if bias is None else bias.cpu()
            self._cpu_head = LmHead(self._host_head.tensor, cpu_bias, num_token_ids)
        return StreamedHead(self._host_head, bias, num_token_ids, self._side)

    # The Runner protocol.

    def launch(self, batch: Batch) -> None:
        """Queue a step. What fails here is raised by `wait`, in order.

        Raises RuntimeError when two steps are in flight already, or after close.
        """
        self._check_open()
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            raise RuntimeError(f"{MAX_IN_FLIGHT} steps are in flight: call wait first")
        step = _InFlight(batch, time.perf_counter())
        try:
            with torch.inference_mode(), self._on_stream():
                self._start(step)
            self._last = step
        except Exception as error:
            step.error = error
            self._slices.forget(step.placed)  # it may not have come to writing them
        self._in_flight.append(step)

    def wait(self) -> Drawn:
        """The oldest step in flight.

        Raises what its launch raised, server.engine.batch.DrawError when some of its draws have no
        answer, and RuntimeError when nothing is in flight.
        """
        self._check_open()
        if not self._in_flight:
            raise RuntimeError("no step is in flight")
        step = self._in_flight.popleft()
        if step.error is not None:
            raise step.error
        return step.finish()

    def move_slots(self, src: Int32, dst: Int32) -> None:
        """See Runner; raises as KvCache.move_slots does."""
        self._check_open()
        with torch.inference_mode(), self._on_stream():
            self._cache.move_slots(src, dst)

    def copy_blocks(self, src: Int32, dst: Int32) -> None:
        """See Runner; raises as KvCache.copy_blocks does."""
        self._check_open()
        with torch.inference_mode(), self._on_stream():
            self._cache.copy_blocks(src, dst)

    # The SlicingRunner protocol.

    def load_table(self, table: int, token_ids: Int32) -> None:
        """See SlicingRunner; raises as TorchSlices.load_table does."""
        self._check_idle()
        with torch.inference_mode(), self._on_stream():
            self._slices.load_table(table, token_ids)

    def drop_table(self, table: int) -> None:
        """See SlicingRunner."""
        self._check_idle()
        with torch.inference_mode(), self._on_stream():
            self._slices.drop_table(table)

    def load_rows(self, token_ids: Int32, places: Int32) -> None:
        """See SlicingRunner; raises as TorchSlices.load_rows does."""
        self._check_idle()
        with torch.inference_mode(), self._on_stream():
            self._slices.load_rows(token_ids, places)

    def verify(self, batch: Batch, kept: Int32) -> Drawn:
        """See SlicingRunner. The full head is multiplied where it lies, or streamed to the device:
        whole windows share a pass over it. Waits for the answer."""
        self._check_idle()
        step = _InFlight(batch, time.perf_counter())
        if kept.shape[0] and int(kept.max()) >= self._kept.shape[0]:
            raise ValueError("a hidden state that was never kept")
        with torch.inference_mode(), self._on_stream():
            self._mark_begin(step)
            slabs = self._plan_full(batch, np.arange(batch.num_draws), 0)
            arrays = _slab_arrays(batch, slabs, keep_ids=False)
            tensors = self._upload({"kept": kept} | arrays)
            hidden = self._kept.index_select(0, tensors["kept"])
            if self._cpu_head is None:
                self._run_slabs(step, slabs, hidden, tensors, self._head, self._sampler)
            else:
                there = {k: torch.from_numpy(np.ascontiguousarray(a)) for k, a in arrays.items()}
                self._run_slabs(step, slabs, hidden.cpu(), there, self._cpu_head, self._cpu_sampler)
            self._mark_end(step)
        return step.finish()

    @property
    def slice_bytes(self) -> int:
        """Bytes of head rows that slices keep beside the full head."""
        return self._slices.num_bytes

    def close(self) -> None:
        """Wait for the device and let go of weights and KV memory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._in_flight.clear()
        if self._stream is not None:
            self._stream.synchronize()
        self._side.synchronize()
        del self._body, self._head, self._cache, self._partials, self._graphs, self._upload
        del self._slices, self._kept, self._cpu_head, self._embedding, self._last
        if self._host_head is not None:
            self._host_head.close()
            self._host_head = None
        if self._on_gpu:
            torch.cuda.empty_cache()

    def warm_up(self) -> int:
        """Compile kernels and capture graphs before the first request; how many steps it ran.

        Call it before any KV is kept: it writes to the first slots. Without it the first steps of
        each kind do the same work while a client waits (seconds, with Triton).
        """
        self._check_open()
        if self._in_flight:
            raise RuntimeError("warm_up with a step in flight")
        longest = self.info.max_model_len
        shapes = [(1, 1, 1), (1, 2, 2), (1, 1, longest), (1, 2, longest)]
        shapes.append((1, paged.MAX_SPLIT_RUN + 1, paged.MAX_SPLIT_RUN + 1))
        if self._graphs is not None:
            buckets = {row_bucket(n + 1, self._graphs.largest) for n in range(self._graphs.largest)}
            splits = [1 << n for n in range(self._shape.max_splits.bit_length())]
            shapes += [
                (bucket, 1, min(longest, self._shape.split_size * num_splits))
                for bucket in sorted(b for b in buckets if b is not None)
                for num_splits in splits
            ]
        num_steps = 0
        for num_seqs, rows, length in shapes:
            fits = num_seqs * rows <= min(self._cache.num_slots, self.info.max_num_batched_tokens)
            if fits and rows <= length <= longest:
                self.launch(_warm_up_batch(num_seqs, rows, length, self._max_blocks))
                self.wait()
                num_steps += 1
        return num_steps

    # One step.

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the runner is closed")

    def _check_idle(self) -> None:
        self._check_open()
        if self._in_flight:
            raise RuntimeError("a step is in flight")

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        if self._stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._stream)

    def _start(self, step: _InFlight) -> None:
        batch = step.batch
        self._check(batch)
        self._mark_begin(step)
        arrays, graph_key, plan = self._plan_body(batch)
        slabs, step.placed = self._plan_head(batch)
        keep = _kept_draws(batch)
        if keep.shape[0]:
            assert batch.draw_keep is not None
            arrays["keep_rows"] = batch.draw_rows[keep]
            arrays["keep_places"] = batch.draw_keep[keep]
            self._make_room_to_keep(int(arrays["keep_places"].max()) + 1)
        arrays |= _slab_arrays(batch, slabs, keep_ids=True) | self._slices.arrays(step.placed)
        tensors = self._upload(arrays)
        self._slices.write(step.placed, tensors)

        hidden = self._run_body(batch, tensors, plan, graph_key)
        if keep.shape[0]:
            rows = hidden.index_select(0, tensors["keep_rows"])
            self._kept.index_copy_(0, tensors["keep_places"].long(), rows)
        self._run_slabs(step, slabs, hidden, tensors, self._head, self._sampler)
        self._num_previous = batch.num_draws
        self._mark_end(step)

    def _mark_begin(self, step: _InFlight) -> None:
        if self._on_gpu:
            step.begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            step.begin.record()

    def _mark_end(self, step: _InFlight) -> None:
        """Queue the way back of the results, and the event behind it."""
        if step.segments:
            flat = torch.cat(
                [t.reshape(-1).view(torch.int32) for s in step.segments for t in s.tensors]
            )
            if flat.is_cuda:
                step.results = torch.empty(flat.shape, dtype=torch.int32, pin_memory=True)
                step.results.copy_(flat, non_blocking=True)
            else:
                step.results = flat
        if self._on_gpu:
            step.done = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            step.done.record()
        else:
            step.model_s = time.perf_counter() - step.begin_s

    def _make_room_to_keep(self, num: int) -> None:
        if num > self._kept.shape[0]:
            grown = self._kept.new_zeros((max(num, 2 * self._kept.shape[0]), self._kept.shape[1]))
            grown[: self._kept.shape[0]] = self._kept
            self._kept = grown

    def _check(self, batch: Batch) -> None:
        """Indices that would read or write outside the device's memory: on a GPU they are not
        errors of a step but the end of the process."""
        info = self.info
        if batch.num_rows == 0:
            raise ValueError("a batch without rows")
        if int(batch.slots.min()) < 0 or int(batch.slots.max()) >= self._cache.num_slots:
            raise ValueError("a row's slot is outside the KV cache")
        if int(batch.token_ids.min()) < 0 or int(batch.token_ids.max()) >= info.vocab_size:
            raise ValueError("a row's token id is outside the vocabulary")
        if int(batch.token_from.max()) >= self._num_previous:
            raise ValueError("a row takes its token from a draw that the previous batch lacks")
        if int(batch.positions.min()) < 0 or int(batch.positions.max()) >= info.max_model_len:
            raise ValueError("a row's position is outside the model's length")
        tables = batch.block_tables
        if int(batch.seq_ids.max()) >= tables.shape[0] or int(tables.max()) >= info.num_blocks:
            raise ValueError("a row's sequence or block does not exist")
        if int(batch.prefix_len.max()) > tables.shape[1] * self._block_size:
            raise ValueError("a row's prefix is longer than its block table")
        if int((batch.path_start + batch.path_len).max()) > batch.path_slots.shape[0]:
            raise ValueError("a row's path ends outside path_slots")
        if batch.path_slots.shape[0] and int(batch.path_slots.max()) >= self._cache.num_slots:
            raise ValueError("a path slot is outside the KV cache")

    def _plan_head(self, batch: Batch) -> tuple[list[_Slab], list[Placed]]:
        """(what goes through the head, in order; slices whose slots must be written first)."""
        draws = np.arange(batch.num_draws)
        if batch.draw_slice is None:
            return self._plan_full(batch, draws, 0), []
        cached, new = self._slices.place(batch.slices)
        places = {id(p.slice): p for p in cached}
        by_table: dict[int, list[int]] = {}
        full: list[int] = []
        for d, nth in enumerate(batch.draw_slice.tolist()):
            if nth >= 0 and has_choice(batch, d, batch.slices[nth].ids):
                by_table.setdefault(batch.slices[nth].table, []).append(d)
            else:
                full.append(d)
        slabs = self._plan_full(batch, np.asarray(full, np.int64), 0)
        for table, chosen in sorted(by_table.items()):
            start = slabs[-1].end if slabs else 0
            slabs += self._plan_cut(batch, table, np.asarray(chosen), places, start)
        return slabs, new

    def _plan_full(self, batch: Batch, draws: Array, first: int) -> list[_Slab]:
        """Slabs of the draws from the full head and of all scores."""
        all_rows = np.unique(np.concatenate([batch.draw_rows[draws], batch.score_rows]))
        draw_at = np.searchsorted(all_rows, batch.draw_rows[draws])
        score_at = np.searchsorted(all_rows, batch.score_rows)
        vocab_size = self._head.vocab_size
        at_once = max(1, self._head_bytes // (vocab_size * _bytes_per_logit(batch)))
        slabs = []
        for start in range(0, all_rows.shape[0], at_once):
            rows = all_rows[start : start + at_once].astype(np.int32)
            end = start + rows.shape[0]
            own = np.flatnonzero((draw_at >= start) & (draw_at < end))
            scores = np.flatnonzero((score_at >= start) & (score_at < end))
            plan = plan_draws(batch, draws[own], draw_at[own] - start, vocab_size)
            num_top = int(batch.score_top[scores].max()) if scores.shape[0] else 0
            slabs.append(_Slab(rows, first + start, draws[own], plan, scores, num_top))
        return slabs

    def _plan_cut(
        self,
        batch: Batch,
        table: int,
        draws: Array,
        places: Mapping[int, Placed],
        first: int,
    ) -> list[_Slab]:
        """Slabs of draws from slices of one table, or of none (-1)."""
        assert batch.draw_slice is not None
        own = [places[id(batch.slices[int(batch.draw_slice[d])])] for d in draws]
        most = max(p.num_ids for p in own)
        width = -(-most // 16) * 16
        pool_width = max(p.pool_width for p in own)
        per_row = width * (_bytes_per_logit(batch) + 24)
        if table >= 0:
            per_row += 4 * self._slices.num_columns(table, pool_width)
        else:
            per_row += 4 * self._head.vocab_size
        at_once = max(1, self._head_bytes // per_row)
        order = np.argsort(batch.draw_rows[draws], kind="stable")
        none = np.empty(0, np.int64)
        slabs: list[_Slab] = []
        for start in range(0, draws.shape[0], at_once):
            part = order[start : start + at_once]
            rows, at = np.unique(batch.draw_rows[draws[part]], return_inverse=True)
            placed = [own[i] for i in part]
            cut = _Cut(
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
            slabs.append(_Slab(rows.astype(np.int32), begin, draws[part], plan, none, 0, cut))
        return slabs

    def _plan_body(
        self, batch: Batch
    ) -> tuple[dict[str, Array], tuple[int, int] | None, paged.TilePlan | None]:
        """(arrays the body reads, graph key or None, attention's plan or None for torch)."""
        arrays: dict[str, Array] = {
            "token_ids": batch.token_ids,
            "token_from": batch.token_from,
            "positions": batch.positions,
            "seq_ids": batch.seq_ids,
            "slots": batch.slots,
            "prefix_len": batch.prefix_len,
            "path_start": batch.path_start,
            "path_len": batch.path_len,
            "path_slots": batch.path_slots,
            "block_tables": batch.block_tables,
        }
        if self._embedding is not None:
            arrays["embeds"] = gathered(self._embedding, self._token_ids(batch))
        if self._attention == "torch":
            return arrays, None, None
        plan = paged.plan_tiles(batch, self._shape)
        key = self._graph_key(batch, plan)
        if key is not None:
            plan = pad_to_bucket(arrays, plan, key, self._cache.trash_slot, self._max_blocks)
        for i, group in enumerate(plan.groups):
            arrays[f"tiles{i}"] = group.tiles
        arrays["split_rows"] = plan.split_rows
        return arrays, key, plan

    def _token_ids(self, batch: Batch) -> Int32:
        """The rows' ids, on the host. A row that takes the id drawn by the step before waits for
        that step here: only an embedding on the device lets a step be launched ahead of it."""
        taken = batch.token_from >= 0
        if not taken.any():
            return batch.token_ids
        assert self._last is not None  # _check: there is a previous batch
        try:
            drawn = self._last.finish()
        except DrawError as error:
            drawn = error.drawn
        ids = np.maximum(drawn.token_ids, 0)  # a draw without an answer: as in _keep_ids
        return np.where(taken, ids[batch.token_from], batch.token_ids)

    def _graph_key(self, batch: Batch, plan: paged.TilePlan) -> tuple[int, int] | None:
        """(rows, splits) of the graph for a decode-shaped batch, or None to run it plainly."""
        if self._graphs is None or len(plan.groups) != 1:
            return None
        group = plan.groups[0]
        if group.block_m != paged.SMALL_M or group.tiles.shape[0] != batch.num_rows:
            return None
        if int(batch.path_len.max()) > 0 or batch.block_tables.shape[1] > self._max_blocks:
            return None
        num_rows = row_bucket(batch.num_rows, self._graphs.largest)
        if num_rows is None or batch.block_tables.shape[0] > num_rows:
            return None
        num_splits = 1 << max(0, group.num_splits - 1).bit_length()
        if num_splits > 1 and num_rows * num_splits > self._shape.max_partials:
            return None
        return num_rows, num_splits

    def _run_body(
        self,
        batch: Batch,
        tensors: Mapping[str, torch.Tensor],
        plan: paged.TilePlan | None,
        graph_key: tuple[int, int] | None,
    ) -> torch.Tensor:
        """Last hidden states [num_rows (or more, in a graph), hidden_size]."""
        step = paged.StepTensors(
            tensors["positions"],
            tensors["seq_ids"],
            tensors["slots"],
            tensors["prefix_len"],
            tensors["path_start"],
            tensors["path_len"],
            tensors["path_slots"],
            tensors["block_tables"],
        )
        attention: paged.Attention
        if plan is None:
            attention = paged.TorchAttention(batch, step, self._block_size)
        else:
            from server.model.gpu.triton_kernels import TritonAttention

            attention = TritonAttention(
                step,
                [
                    (tensors[f"tiles{i}"], group.block_m, group.num_splits)
                    for i, group in enumerate(plan.groups)
                ],
                tensors["split_rows"],
                plan.num_splits,
                self._shape,
                self._partials,
                self._block_size,
            )
        paged_step = paged.PagedStep(self._cache, attention)
        takes_drawn = graph_key is not None or bool((batch.token_from >= 0).any())

        def inputs() -> dict[str, torch.Tensor]:
            if self._embedding is not None:
                embeds = tensors["embeds"].view(self._embedding.dtype)
                if self._embed_scale is not None:
                    embeds = embeds * self._embed_scale
                return {"inputs_embeds": embeds[None]}
            token_ids = tensors["token_ids"]
            if takes_drawn:
                source = tensors["token_from"]
                drawn = self._previous_ids.index_select(0, source.clamp(min=0))
                token_ids = torch.where(source >= 0, drawn, token_ids)
            return {"input_ids": token_ids[None]}

        def forward() -> torch.Tensor:
            result = self._body(
                **inputs(),
                position_ids=tensors["positions"][None],
                use_cache=False,
                paged=paged_step,
            )
            hidden: torch.Tensor = result.last_hidden_state[0]
            return hidden

        if graph_key is None or self._graphs is None:
            return forward()
        if self._graph_generation != self._upload.generation:
            self._graphs.forget()
            self._graph_generation = self._upload.generation
        return self._graphs.run(graph_key, forward)

    def _run_slabs(
        self,
        step: _InFlight,
        slabs: Sequence[_Slab],
        hidden: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
        head: FullHead,
        sampler: Sampler,
    ) -> None:
        """The head on every slab's rows of `hidden`, and its draws and scores."""
        shared: list[_Slab] = []
        logits = hidden[:0]
        for i, slab in enumerate(slabs):
            prefix = f"{i}."
            own = {k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)}
            if slab.cut is not None and slab.cut.table >= 0:
                with self._timed(step):
                    seen = self._slices.logits(
                        _rows_of(hidden, [slab], tensors), slab.cut.table, slab.cut.pool_width
                    )
            else:
                if slab not in shared:
                    shared = _sharing(slabs[i:], head)
                    with self._timed(step):
                        logits = head.logits(_rows_of(hidden, shared, tensors))
                seen = logits[slab.start - shared[0].start : slab.end - shared[0].start]
            ids = None
            if slab.cut is not None:
                seen, ids = self._slices.cut(
                    seen, own["cut_rows"], own["cut_slots"], own["cut_nums"], slab.cut.width
                )
            self._finish_slab(step, slab, seen, ids, own, sampler)

    @contextlib.contextmanager
    def _timed(self, step: _InFlight) -> Iterator[None]:
        """Around a product of the head."""
        if self._on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            yield
            end.record()
            step.products.append((begin, end))
        else:
            began = time.perf_counter()
            yield
            step.products.append((began, time.perf_counter()))

    def _finish_slab(
        self,
        step: _InFlight,
        slab: _Slab,
        logits: torch.Tensor,
        ids: torch.Tensor | None,
        tensors: Mapping[str, torch.Tensor],
        sampler: Sampler,
    ) -> None:
        """Draw and score on a slab's logits; queue the results for the way back.

        ids: int32 like the logits, the columns' vocabulary ids; None where a column is one.
        """
        if slab.draw_ids.shape[0]:
            drawn = sampler.draw(logits, slab.plan, tensors, ids)
            token_ids = drawn
            if ids is not None:
                named = ids.gather(1, drawn.clamp(min=0).long()[:, None]).squeeze(1)
                token_ids = torch.where(drawn >= 0, named, drawn)
            step.segments.append(_Segment("draw", slab.draw_ids, (token_ids,)))
            if "draw_ids" in tensors:
                self._keep_ids(step.batch.num_draws, token_ids, tensors["draw_ids"])
            wanted = slab.plan.arrays["logprob_at"]
            if wanted.shape[0]:
                found = token_logprobs(
                    logits.index_select(0, tensors["logprob_rows"]),
                    drawn.index_select(0, tensors["logprob_at"]),
                    slab.plan.num_top,
                )
                top_ids = found.top_ids
                if ids is not None:
                    own = ids.index_select(0, tensors["logprob_rows"])
                    top_ids = own.gather(1, top_ids.long())
                step.segments.append(
                    _Segment(
                        "logprob",
                        slab.draw_ids[wanted],
                        (found.logprob, found.rank, top_ids, found.top_logprobs),
                    )
                )
        if slab.score_ids.shape[0]:
            found = token_logprobs(
                logits.index_select(0, tensors["score_rows"]),
                tensors["score_targets"],
                slab.num_score_top,
            )
            step.segments.append(
                _Segment(
                    "score",
                    slab.score_ids,
                    (found.logprob, found.rank, found.top_ids, found.top_logprobs),
                )
            )

    def _keep_ids(self, num_draws: int, ids: torch.Tensor, draw_ids: torch.Tensor) -> None:
        """Leave drawn ids where the next batch's token_from finds them.

        A draw without an answer (-1) becomes 0 there: a step launched ahead must not read outside
        the embedding table; its result is thrown away with the failed sequence.
        """
        if num_draws > self._previous_ids.shape[0]:
            # Graphs read the old address; a batch of more draws than sequences is not theirs, but
            # the one after it may be.
            grown = torch.zeros(2 * num_draws, dtype=torch.int32, device=self._device)
            grown[: self._previous_ids.shape[0]] = self._previous_ids
            self._previous_ids = grown
            if self._graphs is not None:
                self._graphs.forget()
        self._previous_ids.index_copy_(0, draw_ids.long(), ids.clamp(min=0))


def _slab_arrays(batch: Batch, slabs: Sequence[_Slab], *, keep_ids: bool) -> dict[str, Array]:
    """What the slabs read, by slab. keep_ids: the next step may take the drawn ids."""
    none = [np.empty(0, np.int32)]
    arrays: dict[str, Array] = {"head_rows": np.concatenate(none + [s.rows for s in slabs])}
    for i, slab in enumerate(slabs):
        arrays.update({f"{i}.{name}": a for name, a in slab.plan.arrays.items()})
        if keep_ids:
            arrays[f"{i}.draw_ids"] = slab.draw_ids.astype(np.int32)
        if slab.cut is not None:
            arrays[f"{i}.cut_rows"] = slab.cut.rows
            arrays[f"{i}.cut_slots"] = slab.cut.slots
            arrays[f"{i}.cut_nums"] = slab.cut.nums
        else:
            rows = batch.score_rows[slab.score_ids]
            arrays[f"{i}.score_rows"] = np.searchsorted(slab.rows, rows).astype(np.int32)
            arrays[f"{i}.score_targets"] = batch.score_targets[slab.score_ids]
    return arrays


def _rows_of(
    hidden: torch.Tensor, slabs: Sequence[_Slab], tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """The rows of `hidden` that consecutive slabs take, without a copy where they lie together."""
    start, end = slabs[0].start, slabs[-1].end
    first, last = int(slabs[0].rows[0]), int(slabs[-1].rows[-1])
    if len(slabs) == 1 and last - first + 1 == end - start:
        return hidden[first : last + 1]
    return hidden.index_select(0, tensors["head_rows"][start:end])


def _sharing(slabs: Sequence[_Slab], head: FullHead) -> list[_Slab]:
    """The first of these slabs, and those after it that go through the full head with it: others
    only where a pass over the head costs more than the memory of their logits."""
    shared = [slabs[0]]
    if head.is_streamed:
        for slab in slabs[1:]:
            num_rows = slab.end - shared[0].start
            is_cached = slab.cut is not None and slab.cut.table >= 0
            if is_cached or 4 * num_rows * head.vocab_size > STREAMED_BYTES:
                break
            shared.append(slab)
    return shared


def _kept_draws(batch: Batch) -> Array:
    if batch.draw_keep is None:
        return np.empty(0, np.int64)
    return np.flatnonzero(batch.draw_keep >= 0)


def _bytes_per_logit(batch: Batch) -> int:
    """Peak bytes for one logit of a slab: 4 for its float32 where only the argmax is taken; float64
    copies, sorted values with their indices and running sums where draws are processed; int64 order
    keys for logprobs."""
    params = (p.sampling for p in batch.params)
    only_argmax = all(s.temperature == 0.0 and s.num_logprobs is None for s in params)
    return 4 if only_argmax and batch.score_rows.shape[0] == 0 else 48


def _warm_up_batch(num_seqs: int, rows: int, length: int, max_blocks: int) -> Batch:
    """`rows` last positions of num_seqs sequences of `length` that all read block 0, greedy."""
    total = num_seqs * rows
    nth = np.tile(np.arange(rows, dtype=np.int32), num_seqs)
    positions = (length - rows + nth).astype(np.int32)
    zeros, none = np.zeros(total, np.int32), np.empty(0, np.int32)
    last = np.arange(rows - 1, total, rows, dtype=np.int32)
    params = DrawParams(SamplingParams(temperature=0.0), 0, none, none, none, none, 0)
    return Batch(
        token_ids=zeros,
        token_from=np.full(total, -1, np.int32),
        positions=positions,
        seq_ids=np.repeat(np.arange(num_seqs, dtype=np.int32), rows),
        slots=np.arange(total, dtype=np.int32),
        prefix_len=positions + 1,
        path_start=zeros,
        path_len=zeros,
        path_slots=none,
        block_tables=np.zeros((num_seqs, max_blocks), np.int32),
        draw_rows=last,
        draw_params=np.zeros(num_seqs, np.int32),
        draw_parent=np.full(num_seqs, -1, np.int32),
        draw_positions=positions[last] + 1,
        draw_mask=np.full(num_seqs, -1, np.int32),
        masks=np.empty((0, 0), np.uint32),
        params=(params,),
        score_rows=none,
        score_targets=none,
        score_top=none,
        num_prefill_rows=0,
        num_draft_rows=0,
    )


def pad_to_bucket(
    arrays: dict[str, Array],
    plan: paged.TilePlan,
    key: tuple[int, int],
    trash_slot: int,
    max_blocks: int,
) -> paged.TilePlan:
    """Pad a decode-shaped step's arrays in place to the bucket's shapes; the padded plan.

    Padded rows have no keys, no tile and the trash slot; every shape depends on the key alone.
    """
    num_rows, num_splits = key
    for name in (
        "token_ids",
        "token_from",
        "positions",
        "seq_ids",
        "slots",
        "prefix_len",
        "path_start",
        "path_len",
    ):
        fill = {"slots": trash_slot, "token_from": -1}.get(name, 0)
        padded = np.full(num_rows, fill, np.int32)
        padded[: arrays[name].shape[0]] = arrays[name]
        arrays[name] = padded
    if "embeds" in arrays:
        embeds = np.zeros((num_rows, arrays["embeds"].shape[1]), arrays["embeds"].dtype)
        embeds[: arrays["embeds"].shape[0]] = arrays["embeds"]
        arrays["embeds"] = embeds
    arrays["path_slots"] = np.zeros(1, np.int32)
    tables = np.zeros((num_rows, max_blocks), np.int32)
    given = arrays["block_tables"]
    tables[: given.shape[0], : given.shape[1]] = given
    arrays["block_tables"] = tables
    tiles = np.zeros((num_rows, paged.TILE_FIELDS), np.int32)
    group = plan.groups[0]
    tiles[: group.tiles.shape[0]] = group.tiles
    split_rows = np.full(num_rows if num_splits > 1 else 0, -1, np.int32)
    split_rows[: plan.split_rows.shape[0]] = plan.split_rows
    return paged.TilePlan(
        (paged.TileGroup(tiles, group.block_m, num_splits),), split_rows, num_splits
    )


def _read_back(step: _InFlight) -> Drawn:
    """Drawn from the downloaded results. Raises DrawError when a draw has no answer."""
    batch = step.batch
    token_ids = np.full(batch.num_draws, -1, np.int32)
    logprobs = np.full(batch.num_draws, np.nan, np.float32)
    ranks = np.zeros(batch.num_draws, np.int32)
    top: list[tuple[tuple[int, float], ...]] = [()] * batch.num_draws
    num_scores = int(batch.score_rows.shape[0])
    score_logprobs = np.full(num_scores, np.nan, np.float32)
    score_ranks = np.zeros(num_scores, np.int32)
    score_top: list[tuple[tuple[int, float], ...]] = [()] * num_scores
    flat = np.empty(0, np.int32) if step.results is None else step.results.numpy()
    at = 0
    for segment in step.segments:
        parts = []
        for tensor in segment.tensors:
            size = tensor.numel()
            part = flat[at : at + size].reshape(tuple(tensor.shape))
            parts.append(part.view(np.float32) if tensor.dtype == torch.float32 else part)
            at += size
        index = segment.index
        if segment.kind == "draw":
            token_ids[index] = parts[0]
            continue
        if segment.kind == "logprob":
            into = (logprobs, ranks, top)
            num_top = [
                batch.params[p].sampling.num_logprobs or 0
                for p in batch.draw_params[index].tolist()
            ]
        else:
            into = (score_logprobs, score_ranks, score_top)
            num_top = batch.score_top[index].tolist()
        into[0][index], into[1][index] = parts[0], parts[1]
        for i, d in enumerate(index.tolist()):
            count = num_top[i]
            ids, values = parts[2][i, :count].tolist(), parts[3][i, :count].tolist()
            into[2][d] = tuple(zip(ids, values, strict=True))
    failed = tuple(
        (
            d,
            "the model produced NaN logits" if token_ids[d] == NAN_LOGITS else NO_TOKEN_LEFT,
        )
        for d in np.flatnonzero(token_ids < 0).tolist()
    )
    drawn = Drawn(
        np.maximum(token_ids, -1),
        logprobs,
        ranks,
        top,
        score_logprobs,
        score_ranks,
        score_top,
        step.model_s,
        step.head_s,
    )
    if failed:
        raise DrawError(failed, drawn)
    return drawn
