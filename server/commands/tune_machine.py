"""Checks of the machine and of the model's files before a measurement is used."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.commands.tune_material import BUSY
from server.errors import ConfigError

if TYPE_CHECKING:
    from drafters.replay import Recording
    from server.engine.batch import Runner
    from server.engine.engine import Engine
    from server.engine.forecast import ServedBy
    from server.engine.step_times import CostTable

_NUM_MEASURED = 3
_NUM_REPLAYED = 8  # recordings


class OtherProcesses:
    """What other processes use of the machine's cores, since this was made."""

    def __init__(self) -> None:
        self._began = self._spent()

    @staticmethod
    def _spent() -> tuple[float, float]:
        """(seconds of the clock times cores, seconds that the cores worked for others)."""
        import psutil

        machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
        idle = machine.idle + getattr(machine, "iowait", 0.0)
        # A guest's time is in user and nice already.
        twice = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)
        return sum(machine) - twice, sum(machine) - twice - idle - own.user - own.system

    def share(self) -> float:
        """Of all cores, 0..1."""
        (all_s, busy_s), (before_all_s, before_s) = self._spent(), self._began
        return min(1.0, max(0.0, (busy_s - before_s) / max(all_s - before_all_s, 1e-9)))


def refuse_if_busy(share: float) -> None:
    """Raise ConfigError when others use more than BUSY of the machine."""
    if share > BUSY:
        raise ConfigError(
            f"others use {share:.0%} of this machine: what is measured now would decide wrongly, "
            "so nothing is decided and nothing is written. Try again when it is idle, or with "
            "--even-if-busy, which leaves mode `exact` out"
        )


def head_seconds(runner: Runner) -> tuple[float, float]:
    """server.engine.probe.measure_head, several times; the median of each figure."""
    from server.engine.probe import measure_head

    measured = [measure_head(runner) for _ in range(_NUM_MEASURED)]
    first, further = (
        sorted(figures)[_NUM_MEASURED // 2] for figures in zip(*measured, strict=True)
    )
    return first, further


def cost_now(engine: Engine) -> CostTable:
    """The cost of this engine's steps, measured anew: what a start has measured may be of a day
    on which the machine was busy, and steps since then refresh the sizes alone that they had."""
    from server.engine.probe import load_or_measure

    known = engine.gain.cost
    assert known is not None  # build_engine measures it
    table = load_or_measure(engine.runner, None, max_rows=max(128, known.max_rows))
    engine.pool.drop_cache()  # the steps that were measured wrote over its blocks
    return table


def served_by_engine(engine: Engine, cost: CostTable, recordings: Sequence[Recording]) -> ServedBy:
    """What a forecast asks of this engine, measured on the task's prompts where it must be.

    recordings: of the task. What asking for drafts takes between model steps is measured beside
    what it takes in a replay of some of them.
    """
    from drafters import make_drafter
    from server.engine.forecast import ServedBy, forecast
    from server.engine.host_cost import measure_host
    from server.engine.probe import measure_undrawn

    host = measure_host(engine, [r.prompt_ids for r in recordings], "auto")
    served_by = ServedBy(
        cost,
        host,
        measure_undrawn(engine.runner),
        engine.info.vocab_size,
        engine.settings.max_num_batched_tokens,
        engine.info.block_size if engine.settings.prefix_cache else 0,
    )
    engine.pool.drop_cache()  # the steps that were measured wrote over its blocks
    some = [r for r in recordings if r.prompt_ids and r.output_ids][:_NUM_REPLAYED]
    if not (some and host.ask_s):
        return served_by
    warm_s = forecast(make_drafter("auto"), some, served_by, max_draft_tokens=8).ask_s
    return replace(served_by, cold=max(1.0, host.ask_s / warm_s)) if warm_s else served_by


def head_share(folder: Path) -> float | None:
    """The LM head's share of the weights that a step of one row reads; None where a file does not
    say. The embedding's rows are looked up and count nothing; a tied head is the embedding's table.
    """
    from server.model.gguf_folder import gguf_of

    gguf = gguf_of(folder)
    if gguf is not None:
        return _file_head_share(gguf)
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


def _file_head_share(gguf: Path) -> float:
    """The same of a GGUF that is served as it is."""
    from server.model.gguf_index import GgufIndex

    sizes = {t.name: t.data.nbytes for t in GgufIndex(gguf).tensors.values() if len(t.shape) == 2}
    table = sizes.pop("token_embd.weight")
    head = sizes.pop("output.weight", table)
    return head / (head + sum(sizes.values()))


def _header(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, dtype and shape) of each tensor of a safetensors file."""
    with file.open("rb") as opened:
        (size,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(size))
    for name, tensor in header.items():
        if name != "__metadata__":
            yield name, tensor
