"""GenericRunner: a CpuRunner whose body is transformers' own forward.

Embedding, layers and norms are transformers' modules with our products and rotary tables in them
and our attention on the paged cache (attention.py); the head, slices, draws and the life of a step
are CpuRunner's. Slower than a family: every small operation is a call of torch, on one thread.

torch's matrix products split sums by the number of rows, and its sines and cosines are other ones
in the last elements of an array. So products are ours (kernels/vectors.py), and rotary tables are
computed once, for all positions, and read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from server.engine.batch import Batch, Int32
from server.errors import UnsupportedModelError
from server.machine import cores
from server.model.cpu.adapters import CpuAdapter
from server.model.cpu.generic.attention import PagedStep, StateStore
from server.model.cpu.generic.soundness import called, check_rows
from server.model.cpu.head import float_head
from server.model.cpu.kernels import product
from server.model.cpu.linear import float_linear, new_work, packed
from server.model.cpu.records import (
    LANES,
    NO_TABLE,
    PANEL,
    Float32,
    Int64,
    Layers,
    Rows,
    Wanted,
    Work,
)
from server.model.cpu.runner import BLOCK_SIZE, CpuRunner
from server.model.cpu.tensors import as_stored
from server.model.cpu.threads import torch_on_one_thread
from server.model.cpu.weights import RunnerWeights
from server.model.draws import batch_rows
from server.model.families import layer_types
from server.model.inspection import (
    NUM_PROBED,
    Inspected,
    failing_as_refusal,
    inspected,
    probe_ids,
)
from server.model.interface import StepHolder
from server.model.shape import ModelShape, shape_of
from server.model.states import DeltaNet, num_states, replace_delta_nets
from server.types import ModelInfo

# --- in the place of modules whose bits depend on the number of rows ------------------------------


class RowLinear(nn.Module):
    """nn.Linear with our product: each row has the same bits whatever rows are beside it.

    weight: [outputs, inputs], packed and let go. work: the threads. bf16: how it is kept.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, work: Work, *, bf16: bool
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.panels = packed(as_stored(weight.detach(), bf16))
        self.bias = None if bias is None else bias.detach().float()
        self._record = float_linear(self.panels)
        self._work = work

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] to [..., outputs], float32."""
        rows = x.reshape(-1, self.in_features).contiguous()
        out = torch.empty((rows.shape[0], self.panels.shape[0] * PANEL), dtype=torch.float32)
        product(rows.numpy(), rows.shape[0], self._record, out.numpy(), 0.0, self._work)
        result = out[:, : self.out_features]
        if self.bias is not None:
            result = result + self.bias
        return result.reshape(*x.shape[:-1], self.out_features)


class RotaryTables(nn.Module):
    """A rotary module whose tables for positions [0, num_positions) were computed once, by itself.

    Raises ValueError when it gives something else than tables by position.
    """

    def __init__(self, rotary: nn.Module, num_positions: int) -> None:
        super().__init__()
        self._rotary = rotary
        self._num_positions = num_positions
        self._tables: dict[Any, tuple[torch.Tensor, ...]] = {}

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, *kinds: Any, **named: Any
    ) -> Any:
        """Rows of the tables. kinds, named: a layer type, where each has tables of its own."""
        key = (*kinds, *named.values())
        if key not in self._tables:
            every = torch.arange(self._num_positions)[None]
            tables = self._rotary(x, every, *kinds, **named)
            for table in tables:
                if not isinstance(table, torch.Tensor) or table.shape[1] != self._num_positions:
                    raise ValueError("its rotary module gives no tables by position")
            self._tables[key] = tuple(table[0].contiguous() for table in tables)
        if position_ids.ndim == 3:  # of text, height and width: for a text they are the same
            position_ids = position_ids[0]
        return tuple(table[position_ids] for table in self._tables[key])

    def __getattr__(self, name: str) -> Any:
        """What a model looks up on its rotary module (its config)."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_rotary"), name)


def replace_modules(body: nn.Module, work: Work, num_positions: int, *, bf16: bool) -> None:
    """Put RowLinear and RotaryTables in the place of what they replace, one by one: the peak is one
    matrix above the model."""
    for name, module in list(body.named_modules()):
        made: nn.Module
        if type(module) is nn.Linear:
            made = RowLinear(module.weight, module.bias, work, bf16=bf16)
        elif type(module) is Conv1D:
            made = RowLinear(module.weight.T, module.bias, work, bf16=bf16)
        elif type(module).__name__.endswith("RotaryEmbedding"):
            made = RotaryTables(module, num_positions)
        else:
            continue
        body.set_submodule(name, made)


class GenericModel(NamedTuple):
    """A module that was found to be sound, its sizes and what its head takes.

    module: its matrices are packed. holder: where its attention finds a step. nets: its recurrent
    layers. shape: of the cache and the buffers. weights: the head. factor: Inspected's.
    """

    module: nn.Module
    holder: StepHolder
    nets: list[DeltaNet]
    shape: ModelShape
    weights: RunnerWeights
    factor: float


def generic_model(
    module: nn.Module, *, num_token_ids: int, num_positions: int, threads: int | None, bf16: bool
) -> GenericModel:
    """Take over a module of transformers, float32, on the CPU. num_token_ids: ids that have a text.
    num_positions: the longest sequence. bf16: how matrices are kept.

    Raises UnsupportedModelError for what cannot be served so.
    """
    model: Any = module
    with torch.no_grad():
        for name, weight in module.named_parameters() if bf16 else ():
            if weight.ndim == 2 and "embed" not in name:
                weight.copy_(weight.to(torch.bfloat16).float())
    ids = probe_ids(num_token_ids)
    found = inspected(module, ids)
    work = new_work(threads or cores())
    with failing_as_refusal(module):
        nets = replace_delta_nets(model.base_model)
        if any(net.dk % LANES or net.dv % LANES for net in nets):
            raise ValueError("the heads of its delta net are no whole vectors")
    replace_modules(model.base_model, work, num_positions, bf16=bf16)
    holder = StepHolder(module)
    heads, kv_heads, head_dim = called(module, holder, ids, found)
    table = model.get_output_embeddings()
    head: torch.Tensor = table.weight.detach()
    if getattr(table, "bias", None) is not None:
        # Its bias is a column more, which the states' last column of ones takes in, so that slices
        # need not know of it.
        head = torch.cat([head, table.bias.detach()[:, None]], dim=1)
    shape = replace(
        shape_of(module.config),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=int(head.shape[1]),
        windows=found.windows,
        convolutions=tuple(kind == "linear_attention" for kind in layer_types(model.config)),
        kept_width=nets[0].kept_width if nets else 0,
        logit_cap=found.cap,
        vocab_size=num_token_ids,
    )
    panels = packed(as_stored(head[:num_token_ids], bf16))
    num_bytes = panels.nbytes + sum(
        part.panels.nbytes for part in module.modules() if isinstance(part, RowLinear)
    )
    embedding = model.get_input_embeddings().weight.detach()
    nothing = Layers(*cast("Any", (None,) * len(Layers._fields)))  # the module has them, and embeds
    weights = RunnerWeights(nothing, 0, float_head(panels), num_bytes, embedding, NO_TABLE)
    made = GenericModel(module, holder, nets, shape, weights, found.factor)
    _check(made, ids[0].numpy(), found)
    return made


def _check(made: GenericModel, ids: Any, found: Inspected) -> None:
    """check_rows on a small runner of the model."""
    info = ModelInfo(
        "probe", made.shape.vocab_size, 64, (), 8, 16, "cpu", "float32", "", 1, NUM_PROBED
    )
    runner = GenericRunner(made, info, num_threads=None)
    try:
        check_rows(made.module, runner.states, ids, found)
    finally:
        runner.close()


class GenericRunner(CpuRunner):
    """Runner on a CPU over transformers' forward. See CpuRunner."""

    def __init__(self, model: GenericModel, info: ModelInfo, *, num_threads: int | None) -> None:
        still = np.zeros((1, info.max_model_len, 0), np.float32)
        super().__init__(model.shape, model.weights, (still, still), info, num_threads=num_threads)
        self._model = model
        recurrent = model.shape.convolutions
        self._kv_ids = tuple(
            -1 if absent else i - sum(recurrent[:i]) for i, absent in enumerate(recurrent)
        )
        self._store: StateStore | None = None
        if model.nets:  # every sequence's own, a block boundary's, and some of prompts
            sizes = len(model.nets), *model.nets[0].state_size
            self._store = StateStore(num_states(info.max_num_seqs), sizes)

    def pack_adapter(self, folder: str) -> CpuAdapter:
        """Refused: our sums of adapters are those of families."""
        raise UnsupportedModelError(
            f"adapter {folder}: transformers' own forward computes this model, so an adapter is "
            "served only when it is merged (`adapter:` of a model of its own)"
        )

    def move_slots(self, src: Int32, dst: Int32) -> None:
        """See CpuRunner; states behind the slots are forgotten."""
        super().move_slots(src, dst)
        if self._store is not None:
            self._store.forget(dst.tolist())

    def copy_blocks(self, src: Int32, dst: Int32) -> None:
        """See CpuRunner; states behind the blocks' slots are forgotten."""
        super().copy_blocks(src, dst)
        if self._store is not None:
            every = dst[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)
            self._store.forget(every.reshape(-1).tolist())

    def states(self, ids: Int64, rows: Rows) -> Float32:
        """float32 [R, H]: the final states of rows, times what their logits are scaled by."""
        step = PagedStep(
            rows, self._cache, self._scratch, self._kv_ids, self._store, self._record_shape,
            self._work,
        )  # fmt: skip
        positions = torch.from_numpy(rows.positions.astype(np.int64))[None]
        # On one thread: the number of rows must not decide where an array is cut (soundness.py).
        with torch.no_grad(), torch_on_one_thread():
            model: Any = self._model.module
            hidden = self._model.holder.run(
                model.base_model, step,
                input_ids=torch.from_numpy(ids)[None], position_ids=positions,
            )  # fmt: skip
            hidden = hidden * self._model.factor
        if self._store is not None:
            self._store.commit()
        states = np.ones((rows.num, self._shape.hidden_size), np.float32)  # see generic_model
        states[:, : hidden.shape[1]] = hidden.numpy()
        return states

    def _compute(self, batch: Batch, wanted: Wanted, held: Any) -> None:
        """Run the module on the rows, and the head on what is wanted."""
        ids = batch.token_ids.astype(np.int64)
        self._scratch.hidden[: batch.num_rows] = self.states(ids, batch_rows(batch))
        self._head.fill(wanted, self._scratch.hidden)
