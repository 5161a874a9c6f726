"""Spreading: a row of inputs made even in size before one scale turns all of it into integers.

A few inputs of a row are many times the others, and one scale would leave the others two or three
levels. Two changes of W @ x, which floats would not notice, are made before both are rounded:
  - input j is multiplied by a factor, and the weights of it are divided by that factor
    (SmoothQuant, Xiao et al. 2023, arXiv 2211.10438, section 4): inputs that are always large;
  - BLOCK neighbours become sums and differences of all of them, and so do their weights (a
    Hadamard matrix: QuaRot, Ashkboos et al. 2024, arXiv 2404.00456): what one row has large.
kernels/integer_rows.py has the function of one row, the same bits on every CPU; this module the
weights that belong to it. What not: which factors (outliers.py). Weights go through the same with
1 / factors and are divided by BLOCK, which is exact.
"""

from __future__ import annotations

import numpy as np

from server.model.cpu.integers.forms import BLOCK
from server.model.cpu.kernels import spread_rows
from server.model.cpu.records import Float32


def spread(x: Float32, factors: Float32) -> Float32:
    """Rows [n, K] spread: float32 [n, K padded to whole blocks]. factors: float32 [padded K]."""
    padded = np.zeros((x.shape[0], factors.shape[0]), np.float32)
    padded[:, : x.shape[1]] = x
    out = np.empty_like(padded)
    spread_rows(padded, factors, out)
    return out


def spread_weights(weight: Float32, factors: Float32) -> Float32:
    """Weights [outputs, K] for inputs that are spread with these factors: float32 [outputs, padded
    K], whose products with `spread(x, factors)` are those of weight and x but for rounding."""
    return spread(weight, np.float32(1.0) / factors) * np.float32(1.0 / BLOCK)
