"""What tuning asks of the machine and of the model's files before it believes a measurement."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from server.engine.batch import Runner

_NUM_MEASURED = 3


def busy_share(seconds: float = 0.5) -> float:
    """Share of all cores that is in use, 0..1. Asked while this process only waits."""
    import psutil

    return psutil.cpu_percent(interval=seconds) / 100.0


def head_seconds(runner: Runner) -> tuple[float, float]:
    """server.engine.probe.measure_head, several times; the median of each figure."""
    from server.engine.probe import measure_head

    measured = [measure_head(runner) for _ in range(_NUM_MEASURED)]
    first, further = (
        sorted(figures)[_NUM_MEASURED // 2] for figures in zip(*measured, strict=True)
    )
    return first, further


def head_share(folder: Path) -> float | None:
    """The LM head's share of the weights that a step of one row reads; None where a file does not
    say. The embedding's rows are looked up and count nothing; a tied head is the embedding's table.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config") or config
        head = int(text["vocab_size"]) * int(text["hidden_size"])
        body = sum(
            math.prod(tensor["shape"])
            for file in folder.glob("*.safetensors")
            for name, tensor in _header(file)
            if "embed_tokens" not in name and not name.startswith("lm_head")
        )
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None
    return head / (head + body) if body > 0 else None


def _header(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, dtype and shape) of each tensor of a safetensors file."""
    with file.open("rb") as opened:
        (size,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(size))
    for name, tensor in header.items():
        if name != "__metadata__":
            yield name, tensor
