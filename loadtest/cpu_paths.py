"""Does a model say the same on another CPU? Its answers from other instruction sets, bit for bit.

    python -m loadtest.cpu_paths --model MODEL --data DIR --weights file,int8,int4

An engine of its own process answers test prompts of DIR (several at once, greedy and at temperature
0.8 with a seed) with the kernels that are chosen here, and again with what numba compiles for a CPU
of --paths (avx2: no AVX-512, no VNNI; avx-vnni: no AVX-512). Ids, finish reasons and the logprob of
every token must be equal to the last bit. The first run of a path compiles everything for it, a
minute or two, into --code. Integer forms only: float32 products add in the order of their vectors.
Exits 0 when all are equal, 1 on a difference. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from loadtest import machine
from loadtest.answers import answer_all, make_engine, open_files
from loadtest.options import emit
from loadtest.prompts import spread_examples
from server.types import Request, SamplingParams

_AVX2 = "+avx,+avx2,+fma,+sse4.2,+sse4.1,+ssse3,+bmi,+bmi2,+f16c,+popcnt"
PATHS = {
    "avx2": ("haswell", _AVX2),
    "avx-vnni": ("haswell", f"{_AVX2},+avxvnni"),
    "avx512": ("skylake-avx512", f"{_AVX2},+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512cd"),
}
"""Name -> what numba is told to compile for."""


def digests(model: str, weights: str, data: Path, num: int, tokens: int) -> dict[str, Any]:
    """The kernel, and a digest of each answer by request id."""
    files = open_files(model, weights=weights)
    examples = spread_examples(data, num, max_prompt_chars=1000)
    engine = make_engine(files, {}, at_once=8, weights=weights)
    requests = [
        Request(
            request_id=f"{i}/{temperature}",
            task=example.task,
            model=engine.info.name,
            prompt_ids=tuple(files.tokenizer.encode(example.prompt).ids),
            sampling=SamplingParams(
                temperature=temperature, max_tokens=tokens, seed=i, num_logprobs=1
            ),
        )
        for i, example in enumerate(examples)
        for temperature in (0.0, 0.8)
    ]
    try:
        answers = answer_all(engine, requests, weights, Console(stderr=True))
    finally:
        engine.close()
    said = {
        name: hashlib.sha256(repr((a.ids, a.finish_reason, a.logprobs)).encode()).hexdigest()[:16]
        for name, a in answers.items()
    }
    num_tokens = sum(len(a.ids) for a in answers.values())
    return {"kernel": engine.info.kernel, "num_tokens": num_tokens, "answers": said}


def _run(options: argparse.Namespace, weights: str, path: str | None) -> dict[str, Any]:
    """digests() in a process that compiles for a path; None: for this CPU."""
    env = dict(os.environ)
    if path is not None:
        cpu, features = PATHS[path]
        code = options.code.resolve() / path
        code.mkdir(parents=True, exist_ok=True)
        env |= {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
        env["NUMBA_CACHE_DIR"] = str(code)
    command = [
        sys.executable, "-m", "loadtest.cpu_paths", "--child", "--model", options.model,
        "--data", str(options.data), "--weights", weights, "--num", str(options.num),
        "--tokens", str(options.tokens),
    ]  # fmt: skip
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(here: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, Any]:
    """Counts of two paths' answers."""
    a, b = here["answers"], there["answers"]
    return {
        "kernels": [here["kernel"], there["kernel"]],
        "num_tokens": here["num_tokens"],
        "num_compared": len(a),
        "different": sorted(name for name in a if a[name] != b.get(name)),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True, help="of the cache, or a folder")
    parser.add_argument("--data", type=Path, required=True, help="folder of task data sets")
    parser.add_argument("--weights", default="file,int8,int4", help="forms, with commas")
    parser.add_argument("--paths", default="avx2", help=f"of {', '.join(PATHS)}, with commas")
    parser.add_argument("--num", type=int, default=10, help="prompts")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--code", type=Path, default=Path("loadtest/results/code"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="append the JSON line to this file too")
    options = parser.parse_args(arguments)
    forms, paths = options.weights.split(","), options.paths.split(",")
    if unknown := sorted(set(paths) - set(PATHS)):
        parser.error(f"no path {unknown[0]!r}; there are {', '.join(PATHS)}")
    if options.child:
        given = (options.model, forms[0], options.data, options.num, options.tokens)
        print(json.dumps(digests(*given)))
        return 0
    found: dict[str, dict[str, Any]] = {}
    for weights in forms:
        here = _run(options, weights, None)
        for path in paths:
            name = f"{weights}, {path}"
            found[name] = compare(here, _run(options, weights, path))
            print(f"{name}: {found[name]}", file=sys.stderr)
    summary = {
        "tool": "cpu_paths",
        "model": Path(options.model).name,
        "found": found,
        "machine": machine.describe(),
    }
    emit(summary, options.json)
    return 1 if any(one["different"] for one in found.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
