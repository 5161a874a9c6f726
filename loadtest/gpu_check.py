"""One command for a machine with a GPU: is the CUDA path right there, and how fast is a step?

    python loadtest/gpu_check.py --out results.jsonl [--device cuda:0] [--dtype bfloat16]

Its parts run one after the other, each in a process of its own with a time limit, what says most
first (loadtest/gpu/parts.py): versions, bandwidth and launch costs; logprobs against transformers
and graphs against the plain path, in bfloat16; our decoder against transformers' modules, and its
few launches beside more; top-p, sampled rows in a graph, adapters and weights in 8 and 4 bits; a
profile; step tables of nine public models' shapes with random weights, decode and trees, plain and
in graphs, beside the memory floor; transformers' own generate, prompt lookup and continuous
batching; the engine with drafts off and on; prompt chunks beside torch's own attention and
FlashInfer's; the reserve beside KV; vocabulary slices. tests/gpu runs last (needs pytest). Every
result is in --out as soon as it is there, so that a part that hangs, or a run that is cut off,
loses nothing.

Needs torch >= 2.11, transformers, numpy, numba (Python 3.11 or newer) and this repository; none of
the web stack. The last line is JSON. Exits 1 when something was wrong, failed or ran out of time, 2
without a CUDA device. `--device cpu --tiny` is a dry run of the whole plan on a machine without
one. It was written on such a machine.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from loadtest.gpu.parts import PARTS, PLAN, Planned  # noqa: E402


class Results:
    """Results as they come: a line of JSON each, on the disk before the next part begins. What a
    run that is cut off has found is then in the file. path: None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("a", encoding="utf-8")

    def add(self, line: dict[str, Any]) -> None:
        """Append one result."""
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            self._file.close()


def run_part(command: Sequence[str], limit_s: float) -> Iterable[dict[str, Any] | str]:
    """The lines that a process prints, those of JSON as objects, as they come; then {"exit": its
    code} or {"exit": None, "after_s": limit_s} when it was ended with all that it had started."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    ended = threading.Event()

    def end() -> None:
        ended.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, end)
    timer.start()
    try:
        assert process.stdout is not None
        with process.stdout:
            for text in process.stdout:
                yield _parsed(text.rstrip("\n"))
        code = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            end()
            process.wait()
    yield {"exit": None, "after_s": limit_s} if ended.is_set() else {"exit": code}


def _parsed(text: str) -> dict[str, Any] | str:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def tests_command() -> list[str]:
    """pytest over tests/gpu, on several processes where xdist is there."""
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-W", "default"]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    return [*command, "-p", "no:cacheprovider", "tests/gpu"]


def described(line: dict[str, Any]) -> str:
    """A result in one line for a reader."""
    shown = {k: v for k, v in line.items() if k not in ("longest", "part")}
    return "  " + "  ".join(f"{k} {v}" for k, v in shown.items())


def run_plan(
    plan: Sequence[tuple[str, list[str], float]], results: Results, total_s: float
) -> list[dict[str, Any]]:
    """Run (name, command, limit) one after the other; what became of each. A part that begins late
    has what is left of total_s."""
    began = time.monotonic()
    outcomes: list[dict[str, Any]] = []
    for name, command, limit_s in plan:
        left_s = total_s - (time.monotonic() - began)
        outcome: dict[str, Any] = {"name": name, "lines": 0, "wrong": 0}
        outcomes.append(outcome)
        if left_s < 1.0:
            outcome["exit"] = "no time left"
            continue
        print(f"{name}:", flush=True)
        for line in run_part(command, min(limit_s, left_s)):
            if isinstance(line, str):
                print(f"  | {line}", flush=True)
            elif "exit" in line:
                outcome |= line
            else:
                outcome["lines"] += 1
                outcome["wrong"] += "error" in line or not line.get("ok", True)
                results.add(line)
                print(described(line), flush=True)
        results.add({"part": "outcome", **outcome})
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default=None, choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--parts", help="only these, of " + ", ".join([*PARTS, "tests"]))
    parser.add_argument("--tiny", action="store_true", help="every part once, on a tiny shape")
    parser.add_argument("--out", type=Path, help="append each result to this file as it comes")
    parser.add_argument("--limit", type=float, default=570.0, metavar="S", help="of all parts")
    parser.add_argument("--tests-limit", type=float, default=240.0, metavar="S")
    options = parser.parse_args(arguments)
    chosen = options.parts.split(",") if options.parts else [*PARTS, "tests"]
    if unknown := [name for name in chosen if name not in (*PARTS, "tests")]:
        parser.error(f"no part {unknown[0]!r}: choose from {', '.join([*PARTS, 'tests'])}")
    on_gpu = torch.device(options.device).type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("There is no CUDA device here (torch.cuda.is_available() is False).")
        print(json.dumps({"check": "gpu", "ok": False, "error": "no CUDA device"}))
        return 2
    planned: Sequence[Planned] = PLAN
    if options.tiny:
        tiny = {"vocabulary": "tiny-gemma"}
        planned = [Planned(part, tiny.get(part, "tiny"), 120.0) for part in PARTS]
    words = ["--device", options.device, "--repeats", str(options.repeats)]
    words += ["--dtype", options.dtype or ("bfloat16" if on_gpu else "float32")]
    base = [sys.executable, "-m", "loadtest.gpu.parts"]
    plan = [
        (f"{p.part} {p.shape}", [*base, p.part, "--shape", p.shape, *words], p.limit_s)
        for p in planned
        if p.part in chosen
    ]
    if on_gpu and "tests" in chosen:  # last: compiling may take the time there is
        plan.append(("tests", tests_command(), options.tests_limit))
    results = Results(options.out)
    try:
        outcomes = run_plan(plan, results, options.limit)
    finally:
        results.close()
    fine = all(o["exit"] == 0 and not o["wrong"] for o in outcomes)
    print(json.dumps({"check": "gpu", "parts": outcomes, "ok": fine}))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
