"""Families: what a folder on disk becomes, what is refused and how, and a family of one's own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from server.commands.models import list_models
from server.errors import UnsupportedModelError
from server.model import families as known
from server.model.build import RunnerSpec, build_runner
from server.model.families import FAMILIES, Family, position_limit, text_values
from server.model.loader import finish_module, open_model
from server.model.shape import rope_tables, shape_of
from server.model.supported import check_raw
from server.types import EngineSizes
from tests.api.tiny_tokenizers import unmerged_tokenizer
from tests.model import families, generic_models
from tests.model.families import prefill, served, tokens, truth
from tests.model.peft_adapters import lora


def _close(got: families.Logprobs, want: families.Logprobs) -> None:
    np.testing.assert_allclose(got, want, rtol=0.0, atol=1e-4)


def _save(module: Any, folder: Path) -> None:
    module.save_pretrained(folder)
    unmerged_tokenizer(families.VOCAB_SIZE).save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("family", list(families.FAMILIES))
def test_a_saved_model_of_every_family_is_served_and_an_adapter_merged(
    family: str, tmp_path: Path
) -> None:
    module = families.build(family)
    _save(module, tmp_path)
    ids = tokens(50, 3)
    plain = truth(module, ids)
    _close(served(tmp_path, ids), plain)
    pytest.importorskip("peft")
    merged = lora(module, tmp_path / "adapter").merge_and_unload()
    got = served(tmp_path, ids, adapter=str(tmp_path / "adapter"))
    _close(got, truth(merged, ids))
    assert np.abs(got - plain).max() > 0.01


def test_the_tests_have_a_model_of_every_family() -> None:
    assert {families.model_type(name) for name in families.FAMILIES} == set(FAMILIES)


# --- the text part of multimodal checkpoints ------------------------------------------------------

_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_IMAGES = {"image_token_index": 198}
_QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
         "out_hidden_size": 64}  # fmt: skip


@pytest.mark.parametrize(
    ("text_part", "name", "vision", "others"),
    [
        ("gemma3", "Gemma3", _VISION, {**_IMAGES, "mm_tokens_per_image": 4}),
        ("ministral3", "Mistral3", {**_VISION, "head_dim": 16}, _IMAGES),
        ("qwen3_5_text", "Qwen3_5", _QWEN, {}),
    ],
)
def test_the_text_part_of_a_multimodal_checkpoint_is_served(
    text_part: str, name: str, vision: dict[str, Any], others: dict[str, int], tmp_path: Path
) -> None:
    of = families if text_part in families.FAMILIES else generic_models
    text: Any = of.build(text_part)
    model_class: Any = getattr(transformers, f"{name}ForConditionalGeneration")
    config = model_class.config_class(
        text_config=text.config.to_dict(), vision_config=vision,
        tie_word_embeddings=text.config.tie_word_embeddings, **others,
    )  # fmt: skip
    whole = model_class(config).eval()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    _save(whole, tmp_path)
    assert not [name for name in open_model(tmp_path).weights.names() if "vision" in name]
    ids = tokens(40, 3, 198)
    _close(served(tmp_path, ids), truth(text, ids))


def test_a_multimodal_config_may_leave_sizes_out() -> None:
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {"hidden_size": 2560, "model_type": "gemma3_text"},
    }
    check_raw(raw)
    assert text_values(raw)["vocab_size"] == 262208
    assert position_limit(text_values(raw)) == 131072
    with pytest.raises(ValueError, match="max_position_embeddings"):
        position_limit(raw)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "with fp8.*quantization_config"),
        ({"text_config": {"model_type": "mistral4"}}, "'mistral4'.*text_config.model_type"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "its own code.*auto_map"),
    ],
)
def test_a_multimodal_checkpoint_is_refused_by_its_own_keys(
    changes: dict[str, Any], told: str
) -> None:
    raw = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": {"model_type": "ministral3"},
        "vision_config": {"hidden_size": 8},
    }
    check_raw(raw)
    with pytest.raises(UnsupportedModelError, match=f"{told}.*Nearest that works"):
        check_raw({**raw, **changes})


def test_the_command_line_lists_every_family(capsys: pytest.CaptureFixture[str]) -> None:
    list_models()
    told = capsys.readouterr().out
    for family in FAMILIES.values():
        assert ", ".join(family.known_as) in told
    assert "LFM2, LFM2.5 (350M to 2.6B)      CPU, CUDA, GGUF " in told


# --- limits ---------------------------------------------------------------------------------------


def test_longrope_ends_where_its_short_factors_end_unless_more_is_asked_for() -> None:
    config: Any = families.build("phi3").config
    shape = shape_of(config)
    assert (shape.max_position_embeddings, config.max_position_embeddings) == (256, 1024)
    cos, _ = rope_tables(config, shape, 256)
    assert cos.shape == (1, 256, shape.rotary_dim // 2)
    raw = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    longrope = {**raw, "rope_scaling": {"type": "longrope"}}
    assert [position_limit(longrope, n) for n in (None, 4096, 4097)] == [4096, 4096, 131072]
    assert position_limit(raw) == 131072


def test_longrope_beyond_its_original_context_uses_long_factors_for_all(tmp_path: Path) -> None:
    module: Any = families.build("phi3")
    _save(module, tmp_path)
    sizes = EngineSizes(max_num_seqs=1, max_num_batched_tokens=320, kv_bytes=8 << 20)
    found = {}
    for length in (256, 512, 256):  # tables of one length are kept for the next start
        spec = RunnerSpec("tiny", str(tmp_path), sizes=sizes, max_model_len=length)
        runner = build_runner(spec)
        ids = tokens(300, 3)[: runner.info.max_model_len]
        _close(prefill(runner, ids), truth(module, ids))
        found[length] = runner.info.fingerprint
        runner.close()
    assert found[512] == found[256].replace(":", ":longrope:")
    with pytest.raises(ValueError, match="above the model's 1024"):
        build_runner(RunnerSpec("tiny", str(tmp_path), sizes=sizes, max_model_len=1025))
    rotary: Any = finish_module(module, 512).get_submodule("model").rotary_emb
    positions = torch.arange(40)[None]  # fewer than the original context
    cos, _ = rotary(torch.zeros(1), positions)
    want, _ = rope_tables(module.config, shape_of(module.config), 512)
    half = want.shape[2]
    np.testing.assert_allclose(cos[0, :, :half].numpy(), want[0, :40], rtol=0.0, atol=1e-6)


# --- refusals -------------------------------------------------------------------------------------

_EXPERTS = "mixture of experts"
_REFUSED = [
    # (architecture, model_type, other keys, the reason, the key, the nearest thing)
    ("MixtralForCausalLM", "mixtral", {"num_local_experts": 8}, _EXPERTS, "num_local", "Qwen3"),
    ("Qwen3MoeForCausalLM", "qwen3_moe", {"num_experts": 128}, _EXPERTS, "num_experts", "dense"),
    ("GptOssForCausalLM", "gpt_oss", {"num_local_experts": 32}, _EXPERTS, "num_local", "dense"),
    ("OlmoeForCausalLM", "olmoe", {"num_experts": 64}, _EXPERTS, "num_experts", "dense"),
    ("DeepseekV3ForCausalLM", "deepseek_v3", {"kv_lora_rank": 512}, "latent", "kv_lora",
     "Qwen3"),
    ("MiniCPM3ForCausalLM", "minicpm3", {"q_lora_rank": 768}, "latent", "q_lora_rank", "Llama"),
    ("BloomForCausalLM", "bloom", {}, "ALiBi", "model_type", "rotary"),
    ("MPTForCausalLM", "mpt", {"alibi": True}, "ALiBi", "alibi", "rotary"),
    ("MambaForCausalLM", "mamba", {}, "recurrent state", "model_type", "attention"),
    ("Mamba2ForCausalLM", "mamba2", {}, "recurrent state", "model_type", "attention"),
    ("RwkvForCausalLM", "rwkv", {}, "recurrent state", "model_type", "attention"),
    ("Qwen3NextForCausalLM", "qwen3_next", {}, "recurrent state", "model_type", "every layer"),
    ("FalconH1ForCausalLM", "falcon_h1", {}, "recurrent state", "model_type", "every layer"),
    ("T5ForConditionalGeneration", "t5", {"is_encoder_decoder": True}, "encoder-decoder",
     "is_encoder_decoder", "fine-tuned"),
    ("BartForConditionalGeneration", "bart", {"is_encoder_decoder": True}, "encoder-decoder",
     "is_encoder_decoder", "fine-tuned"),
    ("BertModel", "bert", {}, "writes no text", "model_type", "/v1/decisions"),
    ("XLMRobertaModel", "xlm-roberta", {}, "writes no text", "model_type", "/v1/decisions"),
    ("Qwen3ForSequenceClassification", "qwen3", {}, "class scores", "architectures", "decisions"),
    ("ModernBertForMaskedLM", "modernbert", {}, "writes no text", "architectures", "decisions"),
    ("LlavaForConditionalGeneration", "llava", {"vision_config": {"a": 1}}, "multimodal",
     "vision_config", "text-only"),
    ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", {"vision_config": {"a": 1}}, "multimodal",
     "vision_config", "text-only"),
    ("Gemma3nForConditionalGeneration", "gemma3n", {"audio_config": {"a": 1}}, "multimodal",
     "audio_config", "Gemma 3"),
    (["X"], "llama", {}, "none of the families", "models list", "Qwen3"),
    ("StableLmForCausalLM", "stablelm", {}, "attention of its own", "model_type", "Llama"),
    ("FalconForCausalLM", "falcon", {}, "attention of its own", "model_type", "Llama"),
    ("XGLMForCausalLM", "xglm", {}, "does not call the attention", "models list", "Qwen3"),
    ("Starcoder2ForCausalLM", "starcoder2", {"quantization_config": {"quant_method": "awq"}},
     "quantised with awq", "quantization_config", "unquantised"),
    ("PhiMoEForCausalLM", "phimoe", {"auto_map": {"AutoModel": "x.Y"}}, "its own code", "auto_map",
     "dense"),
    # The unquantised one would be refused, too.
    ("MixtralForCausalLM", "mixtral", {"quantization_config": {"quant_method": "awq"}},
     "quantised with awq", "quantization_config", "dense"),
    ("MiniCPMForCausalLM", "minicpm", {"auto_map": {"AutoModel": "x.Y"}}, "its own code",
     "auto_map", "Llama's build"),
    ("ChatGLMModel", "chatglm", {"auto_map": {"AutoModel": "x.Y"}}, "its own code", "auto_map",
     "GLM-4-0414"),
    ("Llama4ForConditionalGeneration", "llama4", {"vision_config": {"a": 1}, "text_config": [1]},
     "multimodal", "(vision_config, text_config)", "dense"),
    ("NoSuchForCausalLM", "no_such", {}, "none of the families", "tailor models list", "Qwen3"),
]  # fmt: skip


@pytest.mark.parametrize("case", _REFUSED, ids=[f"{c[0]}-{i}" for i, c in enumerate(_REFUSED)])
def test_a_refusal_names_the_key_the_reason_and_what_works(case: tuple[Any, ...]) -> None:
    architecture, model_type, keys, reason, key, nearest = case
    with pytest.raises(UnsupportedModelError) as caught:
        check_raw({"architectures": [architecture], "model_type": model_type, **keys})
    message = str(caught.value)
    assert message.startswith(f"{architecture} is not supported: ")
    told, _, advice = message.partition("Nearest that works: ")
    assert reason in told
    assert key in told
    assert nearest in advice


_SWITCHES = [
    ("llama", {"quantization_config": {"quant_method": "gptq"}}, "with gptq", "unquantised"),
    ("llama", {"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes", "GGUF"),
    ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "with fp8", "unquantised"),
    ("llama", {"model_type": "qwen2"}, "'qwen2' and not 'llama' .model_type", "Nearest"),
    ("llama", {"hidden_act": "relu2"}, "'relu2'.*hidden_act", "Llama's build"),
    ("granitemoehybrid", {"num_local_experts": 32}, "experts.*num_local_experts", "dense"),
    ("granitemoehybrid", {"layer_types": ["linear_attention"] * 3}, "linear_attention", "dense"),
    ("lfm2", {"conv_bias": True}, "conv_bias", "Nearest"),
    ("smollm3", {"quantization_config": {"quant_method": "torchao"}}, "torchao", "GGUF"),
    ("gemma3", {"final_logit_softcapping": 30.0}, "soft-caps logits", "Nearest"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "soft-caps attention", "Nearest"),
    ("gemma3", {"use_bidirectional_attention": True}, "not causal", "Nearest"),
    ("llama", {"auto_map": {"AutoModel": "x.Y"}}, "its own code", "Llama's build"),
    ("llama", {"is_encoder_decoder": True}, "encoder-decoder", "Nearest"),
    ("llama", {"kv_lora_rank": 16}, "latent attention", "Nearest"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
     "rope type 'dyn", "Nearest"),
    ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
     "part of the head", "Nearest"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "told", "nearest"), _SWITCHES)
def test_a_switch_that_is_not_computed_is_refused_by_its_key(
    family: str, changes: dict[str, Any], told: str, nearest: str, tmp_path: Path
) -> None:
    module = families.build(family)
    _save(module, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **changes}))
    with pytest.raises(UnsupportedModelError, match=rf"(?s){told}.*Nearest that works.*") as caught:
        open_model(tmp_path)
    assert nearest in str(caught.value)


# --- a family of one's own (docs/adding-a-model.md) -----------------------------------------------


def _blocks() -> list[str]:
    page = Path(__file__).parents[2] / "docs" / "adding-a-model.md"
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)


@pytest.fixture
def own_family() -> Iterator[Family]:
    """The row of docs/adding-a-model.md: Seed-OSS is Llama with biases on q, k and v."""
    exec(_blocks()[0], {})
    row = FAMILIES["seed_oss"]
    yield row
    del known.FAMILIES[row.model_type]
    for name in (row.architecture, *row.wrappers):
        del known.BY_ARCHITECTURE[name]


def test_a_family_of_ones_own_is_one_row(own_family: Family, tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = eval(_blocks()[1], vars(families))().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    _save(module, tmp_path)
    ids = tokens(40, 3)
    _close(served(tmp_path, ids), truth(module, ids))
    with pytest.raises(ValueError, match="is there already"):
        known.register(own_family)
