"""TorchRunner behind trees: steps launched ahead give the texts that waiting ones give.

The host's way runs everywhere. The device's, with its kernel, padded rows and graphs, runs in the
interpreter's process (tests/model/gpu/test_attention.py starts it).
"""

from __future__ import annotations

import os
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from drafters.tree import DraftTree
from server.engine.ahead_policy import AheadPolicy
from server.engine.batch import Runner
from server.engine.engine import Engine
from server.engine.settings import EngineSettings
from server.model.gpu.runner import TorchRunner
from server.model.gpu.sampler import Sampler
from server.types import Request, SamplingParams, SpeculationParams
from tests.engine.scenarios import run_requests
from tests.fakes.fake_drafters import FakeDrafter
from tests.model import families
from tests.model.cpu_models import cpu_runner
from tests.model.gpu.graph_stand_in import (
    FirstCalls,
    draw_in_small_blocks,
    module_of,
    use_graphs,
)
from tests.model.torch_runners import runner_over

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs under TRITON_INTERPRET=1")
V = families.VOCAB_SIZE
Texts = dict[str, list[int]]

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, num_logprobs=1),
    "other": SamplingParams(temperature=0.0),
    "noisy": SamplingParams(temperature=0.9, seed=11),
}


def _requests(max_tokens: int, samplings: dict[str, SamplingParams] = SAMPLINGS) -> list[Request]:
    return [
        Request(
            name, "task", "tiny", tuple(5 + (7 * i + 3 * j) % 50 for j in range(9 + 4 * i)),
            replace(sampling, max_tokens=max_tokens + i, ignore_eos=True),
        )
        for i, (name, sampling) in enumerate(samplings.items())
    ]  # fmt: skip


def _run(
    runner: Runner,
    requests: list[Request],
    drafter: FakeDrafter | None = None,
    abort_at: int = -1,
    num_nodes: int = 6,
) -> tuple[Texts, Engine]:
    """What the engine answers. The last request is aborted behind step abort_at."""
    drafters = {} if drafter is None else {"fake": drafter}
    engine = Engine(runner, drafters, EngineSettings(
        max_num_seqs=4, max_num_batched_tokens=64, steps_ahead=int(drafter is not None),
    ))  # fmt: skip
    engine.flights.policy = AheadPolicy(is_always=True)
    if drafter is not None:
        requests = [replace(r, speculation=SpeculationParams("fake", num_nodes)) for r in requests]
    results = run_requests(
        engine, [(0, request) for request in requests], [(abort_at, requests[-1].request_id)]
    )
    assert engine.num_failed_steps == 0 and engine.num_drafter_errors == 0
    assert engine.pool.num_free == engine.pool.num_blocks and len(engine.flights) == 0
    return {name: result.ids for (name, _), result in results.items()}, engine


def _knowing(requests: list[Request], texts: Texts) -> FakeDrafter:
    """A drafter that knows the texts, proposes something wrong before what is right, so that KV
    must be moved, and errs now and then."""
    whole = {r.prompt_ids: [*r.prompt_ids, *texts[r.request_id]] for r in requests}

    def propose(tokens: list[int], budget: int, max_depth: int) -> DraftTree:
        text = next(t for p, t in whole.items() if tuple(tokens[: len(p)]) == p)
        ids: list[int] = []
        parents: list[int] = []
        end = -1
        for right in text[len(tokens) :][: min(max_depth, budget // 2)]:
            if Random(len(tokens) + len(ids)).random() < 0.15:
                right = (right + 2) % V
            ids += [(right + 1) % V, right]
            parents += [end, end]
            end = len(ids) - 1
        survival = np.repeat(0.95 ** np.arange(1, len(ids) // 2 + 1), 2)
        survival[0::2] *= 0.2
        return DraftTree(
            np.array(ids, np.int32), np.array(parents, np.int32), survival.astype(np.float32),
            np.zeros(len(ids), np.uint8),
        )  # fmt: skip

    return FakeDrafter(propose)


def _stopping(requests: list[Request], texts: Texts) -> list[Request]:
    """The same, of which the first ends at an id of its own, within a tree or not."""
    text = texts[requests[0].request_id]
    stop = next(t for i, t in enumerate(text) if i > 3 and t not in text[:i])
    ended = replace(requests[0].sampling, stop_token_ids=(stop,))
    return [replace(requests[0], sampling=ended), *requests[1:]]


@pytest.mark.parametrize("family", ["llama", "lfm2", "qwen3_5_text"])
def test_the_host_resolves_what_the_device_cannot(family: str) -> None:
    """Also where inputs of convolutions and states belong to a position."""
    requests = _requests(24)
    runner = runner_over(module_of(family))
    want, _ = _run(runner, requests)
    requests = _stopping(requests, want)
    ends, _ = _run(runner, requests)
    assert not runner.follows_trees
    runner.follows_trees = True
    got, engine = _run(runner, requests, _knowing(requests, want), abort_at=6)
    aborted = requests[-1].request_id
    assert 0 < len(got[aborted]) < len(ends[aborted])
    assert got == ends | {aborted: ends[aborted][: len(got[aborted])]}
    assert engine.flights.num_ahead_trees > 4
    runner.close()


def _failing(requests: list[Request], texts: Texts) -> tuple[Any, str]:
    """A model that gives NaN behind an id of its own in one request's text; that request."""
    mine = requests[0].request_id
    others = {t for r in requests for t in r.prompt_ids}
    # What `_knowing` proposes beside the right ids, too.
    others |= {
        (t + i) % V for name, text in texts.items() for t in text if name != mine for i in range(4)
    }
    text = texts[mine]
    broken = next(t for i, t in enumerate(text) if i > 1 and t not in others and t not in text[:i])
    module = families.build("llama")
    with torch.no_grad():
        module.get_input_embeddings().weight[broken] = float("nan")
    return module, mine


def test_a_request_with_nan_logits_fails_alone() -> None:
    """Behind trees of which the host knows nothing, either."""
    requests = _requests(16)
    texts, _ = _run(runner_over(families.build("llama")), requests)
    module, mine = _failing(requests, texts)
    plain = runner_over(module)
    ends, _ = _run(plain, requests)
    assert 0 < len(ends[mine]) < len(texts[mine])
    assert {**ends, mine: []} == {**texts, mine: []}
    plain.follows_trees = True
    got, engine = _run(plain, requests, _knowing(requests, texts))
    assert got == ends and engine.flights.num_ahead_trees > 2
    plain.close()


def _watched(runner: TorchRunner) -> list[bool]:
    """For each step that hangs on trees, whether the host had to resolve it."""
    following = runner._following
    lay_out, on_host = following.lay_out, []

    def seen(step: Any, before: Any, num_previous: int) -> Any:
        had = step.batch.ahead is not None
        rows = lay_out(step, before, num_previous)
        on_host.append(had and rows is None)
        return rows

    following.lay_out = seen  # type: ignore[method-assign]
    return on_host


# A bucket's padded rows hold what the memory held, and nobody reads them.
@needs_interpreter
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")
@pytest.mark.parametrize("with_graphs", [True, False])
def test_triton_follows_trees(with_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees behind trees on the device, in graphs and without: the texts of CpuRunner, with a stop
    and an abort. The sampled one shares steps with the greedy one."""
    draw_in_small_blocks(monkeypatch)
    requests = _requests(8, {name: SAMPLINGS[name] for name in ("greedy", "noisy")})
    requests = [replace(r, prompt_ids=r.prompt_ids[: 5 + i]) for i, r in enumerate(requests)]
    cpu = cpu_runner(families.build("llama"))
    want, _ = _run(cpu, requests)
    stopping = _stopping(requests, want)
    ends, _ = _run(cpu, stopping)
    runner = runner_over(families.build("llama"), attention="triton")
    runner._sampler = Sampler(use_triton=True)
    graphs = FirstCalls(16, num_runs=1)
    drawing = use_graphs(runner, graphs) if with_graphs else graphs
    assert runner.follows_trees
    on_host = _watched(runner)
    got, engine = _run(runner, stopping, _knowing(requests, want), abort_at=4, num_nodes=4)
    aborted = requests[-1].request_id
    assert 0 < len(got[aborted]) < len(ends[aborted])
    assert got == ends | {aborted: ends[aborted][: len(got[aborted])]}
    assert engine.flights.num_ahead_trees > 1 and not any(on_host)
    if with_graphs:
        assert not graphs.num_forgotten and len(graphs.keys) > graphs.num_captured
        assert drawing.num_captured and not drawing.num_forgotten
    runner.close()


@needs_interpreter
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")
def test_triton_a_request_with_nan_logits_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device a draw without an answer ends the walk, and its numbers stay its own."""
    draw_in_small_blocks(monkeypatch)
    requests = _requests(8, {name: SAMPLINGS[name] for name in ("other", "noisy")})
    requests = [replace(r, prompt_ids=r.prompt_ids[: 5 + i]) for i, r in enumerate(requests)]
    texts, _ = _run(runner_over(families.build("llama")), requests)
    module, mine = _failing(requests, texts)
    ends, _ = _run(runner_over(_failing(requests, texts)[0]), requests)
    runner = runner_over(module, attention="triton")
    use_graphs(runner, FirstCalls(16, num_runs=0))
    on_host = _watched(runner)
    got, engine = _run(runner, requests, _knowing(requests, texts), num_nodes=4)
    # It may fail when the id is drafted: in the kernel, a row reads its tree's other rows with
    # weight 0, which leaves NaN what it is.
    assert got == ends | {mine: ends[mine][: len(got[mine])]}
    assert len(ends[mine]) < len(texts[mine])
    assert engine.flights.num_ahead_trees > 1 and not any(on_host)
    runner.close()
