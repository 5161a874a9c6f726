"""The body of a step on a GPU: transformers' own modules between token ids and the LM head.

It turns a step's token ids (or their embeddings) into the last hidden states, with paged attention:
interface.py says how a module's layers reach our cache. Convolutions and gated delta nets read
their own memory, adapters are added by hooks (adapters.py). BodyRun chooses rows and tiles, and
runs them plainly or by replaying a CUDA graph, for decode steps and for trees alike; head.py has
the LM head.

A step whose sequences have few rows each (last tokens, trees, ends of prompts) has its number of
rows padded to a bucket and its number of splits to a level; for every such pair the body is
captured once, at first use, and replayed afterwards. Padded rows read nothing and write to the
cache's trash slot. So a drafted step costs what a decode step of as many rows costs. Head and draws
are queued behind the replay, while the device works on it.

What makes this possible lives elsewhere and must stay: all inputs of the body are views into one
device buffer at offsets that a bucket fixes (they come first in a step's upload), launches have
grids known on the host, and nothing between the upload and the last hidden state syncs. When the
buffer moves, for a step that is larger than any before, the graphs are captured again.

Adapters' rows are in graphs of their own: their tables keep their addresses until larger ones are
needed, and the graphs are captured again then. So are adapters' own rows of the embedding, which
are inputs like the others, as embeddings are that are gathered in CPU memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from server.engine.batch import Batch
from server.model.families import FAMILIES, logit_scale
from server.model.gpu import attention as paged
from server.model.gpu.adapters import Grouped, LoraBank, grouped_torch, lora_spans
from server.model.gpu.attention import Kept, KvCache
from server.model.gpu.recurrent import (
    ITEMS_A_ROW,
    DeltaItems,
    DeltaRule,
    DeltaStates,
    PagedConvolution,
    delta_torch,
)
from server.model.gpu.transfers import Array, gathered
from server.model.interface import StepHolder, put_in_place
from server.model.shape import shape_of
from server.model.states import DeltaNet
from server.types import ModelInfo

_log = logging.getLogger(__name__)


def delta_nets(module: nn.Module) -> list[DeltaNet]:
    """The gated delta nets of a module that was taken over (generic.take_over)."""
    return [part for part in module.modules() if isinstance(part, DeltaNet)]


def kept_by(module: Any) -> Kept:
    """What BodyRun keeps of a position."""
    nets, shape = delta_nets(module), shape_of(module.config)
    num, width = sum(shape.convolutions), shape.kept_width
    if nets:
        num, width = len(nets), nets[0].kept_width
    return Kept(shape.num_layers - num, shape.num_kv_heads, shape.head_dim, num, width)


class Float8Linear(nn.Module):
    """A linear layer in 8 bits: e4m3 with a scale for each output, times rows that are rounded to
    e4m3 with a scale each, by torch's scaled product (on CUDA cuBLASLt's, which gives bfloat16)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scales = _in_float8(linear.weight.detach())
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = scales.t()
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] to [..., outputs], in x's dtype."""
        rows, scales = _in_float8(x.flatten(0, -2))
        y = torch._scaled_mm(
            rows, self.weight.t(), scale_a=scales, scale_b=self.scales, out_dtype=torch.bfloat16
        ).to(x.dtype)
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], y.shape[1])


def _in_float8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 like rows [n, k], float32 [n, 1] that each is to be multiplied by)."""
    wide = rows.float()
    largest = torch.finfo(torch.float8_e4m3fn).max
    scales = wide.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / largest
    return (wide / scales).to(torch.float8_e4m3fn), scales


def narrow_layers(module: nn.Module) -> None:
    """Put a Float8Linear in the place of every linear layer of a module's layers; sizes that are
    no multiples of 16, which the product does not take, stay as they are."""
    for name, part in list(module.named_modules()):
        is_layer = isinstance(part, nn.Linear) and ".layers." in f".{name}"
        if is_layer and not (part.in_features % 16 or part.out_features % 16):
            module.set_submodule(name, Float8Linear(part))


PARTIAL_BYTES = 256 << 20
"""Memory for split attention's partial results."""
WARM_UP_RUNS = 2
MAX_GRAPH_ROWS = 256
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, MAX_GRAPH_ROWS)


def row_bucket(num_rows: int, largest: int) -> int | None:
    """The padded row count, of ROW_BUCKETS; None when that is more than `largest`."""
    return next((b for b in ROW_BUCKETS if num_rows <= b <= largest), None)


def split_level(num_splits: int, max_splits: int) -> int:
    """The padded number of splits: a power of four, at most max_splits. Splits without keys end at
    once, so that few levels, and few graphs, serve every length."""
    level = 1
    while level < num_splits:
        level *= 4
    return min(level, max_splits)


class GraphKey(NamedTuple):
    """rows, splits: as padded. has_adapters, has_own_rows: whether rows' adapters are in the graph,
    and adapters' own rows of the embedding."""

    rows: int
    splits: int
    has_adapters: bool = False
    has_own_rows: bool = False


Forward = Callable[[], torch.Tensor]


class StepGraphs:
    """Captured graphs by their key. One memory pool; used from one thread and stream. largest: most
    rows of a graph. refused: keys of which no graph can be captured; their steps run plainly."""

    def __init__(self, device: torch.device, largest: int) -> None:
        self._device = device
        self.largest = largest
        self.num_captured = 0
        self.refused: set[GraphKey] = set()
        self._graphs: dict[GraphKey, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, key: GraphKey, forward: Forward) -> torch.Tensor:
        """What `forward` returns, computed by a replay.

        forward: runs the step on its static inputs; called only when the key is new: first plainly,
        so that Triton compiles and cuBLAS allocates outside the capture, then under it.
        It can run several times: it writes the same KV to the same slots. The returned tensor is
        overwritten by the next run.
        """
        found = self._graphs.get(key)
        if found is None:
            for _ in range(WARM_UP_RUNS):
                forward()
            graph = torch.cuda.CUDAGraph()
            # On the runner's own stream: torch's is one per process, on the device that came first.
            stream = torch.cuda.current_stream(self._device)
            # Another thread's allocation, or a question to the driver, does not end a capture.
            mode = "thread_local"
            try:
                with torch.cuda.graph(graph, self._pool, stream, capture_error_mode=mode):
                    output = forward()
            except Exception as error:  # the pool gets no more memory, say
                _log.warning("steps like %s run without a graph: %s", key, error)
                self.refused.add(key)
                return forward()
            found = self._graphs[key] = (graph, output)
            self.num_captured += 1
        graph, output = found
        graph.replay()
        return output

    def forget(self) -> None:
        """Drop all graphs: something that they read has moved."""
        self._graphs.clear()
        self.refused.clear()
        # torch does not capture into a pool again whose last graph is gone.
        self._pool = torch.cuda.graph_pool_handle()


def pad_to_bucket(
    arrays: dict[str, Array], key: GraphKey, trash_slot: int, tables_shape: tuple[int, int]
) -> None:
    """Pad the arrays of a step of short runs in place to the bucket's shapes.

    tables_shape: of the bucket's block tables; entries of the step's own beyond it are not read.
    Padded rows have no keys, no tile and the trash slot; every shape depends on the key alone.
    """
    num_rows = key.rows
    fills = {"slots": trash_slot, "sources": paged.NOTHING, "split_rows": -1}
    shapes: dict[str, tuple[int, ...]] = {
        "block_tables": tables_shape,
        "ancestors": (num_rows, -(-num_rows // paged.WORD)),
        "lines": (num_rows, 2),
        "long": (0, paged.TILE_FIELDS),
        "split_rows": (num_rows if key.splits > 1 else 0,),
    }
    for name, array in arrays.items():  # of adapters' spans, one a row is the most
        room = num_rows * (ITEMS_A_ROW if name == "items" else 1)
        shape = shapes.get(name, (room, *array.shape[1:]))
        padded = arrays[name] = np.full(shape, fills.get(name, 0), array.dtype)
        part = array[tuple(map(slice, shape))]  # what fits of it
        padded[tuple(map(slice, part.shape))] = part


@dataclass(frozen=True, slots=True, eq=False)
class BodyPlan:
    """What the body of one step reads.

    arrays: to be uploaded. graph_key: of the graph that is replayed, or None. num_splits: of a
    TilePlan; 0 for the torch attention.
    """

    arrays: dict[str, Array]
    graph_key: GraphKey | None = None
    num_splits: int = 0


class BodyRun:
    """The body of one runner: everything between token ids and the LM head. All runs on the current
    stream.

    module: taken over, its attention is ours. info: the sizes. dtype: of what is computed.
    attention: "triton" or "torch", which adapters' products and gated delta nets follow. embedding:
    the table in CPU memory that rows are gathered from, None where it is on the device. graph_rows:
    rows of the largest graph, 0 for none. cache: its own KV. shape: how attention is divided.
    adapters: beside the model; None for models of the generic path. The partial results of
    split attention and the states of gated delta nets belong to it.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        info: ModelInfo,
        dtype: torch.dtype,
        *,
        attention: paged.AttentionName,
        embedding: torch.Tensor | None,
        graph_rows: int,
    ) -> None:
        device, kept = torch.device(info.device), kept_by(module)
        sizes = shape_of(module.config)
        self.cache = KvCache(kept, info.num_blocks, info.block_size, dtype, device)
        self.shape = paged.TileShape.of(
            num_heads=sizes.num_heads, num_kv_heads=sizes.num_kv_heads, head_dim=sizes.head_dim,
            max_model_len=info.max_model_len, num_bytes=PARTIAL_BYTES, dtype=dtype,
        )  # fmt: skip
        product: Grouped = grouped_torch
        rule: DeltaRule = delta_torch
        self._partials: Any = None
        if attention == "triton":
            from server.model.gpu.triton_kernels import Partials, delta_triton, grouped_triton

            product, rule = grouped_triton, delta_triton
            self._partials = Partials(self.shape, sizes.num_heads, sizes.head_dim, device)
        embed: Any = module.get_input_embeddings()
        self._body = module.base_model
        self._table: torch.Tensor = embed.weight
        # Gemma's scale, rounded as transformers' own embedding does.
        scale = getattr(embed, "embed_scale", None)
        self._scale = None if scale is None else scale.to(device=device, dtype=dtype)
        self._factor = logit_scale(module.config)
        self.embedding = embedding
        nets = delta_nets(module)
        self._taps = sizes.conv_taps
        self.states: DeltaStates | None = None
        if nets:
            self.states = DeltaStates(nets, info.max_num_seqs, info.block_size, rule, device)
        if put_in_place(self._body, "Lfm2ShortConv", PagedConvolution) or nets:
            body: Any = self._body
            attending = [part for part in body.layers if hasattr(part, "self_attn")]
            for place, layer in enumerate(attending):
                layer.self_attn.layer_idx = place  # in our cache, among others that do not attend
        self._holder = StepHolder(module)
        self.adapters: LoraBank | None = None
        if sizes.family in FAMILIES:
            self.adapters = LoraBank(module, sizes, dtype, device, product)
        self._max_seqs = info.max_num_seqs
        self._max_blocks = -(-info.max_model_len // info.block_size)
        self._num_graph = self._num_plain = 0
        self.graphs = StepGraphs(device, graph_rows) if graph_rows else None

    def plan(self, batch: Batch) -> BodyPlan:
        """What a step's body reads."""
        arrays: dict[str, Array] = {
            "token_ids": batch.token_ids,
            "positions": batch.positions,
            "slots": batch.slots.astype(np.int64),
            "prefix_len": batch.prefix_len,
            "block_tables": batch.block_tables,
        }
        own = None if self.adapters is None else self.adapters.embeds(batch)
        if self.adapters is not None and own is not None:
            ids, num = batch.token_ids, self.adapters.shape.vocab_size
            arrays["token_ids"] = np.where(ids < num, ids, 0).astype(np.int32)  # 0: not the base's
        if self.embedding is not None:
            arrays["embeds"] = gathered(self.embedding, arrays["token_ids"])
        if own is not None:
            arrays["is_own"] = np.isin(np.arange(batch.num_rows), own[0])
            arrays["own_embeds"] = np.zeros((batch.num_rows, own[1].shape[1]), own[1].dtype)
            arrays["own_embeds"][own[0]] = own[1]
        if self._taps:
            arrays["sources"] = paged.key_slots(batch, self._taps, self.cache.block_size)
        if self.states is not None:
            arrays |= self.states.items_of(batch)._asdict()
        spans = lora_spans(batch)
        if spans.shape[0]:
            arrays["adapters"] = spans
        if self._partials is None:
            return BodyPlan(arrays)
        arrays["ancestors"] = paged.ancestor_bits(batch)
        tiles = paged.plan_tiles(batch, self.shape)
        arrays |= {"short": tiles.short, "long": tiles.long, "split_rows": tiles.split_rows}
        key, num_splits = self._graph_key(batch, tiles, arrays), tiles.num_splits
        if key is not None:
            # Exactly the blocks that `splits` splits can be in, of at most as many sequences.
            num_blocks = key[1] * self.shape.split_size // self.cache.block_size
            shape = (min(key[0], self._max_seqs), min(self._max_blocks, max(1, num_blocks)))
            pad_to_bucket(arrays, key, self.cache.trash_slot, shape)
            num_splits = key.splits
        return BodyPlan(arrays, key, num_splits)

    def _graph_key(
        self, batch: Batch, plan: paged.TilePlan, arrays: Mapping[str, Array]
    ) -> GraphKey | None:
        """The graph for a step of short runs with these arrays, or None to run it plainly."""
        if self.graphs is None or plan.long.shape[0]:
            return None
        if batch.block_tables.shape[0] > self._max_seqs:
            return None
        num_splits = split_level(plan.num_splits, self.shape.max_splits)
        num_rows = row_bucket(batch.num_rows, self.graphs.largest)
        if num_rows is None:
            return None
        if num_splits > 1 and num_rows * num_splits > self.shape.max_partials:
            return None
        if "items" in arrays and arrays["items"].shape[0] > ITEMS_A_ROW * num_rows:
            return None  # a history is replayed
        key = GraphKey(num_rows, num_splits, "adapters" in arrays, "own_embeds" in arrays)
        return None if key in self.graphs.refused else key

    def run(
        self, batch: Batch, tensors: Mapping[str, torch.Tensor], plan: BodyPlan
    ) -> torch.Tensor:
        """Last hidden states [num_rows (or more, in a graph), hidden_size], valid until the next
        step."""
        names = paged.StepTensors.__dataclass_fields__
        step = paged.StepTensors(**{name: tensors[name] for name in names if name in tensors})
        attention: paged.Attention
        if not plan.num_splits:
            attention = paged.TorchAttention(batch, self.cache.block_size, step.slots.device)
        else:
            from server.model.gpu.triton_kernels import TritonAttention

            attention = TritonAttention(
                step, tensors["short"], tensors["long"], plan.num_splits,
                tensors["split_rows"], self.shape, self._partials, self.cache.block_size,
            )  # fmt: skip
        recur = None
        if self.states is not None:
            items = DeltaItems(tensors["items"], tensors["lines"])
            recur = partial(self.states.recur, items, step.slots, self.cache.inputs)
        forward = partial(
            self._forward, tensors["token_ids"], tensors.get("embeds"), tensors.get("adapters"),
            (tensors["is_own"], tensors["own_embeds"]) if "own_embeds" in tensors else None,
            paged.PagedStep(self.cache, attention, step, recur),
        )  # fmt: skip
        if plan.graph_key is None or self.graphs is None:
            self._num_plain += 1
            hidden = forward()
        else:
            self._num_graph += 1
            hidden = self.graphs.run(plan.graph_key, forward)
        if self.states is not None:
            self.states.commit()
        return hidden

    def _forward(
        self,
        token_ids: torch.Tensor,
        embeds: torch.Tensor | None,
        adapters: torch.Tensor | None,
        own: tuple[torch.Tensor, torch.Tensor] | None,
        step: paged.PagedStep,
    ) -> torch.Tensor:
        """Last hidden states [R, hidden_size], after the final norm, times what their logits are
        scaled by: the head need not know. Queues work, syncs nothing.

        token_ids: int32 [R]. embeds: [R, hidden_size], rows of the table that were gathered in CPU
        memory, as transfers.gathered has them; None where the table is on the device. adapters:
        int32 [n, 3], lora_spans of the step, None in a step without adapters. own: bool [R], which
        rows have an adapter's own, and [R, hidden_size], these; None where none has. step: with its
        rows.
        """
        if self.adapters is not None:
            self.adapters.spans = adapters
        embeds = None if embeds is None else embeds.view(self._table.dtype)
        if own is not None:
            rows = self._table.index_select(0, token_ids) if embeds is None else embeds
            embeds = torch.where(own[0][:, None], own[1].view(rows.dtype), rows)
        given: dict[str, torch.Tensor]
        if embeds is None:
            given = {"input_ids": token_ids[None]}
        else:
            embeds = embeds if self._scale is None else embeds * self._scale
            given = {"inputs_embeds": embeds[None]}
        positions = step.rows.positions[None]
        hidden = self._holder.run(self._body, step, **given, position_ids=positions)
        return hidden if self._factor == 1.0 else hidden * self._factor

    def steps(self) -> tuple[int, int, int]:
        """Steps since the start: replayed, captured first, and without a graph."""
        num_captured = 0 if self.graphs is None else self.graphs.num_captured
        return self._num_graph - num_captured, num_captured, self._num_plain
