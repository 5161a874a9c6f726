"""Bases in the form that is served: their numbers, their loss and their gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from server.errors import ConfigError, ModelError
from server.model.cpu.integers.forms import BY_NAME, FORMS, padded_inputs
from server.model.cpu.integers.packed import FORM_OF
from server.model.cpu.integers.weights import (
    dequantised,
    quantised,
    spread,
    spread_weights,
)
from server.model.loader import build_module, open_model
from server.training.examples import TrainExample, collate
from server.training.lora import LoraLinear, LoraOptions, Tuned, prepare
from server.training.stored import Floats, Integers, open_base
from tests.model import gguf_models
from tests.model.bitsandbytes_files import save_as_bitsandbytes
from tests.model.cpu.integers import cases
from tests.model.cpu.integers.cases import GGML
from tests.model.tiny_models import save_tiny
from tests.training.tiny import shake

pytestmark = pytest.mark.usefixtures("own_cache")

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", GGML)
def test_numbers_of_a_file_are_those_that_are_served(name: str) -> None:
    stored = cases.stored(name, 6, 512, 3)
    want = dequantised(stored)
    size = float(np.abs(want).max())
    for dtype, error in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        matrix = Integers(stored, 509, CPU)
        assert matrix.shape == (6, 509)
        found = matrix.rows(slice(1, 5), dtype)
        assert found.dtype == dtype
        np.testing.assert_allclose(found.float().numpy(), want[1:5, :509], atol=error * size)
        rows = matrix.rows(torch.tensor([4, 0, 4]), torch.float32)
        np.testing.assert_allclose(rows.numpy(), want[[4, 0, 4], :509], atol=1e-6 * size)


def test_a_matrix_whose_inputs_are_spread_is_what_it_makes_of_inputs() -> None:
    rng = np.random.default_rng(1)
    weight = rng.normal(size=(9, 80)).astype(np.float32)
    x = rng.normal(size=(4, 80)).astype(np.float32)
    form = FORMS[0]
    factors = np.exp(0.3 * rng.normal(size=padded_inputs(form, 80))).astype(np.float32)
    stored = quantised(form, spread_weights(weight, factors))
    matrix = Integers(stored, 80, CPU, factors)
    want = spread(x, factors) @ dequantised(stored).T
    found = x @ matrix.rows(slice(9), torch.float32).numpy().T
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)
    assert np.linalg.norm(found - x @ weight.T) < 0.05 * np.linalg.norm(found)  # rounded


def test_a_base_takes_the_bytes_of_its_form() -> None:
    weight = np.random.default_rng(0).normal(size=(256, 512)).astype(np.float32)
    bits = {}
    for form in (BY_NAME[name] for name in ("int8", "q8_0", "q4_1")):
        matrix = Integers(quantised(form, weight), 512, CPU)
        kept = [value for value in vars(matrix).values() if isinstance(value, torch.Tensor)]
        bits[form.name] = 8 * sum(tensor.nbytes for tensor in kept) / weight.size
    assert bits == {"int8": 8.0625, "q8_0": 9.0, "q4_1": 6.0}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's tiny model, made once."""

    @functools.cache
    def folder(family: str) -> Path:
        made = tmp_path_factory.mktemp(family)
        save_tiny(made, family)
        return made

    return folder


def loss_of(given: Tuned) -> tuple[float, list[torch.Tensor]]:
    data = [TrainExample((5, 6, 7 + i), (9, 11, 2)) for i in range(3)]
    loss = given.loss(collate(data, CPU, packed=given.is_packed))
    loss.backward()
    return float(loss.detach()), [p.grad for _, p in given.trained() if p.grad is not None]


def assert_learn_alike(
    ours: Tuned, theirs: Tuned, rel: float = 1e-5, rtol: float = 1e-3, atol: float = 1e-4
) -> None:
    """Loss and gradients of both are the same."""
    (found, gradients), (want, others) = loss_of(ours), loss_of(theirs)
    assert found == pytest.approx(want, rel=rel)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def over_base(model: Path, form: str) -> Tuned:
    module, matrix_of = open_base(str(model), form, dtype=torch.float32, device=CPU)
    torch.manual_seed(4)
    given = prepare(module, matrix_of, None, LoraOptions(4, 8), tokenizer="t")
    return shake(given, 5)


@pytest.mark.parametrize(
    ("family", "form"),
    [("llama", form) for form in ("auto", "nf4", *FORM_OF)]
    + [("gemma3", "int8"), ("qwen2", "int8")],
)
def test_over_a_rounded_base_the_adapter_learns_as_over_its_numbers(
    family: str, form: str, saved: Callable[[str], Path]
) -> None:
    """Loss and gradients are those over floats that are the widened numbers."""
    given, plain = over_base(saved(family), form), over_base(saved(family), "auto")
    floats = open_model(saved(family)).floats
    for name, part in given.module.named_modules():
        if isinstance(part, LoraLinear):
            wide = part.base.rows(slice(None), torch.float32)
            plain.module.get_submodule(name).base = Floats(wide)
            exact = floats.get(f"{name}.weight")
            error = float((wide - exact).norm() / exact.norm())
            assert error < {"auto": 1e-7, "int4": 0.1, "nf4": 0.12}.get(form, 0.02), name
    plain.head.base = Floats(given.head.base.rows(slice(128), torch.float32))
    assert_learn_alike(given, plain, 1e-6, 1e-4, 1e-5)


def written(family: str, form: str, file: Path) -> Path:
    """A file of a tiny model with its matrices in a form."""
    model = gguf_models.MODELS[family]
    gguf_models.write(model, model.build(), file, form)
    return file


@pytest.mark.parametrize(
    ("family", "form"),
    [("llama", "Q4_1"), ("gemma3_text", "Q8_0"), ("lfm2", "Q4_1"), ("granite", "Q8_0")],
)
def test_over_a_file_as_it_is_the_loss_is_that_over_its_floats(
    family: str, form: str, tmp_path: Path
) -> None:
    file = written(family, form, tmp_path / "m.gguf")
    assert_learn_alike(over_base(file, "file"), over_base(file, "auto"))


def test_a_file_whose_form_nothing_multiplies_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no form"):
        over_base(written("llama", "F32", tmp_path / "m.gguf"), "file")


def test_transformers_own_module_reads_a_file_as_floats(tmp_path: Path) -> None:
    from server.model.catalog import model_folder

    file = written("llama", "Q8_0", tmp_path / "m.gguf")
    ids = torch.tensor([[5, 6, 7, 8]])
    logits = []
    for folder in (model_folder(str(file), "file"), file):
        module = build_module(open_model(folder), torch.float32, CPU)
        with torch.no_grad():
            logits.append(module(ids).logits)
    assert torch.equal(*logits)


def test_over_a_folder_of_bitsandbytes_the_loss_is_that_over_its_floats(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    save_tiny(folder, "qwen2")
    with pytest.raises(ConfigError, match="needs a GGUF, or NF4"):
        over_base(folder, "file")
    save_as_bitsandbytes(folder)
    assert_learn_alike(over_base(folder, "file"), over_base(folder, "auto"))
