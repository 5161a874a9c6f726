"""One command for a machine with a GPU: is the CUDA path right there, and how fast is a step?

    python loadtest/gpu_check.py [--out gpu_check.json] [--device cuda:0] [--dtype bfloat16]

The verdict takes at most nine minutes, what says most first: versions, bandwidth and launch costs;
a slice of a real model against texts that were recorded on a CPU (loadtest/gpu/correct.py; carry
the folder build/gpu-slice); logprobs against transformers and graphs against the plain path, in
bfloat16; adapters and weights in 8 bits; the memory of steps; the part of tests/gpu that is marked
`verdict` (needs pytest); steps and vocabulary slices beside the memory floor. Parts share a
process, which imports once; one that dies or hangs is ended, and the parts behind it go on in
another. Every result is in --out, a whole file at any time, as soon as it is known.

Needs torch >= 2.11, transformers, numpy, numba (Python 3.11 or newer) and this repository; none of
the web stack, and no network. The last line is JSON. Exits 1 when something was wrong, failed or
ran out of time, 2 without a CUDA device. `--device cpu --tiny` is a dry run of the whole plan on a
machine without one. It was written on such a machine.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from drafters.atomic_file import replacing  # noqa: E402
from loadtest.gpu.parts import VERDICT, Planned  # noqa: E402

TOTAL_S = 540.0
TESTS_S = 150.0


class Results:
    """Results as they come, in one JSON file that is whole at any time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines: list[dict[str, Any]] = []

    def add(self, line: dict[str, Any]) -> None:
        """Append one result."""
        self.lines.append(line)
        text = "[\n" + ",\n".join(map(json.dumps, self.lines)) + "\n]\n"
        with replacing(self._path) as file:
            file.write(text.encode())


class Watched:
    """A process and the lines that it prints; it is ended, with all that it had started, when
    `limit_s` have passed since `restart`."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        self._timer: threading.Timer | None = None
        self.was_ended = False

    def restart(self, limit_s: float) -> None:
        """Time for the next part."""
        self._stop()
        self._timer = threading.Timer(max(0.1, limit_s), self._end)
        self._timer.start()

    def lines(self) -> Iterator[str]:
        """As they come."""
        assert self._process.stdout is not None
        with self._process.stdout:
            for text in self._process.stdout:
                yield text.rstrip("\n")

    def close(self) -> int:
        """Its exit code; it is ended if it has not ended by itself."""
        self._stop()
        if self._process.stdout is not None and not self._process.stdout.closed:
            self._end()
        return self._process.wait()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        self.was_ended = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def run_parts(
    plan: Sequence[Planned], base: Sequence[str], results: Results, end: float
) -> list[dict[str, Any]]:
    """Run parts in as few processes as they need; what became of each. base: the command, to which
    parts are added. end: time.monotonic() by which all must be over."""
    left, outcomes = list(plan), list[dict[str, Any]]()
    while left and time.monotonic() < end:
        process = Watched([*base, *(part.word for part in left)])
        outcome: dict[str, Any] = {}

        def begin(process: Watched = process) -> dict[str, Any]:
            process.restart(min(left[0].limit_s, end - time.monotonic()))
            print(f"{left[0].word}:", flush=True)
            return {"name": left[0].word, "lines": 0, "wrong": 0, "exit": "ended early"}

        outcome = begin()
        try:
            for text in process.lines():
                line = None
                with contextlib.suppress(ValueError):
                    line = json.loads(text)
                if not isinstance(line, dict):
                    print(f"  | {text}", flush=True)
                elif "done" in line:
                    outcome |= {"exit": 0, "s": line["s"]}
                    outcomes.append(outcome)
                    results.add({"part": "outcome", **outcome})
                    del left[0]
                    if not left:
                        break
                    outcome = begin()
                else:
                    outcome["lines"] += 1
                    outcome["wrong"] += "error" in line or not line.get("ok", True)
                    results.add(line)
                    print(" ", *(f" {k} {v}" for k, v in line.items() if k != "part"), flush=True)
        finally:
            code = process.close()
        if left:  # the process died or was ended in this part
            outcome["exit"] = f"no end after {left[0].limit_s} s" if process.was_ended else code
            outcomes.append(outcome)
            results.add({"part": "outcome", **outcome})
            del left[0]
    for part in left:
        outcomes.append({"name": part.word, "lines": 0, "wrong": 0, "exit": "no time left"})
    return outcomes


def run_tests(results: Results, end: float) -> dict[str, Any]:
    """pytest over what is marked in tests/gpu, on several processes where xdist is there."""
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-W", "default"]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    process = Watched([*command, "-p", "no:cacheprovider", "-m", "verdict", "tests/gpu"])
    process.restart(min(TESTS_S, end - time.monotonic()))
    print("tests:", flush=True)
    began, tail = time.monotonic(), list[str]()
    try:
        for text in process.lines():
            print(f"  | {text}", flush=True)
            tail = [*tail[-40:], text]
    finally:
        code = process.close()
    outcome = {
        "name": "tests", "lines": 0, "wrong": 0, "s": round(time.monotonic() - began, 2),
        "exit": f"no end after {TESTS_S} s" if process.was_ended else code,
    }  # fmt: skip
    results.add({"part": "outcome", **outcome, "tail": tail})
    return outcome


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default=None, choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--parts", help="only these, separated by commas")
    parser.add_argument("--tiny", action="store_true", help="every part once, on a tiny shape")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--limit", type=float, default=TOTAL_S, metavar="S", help="of all parts")
    options = parser.parse_args(arguments)
    planned: Sequence[Planned] = VERDICT
    known = [*dict.fromkeys(p.part for p in VERDICT), "tests"]
    chosen = options.parts.split(",") if options.parts else known
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"no part {unknown[0]!r}: choose from {', '.join(known)}")
    on_gpu = torch.device(options.device).type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("There is no CUDA device here (torch.cuda.is_available() is False).")
        print(json.dumps({"check": "gpu", "ok": False, "error": "no CUDA device"}))
        return 2
    if options.tiny:
        tiny = {"vocabulary": "tiny-gemma"}
        parts = dict.fromkeys(p.part for p in planned)
        planned = [Planned(part, tiny.get(part, "tiny"), 120.0) for part in parts]
    planned = [p for p in planned if p.part in chosen]
    base = [sys.executable, "-m", "loadtest.gpu.parts", "--device", options.device]
    base += ["--repeats", str(options.repeats)]
    base += ["--dtype", options.dtype or ("bfloat16" if on_gpu else "float32")]
    results, end = Results(options.out), time.monotonic() + options.limit
    timed = [p for p in planned if p.part in ("steps", "vocabulary")]
    outcomes = run_parts([p for p in planned if p not in timed], base, results, end)
    if on_gpu and "tests" in chosen:
        outcomes.append(run_tests(results, end))
    outcomes += run_parts(timed, base, results, end)
    fine = all(o["exit"] == 0 and not o["wrong"] for o in outcomes)
    results.add({"check": "gpu", "parts": outcomes, "ok": fine})
    print(json.dumps(results.lines[-1]))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
