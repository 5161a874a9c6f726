"""Compiles what numba compiles, once, before the workers of a parallel run start.

numba keeps its machine code beside the source files (or in NUMBA_CACHE_DIR). Workers that begin
with an empty cache would each compile the same kernels, for about a minute a worker.

    python -m tests.compile_kernels

makes a task for a tiny model with `tailor tasks tune`: that runs the CPU runner, every drafter, a
corpus and a vocabulary profile. Then steps with integer weights, the product of every form, and
steps with small KV caches.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = ("drafters", "vocab_store", "server/model/cpu")


def fingerprint() -> str:
    """Changes with whatever makes the kept machine code useless: sources, numba, Python, place."""
    import numba

    digest = hashlib.sha256(f"{sys.version} {numba.__version__} {ROOT}".encode())
    digest.update(os.environ.get("NUMBA_CACHE_DIR", "").encode())
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def compile_kernels() -> None:
    """In a process of its own, so that nothing stays here. A failure is the tests' to tell.

    What was compiled before goes: numba sees that a function's own file has changed, and not that
    one which it calls has, so that old code would run on inside new.
    """
    for part in PARTS:
        for path in (ROOT / part).rglob("__pycache__/*.nb[ic]"):
            path.unlink(missing_ok=True)
    subprocess.run(
        [sys.executable, "-m", "tests.compile_kernels"],
        cwd=ROOT, capture_output=True, timeout=900, check=False,
    )  # fmt: skip


def _compile_steps() -> None:
    """Steps of the weight kinds and KV types that a task's float32 did not run."""
    from server.engine.probe import make_prober
    from server.model.cpu.integers.forms import FORMS
    from server.model.cpu.integers.kernels import kernel_address
    from tests.model import families
    from tests.model.cpu_models import cpu_runner

    for form in FORMS:
        kernel_address(form)
    module = families.build("llama")
    for weights, kv_dtype in (("int8", "float32"), ("float32", "float16"), ("float32", "int8")):
        runner = cpu_runner(module, dtype=weights, kv_dtype=kv_dtype)
        make_prober(runner)(4, 8)
        runner.close()


def main() -> int:
    from server.commands.cli import main as tailor
    from tests.model.tiny_models import save_tiny

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["TAILOR_CACHE_DIR"] = str(folder / "cache")
        (folder / "model").mkdir()
        save_tiny(folder / "model", "llama")
        data = folder / "train.jsonl"
        line = json.dumps({"prompt": "Town 1:", "completion": "kind: town, river: yes"}) + "\n"
        data.write_text(line * 40)
        words = ["tasks", "tune", "--model", str(folder / "model"), "--data", str(data)]
        words += ["--name", "town", "-o", str(folder / "town.yaml"), "--max-tokens", "16"]
        words += ["--even-if-busy"]
        status = tailor([*words, "--limit", "20"])
    _compile_steps()
    return status


if __name__ == "__main__":
    sys.exit(main())
