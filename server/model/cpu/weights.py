"""PackedWeights: a model's weights in the kernels' layout.

What: reads named tensors one at a time and packs them into panels (kernels.py), in one arena.
dtype float32, or bfloat16 for the *stored* weights: activations, sums and logits are float32
either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from server.model.cpu.forward import NORM_IN, NORM_MLP, NORM_POST_ATTENTION, NORM_POST_MLP
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
        if any(name.endswith("mlp.down_proj.bias") for name in names):
            raise ValueError("MLP biases are not supported on the CPU")
        self.bf16 = dtype == "bfloat16"
        self._shape = s = shape
        self._source = weights
        qkv = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim
        pairs = _num_panels(s.intermediate_size)
        self.inner_size = pairs * PANEL
        # Panels of a layer's matrices and the width of their input: qkv, out, gate and up, down.
        self._panels = [_num_panels(qkv), _num_panels(s.hidden_size)]
        self._panels += [2 * pairs, _num_panels(s.hidden_size)]
        self._widths = [s.hidden_size, s.num_heads * s.head_dim, s.hidden_size, self.inner_size]
        items = sum(p * k for p, k in zip(self._panels, self._widths, strict=True)) * s.num_layers
        head_panels = _num_panels(s.vocab_size)
        self._arena = _Arena((items + head_panels * s.hidden_size) * PANEL, self.bf16)
        self._addresses = np.zeros((4, s.num_layers), np.int64)
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
        has_bias = "model.layers.0.self_attn.q_proj.bias" in names
        has_out_bias = "model.layers.0.self_attn.o_proj.bias" in names
        qkv = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim

        def matrix(column: int) -> FloatLinear:
            return FloatLinear(self._addresses[column], self._panels[column], self.bf16)

        return Layers(
            qkv=matrix(0),
            out=matrix(1),
            gate_up=matrix(2),
            down=matrix(3),
            norms=np.zeros((s.num_layers, 4, s.hidden_size), np.float32),
            qk_norms=np.zeros((s.num_layers, 2, s.head_dim), np.float32),
            qkv_bias=np.zeros((s.num_layers, qkv if has_bias else 0), np.float32),
            out_bias=np.zeros((s.num_layers, s.hidden_size if has_out_bias else 0), np.float32),
            final_norm=self._vector("model.norm.weight") + np.float32(s.norm_offset),
        )

    def _stored(self, name: str) -> npt.NDArray[Any]:
        return _as_stored(self._source.get(name), self.bf16)

    def _vector(self, name: str) -> Float32:
        value: Float32 = self._source.get(name).float().numpy()
        return value

    def _pack_layer(self, layer: int) -> None:
        """The four matrices of a layer."""
        s = self._shape
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        views = [
            self._arena.take(num, k) for num, k in zip(self._panels, self._widths, strict=True)
        ]
        self._addresses[:, layer] = [view.ctypes.data for view in views]
        qkv, out, gate_up, down = views
        parts = [self._stored(f"{attention}{n}_proj.weight") for n in "qkv"]
        pack_panels(np.concatenate(parts), qkv)
        pack_panels(self._stored(f"{attention}o_proj.weight"), out)
        for half, part in enumerate(("gate", "up")):
            pack_panels(self._stored(f"{mlp}{part}_proj.weight"), gate_up[half::2])
        stored = self._stored(f"{mlp}down_proj.weight")
        padded = np.zeros((s.hidden_size, self.inner_size), stored.dtype)
        padded[:, : s.intermediate_size] = stored
        pack_panels(padded, down)

    def _read_vectors(self, layer: int) -> None:
        """Norms and biases of a layer."""
        s, layers = self._shape, self.layers
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        norm_names = {NORM_IN: "input_layernorm", NORM_MLP: "post_attention_layernorm"}
        if s.sandwich_norms:
            norm_names[NORM_MLP] = "pre_feedforward_layernorm"
            norm_names[NORM_POST_ATTENTION] = "post_attention_layernorm"
            norm_names[NORM_POST_MLP] = "post_feedforward_layernorm"
        for row, name in norm_names.items():
            layers.norms[layer, row] = self._vector(f"{prefix}{name}.weight") + s.norm_offset
        if s.qk_norm:
            for row, name in enumerate("qk"):
                weight = self._vector(f"{attention}{name}_norm.weight")
                layers.qk_norms[layer, row] = weight + s.norm_offset
        if layers.qkv_bias.shape[1]:
            parts = [self._vector(f"{attention}{n}_proj.bias") for n in "qkv"]
            layers.qkv_bias[layer] = np.concatenate(parts)
        if layers.out_bias.shape[1]:
            layers.out_bias[layer] = self._vector(f"{attention}o_proj.bias")

    def _pack_head(self, table: Any) -> None:
        for first in range(0, self.head.shape[0], 256):
            rows = table[first * PANEL : min((first + 256) * PANEL, self._shape.vocab_size)]
            pack_panels(_as_stored(rows, self.bf16), self.head, first_panel=first)
