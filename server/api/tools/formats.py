r"""How each family of templates writes tool calls.

hermes   <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>, again and again (Qwen,
         Hermes; known by `<tool_call>` in the template)
mistral  [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]
llama3   {"name": ..., "parameters": {...}} as the whole output, maybe after <|python_tag|>,
         more of them behind semicolons (known by `ipython` and `parameters`)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

ToolFormat = Literal["hermes", "mistral", "llama3"]

MARKERS: Mapping[ToolFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]",),
    "llama3": ("<|python_tag|>",),
}
"""Tokens that a reader must see even where special tokens have no text."""

ARGUMENTS_KEY: Mapping[ToolFormat, str] = {
    "hermes": "arguments",
    "mistral": "arguments",
    "llama3": "parameters",
}


def format_of(template: str) -> ToolFormat | None:
    """How a template's model writes calls, or None for a way that cannot be read."""
    if "<function=" in template or "[ARGS]" in template:  # Qwen3-Coder; Mistral from v11 on
        return None
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "ipython" in template and "parameters" in template:
        return "llama3"
    return None
