"""The reserve beside the KV cache, measured on a device that reports numbers."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from server.engine.batch import Batch
from server.model import build
from server.model.build import RunnerSpec
from server.model.gpu.body import ROW_BUCKETS
from server.model.gpu.device import DeviceMemory, Reserve
from server.model.gpu.runner import TorchRunner
from server.model.kv_memory import MARGIN, num_blocks_for
from server.model.shape import shape_of
from server.types import EngineSizes
from tests.model import families
from tests.model.batches import BatchBuilder, Pages, draw_params
from tests.model.gpu.graph_stand_in import FirstCalls, module_of, use_graphs
from tests.model.peft_adapters import enriched, lora
from tests.model.torch_runners import cache_of, runner_over

# peft 0.21 asks transformers 5.23 by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft is not installed"
)

MIB = 1 << 20
TOTAL, WEIGHTS = 8192 * MIB, 1024 * MIB
KEPT_STEPS, KEPT_DRIVER = 40 * MIB, 90 * MIB  # cuBLAS' own memory; compiled kernels


class Device(DeviceMemory):
    """DeviceMemory of a runner: a row of a step takes 1 MiB while it runs, a sampled draw 20; a
    graph 3 MiB at the driver for each split of its keys and 2 for each row at the allocator. The
    first step leaves some memory at both for good."""

    def __init__(self, runner: TorchRunner) -> None:
        super().__init__(torch.device("cpu"))
        self.batches: list[Batch] = []
        self._held = self._most = WEIGHTS
        self._driver = 300 * MIB
        self._graphs = self._graph_driver = 0
        self._own = runner.launch
        self._runner: Any = runner
        self._runner.launch = self._launch  # type: ignore[method-assign]
        self._forget = runner.forget_graphs
        self._runner.forget_graphs = self._forgets  # type: ignore[method-assign]

    def _launch(self, batch: Batch) -> None:
        if not self.batches:
            self._held += KEPT_STEPS
            self._driver += KEPT_DRIVER
        self.batches.append(batch)
        sampled = sum(batch.params[i].sampling.temperature > 0 for i in batch.draw_params)
        if self._runner.trials.graph_rows == batch.num_rows:
            self._graphs = 2 * batch.num_rows * MIB
            self._graph_driver += 3 * MIB
        most = self._held + self._graphs + (batch.num_rows + 20 * sampled) * MIB
        self._most = max(self._most, most)
        self._own(batch)

    def _forgets(self) -> None:
        self._forget()
        self._graphs = self._graph_driver = 0

    def release(self) -> None:
        self._most = self.held()

    def held(self) -> int:
        return self._held + self._graphs

    def most_held(self) -> int:
        return self._most

    def elsewhere(self) -> int:
        return self._driver + self._graph_driver

    def free(self) -> int:
        return TOTAL - self.held() - self.elsewhere()


def fitted(runner: TorchRunner, device: Device, **given: Any) -> None:
    sizes = EngineSizes(max_num_seqs=8, max_num_batched_tokens=256, kv_fraction=0.5)
    spec = RunnerSpec("tiny", "", sizes, device="cuda:0", **given)
    shape = shape_of(families.build("llama").config)
    build._fit_kv(spec, shape, runner, device)


def small(largest: int = 0) -> TorchRunner:
    runner = runner_over(families.build("llama"), num_blocks=16, kv_block_bytes=MIB)
    if largest:
        use_graphs(runner, FirstCalls(largest))
    return runner


def drawn(runner: TorchRunner) -> list[int]:
    builder = BatchBuilder()
    row = builder.add_rows(Pages(16).sequence(40), list(range(3, 43)), 0)[-1]
    builder.draw(row, builder.add_params(draw_params()))
    runner.launch(builder.build())
    return [int(i) for i in runner.wait().token_ids]


def test_the_reserve_is_what_the_largest_steps_took(caplog: pytest.LogCaptureFixture) -> None:
    runner = small(largest=32)
    device = Device(runner)
    with caplog.at_level(logging.INFO):
        fitted(runner, device)
    rows, draws = 256, 8
    whole, sampled, *graphs = device.batches
    assert (whole.num_rows, whole.num_draws) == (rows, rows)
    assert (sampled.num_rows, sampled.num_draws) == (rows, draws)
    assert {b.num_rows for b in graphs} == {32}
    # What remains at allocator and driver is not free any more: it is in no reserve.
    steps = (rows + 20 * draws) * MIB
    in_driver = 3 * MIB * len(graphs) * sum(bucket <= 32 for bucket in ROW_BUCKETS)
    free = TOTAL - WEIGHTS - KEPT_STEPS - KEPT_DRIVER - 300 * MIB
    want = (free - steps - in_driver - MARGIN) // 2 // MIB - 1
    assert runner.info.num_blocks == want == cache_of(runner).num_blocks
    text = caplog.text
    assert f"reserve {(steps + in_driver + MARGIN) // MIB} MiB" in text
    assert f"of {free // MIB} MiB free; KV cache: {want * 16} tokens" in text


def test_a_graph_larger_than_a_step_counts() -> None:
    """Its memory is held beside the step's, which a private pool cannot take."""
    runner = small(largest=192)
    assert runner.reserve(Device(runner), (), 0).steps == (192 + 2 * 192) * MIB


def test_a_resized_runner_draws_the_same() -> None:
    """After steps that wrote each slot many times; in models with convolutions and states, too."""
    for family in ("llama", "lfm2"):
        module = families.build(family)
        runner = runner_over(module, num_blocks=16, kv_block_bytes=MIB)
        want = drawn(runner)
        fitted(runner, Device(runner))
        assert runner.info.num_blocks > 16
        runner.warm_up()
        assert drawn(runner) == want
        runner.close()


def test_a_step_that_cannot_run_ends_the_start() -> None:
    runner = small()
    runner.launch = lambda _: (_ for _ in ()).throw(MemoryError("no room"))  # type: ignore[method-assign,assignment]
    with pytest.raises(MemoryError, match="no room"):
        fitted(runner, Device(runner))


def test_a_length_that_does_not_fit_beside_the_reserve_is_refused() -> None:
    runner = small()
    with pytest.raises(ValueError, match="max_model_len 200 does not fit the KV cache's"):
        fitted_into(runner, 24 * MIB)


def fitted_into(runner: TorchRunner, free: int) -> None:
    device: Any = Device(runner)
    device.free = lambda: free
    fitted(runner, device, max_model_len=200)


def test_the_reserve_has_a_margin() -> None:
    assert Reserve(5 * MIB, 7 * MIB, MIB).num_bytes == 13 * MIB + MARGIN
    # As many blocks, whatever else the device has by then.
    assert num_blocks_for(MIB, "cuda", fraction=0.5, reserve=100 * MIB, free=300 * MIB) == 99


def test_cuda_memory_is_what_torch_and_the_driver_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    told = {"memory_reserved": 30, "max_memory_reserved": 50, "mem_get_info": (20, 100)}
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", *told):

        def tells(*device: Any, name: str = name) -> Any:
            called.append(name)
            return told.get(name)

        monkeypatch.setattr(torch.cuda, name, tells)
    memory = DeviceMemory(torch.device("cuda", 0))
    memory.release()
    assert called == ["synchronize", "empty_cache", "reset_peak_memory_stats"]
    assert (memory.held(), memory.most_held()) == (30, 50)
    assert (memory.free(), memory.elsewhere()) == (20, 50)


def test_kv_memory_has_another_size_at_once() -> None:
    cache = cache_of(small())
    cache.memory.fill_(1.0)
    cache.resize(3)
    assert (cache.num_slots, cache.trash_slot) == (48, 48)
    assert cache.memory[1, 0].shape[0] == 64 and not cache.memory.any()
    cache.move_slots(np.array([47], np.int32), np.array([0], np.int32))


@needs_peft
def test_adapters_tables_are_counted_before_they_are_there(tmp_path: Path) -> None:
    """Of the widest rank and the most own rows that are named, in every place that may be taken."""
    lora(families.build("llama"), tmp_path / "0", 1, r=40, target_modules=["q_proj", "down_proj"])
    enriched(families.build("llama"), tmp_path / "1", 2, 90)
    folders = [str(tmp_path / name) for name in ("0", "1", "gone")]
    runner = runner_over(families.build("llama"))
    memory = Device(runner)
    want = runner.reserve(memory, folders, 3).adapters
    assert want == runner.reserve(memory, folders, 4).adapters
    assert want > runner.reserve(memory, folders[:1], 4).adapters
    for place, folder in enumerate((folders[0], folders[1], folders[1])):
        runner.hold_adapter(place, runner.pack_adapter(folder))
    bank: Any = runner._adapting()
    tables = [t for table in bank._tables.values() for t in table]
    tables += [*bank.own._embedding, *bank.own._head]
    assert sum(t.nbytes for t in tables) == want
    runner.close()


def test_adapters_tables_are_in_the_reserve(caplog: pytest.LogCaptureFixture) -> None:
    """Also where none is named and admins may load some; not in a model of the generic path."""
    without = small()
    fitted(without, Device(without))
    for family, places in (("llama", 4096), ("gpt2", 4096), ("llama", 0)):
        runner = runner_over(module_of(family), num_blocks=16, kv_block_bytes=MIB)
        needed = runner.reserve(Device(runner), (), places).adapters
        with caplog.at_level(logging.INFO):
            fitted(runner, Device(runner), adapter_places=places)
        assert (needed > 4 * MIB) == (family == "llama" and places > 0)
        blocks = without.info.num_blocks - needed / (2 * MIB)
        assert abs(blocks - runner.info.num_blocks) <= 1
        assert f", adapters {needed // MIB}, margin" in caplog.text
        runner.close()
