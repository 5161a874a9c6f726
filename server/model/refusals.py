"""For kinds of models that people try: why each is refused, and the nearest thing that works.

supported.py refuses models that are not listed here, too; the list only improves its message.
"""

from __future__ import annotations

from collections.abc import Sequence

from server.model.families import FAMILIES

_EXPERTS = "a mixture of experts", "a dense model of its size, such as Qwen3 0.6B to 8B"
_RECURRENT = (
    "a recurrent state instead of keys and values",
    "a model with attention: Qwen3, SmolLM3",
)
_HYBRID = (
    "layers with a recurrent state of a kind that is not computed",
    "a model with attention in every layer: Qwen3, or Granite 4.0 dense (not -h-); or Qwen3.5",
)
_LATENT = "multi-head latent attention", "a model with grouped queries: Qwen3, Llama 3.2"
_ALIBI = "ALiBi, biases by distance", "a model with a rotary embedding: Llama 3.2, Qwen3"
_ENCODER_DECODER = (
    "an encoder and a decoder",
    "a decoder of the same size, fine-tuned for the task: Qwen3 0.6B, SmolLM2",
)
_ENCODER = (
    "an encoder, which writes no text",
    "a decoder; for labels, a task with `choices` on /v1/decisions",
)
_PICTURES = "pictures or sound", "its text-only sister: Qwen3, Gemma 3, Llama 3.2 1B or 3B"
_OWN_ATTENTION = (
    "attention of its own, which does not call transformers' attention interface",
    "a model of Llama's build: Qwen3, SmolLM2, Llama 3.2",
)
_PER_LAYER = (
    "layers that share keys and values, and inputs of their own",
    "Gemma 3 270M, 1B or 4B",
)

_BY_TYPE: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe", "phimoe", "granitemoe",
         "granitemoeshared", "ernie4_5_moe", "glm4_moe", "lfm2_moe", "hunyuan_v1_moe", "dbrx",
         "minimax", "llama4", "llama4_text"),
        _EXPERTS,
    ),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), _RECURRENT),
    **dict.fromkeys(
        ("qwen3_5_moe", "qwen3_next", "falcon_h1", "nemotron_h", "zamba2", "jamba",
         "bamba", "granitemoehybrid", "olmo_hybrid", "recurrent_gemma"),
        _HYBRID,
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "minicpm3", "longcat_flash"), _LATENT),
    **dict.fromkeys(("bloom", "mpt"), _ALIBI),
    **dict.fromkeys(
        ("t5", "mt5", "umt5", "bart", "mbart", "pegasus", "led", "t5gemma", "whisper", "marian"),
        _ENCODER_DECODER,
    ),
    **dict.fromkeys(
        ("bert", "roberta", "xlm-roberta", "distilbert", "modernbert", "deberta-v2", "mpnet",
         "nomic_bert", "electra", "albert"),
        _ENCODER,
    ),
    **dict.fromkeys(
        ("llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm",
         "paligemma", "mllama", "internvl", "qwen2_audio", "phi4_multimodal", "clip"),
        _PICTURES,
    ),
    **dict.fromkeys(
        ("gpt_neo", "gptj", "stablelm", "falcon", "codegen"),
        _OWN_ATTENTION,
    ),
    "chatglm": ("code of its own", "GLM-4-0414 9B, which transformers has a class for"),
    "phi3_v": ("pictures or sound", "its text-only sister: Phi-3.5-mini, Phi-4-mini"),
    **dict.fromkeys(("gemma3n", "gemma3n_text", "gemma4", "gemma4_text"), _PER_LAYER),
}  # fmt: skip

# Where the type says nothing: what the reasons say.
_BY_REASON = (
    ("quantised", "its unquantised checkpoint, or a GGUF file of it"),
    ("compressed", "its unquantised checkpoint, or a GGUF file of it"),
    ("mixture of experts", _EXPERTS[1]),
    ("latent attention", _LATENT[1]),
    ("ALiBi", _ALIBI[1]),
    ("encoder-decoder", _ENCODER_DECODER[1]),
    ("multimodal", _PICTURES[1]),
    (
        "its own code",
        "a release of it that transformers has a class for, or a model of Llama's build: Qwen3, "
        "SmolLM2, Llama 3.2",
    ),
    ("rope type", "the checkpoint without its long-context scaling (rope_parameters)"),
    ("activation", "a model of Llama's build: Qwen3, SmolLM2, Llama 3.2"),
    ("linear_attention", _HYBRID[1]),
)
_HEADS = {
    "ForSequenceClassification": ("a head of class scores (a classifier or reranker)", _ENCODER[1]),
    "ForTokenClassification": ("a head of class scores (a tagger)", _ENCODER[1]),
    "ForMaskedLM": _ENCODER,
    "ForQuestionAnswering": ("a head of spans", _ENCODER[1]),
}


def reason_for(model_type: str, architecture: str) -> str:
    """ "; it has ..." for a known kind that is refused, or ""."""
    for ending, (what, _) in _HEADS.items():
        if architecture.endswith(ending):
            return f"; it has {what} (architectures)"
    if model_type in _BY_TYPE:
        return f"; it has {_BY_TYPE[model_type][0]} (model_type {model_type})"
    return ""


def nearest_to(model_type: str, reasons: Sequence[str]) -> str:
    """A sentence: the nearest thing that works."""
    text = "; ".join(reasons)
    if "head of" in text:
        return f"Nearest that works: {_ENCODER[1]}"
    # A kind that is refused in any form comes first: unquantised, it would be refused as well.
    if model_type in _BY_TYPE and model_type not in FAMILIES:
        return f"Nearest that works: {_BY_TYPE[model_type][1]}"
    for words, thing in _BY_REASON[:2]:
        if words in text:
            return f"Nearest that works: {thing}"
    if model_type in _BY_TYPE:
        return f"Nearest that works: {_BY_TYPE[model_type][1]}"
    for words, thing in _BY_REASON[2:]:
        if words in text:
            return f"Nearest that works: {thing}"
    return "Nearest that works: any family of `tailor models list`, such as Qwen3 or Llama 3.2"
