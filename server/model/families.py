"""Model families: everything that differs from Llama, one row a family.

FAMILIES is read by supported.py (what is opened), shape.py (sizes and switches), cpu/weights.py
(the weights' names), loader.py (the text part of multimodal checkpoints) and the command line. A
new family that is made of known differences is one `Family` here and one small model in the tests'
table (docs/adding-a-model.md). This module does not import torch: the command line reads it before
it starts an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

NormPlacement = Literal["before", "after", "both"]
"""Where a layer's norms are: before attention and MLP (Llama), after them, on their results (OLMo
2), or both (Gemma, GLM-4)."""

QkNorm = Literal["none", "head", "head_after_rope", "whole"]
"""RMSNorm on q and k: none, each head (before or after the rotation), or all heads at once."""


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Names of a layer's modules, below `model.layers.N.`; without `.weight`.

    qkv: three modules, or one that holds all rows. gate_up: two, or one, gate first. norms: before
    attention, after attention (on its result), before the MLP, after the MLP; None = not there.
    qk_norms: of q and of k. final_norm is a full name. conv: of a short convolution's layer: the
    projection to B, C and x, the taps, the projection back.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    norms: tuple[str | None, str | None, str | None, str | None] = (
        "input_layernorm",
        None,
        "post_attention_layernorm",
        None,
    )
    qk_norms: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    final_norm: str = "model.norm"
    conv: tuple[str, str, str] = ("conv.in_proj", "conv.conv", "conv.out_proj")


def layer_types(config: Any) -> list[str]:
    """Of each layer, as transformers' config has them; without them all attend to everything."""
    types = getattr(config, "layer_types", None)
    return list(types or ["full_attention"] * int(config.num_hidden_layers))


def _layer_type_windows(config: Any) -> tuple[int, ...]:
    """Windows where layer_types says `sliding_attention`; none without layer_types."""
    window = getattr(config, "sliding_window", None) or 0
    return tuple(window if kind == "sliding_attention" else 0 for kind in layer_types(config))


def _same_window_everywhere(config: Any) -> tuple[int, ...]:
    return (getattr(config, "sliding_window", None) or 0,) * int(config.num_hidden_layers)


@dataclass(frozen=True, slots=True)
class Family:
    """One family: the names of its checkpoints, and its differences from Llama.

    model_type, architecture: of the text model, as transformers has them. known_as: the names that
    people know. wrappers: multimodal classes whose text part it is. real_weights: the trained
    model that our tests run; "" = models of the family's shape with random weights only.

    The other fields are the differences. The callables take the transformers config: rotary: which
    layers rotate q and k. windows: positions a layer sees, 0 = all. keys: config keys that are
    refused elsewhere and computed here. rope_types: beside the usual ones; alpha: "dynamic" with a
    fixed stretch of the base. interleaved: the rotation pairs neighbours (2i, 2i + 1), not halves.
    norm_offset: what is added to a stored norm weight. embedding_scale, attention_scale: config ->
    factor; None = 1 and head_dim ** -0.5. intermediate_size: of the MLP, None = the key of that
    name. ropes_differ: one rope table per layer type. activation: the MLP's, where no key says it.
    layer_types: beside the usual ones. text_defaults: what a multimodal config may leave out.
    """

    model_type: str
    architecture: str
    known_as: tuple[str, ...]
    wrappers: tuple[str, ...] = ()
    real_weights: str = ""
    names: WeightNames = field(default_factory=WeightNames)
    norms: NormPlacement = "before"
    norm_offset: float = 0.0
    qk_norm: QkNorm = "none"
    interleaved: bool = False
    ropes_differ: bool = False
    rotary: Callable[[Any], tuple[bool, ...]] = lambda config: (True,) * config.num_hidden_layers
    windows: Callable[[Any], tuple[int, ...]] = _layer_type_windows
    embedding_scale: Callable[[Any], float] | None = None
    attention_scale: Callable[[Any], float] | None = None
    intermediate_size: Callable[[Any], int] | None = None
    activation: str | None = None
    keys: frozenset[str] = frozenset()
    rope_types: frozenset[str] = frozenset()
    layer_types: frozenset[str] = frozenset()
    text_defaults: Mapping[str, int] = field(default_factory=dict)

    @property
    def rotary_class(self) -> tuple[str, str]:
        """(module, class) of transformers' rotary embedding."""
        package = self.model_type.removesuffix("_text")
        module = f"transformers.models.{package}.modeling_{package}"
        return module, self.architecture.removesuffix("ForCausalLM") + "RotaryEmbedding"


# --- parts that several families share ------------------------------------------------------------

_GEMMA: dict[str, Any] = {
    "names": WeightNames(
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
    ),
    "norms": "both",
    "norm_offset": 1.0,
    "embedding_scale": lambda config: config.hidden_size**0.5,
    "attention_scale": lambda config: config.query_pre_attn_scalar**-0.5,
}
_GRANITE: dict[str, Any] = {
    "embedding_scale": lambda config: config.embedding_multiplier,
    "attention_scale": lambda config: config.attention_multiplier,
}
_AFTER: dict[str, Any] = {
    "names": WeightNames(
        norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
    ),
    "norms": "after",
}


def _lfm2_inner(config: Any) -> int:
    """The MLP's width, by the rule of transformers' Lfm2MLP."""
    size = int(config.intermediate_size)
    if not config.block_auto_adjust_ff_dim:
        return size
    size = int(2 * size / 3)
    if config.block_ffn_dim_multiplier is None:
        return size
    size = int(config.block_ffn_dim_multiplier * size)
    multiple = int(config.block_multiple_of)
    return -(-size // multiple) * multiple


_ROWS = (
    Family(
        "llama",
        "LlamaForCausalLM",
        ("Llama 2, 3, 3.1, 3.2", "SmolLM2"),
        real_weights="SmolLM2 135M",
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        ("Mistral 7B", "Mistral Nemo"),
        windows=_same_window_everywhere,
    ),
    Family("qwen2", "Qwen2ForCausalLM", ("Qwen2, Qwen2.5",)),
    Family("qwen3", "Qwen3ForCausalLM", ("Qwen3",), qk_norm="head"),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        ("Gemma 2",),
        **_GEMMA,
        keys=frozenset({"attn_logit_softcapping", "final_logit_softcapping"}),
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        ("Gemma 3",),
        wrappers=("Gemma3ForConditionalGeneration",),
        real_weights="Gemma 3 270M",
        **_GEMMA,
        qk_norm="head",
        ropes_differ=True,
        text_defaults={"vocab_size": 262208, "max_position_embeddings": 131072},
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        ("SmolLM3",),
        rotary=lambda c: tuple(bool(on) for on in c.no_rope_layers[: c.num_hidden_layers]),
        windows=lambda c: (
            _layer_type_windows(c) if c.use_sliding_window else (0,) * c.num_hidden_layers
        ),
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        ("Phi-3", "Phi-4, Phi-4-mini"),
        names=WeightNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
        windows=_same_window_everywhere,
        keys=frozenset({"partial_rotary_factor"}),
        rope_types=frozenset({"longrope"}),
    ),
    Family(
        "granite",
        "GraniteForCausalLM",
        ("Granite 3.0 to 3.3",),
        **_GRANITE,
    ),
    Family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        ("Granite 4.0 dense",),
        names=WeightNames(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear"),
        intermediate_size=lambda config: int(config.shared_intermediate_size),
        rotary=lambda c: (c.position_embedding_type == "rope",) * c.num_hidden_layers,
        **_GRANITE,
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        ("OLMo 2",),
        **_AFTER,
        qk_norm="whole",
    ),
    Family(
        "olmo3",
        "Olmo3ForCausalLM",
        ("OLMo 3",),
        **_AFTER,
        qk_norm="whole",
        ropes_differ=True,
    ),
    Family(
        "ministral3",
        "Ministral3ForCausalLM",
        ("Ministral 3",),
        wrappers=("Mistral3ForConditionalGeneration",),
        windows=_same_window_everywhere,
        text_defaults={"vocab_size": 131072, "max_position_embeddings": 262144},
    ),
    Family(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        ("ERNIE 4.5 0.3B",),
        interleaved=True,
    ),
    Family(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        ("Hunyuan 0.5B to 7B",),
        names=WeightNames(qk_norms=("self_attn.query_layernorm", "self_attn.key_layernorm")),
        qk_norm="head_after_rope",
        rope_types=frozenset({"alpha"}),
    ),
    Family(
        "exaone4",
        "Exaone4ForCausalLM",
        ("EXAONE 4.0",),
        **_AFTER,
        qk_norm="head",
        rotary=lambda c: tuple(
            c.sliding_window is None or kind == "sliding_attention" for kind in c.layer_types
        ),
    ),
    Family(
        "glm4",
        "Glm4ForCausalLM",
        ("GLM-4-0414 9B",),
        names=WeightNames(
            gate_up=("mlp.gate_up_proj",),
            norms=(
                "input_layernorm",
                "post_self_attn_layernorm",
                "post_attention_layernorm",
                "post_mlp_layernorm",
            ),
        ),
        norms="both",
        interleaved=True,
        keys=frozenset({"partial_rotary_factor"}),
    ),
    Family(
        "lfm2",
        "Lfm2ForCausalLM",
        ("LFM2, LFM2.5 (350M to 2.6B)",),
        names=WeightNames(
            out="self_attn.out_proj",
            gate_up=("feed_forward.w1", "feed_forward.w3"),
            down="feed_forward.w2",
            norms=("operator_norm", None, "ffn_norm", None),
            qk_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
            final_norm="model.embedding_norm",
        ),
        qk_norm="head",
        intermediate_size=_lfm2_inner,
        activation="silu",
        layer_types=frozenset({"conv"}),
    ),
)

FAMILIES: dict[str, Family] = {}
"""By model_type of the text model."""

BY_ARCHITECTURE: dict[str, Family] = {}
"""By class name, wrappers included."""


def register(family: Family) -> None:
    """Add a family. Raises ValueError when one of its names is taken."""
    names = (family.architecture, *family.wrappers)
    if family.model_type in FAMILIES or any(name in BY_ARCHITECTURE for name in names):
        raise ValueError(f"a family {family.model_type} or one of {names} is there already")
    FAMILIES[family.model_type] = family
    BY_ARCHITECTURE.update(dict.fromkeys(names, family))


for _row in _ROWS:
    register(_row)


def told_by(config: Any) -> tuple[list[Any], Any]:
    """(architectures, model_type) of a transformers config or of a config.json; [] for none."""
    if isinstance(config, Mapping):
        names, kind = config.get("architectures"), config.get("model_type")
    else:
        names, kind = getattr(config, "architectures", None), config.model_type
    return names if isinstance(names, list) else [], kind


def family_of(config: Any) -> Family:
    """The family of a transformers config or of a config.json, by its architecture or model_type.

    Raises KeyError when there is none.
    """
    names, kind = told_by(config)
    for name in names:
        if name in BY_ARCHITECTURE:
            return BY_ARCHITECTURE[name]
    return FAMILIES[str(kind)]


def text_values(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json's values of the language model: its own, or those of `text_config` where the
    checkpoint is multimodal, with the family's defaults for what it leaves out."""
    try:
        defaults = family_of(raw).text_defaults
    except KeyError:  # the generic path
        defaults = {}
    text = raw.get("text_config")
    return {**defaults, **(text if isinstance(text, Mapping) else raw)}


def logit_scale(config: Any) -> float:
    """What logits are multiplied by (Cohere), or divided (Granite)."""
    divisor = getattr(config, "logits_scaling", None) or 1.0
    return float(getattr(config, "logit_scale", None) or 1.0) / float(divisor)


def position_limit(values: Any, asked: int | None = None) -> int:
    """The longest sequence that is computed right, in tokens.

    values: a text config, as a mapping or an object. asked: max_model_len, None = not set. With
    `longrope` all positions' angles are other ones beyond the original context, so that is the
    limit, unless more is asked for: then the factors of long sequences are used for all. Raises
    ValueError where the values do not say how many positions there are.
    """

    def get(key: str) -> Any:
        return values.get(key) if isinstance(values, Mapping) else getattr(values, key, None)

    limit: int = get("max_position_embeddings") or get("n_positions") or 0
    if not limit:
        raise ValueError("max_position_embeddings is missing")
    rope = get("rope_parameters") or get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) in ("longrope", "su"):
        original = rope.get("original_max_position_embeddings")
        original = int(original or get("original_max_position_embeddings") or limit)
        if asked is None or asked <= original:
            limit = min(limit, original)
    return limit
