"""GgufWeights: the tensors of a GGUF under transformers' names, matrices as the bytes they are.

It maps the file, finds each tensor by the name that transformers' state dict gives it, and undoes
the changes of llama.cpp's converter: the order of rows of q and k in `llama` files (their rotation
pairs neighbours) and Gemma's norms (stored with 1 added). Matrices stay quantised: rows of bytes,
for server/model/cpu/integers. The folder that such a model is served from: gguf_folder.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from server.errors import ModelError, UnsupportedModelError
from server.model.cpu.integers.forms import BY_NAME
from server.model.gguf_index import GgufIndex, GgufTensor

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
"""`general.architecture` of files that are served as they are."""

HEAD = "lm_head.weight"


class FileTensor:
    """A tensor of the file with those methods of a torch tensor that packers ask for: torch takes
    a second and 200 MB to import. Read-only."""

    def __init__(self, data: npt.NDArray[Any]) -> None:
        self._data = data
        self.shape = data.shape

    def __getitem__(self, rows: Any) -> FileTensor:
        return FileTensor(self._data[rows])

    def float(self) -> FileTensor:
        """Itself: what has a number of its own is float32 already."""
        return self

    def numpy(self) -> npt.NDArray[Any]:
        """float32, or uint8 of quantised rows."""
        return self._data


def unknown_forms(index: GgufIndex) -> list[str]:
    """Names of matrices whose form the integer kernels do not have, with it; [] = all known."""
    return [
        f"{tensor.name} ({tensor.form})"
        for tensor in index.tensors.values()
        if len(tensor.shape) == 2 and tensor.form not in BY_NAME
    ]


class GgufWeights:
    """Weights of a GGUF by transformers' names. Read-only; the file is mapped.

    config: transformers' config of the model. expected: name -> shape of all that the model needs.
    Raises UnsupportedModelError for an architecture or a form that is not read, ModelError for a
    file that lacks a tensor.
    """

    def __init__(self, path: Path, config: Any, expected: Mapping[str, tuple[int, ...]]) -> None:
        import gguf

        self._index = index = GgufIndex(path)
        self._architecture = str(index.fields.get("general.architecture"))
        if self._architecture not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{path.name}: {self._architecture} files are not served as they are; "
                f"{', '.join(ARCHITECTURES)} are. `weights: int8` works with all models"
            )
        unknown = unknown_forms(index)
        if unknown:
            raise UnsupportedModelError(
                f"{path.name}: {unknown[0]} is of no form that is multiplied as it is; "
                "`weights: int8` rounds it"
            )
        self._config = config
        kind = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[self._architecture]
        names = gguf.get_tensor_name_map(kind, int(config.num_hidden_layers))
        stored = index.tensors
        self._tensors: dict[str, GgufTensor] = {}
        for name in expected:
            stem, _, suffix = name.rpartition(".")
            found = names.get_name(stem)
            tensor = stored.get(f"{found}.{suffix}")
            if tensor is None and name == HEAD:
                tensor = stored.get("token_embd.weight")  # tied
            if tensor is None:
                raise ModelError(f"{path.name} lacks {name}")
            self._tensors[name] = tensor

    def names(self) -> tuple[str, ...]:
        """All names, ascending, `lm_head.weight` included when it is tied."""
        return tuple(sorted(self._tensors))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor in numbers, [outputs, inputs]. Raises KeyError."""
        return self._tensors[name].shape

    def form(self, name: str) -> str:
        """A matrix's form (integers/forms.py)."""
        return self._tensors[name].form

    def get(self, name: str) -> FileTensor:
        """A vector as float32, a matrix as uint8 [outputs, bytes of a row]. Raises KeyError."""
        data = self._tensors[name].data
        if data.ndim == 1 and data.dtype == np.uint8:
            raise ModelError(f"{name} is {self.form(name)}, which is not read for a vector")
        if data.dtype != np.uint8:
            values = np.array(data, np.float32)
            if self._architecture == "gemma3" and name.endswith("norm.weight"):
                values -= np.float32(1.0)
            return FileTensor(values)
        if self._architecture == "llama":
            data = self._unpermuted(name, data)
        return FileTensor(data)

    def _unpermuted(self, name: str, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """llama.cpp stores rows of q and k so that the rotation pairs neighbours; transformers'
        order pairs halves."""
        heads = {
            "q_proj": self._config.num_attention_heads,
            "k_proj": self._config.num_key_value_heads,
        }.get(name.split(".")[-2])
        if heads is None:
            return rows
        half = rows.shape[0] // heads // 2
        return rows.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)

    def release_pages(self) -> None:
        """Give back the memory of what was read: once a matrix is packed, only rows of the
        embedding table are read again."""
        self._index.release_pages()

    def close(self) -> None:
        """Let go of the file. Tensors that were read stay valid. Idempotent."""
        self._tensors.clear()
