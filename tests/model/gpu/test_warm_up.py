"""After warm_up nothing is compiled and no graph is captured, whatever the first requests are.

Triton's interpreter compiles nothing, so what it would compile is written down: a program for each
kernel, each kind of its arguments that Triton distinguishes, and each constant.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch

from drafters.tree import DraftTree
from server.model.gpu.runner import TorchRunner
from server.types import Request, SamplingParams, SpeculationParams
from tests.fakes.fake_drafters import FakeDrafter, chain
from tests.model import families
from tests.model.gpu.graph_stand_in import FirstCalls, use_graphs
from tests.model.gpu.needs import quiet
from tests.model.slice_engines import serve
from tests.model.torch_runners import runner_over

Program = tuple[Any, ...]


def _kind(name: str, parameter: inspect.Parameter, value: Any, fixed: tuple[str, ...]) -> Any:
    """What Triton compiles anew for: triton.runtime.jit's specialisation of an argument."""
    if "constexpr" in str(parameter.annotation) or value is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool) and name not in fixed:
        return value == 1, value % 16 == 0, abs(value) >= 1 << 31
    return type(value)


@pytest.fixture
def programs(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> set[Program]:
    """Those that have been launched."""
    from triton.runtime.interpreter import InterpretedFunction

    seen: set[Program] = set()
    run = InterpretedFunction.run

    def noted(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        parameters = inspect.signature(self.fn).parameters
        given = dict(zip(self.arg_names, args, strict=False)) | named
        fixed = self.kwargs["do_not_specialize"]
        kinds = (
            (name, _kind(name, parameters[name], value, fixed) if name in parameters else value)
            for name, value in sorted(given.items())
        )
        seen.add((self.fn.__name__, *kinds))
        return run(self, *args, grid=grid, warmup=warmup, **named)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    return seen


def _repeat(tokens: list[int], _budget: int, max_depth: int) -> DraftTree:
    """The last token again, once or twice."""
    num = min(2, max_depth)
    return chain(tokens[-1:] * num, [0.9, 0.8][:num])


def _serve(runner: TorchRunner) -> None:
    """Greedy and sampled requests of each kind, with drafts that are right or wrong."""
    requests = []
    samplings = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9, top_p=0.8, top_k=9, min_p=0.01, seed=2),
        SamplingParams(temperature=0.0, allowed_token_ids=(4, 5, 6), num_logprobs=2),
    ]
    for i, sampling in enumerate(samplings):
        speculation = SpeculationParams("fake" if i < 2 else "off", 3)
        sampling = replace(sampling, max_tokens=4, ignore_eos=True)
        prompt = tuple(5 + (3 * i + j) % 40 for j in range(4 + 8 * i))
        requests.append(Request(str(i), "task", "tiny", prompt, sampling, speculation=speculation))
    results, _ = serve(
        runner, requests, num_blocks=16, max_num_seqs=2, max_num_batched_tokens=16,
        drafters={"fake": FakeDrafter(_repeat)},
    )  # fmt: skip
    assert len(results) == len(samplings)


@quiet
@pytest.mark.parametrize("with_graphs", [True, False])
def test_nothing_is_compiled_or_captured_after_warming_up(
    with_graphs: bool, programs: set[Program]
) -> None:
    runner = runner_over(
        families.build("llama:1"), attention="triton", max_model_len=64, num_blocks=16,
        max_num_seqs=2, max_num_batched_tokens=16,
    )  # fmt: skip
    graphs = FirstCalls(4, num_runs=0)
    if with_graphs:
        use_graphs(runner, graphs)
    assert runner.warm_up() >= 4
    before, captured = set(programs), graphs.num_captured
    _serve(runner)
    assert not programs - before
    assert graphs.num_captured == captured
