"""CUDA graphs of a TorchRunner without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from server.model.gpu.body import WARM_UP_RUNS, Forward
from server.model.gpu.generic import take_over
from server.model.gpu.runner import TorchRunner
from tests.model import families, generic_models
from tests.model.torch_runners import body_of


class FirstCalls:
    """StepGraphs without a GPU: a replay is the call that was captured, on the addresses that it
    read then, whatever the step of now has made. watch: entered around each. num_runs: plain runs
    before a capture."""

    def __init__(self, largest: int, num_runs: int = WARM_UP_RUNS) -> None:
        self.largest = largest
        self.num_runs = num_runs
        self.keys: list[Any] = []
        self.refused: set[Any] = set()
        self.num_captured = self.num_forgotten = 0
        self.watch: Callable[[], AbstractContextManager[None]] = nullcontext
        self._captured: dict[Any, Forward] = {}

    def run(self, key: Any, forward: Forward) -> torch.Tensor:
        self.keys.append(key)
        with self.watch():
            if key not in self._captured:
                self.num_captured += 1
                for _ in range(self.num_runs):
                    forward()
            return self._captured.setdefault(key, forward)()

    def forget(self) -> None:
        self.num_forgotten += 1
        self._captured.clear()


def use_graphs(runner: TorchRunner, graphs: FirstCalls) -> None:
    """What the runner would have made on a GPU."""
    body_of(runner).graphs = graphs


def module_of(name: str) -> Any:
    """A family's module, or one of the generic path that was taken over."""
    if name.partition(":")[0] in families.FAMILIES:
        return families.build(name)
    module = generic_models.build(name)
    take_over(module, families.VOCAB_SIZE)
    return module
