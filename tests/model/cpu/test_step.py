"""What a step reads of the embedding table: the numbers of its rows, whatever they are kept as."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from server.model.cpu.step import NO_TABLE, Tokens, _embed_share, float_table


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


def test_other_tables_are_read_elsewhere() -> None:
    assert float_table(torch.zeros(4, 8, dtype=torch.float64)) == NO_TABLE
    assert float_table(torch.zeros(8, 4).T) == NO_TABLE
