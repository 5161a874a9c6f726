"""Layers that read a state instead of a history, on a GPU: short convolutions (LFM2) and gated
delta nets (Qwen3.5).

As on a CPU, what a position puts into such a layer is kept in its KV slot, so that a tree row reads
its own ancestors' and a rejected draft leaves nothing behind. Which slots those are is the same in
every layer and known on the host: `attention.key_slots` says it once a step.

The gated delta rule (Yang et al. 2024, arXiv 2412.06464, section 3), per value head with state S
[dk, dv], float32:

    S = exp(g) S;  S += k ((v - S^T k) beta)^T;  out = S^T q

A lost state is what replaying the kept inputs gives. states.py says where each sequence begins and
what is kept of it. A step is a list of items,
made on the host for all layers: positions that are replayed, prompt and decode rows, draft nodes
depth first. An item goes on from the one before it or from a kept state; where a draft branches,
the root's state is read again and the branch's ancestors are replayed, so that no stack is needed
and every node has the bits of its path alone.

A program has one sequence, one head and some columns of its state, and walks the items in order:
the sums of a row are the same in a prompt chunk, a decode step, a replay and a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from server.engine.batch import Batch, Int32
from server.model.cpu.records import StatePlan
from server.model.draws import batch_rows
from server.model.gpu.attention import NOTHING, key_slots
from server.model.interface import StepHolder
from server.model.states import DeltaNet, StatePlaces, num_states


class PagedConvolution(nn.Module):
    """A gated short convolution of transformers (Lfm2ShortConv) over inputs by slot, those of the
    attention.PagedStep that it runs in. layer: its place among the convolutions."""

    tailor_holder: StepHolder

    def __init__(self, net: Any, layer: int) -> None:
        super().__init__()
        self.in_proj, self.out_proj = net.in_proj, net.out_proj
        self.layer = layer
        self.taps = net.conv.weight.detach().float()[:, 0].t().contiguous()  # of [H, 1, taps]

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        """[1, R, H] to [1, R, H]; the rows' own inputs are kept first, and read with the others."""
        step = self.tailor_holder.step
        gate, scale, x = self.in_proj(hidden_states)[0].chunk(3, dim=-1)
        rows, kept = step.rows, step.cache.inputs[self.layer]
        kept.index_copy_(0, rows.slots.long(), gate * x)
        sources = rows.sources
        read = kept.index_select(0, sources.clamp(min=0).flatten()).float()
        read = read.view(*sources.shape, -1).masked_fill_((sources < 0)[..., None], 0.0)
        filtered = (read * self.taps).sum(dim=1)
        out: torch.Tensor = self.out_proj((scale * filtered.to(x.dtype))[None])
        return out


ROW, RELOAD, SAVE, SOURCES = range(4)
"""Fields of an item: the step's row, -1 for a replay; the state it goes on from; the state to keep
behind it, -1 for none; the slots of the last positions' inputs, its own last."""

ZEROS, CONTINUES = -1, -2
"""RELOAD where nothing came before, and where the item before did; else a kept state."""

ITEMS_A_ROW = 2
"""Room for items in a CUDA graph: beside its rows, the accepted path of the step before, and
ancestors of branches."""


class DeltaItems(NamedTuple):
    """items: int32 [N, SOURCES + taps]. lines: int32 [S, 2]: first and end of a sequence's."""

    items: Any
    lines: Any


class DeltaMemory(NamedTuple):
    """What a layer reads and writes. slots: int32 [R], of the step's rows. inputs: [num_slots,
    channels + 2 heads], by slot. states: float32 [states, heads, dk, dv]."""

    slots: torch.Tensor
    inputs: torch.Tensor
    states: torch.Tensor


DeltaRule = Callable[[DeltaNet, torch.Tensor, DeltaItems, DeltaMemory], torch.Tensor]
"""One layer's recurrence, of what is [R, channels + 2 heads] to [R, heads dv] in the same dtype."""


def plan_items(batch: Batch, plan: StatePlan, taps: int, block_size: int) -> DeltaItems:
    """The items of a step, as arrays."""
    of_rows = key_slots(batch, taps, block_size)
    items: list[Int32] = []
    lines, at = np.zeros((plan.seqs.shape[0], 2), np.int32), 0
    for i, line in enumerate(plan.seqs):
        mine = _line(batch, line, plan, of_rows, block_size)
        lines[i] = at, at + mine.shape[0]
        at += mine.shape[0]
        items.append(mine)
    return DeltaItems(np.concatenate(items), lines)


def _line(batch: Batch, line: Any, plan: StatePlan, of_rows: Int32, block_size: int) -> Int32:
    """int32 [n, SOURCES + taps]: the items of one sequence."""
    source, destination, after, first, before, edge, edge_row, begin, end = line.tolist()
    taps = of_rows.shape[1]
    order, depths = plan.order[begin:end], plan.depths[begin:end]
    linear, nodes = order[depths == 0], order[depths > 0].tolist()
    replayed = max(0, first - after)
    trunk = np.full((replayed + linear.shape[0], SOURCES + taps), -1, np.int32)
    trunk[:, RELOAD] = CONTINUES
    table = batch.block_tables[batch.seq_ids[order[0]]]
    at = np.arange(after, after + replayed)[:, None] - np.arange(taps - 1, -1, -1)
    block = table[np.maximum(at, 0) // block_size]
    trunk[:replayed, SOURCES:] = np.where(at < 0, NOTHING, block * block_size + at % block_size)
    trunk[replayed:, ROW] = linear
    trunk[replayed:, SOURCES:] = of_rows[linear]
    if before >= 0:
        trunk[replayed - 1, SAVE] = before
    if edge >= 0:
        trunk[replayed + int(np.flatnonzero(linear == edge_row)[0]), SAVE] = edge
    if destination >= 0:
        trunk[-1, SAVE] = destination
    root, again = source, trunk[:0]
    if trunk.shape[0]:
        trunk[0, RELOAD] = source
        root = int(trunk[-1, SAVE])
        if root < 0 and nodes:  # nobody keeps the root's state: it is walked to again
            root, again = source, trunk.copy()
            again[:, ROW] = again[:, SAVE] = -1
    branch = _branches(nodes, plan.depths[begin:end][depths > 0].tolist(), of_rows, root, again)
    if branch.shape[0] and not trunk.shape[0]:
        branch[0, RELOAD] = source
    return np.concatenate([trunk, branch])


def _branches(
    nodes: list[int], depths: list[int], of_rows: Int32, root: int, again: Int32
) -> Int32:
    """The items of draft nodes, depth first. again: what leads to the root where no state does."""
    parts: list[Int32] = []
    path: list[int] = []

    def items(rows: list[int]) -> Int32:
        made = np.full((len(rows), SOURCES + of_rows.shape[1]), -1, np.int32)
        made[:, RELOAD] = CONTINUES
        made[:, SOURCES:] = of_rows[rows]
        return made

    for node, depth in zip(nodes, depths, strict=True):
        goes_on = depth == len(path) + 1
        del path[depth - 1 :]
        if not goes_on:
            walked = [*path, node]
            back = np.concatenate([again, items(walked)])
            back[0, RELOAD] = root
            parts.append(back)
        else:
            parts.append(items([node]))
        parts[-1][-1, ROW] = node
        path.append(node)
    return np.concatenate(parts) if parts else again[:0]


class DeltaStates(StatePlaces):
    """The states of a runner's sequences, and what each step does to them.

    nets: of the model, one kind of sizes. A step may run several times on the same inputs (a graph
    is run before it is captured), so no state is changed in place.
    """

    def __init__(
        self,
        nets: Sequence[DeltaNet],
        max_num_seqs: int,
        block_size: int,
        rule: DeltaRule,
        device: torch.device,
    ) -> None:
        super().__init__(num_states(max_num_seqs), block_size)
        self._rule = rule
        self._nets = nets
        size = (len(nets), num_states(max_num_seqs), *nets[0].state_size)
        self.states = torch.zeros(size, device=device)
        self.is_warming = False

    def items_of(self, batch: Batch) -> DeltaItems:
        """The items of a step; call `commit` once it is queued: later steps find its states."""
        plan = self.plan(batch_rows(batch), replays=not self.is_warming)
        return plan_items(batch, plan, self._nets[0].taps.shape[0], self._block_size)

    def recur(
        self, step: DeltaItems, slots: torch.Tensor, kept: Any, net: DeltaNet, mixed: torch.Tensor
    ) -> torch.Tensor:
        """See DeltaRule. kept: KvCache.inputs."""
        memory = DeltaMemory(slots, kept[net.layer], self.states[net.layer])
        return self._rule(net, mixed, step, memory)


def delta_torch(
    net: DeltaNet, mixed: torch.Tensor, step: DeltaItems, memory: DeltaMemory
) -> torch.Tensor:
    """DeltaRule in plain torch, item by item: the reference."""
    memory.inputs.index_copy_(0, memory.slots.long(), mixed)
    heads, dk, dv = net.state_size
    out = torch.zeros((mixed.shape[0], heads, dv), dtype=mixed.dtype, device=mixed.device)
    state = torch.zeros((heads, dk, dv), device=mixed.device)
    for row, reload, save, *sources in step.items.tolist():
        if reload >= 0:
            state = memory.states[reload]
        elif reload == ZEROS:
            state = torch.zeros_like(state)
        q, k, v, decay, beta = _inputs(net, memory.inputs, sources)
        state = state * decay[:, None, None]
        change = (v - torch.einsum("hkv,hk->hv", state, k)) * beta[:, None]
        state = state + k[:, :, None] * change[:, None]
        if row >= 0:
            out[row] = torch.einsum("hkv,hk->hv", state, q).to(out.dtype)
        if save >= 0:
            memory.states[save] = state
    return out.flatten(1)


def _inputs(net: DeltaNet, kept: torch.Tensor, sources: list[int]) -> tuple[torch.Tensor, ...]:
    """(q, k, v, decay, beta) of a position, all heads, float32."""
    heads, dk, dv = net.state_size
    channels = net.taps.shape[1]
    filtered = torch.zeros(channels, device=kept.device)
    for source, weight in zip(sources, net.taps, strict=True):
        if source >= 0:
            filtered = filtered + weight * kept[source, :channels].float()
    keys = net.key_heads * dk
    active = functional.silu(filtered)
    q, k, v = active[:keys], active[keys : 2 * keys], active[2 * keys :]
    q, k = (
        (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(
            heads // net.key_heads, 0
        )
        for x in (q.view(-1, dk), k.view(-1, dk))
    )
    b, a = kept[sources[-1], channels:].float().view(2, heads)
    decay = torch.exp(-net.rate * functional.softplus(a + net.shift))
    return q * dk**-0.5, k, v.view(heads, dv), decay, torch.sigmoid(b)
