"""A Step on a CPU (interface.py): our attention and recurrence for one step on the paged cache.

K and V go to the slots of the step's rows, then each row attends as in kernels/attention.py, so
that trees, shared blocks and chunks give each row the same bits as a row alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from server.model.cpu.kernels import attend_layer, delta_rule
from server.model.cpu.records import (
    LANES,
    AttentionLayer,
    Cache,
    DeltaLayer,
    Float32,
    Rows,
    Scratch,
    Shape,
    Work,
)
from server.model.interface import Call
from server.model.states import DeltaNet, StatePlaces

_NO_VECTOR = np.zeros(0, np.float32)


@dataclass(eq=False)
class PagedStep:
    """The rows of one step on the paged cache. kv_ids: of each layer, its place in the cache's
    keys, -1 for recurrent ones. states: of those, None where there are none. shape: sizes; its
    scale and cap are each call's."""

    rows: Rows
    cache: Cache
    scratch: Scratch
    kv_ids: tuple[int, ...]
    states: StateStore | None
    shape: Shape
    work: Work

    def __post_init__(self) -> None:
        self._plan = None if self.states is None else self.states.plan(self.rows)
        self._stacks = np.zeros(0, np.float32)
        # q and k come rotated: a table of no columns rotates nothing.
        self._still = np.zeros((int(self.rows.positions.max(initial=0)) + 1, 0), np.float32)

    def attend(
        self, call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See Step."""
        num, heads, head_dim = query.shape
        qkv = torch.from_numpy(self.scratch.qkv)[:num]
        first = 0
        for part in (query, key, value):
            width = part.shape[1] * head_dim
            qkv[:, first : first + width].view(num, -1, head_dim).copy_(part)
            first += width
        which = self.kv_ids[call.layer]
        layer = AttentionLayer(
            _NO_VECTOR, _NO_VECTOR, _NO_VECTOR, self._still, self._still, _NO_VECTOR, call.window,
            self.cache.kind, self.cache.kv[which],
        )  # fmt: skip
        shape = self.shape._replace(scale=np.float32(call.scaling), cap=np.float32(call.cap))
        attend_layer(
            self.rows, self.scratch.qkv, layer, shape, self.scratch, self.scratch.attended,
            self.work,
        )  # fmt: skip
        return torch.from_numpy(self.scratch.attended)[:num].view(num, heads, head_dim).clone()

    def recur(self, net: DeltaNet, mixed: torch.Tensor) -> torch.Tensor:
        """See Step."""
        assert self.states is not None and self._plan is not None
        heads, dk, dv = net.state_size
        record = DeltaLayer(
            net.taps.numpy(), net.rate.numpy(), net.shift.numpy(), net.key_heads, dk, dv,
            self.cache.inputs[net.layer],
        )  # fmt: skip
        if not self._stacks.size:
            depth = int(self._plan.depths.max(initial=0)) + 1
            self._stacks = np.zeros((self.work.threads, depth, dk, dv), np.float32)
        out = torch.empty((self.rows.num, heads * dv))
        delta_rule(
            self.rows, self._plan, record, mixed.contiguous().numpy(), self.states.states,
            net.layer, self._stacks, out.numpy(), self.work,
        )  # fmt: skip
        return out


class StateStore(StatePlaces):
    """num_states states of every recurrent layer, float32 [num_states, layers, heads, dk, dv]."""

    def __init__(self, num_states: int, sizes: tuple[int, int, int, int]) -> None:
        super().__init__(num_states, LANES)
        self.states: Float32 = np.zeros((num_states, *sizes), np.float32)
