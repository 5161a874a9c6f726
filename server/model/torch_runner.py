"""TorchRunner: Batch -> ids with transformers' own modules as the body. The general path.

It serves every supported family on "cuda", and on "cpu" as the reference of the CPU fast path. A
step is: one upload of everything the Batch holds (one pinned copy), the body on all rows with our
paged attention, the LM head on the rows that draw or are scored, the sampler, one download.

On CUDA nothing in `launch` waits for the device; `wait` waits for an event behind the download.
Two steps may be in flight, so that a row can take the id that the previous step draws
(Batch.token_from). All work is queued on one stream of the runner, KV moves included.

What ran where: the whole path with the torch attention runs in CI on the CPU; the Triton kernels
run there under the interpreter. Nothing here was run on a GPU by its author: run
`python loadtest/gpu_check.py` on one before trusting it.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from server.engine.batch import NO_TOKEN_LEFT, Batch, DrawError, Drawn, DrawParams, Int32
from server.model import attention as paged
from server.model.graphs import DecodeGraphs, row_bucket
from server.model.kv_cache import KvCache
from server.model.lm_head import LmHead
from server.model.sampler import (
    NAN_LOGITS,
    DrawPlan,
    Sampler,
    plan_draws,
    token_logprobs,
)
from server.types import ModelInfo, SamplingParams

Array = npt.NDArray[Any]

MAX_IN_FLIGHT = 2
_ALIGNMENT = 16


class Upload:
    """Many small host arrays to the device by one copy.

    Arrays are packed in order, each aligned to 16 bytes, so equal shapes get equal addresses from
    step to step: what CUDA graphs read. `generation` changes when the device buffer moved, after
    which earlier addresses are invalid.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device = device
        self.generation = 0
        self._on_gpu = device.type == "cuda"
        self._next = 0
        self._events: list[torch.cuda.Event | None] = [None] * MAX_IN_FLIGHT
        self._allocate(num_bytes)

    def _allocate(self, num_bytes: int) -> None:
        self._host = [
            torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._on_gpu)
            for _ in range(MAX_IN_FLIGHT)
        ]
        self._memory = (
            torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
            if self._on_gpu
            else self._host[0]
        )
        self._capacity = num_bytes
        self.generation += 1

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Tensors of the same names, shapes and dtypes on the device; valid until the next call."""
        offsets: list[int] = []
        end = 0
        for array in arrays.values():
            offsets.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if end > self._capacity:
            if self._on_gpu:
                # Freed memory is reused in stream order, so steps in flight keep their inputs; the
                # pinned side must be read before it goes.
                torch.cuda.current_stream(self._device).synchronize()
            self._events = [None] * MAX_IN_FLIGHT
            self._allocate(2 * end)
        turn, self._next = self._next, (self._next + 1) % MAX_IN_FLIGHT
        event = self._events[turn]
        if event is not None:
            event.synchronize()  # two steps ago: over long since
        host = self._host[turn]
        raw = host.numpy()
        for array, offset in zip(arrays.values(), offsets, strict=True):
            raw[offset : offset + array.nbytes] = (
                np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            )
        memory = host
        if self._on_gpu:
            memory = self._memory
            memory[:end].copy_(host[:end], non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._events[turn] = event
        return {
            name: memory[offset : offset + array.nbytes]
            .view(_DTYPES[array.dtype])
            .view(array.shape)
            for (name, array), offset in zip(arrays.items(), offsets, strict=True)
        }


_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float64): torch.float64,
}


@dataclass(frozen=True, slots=True)
class _Slab:
    """Head rows [start, end) of a step, the draws and the scores that read them."""

    start: int
    end: int
    draw_ids: Array
    plan: DrawPlan
    score_ids: Array
    num_score_top: int


@dataclass(slots=True)
class _Segment:
    """Results of one kind, to be read back: device tensors of 4-byte items, in order."""

    kind: Literal["draw", "logprob", "score"]
    index: Array
    tensors: tuple[torch.Tensor, ...]


@dataclass(slots=True)
class _InFlight:
    """A launched step until `wait` returns it."""

    batch: Batch
    begin_s: float
    segments: list[_Segment] = field(default_factory=list)
    results: torch.Tensor | None = None
    begin: torch.cuda.Event | None = None
    done: torch.cuda.Event | None = None
    model_s: float = 0.0
    error: Exception | None = None


class TorchRunner:
    """server.engine.batch.Runner on torch.

    module: a causal LM of transformers, in eval mode, on `device`; the runner takes it over and
    switches its attention. attention: "triton" (the default on CUDA) or "torch". cuda_graphs:
    replay captured graphs for decode-shaped steps. head_bytes: memory that a slab of logits and the
    work on it may take; more rows go through the head in several slabs. partial_bytes: memory for
    split attention.

    Raises ValueError when a number does not fit the model.
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
        head = module.get_output_embeddings()  # type: ignore[no-untyped-call]
        if head is None:
            raise ValueError(f"{type(module).__name__} has no LM head")
        self._head = LmHead(head.weight, getattr(head, "bias", None), num_token_ids)
        self._sampler = Sampler(use_triton=self._on_gpu)
        num_heads = config.num_attention_heads
        num_kv_heads = config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        self._cache = KvCache(
            num_layers=config.num_hidden_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=head.weight.dtype,
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
            from server.model.triton_kernels import Partials

            self._partials = Partials(self._shape, num_heads, head_dim, device)
        self._head_bytes = head_bytes
        self._previous_ids = torch.zeros(max(1, max_num_seqs), dtype=torch.int32, device=device)
        self._num_previous = 0
        row_bytes = 4 * (12 + paged.TILE_FIELDS) * max_num_batched_tokens
        table_bytes = 4 * max_num_seqs * self._max_blocks
        self._upload = Upload(device, row_bytes + table_bytes + (1 << 16))
        self._graphs = DecodeGraphs(device, max_num_seqs) if cuda_graphs else None
        self._graph_generation = self._upload.generation
        self._stream: torch.cuda.Stream | None = None
        if self._on_gpu:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._in_flight: deque[_InFlight] = deque()
        self._closed = False
        self.info = ModelInfo(
            name=name,
            vocab_size=self._head.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=tuple(eos_token_ids),
            num_blocks=num_blocks,
            block_size=block_size,
            device=str(device),
            dtype=str(head.weight.dtype).removeprefix("torch."),
            fingerprint=fingerprint,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )

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
        except Exception as error:
            step.error = error
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
        if step.done is not None and step.begin is not None:
            step.done.synchronize()
            step.model_s = step.begin.elapsed_time(step.done) / 1e3
        return _read_back(step)

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

    def close(self) -> None:
        """Wait for the device and let go of weights and KV memory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._in_flight.clear()
        if self._stream is not None:
            self._stream.synchronize()
        del self._body, self._head, self._cache, self._partials, self._graphs, self._upload
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

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        if self._stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._stream)

    def _start(self, step: _InFlight) -> None:
        batch = step.batch
        self._check(batch)
        if self._on_gpu:
            step.begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            step.begin.record()
        head_rows, slabs = self._plan_head(batch)
        arrays, graph_key, plan = self._plan_body(batch)
        arrays["head_rows"] = head_rows
        for i, slab in enumerate(slabs):
            arrays.update({f"{i}.{name}": a for name, a in slab.plan.arrays.items()})
            arrays[f"{i}.draw_ids"] = slab.draw_ids.astype(np.int32)
            rows = batch.score_rows[slab.score_ids]
            arrays[f"{i}.score_rows"] = (np.searchsorted(head_rows, rows) - slab.start).astype(
                np.int32
            )
            arrays[f"{i}.score_targets"] = batch.score_targets[slab.score_ids]
        tensors = self._upload(arrays)

        hidden = self._run_body(batch, tensors, plan, graph_key)
        whole = head_rows.shape[0] == batch.num_rows
        for i, slab in enumerate(slabs):
            if whole:
                rows_hidden = hidden[slab.start : slab.end]
            else:
                rows_hidden = hidden.index_select(0, tensors["head_rows"][slab.start : slab.end])
            prefix = f"{i}."
            own = {k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)}
            self._finish_slab(step, slab, self._head.logits(rows_hidden), own)
        self._num_previous = batch.num_draws
        if step.segments:
            flat = torch.cat(
                [t.reshape(-1).view(torch.int32) for s in step.segments for t in s.tensors]
            )
            if self._on_gpu:
                step.results = torch.empty(flat.shape, dtype=torch.int32, pin_memory=True)
                step.results.copy_(flat, non_blocking=True)
            else:
                step.results = flat
        if self._on_gpu:
            step.done = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            step.done.record()
        else:
            step.model_s = time.perf_counter() - step.begin_s

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

    def _plan_head(self, batch: Batch) -> tuple[Int32, list[_Slab]]:
        """(rows whose logits are needed, ascending; the slabs they go through the head in)."""
        head_rows = np.unique(np.concatenate([batch.draw_rows, batch.score_rows]))
        draw_at = np.searchsorted(head_rows, batch.draw_rows)
        score_at = np.searchsorted(head_rows, batch.score_rows)
        slabs = []
        per_row = self._head.vocab_size * _bytes_per_logit(batch)
        at_once = max(1, self._head_bytes // per_row)
        for start in range(0, head_rows.shape[0], at_once):
            end = min(start + at_once, head_rows.shape[0])
            draws = np.flatnonzero((draw_at >= start) & (draw_at < end))
            scores = np.flatnonzero((score_at >= start) & (score_at < end))
            plan = plan_draws(batch, draws, draw_at[draws] - start, self._head.vocab_size)
            num_top = int(batch.score_top[scores].max()) if scores.shape[0] else 0
            slabs.append(_Slab(start, end, draws, plan, scores, num_top))
        return head_rows.astype(np.int32), slabs

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
            from server.model.triton_kernels import TritonAttention

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

        def forward() -> torch.Tensor:
            token_ids = tensors["token_ids"]
            if takes_drawn:
                source = tensors["token_from"]
                drawn = self._previous_ids.index_select(0, source.clamp(min=0))
                token_ids = torch.where(source >= 0, drawn, token_ids)
            result = self._body(
                input_ids=token_ids[None],
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

    def _finish_slab(
        self,
        step: _InFlight,
        slab: _Slab,
        logits: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        """Draw and score on a slab's logits; queue the results for the way back."""
        if slab.draw_ids.shape[0]:
            ids = self._sampler.draw(logits, slab.plan, tensors)
            self._keep_ids(step.batch.num_draws, ids, tensors["draw_ids"])
            step.segments.append(_Segment("draw", slab.draw_ids, (ids,)))
            wanted = slab.plan.arrays["logprob_at"]
            if wanted.shape[0]:
                found = token_logprobs(
                    logits.index_select(0, tensors["logprob_rows"]),
                    ids.index_select(0, tensors["logprob_at"]),
                    slab.plan.num_top,
                )
                step.segments.append(
                    _Segment(
                        "logprob",
                        slab.draw_ids[wanted],
                        (found.logprob, found.rank, found.top_ids, found.top_logprobs),
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
    )
    if failed:
        raise DrawError(failed, drawn)
    return drawn
