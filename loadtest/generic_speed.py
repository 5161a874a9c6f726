"""What a row of families.py is worth: one model by our own decoder and by the generic path.

    python -m loadtest.generic_speed --model smollm2-135m

Both are built in this process on the CPU, in float32, and make the same steps in turn, so that a
slow moment of the machine hits both: a decode step behind a short and a long history, drafts of 8
and of 64 rows. Milliseconds are the lower quartile of a case; the ratio is the median of what
stands next to each other, with its 95 % interval. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loadtest import machine
from loadtest.answers import open_files
from loadtest.options import add_result_options, emit, refuse_busy_machine
from loadtest.stats import ratio
from server.engine.batch import Runner
from server.engine.probe import make_prober
from server.model import build
from server.model.loader import open_model
from server.types import EngineSizes

CASES = {
    "decode, 64 keys": (1, 64),
    "decode, 1,000 keys": (1, 1000),
    "8 rows, 64 keys": (8, 64),
    "64 rows, 64 keys": (64, 64),
}
"""What is told -> rows of the step, keys before them."""


def runners(folder: str, threads: int | None) -> dict[str, Runner]:
    """The family's runner and the generic one, over the same folder.

    Raises UnsupportedModelError for a model that one of them does not compute.
    """
    sizes = EngineSizes(max_num_seqs=4, max_num_batched_tokens=64, kv_bytes=128 << 20)
    spec = build.RunnerSpec(
        "own", folder, sizes, dtype="float32", weights="float32", threads=threads
    )
    return {
        "own": build.build_runner(spec),
        "generic": build._build_generic_runner(spec, open_model(folder), "float32"),
    }


def measure(made: Mapping[str, Runner], rounds: int) -> dict[str, Any]:
    """Figures by case: {"own_ms", "generic_ms", "ratio"}; ratio: generic / own."""
    probers = {name: make_prober(runner) for name, runner in made.items()}
    found: dict[str, Any] = {}
    for case, (num_rows, num_keys) in CASES.items():
        room = min(runner.info.max_model_len for runner in made.values())
        num_keys = min(num_keys, room - num_rows)
        taken: dict[str, list[float]] = {name: [] for name in made}
        for nth in range(rounds + 2):
            for name, probe in probers.items():
                seconds = probe(num_rows, num_keys)
                if nth >= 2:  # the first ones compile, and fill caches
                    taken[name].append(seconds)
        lower = {f"{k}_ms": 1000 * float(np.quantile(v, 0.25)) for k, v in taken.items()}
        found[case] = lower | {"ratio": ratio(taken["generic"], taken["own"]).to_json()}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True, help="of the cache, or a folder; a family's")
    parser.add_argument("--rounds", type=int, default=40, help="repetitions of each case")
    parser.add_argument("--threads", type=int, help="default: the cores of this process")
    add_result_options(parser)
    options = parser.parse_args(arguments)
    refuse_busy_machine(options.max_load)
    made = runners(str(open_files(options.model).folder), options.threads)
    try:
        found = measure(made, options.rounds)
    finally:
        for runner in made.values():
            runner.close()
    for case, figures in found.items():
        times = f"{figures['own_ms']:.2f} ms, generic {figures['generic_ms']:.2f} ms"
        print(f"{case}: own {times}", file=sys.stderr)
    model = Path(options.model).name
    summary = {"tool": "generic_speed", "model": model, "found": found}
    emit(summary | {"machine": machine.describe()}, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
