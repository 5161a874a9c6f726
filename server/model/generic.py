"""The generic path: dense decoders that transformers has and that are no row of families.py.

transformers' own forward computes them, with our attention registered in its attention interface.
So a new model works on the day that transformers has it; it is slower than a family, whose whole
step is one compiled call. This module reads the config.json and the source of transformers' class;
the model is tried at load (cpu/generic/soundness.py). It does not import torch: the API process and
the command line use it, too.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from server.model.families import BY_ARCHITECTURE, FAMILIES, told_by

IMPLEMENTATION = "transformers"
"""The implementation of a model of the generic path, in GET /v1/models and the log."""

ALLOWED_KEYS = frozenset(
    {"attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "partial_rotary_factor",
     "rope_interleaved"}
)  # fmt: skip
"""Keys that are refused where we compute the model; here transformers' own module does, or the
attention function is told of them."""

_ENDINGS = ("ForCausalLM", "LMHeadModel")
RECURRENT = frozenset({"qwen3_5_text"})
"""Types whose recurrent layers (gated delta nets) are computed."""

WRAPPERS = {"Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM"}
"""Multimodal classes, and the class of their text part, which is opened alone."""


@cache
def source_of(model_type: str) -> str:
    """transformers' source of a type of models, "" where it has none. It is not imported: that
    takes torch."""
    if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", model_type):
        return ""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        return ""
    name = model_type.replace("-", "_").removesuffix("_text")
    file = Path(found.origin).parent / "models" / name / f"modeling_{name}.py"
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def is_generic(raw: Mapping[str, Any] | Any) -> bool:
    """Whether a config.json or a transformers config is one that the generic path may try: no
    family of ours, and transformers' class calls its attention interface."""
    names, kind = told_by(raw)
    if len(names) != 1 or not isinstance(names[0], str):
        return False
    name = WRAPPERS.get(names[0], names[0])
    if name != names[0] and isinstance(raw, Mapping):
        text = raw.get("text_config")
        kind = text.get("model_type") if isinstance(text, Mapping) else None
    if name in BY_ARCHITECTURE or kind in FAMILIES or not name.endswith(_ENDINGS):
        return False
    source = source_of(str(kind))
    return (
        f"\nclass {name}(" in source
        and ("_supports_attention_backend = True" in source or kind in RECURRENT)
        and "ALL_ATTENTION_FUNCTIONS" in source
    )
