"""What `tailor tasks tune` measures of the machine and of the model: who else uses the one, what
the LM head takes of a step, and the forms that the weights can be kept in.

Of each form that a CPU can serve without fetching or converting anything it tells quality and speed
on the task's own data: the outputs, read by the model after their prompts, and a step of one and of
sixteen rows. It does not choose the form that is served: the user does (`weights`).
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.commands.tune_data import BUSY
from server.errors import ConfigError

if TYPE_CHECKING:
    from server.commands.options import ModelOptions
    from server.commands.tune_data import Example, Progress
    from server.engine.batch import Runner

NUM_TEXTS = 24
LONGEST = 512
LIMIT_S = 90.0
"""No further form is begun after so many seconds."""

_NUM_MEASURED = 3
_STEPS = 9
_FLOATS = ("float32", "bfloat16", "int8", "int8-blocks", "int4")


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


# --- the forms of the weights --------------------------------------------------------------------


def forms_of(model: ModelOptions) -> list[tuple[str, Path]]:
    """(form, folder) of what can be served from what is here; [] on other devices than a CPU."""
    from server.model.catalog import cached_folder
    from server.model.gguf_folder import cached_file_folder, gguf_of

    if model.device != "cpu":
        return []
    floats = cached_folder(model.model)
    found = [] if floats is None or gguf_of(floats) else [(form, floats) for form in _FLOATS]
    file = cached_file_folder(model.model) if model.adapter is None else None
    if file is not None and gguf_of(file) is not None:
        found.insert(0, ("file", file))
    return found


def compare_forms(
    model: ModelOptions, examples: Sequence[Example], progress: Progress
) -> dict[str, dict[str, float]]:
    """form -> perplexity of the data's outputs, share of them that greedy decoding gives whole,
    milliseconds of a step of 1 and of 16 rows. {} where there is no second form to compare.

    A form that cannot be run is left out.
    """
    from server.errors import TailorError
    from server.model.scoring import Text

    texts = [
        Text((*prompt, *output), len(prompt))
        for prompt, output in examples
        if prompt and output and len(prompt) + len(output) <= LONGEST
    ][-NUM_TEXTS:]
    forms = forms_of(model)
    if len(forms) < 2 or not texts:
        return {}
    began, found = time.monotonic(), {}
    for number, (form, folder) in enumerate(forms):
        if time.monotonic() - began > LIMIT_S:
            break
        progress("forms of the weights", number, len(forms))
        try:
            found[form] = _measure(model, form, folder, texts)
        except (TailorError, ValueError) as error:
            logging.getLogger(__name__).warning("weights %s: %s", form, error)
    progress("forms of the weights", len(forms), len(forms))
    return found


def _measure(
    model: ModelOptions, form: str, folder: Path, texts: Sequence[Any]
) -> dict[str, float]:
    from server.engine.probe import make_prober
    from server.model.build import RunnerSpec, build_runner
    from server.model.scoring import compare, score
    from server.types import EngineSizes

    sizes = EngineSizes(max_num_seqs=1, max_num_batched_tokens=LONGEST, kv_bytes=256 << 20)
    spec = RunnerSpec(
        name=form,
        folder=str(folder),
        adapter=model.adapter,
        weights=form,
        sizes=sizes,
        threads=model.threads,
    )
    runner = build_runner(spec)
    try:
        scores = score(runner, list(texts))
        probe = make_prober(runner)
        steps: dict[int, list[float]] = {1: [], 16: []}
        for _ in range(_STEPS):
            for rows, taken in steps.items():
                taken.append(1e3 * probe(rows, 128))
    finally:
        runner.close()
    figures = compare(scores, scores)
    return {
        "perplexity": figures["perplexity"],
        "exact": figures["exact"],
        "step_ms": round(statistics.median(steps[1]), 2),
        "step_16_rows_ms": round(statistics.median(steps[16]), 2),
    }


def form_lines(found: dict[str, dict[str, float]], served: str) -> list[str]:
    """The table as lines for people to read, with the served form marked."""
    if not found:
        return []
    lines = [
        "Weights on this data (`weights`): perplexity, outputs that are whole, ms a step of 1 and "
        "16 rows:"
    ]
    for form, figures in found.items():
        lines.append(
            f"     {form:11} {figures['perplexity']:9.3f} {figures['exact']:6.1%} "
            f"{figures['step_ms']:7.1f} {figures['step_16_rows_ms']:7.1f}"
            + ("  as tuned" if form == served else "")
        )
    return lines
