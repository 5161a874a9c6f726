"""Frozen matrices in the form that they are stored in, widened when they are multiplied.

QLoRA (arXiv 2305.14314) trains an adapter over a base that stays small: a product takes the numbers
that a matrix stands for, a matrix at a time, forward and again backward, and lets go of them. The
forms are those that are served: floats, integers as server/model/cpu/integers rounds them or as a
GGUF holds them, and NF4 as bitsandbytes stores it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from server.errors import ConfigError
from server.model import nf4
from server.model.adapter import EMBEDDING, HEAD
from server.model.cpu.integers.forms import BLOCK, BY_NAME
from server.model.cpu.integers.packed import FORM_OF, rounded
from server.model.cpu.integers.weights import Measured, Stored, from_ggml
from server.model.cpu.tensors import ModelTensors
from server.model.gguf_file import GgufWeights
from server.model.loader import ModelFolder, WeightReader
from server.model.nf4 import Nf4

_HADAMARD = BLOCK  # inputs that cpu/integers/weights.py mixes


class Matrix(Protocol):
    """A frozen matrix. shape: (outputs, inputs)."""

    shape: tuple[int, int]

    def rows(self, which: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[n, inputs] in a dtype: the rows of a slice, or those of int64 ids [n]."""


class Floats:
    """A matrix of floats, kept as it is given."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.shape = (int(tensor.shape[0]), int(tensor.shape[1]))

    def rows(self, which: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See Matrix."""
        return self._tensor[which].to(dtype)


class Integers:
    """A matrix of integers with a scale, and perhaps a minimum, for every few inputs.

    stored: taken apart (integers/weights.py). num_inputs: without padding. factors: float32 [padded
    inputs] of a matrix whose inputs are spread (cpu/integers/weights.py), which is undone here:
    W @ x is stored @ spread(x).
    """

    def __init__(
        self,
        stored: Stored,
        num_inputs: int,
        device: torch.device,
        factors: npt.NDArray[np.float32] | None = None,
    ) -> None:
        form, num = stored.form, stored.numbers.shape[0]
        self.shape = (num, num_inputs)
        self._zero, self._packed = form.zero, form.bits == 4
        numbers: npt.NDArray[np.uint8] = stored.numbers.reshape(num, -1, BLOCK)
        if self._packed:  # two a byte: the halves of a block of 32
            numbers = numbers[..., :16] | np.left_shift(numbers[..., 16:], np.uint8(4))
        scales, minima = stored.factors()
        self._numbers = torch.from_numpy(np.ascontiguousarray(numbers)).to(device)
        self._scales = torch.from_numpy(scales).to(device)
        self._minima = None if minima is None else torch.from_numpy(minima).to(device)
        self._factors = None if factors is None else torch.from_numpy(factors).to(device)

    def rows(self, which: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See Matrix."""
        numbers = self._numbers[which]
        if self._packed:
            numbers = torch.cat((numbers & 0x0F, numbers >> 4), dim=-1)
        # Whole numbers up to 256 are exact in bfloat16, so nothing is lost before the scale.
        values = numbers.to(dtype)
        if self._zero:
            values -= self._zero
        scales = self._scales[which].to(dtype)
        num = values.shape[0]
        values = values.view(num, scales.shape[1], -1)
        values *= scales[..., None]
        if self._minima is not None:
            values += self._minima[which].to(dtype)[..., None]
        if self._factors is not None:
            values = values.view(num, -1, _HADAMARD) @ _hadamard(dtype, values.device)
            values = values.view(num, -1) * self._factors.to(dtype)
        return values.view(num, -1)[:, : self.shape[1]]


class Normals:
    """A matrix of NF4 numbers."""

    def __init__(self, stored: Nf4, device: torch.device) -> None:
        self._stored, self._device = stored, device
        self.shape = stored.shape

    def rows(self, which: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See Matrix."""
        if isinstance(which, slice):
            first, last, _ = which.indices(self.shape[0])
            return self._stored.widened(first, last, dtype).to(self._device)
        some = [self._stored.widened(i, i + 1, dtype) for i in which.tolist()]
        return torch.cat(some).to(self._device) if some else torch.zeros((0, self.shape[1]))


def _hadamard(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[BLOCK, BLOCK] of 1 and -1: the sums and differences of cpu/integers/weights.py."""
    matrix = torch.ones((1, 1), dtype=dtype, device=device)
    while matrix.shape[0] < _HADAMARD:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def open_base(
    model: str, form: str, *, dtype: torch.dtype, device: torch.device, threads: int | None = None
) -> tuple[Any, Callable[[str], Matrix]]:
    """(transformers' causal LM whose matrices are not there, the Matrix of each weight by name).

    model: a name or a path. form: "int8", "int8-blocks" and "int4" are rounded as they are for
    serving, "nf4" as in QLoRA; "file" is a GGUF or a folder of bitsandbytes as it is; others are
    floats. dtype: computed in. Raises ModelError, and ConfigError for a form that is not trained
    over.
    """
    if form == "fp8":
        raise ConfigError("--weights fp8 is of CUDA and is not trained over; int8 is the nearest")
    from server.model.catalog import model_folder
    from server.model.loader import build_module, open_model

    is_folder = Path(model).expanduser().is_dir()
    folder = open_model(model_folder(model, "file") if form == "file" and not is_folder else model)
    weights = folder.weights
    if form == "file" and isinstance(weights, WeightReader):
        if not any(weights.nf4(name) for name in weights.names()):
            raise ConfigError(f"{model}: --weights file needs a GGUF, or NF4 by bitsandbytes")
    skip = [name for name in weights.names() if len(weights.shape(name)) == 2]
    module: Any = build_module(folder, torch.float32, device, skip=skip)
    tables = module.get_input_embeddings(), module.get_output_embeddings()
    for name, parameter in list(module.named_parameters()):
        owner = module.get_submodule(name.rpartition(".")[0])
        if parameter.is_meta and not isinstance(owner, nn.Linear) and owner not in tables:
            tensor = folder.floats.get(name).to(device=device, dtype=torch.float32)
            setattr(owner, name.rpartition(".")[2], nn.Parameter(tensor, requires_grad=False))
    if isinstance(weights, GgufWeights):
        of_file = cache(partial(_of_file, weights, dtype, device))
        tied = bool(module.config.tie_word_embeddings)
        return module, lambda name: of_file(EMBEDDING if tied and name == HEAD else name)
    if form in FORM_OF:
        return module, _rounding(folder, form, device, threads)
    return module, partial(_of_floats, weights, dtype, device, form)


def _of_floats(
    weights: WeightReader, dtype: torch.dtype, device: torch.device, form: str, name: str
) -> Matrix:
    """Floats, or NF4; an embedding's rows stay in their file, whose numbers are exact."""
    names = weights.tensor_names
    stored = weights.nf4(name) if form in ("file", "nf4") else None
    if form == "nf4" and stored is None and name not in (names.embedding, names.head):
        stored = nf4.rounded(weights.get(name))
    if stored is not None:
        return Normals(stored, device)
    tensor = weights.get(name)
    if name == names.embedding:
        return Floats(tensor.to(device))
    return Floats(tensor.to(device=device, dtype=dtype))


def _of_file(weights: GgufWeights, dtype: torch.dtype, device: torch.device, name: str) -> Matrix:
    """As a GGUF has it."""
    if weights.form(name) not in BY_NAME:
        floats = torch.from_numpy(weights.floats(name))
        return Floats(floats.to(device=device, dtype=dtype))
    stored = from_ggml(weights.form(name), weights.get(name))
    weights.release_pages()
    return Integers(stored, weights.shape(name)[1], device)


def _rounding(
    folder: ModelFolder, form: str, device: torch.device, threads: int | None
) -> Callable[[str], Matrix]:
    """Floats rounded as they are served (integers/packed.py)."""
    from server.model.packed_folder import measured_inputs

    weights = folder.floats
    shape = replace(folder.shape(), vocab_size=folder.num_token_ids)
    measured = Measured()
    if form == "int8":
        measured = measured_inputs(folder, shape, threads=threads)
    tensors = ModelTensors(shape, weights)
    of = {
        part.name: (kind, layer)
        for layer in range(shape.num_layers)
        for kind, parts in tensors.matrices(layer).items()
        for part in parts
    }

    def matrix_of(name: str) -> Matrix:
        if name == weights.tensor_names.embedding:
            return Floats(weights.get(name).to(device))
        kind, layer = of.get(name, ("head", 0))
        weight = weights.get(name).float().numpy()
        stored, factors = rounded(weight, form, measured, kind, layer)
        return Integers(stored, weight.shape[1], device, factors)

    return matrix_of
