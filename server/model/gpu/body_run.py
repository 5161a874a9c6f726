"""BodyRun: the rows of a step through transformers' layers, plainly or by replaying a CUDA graph.

What a graph reads lies in an upload of its own, at addresses that its bucket fixes. Grammars, draws
and steps without a graph have another upload, which may grow and move. So no step makes the graphs
be captured again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from server.engine.batch import Batch, Int32
from server.model.gpu import attention as paged
from server.model.gpu.body import Body, StepIds
from server.model.gpu.convolution import input_slots
from server.model.gpu.delta import ITEMS_A_ROW, DeltaItems, DeltaStates, delta_rule
from server.model.gpu.graphs import GraphKey, StepGraphs, pad_to_bucket, row_bucket, split_level
from server.model.gpu.grouped import SPAN_FIELDS
from server.model.gpu.kv_cache import KvCache
from server.model.gpu.lm_head import GraphHead, LmHead
from server.model.gpu.lora import lora_spans
from server.model.gpu.slices import gathered
from server.model.gpu.spec import graph_head_rows
from server.model.gpu.transfers import Upload

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class BodyPlan:
    """What the body of one step reads.

    arrays: to be uploaded. graph_key: of the graph that is replayed, or None. tiles:
    the attention's work; None for the torch attention.
    """

    arrays: dict[str, Array]
    graph_key: GraphKey | None
    tiles: paged.TilePlan | None

    @property
    def has_head(self) -> bool:
        """Whether the full head's rows go through it in the graph."""
        return self.graph_key is not None and self.graph_key.has_head


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """Last hidden states [num_rows (or more, in a graph), hidden_size]; where the head was in the
    graph, logits float32 of its rows (GraphHead), and their argmax int32, if that is what is
    drawn. Valid until the next step."""

    hidden: torch.Tensor
    logits: torch.Tensor | None = None
    ids: torch.Tensor | None = None


class BodyRun:
    """The body of one runner.

    shape: how attention is divided. attention: "triton" or "torch". embedding: see TorchRunner.
    tables_shape: most sequences and blocks of a step's block tables. graph_rows: rows of the
    largest graph, 0 for none. The partial results of split attention and the states of gated delta
    nets belong to it. All runs on the current stream.
    """

    def __init__(
        self,
        body: Body,
        cache: KvCache,
        shape: paged.TileShape,
        *,
        attention: paged.AttentionName,
        embedding: torch.Tensor | None,
        tables_shape: tuple[int, int],
        graph_rows: int,
    ) -> None:
        device = cache.memory.device
        self.body = body
        self.own = None if body.adapters is None else body.adapters.own
        self._taps = body.kept.taps
        self.states: DeltaStates | None = None
        if body.nets:
            rule = delta_rule(attention)
            self.states = DeltaStates(body.nets, tables_shape[0], cache.block_size, rule, device)
        self.embedding = embedding
        self.shape = shape
        self.graphs: StepGraphs | None = None
        self._attention = attention
        self._cache = cache
        self._max_seqs, self._max_blocks = tables_shape
        self._partials: Any = None
        if attention == "triton":
            from server.model.gpu.triton_kernels import Partials

            num_kv_heads, head_dim = (int(n) for n in cache.memory.shape[-2:])
            self._partials = Partials(shape, num_kv_heads * shape.group_size, head_dim, device)
        width = 0 if embedding is None else embedding.shape[1] * embedding.element_size()
        fields = 14 + paged.TILE_FIELDS + 2 * SPAN_FIELDS + graph_rows // paged.WORD + self._taps
        if self.states is not None:
            fields += 2 + ITEMS_A_ROW * self.states.item_fields
        per_row = 4 * fields + width
        tables = 4 * self._max_seqs * self._max_blocks if graph_rows else 0
        self.inputs = Upload(device, graph_rows * per_row + tables + (1 << 12))
        self.head: GraphHead | None = None
        self._num_graph = self._num_plain = 0
        if graph_rows:
            self.graphs = StepGraphs(device, graph_rows)

    def add_head(self, head: LmHead, head_bytes: int) -> None:
        """Graphs have the full head, too, and its argmax. head_bytes: see Ways."""
        assert self.graphs is not None
        num_rows = graph_head_rows(head.weight.shape[0], head_bytes, self.graphs.largest)
        self.head = GraphHead(head, num_rows)

    def plan(
        self,
        batch: Batch,
        head_rows: Int32 | None = None,
    ) -> BodyPlan:
        """What a step's body reads. head_rows: the rows that go through
        the full head, if all go through it at once and none through a slice of it."""
        arrays = self._row_arrays(batch)
        if self._attention == "torch":
            arrays |= {
                "path_start": batch.path_start,
                "path_len": batch.path_len,
                "path_slots": batch.path_slots,
            }
            return BodyPlan(arrays, None, None)
        arrays["ancestors"] = paged.ancestor_bits(batch)
        tiles = paged.plan_tiles(batch, self.shape)
        key = self._graph_key(batch, tiles)
        if self.states is not None and key is not None:
            if arrays["items"].shape[0] > ITEMS_A_ROW * key.rows:
                key = None  # a history is replayed
        if key is not None:
            # Exactly the blocks that `splits` splits can be in, of at most as many sequences.
            num_blocks = key[1] * self.shape.split_size // self._cache.block_size
            shape = (min(key[0], self._max_seqs), min(self._max_blocks, max(1, num_blocks)))
            has = {"has_adapters": "adapters" in arrays, "has_own_rows": "own_places" in arrays}
            key = key._replace(**has)
            tiles = pad_to_bucket(arrays, tiles, key, self._cache.trash_slot, shape)
            if head_rows is not None and self.head is not None and key.rows <= self.head.num_rows:
                key = key._replace(has_head=True)
                arrays["graph_rows"] = np.zeros(key.rows, np.int32)  # padded: row 0's logits
                arrays["graph_rows"][: head_rows.shape[0]] = head_rows
        for i, group in enumerate(tiles.groups):
            arrays[f"tiles{i}"] = group.tiles
        arrays["split_rows"] = tiles.split_rows
        return BodyPlan(arrays, key, tiles)

    def _row_arrays(self, batch: Batch) -> dict[str, Array]:
        """What a step's layers read beside the attention's work."""
        arrays: dict[str, Array] = {
            "token_ids": batch.token_ids,
            "positions": batch.positions,
            "seq_ids": batch.seq_ids,
            "slots": batch.slots,
            "prefix_len": batch.prefix_len,
            "block_tables": batch.block_tables,
        }
        if self.embedding is not None:
            if self.own is None:
                arrays["embeds"] = gathered(self.embedding, batch.token_ids)
            else:
                arrays["embeds"] = self.own.gathered(self.embedding, batch, batch.token_ids)
        if self._taps:
            arrays["sources"] = input_slots(batch, self._taps, self._cache.block_size)
        if self.states is not None:
            arrays |= self.states.plan(batch)._asdict()
        spans = lora_spans(batch)
        if spans.shape[0]:
            arrays["adapters"] = spans
        own_places = None if self.own is None else self.own.embedding_places(batch)
        if own_places is not None:
            arrays["own_places"] = own_places
        return arrays

    def _graph_key(self, batch: Batch, plan: paged.TilePlan) -> GraphKey | None:
        """The graph for a step of short runs, or None to run it plainly."""
        if self.graphs is None or len(plan.groups) != 1:
            return None
        group = plan.groups[0]
        if group.block_m != self.shape.small_m or batch.block_tables.shape[0] > self._max_seqs:
            return None
        num_splits = split_level(group.num_splits, self.shape.max_splits)
        longest = int(batch.prefix_len.max())
        num_rows = row_bucket(batch.num_rows, self.graphs.largest)
        if num_rows is None or longest > num_splits * self.shape.split_size:
            return None
        if num_splits > 1 and num_rows * num_splits > self.shape.max_partials:
            return None
        return GraphKey(num_rows, num_splits)

    def run(self, batch: Batch, tensors: Mapping[str, torch.Tensor], plan: BodyPlan) -> Computed:
        """Compute the layers, and the head where the plan has it."""
        step = paged.StepTensors(
            tensors["positions"],
            tensors["seq_ids"],
            tensors["slots"],
            tensors["prefix_len"],
            tensors["block_tables"],
            tensors.get("path_start"),
            tensors.get("path_len"),
            tensors.get("path_slots"),
            tensors.get("ancestors"),
            tensors.get("sources"),
        )
        attention = self._attends(batch, step, tensors, plan)
        recur = None
        if self.states is not None:
            items = DeltaItems(tensors["items"], tensors["lines"])
            recur = partial(self.states.recur, items, step.slots, self._cache.inputs)
        paged_step = paged.PagedStep(self._cache, attention, step, recur)

        embeds = None
        if self.embedding is not None:
            embeds = tensors["embeds"].view(self.embedding.dtype)
        ids = StepIds(
            tensors["token_ids"], embeds, tensors.get("adapters"), tensors.get("own_places")
        )  # fmt: skip

        head = self.head if plan.has_head else None

        def forward() -> tuple[torch.Tensor, ...]:
            hidden = self.body(ids, step, paged_step)
            if head is None:
                return (hidden,)
            return hidden, *head(hidden, tensors["graph_rows"])

        if plan.graph_key is None or self.graphs is None:
            self._num_plain += 1
            computed = Computed(*forward())
        else:
            self._num_graph += 1
            computed = Computed(*self.graphs.run(plan.graph_key, forward))
        if self.states is not None:
            self.states.commit()
        return computed

    def _attends(
        self,
        batch: Batch,
        step: paged.StepTensors,
        tensors: Mapping[str, torch.Tensor],
        plan: BodyPlan,
    ) -> paged.Attention:
        """The step's attention."""
        if plan.tiles is None:
            return paged.TorchAttention(batch, step, self._cache.block_size)
        from server.model.gpu.triton_kernels import TritonAttention

        return TritonAttention(
            step,
            [
                (tensors[f"tiles{i}"], group.block_m, group.num_splits)
                for i, group in enumerate(plan.tiles.groups)
            ],
            tensors["split_rows"],
            plan.tiles.num_splits,
            self.shape,
            self._partials,
            self._cache.block_size,
        )

    def steps(self) -> tuple[int, int, int]:
        """Steps since the start: replayed, captured first, and without a graph."""
        num_captured = 0 if self.graphs is None else self.graphs.num_captured
        return self._num_graph - num_captured, num_captured, self._num_plain

    def upload(self, arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """A graph step's arrays on the device, where its bucket has them."""
        generation = self.inputs.generation
        tensors = self.inputs(arrays)
        if self.inputs.generation != generation and self.graphs is not None:
            self.graphs.forget()  # never: it is sized for the largest bucket
        return tensors
