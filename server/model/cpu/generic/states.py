"""The recurrent states of the generic path on a CPU: states.py's, with their memory."""

from __future__ import annotations

import numpy as np

from server.model.cpu.records import Float32
from server.model.cpu.sizes import LANES
from server.model.states import StatePlaces, StatePlan

__all__ = ["StatePlan", "StateStore"]


class StateStore(StatePlaces):
    """num_states states of every recurrent layer, float32 [num_states, layers, heads, dk, dv]."""

    def __init__(self, num_states: int, sizes: tuple[int, int, int, int]) -> None:
        super().__init__(num_states, LANES)
        self.states: Float32 = np.zeros((num_states, *sizes), np.float32)
