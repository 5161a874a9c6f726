"""Both paged attentions against a float64 answer, on the same cases.

Triton's interpreter must be chosen before triton is first imported, and torch may import it, so
the Triton half runs in a process of its own (test_triton_in_the_interpreter); there this module's
`triton` cases run, elsewhere they are left out. tests/gpu runs the cases on CUDA.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
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
from tests.model.batches import BatchBuilder, Pages, all_logprobs, decode_step, draw_params
from tests.model.gpu.graph_stand_in import FirstCalls, module_of, use_graphs
from tests.model.gpu.needs import INTERPRETED, needs_interpreter, needs_triton, quiet
from tests.model.torch_runners import body_of, runner_over

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[3]
INTERPRETED_FILES = (
    Path(__file__),
    Path(__file__).with_name("test_lora.py"),
    Path(__file__).with_name("test_own_rows.py"),
    Path(__file__).with_name("test_delta.py"),
    Path(__file__).with_name("test_warm_up.py"),
)
LEAST_INTERPRETED = 20


# A mixed batch has rows of every kind; one of decode rows alone has no tree.
TORCH_CASES = [
    *(("torch", "mixed", shape) for shape in cases.SHAPES), ("torch", "decode", "odd_dim"),
]  # fmt: skip
# The interpreter is slow: shapes that the kernels treat differently on few rows of each kind, one
# on whole batches.
TRITON_CASES = [
    *(("triton", "few", shape) for shape in ("grouped_by_3", "mha", "wide", "grouped_by_17",
                                             "capped")),
    *(("triton", kind, "odd_dim") for kind in ("decode", "prompt")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("implementation", "kind", "shape"),
    [*TORCH_CASES, *(pytest.param(*case, marks=needs_interpreter) for case in TRITON_CASES)],
)
def test_every_row_attends_to_exactly_its_keys(implementation: str, kind: str, shape: str) -> None:
    p = cases.problem(cases.batch_of(kind), cases.SHAPES[shape], torch.float32, CPU)
    want = cases.expected(p)
    keys = {"split_size": cases.FEW_KEYS} if kind == "few" else {}
    got = cases.run_triton(p, **keys) if implementation == "triton" else cases.run_torch(p)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5)


@needs_interpreter
@pytest.mark.parametrize(
    ("dtype", "num_bytes", "atol"), [(torch.float16, 64 << 20, 5e-3), (torch.float32, 0, 2e-5)]
)
def test_triton_in_half_precision_and_without_room_for_splits(
    dtype: torch.dtype, num_bytes: int, atol: float
) -> None:
    """float16 for all 16-bit types: the interpreter multiplies the bits of a bfloat16 as integers
    (triton 3.9, InterpreterBuilder.create_dot). bfloat16 is tests/gpu's."""
    p = cases.problem(cases.batch_of("few"), cases.SHAPES["odd_dim"], dtype, CPU)
    want = cases.expected(p)
    got = cases.run_triton(p, num_bytes=num_bytes, split_size=cases.FEW_KEYS)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)


@needs_interpreter
def test_triton_gives_a_row_the_same_bits_whatever_its_neighbours() -> None:
    """Window edges included: blocks, splits and their order depend on the row alone."""
    p = cases.problem(cases.batch_of("few"), cases.SHAPES["capped"], torch.float32, CPU)
    cases.check_rows_alone(p, split_size=cases.FEW_KEYS)


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


@needs_interpreter
@quiet
@pytest.mark.parametrize(
    ("family", "bucketed"),
    [("gemma3:1", False), ("lfm2:2", True)],
)
def test_triton_runner_is_the_torch_runner(
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
        body.shape = dataclasses.replace(body.shape, split_size=64, max_splits=4)
        if attention == "triton" and bucketed:
            use_graphs(runner, graphs)
        batches = tree_steps(Pages(64, seed=3), begins=(61, 0, 10))
        drawn = []
        for batch in batches:
            runner.launch(batch)
            drawn.append(runner.wait())
        if bucketed and attention == "triton":
            assert body.steps() == (1, 2, 1)
        results.append(
            (
                np.concatenate([d.token_ids for d in drawn]),
                np.concatenate([all_logprobs(d, families.VOCAB_SIZE) for d in drawn]),
            )
        )
        runner.close()
    np.testing.assert_array_equal(results[1][0], results[0][0])
    np.testing.assert_allclose(results[1][1], results[0][1], rtol=0, atol=1e-4)
    keys = [GraphKey(rows, 4) for rows in (4, 8, 8)]
    assert graphs.keys == keys * bucketed
    assert not graphs.num_forgotten


@needs_interpreter
@quiet
def test_triton_a_step_is_one_upload_and_one_replay(monkeypatch: pytest.MonkeyPatch) -> None:
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
        prompt = BatchBuilder()
        for i, table in enumerate(tables):
            row = prompt.add_rows(table, [4 + i, 9, 30 - i] * 3, 0)[-1]
            prompt.draw(row, prompt.add_params(draw_params()))
        runner.launch(prompt.build())
        ids = [runner.wait().token_ids.tolist()]
        for step in range(3):
            runner.launch(decode_step(tables, ids[-1], 9 + step, {1: noisy} if step == 1 else {}))
            ids.append(runner.wait().token_ids.tolist())
        tree = BatchBuilder()
        rows = tree.add_rows(tables[0], [ids[-1][0]], 12)
        rows += tree.add_tree(tables[0], 12, [5, 6, 7], [-1, 0, -1])
        for row in rows:
            tree.draw(row, tree.add_params(draw_params()))
        moves = decode_step(tables, ids[-1], 12, dict.fromkeys(range(3), biased))
        for batch in (tree.build(), moves, tree.build()):
            runner.launch(batch)
            ids.append(runner.wait().token_ids.tolist())
        assert uploads == [own] * 7
        uploads.clear()
        if attention == "triton":
            assert graphs.keys == [GraphKey(4, 1)] * 6
            assert graphs.num_forgotten == 1 and graphs.num_captured == 2
        found.append(ids)
        runner.close()
    assert found[0] == found[1]


@pytest.mark.skipif(INTERPRETED, reason="starts the process this one is")
@needs_triton
def test_triton_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-k", "triton", *map(str, INTERPRETED_FILES)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None and int(found[1]) >= LEAST_INTERPRETED, done.stdout[-400:]
