"""Adapters with tokens of their own beside a base on TorchRunner: PEFT's numbers, the CPU path's
texts, and for the base's requests the bits of a runner that never held an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from server.engine.adapters import Vocabulary
from server.engine.batch import Batch, Drawn, Runner
from server.engine.engine import Engine
from server.engine.plan import EngineSettings
from server.model.cpu.runner import CpuRunner
from server.model.gpu.body import GraphKey
from server.model.gpu.runner import TorchRunner
from server.model.loader import finish_module
from server.types import AdapterOrder, Request, SamplingParams, SpeculationParams
from tests.engine.scenarios import Collector, open_choices
from tests.fakes.fake_drafters import FakeDrafter, liar_drafter
from tests.model import families
from tests.model.batches import BatchBuilder, Pages, draw_params, run
from tests.model.cpu_models import cpu_runner
from tests.model.families import tokens, truth
from tests.model.gpu.graph_stand_in import FirstCalls, use_graphs
from tests.model.gpu.needs import interpreted, needs_peft, quiet
from tests.model.peft_adapters import enriched, lora, prompt_logprobs
from tests.model.torch_runners import runner_over

V, NEW, MORE = families.VOCAB_SIZE, 5, 90
OWN = {0: 0, 1: NEW, 2: MORE, -1: 0}
"""Place -> ids of its adapter's own: a plain adapter, two with tokens, and the base."""


def adapters(family: str, folder: Path, **settings: Any) -> list[Any]:
    """PEFT's models of the adapters at places 0, 1 and 2, saved into folders of these names.
    settings: of the plain one."""
    return [
        lora(families.build(family), folder / "0", 1, **settings),
        enriched(families.build(family), folder / "1", 2, NEW),
        enriched(families.build(family), folder / "2", 3, MORE),
    ]


@pytest.fixture(scope="module")
def llama_s(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the adapters of "llama"."""
    folder = tmp_path_factory.mktemp("adapters")
    adapters("llama", folder)
    return folder


def made(family: str, folder: Path | None, **options: Any) -> TorchRunner:
    """A runner that holds the adapters, if there is a folder."""
    runner = runner_over(finish_module(families.build(family)), **options)
    return runner if folder is None else holding(runner, folder)


def made_on_cpu(family: str, folder: Path | None) -> CpuRunner:
    runner = cpu_runner(families.build(family))
    return runner if folder is None else holding(runner, folder)


def holding(runner: Any, folder: Path) -> Any:
    for place in (1, 0, 2):  # the widest comes last, so that tables grow
        assert runner.check_adapter(str(folder / str(place))) == bool(OWN[place])
        packed = runner.pack_adapter(str(folder / str(place)))
        assert packed.vocab_size == V + OWN[place]
        runner.hold_adapter(place, packed)
    return runner


def step(runner: Runner, batch: Batch, places: Sequence[int] | None = None) -> Drawn:
    if places is not None:
        batch = replace(batch, seq_adapters=np.asarray(places, np.int32))
    return run(runner, batch)


@needs_peft
@pytest.mark.parametrize(
    ("family", "place"),
    [("llama", "cpu"), ("gemma2", "device"), ("gemma3", "cpu"), ("phi3", "device"),
     ("lfm2", "device")],
)  # fmt: skip
def test_rows_have_the_tokens_of_their_adapter_alone(
    family: str, place: str, tmp_path: Path
) -> None:
    """Heads of their own and tied ones, soft-capped ones; the embedding on either side; one matrix
    for q, k and v and three; ranks that differ by module; several adapters in a step."""
    down, out = ("w2", "out_proj") if family == "lfm2" else ("down_proj", "o_proj")
    theirs = adapters(family, tmp_path, target_modules=[down, out], r=7, rank_pattern={out: 3})
    table: dict[str, Any] = {}
    if place == "cpu":
        embedding: Any = families.build(family).get_submodule("model.embed_tokens")
        table["embedding"] = embedding.weight.detach()
    runner, bare = made(family, tmp_path, **table), made(family, None, **table)
    order = [1, -1, 2, 0, 1, -1]
    prompts = [tokens(4 + 5 * i, i, V + OWN[a]) for i, a in enumerate(order)]
    prompts[0][1], prompts[2][2] = V + NEW - 1, V + MORE - 1
    got = prompt_logprobs(runner, prompts, order, OWN)
    inside = [[i if i < V else 7 for i in ids] for ids in prompts]
    plain = prompt_logprobs(bare, inside, None)
    for ids, own, rows, base in zip(prompts, order, got, plain, strict=True):
        if own < 0:
            assert all(map(np.array_equal, rows, base)), "the base's bits"
            continue
        want = truth(theirs[own], ids)
        assert want.shape[1] == V + OWN[own]
        assert not np.allclose(want[:, :V], np.stack(base), rtol=0, atol=1e-2)
        np.testing.assert_allclose(np.stack(rows), want, rtol=0, atol=2e-4)


@needs_peft
@pytest.mark.parametrize("make", [made, made_on_cpu])
def test_what_is_drawn_is_drawn_from_the_ids_of_its_request(make: Any, llama_s: Path) -> None:
    """Bias, masks, logprobs, named ones and likely ids, greedy and sampled, in one step."""
    runner, bare = make("llama", llama_s), make("llama", None)
    pages, builder = Pages(64, seed=6), BatchBuilder()
    masked = builder.add_mask([7, V + 2], V + MORE)
    to_own = tuple((V + i, 90.0) for i in range(NEW))
    named: dict[str, Any] = {"num_logprobs": 2, "logprob_token_ids": (3, V - 1)}
    cases: list[tuple[int, int, dict[str, Any]]] = [
        (1, -1, {"logit_bias": to_own}), (-1, -1, {"num_logprobs": 2}), (1, masked, {}),
        (-1, masked, {}), (2, -1, {"temperature": 0.9, "top_p": 0.9, "seed": 4}),
        (-1, -1, {"temperature": 0.9, "top_p": 0.9, "seed": 4, "num_logprobs": 3}),
        (0, -1, named), (1, -1, {"num_logprobs": 2, "logprob_token_ids": (3, V + 1)}),
        (-1, -1, named), (1, -1, {"temperature": 0.8, "repetition_penalty": 1.3, "seed": 1}),
    ]  # fmt: skip
    for i, (_, mask, settings) in enumerate(cases):
        row = builder.add_rows(pages.sequence(4), tokens(4, i), 0)[-1]
        params = draw_params(SamplingParams(**{"temperature": 0.0} | settings), counts={5: (1, 1)})
        builder.draw(row, builder.add_params(params), mask=mask)
    places = [place for place, _, _ in cases]
    batch = replace(builder.build(), num_likely=3)
    drawn = step(runner, batch, places)
    assert V <= drawn.token_ids[0] < V + NEW
    assert drawn.token_ids[2] in (7, V + 2) and drawn.token_ids[3] == 7
    assert {i for i, _ in drawn.top[7]} == {3, V + 1}
    assert np.isfinite([p for _, p in drawn.top[7]]).all()
    unbiased = SamplingParams(temperature=0.0, num_logprobs=2)
    unmoved = [
        replace(p, sampling=unbiased) if OWN[place] else p
        for p, place in zip(batch.params, places, strict=True)
    ]
    plain = step(bare, replace(batch, params=tuple(unmoved)))
    assert drawn.likely is not None and plain.likely is not None
    for d, place in enumerate(places):
        assert drawn.token_ids[d] < V + OWN[place]
        assert (drawn.likely.ids[d] < V + OWN[place]).all()
        if place < 0:
            assert drawn.token_ids[d] == plain.token_ids[d] and drawn.top[d] == plain.top[d]
            assert np.array_equal(drawn.logprobs[d], plain.logprobs[d], equal_nan=True)
            assert np.array_equal(drawn.likely.chances[d], plain.likely.chances[d])
    runner.close()
    bare.close()


@needs_peft
def test_ids_that_a_request_does_not_have_are_refused(llama_s: Path) -> None:
    runner = made("llama", llama_s)
    for token, place in ((V + NEW, 1), (V, -1)):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            prompt_logprobs(runner, [[token]], [place])
    runner.drop_adapter(1)
    with pytest.raises(ValueError, match="no adapter is held at place 1"):
        prompt_logprobs(runner, [[3]], [1])
    runner.hold_adapter(1, runner.pack_adapter(str(llama_s / "0")))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        prompt_logprobs(runner, [[V]], [1])


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"num_logprobs": 1},
    "noisy": {"temperature": 0.9, "top_p": 0.95, "seed": 11},
    "penalised": {"frequency_penalty": 0.6, "repetition_penalty": 1.2},
    "biased": {"logit_bias": tuple((V + i, 5.0) for i in range(NEW)), "min_tokens": 4},
}
ORDERS = [AdapterOrder(f"a{p}@{p}", "", V + OWN[p]) for p in (0, 1, 2)]


def requests() -> list[Request]:
    """Each adapter and the base with each sampling."""
    made: list[Request] = []
    for place in (-1, 0, 1, 2):
        for name, settings in SAMPLINGS.items():
            if "logit_bias" in settings and not OWN[place]:
                settings = {"logit_bias": ((7, 1.0),)}
            sampling = SamplingParams(
                **{"temperature": 0.0, "max_tokens": 10, "ignore_eos": True} | settings
            )
            prompt = tuple(tokens(6 + 3 * len(made) % 17, len(made), V + OWN[place]))
            adapter = f"a{place}@{place}" if place >= 0 else ""
            made.append(Request(f"{place} {name}", "t", "tiny", prompt, sampling, adapter=adapter))
    return made


def texts(
    runner: Any, folder: Path, asked: Sequence[Request], drafter: FakeDrafter | None = None
) -> dict[str, list[int]]:
    """What an engine answers that may hold two adapters at once."""
    settings = EngineSettings(max_num_seqs=6, max_num_batched_tokens=64, max_adapters=2)
    engine = Engine(runner, {} if drafter is None else {"fake": drafter}, settings)
    engine.adapters.read = lambda _: Vocabulary(own_head=True)
    for order in ORDERS:
        own = replace(order, folder=str(folder / order.adapter_id[-1]))
        engine.adapters.register(own, load=False)
    if drafter is not None:
        asked = [replace(r, speculation=SpeculationParams("fake", 6)) for r in asked]
    waiting, collector = list(asked), Collector()
    while waiting or engine.num_open:  # those that wait for an adapter to be read are open, too
        open_adapters = {r.adapter for r in asked if open_choices(engine, r.request_id)} - {""}
        if waiting and len(open_adapters | {waiting[0].adapter} - {""}) <= 2:
            engine.submit(waiting.pop(0))
        collector.take(engine.step())
    collector.take(engine.take_deltas())
    assert engine.recovery.num_failed_steps == 0
    assert not any(result.error_code for result in collector.results.values())
    engine.adapters.close()
    return {name: result.ids for (name, _), result in collector.results.items()}


@needs_peft
def test_the_texts_are_the_cpu_path_s_with_and_without_drafts(llama_s: Path) -> None:
    asked = requests()
    cpu = made_on_cpu("llama", None)
    want = texts(cpu, llama_s, asked)
    cpu.close()
    assert sum(i >= V for ids in want.values() for i in ids) > 20, "ids of their own are drawn"
    known = [[*r.prompt_ids, *want[r.request_id]] for r in asked]
    for drafter in (None, liar_drafter(3, known, V)):
        runner = made("llama", None)
        assert texts(runner, llama_s, asked, drafter) == want


def decoded(places: Sequence[int], **settings: Any) -> Batch:
    """A token of each sequence and a draft node under it, both drawn from."""
    pages, builder = Pages(64, seed=6), BatchBuilder()
    for i, place in enumerate(places):
        table = pages.sequence(2)
        rows = builder.add_rows(table, tokens(1, i, V + OWN[place]), 0)
        rows += builder.add_tree(table, 0, tokens(1, 9 + i, V + OWN[place]), [-1])
        for row in rows:
            params = draw_params(SamplingParams(**{"temperature": 0.0} | settings))
            builder.draw(row, builder.add_params(params))
    return builder.build()


@interpreted
@needs_peft
@quiet
def test_graphs_are_replayed_with_own_rows(tmp_path: Path) -> None:
    """The embedding's are in the graph (four rows, which fill their bucket), the head's behind it:
    the same ids and logprobs as on the plain path."""
    adapters("llama:1", tmp_path)
    runner, plain = (made("llama:1", tmp_path, attention="triton") for _ in range(2))
    graphs = FirstCalls(16, num_runs=0)
    use_graphs(runner, graphs)
    for order, settings in (((1, -1), {}), ((2, 1), {"temperature": 0.9, "num_logprobs": 2})):
        batch = decoded(order, **settings)
        batch.token_ids[0] = V + 1
        got, want = (step(one, batch, order) for one in (runner, plain))
        assert got.token_ids.tolist() == want.token_ids.tolist()
        assert np.array_equal(got.logprobs, want.logprobs, equal_nan=True)
    assert graphs.keys == [GraphKey(4, 1, has_adapters=True, has_own_rows=True)] * 2
    assert graphs.num_captured == 1
