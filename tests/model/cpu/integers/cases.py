"""Random weights of every form, as a GGUF holds them and taken apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from server.model.cpu.integers.forms import BY_NAME, FORMS
from server.model.cpu.integers.packed import integer_linear
from server.model.cpu.integers.weights import Stored, from_ggml, pack, quantised
from server.model.cpu.kernels import product
from server.model.cpu.linear import Arena, activations, new_work

GGML = tuple(form.name for form in FORMS if not form.per_output)
# Bytes of a block, its inputs, and where its float16 numbers lie.
_BLOCKS = {
    "q8_0": (34, 32, (0,)), "q4_0": (18, 32, (0,)), "q4_1": (20, 32, (0, 2)),
    "q5_0": (22, 32, (0,)), "q5_1": (24, 32, (0, 2)), "q4_k": (144, 256, (0, 2)),
    "q5_k": (176, 256, (0, 2)), "q6_k": (210, 256, (208,)),
}  # fmt: skip


def ggml_rows(
    name: str, outputs: int, inputs: int, seed: int = 0, scale: float = 0.01
) -> npt.NDArray[np.uint8]:
    """uint8 [outputs, bytes]: any numbers, finite scales of about that size."""
    rng = np.random.default_rng(seed)
    size, per, halves = _BLOCKS[name]
    raw = rng.integers(0, 256, (outputs, inputs // per, size), np.uint8)
    for at in halves:
        values = rng.standard_normal((outputs, inputs // per)).astype("<f2") * np.float16(scale)
        raw[:, :, at : at + 2] = values[..., None].view(np.uint8)
    return raw.reshape(outputs, -1)


def largest(name: str, outputs: int, inputs: int, sign: int = 1) -> Stored:
    """Weights whose stored numbers are the largest of their form, or the smallest."""
    if name not in GGML:
        return quantised(BY_NAME[name], np.full((outputs, inputs), sign, np.float32))
    raw = ggml_rows(name, outputs, inputs)
    size, _, halves = _BLOCKS[name]
    numbers = np.ones(size, bool)
    for at in halves:
        numbers[at : at + 2] = False
    whole = 0x7F if name == "q8_0" else 0xFF
    raw.reshape(outputs, -1, size)[:, :, numbers] = whole if sign > 0 else 0xFF - whole
    return from_ggml(name, raw)


def stored(name: str, outputs: int, inputs: int, seed: int = 0) -> Stored:
    """Weights of a form, from ggml's bytes or quantised."""
    if name in GGML:
        return from_ggml(name, ggml_rows(name, outputs, inputs, seed))
    rng = np.random.default_rng(seed)
    return quantised(BY_NAME[name], rng.standard_normal((outputs, inputs), dtype=np.float32))


def inputs(rows: int, width: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Rows of quite different sizes, with zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, width), dtype=np.float32)
    x *= np.exp(rng.standard_normal((rows, width), dtype=np.float32))
    x[rows // 2, : width // 2] = 0.0
    return x


def multiplied(
    x: Any, parts: list[Stored], threads: int = 1, factors: Any = None
) -> npt.NDArray[np.float32]:
    """The product as the server computes it. factors: what inputs are spread with, ones when None;
    of forms in blocks, nothing."""
    packed = [pack(part, Arena()) for part in parts]  # alive as long as the matrix is
    inputs = packed[0].inputs
    if factors is None:
        factors = np.ones(inputs, np.float32)
    weights = integer_linear([packed], activations(x.shape[0], inputs), factors[None])
    out = np.full((x.shape[0], weights.outputs), np.nan, np.float32)
    product(x, x.shape[0], weights, out, 0.0, new_work(threads))
    del packed
    return out
