"""JSON that others wrote: whatever is wrong with it, its depth too, is a ValueError.

Of the standard library alone: vocab_store and all of the server read their JSON files with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def parsed(text: str | bytes) -> Any:
    """The value. Raises ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def object_in(file: Path) -> dict[str, Any]:
    """The object in a file; {} where the file is not there or holds something else."""
    try:
        found = parsed(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
