"""Steps of one model with its weights kept in several ways, in alternation: what a form buys.

    python -m loadtest.weights_speed
    python -m loadtest.weights_speed --weights int8,int4 --rows 1,16 --threads 1

One process, one runner a form. A step is one sequence with a history of --keys positions and a
chain of rows, each drawn from the full LM head, as in decoding with drafts (engine/probe.py). In
every round each form runs once, so that a slow minute of the machine hits all. Milliseconds are
medians; ratios are of the same round, float32 over the form (2 = twice as fast), with a bootstrap
interval; `cpu_ms` is the processor time of the step in all threads, which other processes disturb
less; `rows_cost` is a step's over that of one row. In every round memory is read by as many
threads, too, plain sums of as many bytes as the largest form has: `of_reading` is a step's time
over what reading the form's weights takes at that speed. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

from loadtest import machine
from loadtest.memory_speed import MemoryReader
from loadtest.options import emit, refuse_busy_machine
from loadtest.stats import ratio
from loadtest.turns import add_step_options, in_turns
from loadtest.weight_forms import FORMS, forms_of, runner_of
from server.engine.batch import Runner
from server.engine.probe import make_prober
from server.model.cpu.runner import CpuRunner, default_threads

_MEMORY = "memory"  # stands among the forms of a round


def measure(
    runners: dict[str, Runner], rows: int, keys: int, rounds: int, reader: MemoryReader
) -> dict[str, dict[str, Any]]:
    """form -> figures of a step with so many rows. float32 must be among the forms."""
    probes = {form: make_prober(runner) for form, runner in runners.items()}

    def step(form: str) -> tuple[float, float]:
        began = time.process_time()
        wall_s = probes[form](rows, keys)
        return wall_s, time.process_time() - began

    def read() -> tuple[float, float]:
        return reader.read_s(), 0.0

    runs: dict[str, Callable[[], tuple[float, float]]] = {_MEMORY: read}
    runs |= {form: functools.partial(step, form) for form in runners}
    took = in_turns(runs, rounds)
    bytes_s = [reader.num_bytes / wall_s for wall_s, _ in took[_MEMORY]]
    wall = {form: [wall_s for wall_s, _ in times] for form, times in took.items()}
    cpu = {form: [cpu_s for _, cpu_s in times] for form, times in took.items()}
    return {
        form: {
            "ms": round(1e3 * statistics.median(wall[form]), 3),
            "best_ms": round(1e3 * min(wall[form]), 3),
            "cpu_ms": round(1e3 * statistics.median(cpu[form]), 3),
            "speed": ratio(wall["float32"], wall[form]).to_json(),
            "of_reading": _of_reading(runners[form], wall[form], bytes_s),
            "read_gb_s": round(1e-9 * statistics.median(bytes_s), 1),
        }
        for form in runners
    }


def weight_bytes(runner: Runner) -> int:
    """Bytes of weights that a step reads."""
    assert isinstance(runner, CpuRunner)
    return runner.weight_bytes


def _of_reading(runner: Runner, wall: list[float], bytes_s: list[float]) -> float:
    """The median over rounds of a step's time over what reading its weights takes."""
    num_bytes = weight_bytes(runner)
    return round(
        statistics.median(s * each / num_bytes for s, each in zip(wall, bytes_s, strict=True)), 2
    )


def main() -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="example: python -m loadtest.weights_speed --weights int8,int4 --rows 1,16",
    )
    parser.add_argument(
        "--weights",
        default=",".join(FORMS),
        help="forms, float32 is added; form:DTYPE says what K and V are kept as",
    )
    parser.add_argument("--rows", default="1,4,16,32,256")
    add_step_options(parser)
    args = parser.parse_args()
    refuse_busy_machine(args.max_load)
    rows = [int(part) for part in args.rows.split(",")]
    runners = {
        form: runner_of(args.model, form, adapter=None, threads=args.threads, max_rows=max(rows))[0]
        for form in forms_of(args.weights)
    }
    largest = max(weight_bytes(runner) for runner in runners.values())
    reader = MemoryReader(largest, args.threads or default_threads())
    found: dict[str, dict[str, dict[str, Any]]] = {form: {} for form in runners}
    for num in rows:
        for form, figures in measure(runners, num, args.keys, args.rounds, reader).items():
            first = found[form].get(str(rows[0]), figures)
            figures["rows_cost"] = round(figures["ms"] / first["ms"], 2)
            found[form][str(num)] = figures
            print(f"{num:4d} rows  {form:12s} {figures}", flush=True)
    for runner in runners.values():
        runner.close()
    reader.close()
    summary = {
        "model": args.model,
        "threads": args.threads,
        "keys": args.keys,
        "rounds": args.rounds,
        "steps": found,
        "machine": machine.describe(),
    }
    emit(summary, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
