"""Rows of logits that top-k and top-p cut, for the CPU's tests and for tests/gpu."""

from __future__ import annotations

import numpy as np
import torch

from server.model.gpu.draw_plan import DrawPlan


def cut_problem(
    seed: int, rows: int, size: int
) -> tuple[torch.Tensor, DrawPlan, dict[str, torch.Tensor]]:
    """x float64 [rows, size] with ties, empty and peaked rows, a plan with top_k and top_p alone,
    together and off, and the plan's arrays."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, size)) * rng.choice([0.01, 1.0, 6.0], (rows, 1))
    x[::3] = np.round(x[::3] * 2) / 2
    x[1::4, rng.permutation(size)[: size // 3]] = -np.inf
    x[2] = 1.0
    x[3] = -np.inf
    arrays = {
        "top_k": rng.choice([size, size, 3, size // 2], rows).astype(np.int64),
        "top_p": rng.choice([1.0, 0.999, 0.9, 0.3], rows),
    }
    plan = DrawPlan(arrays, rows, False, -1, True, True)
    return torch.from_numpy(x), plan, {k: torch.from_numpy(a) for k, a in arrays.items()}
