"""What a step reads of the embedding table: the numbers of its rows, whatever they are kept as."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from server.model.cpu.integers.weights import dequantised, from_ggml
from server.model.cpu.step import NO_TABLE, Tokens, _embed_share, block_table, float_table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 25.25])
def test_rows_are_those_of_the_table(dtype: torch.dtype, scale: float) -> None:
    table = torch.randn(40, 70, generator=torch.Generator().manual_seed(3)).to(dtype)[:, 3:67]
    ids = np.array([7, 39, 0, 7, 50, 5, 5], np.int32)  # 50: of an adapter, whose rows come later
    taken = np.array([-1, -1, 1, -1, -1, 0, 2], np.int32)
    drawn = np.array([11, 12, -1], np.int32)  # -1: a draw without an answer, nobody's row
    x = np.full((8, 64), np.nan, np.float32)
    record = float_table(table)._replace(scale=np.float32(scale))
    for thread in range(2):
        _embed_share(thread, ids.shape[0], Tokens(ids, taken, drawn), record, x, 2)
    rows = table[torch.tensor([7, 39, 12, 7, 0, 11, 0])].float().numpy() * np.float32(scale)
    assert x[:7].tobytes() == rows.tobytes()
    assert np.isnan(x[7]).all()


@pytest.mark.parametrize("form", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
@pytest.mark.parametrize("scale", [1.0, 25.25])
def test_rows_of_a_gguf_are_the_numbers_that_its_blocks_stand_for(form: str, scale: float) -> None:
    rng = np.random.default_rng(7)
    num_halves = 2 if form.endswith("1") else 1
    halves = (rng.normal(size=(40, 3, num_halves)) * 0.1).astype(np.float16)
    size = {"q8_0": 32, "q4_0": 16, "q4_1": 16, "q5_0": 20, "q5_1": 20}[form]
    numbers = rng.integers(0, 256, (40, 3, size), np.uint8)
    raw = np.concatenate((halves.view(np.uint8), numbers), axis=2).reshape(40, -1)
    ids = np.array([7, 39, 0, 7], np.int32)
    minus = np.full(4, -1, np.int32)
    x = np.full((4, 96), np.nan, np.float32)
    record = block_table(form, raw)._replace(scale=np.float32(scale))
    _embed_share(0, 4, Tokens(ids, minus, minus[:0]), record, x, 1)
    assert x.tobytes() == (dequantised(from_ggml(form, raw[ids])) * np.float32(scale)).tobytes()


def test_other_tables_are_read_elsewhere() -> None:
    assert block_table("q6_k", np.zeros((4, 210), np.uint8)) == NO_TABLE
    assert float_table(torch.zeros(4, 8, dtype=torch.float64)) == NO_TABLE
    assert float_table(torch.zeros(8, 4).T) == NO_TABLE
