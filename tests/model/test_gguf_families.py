"""GGUF files of every family: what is served is transformers' forward of the file's weights."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from server.errors import ModelError, UnsupportedModelError
from server.model.build import RunnerSpec, build_runner
from server.model.catalog import model_folder
from server.model.gguf_config import BY_TRANSFORMERS, config_values
from server.model.gguf_file import GgufWeights
from server.model.gguf_index import GgufIndex
from server.model.loader import open_model
from server.types import EngineSizes, SamplingParams
from tests.model.batches import BatchBuilder, Pages, draw_params, run
from tests.model.families import served, tokens, truth
from tests.model.gguf_models import MODELS, OF_GENERIC, VOCAB_SIZE, finish, write

pytestmark = pytest.mark.usefixtures("own_cache")

IDS = tokens(40, 3, VOCAB_SIZE)


def _rounded(module: Any) -> None:
    """Make each matrix what Q8_0 keeps of it."""
    with torch.no_grad():
        for weight in module.parameters():
            if weight.ndim == 2:
                rows = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)
                exact = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.Q8_0)
                weight.copy_(torch.from_numpy(exact))


@pytest.mark.parametrize("family", list(MODELS))
def test_a_file_gives_transformers_logits_in_both_forms(family: str, tmp_path: Path) -> None:
    """Of weights that Q8_0 keeps as they are."""
    model = MODELS[family]
    module = model.build()
    _rounded(module)
    want = truth(module, IDS)
    write(model, module, tmp_path / "blocks.gguf", "Q8_0")
    got = served(model_folder(str(tmp_path / "blocks.gguf")), IDS, VOCAB_SIZE)
    np.testing.assert_allclose(got, want, rtol=0.0, atol=1e-4)
    folder = model_folder(str(tmp_path / "blocks.gguf"), "file")
    weights = open_model(folder).weights
    assert isinstance(weights, GgufWeights)
    state = module.state_dict()
    for name in set(weights.names()) & set(state):  # the dense Granite 4.0 has Granite 3's names
        np.testing.assert_allclose(weights.floats(name), state[name].numpy(), atol=2e-7)
    error = np.abs(served(folder, IDS, VOCAB_SIZE) - want)
    assert 0.0 < float(error.mean()) < 0.2  # of the activations, which are rounded to 8 bits


@pytest.mark.parametrize("share", [None, 0.5, 0.005])
def test_greedy_ids_are_the_likeliest_allowed_of_all_logits(
    share: float | None, tmp_path: Path
) -> None:
    """Few rows fit a step. share: of the ids a grammar allows each row; None: there is none."""
    family, num, random = next(iter(MODELS)), 4, np.random.default_rng(5)
    write(MODELS[family], MODELS[family].build(), tmp_path / "blocks.gguf", "Q8_0")
    folder = model_folder(str(tmp_path / "blocks.gguf"), "file")
    allowed = random.random((len(IDS), VOCAB_SIZE)) < (share or 1.0)
    allowed[np.arange(len(IDS)), random.integers(3, VOCAB_SIZE, len(IDS))] = True
    allowed[:, [1, 2]] = False
    own = [
        SamplingParams(temperature=0.0, logit_bias=((1, -100.0), (2, -101.0))),
        SamplingParams(temperature=0.0, min_tokens=9),
    ]
    logits = served(folder, IDS, VOCAB_SIZE)
    want = np.where(allowed, logits, -np.inf).argmax(axis=1).tolist()
    sizes = EngineSizes(max_num_seqs=2, max_num_batched_tokens=num, kv_bytes=8 << 20)
    spec, got = RunnerSpec("tiny", str(folder), sizes=sizes, max_model_len=96), list[int]()
    with closing(build_runner(spec)) as runner:
        table = Pages(runner.info.num_blocks).sequence(len(IDS))
        for first in range(0, len(IDS), num):
            builder = BatchBuilder()
            params = [builder.add_params(draw_params(s, banned_until=(1, 2))) for s in own]
            for i, row in enumerate(builder.add_rows(table, IDS[first : first + num], first)):
                ids, mask = [1, 2, *np.flatnonzero(allowed[first + i]).tolist()], -1
                if share is not None:
                    mask = builder.add_mask(ids, VOCAB_SIZE)
                builder.draw(row, params[i % 2], mask=mask)
            got += run(runner, builder.build()).token_ids.tolist()
    assert got == want


@pytest.mark.parametrize("name", list(OF_GENERIC))
def test_a_file_of_a_generic_model_is_served_from_floats(name: str, tmp_path: Path) -> None:
    """Gemma 1's file is in floats, the others' are quantised."""
    model = OF_GENERIC[name]
    module = model.build()
    form = "F32" if name == "gemma" else "Q8_0"
    if form == "Q8_0":
        _rounded(module)
    write(model, module, tmp_path / "m.gguf", form)
    told: list[str] = []
    folder = model_folder(str(tmp_path / "m.gguf"), "auto", report=told.append)
    assert "transformers' own forward, from floats; it is served from a float32 copy" in told[0]
    weights, state = open_model(folder).floats, module.state_dict()
    assert set(weights.names()) == set(state)
    for key, values in state.items():
        np.testing.assert_allclose(weights.get(key).numpy(), values.numpy(), rtol=1e-6, atol=4e-7)
    got = served(folder, IDS, VOCAB_SIZE)
    np.testing.assert_allclose(got, truth(module, IDS), rtol=0.0, atol=1e-4)


def test_layers_of_qwen35_that_draft_are_left_out(tmp_path: Path) -> None:
    model = OF_GENERIC["qwen3_5_text"]
    module = model.build()
    extra = {"blk.4.nextn.enorm.weight": 64, "blk.4.attn_norm.weight": 64}
    write(model, module, tmp_path / "m.gguf", extra=extra)
    folder = model_folder(str(tmp_path / "m.gguf"), "auto")
    assert open_model(folder).config.num_hidden_layers == 4
    write(model, module, tmp_path / "n.gguf", extra={"blk.3.nextn.enorm.weight": 64})
    with pytest.raises(UnsupportedModelError, match=r"not computed, first blk.3.nextn.enorm"):
        model_folder(str(tmp_path / "n.gguf"), "auto")


def test_every_generic_architecture_that_is_read_has_a_model() -> None:
    assert {model.kind for model in OF_GENERIC.values()} == set(BY_TRANSFORMERS)


def _metadata(path: Path, kind: str, **changes: Any) -> None:
    """A file without tensors but the embedding table."""
    writer = gguf.GGUFWriter(path, kind)
    keys: dict[str, Any] = {
        "context_length": 256, "embedding_length": 64, "block_count": 2, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5, **changes,
    }  # fmt: skip
    for key, value in keys.items():
        if value is not None:
            form = gguf.GGUFValueType.UINT32
            form = form if type(value) is int else gguf.GGUFValueType.get_type(value)
            writer.add_key_value(f"{kind}.{key}", value, form)
    writer.add_tensor("token_embd.weight", np.zeros((VOCAB_SIZE, 64), np.float32))
    finish(writer)


@pytest.mark.parametrize(
    ("kind", "changes", "told"),
    [
        ("gpt2", {}, r"architecture is 'gpt2'.*its folder in transformers' form: transformers'"),
        ("falcon", {}, r"architecture is 'falcon' \(general.architecture\).*gemma are read"),
        ("llama", {"expert_count": 8}, r"mixture of experts \(llama.expert_count\).*dense model"),
        ("qwen3", {"pooling_type": 3}, r"embedding model \(qwen3.pooling_type\)"),
        ("llama", {"attention.causal": False}, r"not causal \(llama.attention.causal\)"),
        ("glm4", {"rope.dimension_sections": [4, 2, 2, 0]}, r"glm4.rope.dimension_sections"),
        ("llama", {"rope.dimension_count": 8}, r"part of the head \(llama.rope.dimension_count"),
        ("llama", {"rope.scaling.type": "su"}, r"'su' is not computed \(llama.rope.scaling.type"),
        (
            "granitehybrid",
            {"attention.head_count_kv": [2, 0]},
            r"recurrent state \(granitehybrid.attention.head_count_kv\).*Granite 4.0 dense",
        ),
        ("granite", {"rope.scaling.finetuned": False}, "granite.rope.scaling.finetuned"),
        ("lfm2", {"attention.head_count_kv": [2, 0], "attention.sliding_window": 8}, "window"),
    ],
)
def test_a_file_that_is_not_computed_is_refused_by_its_key(
    kind: str, changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    _metadata(tmp_path / "m.gguf", kind, **changes)
    with pytest.raises(UnsupportedModelError, match=rf"(?s){told}.*Nearest that works|{told}"):
        config_values(GgufIndex(tmp_path / "m.gguf"), "m.gguf")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"context_length": 0}, "context_length is 0, which is not a whole number of 1 or more"),
        ({"embedding_length": 1 << 31}, "embedding_length is 2147483648"),
        ({"attention.head_count": 0}, "attention.head_count is 0"),
        ({"attention.head_count": 65}, "attention.head_count is above embedding_length"),
        ({"feed_forward_length": "96"}, "feed_forward_length is '96', which is not a whole number"),
        ({"block_count": 1025}, "block_count is 1025, which is .* at most 1024"),
        ({"rope.freq_base": -1.0}, "rope.freq_base is -1.0, which is not a number of 1 or more"),
        ({"attention.layer_norm_rms_epsilon": 0.0}, "rms_epsilon is 0.0"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "rms_epsilon is nan"),
        ({"attention.causal": 1}, "attention.causal is 1, which is not a flag"),
        ({"attention.head_count_kv": [2, 2]}, "its layers differ in heads"),
        ({"rope.dimension_count": 32}, "rope.dimension_count is above a head's 16"),
    ],
)
def test_sizes_that_cannot_be_are_told_in_one_line(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    _metadata(tmp_path / "m.gguf", "llama", **changes)
    with pytest.raises(ModelError, match=told) as refusal:
        config_values(GgufIndex(tmp_path / "m.gguf"), "m.gguf")
    assert "\n" not in str(refusal.value)


def test_metadata_that_is_missing_and_tensors_that_are_too_many_are_named(tmp_path: Path) -> None:
    _metadata(tmp_path / "m.gguf", "llama", block_count=None)
    with pytest.raises(ModelError, match=r"m.gguf lacks llama.block_count"):
        config_values(GgufIndex(tmp_path / "m.gguf"), "m.gguf")
    model = MODELS["qwen3"]
    write(model, model.build(), tmp_path / "q.gguf", extra={"blk.0.attn_sinks.weight": 4})
    with pytest.raises(UnsupportedModelError, match=r"not computed, first blk.0.attn_sinks"):
        model_folder(str(tmp_path / "q.gguf"))


def test_an_old_granite_4_is_read_by_its_other_name(tmp_path: Path) -> None:
    changes = {"attention.head_count_kv": [2, 2], "rope.scaling.finetuned": True}
    _metadata(tmp_path / "m.gguf", "granitehybrid", **changes, residual_scale=0.5)
    values = config_values(GgufIndex(tmp_path / "m.gguf"), "m.gguf")
    assert (values["model_type"], values["num_key_value_heads"]) == ("granite", 2)
    assert values["residual_multiplier"] == 0.5
