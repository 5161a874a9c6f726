"""PackedWeights: a model's weights in the kernels' layout.

What: reads named tensors one at a time and packs them into panels (kernels.py), in one arena.
dtype float32, or bfloat16 for the *stored* weights: activations, sums and logits are float32
either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from server.errors import UnsupportedModelError
from server.model.cpu.kernels import PANEL, pack_panels
from server.model.cpu.linear import FloatLinear, float_linear
from server.model.cpu.records import Float32, Layers
from server.model.shape import ModelShape

Panels = npt.NDArray[Any]
"""float32, or uint16 with bfloat16 bits: [panels, K, PANEL]."""


class Weights(Protocol):
    """Named tensors read one at a time (loader.WeightReader)."""

    def names(self) -> Sequence[str]:
        """Names as transformers' state dict has them."""

    def get(self, name: str) -> Any:
        """The tensor, on the CPU."""


def _as_stored(tensor: Any, bf16: bool) -> npt.NDArray[Any]:
    """A torch tensor as float32, or as the bits of its bfloat16 rounding (uint16)."""
    import torch

    if bf16:
        stored: npt.NDArray[Any] = tensor.to(torch.bfloat16).view(torch.int16).numpy()
        return stored.view(np.uint16)
    as_float: npt.NDArray[Any] = tensor.float().numpy()
    return as_float


def _num_panels(num_outputs: int) -> int:
    return -(-num_outputs // PANEL)


class _Size(NamedTuple):
    """A matrix: panels, and the width of its input."""

    num_panels: int
    width: int


def _sizes(s: ModelShape) -> dict[str, _Size]:
    """The matrices that a layer may have."""
    hidden, attended = s.hidden_size, s.num_heads * s.head_dim
    pairs = _num_panels(s.intermediate_size)
    return {
        "qkv": _Size(_num_panels((s.num_heads + 2 * s.num_kv_heads) * s.head_dim), hidden),
        "out": _Size(_num_panels(hidden), attended),
        "conv_in": _Size(_num_panels(3 * hidden), hidden),
        "conv_out": _Size(_num_panels(hidden), hidden),
        "gate_up": _Size(2 * pairs, hidden),
        "down": _Size(_num_panels(hidden), pairs * PANEL),
    }


class _Arena:
    """One array that panels are cut from, on a cache line's boundary."""

    def __init__(self, num_items: int, bf16: bool) -> None:
        self._array = np.zeros(num_items + 64, np.uint16 if bf16 else np.float32)
        # Vectors that straddle cache lines cost a tenth of the bandwidth.
        self._at = (-self._array.ctypes.data % 64) // self._array.itemsize
        self.num_bytes = self._array.nbytes

    def take(self, num_panels: int, width: int) -> Panels:
        """The next [num_panels, width, PANEL], zeros."""
        first = self._at
        self._at += num_panels * width * PANEL
        return self._array[first : self._at].reshape(num_panels, width, PANEL)


class PackedWeights:
    """All weights of a model in the kernels' layout. Read-only after construction.

    Peak memory while packing is the arena and one tensor. num_bytes: arena and norms; head_bytes:
    the LM head's panels, a second copy of a tied embedding table (which stays in its file).
    layers: the records of the forward pass. head: the LM head's panels, [panels, hidden_size,
    PANEL]. embedding: the table as a torch tensor.
    """

    def __init__(
        self,
        shape: ModelShape,
        weights: Weights,
        *,
        dtype: str = "float32",
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"the CPU runner stores weights as float32 or bfloat16, not {dtype}")
        names = set(weights.names())
        biased = f"model.layers.0.{shape.names.down}.bias"
        if biased in names:
            raise UnsupportedModelError(f"MLP biases are not computed on a CPU ({biased})")
        self.bf16 = dtype == "bfloat16"
        self._shape = s = shape
        self._source = weights
        self._sizes = _sizes(s)
        self.inner_size = self._sizes["down"].width
        items = sum(
            size.num_panels * size.width
            for i in range(s.num_layers)
            for size in self._of(i).values()
        )
        head_panels = _num_panels(s.vocab_size)
        self._arena = _Arena((items + head_panels * s.hidden_size) * PANEL, self.bf16)
        self._addresses = {kind: np.zeros(s.num_layers, np.int64) for kind in self._sizes}
        self.layers = self._empty_layers(names)
        for layer in range(s.num_layers):
            self._pack_layer(layer)
            self._read_vectors(layer)
            if progress is not None:
                progress(layer + 1, s.num_layers + 1)
        self.head = self._arena.take(head_panels, s.hidden_size)
        head_name = "lm_head.weight" if "lm_head.weight" in names else "model.embed_tokens.weight"
        self._pack_head(weights.get(head_name))
        self.embedding = weights.get("model.embed_tokens.weight")
        self.head_bytes = self.head.nbytes
        self.num_bytes = self._arena.num_bytes + self.layers.norms.nbytes
        if progress is not None:
            progress(s.num_layers + 1, s.num_layers + 1)

    @property
    def full_head(self) -> FloatLinear:
        """The LM head as a product's weights."""
        return float_linear(self.head)

    def _empty_layers(self, names: set[str]) -> Layers:
        s = self._shape
        has_bias = f"model.layers.0.{s.names.qkv[0]}.bias" in names
        has_out_bias = f"model.layers.0.{s.names.out}.bias" in names
        q_norm = k_norm = 0
        if s.qk_norm == "whole":
            q_norm, k_norm = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        elif s.qk_norm != "none":
            q_norm = k_norm = s.head_dim
        final = self._vector(f"{s.names.final_norm}.weight") + np.float32(s.norm_offset)
        qkv = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim

        def matrix(kind: str) -> FloatLinear:
            return FloatLinear(self._addresses[kind], self._sizes[kind].num_panels, self.bf16)

        convolves = np.array(s.convolutions)
        kv_ids = np.where(convolves, -1, np.cumsum(~convolves) - 1)
        conv_ids = np.where(convolves, np.cumsum(convolves) - 1, -1)

        return Layers(
            qkv=matrix("qkv"),
            out=matrix("out"),
            gate_up=matrix("gate_up"),
            down=matrix("down"),
            conv_in=matrix("conv_in"),
            conv_out=matrix("conv_out"),
            taps=np.zeros((int(convolves.sum()), s.conv_taps, s.hidden_size), np.float32),
            kv_ids=kv_ids.astype(np.int64),
            conv_ids=conv_ids.astype(np.int64),
            norms=np.zeros((s.num_layers, 4, s.hidden_size), np.float32),
            q_norms=np.zeros((s.num_layers, q_norm), np.float32),
            k_norms=np.zeros((s.num_layers, k_norm), np.float32),
            qkv_bias=np.zeros((s.num_layers, qkv if has_bias else 0), np.float32),
            out_bias=np.zeros((s.num_layers, s.hidden_size if has_out_bias else 0), np.float32),
            final_norm=final / np.float32(s.logit_divisor),
        )

    def _stored(self, name: str) -> npt.NDArray[Any]:
        return _as_stored(self._source.get(name), self.bf16)

    def _vector(self, name: str) -> Float32:
        value: Float32 = self._source.get(name).float().numpy()
        return value

    def _rows(self, prefix: str, modules: Sequence[str], kind: str = "weight") -> Any:
        """The rows of one or several modules, one under the other, as a torch tensor."""
        import torch

        parts = [self._source.get(f"{prefix}{module}.{kind}") for module in modules]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _qkv(self, prefix: str, kind: str) -> Any:
        """Rows of q, k and v. Where the rotation pairs neighbours, those of q and k are put in an
        order that pairs halves: a score is the same sum in another order."""
        s = self._shape
        rows = self._rows(prefix, s.names.qkv, kind)
        if not s.interleaved:
            return rows
        order = np.arange(s.head_dim)
        order[: s.rotary_dim] = np.concatenate(
            [np.arange(0, s.rotary_dim, 2), np.arange(1, s.rotary_dim, 2)]
        )
        rotated = s.num_heads + s.num_kv_heads
        places = (np.arange(rotated)[:, None] * s.head_dim + order).reshape(-1)
        values = np.arange(rotated * s.head_dim, rows.shape[0])
        return rows[np.concatenate([places, values])]

    def _of(self, layer: int) -> dict[str, _Size]:
        """The matrices that a layer has."""
        absent = ("qkv", "out") if self._shape.convolutions[layer] else ("conv_in", "conv_out")
        return {kind: size for kind, size in self._sizes.items() if kind not in absent}

    def _pack_layer(self, layer: int) -> None:
        """The matrices of a layer."""
        s = self._shape
        prefix = f"model.layers.{layer}."
        views = {}
        for kind, size in self._of(layer).items():
            views[kind] = self._arena.take(size.num_panels, size.width)
            self._addresses[kind][layer] = views[kind].ctypes.data
        if s.convolutions[layer]:
            pack_panels(self._stored(f"{prefix}{s.names.conv[0]}.weight"), views["conv_in"])
            pack_panels(self._stored(f"{prefix}{s.names.conv[2]}.weight"), views["conv_out"])
        else:
            pack_panels(_as_stored(self._qkv(prefix, "weight"), self.bf16), views["qkv"])
            pack_panels(self._stored(f"{prefix}{s.names.out}.weight"), views["out"])
        gate_up, down = views["gate_up"], views["down"]
        if len(s.names.gate_up) == 1:
            halves = self._stored(f"{prefix}{s.names.gate_up[0]}.weight")
            parts = [halves[: s.intermediate_size], halves[s.intermediate_size :]]
        else:
            parts = [self._stored(f"{prefix}{name}.weight") for name in s.names.gate_up]
        for half, part in enumerate(parts):
            pack_panels(part, gate_up[half::2])
        stored = self._stored(f"{prefix}{s.names.down}.weight")
        padded = np.zeros((s.hidden_size, self.inner_size), stored.dtype)
        padded[:, : s.intermediate_size] = stored
        pack_panels(padded, down)

    def _read_vectors(self, layer: int) -> None:
        """Norms and biases of a layer."""
        s, layers = self._shape, self.layers
        prefix = f"model.layers.{layer}."
        for row, name in enumerate(s.names.norms):
            if name is not None:
                layers.norms[layer, row] = self._vector(f"{prefix}{name}.weight") + s.norm_offset
        if s.convolutions[layer]:
            taps = self._vector(f"{prefix}{s.names.conv[1]}.weight")  # [H, 1, taps]
            layers.taps[layers.conv_ids[layer]] = taps[:, 0].T
            return
        if layers.q_norms.shape[1]:
            for norms, name in zip((layers.q_norms, layers.k_norms), s.names.qk_norms, strict=True):
                norms[layer] = self._vector(f"{prefix}{name}.weight") + s.norm_offset
        if layers.qkv_bias.shape[1]:
            layers.qkv_bias[layer] = self._qkv(prefix, "bias").float().numpy()
        if layers.out_bias.shape[1]:
            layers.out_bias[layer] = self._vector(f"{prefix}{s.names.out}.bias")

    def _pack_head(self, table: Any) -> None:
        for first in range(0, self.head.shape[0], 256):
            rows = table[first * PANEL : min((first + 256) * PANEL, self._shape.vocab_size)]
            pack_panels(_as_stored(rows, self.bf16), self.head, first_panel=first)
