"""Fields that routes call by different names, by their keys (see server.errors.FieldKey)."""

from __future__ import annotations

from server.errors import FieldKey

PROMPT = FieldKey("prompt")
MAX_TOKENS = FieldKey("max_tokens")
LOGPROBS = FieldKey("logprobs")
GRAMMAR = FieldKey("structured_outputs")
"""The field that brought the grammar."""
