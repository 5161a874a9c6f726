"""GgufWeights: the tensors of a GGUF under transformers' names, matrices as the bytes they are.

It maps the file, finds each tensor by the name that transformers' state dict gives it, and undoes
the changes of llama.cpp's converter: the order of rows of q and k where its rotation pairs
neighbours, norms that are stored with 1 added (Gemma, Qwen3.5), the taps of short convolutions,
gated delta nets. Matrices stay quantised: rows of bytes, for
server/model/cpu/integers; `floats` dequantises them. The metadata: gguf_config.py. The folder that
such a model is served from: catalog.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from server.errors import ModelError, UnsupportedModelError
from server.model.adapter import HEAD
from server.model.cpu.integers.forms import BY_NAME
from server.model.gguf_config import ARCHITECTURES, BY_TRANSFORMERS, PERMUTED
from server.model.gguf_index import GgufIndex, GgufTensor

_TAPS = (".shortconv.conv.weight", ".ssm_conv1d.weight")
_ONE_ADDED = ("gemma", "qwen35")  # architectures
_OF_ROPE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def unknown_form(index: GgufIndex) -> str:
    """The first tensor that no kernel reads, with its form; "" = none: a matrix in a form that the
    integer kernels do not have, or another tensor that is no floats."""
    for tensor in index.tensors.values():
        is_matrix = len(tensor.shape) == 2 and not tensor.name.endswith(_TAPS)
        if tensor.form not in BY_NAME if is_matrix else tensor.data.dtype == np.uint8:
            return f"{tensor.name} ({tensor.form})"
    return ""


class GgufWeights:
    """Weights of a GGUF by transformers' names. Read-only; the file is mapped.

    config: transformers' config of the model. expected: name -> shape of all that the model needs.
    Raises UnsupportedModelError for an architecture that is not read or a tensor that is not
    computed, ModelError for a file that lacks a tensor.
    """

    def __init__(self, path: Path, config: Any, expected: Mapping[str, tuple[int, ...]]) -> None:
        import gguf

        self._index = index = GgufIndex(path)
        self._architecture = str(index.fields.get("general.architecture"))
        if self._architecture not in (*ARCHITECTURES, *BY_TRANSFORMERS):
            raise UnsupportedModelError(f"{path.name}: {self._architecture} files are not read")
        self._config = config
        kind = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[self._architecture]
        names = gguf.get_tensor_name_map(kind, int(config.num_hidden_layers))
        stored = index.tensors
        self._tensors: dict[str, GgufTensor] = {}
        for name in expected:
            known_as = name.replace(".dt_bias", ".dt_proj.bias")  # in gguf's table of names
            tensor = stored.get(names.get_name(known_as, (".weight", ".bias")) or "")
            if tensor is None and name == HEAD:
                tensor = stored.get("token_embd.weight")  # tied
            if tensor is None:
                raise ModelError(f"{path.name} lacks {name}")
            self._tensors[name] = tensor
        read = {tensor.name for tensor in self._tensors.values()}
        for extra in sorted(set(stored) - read - set(_OF_ROPE)):
            if extra.endswith(".attn_rot_embd.weight"):  # a table that is computed
                continue
            layer = extra.partition("blk.")[2].partition(".")[0]
            drafts = layer.isdecimal() and int(layer) >= int(config.num_hidden_layers)
            if not (drafts and self._architecture == "qwen35"):
                raise UnsupportedModelError(
                    f"{path.name} has tensors that are not computed, first {extra}"
                )

    def names(self) -> tuple[str, ...]:
        """All names, ascending, `lm_head.weight` included when it is tied."""
        return tuple(sorted(self._tensors))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor in numbers, [outputs, inputs]. Raises KeyError."""
        tensor = self._tensors[name]
        if tensor.name.endswith(_TAPS):
            return tensor.shape[0], 1, tensor.shape[1]
        return tensor.shape

    def form(self, name: str) -> str:
        """A matrix's form (integers/forms.py)."""
        return self._tensors[name].form

    def get(self, name: str) -> npt.NDArray[Any]:
        """A vector as float32, a matrix as uint8 [outputs, bytes of a row]. Raises KeyError."""
        data = self._tensors[name].data
        if data.dtype == np.uint8:
            return self._in_order(name, data)
        return self.floats(name)

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        """Any tensor as float32 of its shape, dequantised. Raises KeyError."""
        tensor = self._tensors[name]
        if tensor.data.dtype == np.uint8:
            from gguf import GGMLQuantizationType
            from gguf.quants import dequantize

            try:
                values = dequantize(tensor.data, GGMLQuantizationType[tensor.form.upper()])
            except NotImplementedError:
                raise UnsupportedModelError(f"{name} is {tensor.form}, which is not read") from None
        else:
            values = np.array(tensor.data, np.float32)
        if ".linear_attn." in name:
            values = restored(self._config, name, values)
        elif self._architecture.startswith(_ONE_ADDED) and name.endswith("norm.weight"):
            values -= np.float32(1.0)
        return self._in_order(name, values).reshape(self.shape(name))

    def _in_order(self, name: str, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """llama.cpp stores rows of q and k so that the rotation pairs neighbours; transformers'
        order pairs halves."""
        heads = {
            "q_proj": self._config.num_attention_heads,
            "k_proj": self._config.num_key_value_heads,
        }.get(name.split(".")[-2])
        if heads is None or self._architecture not in PERMUTED:
            return rows
        half = rows.shape[0] // heads // 2
        return rows.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)

    def release_pages(self) -> None:
        """Give back the memory of what was read: once a matrix is packed, only rows of the
        embedding table are read again."""
        self._index.release_pages()


# -- Gated delta nets -----------------------------------------------------------------------------
#
# Several value heads share a key head. transformers has those of one key head side by side; the
# file has the first of every key head, then the second of every key head: its products repeat keys
# so.

Floats = npt.NDArray[np.float32]


def restored(config: Any, name: str, values: Floats) -> Floats:
    """A tensor of `linear_attn` as transformers' state dict has it, but for the axis of length one
    of the convolution. values: as stored, float32. config: transformers'."""
    key_heads, key_dim = config.linear_num_key_heads, config.linear_key_head_dim
    per_key, dim = config.linear_num_value_heads // key_heads, config.linear_value_head_dim
    part = name.partition(".linear_attn.")[2]
    if part == "A_log":
        values = np.log(-values)
    if part in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"):
        return _grouped(values, per_key, 1)
    if part == "in_proj_z.weight":
        return _grouped(values, per_key, dim)
    if part == "out_proj.weight":
        return np.ascontiguousarray(_grouped(values.T, per_key, dim).T)
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        split = 2 * key_heads * key_dim
        return np.concatenate((values[:split], _grouped(values[split:], per_key, dim)))
    return values


def _grouped(rows: Floats, per_key: int, dim: int) -> Floats:
    """Rows of value heads, `dim` of each, in transformers' order."""
    parts = rows.reshape(per_key, -1, dim, *rows.shape[1:])
    return parts.swapaxes(0, 1).reshape(rows.shape)
