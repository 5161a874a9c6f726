"""Both paged attentions against a float64 answer, on the same cases, Triton's in its interpreter.
tests/gpu runs the cases on CUDA."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from server.engine.batch import Batch
from server.model.gpu import attention as paged
from server.model.gpu.body import GraphKey
from server.model.gpu.transfers import Upload
from server.types import SamplingParams
from tests.model import attention_cases as cases
from tests.model import families
from tests.model.batches import (
    BatchBuilder,
    Pages,
    all_logprobs,
    decode_step,
    draw_params,
    prompt_step,
    run,
)
from tests.model.gpu.graph_stand_in import FirstCalls, module_of, use_graphs
from tests.model.gpu.needs import interpreted, quiet
from tests.model.torch_runners import body_of, runner_over

CPU = torch.device("cpu")


def assert_near(got: torch.Tensor, p: cases.Problem, atol: float = 2e-5) -> None:
    torch.testing.assert_close(got.double(), cases.expected(p), rtol=0, atol=atol)


# A mixed batch has rows of every kind; one of decode rows alone has no tree.
@pytest.mark.parametrize(
    ("kind", "shape"), [*(("mixed", shape) for shape in cases.SHAPES), ("decode", "odd_dim")]
)
def test_every_row_attends_to_exactly_its_keys(kind: str, shape: str) -> None:
    p = cases.problem(cases.batch_of(kind), cases.SHAPES[shape], torch.float32, CPU)
    assert_near(cases.run_torch(p), p)


# The interpreter is slow: shapes that the kernels treat differently on few rows of each kind, one
# on whole batches. float16 for all 16-bit types: the interpreter multiplies the bits of a bfloat16
# as integers (triton 3.9, InterpreterBuilder.create_dot). bfloat16 is tests/gpu's.
@interpreted
@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "options"),
    [
        *(
            ("few", shape, torch.float32, {"split_size": cases.FEW_KEYS})
            for shape in ("grouped_by_3", "mha", "wide")
        ),
        ("few", "grouped_by_17", torch.float32, {}),
        ("few", "odd_dim", torch.float16, {"split_size": cases.FEW_KEYS}),
        ("few", "odd_dim", torch.float32, {"split_size": cases.FEW_KEYS, "num_bytes": 0}),
        *((kind, "odd_dim", torch.float32, {}) for kind in ("decode", "prompt")),
    ],
)
def test_the_kernels_attend_to_exactly_a_row_s_keys(
    kind: str, shape: str, dtype: torch.dtype, options: dict[str, int]
) -> None:
    """num_bytes 0: without room for splits."""
    p = cases.problem(cases.batch_of(kind), cases.SHAPES[shape], dtype, CPU)
    assert_near(cases.run_triton(p, **options), p, 5e-3 if dtype == torch.float16 else 2e-5)


@interpreted
def test_the_kernels_give_a_row_the_same_bits_whatever_its_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Window edges included: blocks, splits and their order depend on the row alone. More splits
    than are combined at once."""
    monkeypatch.setattr("server.model.gpu.triton_kernels.SPLITS_AT_ONCE", 1)
    p = cases.problem(cases.batch_of("few"), cases.SHAPES["capped"], torch.float32, CPU)
    assert_near(cases.check_rows_alone(p, split_size=cases.FEW_KEYS), p)


def tree_steps(pages: Pages, begins: tuple[int, int, int] = (0, 0, 0)) -> list[Batch]:
    """A prompt chunk with a tree and other prompts, decode rows, then two steps of trees and
    decode rows with as many rows, of other shapes and lengths. begins: of each prompt's rows,
    behind a history of zeros."""
    tables = [pages.sequence(120) for _ in range(3)]
    first = BatchBuilder()
    for i, (table, start, length) in enumerate(zip(tables, begins, (70, 5, 20), strict=True)):
        row = first.add_rows(table, [3 + i + j for j in range(start, length)], start)[-1]
        first.draw(row, first.add_params(draw_params()))
    for node in first.add_tree(tables[2], 19, [8, 9, 7], [-1, 0, -1]):
        first.score(node, 0, families.VOCAB_SIZE)
    second = BatchBuilder()
    for i, position in enumerate((70, 5, 20)):
        row = second.add_rows(tables[i], [40 + i], position)[0]
        second.draw(row, second.add_params(draw_params()))
        second.score(row, 0, families.VOCAB_SIZE)
    batches = [first.build(), second.build()]
    trees = ([[-1, 0, 1, -1, 3], [], []], [[-1], [-1, 0, 0, 2], []])
    for nth, shapes in enumerate(trees):
        builder = BatchBuilder()
        for i, (start, parents) in enumerate(zip((71, 6, 21), shapes, strict=True)):
            rows = builder.add_rows(tables[i], [5 + nth], start + nth)
            ids = [11 + i + j for j in range(len(parents))]
            rows += builder.add_tree(tables[i], start + nth, ids, parents)
            for row in rows:
                builder.draw(row, builder.add_params(draw_params()))
                builder.score(row, 0, families.VOCAB_SIZE)
        batches.append(builder.build())
    return batches


@interpreted
@quiet
@pytest.mark.parametrize(
    ("family", "bucketed"),
    [("gemma3:1", False), ("lfm2:2", True)],
)
def test_a_runner_with_kernels_is_the_torch_runner(
    family: str, bucketed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt chunk, trees and decode rows with split keys; those of few rows replayed from what
    their bucket captured first, a decode step and two of trees. A run of 9 rows has large tiles
    here: the interpreter takes milliseconds for each row of each layer."""
    monkeypatch.setattr(paged, "MAX_TREE_RUN", 8)
    results = []
    graphs = FirstCalls(8, num_runs=int(family == "lfm2:2"))  # whose layers keep a state
    for attention in ("torch", "triton"):
        runner = runner_over(module_of(family), attention=attention)
        body = body_of(runner)
        body.shape = dataclasses.replace(body.shape, split_size=32, max_splits=4)
        if attention == "triton" and bucketed:
            use_graphs(runner, graphs)
        batches = tree_steps(Pages(64, seed=3), begins=(61, 0, 10))
        drawn = [run(runner, batch) for batch in batches]
        if bucketed and attention == "triton":
            assert body.steps() == (1, 2, 1)
            assert body.plan(batches[-1]).num_splits == 4, "three are padded to a graph's"
        results.append(
            (
                np.concatenate([d.token_ids for d in drawn]),
                np.concatenate([all_logprobs(d, families.VOCAB_SIZE) for d in drawn]),
            )
        )
    np.testing.assert_array_equal(results[1][0], results[0][0])
    np.testing.assert_allclose(results[1][1], results[0][1], rtol=0, atol=1e-4)
    keys = [GraphKey(rows, 4) for rows in (4, 8, 8)]
    assert graphs.keys == keys * bucketed
    assert not graphs.num_forgotten


@interpreted
@quiet
def test_a_step_is_one_upload_and_one_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps, one with a sampled row, and a tree. A step that is larger than any before moves
    what graphs read: they are captured again, and the ids are the same."""
    found = []
    noisy = SamplingParams(temperature=0.9, seed=7)
    biased = SamplingParams(  # needs much beside its row
        temperature=0.0, logit_bias=tuple((i, 0.5) for i in range(3, families.VOCAB_SIZE))
    )
    uploads: list[Upload] = []
    upload = Upload.__call__

    def counted(self: Upload, arrays: dict[str, Any]) -> dict[str, torch.Tensor]:
        uploads.append(self)
        return upload(self, arrays)

    monkeypatch.setattr(Upload, "__call__", counted)
    for attention in ("torch", "triton"):
        runner = runner_over(families.build("llama:1"), attention=attention)
        own = Upload(CPU, 1 << 11, runner.forget_graphs)
        monkeypatch.setattr(runner, "_upload", own)
        graphs = FirstCalls(16, num_runs=0)
        if attention == "triton":
            use_graphs(runner, graphs)
        pages = Pages(64, seed=5)
        tables = [pages.sequence(60) for _ in range(3)]
        prompt = prompt_step(tables, [[4 + i, 9, 30 - i] * 3 for i in range(3)])
        ids = [run(runner, prompt).token_ids.tolist()]
        for step in range(3):
            batch = decode_step(tables, ids[-1], 9 + step, {1: noisy} if step == 1 else {})
            ids.append(run(runner, batch).token_ids.tolist())
        tree = BatchBuilder()
        rows = tree.add_rows(tables[0], [ids[-1][0]], 12)
        rows += tree.add_tree(tables[0], 12, [5, 6, 7], [-1, 0, -1])
        for row in rows:
            tree.draw(row, tree.add_params(draw_params()))
        moves = decode_step(tables, ids[-1], 12, dict.fromkeys(range(3), biased))
        for batch in (tree.build(), moves, tree.build()):
            ids.append(run(runner, batch).token_ids.tolist())
        assert uploads == [own] * 7
        uploads.clear()
        if attention == "triton":
            assert graphs.keys == [GraphKey(4, 1)] * 6
            assert graphs.num_forgotten == 1 and graphs.num_captured == 2
            graphs.refused.add(GraphKey(4, 1))
            assert run(runner, tree.build()).token_ids.tolist() == ids[-1]
            assert len(graphs.keys) == 6
        found.append(ids)
    assert found[0] == found[1]
