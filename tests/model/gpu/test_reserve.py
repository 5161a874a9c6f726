"""The KV cache's share of what is free once steps, graphs and adapters have taken theirs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from server.engine.batch import Batch
from server.model import build
from server.model.build import MARGIN, RunnerSpec
from server.model.gpu.runner import TorchRunner
from server.model.shape import shape_of
from server.types import EngineSizes
from tests.model import families
from tests.model.batches import Pages, prompt_step, run
from tests.model.gpu.graph_stand_in import FirstCalls, module_of, use_graphs
from tests.model.gpu.needs import needs_peft
from tests.model.peft_adapters import enriched, lora
from tests.model.torch_runners import body_of, cache_of, runner_over

MIB = 1 << 20
FREE = 4096 * MIB


class Device:
    """Memory of a device, of which a row of a step takes 1 MiB and a sampled draw 20, which the
    allocator holds then; asked for by torch's name."""

    def __init__(self, runner: TorchRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[Batch] = []
        self._held = 0
        self._own = runner.launch
        monkeypatch.setattr(runner, "launch", self._launch)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (FREE - self._held, 2 * FREE))

    def _launch(self, batch: Batch) -> None:
        self.batches.append(batch)
        sampled = sum(batch.params[i].sampling.temperature > 0 for i in batch.draw_params)
        self._held = max(self._held, (batch.num_rows + 20 * sampled) * MIB)
        self._own(batch)


def fitted(runner: TorchRunner, **given: Any) -> None:
    sizes = EngineSizes(max_num_seqs=8, max_num_batched_tokens=256, kv_fraction=0.5)
    spec = RunnerSpec("tiny", "", sizes, device="cuda:0", **given)
    build._fit_kv(spec, shape_of(families.build("llama").config), runner)


def small(largest: int = 0) -> TorchRunner:
    runner = runner_over(families.build("llama"), num_blocks=16, kv_block_bytes=MIB)
    if largest:
        use_graphs(runner, FirstCalls(largest))
    return runner


def drawn(runner: TorchRunner) -> list[int]:
    batch = prompt_step([Pages(16).sequence(40)], [range(3, 43)])
    return [int(i) for i in run(runner, batch).token_ids]


def test_kv_has_its_share_of_what_the_largest_steps_leave(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = small(largest=32)
    device = Device(runner, monkeypatch)
    with caplog.at_level(logging.INFO):
        fitted(runner)
    rows, draws = 256, 8
    whole, sampled, *graphs = device.batches
    assert (whole.num_rows, whole.num_draws) == (rows, rows)
    assert (sampled.num_rows, sampled.num_draws) == (rows, draws)
    assert {b.num_rows for b in graphs} == {32}
    want = (FREE - (rows + 20 * draws) * MIB - MARGIN) // 2 // MIB - 1
    assert runner.info.num_blocks == want == cache_of(runner).num_blocks
    assert f"KV cache: {want * 16} tokens" in caplog.text


def test_a_resized_runner_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """After steps that wrote each slot many times; in models with convolutions and states, too."""
    for family in ("llama", "lfm2"):
        module = families.build(family)
        runner = runner_over(module, num_blocks=16, kv_block_bytes=MIB)
        want = drawn(runner)
        Device(runner, monkeypatch)
        fitted(runner)
        assert runner.info.num_blocks > 16
        runner.warm_up()
        assert drawn(runner) == want


def test_a_step_that_cannot_run_ends_the_start() -> None:
    runner = small()
    runner.launch = lambda _: (_ for _ in ()).throw(MemoryError("no room"))  # type: ignore[method-assign,assignment]
    with pytest.raises(MemoryError, match="no room"):
        fitted(runner)


def test_a_length_that_does_not_fit_beside_steps_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = small()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (24 * MIB, FREE))
    with pytest.raises(ValueError, match="max_model_len 200 does not fit the KV cache's"):
        fitted(runner, max_model_len=200)


@needs_peft
def test_adapters_tables_are_there_before_the_adapters(tmp_path: Path) -> None:
    """Of the widest rank that is named, in every place that may be taken: no table moves when they
    come. In a model of the generic path there are none."""
    lora(families.build("llama"), tmp_path / "0", 1, r=40, target_modules=["q_proj", "down_proj"])
    enriched(families.build("llama"), tmp_path / "1", 2, 90)
    folders = [str(tmp_path / name) for name in ("0", "1", "gone")]
    runner, graphs = runner_over(families.build("llama")), FirstCalls(4)
    runner.take_room(folders, 3)
    use_graphs(runner, graphs)
    for place, folder in enumerate((folders[0], folders[1], folders[1], folders[0])):
        runner.hold_adapter(place, runner.pack_adapter(folder))
    before = graphs.num_forgotten
    runner.hold_adapter(4, runner.pack_adapter(folders[0]))
    assert (before, graphs.num_forgotten) == (0, 1)
    generic = runner_over(module_of("gpt2"))
    generic.take_room(folders, 3)
    assert body_of(generic).adapters is None
