"""Adapters beside a base on TorchRunner: what PEFT computes, whatever stands beside it in a step.

The products run on their torch reference, and on the kernels in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from server.errors import ModelError, UnsupportedModelError
from server.model.gpu.adapters import SPAN_ROWS, grouped_torch, lora_spans
from server.model.gpu.body import GraphKey
from server.model.gpu.runner import TorchRunner
from server.model.loader import finish_module
from tests.model import families
from tests.model.batches import BatchBuilder, Pages
from tests.model.cpu_models import cpu_runner
from tests.model.families import tokens, truth
from tests.model.gpu.graph_stand_in import FirstCalls, module_of, use_graphs
from tests.model.gpu.needs import interpreted, needs_peft, quiet
from tests.model.peft_adapters import lora, prompt_logprobs
from tests.model.torch_runners import runner_over

V = families.VOCAB_SIZE


def made(family: str = "llama", **options: Any) -> TorchRunner:
    return runner_over(finish_module(families.build(family)), **options)


@needs_peft
@pytest.mark.parametrize(
    ("make", "atol"), [(made, 1e-5), (lambda: cpu_runner(families.build("llama")), 0.0)]
)
def test_places_are_used_again_and_tables_grow(make: Any, atol: float, tmp_path: Path) -> None:
    """Without adapters that have rows of their own, and as PEFT computes it, on both runners."""
    theirs, _ = (
        lora(families.build("llama"), tmp_path / str(seed), seed, r=rank)
        for seed, rank in ((1, 4), (2, 40))
    )
    runner = make()
    narrow, wide = (runner.pack_adapter(str(tmp_path / str(seed))) for seed in (1, 2))
    assert wide.num_bytes >= 4 * narrow.num_bytes
    prompt = [tokens(9, 1)]

    def same(place: int) -> bool:
        return np.allclose(prompt_logprobs(runner, prompt, [place])[0], before, 0, atol)

    runner.hold_adapter(0, narrow)
    before = prompt_logprobs(runner, prompt, [0])[0]
    np.testing.assert_allclose(before, truth(theirs, prompt[0]), rtol=0, atol=2e-4)
    with pytest.raises(ValueError, match="taken"):
        runner.hold_adapter(0, wide)
    runner.hold_adapter(2, wide)
    assert same(0) and not same(2)
    runner.drop_adapter(2)
    runner.drop_adapter(2)
    runner.hold_adapter(2, narrow)  # nothing of the wide one is left there
    assert same(2)
    runner.close()


@needs_peft
def test_what_is_not_computed_is_refused(tmp_path: Path) -> None:
    lora(families.build("qwen2"), tmp_path / "other")
    lora(families.build("llama"), tmp_path / "plain")
    runner = made()
    generic = runner_over(module_of("gpt2"))
    for ask in (runner.check_adapter, runner.pack_adapter):
        with pytest.raises(ModelError, match="in the model, and"):
            ask(str(tmp_path / "other"))
    for ask in (generic.check_adapter, generic.pack_adapter):
        with pytest.raises(UnsupportedModelError, match=r"no family.*merged"):
            ask(str(tmp_path / "plain"))


def test_spans_cover_the_rows_of_adapters_and_no_others() -> None:
    pages, builder = Pages(64), BatchBuilder()
    for num in (3, 40, 1, 2):
        builder.add_rows(pages.sequence(num), tokens(num, num), 0)
    batch = builder.build()
    assert lora_spans(batch).shape == (0, 3)
    spans = lora_spans(replace(batch, seq_adapters=np.asarray([-1, 7, 7, 2], np.int32)))
    of_row = np.full(46, -1)
    for first, num, place in spans.tolist():
        assert 1 <= num <= SPAN_ROWS and (of_row[first : first + num] == -1).all()
        of_row[first : first + num] = place
    assert of_row.tolist() == [-1] * 3 + [7] * 41 + [2] * 2
    assert spans.shape[0] == 4, "a run of rows of one adapter shares spans across sequences"


def check_kernels(dtype: torch.dtype, atol: float, device: str) -> None:
    """Triton's sums against the reference's, on a device or in the interpreter: an adapter's two
    products."""
    from server.model.gpu.triton_kernels import grouped_triton

    seeds = torch.Generator().manual_seed(3)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=seeds).to(device)

    a, b = random(3, 72, 16).to(dtype) / 8, random(3, 16, 100).to(dtype) / 4
    spans = torch.tensor(
        [[1, 16, 2], [17, 3, 2], [22, 1, 0], [0, 0, 0]], dtype=torch.int32, device=device
    )
    x, y = random(24, 2 * 72)[:, :72].to(dtype), random(24, 100).to(dtype)
    results = []
    for product, given in (
        (grouped_torch, spans), (grouped_triton, spans), (grouped_triton, spans[1:2])
    ):  # fmt: skip
        t, out = torch.zeros(24, 16, device=device), y.clone()
        product(x, given, a, t, False)
        product(t, given, b, out, True)
        results.append((t, out))
    for want, got in zip(*results[:2], strict=True):
        torch.testing.assert_close(got, want, rtol=atol, atol=atol)
    assert torch.equal(results[1][1][[0, 20, 21, 23]], y[[0, 20, 21, 23]])
    for got, alone in zip(*results[1:], strict=True):
        assert torch.equal(got[17:20], alone[17:20]), "bits do not depend on neighbours"


@interpreted
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-5), (torch.float16, 2e-2)])
def test_the_kernel_adds_adapters_as_the_reference(dtype: torch.dtype, atol: float) -> None:
    check_kernels(dtype, atol, "cpu")


@interpreted
@needs_peft
@quiet
def test_a_graph_is_replayed_with_other_adapters(tmp_path: Path) -> None:
    """A graph is captured once; the next step's rows have other adapters, in other spans. Larger
    tables lie elsewhere, and are captured again."""
    for seed, rank in ((0, 4), (1, 3), (2, 20)):
        some: dict[str, Any] = {"r": rank, "target_modules": ["q_proj", "down_proj"]}
        lora(families.build("llama:1"), tmp_path / str(seed), seed, **some)
    runner, plain = made("llama:1", attention="triton"), made("llama:1")
    graphs = FirstCalls(4, num_runs=0)
    use_graphs(runner, graphs)
    packed = [plain.pack_adapter(str(tmp_path / str(seed))) for seed in range(3)]
    steps: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((2, 1, 1), (0, -1, 1)), ((1, 1, 1, 1), (1, 1, -1, 0)),
    ]  # fmt: skip
    forgotten = []
    for place in range(3):
        for one in (runner, plain):
            one.hold_adapter(place, packed[place])
        forgotten.append(graphs.num_forgotten)
        if place == 0:
            continue
        for lengths, places in steps if place == 1 else [((2, 2), (2, 0))]:
            prompts = [tokens(num, num) for num in lengths]
            got, want = (prompt_logprobs(one, prompts, places) for one in (runner, plain))
            for own, other in zip(got, want, strict=True):
                np.testing.assert_allclose(own, other, rtol=0, atol=1e-4)
    assert forgotten == [1, 2, 3] and graphs.num_captured == 2
    assert graphs.keys == [GraphKey(4, 1, has_adapters=True)] * 3
    prompt_logprobs(runner, [tokens(3, 1)], None)
    assert graphs.keys[-1] == GraphKey(4, 1)
