"""Several adapters in one batch on a CPU: each row has the bits that it has alone, rows of the base
those that they have without adapters, and all of it is what PEFT computes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from server.errors import ModelError, UnsupportedModelError
from server.model.cpu.runner import CpuRunner
from tests.installed import needs
from tests.model import families
from tests.model.batches import BatchBuilder, Pages, leaf_paths
from tests.model.cpu_models import cpu_runner
from tests.model.families import Logprobs, tokens, truth
from tests.model.peft_adapters import enriched, logprobs, lora

pytestmark = needs("peft")

V, NEW = families.VOCAB_SIZE, 5

_FLOATS = ["llama", "gemma2", "phi3", "glm4", "lfm2"]
_OTHERS = ["int8 gemma3", "int4 qwen2", "bfloat16 llama"]
_RANKS: dict[str, Any] = {"rank_pattern": {"q_proj": 2, "down_proj": 3}, "use_rslora": True}


@dataclass
class Case:
    """A runner that holds a plain adapter at place 0 and one with tokens of its own at place 1,
    PEFT's models of both, and a runner of the same base that never held any."""

    runner: CpuRunner
    bare: CpuRunner
    peft: list[Any]
    is_float: bool


@pytest.fixture(scope="module", params=[*_FLOATS, *_OTHERS])
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    dtype, _, family = str(request.param).rpartition(" ")
    folder = tmp_path_factory.mktemp("adapters")
    made = [cpu_runner(families.build(family), dtype=dtype or "float32") for _ in range(2)]
    peft = [
        lora(families.build(family), folder / "plain", 1, **(_RANKS if family == "llama" else {})),
        enriched(families.build(family), folder / "own", 2, NEW),
    ]
    for place, name in enumerate(("plain", "own")):
        made[0].hold_adapter(place, made[0].pack_adapter(str(folder / name)))
    yield Case(made[0], made[1], peft, not dtype)
    for runner in made:
        runner.close()


def step(
    runner: CpuRunner, builder: BatchBuilder, rows: Sequence[int], adapters: Sequence[int] | None
) -> list[Logprobs]:
    """Log-softmax of the rows, over the ids that each has. adapters: a place a sequence."""
    return logprobs(runner, builder, rows, adapters, {1: NEW})


def alone(runner: CpuRunner, ids: Sequence[int], adapter: int | None, seed: int) -> list[Logprobs]:
    """One token at a time."""
    table = Pages(64, seed=seed).sequence(len(ids))
    got = []
    for i, token in enumerate(ids):
        builder = BatchBuilder()
        rows = builder.add_rows(table, [token], i)
        got += step(runner, builder, rows, None if adapter is None else [adapter])
    return got


def equal(got: Sequence[Logprobs], want: Sequence[Logprobs]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_mixed_batch_gives_each_row_its_own_bits(case: Case) -> None:
    order = [1, -1, 0, 0, 1, -1, 0]
    prompts = [tokens(3 + 2 * i, i, V + NEW * (a == 1)) for i, a in enumerate(order)]
    pages, builder = Pages(64, seed=3), BatchBuilder()
    rows = [builder.add_rows(pages.sequence(len(ids)), ids, 0) for ids in prompts]
    got = step(case.runner, builder, [r for part in rows for r in part], order)
    first = 0
    for i, (ids, adapter) in enumerate(zip(prompts, order, strict=True)):
        own = got[first : first + len(ids)]
        first += len(ids)
        assert equal(own, alone(case.runner, ids, adapter, i))
        if adapter < 0:  # as a runner that never held an adapter
            assert equal(own, alone(case.bare, ids, None, i))


def test_a_step_asks_torch_for_nothing(case: Case) -> None:
    """torch's threads spin on for milliseconds after a parallel operation, beside the team's: with
    two cores a step with an adapter took twice as long."""
    builder, pages = BatchBuilder(), Pages(64, seed=5)
    rows = [r for i in range(3) for r in builder.add_rows(pages.sequence(8), tokens(8, i), 0)]
    asked: list[str] = []

    class Told(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            asked.append(str(func))
            return func(*args, **(kwargs or {}))

    compute = case.runner._compute

    def told(*args: Any) -> None:  # modes belong to a thread, and steps run in the runner's own
        with Told():
            compute(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(case.runner, "_compute", told)
        step(case.runner, builder, rows, [-1, 0, 1])
    assert asked == []


def test_a_tree_of_an_adapter_has_the_bits_of_its_paths(case: Case) -> None:
    ids, nodes, parents = tokens(9, 1), tokens(5, 2, V + NEW), [-1, 0, -1, 2, 3]
    pages, builder = Pages(64, seed=5), BatchBuilder()
    other = builder.add_rows(pages.sequence(4), tokens(4, 9), 0)
    table = pages.sequence(20)
    last = builder.add_rows(table, ids, 0)[-1]
    tree = builder.add_tree(table, 8, nodes, parents)
    got = step(case.runner, builder, [*other, last, *tree], [0, 1])[4:]
    for path in leaf_paths(parents):
        want = alone(case.runner, [*ids, *(nodes[i] for i in path)], 1, path[-1])
        assert equal([got[1 + i] for i in path], want[len(ids) :])


def test_it_is_what_peft_computes(case: Case) -> None:
    if not case.is_float:
        pytest.skip("PEFT's model has the base's weights in float32")
    for place in (0, 1):
        ids = tokens(30, 7, V + NEW * place)
        want = truth(case.peft[place], ids)
        got = np.stack(alone(case.runner, ids, place, 3))
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)


def test_what_cannot_stand_beside_a_base_is_refused(tmp_path: Path) -> None:
    """Layer 0 of LFM2 is a convolution: attention's matrices there would change nothing."""
    lora(families.build("llama"), tmp_path / "head", target_modules=["lm_head"])
    lora(families.build("qwen2"), tmp_path / "other")
    lora(families.build("lfm2"), tmp_path / "moved", target_modules=["q_proj"])
    file = tmp_path / "moved" / "adapter_model.safetensors"
    save_file({k.replace("layers.1", "layers.0"): t for k, t in load_file(file).items()}, file)
    for family, folder, error, reason in (
        ("llama", "head", UnsupportedModelError, "LM head"),
        ("llama", "other", ModelError, "in the model, and"),
        ("lfm2", "moved", ModelError, r"layers.0.self_attn.q_proj.weight, which is not"),
    ):
        with (
            closing(cpu_runner(families.build(family))) as runner,
            pytest.raises(error, match=reason),
        ):
            runner.pack_adapter(str(tmp_path / folder))


def _stored_as(source: Path, target: Path, dtype: torch.dtype) -> None:
    shutil.copytree(source, target)
    file = target / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({k: t.to(dtype) if "lora" in k else t for k, t in tensors.items()}, file)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_stay_halves_and_give_the_bits_of_their_float32(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    enriched(families.build("llama"), tmp_path / "full", 2, NEW)
    _stored_as(tmp_path / "full", tmp_path / "half", dtype)
    _stored_as(tmp_path / "half", tmp_path / "wide", torch.float32)
    runner = cpu_runner(families.build("llama"))
    packed = [runner.pack_adapter(str(tmp_path / name)) for name in ("half", "wide", "full")]
    assert packed[0].num_bytes < 0.7 * packed[1].num_bytes == 0.7 * packed[2].num_bytes
    ids, got = tokens(30, 7, V + NEW), []
    for adapter in packed:
        runner.hold_adapter(1, adapter)
        builder = BatchBuilder()
        rows = builder.add_rows(Pages(64, seed=1).sequence(len(ids)), ids, 0)
        got.append(step(runner, builder, rows, [1]))
        runner.drop_adapter(1)
    assert equal(got[0], got[1])
    assert not equal(got[0], got[2])
    runner.close()
