"""NF4: the numbers are those of QLoRA's formulas, and a folder of bitsandbytes is a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from server.errors import ModelError, UnsupportedModelError
from server.model.loader import build_module, open_model
from server.model.nf4 import STATE, read_nf4, rounded
from tests.model.bitsandbytes_files import save_as_bitsandbytes, tensors_of
from tests.model.tiny_models import save_tiny

SHAPES = [(6, 64), (5, 40), (3, 192), (300, 70)]  # blocks end with rows, inside rows, many blocks


def plain(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """A weight by the formulas."""
    state = json.loads(bytes(tensors[f"w{STATE}"].tolist()))
    outputs, inputs = state["shape"]
    numbers, tops = tensors["w"].flatten(), tensors["w.absmax"]
    levels = tensors["w.quant_map"][torch.stack([numbers >> 4, numbers & 15], 1).flatten().int()]
    if "nested_blocksize" in state:
        scales = tensors["w.nested_absmax"].repeat_interleave(state["nested_blocksize"])
        tops = tensors["w.nested_quant_map"][tops.int()] * scales[: len(tops)]
        tops = tops + state["nested_offset"]
    of_each = tops.repeat_interleave(state["blocksize"])[: outputs * inputs]
    return (levels[: outputs * inputs] * of_each).view(outputs, inputs)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_are_those_of_the_formulas(shape: tuple[int, int], nested: bool) -> None:
    torch.manual_seed(0)
    tensors = tensors_of("w", torch.randn(shape) * 0.02, nested=nested)
    stored = read_nf4("w", tensors.__getitem__)
    want = plain(tensors)
    torch.testing.assert_close(stored.widened(0, shape[0], torch.float32), want)
    torch.testing.assert_close(stored.widened(1, 3, torch.float32), want[1:3])


def test_rounding_is_to_the_nearest_level_and_takes_four_bits() -> None:
    torch.manual_seed(1)
    weight = torch.randn(512, 1024) * 0.02
    made = rounded(weight)
    wide = made.widened(0, 512, torch.float32)
    error = float((wide - weight).norm() / weight.norm())
    assert 0.08 < error < 0.1  # of normal numbers in blocks of 64; bitsandbytes' is 0.092
    kept = (made.numbers, made.magnitudes, made.map, made.scales)
    bits = 8 * sum(tensor.nbytes for tensor in kept)
    assert bits / weight.numel() == pytest.approx(4.127, abs=0.02)
    again = rounded(wide).widened(0, 512, torch.float32)
    assert float((again - wide).norm() / wide.norm()) < 0.02
    zero = rounded(torch.zeros(2, 64)).widened(0, 2, torch.float32)
    assert zero.abs().max() < 1e-20


@pytest.mark.usefixtures("own_cache")
def test_a_folder_of_bitsandbytes_is_a_model_of_its_numbers(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "llama")
    save_as_bitsandbytes(tmp_path)
    opened = open_model(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    weight = opened.floats.get(name)
    assert weight.shape == opened.weights.shape(name) == model.get_parameter(name).shape
    with torch.no_grad():
        assert 0.0 < float((weight - model.get_parameter(name)).norm() / weight.norm()) < 0.12
        for given, parameter in model.named_parameters():
            parameter.copy_(opened.floats.get(given))
        module = build_module(opened, torch.float32, torch.device("cpu"))
        ids = torch.tensor([[5, 6, 7, 8]])
        assert torch.equal(module(ids).logits, model(ids).logits)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["bnb_4bit_quant_type"] = "fp4"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="quantised with bitsandbytes"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        (STATE, torch.tensor([123], dtype=torch.uint8)),
        (STATE, torch.tensor(list(b"[" * 9999), dtype=torch.uint8)),
        (STATE, torch.tensor(list(b'{"shape": [-1, 64], "blocksize": 64}'), dtype=torch.uint8)),
        (STATE, torch.tensor(list(b'{"shape": [6, 64], "blocksize": 0}'), dtype=torch.uint8)),
        (".absmax", torch.zeros(3)),
        (".absmax", torch.zeros(6)),
        (".quant_map", torch.zeros(15)),
        (".nested_absmax", torch.zeros(0)),
        ("", torch.zeros(9, dtype=torch.uint8)),
    ],
)
def test_a_weight_that_is_not_whole_is_named(part: str, value: torch.Tensor) -> None:
    tensors = tensors_of("w", torch.randn(6, 64)) | {f"w{part}": value}
    with pytest.raises(ModelError, match="w is no whole NF4 weight"):
        read_nf4("w", tensors.__getitem__)
