"""The CUDA path on a real device: the cases of tests/model, and what only a device can show.

Not collected without CUDA (conftest.py). `python loadtest/gpu_check.py` runs this and times steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from server.engine.batch import Batch
from server.model.gpu import sampler
from server.model.gpu.generic import take_over
from server.model.gpu.runner import TorchRunner
from server.model.gpu.sampler import plan_draws
from server.model.loader import finish_module
from server.types import SamplingParams
from tests.model import attention_cases as cases
from tests.model import families, generic_models
from tests.model.batches import BatchBuilder, Pages, all_logprobs, draw_params, prompt_step, run
from tests.model.families import tokens
from tests.model.generic_models import ON_CUDA
from tests.model.gpu.test_attention import tree_steps
from tests.model.gpu.test_lora import check_kernels
from tests.model.gpu.test_slices import make as make_slicing
from tests.model.slice_cases import assert_equal, batch_of, make_slices
from tests.model.slice_engines import asking, requests_of, serve
from tests.model.test_hf_equality import against
from tests.model.torch_runners import body_of, head_of, reference, runner_over

pytestmark = pytest.mark.gpu
verdict = pytest.mark.verdict
BFLOAT16 = pytest.param(torch.bfloat16, marks=verdict)

CUDA = torch.device("cuda")
CPU = torch.device("cpu")
V = families.VOCAB_SIZE
NUM_BLOCKS = 128
KINDS = ["decode", "tree", "chunk", "mixed"]


def make(family: str, device: torch.device, **options: Any) -> TorchRunner:
    module: Any
    if family in ON_CUDA:
        module = generic_models.build(family)
        module.to(device)
        take_over(module, V)
    else:
        module = families.build(family)
        module.to(device)
        module = finish_module(module)
    numbers: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "max_num_seqs": 16}
    return runner_over(module, device=str(device), **(numbers | options))


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", list(cases.SHAPES))
@pytest.mark.parametrize("implementation", [cases.run_torch, cases.run_triton])
def test_every_row_attends_to_exactly_its_keys(
    implementation: object, shape: str, kind: str, dtype: torch.dtype
) -> None:
    p = cases.problem(cases.batch_of(kind), cases.SHAPES[shape], dtype, CUDA)
    want = cases.expected(p)
    got = implementation(p)  # type: ignore[operator]
    # Inputs are the same rounded numbers; probabilities and outputs are rounded to the dtype.
    tolerance = {torch.float32: 5e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    torch.testing.assert_close(got.double().cpu(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
@pytest.mark.parametrize("shape", ["odd_dim", "grouped_by_7", "wide"])
def test_a_row_has_the_same_bits_whatever_its_neighbours(shape: str, dtype: torch.dtype) -> None:
    whole = cases.problem(cases.batch_of("mixed"), cases.SHAPES[shape], dtype, CUDA)
    assert torch.equal(cases.check_rows_alone(whole), cases.run_triton(whole))


SAMPLINGS = (
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=0.9, top_p=0.9),
    SamplingParams(temperature=1.0, top_k=20, min_p=0.05, logit_bias=((4, 2.0), (9, -100.0))),
    SamplingParams(temperature=30.0, top_p=0.95),
    SamplingParams(temperature=1.1, presence_penalty=0.4, repetition_penalty=1.2),
    SamplingParams(temperature=0.8, min_tokens=9, allowed_token_ids=tuple(range(90))),
    SamplingParams(temperature=0.0, frequency_penalty=0.5),
    SamplingParams(temperature=0.0),
)
"""As many as a bucket has rows, so that a graph has the logits of the plain path."""


def decode_step(tables: list[Pages.Table], position: int, seed: int) -> Batch:
    """A row of each sequence; SAMPLINGS with this seed, every third one with a grammar's mask."""
    builder = BatchBuilder()
    mask = builder.add_mask(range(0, V, 3), V)
    for i, (table, asked) in enumerate(zip(tables, SAMPLINGS, strict=True)):
        row = builder.add_rows(table, [5 + seed + i], position)[0]
        params = draw_params(
            replace(asked, seed=seed), choice_id=i, banned_until=[2], counts={3: (1, 0), 8: (2, 1)}
        )
        builder.draw(row, builder.add_params(params), mask=mask if i % 3 == 1 else -1)
    return builder.build()


@verdict
def test_draws_are_the_cpu_s() -> None:
    """Of a vocabulary of many parts: top-p within the selection and beyond it, top-k, min-p."""
    size = 30_011
    rng = np.random.default_rng(6)
    logits = (rng.standard_normal((48, size)) * 4).astype(np.float32)
    builder = BatchBuilder()
    rows = builder.add_rows(Pages(8).sequence(64), [1] * 48, 0)
    asked = [s for s in SAMPLINGS if s.allowed_token_ids is None]
    for i, row in enumerate(rows):
        params = draw_params(replace(asked[i % len(asked)], seed=i), counts={3: (1, 0)})
        builder.draw(row, builder.add_params(params))
    batch = builder.build()
    plan = plan_draws(batch, np.arange(48), batch.draw_rows, size)
    found = []
    for device in (CPU, CUDA):
        arrays = {name: torch.from_numpy(a.copy()).to(device) for name, a in plan.arrays.items()}
        found.append(sampler.draw(torch.from_numpy(logits).to(device), plan, arrays).tolist())
    assert found[1] == found[0]


FAMILIES = [
    pytest.param(name, marks=verdict if name in ("llama", "gemma3", "lfm2") else ())
    for name in [*families.FAMILIES, *ON_CUDA]
]


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_every_family_have_transformers_logits(family: str) -> None:
    """In chunks, beside others, in a tree, behind an accepted path, in a copied block."""
    module = (generic_models if family in ON_CUDA else families).build(family)
    runner = make(family, CUDA)
    rows = against(runner, module, 5e-4)
    rows.neighbours()
    rows.tree(15)
    rows.fork()
    runner.close()


def sampled_batch(table: Pages.Table, position: int) -> Batch:
    """A step with a tree whose draws need every part of the sampler, logprobs and scores."""
    builder = BatchBuilder()
    row = builder.add_rows(table, [7], position)[0]
    nodes = builder.add_tree(table, position, [3, 4, 5], [-1, 0, -1])
    mask = builder.add_mask(range(0, V, 3), V)
    for choice_id, s in enumerate(SAMPLINGS):
        asked = replace(s, seed=choice_id, num_logprobs=5 if choice_id % 2 else None)
        params = builder.add_params(
            draw_params(asked, choice_id=choice_id, banned_until=[2], counts={3: (1, 0), 8: (2, 1)})
        )
        root = builder.draw(row, params, mask=mask if choice_id % 2 else -1)
        first = builder.draw(nodes[0], params, root)
        builder.draw(nodes[1], params, first)
        builder.draw(nodes[2], params, root)
    builder.score(row, 5, 3)
    return builder.build()


@verdict
def test_draws_are_the_reference_s_on_the_device_s_own_logits() -> None:
    """The sampler on CUDA against numpy, row by row, over the logits that the device computed."""
    runner = make("qwen3", CUDA)
    table = Pages(NUM_BLOCKS).sequence(64)
    prompt = BatchBuilder()
    prompt.add_rows(table, tokens(20, 5), 0)
    run(runner, prompt.build())
    seen: list[torch.Tensor] = []
    head = head_of(runner).logits
    head_of(runner).logits = lambda hidden: seen.append(head(hidden)) or seen[-1]  # type: ignore[func-returns-value]
    batch = sampled_batch(table, 20)
    drawn = run(runner, batch)
    logits = seen[0].cpu().numpy()
    assert drawn.token_ids.tolist() == reference(batch, logits)
    runner.close()


@pytest.fixture
def no_syncs() -> Iterator[None]:
    """Any synchronising call of torch raises."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@verdict
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_launch_does_not_sync(no_syncs: None, cuda_graphs: bool) -> None:
    runner = make("gemma3", CUDA, cuda_graphs=cuda_graphs)
    table = Pages(NUM_BLOCKS).sequence(64)
    prompt = BatchBuilder()
    prompt.add_rows(table, tokens(20, 5), 0)
    greedy = BatchBuilder()
    greedy.draw(greedy.add_rows(table, [7], 20)[0], greedy.add_params(draw_params()))
    batches = [prompt.build(), sampled_batch(table, 20), greedy.build()]
    for batch in batches:  # compiles kernels, fills allocators, captures graphs
        run(runner, batch)
        run(runner, batch)
    torch.cuda.set_sync_debug_mode("error")
    for batch in batches:
        runner.launch(batch)
        torch.cuda.set_sync_debug_mode("default")
        runner.wait()
        torch.cuda.set_sync_debug_mode("error")
    runner.move_slots(np.asarray([3], np.int32), np.asarray([4], np.int32))
    torch.cuda.set_sync_debug_mode("default")
    runner.close()


@pytest.mark.parametrize("place", ["device", "stream", "cpu"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_slices_and_verify_draw_what_the_cpu_draws(family: str, place: str) -> None:
    """Rows copied beside the steps; heads on the device, streamed to it, multiplied on the CPU."""
    found = []
    for device in (CPU, CUDA):
        runner = make_slicing(families.build(family), place, device)
        slices = tuple(make_slices(runner))
        parts = []
        for seed in range(4):
            batch = batch_of(8, seed, [0, 1, 2, -1, 2, 1, -1, 0])
            parts.append(run(runner, replace(batch, slices=slices)))
            keep = np.arange(8, dtype=np.int32)
            run(runner, replace(batch, slices=slices, draw_keep=keep))
            check = replace(batch, draw_slice=None, draw_rows=keep)
            parts.append(runner.verify(check, keep))
        found.append(parts)
        runner.close()
    for got, want in zip(found[1], found[0], strict=True):
        assert_equal(got, want, 2e-4)


@verdict
@pytest.mark.parametrize("place", ["device", "stream", "cpu"])
def test_exact_is_full_on_the_device(place: str) -> None:
    """Texts of a real engine, with drafts, misses, preemption and neighbours in other modes."""
    want, _ = serve(make_slicing(families.build("gemma3"), "device", CUDA), requests_of(0))
    runner = make_slicing(families.build("gemma3"), place, CUDA)
    asked = asking(requests_of(0), Random(7), ("exact", "full"))
    got, _ = serve(runner, asked, num_blocks=6, max_num_seqs=4)
    assert {k: r.ids for k, r in got.items()} == {k: r.ids for k, r in want.items()}
    runner.close()


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_launch_with_slices_does_not_sync(no_syncs: None, cuda_graphs: bool) -> None:
    """Embeddings gathered in CPU memory, a streamed head, slices that are placed and kept, and rows
    that are loaded between steps; graphs draw what the plain path draws."""
    runner = make_slicing(families.build("gemma3"), "stream", CUDA, cuda_graphs=cuda_graphs)
    plain = make_slicing(families.build("gemma3"), "stream", CUDA)
    slices = tuple(make_slices(runner))
    make_slices(plain)
    tables = [Pages(64, seed=1).sequence(20) for _ in range(3)]
    builder = BatchBuilder()
    for i, table in enumerate(tables):
        row = builder.add_rows(table, [5 + i], 0)[0]
        builder.draw(row, builder.add_params(draw_params(SamplingParams(temperature=0.0))))
    batch = replace(
        builder.build(),
        draw_slice=np.array([0, 1, -1], np.int32),
        slices=slices[:2],
        draw_keep=np.array([4, 9, -1], np.int32),
    )
    for _ in range(2):  # compiles kernels, fills allocators, captures graphs
        run(runner, batch)
    torch.cuda.set_sync_debug_mode("error")
    fresh = replace(batch, slices=tuple(replace(s) for s in slices[:2]))
    runner.load_rows(np.array([11, 12], np.int32), np.array([90, 91], np.int32))
    runner.launch(fresh)
    torch.cuda.set_sync_debug_mode("default")
    assert_equal(runner.wait(), run(plain, batch), 2e-4)
    runner.close()
    plain.close()


@verdict
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_graphs_draw_what_the_plain_path_draws(family: str) -> None:
    """Decode of several sequences that come and go within buckets."""
    streams = []
    for cuda_graphs in (False, True):
        runner = make(family, CUDA, cuda_graphs=cuda_graphs)
        pages = Pages(NUM_BLOCKS, seed=1)
        tables = [pages.sequence(100) for _ in range(6)]
        drawn: list[list[int]] = []
        for i, table in enumerate(tables):
            batch = prompt_step([table], [tokens(10 + 5 * i, i)])
            drawn.append(run(runner, batch).token_ids.tolist())
        for step in range(12):
            alive = [i for i in range(6) if (step + i) % 5]
            builder = BatchBuilder()
            for i in alive:
                position = 10 + 5 * i + len(drawn[i]) - 1
                row = builder.add_rows(tables[i], drawn[i][-1:], position)[0]
                s = SamplingParams(temperature=0.0 if i % 2 else 0.9, seed=i)
                builder.draw(row, builder.add_params(draw_params(s)))
            found = run(runner, builder.build())
            for i, token in zip(alive, found.token_ids.tolist(), strict=True):
                drawn[i].append(token)
        streams.append(drawn)
        runner.close()
    assert streams[0] == streams[1]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_sampled_rows_behind_a_graph_draw_what_the_plain_path_draws(family: str) -> None:
    """To the bit, whatever is asked; replays have other seeds and positions."""
    found = []
    for cuda_graphs in (False, True):
        runner = make(family, CUDA, cuda_graphs=cuda_graphs)
        pages = Pages(NUM_BLOCKS, seed=2)
        tables = [pages.sequence(40) for _ in SAMPLINGS]
        prompt = BatchBuilder()
        for i, table in enumerate(tables):
            prompt.add_rows(table, tokens(20, i), 0)
        run(runner, prompt.build())
        steps = [decode_step(tables, 20 + seed, seed) for seed in range(6)]
        found.append([run(runner, batch).token_ids.tolist() for batch in steps])
        runner.close()
    assert found[1] == found[0]


@verdict
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_after_warming_up_nothing_is_compiled_or_captured(cuda_graphs: bool) -> None:
    """Triton's programs and graphs, while requests of all kinds are served."""
    runner = make("llama", CUDA, cuda_graphs=cuda_graphs, max_num_batched_tokens=64)
    runner.warm_up()
    counted = [_num_programs(), _num_captured(runner)]
    pages = Pages(NUM_BLOCKS, seed=2)
    tables = [pages.sequence(40) for _ in SAMPLINGS]
    prompts = [tokens(7, i) for i in range(len(tables))]
    run(runner, prompt_step(tables, prompts, own=dict(enumerate(SAMPLINGS))))
    for seed in range(3):
        run(runner, decode_step(tables, 7 + seed, seed))
    assert [_num_programs(), _num_captured(runner)] == counted
    runner.close()


def _num_programs() -> int:
    """Programs that Triton has compiled in this process, by its kernels' own caches."""
    from triton.runtime.jit import JITFunction

    kernels = [
        value
        for name, module in list(sys.modules.items())
        if name.startswith("server.model.gpu.")
        for value in vars(module).values()
        if isinstance(value, JITFunction)
    ]
    return sum(len(caches[0]) for k in set(kernels) for caches in k.device_caches.values())


def _num_captured(runner: TorchRunner) -> int:
    graphs = body_of(runner).graphs
    return 0 if graphs is None else graphs.num_captured


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_trees_in_graphs_have_the_plain_path_s_logits(family: str) -> None:
    """Two steps of one bucket with trees of other shapes: the second is a replay."""
    found = []
    for cuda_graphs in (False, True):
        runner = make(family, CUDA, cuda_graphs=cuda_graphs)
        drawn = [run(runner, batch) for batch in tree_steps(Pages(NUM_BLOCKS, seed=3))]
        found.append((drawn[-1].token_ids, all_logprobs(drawn[-1], V)))
        if cuda_graphs:
            graphs = body_of(runner).graphs
            assert graphs is not None and len(graphs._graphs) == 2
        runner.close()
    np.testing.assert_array_equal(found[1][0], found[0][0])
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=0, atol=5e-4)


@verdict
def test_memory_goes_back() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    runner = make("llama", CUDA)
    run(runner, prompt_step([Pages(NUM_BLOCKS).sequence(20)], [tokens(20, 1)]))
    runner.close()
    del runner
    # What stays is cuBLAS's workspace of the runner's stream.
    assert torch.cuda.memory_allocated() - before < 64 << 20


@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float32, 2e-5), pytest.param(torch.bfloat16, 5e-2, marks=verdict)]
)
def test_adapters_are_added_as_by_the_reference(dtype: torch.dtype, atol: float) -> None:
    check_kernels(dtype, atol, "cuda")
