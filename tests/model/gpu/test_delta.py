"""Gated delta nets on TorchRunner: transformers' logits whatever a step holds, and the kernel."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from server.model.draws import batch_rows
from server.model.gpu import recurrent
from server.model.gpu.recurrent import (
    CONTINUES,
    RELOAD,
    ROW,
    SAVE,
    DeltaItems,
    DeltaMemory,
    delta_torch,
    plan_items,
)
from server.model.gpu.runner import TorchRunner
from server.model.states import StatePlaces
from server.types import SpeculationParams
from tests.model import generic_models
from tests.model.batches import BLOCK_SIZE, BatchBuilder, Pages
from tests.model.gpu.graph_stand_in import module_of
from tests.model.gpu.needs import interpreted
from tests.model.slice_engines import requests_of, serve
from tests.model.test_hf_equality import against
from tests.model.torch_runners import body_of, runner_over


def hybrid(**options: Any) -> TorchRunner:
    return runner_over(module_of("qwen3_5_text"), **options)


@pytest.mark.parametrize("keep", [0, 2, 20])
def test_rows_have_transformers_logits_and_a_lost_state_is_replayed(
    keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With too few states for the sequences of a step, or none, histories are walked again, those
    of the roots of draft trees too. transformers' chunked form sums in another order than its own
    recurrent one, 1e-4 away."""
    monkeypatch.setattr(recurrent, "num_states", lambda max_num_seqs: keep)
    made = hybrid()
    assert body_of(made).states.states.shape[1] == keep
    cases = against(made, generic_models.build("qwen3_5_text"), 2e-4)
    if keep == 20:
        cases.chunks(24, 1)
        cases.chunks(70, 33)
        cases.fork()
        cases.tree(3)
    cases.neighbours()
    cases.tree(15)


def test_drafts_shared_blocks_and_preemption_change_no_text() -> None:
    made = hybrid(num_blocks=48)
    want, _ = serve(made, requests_of(0))
    rng = Random(7)
    preempted = 0
    for blocks, seats in ((48, 8), (4, 4)):
        kinds = SpeculationParams(), SpeculationParams("suffix", 6)
        asked = [replace(r, speculation=rng.choice(kinds)) for r in requests_of(0)]
        got, engine = serve(made, asked, num_blocks=blocks, max_num_seqs=seats)
        preempted += engine.scheduler.num_preemptions
        assert {k: r.ids for k, r in got.items()} == {k: r.ids for k, r in want.items()}
    assert preempted > 0


def test_a_step_may_run_twice_and_a_failed_one_leaves_nothing() -> None:
    """As graphs need: no state that a step begins from is one that it writes."""
    places = StatePlaces(6, BLOCK_SIZE)
    table = Pages(8).sequence(64)

    def planned(first: int, num: int) -> Any:
        builder = BatchBuilder()
        builder.add_rows(table, [1] * num, first)
        batch = builder.build()
        return plan_items(batch, places.plan(batch_rows(batch)), 4, BLOCK_SIZE).items

    items = planned(0, 20)
    assert items[0, RELOAD] == -1 and (items[:, SAVE] >= 0).tolist().count(True) == 2
    places.commit()
    own = int(items[-1, SAVE])
    failed = planned(20, 1)
    items = planned(20, 1)
    for found in (failed, items):
        assert found[0, RELOAD] == own and found[-1, SAVE] not in (-1, own)
    places.commit()
    free = len(places._free)
    assert planned(21, 1)[0, RELOAD] == items[-1, SAVE]
    places.commit()
    assert len(places._free) == free, "the state that was followed is free again"


def _problem() -> tuple[Any, torch.Tensor, DeltaItems, Any]:
    """A net of odd sizes, rows of a prompt and a tree of two branches, replays, kept states."""
    generator = torch.Generator().manual_seed(3)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    key_heads, heads, dk, dv, taps = 1, 2, 12, 40, 2
    channels = 2 * key_heads * dk + heads * dv
    net: Any = SimpleNamespace(
        taps=random(taps, channels), rate=random(heads).exp(), shift=random(heads),
        key_heads=key_heads, dk=dk, dv=dv, state_size=(heads, dk, dv),
    )  # fmt: skip
    block_size, num_blocks = 4, 8  # so that few rows fill one: the interpreter is slow
    pages, builder = Pages(num_blocks, seed=3, block_size=block_size), BatchBuilder()
    first, second = pages.sequence(12), pages.sequence(12)
    builder.add_rows(first, [1] * 5, 0)
    builder.add_rows(second, [1], 3)
    builder.add_tree(second, 3, [1] * 6, [-1, 0, 1, 0, -1, 4])
    batch = builder.build()
    plan = StatePlaces(5, block_size).plan(batch_rows(batch))
    items, lines = plan_items(batch, plan, taps, block_size)
    width = channels + 2 * heads
    memory = (torch.from_numpy(batch.slots), random(num_blocks * block_size, width),
              random(5, *net.state_size))  # fmt: skip
    step = DeltaItems(torch.from_numpy(items), torch.from_numpy(lines))
    return net, 2 * random(batch.num_rows, width), step, memory


@interpreted
def test_the_kernel_walks_items_as_the_reference() -> None:
    from server.model.gpu.triton_kernels import delta_triton

    net, mixed, step, memory = _problem()
    results = []
    for rule in (delta_torch, delta_triton):
        own = DeltaMemory(*(part.clone() for part in memory))
        results.append((rule(net, mixed, step, own), own.inputs, own.states))
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    # The last node's bits are those of its path alone, 10 and 11 behind the root in row 5.
    first, end = step.lines[1].tolist()
    mine = {int(item[ROW]): item for item in step.items[first:end]}
    path = torch.stack([mine[10], mine[11]])
    path[:, RELOAD] = CONTINUES
    rows = step.items[first:end, ROW].tolist()
    trunk = step.items[first:end][: rows.index(5) + 1]
    alone = DeltaItems(torch.cat([trunk, path]), torch.tensor([[0, len(trunk) + 2]]).int())
    own = DeltaMemory(*(part.clone() for part in memory))
    own.inputs[own.slots.long()] = mixed
    lone = delta_triton(net, mixed, alone, own)
    assert torch.equal(lone[11], results[1][0][11])


def test_items_of_a_tree_go_on_or_begin_at_the_root_again() -> None:
    """Six nodes in depth-first order: two branches walk back, one step each from the root."""
    _, _, step, _ = _problem()
    first, end = step.lines[1].tolist()
    items = step.items[first:end].numpy()
    reloads = items[:, RELOAD]
    root = items[np.flatnonzero(items[:, ROW] == 5)[0], SAVE]
    assert root >= 0 and (reloads[1:] >= 0).sum() == 2
    assert set(reloads[1:][reloads[1:] >= 0]) == {root}
