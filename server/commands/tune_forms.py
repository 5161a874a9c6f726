"""The forms that a model's weights can be kept in on a CPU, on a task's own data.

It gives quality and speed of each form that this machine can make without fetching or converting
anything: the data's outputs, read by the model after their prompts, and a step of one and of
sixteen rows. It does not choose the form that is served: the user does (`weights`).
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from server.commands.options import ModelOptions
    from server.commands.tune_material import Example, Progress

NUM_TEXTS = 24
LONGEST = 512
LIMIT_S = 90.0
"""No further form is begun after so many seconds."""

_STEPS = 9
_FLOATS = ("float32", "bfloat16", "int8", "int8-blocks", "int4")


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
