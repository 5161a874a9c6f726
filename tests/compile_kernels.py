"""Compiles what numba compiles, once, before the workers of a parallel run start.

numba keeps its machine code beside the source files (or in NUMBA_CACHE_DIR). Workers that begin
with an empty cache would each compile the same kernels, for about a minute a worker.

    python -m tests.compile_kernels tune
    python -m tests.compile_kernels steps

`tune` makes a task for a tiny model with `tailor tasks tune`: that runs the CPU runner, every
drafter, a corpus and a vocabulary profile. `steps` draws, runs the product of every form, and makes
steps with integer weights and small KV caches. They run at the same time, on a core each.
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
PARTS = {"drafters": "drafters", "server.model.cpu": "server/model/cpu"}


def fingerprint() -> str:
    """Changes with whatever makes the kept machine code useless: sources, numba, Python, place."""
    import numba

    from drafters.jit import sources

    digest = hashlib.sha256(f"{sys.version} {numba.__version__} {ROOT}".encode())
    digest.update(os.environ.get("NUMBA_CACHE_DIR", "").encode())
    for package, folder in PARTS.items():
        for text in sources(package, ROOT / folder).values():
            digest.update(text)
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()


def compile_kernels() -> None:
    """In processes of their own, so that nothing stays here. A failure is the tests' to tell."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.compile_kernels", part],
            cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for part in MADE
    ]  # fmt: skip
    for process in processes:
        try:
            process.wait(900)
        finally:
            process.kill()


def _steps() -> int:
    """Steps of the weight kinds and KV types that a task's float32 does not run, and draws."""
    from server.engine.probe import make_prober
    from server.model.cpu.integers.forms import FORMS
    from server.model.cpu.integers.kernels import kernel_address
    from server.types import SamplingParams
    from tests.model import families
    from tests.model.batches import BatchBuilder, Pages, draw_params
    from tests.model.cpu_models import cpu_runner

    for form in FORMS:
        kernel_address(form)
    module = families.build("llama")
    for weights, kv_dtype in (("int8", "float32"), ("float32", "float16"), ("float32", "int8")):
        runner = cpu_runner(module, dtype=weights, kv_dtype=kv_dtype)
        make_prober(runner)(4, 8)
        builder = BatchBuilder()
        row = builder.add_rows(Pages(4).sequence(1), [3], 0)[0]
        builder.draw(row, builder.add_params(draw_params(SamplingParams(top_p=0.9, seed=1))))
        builder.score(row, 4, 2)
        runner.launch(builder.build())
        runner.wait()
        runner.close()
    return 0


def _tune() -> int:
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
        return tailor([*words, "--limit", "20"])


MADE = {"steps": _steps, "tune": _tune}

if __name__ == "__main__":
    sys.exit(MADE[sys.argv[1]]())
