"""Fields of other servers' bodies that are none of ours: what says nothing, and what to send here.

llama.cpp's, SGLang's and older vLLM's clients send their whole settings with every request. The
rule of all bodies holds for those fields, too: one that has the value that applies anyway is
accepted, any other is refused by its name, with the field that does the same here if there is one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from typing import Any

from server.errors import UnsupportedFieldError, echoed

APPLIES_ANYWAY: Mapping[str, Any] = {
    # llama.cpp: samplers that are off, and what changes no text
    "cache_prompt": True,
    "dry_multiplier": 0,
    "dynatemp_range": 0,
    "id_slot": -1,
    "min_keep": 0,
    "mirostat": 0,
    "n_probs": 0,
    "post_sampling_probs": False,
    "repeat_penalty": 1,
    "return_progress": False,
    "return_tokens": False,
    "tfs_z": 1,
    "timings_per_token": False,
    "top_n_sigma": -1,
    "typical_p": 1,
    "xtc_probability": 0,
    # SGLang
    "no_stop_trim": False,
    # vLLM
    "include_reasoning": True,
    "logits_processors": [],
    "vllm_xargs": {},
}
"""Field -> the value that is what happens without it. A boolean equals no number."""

_LARK = "structured_outputs.grammar (Lark)"
_SCHEMA = "structured_outputs.json or response_format"
OURS: Mapping[str, str] = {
    # llama.cpp
    "content": "prompt",
    "grammar": _LARK,
    "json_schema": _SCHEMA,
    "n_predict": "max_tokens",
    "n_probs": "logprobs",
    "repeat_penalty": "repetition_penalty",
    "return_tokens": "return_token_ids",
    # SGLang, Text Generation Inference
    "ebnf": _LARK,
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "regex": "structured_outputs.regex",
    "text": "prompt",
    # vLLM, and OpenAI's beside it
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": _LARK,
    "guided_json": _SCHEMA,
    "guided_regex": "structured_outputs.regex",
    "guided_whitespace_pattern": "structured_outputs.whitespace_pattern",
    "thinking": "chat_template_kwargs.enable_thinking",
}
"""Their fields -> ours."""
_ELSEWHERE = {
    "request_id": "Send the header x-request-id.",
    "sampling_params": "Send its members themselves.",
}


def without_neutral(body: dict[str, Any], known: Container[str]) -> dict[str, Any]:
    """The body without peers' fields that say what happens anyway.

    known: the fields of the route. Raises UnsupportedFieldError for one that says something else.
    """
    theirs = [name for name in body if name in APPLIES_ANYWAY and name not in known]
    for name in theirs:
        value, neutral = body[name], APPLIES_ANYWAY[name]
        same = value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        if value is not None and not same:
            raise UnsupportedFieldError(
                f"{name}: only {json.dumps(neutral)} is taken, which is what happens anyway; got "
                f"{echoed(value)}.{advice(name, known)}",
                param=name,
            )
    return {name: value for name, value in body.items() if name not in theirs} if theirs else body


def advice(name: str, known: Container[str]) -> str:
    """A sentence about what to send to a route of these fields instead, "" where none is known."""
    ours = OURS.get(name, "")
    root = re.match(r"[a-z_]*", ours)
    if root is not None and root[0] in known:
        return f" Send {ours}."
    return f" {_ELSEWHERE[name]}" if name in _ELSEWHERE and "temperature" in known else ""


def in_schema(schema: dict[str, Any]) -> None:
    """Tell a generation's JSON schema of peers' fields, and that `model` may be absent."""
    schema["required"].remove("model")
    for name, neutral in APPLIES_ANYWAY.items():
        told = {"const": neutral, "description": "of another server: changes nothing"}
        schema["properties"].setdefault(name, told)
