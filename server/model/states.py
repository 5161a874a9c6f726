"""Recurrent states as a cache: what a gated delta net needs of the positions before a row.

Each position's inputs to the recurrence lie beside K and V in its KV slot, are moved and shared
with them, and a rejected draft leaves nothing to roll back. A state is what replaying these inputs
from position 0 gives, in one order, so that it has the same bits whoever computed it. StatePlaces
keeps some states, each under the slot of the last position in it, so that little is replayed: a
sequence's own after its last row (the accepted path is replayed on it), and block boundaries, which
requests with the same prompt begin from. A lost state is computed again, with the same bits.
DeltaNet is transformers' own net (Qwen3.5) with a step's recurrence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from server.engine.batch import Int32
from server.model.cpu.records import Rows, StatePlan
from server.model.interface import StepHolder, put_in_place

_WORTH_KEEPING = 16
"""Positions of a replay whose end is kept."""


class StatePlaces:
    """Which of num_states states is of which slot; the states themselves are a device's.

    A state takes another place than the one that it goes on from, so that a step may run twice.
    Used from one thread at a time.
    """

    def __init__(self, num_states: int, block_size: int) -> None:
        self._block_size = block_size
        self._by_slot: OrderedDict[int, int] = OrderedDict()  # the oldest use first
        self._free = list(range(num_states))
        self._pending: list[tuple[int, int]] = []
        self._replaced: list[int] = []  # slots whose state nobody needs after this step
        self._sources: set[int] = set()  # of this step: read while it runs

    def forget(self, slots: Iterable[int]) -> None:
        """Slots that are written anew."""
        for slot in slots:
            state = self._by_slot.pop(slot, None)
            if state is not None:
                self._free.append(state)

    def plan(self, rows: Rows, *, replays: bool = True) -> StatePlan:
        """What a step begins from and leaves; `commit` makes the latter known when it is through.

        A step that fails leaves none of its states. replays: False where nobody reads what the step
        gives, so that no history is computed again.
        """
        self._free += [state for _, state in self._pending]
        self._pending, self._replaced, self._sources = [], [], set()
        self.forget(rows.slots[: rows.num].tolist())
        seqs = np.unique(rows.seq_ids[: rows.num])
        every = [self._sequence(rows, int(seq), replays) for seq in seqs]
        order = [row for _, mine, _ in every for row in mine]
        depths = [depth for _, _, mine in every for depth in mine]
        lines, at = [], 0
        for line, mine, _ in every:
            lines.append([*line, at, at + len(mine)])
            at += len(mine)
        return StatePlan(
            np.array(lines, np.int64).reshape(-1, 9), np.array(order, np.int64),
            np.array(depths, np.int64),
        )  # fmt: skip

    def commit(self) -> None:
        """The step of the last plan has written its states."""
        for slot, state in self._pending:
            self.forget([slot])
            self._by_slot[slot] = state
        self.forget(self._replaced)
        self._pending, self._replaced = [], []

    def _sequence(
        self, rows: Rows, seq: int, replays: bool
    ) -> tuple[list[int], list[int], list[int]]:
        """(a line of StatePlan.seqs less its ends, its rows in order, their depths)."""
        mine = np.flatnonzero(rows.seq_ids[: rows.num] == seq)
        linear = mine[rows.path_len[mine] == 0]
        linear = linear[np.argsort(rows.positions[linear], kind="stable")]
        nodes = mine[rows.path_len[mine] > 0]
        positions = rows.positions[linear]
        first = int(positions[0] if linear.size else rows.prefix_len[nodes[0]])
        if linear.size and not np.array_equal(positions, first + np.arange(linear.size)):
            raise ValueError("rows of a sequence are not neighbours")
        if np.any(rows.prefix_len[nodes] != first + linear.size):
            raise ValueError("a draft does not begin where its sequence ends")
        table = rows.tables[seq]
        source, after = self._latest(table, first) if replays else (-1, first)
        self._sources.add(source)
        before = edge = edge_row = destination = -1
        if linear.size:
            destination = self._take(self._slot(table, first + linear.size - 1))
            # Nobody else begins inside a block.
            if source >= 0 and after % self._block_size != 0 and destination >= 0:
                self._replaced.append(self._slot(table, after - 1))
        if first - after >= _WORTH_KEEPING:
            before = self._take(self._slot(table, first - 1))
        size = self._block_size
        last_edge = (first + linear.size) // size * size - 1
        if first <= last_edge < first + linear.size - 1:
            edge = self._take(self._slot(table, last_edge))
            edge_row = int(linear[last_edge - first]) if edge >= 0 else -1
        path, depths = _depth_first(rows, nodes)
        line = [source, destination, after, first, before, edge, edge_row]
        return line, [*linear.tolist(), *path], [0] * linear.size + depths

    def _latest(self, table: Int32, end: int) -> tuple[int, int]:
        """(the state of the most positions below `end`, how many they are); (-1, 0) for none."""
        for position in range(end - 1, -1, -1):
            slot = self._slot(table, position)
            if slot in self._by_slot:
                self._by_slot.move_to_end(slot)
                return self._by_slot[slot], position + 1
        return -1, 0

    def _take(self, slot: int) -> int:
        """A state for a slot, known after `commit`; -1 when all are in use by this step."""
        if not self._free:
            for known, state in self._by_slot.items():
                if state not in self._sources:
                    del self._by_slot[known]
                    self._free.append(state)
                    break
            else:
                return -1
        state = self._free.pop()
        self._pending.append((slot, state))
        return state

    def _slot(self, table: Int32, position: int) -> int:
        size = self._block_size
        return int(table[position // size]) * size + position % size


def _depth_first(rows: Rows, nodes: Any) -> tuple[list[int], list[int]]:
    """Draft nodes so that each comes after its parent with nothing but its subtree between, and
    their depths."""

    def path(row: int) -> tuple[int, ...]:
        start = int(rows.path_start[row])
        return tuple(rows.path_slots[start : start + int(rows.path_len[row])].tolist())

    paths = {int(row): path(int(row)) for row in nodes}
    order = sorted(paths, key=paths.__getitem__)
    return order, [len(paths[row]) for row in order]


def num_states(max_num_seqs: int) -> int:
    """Of every layer: a sequence's own, the one that takes its place, and some of prompts."""
    return 2 * max_num_seqs + 4


class DeltaNet(nn.Module):
    """transformers' own gated delta net with the recurrence of the step that it runs in:
    projections, norm and gate are the net's.

    layer: its place among the recurrent layers. taps: float32 [taps, channels of q, k, v], the
    oldest first. rate, shift: float32 [heads], exp(A_log) and dt_bias. key_heads, dk, dv: sizes.
    Raises ValueError for another activation than SiLU.
    """

    taps: torch.Tensor
    rate: torch.Tensor
    shift: torch.Tensor
    tailor_holder: StepHolder

    def __init__(self, net: Any, layer: int) -> None:
        super().__init__()
        self.in_proj_qkv, self.in_proj_z = net.in_proj_qkv, net.in_proj_z
        self.in_proj_b, self.in_proj_a = net.in_proj_b, net.in_proj_a
        self.norm, self.out_proj = net.norm, net.out_proj
        if net.activation != "silu":
            raise ValueError("the activation of its delta net is not SiLU")
        self.layer = layer
        self.taps = net.conv1d.weight.detach().float()[:, 0].t().contiguous()
        self.rate = net.A_log.detach().float().exp()
        self.shift = net.dt_bias.detach().float()
        self.key_heads, self.dk = int(net.num_k_heads), int(net.head_k_dim)
        self.dv = int(net.head_v_dim)

    @property
    def state_size(self) -> tuple[int, int, int]:
        """(heads, dk, dv)."""
        return self.rate.shape[0], self.dk, self.dv

    @property
    def kept_width(self) -> int:
        """Numbers that are kept of a position."""
        return int(self.taps.shape[1] + 2 * self.rate.shape[0])

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        """[1, R, H] to [1, R, H]."""
        parts = [self.in_proj_qkv, self.in_proj_b, self.in_proj_a]
        mixed = torch.cat([part(hidden_states)[0] for part in parts], dim=-1)
        read = self.tailor_holder.step.recur(self, mixed)
        gate = self.in_proj_z(hidden_states).reshape(-1, self.dv)
        normed = self.norm(read.reshape(-1, self.dv), gate)
        out: torch.Tensor = self.out_proj(normed.reshape(1, hidden_states.shape[1], -1))
        return out


def replace_delta_nets(body: nn.Module) -> list[DeltaNet]:
    """Put a DeltaNet in the place of every gated delta net of transformers; these."""
    return put_in_place(body, "Qwen3_5GatedDeltaNet", DeltaNet)
