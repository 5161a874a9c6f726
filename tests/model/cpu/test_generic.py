"""The generic path on a CPU: transformers' own forward, the same bits in every batch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from server.config import ModelConfig
from server.errors import UnsupportedModelError
from server.model.build import RunnerSpec, build_runner
from server.model.cpu.generic import runner as generic_runner
from server.model.cpu.generic.attention import StateStore
from server.model.cpu.generic.runner import GenericRunner, generic_model
from server.model.draws import batch_rows
from server.model.families import FAMILIES
from server.model.generic import is_generic
from server.types import EngineSizes
from server.wiring.model import served_model
from tests.installed import needs
from tests.model import families
from tests.model.batches import BatchBuilder, Pages
from tests.model.cpu import test_bits, test_family_engines
from tests.model.generic_models import GENERIC, build, of
from tests.model.peft_adapters import lora
from tests.model.test_families import _save
from tests.model.test_hf_equality import against

SIZES = EngineSizes(max_num_seqs=8, max_num_batched_tokens=256, kv_bytes=8 << 20)


def _built(folder: Path, **changes: Any) -> GenericRunner:
    made = build_runner(RunnerSpec("tiny", str(folder), sizes=SIZES, **changes))
    assert isinstance(made, GenericRunner)
    return made


@pytest.fixture(scope="module", params=list(GENERIC))
def runner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GenericRunner]:
    folder = tmp_path_factory.mktemp(request.param)
    _save(build(request.param), folder)
    made = _built(folder, threads=1)
    made.info = replace(made.info, name=request.param)
    yield made
    made.close()


def test_logits_are_those_of_transformers_in_chunks(runner: Any) -> None:
    against(runner, build(runner.info.name)).chunks(60, 37)


# Windows and scaled logits; learned positions; recurrent layers; soft-capping. Any other model is
# held to its bits when it is loaded (soundness.check_rows).
@pytest.mark.parametrize("runner", ["cohere2", "gpt2", "qwen3_5_text", "vaultgemma"], indirect=True)
def test_chunks_trees_and_moved_slots_have_the_bits_of_one_row_at_a_time(
    runner: GenericRunner,
) -> None:
    cases = test_bits.to_the_bit(runner)
    cases.chunks(21, 13)
    cases.neighbours()
    cases.tree(14)


# Windows and a scale on logits; learned positions; biases everywhere; recurrent layers.
@pytest.mark.parametrize("runner", ["cohere2", "gpt2", "phi", "qwen3_5_text"], indirect=True)
def test_drafts_slices_and_exact_change_no_bit(runner: Any) -> None:
    asked = test_family_engines.requests()[:6]
    plain = asked, test_family_engines.alone(runner, asked)
    test_family_engines.test_drafts_chunks_shared_blocks_and_preemption_change_no_bit(runner, plain)
    test_family_engines.test_slices_are_the_same_alone_and_drafted_and_exact_is_the_full_head(
        runner, plain
    )


@needs("peft")
@pytest.mark.parametrize("name", ["starcoder2"])
def test_an_adapter_is_merged_and_bfloat16_is_the_rounded_model(name: str, tmp_path: Path) -> None:
    module = build(name)
    _save(module, tmp_path)
    theirs = lora(module, tmp_path / "adapter").merge_and_unload()
    ids = families.tokens(30, 8)
    merged = families.truth(theirs, ids)
    for dtype, atol in (("float32", 1e-4), ("bfloat16", 0.3)):
        got = families.served(tmp_path, ids, adapter=str(tmp_path / "adapter"), dtype=dtype)
        np.testing.assert_allclose(got, merged, rtol=0.0, atol=atol)


def test_the_log_says_that_it_is_slower_and_torchs_threads_are_left_as_they_were(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def seen() -> int:
        """What a new thread of this process finds."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.get_num_threads).result()

    _save(build("phi"), tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with caplog.at_level(logging.WARNING, logger="server.model.build"):
            made = _built(tmp_path)
        families.prefill(made, families.tokens(9, 1))
        assert (seen(), torch.get_num_threads()) == (3, 3)
        made.close()
    finally:
        torch.set_num_threads(before)
    assert made.info.kernel == "transformers"
    served = served_model(ModelConfig(name="tiny", path=str(tmp_path)), tmp_path, None)
    assert served.implementation == "transformers"
    assert "transformers' own forward computes it, slower" in caplog.text
    with pytest.raises(UnsupportedModelError, match="int8 is for families"):
        _built(tmp_path, weights="int8")


def test_a_family_is_never_generic() -> None:
    for kind, family in FAMILIES.items():
        assert not is_generic({"architectures": [family.architecture], "model_type": kind})
        assert not is_generic({"architectures": ["LlamaForCausalLM"], "model_type": kind})


# --- recurrent states -----------------------------------------------------------------------------


def test_a_state_is_replayed_from_the_nearest_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few states, many sequences: what is lost is replayed, with the same bits; what is kept makes
    a step begin where it may."""
    _save(build("qwen3_5_text"), tmp_path)
    prompts = [families.tokens(n, n) for n in (40, 41, 42)]
    pages = Pages(64, seed=3)
    tables = [pages.sequence(len(ids)) for ids in prompts]
    stores: list[StateStore] = []

    def few(_: int, sizes: Any) -> StateStore:
        stores.append(StateStore(keep, sizes))
        return stores[-1]

    monkeypatch.setattr(generic_runner, "StateStore", few)
    for keep in (2, 7):
        made = _built(tmp_path, threads=1)
        builder = BatchBuilder()
        for table, ids in zip(tables, prompts, strict=True):
            builder.add_rows(table, ids[:-1], 0)
        families.step(made, builder, [])
        builder = BatchBuilder()
        rows = [
            builder.add_rows(table, ids[-1:], len(ids) - 1)[0]
            for table, ids in zip(tables, prompts, strict=True)
        ]
        plan = stores[-1].plan(batch_rows(builder.build()))
        num_replayed = (plan.seqs[:, 3] - plan.seqs[:, 2]).sum()
        assert num_replayed > 30 if keep < 7 else num_replayed == 0
        got = families.step(made, builder, rows)
        want = [test_bits.one_by_one(made, ids, len(ids) - 1)[0] for ids in prompts]
        assert np.array_equal(got, np.stack(want))
        made.close()


# --- what is refused when it is tried -------------------------------------------------------------


def _tried(module: Any) -> None:
    generic_model(module, num_token_ids=199, num_positions=256, threads=1, bf16=False)


def _tiny(architecture: str, **changes: Any) -> Any:
    return of(architecture, **changes)().eval()


_UNSOUND = [
    (
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "num_experts_per_tok": 2},
        "is not known to be computed row by row",
    ),
    ("GptOssForCausalLM", {"num_key_value_heads": 2}, "s_aux"),
    ("DiffLlamaForCausalLM", {}, "layers call the attention interface once"),
    ("BertLMHeadModel", {"is_decoder": True}, "its logits are not its LM head's product"),
    ("Starcoder2ForCausalLM", {"intermediate_size": 100, "hidden_act": "gelu"}, "torch.gelu is on"),
]


@pytest.mark.parametrize(("architecture", "changes", "reason"), _UNSOUND)
def test_what_is_not_sound_is_refused_with_its_reason(
    architecture: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"(?s){reason}.*Nearest that works"):
        _tried(_tiny(architecture, **changes))


def test_a_row_that_reads_its_neighbour_is_refused() -> None:
    module = _tiny("Starcoder2ForCausalLM")

    def shifted(_module: Any, _args: Any, result: Any) -> Any:
        return result + torch.cat([result[:, :1] * 0, result[:, :-1]], dim=1)

    module.model.layers[1].mlp.register_forward_hook(shifted)
    with pytest.raises(UnsupportedModelError, match="one row at a time differ"):
        _tried(module)


def test_layers_with_a_state_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"masks are not only causal.*recurrent"):
        _tried(families.build("lfm2"))


class WithoutWindow:
    """A layer's view of a config, less the window."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return None if name == "sliding_window" else getattr(self._config, name)


def test_a_window_that_the_attention_is_not_told_of_is_refused() -> None:
    module = _tiny("Starcoder2ForCausalLM", sliding_window=8)
    module.model.layers[1].self_attn.config = WithoutWindow(module.config)
    with pytest.raises(UnsupportedModelError, match="layer 1 asks for the window none and its"):
        _tried(module)
