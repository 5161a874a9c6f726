"""Long prompt chunks by a library: the same numbers as our attention, on stand-ins that hold the
libraries' documented contracts.

The Triton half runs in the interpreter's process (tests/model/gpu/test_attention.py starts it).
"""

from __future__ import annotations

import inspect
import os
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from loadtest.gpu.prefill import varlen_reference
from server.engine.batch import Batch
from server.errors import UnsupportedModelError
from server.model.build import RunnerSpec, build_runner
from server.model.gpu import attention
from server.model.gpu import prefill as prefills
from server.model.gpu.prefill import (
    ChunkedAttention,
    FlashInfer,
    Library,
    TorchVarlen,
    chunks_of,
    library_of,
)
from tests.model import attention_cases as cases
from tests.model import families
from tests.model.batches import BatchBuilder, Pages, all_logprobs
from tests.model.gpu.paged_prefill import PagedPrefill
from tests.model.torch_runners import runner_over

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs under TRITON_INTERPRET=1")
CPU = torch.device("cpu")
V = families.VOCAB_SIZE

LIBRARIES: dict[str, Callable[[], Library]] = {
    "torch": lambda: TorchVarlen(varlen_reference),
    "flashinfer": lambda: FlashInfer(PagedPrefill, CPU),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefills, "WORKSPACE_BYTES", 1 << 12)


def step_of(*, apart: bool) -> Batch:
    """Two long chunks, one of them behind a history that ends inside a block, among decoded rows, a
    tree, a short chunk, and a long one that ends in a tree. apart: with rows between the two."""
    pages, builder = Pages(200, seed=3), BatchBuilder()
    builder.add_rows(pages.sequence(600), [1], 599)
    builder.add_rows(pages.sequence(300), [1] * 140, 123)
    if apart:
        builder.add_rows(pages.sequence(40), [1] * 30, 5)
    builder.add_rows(pages.sequence(160), [1] * 129, 0)
    builder.add_rows(pages.sequence(160), [1] * 128, 0)
    table = pages.sequence(40)
    builder.add_rows(table, [1], 20)
    builder.add_tree(table, 20, [1] * 3, [-1, 0, -1])
    table = pages.sequence(170)
    builder.add_rows(table, [1] * 150, 0)
    builder.add_tree(table, 149, [1] * 3, [-1, 0, -1])
    return builder.build()


def chunked(p: cases.Problem, own: attention.Attention, library: Library) -> ChunkedAttention:
    chunks = chunks_of(p.batch)
    assert chunks is not None
    arrays = library.arrays(chunks, 16) | {"prefill.rows": chunks.rows}
    device = p.query.device
    tensors = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    library.begin(chunks, tensors, 16)
    return ChunkedAttention(own, library, chunks, tensors)


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("apart", [False, True])
def test_a_library_s_chunks_attend_to_exactly_their_keys(name: str, apart: bool) -> None:
    """Against float64, with windows and without, of one layer after another and of two steps."""
    library = LIBRARIES[name]()
    for shape in ("grouped_by_3", "mha", "capped"):
        if shape == "capped" and name == "torch":
            continue
        p = cases.problem(step_of(apart=apart), cases.SHAPES[shape], torch.float32, CPU)
        own = attention.TorchAttention(p.batch, p.step, 16)
        both = chunked(p, own, library)
        keys, values = p.cache.layer(0)
        both.write(keys, values, p.key, p.value)
        for window in (p.shape.window, None):
            masked = attention.Masked(p.scaling, window, p.shape.cap)
            got = both.attend(p.query, keys, values, masked)
            want = own.attend(p.query, keys, values, masked)
            torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
        chunks = chunks_of(p.batch)
        assert chunks is not None and (chunks.span is None) == apart
        theirs = torch.from_numpy(chunks.rows).long()
        mine = torch.ones(p.batch.num_rows, dtype=torch.bool)
        mine[theirs] = False
        assert torch.equal(got[mine], want[mine]), "decoded rows and trees are ours"


def test_chunks_are_long_runs_of_a_prompt_and_nothing_else() -> None:
    batch = step_of(apart=True)
    chunks = chunks_of(batch)
    assert chunks is not None
    assert chunks.of_runs.tolist() == [False, True, False, True, False, False, False]
    assert chunks.starts.tolist() == [0, 140, 269] and chunks.used.tolist() == [263, 129]
    assert chunks.rows.tolist() == [*range(1, 141), *range(171, 300)]
    assert chunks.slots(16).shape[0] == 263 + 129
    shape = attention.TileShape(3, 256, 8, 10_000)
    tiled = attention.plan_tiles(batch, shape, chunks.of_runs)
    rows = [
        int(t[attention.TILE_ROW_START]) + i
        for group in tiled.groups
        for t in group.tiles
        for i in range(int(t[attention.TILE_NUM_ROWS]))
    ]
    assert sorted(rows) == sorted(set(range(batch.num_rows)) - set(chunks.rows.tolist()))
    # Rows whose keys are not those before them are none of a library's.
    prefix = batch.prefix_len.copy()
    prefix[5] -= 1
    moved = chunks_of(replace(batch, prefix_len=prefix))
    assert moved is not None and moved.of_runs.sum() == 1
    assert chunks_of(cases.batch_of("mixed")) is None


def test_a_plan_is_made_once_a_step_and_mask_and_not_over_one_in_flight() -> None:
    made: list[PagedPrefill] = []

    def wrapper(*given: Any, **options: Any) -> PagedPrefill:
        made.append(PagedPrefill(*given, **options))
        return made[-1]

    library = FlashInfer(wrapper, CPU)
    p = cases.problem(step_of(apart=False), cases.SHAPES["mha"], torch.float32, CPU)
    own = attention.TorchAttention(p.batch, p.step, 16)
    for _ in range(3):
        both = chunked(p, own, library)
        for window in (20, None, 20, None):
            both.attend(p.query, *p.cache.layer(0), attention.Masked(p.scaling, window))
    assert [w.num_plans for w in made] == [2, 2, 1, 1], "two steps may be in flight"


@needs_interpreter
def test_triton_beside_a_library_serves_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long chunk behind a short one, beside another prompt's rows, which are our kernel's."""
    results, called = [], []
    ids = [3 + i % 90 for i in range(149)]
    for kind in (TorchVarlen, FlashInfer):

        def attends(self: Any, *given: Any, own: Any = kind.attend) -> Any:
            called.append(self.name)
            return own(self, *given)

        monkeypatch.setattr(kind, "attend", attends)
    for library in (None, *(make() for make in LIBRARIES.values())):
        runner = runner_over(
            families.build("gemma3"), attention="torch" if library is None else "triton",
            decoder="modules",
        )  # fmt: skip
        runner._body.prefill = library
        pages = Pages(64, seed=2)
        table, other = pages.sequence(149), pages.sequence(3)
        for begin, end in ((0, 20), (20, 149)):
            builder = BatchBuilder()
            rows = builder.add_rows(table, ids[begin:end], begin)
            if begin:
                rows += builder.add_rows(other, ids[:3], 0)
            for row in rows[-5:]:
                builder.score(row, 0, V)
            runner.launch(builder.build())
            drawn = runner.wait()
        results.append(all_logprobs(drawn, V))
        runner.close()
    for got in results[1:]:
        np.testing.assert_allclose(got, results[0], rtol=0, atol=2e-4)
    assert called == ["torch"] * 3 + ["flashinfer"] * 3, "in every layer of the second step"


def taken(choice: Any, **changes: Any) -> Library | None:
    given: dict[str, Any] = {"head_dim": 64, "dtype": torch.bfloat16, "cap": 0.0, "device": CPU}
    return library_of(choice, **(given | changes))


def test_auto_is_our_own() -> None:
    assert taken("auto") is None and taken("own") is None


@pytest.mark.parametrize(
    ("choice", "changes", "words"),
    [
        ("torch", {"dtype": torch.float32}, "it computes float16 and bfloat16, not float32"),
        ("torch", {"cap": 50.0}, "it has no soft-capped scores"),
        ("torch", {"head_dim": 288}, "up to 256, not of 288"),
        ("flashinfer", {"head_dim": 96}, "it takes heads of 64, 128 and 256, not of 96"),
        ("flashinfer", {}, "flashinfer.BatchPrefillWithPagedKVCacheWrapper is not there"),
    ],
)
def test_what_a_library_lacks_is_refused_by_name(
    choice: str, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(UnsupportedModelError, match=f"prefill_attention: {choice} .*{words}.*own"):
        taken(choice, **changes)


def test_installed_libraries_are_known_by_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = PagedPrefill
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    assert isinstance(taken("flashinfer"), FlashInfer)

    class Old:
        def plan(self, qo_indptr: Any) -> None: ...

    module.BatchPrefillWithPagedKVCacheWrapper = Old
    with pytest.raises(UnsupportedModelError, match="has no disable_split_kv; a newer version"):
        taken("flashinfer")
    torchs: Any = types.ModuleType("torch.nn.attention.varlen")
    torchs.varlen_attn = lambda query, key, value, cu_seq_q: None
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", torchs)
    with pytest.raises(UnsupportedModelError, match="varlen_attn has no enable_gqa"):
        taken("torch")


def test_torch_s_function_takes_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    if "num_splits" not in inspect.signature(varlen).parameters:
        with pytest.raises(UnsupportedModelError, match="a newer version has it"):
            taken("torch")
        return
    assert isinstance(taken("torch"), TorchVarlen)
    p = cases.problem(step_of(apart=False), cases.SHAPES["mha"], torch.float32, CPU)

    def checked(*given: Any, **options: Any) -> torch.Tensor:
        inspect.signature(varlen).bind(*given, **options)
        return varlen_reference(*given, **options)

    own = attention.TorchAttention(p.batch, p.step, 16)
    masked = attention.Masked(p.scaling, None)
    chunked(p, own, TorchVarlen(checked)).attend(p.query, *p.cache.layer(0), masked)


def test_others_are_refused_where_our_kernels_are_not() -> None:
    with pytest.raises(ValueError, match="prefill_attention: torch needs the triton attention"):
        runner_over(families.build("llama"), prefill="torch")
    with pytest.raises(UnsupportedModelError, match="prefill_attention: flashinfer is for cuda"):
        build_runner(RunnerSpec("m", "", prefill_attention="flashinfer"))
