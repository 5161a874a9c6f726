"""What a step reads of the embedding table: the numbers of its rows, whatever they are kept as."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from server.engine.batch import Batch
from server.model.cpu.integers.forms import BY_NAME
from server.model.cpu.integers.weights import dequantised, from_ggml
from server.model.cpu.kernels import embed_rows
from server.model.cpu.runner import CpuRunner
from server.model.cpu.weights import block_table, float_table
from tests.model import families
from tests.model.batches import Pages, decode_step, run
from tests.model.cpu.integers.cases import GGML, ggml_rows
from tests.model.cpu_models import cpu_runner


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 25.25])
def test_rows_are_those_of_the_table(dtype: torch.dtype, scale: float) -> None:
    table = torch.randn(40, 70, generator=torch.Generator().manual_seed(3)).to(dtype)[:, 3:67]
    ids = np.array([7, 39, 0, 7, 50, 5, 5], np.int32)  # 50: of an adapter, whose rows come later
    x = np.full((8, 64), np.nan, np.float32)
    held, record = float_table(table)
    assert held is table
    record = record._replace(scale=np.float32(scale))
    for thread in range(2):
        embed_rows(thread, ids.shape[0], ids, record, x, 2)
    rows = table[torch.tensor([7, 39, 0, 7, 0, 5, 5])].float().numpy() * np.float32(scale)
    assert x[:7].tobytes() == rows.tobytes()
    assert np.isnan(x[7]).all()


@pytest.mark.parametrize("form", GGML)
@pytest.mark.parametrize("scale", [1.0, 25.25])
def test_rows_of_a_gguf_are_the_numbers_that_its_blocks_stand_for(form: str, scale: float) -> None:
    raw = ggml_rows(form, 40, 512, seed=7)
    ids = np.array([7, 39, 0, 7], np.int32)
    x = np.full((4, 512), np.nan, np.float32)
    record = block_table(BY_NAME[form], raw)._replace(scale=np.float32(scale))
    embed_rows(0, 4, ids, record, x, 1)
    assert x.tobytes() == (dequantised(from_ggml(form, raw[ids])) * np.float32(scale)).tobytes()


def test_other_tables_are_made_floats() -> None:
    for table in (torch.rand(4, 8, dtype=torch.float64), torch.rand(8, 4).T):
        held, record = float_table(table)
        x = np.empty((4, 8), np.float32)
        embed_rows(0, 4, np.arange(4, dtype=np.int32), record, x, 1)
        assert x.tobytes() == table.float().numpy().tobytes() == held.numpy().tobytes()


def _move_on(batch: Batch, tables: list[Pages.Table], ids: list[int], start: int) -> None:
    """As the engine does (engine/build.py)."""
    batch.token_ids[:] = ids
    batch.slots[:] = [table.slot(start) for table in tables]
    for column in (batch.positions, batch.prefix_len, batch.draw_positions):
        column += 1


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_a_batch_that_comes_again_gives_the_bits_of_a_new_one(
    weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two of its steps others come, with more rows; and where one of its draws fails, the
    others stand, and so do the next ones."""
    num_again, compute = 0, CpuRunner._compute

    def counted(runner: CpuRunner, batch: Batch, wanted: Any, held: Any) -> None:
        nonlocal num_again
        num_again += held is not None
        compute(runner, batch, wanted, held)

    monkeypatch.setattr(CpuRunner, "_compute", counted)
    found: list[list[tuple[list[int], bytes]]] = []
    for comes_again in (False, True):
        runner: Any = cpu_runner(families.build("llama"), num_blocks=64, dtype=weights)
        pages = Pages(64, seed=1)
        tables, others = ([pages.sequence(60) for _ in range(num)] for num in (3, 5))
        ids, steps = [3, 4, 5], []
        batch = decode_step(tables, ids, 0)
        for start in range(40):
            if start in (9, 10, 30):
                run(runner, decode_step(others, [7] * 5, start % 10))
            if start and comes_again:
                _move_on(batch, tables, ids, start)
            elif start:
                batch = decode_step(tables, ids, start)
            ids = run(runner, batch).token_ids.tolist()
            steps.append((ids, runner._scratch.hidden[:3].tobytes()))
        runner._planes[1][:, tables[1].blocks[0]] = np.nan
        _move_on(batch, tables, ids, 40)
        drawn = run(runner, batch)
        assert [*drawn.problems] == [1]
        ids = drawn.token_ids.tolist()
        last = run(runner, decode_step(tables[::2], ids[::2], 41))
        steps += [(ids, b""), (last.token_ids.tolist(), b"")]
        found.append(steps)
        runner.close()
    assert found[0] == found[1]
    assert num_again == 1 + 40 - 1 - 3 + 1
