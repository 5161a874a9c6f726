"""ModelTensors: a model's weights under the names of their parts, as every packer reads them.

It knows which tensors make up a layer's q, k and v, gate and up, norms and biases, in the order of
rows that the forward pass wants. Its Weights read the files; weights.py and integers/packed.py have
the layouts. Matrices are given row by row as they are stored; a packer turns rows into numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from server.errors import UnsupportedModelError
from server.model.adapter import EMBEDDING, HEAD
from server.model.cpu.records import Float32, Layers, Linear
from server.model.shape import ModelShape


class Weights(Protocol):
    """Named tensors read one at a time (loader.WeightReader)."""

    def names(self) -> Sequence[str]:
        """Names as transformers' state dict has them."""

    def get(self, name: str) -> Any:
        """The tensor, on the CPU: torch's, or an array, since torch takes a second and 200 MB to
        import."""


class Rows(NamedTuple):
    """Rows of a matrix, one an output, as Weights have them, and the tensor that they are of."""

    name: str
    tensor: Any


def numbers_of(tensor: Any) -> npt.NDArray[Any]:
    """A tensor's own memory; that of bfloat16 as its bits, uint16."""
    if str(tensor.dtype) == "torch.bfloat16":
        import torch

        bits: npt.NDArray[Any] = tensor.view(torch.int16).numpy()
        return bits.view(np.uint16)
    numbers: npt.NDArray[Any] = tensor if isinstance(tensor, np.ndarray) else tensor.numpy()
    return numbers


def floats_of(tensor: Any) -> Float32:
    """A vector as float32, which an array is already."""
    floats: Float32 = tensor if isinstance(tensor, np.ndarray) else tensor.float().numpy()
    return floats


def as_stored(tensor: Any, bf16: bool) -> npt.NDArray[Any]:
    """A torch tensor as float32, or as the bits of its bfloat16 rounding (uint16)."""
    import torch

    return numbers_of(tensor.to(torch.bfloat16) if bf16 else tensor.float())


def widened(numbers: npt.NDArray[Any]) -> Float32:
    """The float32 of what `numbers_of` gives of floats, exactly."""
    if numbers.dtype == np.uint16:  # bfloat16: the upper half of a float32
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
    floats: Float32 = numbers.astype(np.float32, copy=False)
    return floats


class ModelTensors:
    """The parts of a model. Raises UnsupportedModelError for MLP biases."""

    def __init__(self, shape: ModelShape, weights: Weights) -> None:
        self._shape = shape
        self._source = weights
        self._names = set(weights.names())
        biased = f"model.layers.0.{shape.names.down}.bias"
        if biased in self._names:
            raise UnsupportedModelError(f"MLP biases are not computed on a CPU ({biased})")

    def matrices(self, layer: int) -> dict[str, list[Rows]]:
        """The matrices that a layer has by the names of records.Layers, each the parts that its
        outputs are made of: q, k and v; gate and up; one else."""
        s = self._shape
        gate_up = [self._rows(layer, name) for name in s.names.gate_up]
        if len(gate_up) == 1:
            (both,), middle = gate_up, s.intermediate_size
            parts = both.tensor[:middle], both.tensor[middle:]
            gate_up = [Rows(both.name, part) for part in parts]
        found = {"gate_up": gate_up, "down": [self._rows(layer, s.names.down)]}
        if s.convolutions[layer]:
            found["conv_in"] = [self._rows(layer, s.names.conv[0])]
            found["conv_out"] = [self._rows(layer, s.names.conv[2])]
        else:
            found["qkv"] = self._qkv(layer, "weight")
            found["out"] = [self._rows(layer, s.names.out)]
        return found

    def head(self) -> Rows:
        """The LM head: a tied one is the embedding table."""
        name = HEAD if HEAD in self._names else EMBEDDING
        return Rows(name, self._source.get(name))

    def embedding(self) -> Rows:
        """The embedding table."""
        return Rows(EMBEDDING, self._source.get(EMBEDDING))

    def layers(self, matrices: Mapping[str, Linear]) -> Layers:
        """The record of all layers: the matrices, by their names there, beside norms, biases and
        taps, which are read."""
        s = self._shape
        has_bias = f"model.layers.0.{s.names.qkv[0]}.bias" in self._names
        has_out_bias = f"model.layers.0.{s.names.out}.bias" in self._names
        q_norm = k_norm = 0
        if s.qk_norm == "whole":
            q_norm, k_norm = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        elif s.qk_norm != "none":
            q_norm = k_norm = s.head_dim
        final = self._vector(f"{s.names.final_norm}.weight") + np.float32(s.norm_offset)
        qkv = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim
        convolves = np.array(s.convolutions)
        layers = Layers(
            **matrices,
            taps=np.zeros((int(convolves.sum()), s.conv_taps, s.hidden_size), np.float32),
            kv_ids=np.where(convolves, -1, np.cumsum(~convolves) - 1).astype(np.int64),
            conv_ids=np.where(convolves, np.cumsum(convolves) - 1, -1).astype(np.int64),
            norms=np.zeros((s.num_layers, 4, s.hidden_size), np.float32),
            q_norms=np.zeros((s.num_layers, q_norm), np.float32),
            k_norms=np.zeros((s.num_layers, k_norm), np.float32),
            qkv_bias=np.zeros((s.num_layers, qkv if has_bias else 0), np.float32),
            out_bias=np.zeros((s.num_layers, s.hidden_size if has_out_bias else 0), np.float32),
            final_norm=final / np.float32(s.logit_divisor),
        )
        for layer in range(s.num_layers):
            self._read_vectors(layer, layers)
        return layers

    def _read_vectors(self, layer: int, layers: Layers) -> None:
        s = self._shape
        prefix = f"model.layers.{layer}."
        for row, name in enumerate(s.names.norms):
            if name is not None:
                layers.norms[layer, row] = self._vector(f"{prefix}{name}.weight") + s.norm_offset
        if s.convolutions[layer]:
            taps = self._vector(f"{prefix}{s.names.conv[1]}.weight")  # [H, 1, taps]
            layers.taps[layers.conv_ids[layer]] = taps[:, 0].T
            return
        if layers.q_norms.shape[1]:
            both = (layers.q_norms, layers.k_norms)
            for norms, name in zip(both, s.names.qk_norms, strict=True):
                norms[layer] = self._vector(f"{prefix}{name}.weight") + s.norm_offset
        if layers.qkv_bias.shape[1]:
            parts = [floats_of(part.tensor) for part in self._qkv(layer, "bias")]
            layers.qkv_bias[layer] = np.concatenate(parts)
        if layers.out_bias.shape[1]:
            layers.out_bias[layer] = self._vector(f"{prefix}{s.names.out}.bias")

    def _vector(self, name: str) -> Float32:
        return floats_of(self._source.get(name))

    def _rows(self, layer: int, module: str, kind: str = "weight") -> Rows:
        name = f"model.layers.{layer}.{module}.{kind}"
        return Rows(name, self._source.get(name))

    def _qkv(self, layer: int, kind: str) -> list[Rows]:
        """Rows of q, k and v. Where the rotation pairs neighbours, those of q and k are put in an
        order that pairs halves: a score is the same sum in another order."""
        s = self._shape
        parts = [self._rows(layer, module, kind) for module in s.names.qkv]
        if len(parts) == 1:
            sizes = [s.num_heads, s.num_kv_heads, s.num_kv_heads]
            ends = np.cumsum([0, *sizes]) * s.head_dim
            (fused,) = parts
            parts = [
                Rows(fused.name, fused.tensor[int(ends[i]) : int(ends[i + 1])]) for i in range(3)
            ]
        if not s.interleaved:
            return parts
        order = np.arange(s.head_dim)
        order[: s.rotary_dim] = np.concatenate(
            [np.arange(0, s.rotary_dim, 2), np.arange(1, s.rotary_dim, 2)]
        )
        heads = (s.num_heads, s.num_kv_heads)
        rotated = [
            Rows(part.name, part.tensor[(np.arange(n)[:, None] * s.head_dim + order).reshape(-1)])
            for part, n in zip(parts[:2], heads, strict=True)
        ]
        return [*rotated, parts[2]]
