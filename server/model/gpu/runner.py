"""TorchRunner: Batch -> ids on a GPU, with transformers' own modules as the body.

It serves every supported family on "cuda", and on "cpu" as the reference of the CPU fast path. A
step is: one upload of everything the Batch holds (one pinned copy), the body on all rows with our
paged attention (body.py), the LM head on the rows that draw or are scored (head.py), the sampler
(sampler.py), one download.

On CUDA nothing in `launch` waits for the device; `wait` waits for an event behind the download.
One step is in flight. All work is queued on one stream of the runner, KV moves included; the LM
head's rows are copied to slices on another one, beside the body of the next step.

Vocabulary slices: draws are sorted by what they see, the full head or a table's slices; each kind
goes through the head and the sampler in slabs of rows (head.py). `verify` draws again from
kept hidden states with the full head, on the device, streamed to it, or on the CPU.

What ran where, of this whole folder: with the torch attention it runs in CI on a CPU; the Triton
kernels run there under the interpreter and are compiled for sm_80 to sm_100; a replay calls what
was captured first, on the addresses that it read. No line of CUDA was run on a GPU by its author:
run `python loadtest/gpu_check.py` on one before trusting it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from server.engine.batch import Batch, Drawn, Int32
from server.errors import UnsupportedModelError
from server.model.adapter import check_adapter
from server.model.gpu import adapters
from server.model.gpu import attention as paged
from server.model.gpu.body import MAX_GRAPH_ROWS, BodyRun, narrow_layers
from server.model.gpu.device import Trials, device_figures
from server.model.gpu.head import HeadRun, Step, mark, slab_arrays
from server.model.gpu.lm_head import LmHead, TorchSlices
from server.model.gpu.transfers import Array, Upload, page_locked
from server.types import DeviceFigures, ModelInfo, NarrowForm

HEAD_BYTES = 512 << 20
FEW_SLOTS = MAX_GRAPH_ROWS
"""Of the KV cache that measured steps have; the rows of a larger step share them."""


class TorchModel(NamedTuple):
    """A model's weights, and which of them lie in CPU memory.

    module: a causal LM of transformers, in eval mode, on the runner's device; the runner takes it
    over and switches its attention. embedding: [rows, hidden_size] in CPU memory, from which a
    step's rows are gathered into its upload; None: the module's own, on the device. head: [rows,
    hidden_size] in CPU memory, where the full head stays; None: the module's own, on the device.
    What is given here may be on the meta device in the module. verify_on_cpu: `verify` multiplies
    there, instead of copying the head through the device; only with `head`.
    """

    module: PreTrainedModel
    embedding: torch.Tensor | None = None
    head: torch.Tensor | None = None
    verify_on_cpu: bool = False


class TorchRunner:
    """server.engine.batch.Runner on torch.

    model: the weights, which it takes over. info: the sizes; ids from vocab_size on are padding.
    attention: None is "triton" on CUDA and "torch" elsewhere. cuda_graphs: captured graphs are
    replayed for steps of few rows, trees included; needs "triton". head_bytes: memory that a slab
    of logits and the work on it may take; more rows go through the head in several slabs. weights:
    of the layers, in 8 bits (body.narrow_layers), or None as they are loaded. Whether the numbers
    fit the model and each other is build.py's and the configuration's to say.

    Raises MemoryError when CPU memory cannot be page-locked.
    """

    def __init__(
        self,
        model: TorchModel,
        info: ModelInfo,
        *,
        attention: paged.AttentionName | None = None,
        cuda_graphs: bool = False,
        head_bytes: int = HEAD_BYTES,
        weights: NarrowForm | None = None,
    ) -> None:
        module, embedding = model.module, model.embedding
        self.info = info
        self._device = device = torch.device(info.device)
        self._on_gpu = device.type == "cuda"
        self._attention = attention or ("triton" if self._on_gpu else "torch")
        self._cpu_head: LmHead | None = None
        self._head = self._make_head(model)
        dtype = self._head.weight.dtype
        self.head_row_bytes = int(self._head.weight.shape[1]) * dtype.itemsize
        if embedding is not None and embedding is model.head:
            embedding = self._head.weight
        self._max_blocks = -(-info.max_model_len // info.block_size)
        self._slices = TorchSlices(self._head, device)
        self._kept = torch.zeros((0, self._head.weight.shape[1]), dtype=dtype, device=device)
        if weights is not None:
            narrow_layers(module)
        self._body = BodyRun(
            module, info, dtype, attention=self._attention, embedding=embedding,
            graph_rows=min(MAX_GRAPH_ROWS, info.max_num_batched_tokens) if cuda_graphs else 0,
        )  # fmt: skip
        self._cache = self._body.cache
        bank, head_size = self._body.adapters, self._head.vocab_size
        self._head_run = HeadRun(self._slices, head_size, head_bytes, bank, self._on_gpu)
        # Room for a step's arrays, and for its rows of the embedding where they travel along: as
        # much as most steps need, since graphs are captured again when it moves.
        row_bytes = 256 + self.head_row_bytes * (embedding is not None)
        seq_bytes = 4 * self._max_blocks + info.vocab_size // 8  # its table and a grammar's mask
        num_bytes = row_bytes * info.max_num_batched_tokens + seq_bytes * info.max_num_seqs
        self._upload = Upload(device, num_bytes + (1 << 20), self.forget_graphs)
        self._stream: torch.cuda.Stream | None = None
        if self._on_gpu:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._in_flight: Step | None = None
        self._closed = False

    def _make_head(self, model: TorchModel) -> LmHead:
        own: Any = model.module.get_output_embeddings()  # type: ignore[no-untyped-call]
        bias = getattr(own, "bias", None)
        num_token_ids = self.info.vocab_size
        cap = float(getattr(model.module.config, "final_logit_softcapping", None) or 0.0)
        if model.head is None:
            return LmHead(own.weight, bias, num_token_ids, cap)
        table = page_locked(model.head, self._device)
        if model.verify_on_cpu:
            cpu_bias = None if bias is None else bias.cpu()
            self._cpu_head = LmHead(table, cpu_bias, num_token_ids, cap)
        return LmHead(table, bias, num_token_ids, cap, is_streamed=True)

    # The Runner protocol.

    def launch(self, batch: Batch) -> None:
        """Queue a step. What fails here is raised by `wait`, in order.

        Raises RuntimeError when a step is in flight already, or after close.
        """
        self._check_idle()
        step = Step(batch)
        try:
            with self._queued():
                self._start(step)
        except Exception as error:
            step.error = error
        self._in_flight = step

    def wait(self) -> Drawn:
        """The step in flight. Raises what its launch raised, and RuntimeError when nothing is in
        flight."""
        self._check_open()
        step, self._in_flight = self._in_flight, None
        if step is None:
            raise RuntimeError("no step is in flight")
        if step.error is not None:
            raise step.error
        return step.finish()

    def move_slots(self, src: Int32, dst: Int32) -> None:
        """See Runner; raises as KvCache.move_slots does."""
        with self._queued(in_flight=True):
            self._cache.move_slots(src, dst)
        self._forget_states(dst)

    def copy_blocks(self, src: Int32, dst: Int32) -> None:
        """See Runner; raises as KvCache.move_slots does."""
        self.move_slots(self._cache.slots_of(src), self._cache.slots_of(dst))

    def _forget_states(self, slots: Int32) -> None:
        if self._body.states is not None:
            self._body.states.forget(slots.tolist())

    def load_table(self, table: int, token_ids: Int32) -> None:
        """See Runner; raises as TorchSlices.load_table does."""
        with self._queued():
            self._slices.load_table(table, token_ids)

    def drop_table(self, table: int) -> None:
        """See Runner."""
        with self._queued():
            self._slices.drop_table(table)

    def load_rows(self, token_ids: Int32, places: Int32) -> None:
        """See Runner."""
        with self._queued():
            self._slices.load_rows(token_ids, places)

    def verify(self, batch: Batch, kept: Int32) -> Drawn:
        """See Runner. The full head is multiplied where it lies, or streamed to the device:
        whole sequences share a pass over it. Waits for the answer."""
        self._check_idle()
        step = Step(batch)
        if kept.shape[0] and int(kept.max()) >= self._kept.shape[0]:
            raise ValueError("a hidden state that was never kept")
        with self._queued():
            step.begin = mark(on_gpu=self._on_gpu)
            slabs = self._head_run.full(batch, np.arange(batch.num_draws))
            arrays = slab_arrays(slabs)
            tensors = self._upload({"kept": kept} | arrays)
            hidden = self._kept.index_select(0, tensors["kept"])
            if self._cpu_head is None:
                self._head_run.run(step, slabs, hidden, tensors, self._head)
            else:
                there = {k: torch.from_numpy(np.ascontiguousarray(a)) for k, a in arrays.items()}
                self._head_run.run(step, slabs, hidden.cpu(), there, self._cpu_head)
            step.mark_end(on_gpu=self._on_gpu)
        return step.finish()

    def check_adapter(self, folder: str) -> bool:
        """See Runner."""
        shape = self._adapting(folder).shape
        return check_adapter(Path(folder), shape, shape.vocab_size)

    def pack_adapter(self, folder: str) -> adapters.GpuAdapter:
        """See Runner; raises as adapters.pack_adapter does."""
        bank = self._adapting(folder)
        return adapters.pack_adapter(Path(folder), bank.shape, bank.dtype, self.info.vocab_size)

    def hold_adapter(self, place: int, adapter: adapters.GpuAdapter) -> None:
        """See Runner."""
        with self._queued():
            if self._adapting().hold(place, adapter):
                self.forget_graphs()  # they read the tables where they were

    def drop_adapter(self, place: int) -> None:
        """See Runner."""
        with self._queued():
            self._adapting().drop(place)

    def _adapting(self, folder: str = "") -> adapters.LoraBank:
        if self._body.adapters is not None:
            return self._body.adapters
        raise UnsupportedModelError(
            f"adapter {folder}: this model is no family of `tailor models list`, so an adapter is "
            "served only when it is merged (`adapter:` of a model of its own)"
        )

    def device_figures(self) -> DeviceFigures | None:
        """See MeasuredRunner."""
        if not self._on_gpu:
            return None
        return replace(device_figures(self._device), steps=self._body.steps())

    def close(self) -> None:
        """Wait for the device and let go of weights and KV memory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._in_flight = None
        if self._stream is not None:
            self._stream.synchronize()
        del self._body, self._head, self._cache, self._upload, self._head_run
        del self._slices, self._kept, self._cpu_head
        if self._on_gpu:
            torch.cuda.empty_cache()

    def warm_up(self) -> int:
        """Compile kernels and capture graphs before any KV is kept, which otherwise the first steps
        of each kind do while a client waits (seconds, with Triton); how many steps it ran."""
        return self.try_out(self.trials.kernels())

    @property
    def trials(self) -> Trials:
        """Batches that it may try out."""
        graphs = self._body.graphs
        graph_rows = 0 if graphs is None else graphs.largest
        return Trials(self.info, self._body.shape, graph_rows, self._max_blocks)

    def try_out(self, batches: Iterable[Batch]) -> int:
        """Run steps whose results nobody reads, before any KV is kept; how many."""
        self._check_idle()
        states, num_steps = self._body.states, 0
        if states is not None:
            states.is_warming = True
        try:
            for batch in batches:
                self.launch(batch)
                self.wait()
                num_steps += 1
        finally:
            if states is not None:
                states.is_warming = False
        return num_steps

    def take_room(self, folders: Iterable[str], most: int) -> None:
        """Take what its steps need, and the tables of `most` adapters as large as those of these
        folders: what is free afterwards is free beside them.

        The largest steps that the sizes allow run over a KV cache of a few slots, then the largest
        graphs are captured; torch's allocator holds what they took until `resize_kv`. Call it
        before any KV is kept. Raises what such a step raises: serving would.
        """
        self.try_out(self.trials.largest())
        self.try_out(self.trials.graphs())
        if self._body.adapters is not None:
            with self._queued():
                self._body.adapters.make_room(folders, most)

    def resize_kv(self, num_blocks: int, max_model_len: int) -> None:
        """Room for other numbers than it was made with, before any KV is kept; max_model_len at
        most what it was. What torch's allocator holds for nobody is free again."""
        self._check_idle()
        self.forget_graphs()
        self._forget_states(np.arange(self._cache.num_slots, dtype=np.int32))
        with self._queued():
            self._cache.resize(num_blocks)
        if self._on_gpu:
            torch.cuda.empty_cache()
        self.info = replace(self.info, num_blocks=num_blocks, max_model_len=max_model_len)

    def forget_graphs(self) -> None:
        """Drop all graphs, and their memory: they are captured again."""
        if self._body.graphs is not None:
            self._body.graphs.forget()

    # One step.

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the runner is closed")

    def _check_idle(self) -> None:
        self._check_open()
        if self._in_flight is not None:
            raise RuntimeError("a step is in flight: call wait first")

    @contextlib.contextmanager
    def _queued(self, *, in_flight: bool = False) -> Iterator[None]:
        """What is computed inside is queued on the runner's stream. in_flight: behind a step, too.
        Raises RuntimeError after close, MemoryError where the device has no room."""
        self._check_open() if in_flight else self._check_idle()
        on_stream = (
            contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        )
        with torch.inference_mode(), on_stream:
            try:
                yield
            except Exception as error:
                if self._stream is not None:  # its upload may be under way
                    self._stream.synchronize()
                if isinstance(error, torch.OutOfMemoryError):  # the engine knows no torch
                    raise MemoryError(str(error)) from error
                raise

    def _start(self, step: Step) -> None:
        batch = step.batch
        num_ids, held = self.info.vocab_size, batch.seq_adapters is not None
        own_ids = self._adapting().num_ids(batch, num_ids) if held else num_ids
        check_batch(batch, self.info, self._cache.num_slots, own_ids)
        step.begin = mark(on_gpu=self._on_gpu)
        slabs = self._head_run.plan(batch)
        plan = self._body.plan(batch)
        arrays: dict[str, Array] = {}
        if batch.draw_keep is not None and (batch.draw_keep >= 0).any():
            keep = np.flatnonzero(batch.draw_keep >= 0)
            arrays["keep_rows"] = batch.draw_rows[keep]
            arrays["keep_places"] = batch.draw_keep[keep]
            num, before = int(arrays["keep_places"].max()) + 1, self._kept
            if num > before.shape[0]:
                self._kept = before.new_zeros((max(num, 2 * before.shape[0]), before.shape[1]))
                self._kept[: before.shape[0]] = before
        arrays |= slab_arrays(slabs)
        tensors = self._upload(plan.arrays | arrays)  # what graphs read comes first
        hidden = self._body.run(batch, tensors, plan)
        if "keep_rows" in arrays:
            rows = hidden.index_select(0, tensors["keep_rows"])
            self._kept.index_copy_(0, tensors["keep_places"].long(), rows)
        self._head_run.run(step, slabs, hidden, tensors, self._head)
        step.mark_end(on_gpu=self._on_gpu)


def check_batch(batch: Batch, info: ModelInfo, num_slots: int, num_ids: Int32 | int) -> None:
    """Raise ValueError for indices that would read or write outside the device's memory: on a GPU
    they would end the process. num_ids: that each row may have."""
    if batch.num_rows == 0:
        raise ValueError("a batch without rows")
    if int(batch.slots.min()) < 0 or int(batch.slots.max()) >= num_slots:
        raise ValueError("a row's slot is outside the KV cache")
    if int(batch.token_ids.min()) < 0 or (batch.token_ids >= num_ids).any():
        raise ValueError("a row's token id is outside the vocabulary")
    if int(batch.positions.min()) < 0 or int(batch.positions.max()) >= info.max_model_len:
        raise ValueError("a row's position is outside the model's length")
    tables = batch.block_tables
    if int(batch.seq_ids.max()) >= tables.shape[0] or int(tables.max()) >= info.num_blocks:
        raise ValueError("a row's sequence or block does not exist")
    if int(batch.prefix_len.max()) > tables.shape[1] * info.block_size:
        raise ValueError("a row's prefix is longer than its block table")
    if int((batch.path_start + batch.path_len).max()) > batch.path_slots.shape[0]:
        raise ValueError("a row's path ends outside path_slots")
    if batch.path_slots.shape[0] and int(batch.path_slots.max()) >= num_slots:
        raise ValueError("a path slot is outside the KV cache")
