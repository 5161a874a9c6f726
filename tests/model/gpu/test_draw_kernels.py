"""Kernels that draw, and the graph that holds them: the reference's ids, whatever a request asks.

They run in the interpreter's process (tests/model/gpu/test_attention.py starts it), and are
compiled for GPUs here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.batch import Batch
from server.model.gpu import graph_draws, nucleus
from server.model.gpu.draw_plan import DrawPlan, plan_draws
from server.model.gpu.graph_draws import GraphDraws
from server.model.gpu.graphs import row_bucket
from server.model.gpu.head_plan import Slab
from server.model.gpu.sampler import Sampler
from tests.model.batches import BatchBuilder, Pages, draw_params
from tests.model.gpu.ahead_of_time import compiled, stack_bytes
from tests.model.gpu.graph_stand_in import FirstCalls
from tests.model.gpu.test_sampler import (
    Logits,
    V,
    ids_in,
    reference,
    sampling_params,
    spoiled,
    tensors,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs under TRITON_INTERPRET=1")
MOST = 4


def _plan(batch: Batch) -> DrawPlan:
    """Draw i is from logits row i."""
    draws = np.arange(batch.num_draws)
    return plan_draws(batch, draws, draws, V)


class Both:
    """A batch's draws by the sampler's kernels, and by the graph that was captured first."""

    def __init__(self) -> None:
        self.head = torch.zeros((MOST, V + 3))
        self.graphs = FirstCalls(MOST)
        self.draws = GraphDraws(self.head, V, MOST, self.graphs)  # type: ignore[arg-type]
        self.sampler = Sampler(use_triton=True)

    def draw(self, plan: DrawPlan, logits: Logits) -> tuple[list[int], list[int]]:
        num = plan.num_draws
        self.head[:num, :V] = torch.from_numpy(logits)
        rows = row_bucket(num, MOST)
        assert rows is not None
        found = self.draws.run(self.draws.upload(plan, rows))
        eager = self.sampler.draw(torch.from_numpy(logits.copy()), plan, tensors(plan))
        return eager.tolist(), found[:num].tolist()


# Rows without a finite logit, and those that pad a bucket.
@needs_interpreter
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")
def test_triton_draws_what_the_reference_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts within the selected values and beyond, ids in several parts, everything that a request
    may change; each bucket's graph is replayed with other values."""
    from server.model.gpu import draw_kernels, nucleus_kernels

    monkeypatch.setattr(draw_kernels, "_PART", 128)
    monkeypatch.setattr(draw_kernels, "_BLOCK", 64)
    monkeypatch.setattr(nucleus_kernels, "_BLOCK", 128)
    both = Both()

    @settings(max_examples=10, deadline=None, database=None, derandomize=True)
    @given(
        st.lists(sampling_params(), min_size=1, max_size=MOST),
        st.lists(ids_in(1, V), min_size=MOST, max_size=MOST),
        st.sampled_from(["plain", "ties", "flat", "padded", "nan"]),
        st.sampled_from([nucleus.SELECTED, 30, 3]),
    )
    def check(samplings: list[Any], masks: list[tuple[int, ...]], kind: str, width: int) -> None:
        batch = _batch(samplings, masks)
        rng = np.random.default_rng(len(samplings) + width)
        logits = (rng.standard_normal((batch.num_draws, V)) * 4).astype(np.float32)
        logits = spoiled(logits, kind, 7)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nucleus, "SELECTED", width)
            eager, graph = both.draw(_plan(batch), logits)
        assert eager == graph == reference(batch, logits)

    check()
    assert len(both.graphs.keys) >= 2 * both.graphs.num_captured and not both.graphs.num_forgotten


def _batch(
    samplings: list[Any], masks: list[tuple[int, ...]] | None = None, *, same_row: bool = False
) -> Batch:
    """A draw of each; every second one has a mask, if there are any."""
    builder = BatchBuilder()
    table = Pages(8).sequence(64)
    rows = builder.add_rows(table, [1] * len(samplings), 0)
    for i, sampling in enumerate(samplings):
        counts = {3: (1, 0), 8 + i: (2, 1)}
        given = draw_params(sampling, banned_until=[2, 3], counts=counts, num_generated=1)
        params = builder.add_params(given)
        mask = builder.add_mask(masks[i], V) if masks and i % 2 else -1
        builder.draw(rows[0] if same_row else rows[i], params, mask=mask)
    return builder.build()


@settings(max_examples=200, deadline=None)
@given(st.lists(sampling_params(), min_size=1, max_size=6), st.booleans())
def test_one_rule_says_how_a_step_draws(samplings: list[Any], same_row: bool) -> None:
    """The first graph where all are an argmax, the second one for whatever else draws row by row,
    and the sampler for the rest."""
    batch = _batch(samplings, same_row=same_row)
    rows = batch.draw_rows if same_row else np.arange(batch.num_draws)
    plan = plan_draws(batch, np.arange(batch.num_draws), rows, V)
    none = np.empty(0, np.int32)
    slab = Slab(np.unique(rows).astype(np.int32), 0, np.arange(batch.num_draws), plan, none, 0)
    draws = GraphDraws(torch.zeros((8, V)), V, 8, FirstCalls(8))  # type: ignore[arg-type]
    form = graph_draws.draw_form(8, [slab], draws)
    greedy = all(p.takes_argmax(-1) for p in batch.params)
    in_order = not same_row or len(samplings) == 1
    assert form == ("eager" if not in_order else "argmax" if greedy else "sampled")
    assert graph_draws.draw_form(0, [slab], draws) == "eager"
    assert graph_draws.draw_form(8, [slab], None) in ("argmax", "eager")
    if form == "sampled":
        assert graph_draws.draw_form(16, [slab], draws) == "eager", "more rows than it has"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(graph_draws, "MAX_ENTRIES", -1)
            assert graph_draws.draw_form(8, [slab], draws) == "eager"


# Types of the kernels' arguments where they are not of 32 bits.
DOUBLES = (
    "temperature", "entries", "x", "part_top", "top_p", "shares", "part_mass", "values",
    "threshold", "log_min_p", "best_value",
)  # fmt: skip
LONGS = ("top_k", "num_left", "kept", "noise")
INTS = (
    "mask_of", "masks", "is_nan", "num_entries", "part_num", "beyond", "part_above", "part_equal",
    "best_id", "drawn",
)  # fmt: skip
KERNELS = (
    "_prepare", "_change", "_measure", "_share", "_cut_selected", "_count", "_draw", "_answer",
)  # fmt: skip


@pytest.mark.skipif(INTERPRETED, reason="compiles for a GPU")
@pytest.mark.parametrize(
    ("name", "capability"),
    [(name, capability) for name in KERNELS for capability in (80, 90)]
    + [(name, capability) for name in ("_cut_selected", "_draw") for capability in (89, 100)],
)
def test_the_kernels_compile_for_a_gpu(
    name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down to machine code, without a GPU; nothing spills."""
    pytest.importorskip("triton")
    from server.model.gpu import draw_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(draw_kernels, name)
    every = {
        "PARTS": 32, "PART": draw_kernels._PART, "BLOCK": draw_kernels._BLOCK, "WIDTH": 1024,
        "HAS_ORDER": True,
    }  # fmt: skip
    made = compiled(
        kernel,
        dict.fromkeys(DOUBLES, "*fp64") | dict.fromkeys(LONGS, "*i64")
        | dict.fromkeys(INTS, "*i32") | {"logits": "*fp32"},
        {name: value for name, value in every.items() if name in kernel.arg_names},
        capability=capability, other="i32", enable_fp_fusion=False,
        num_warps=draw_kernels._WARPS if name == "_draw" else 4,
    )  # fmt: skip
    assert stack_bytes(made, tmp_path) == 0
