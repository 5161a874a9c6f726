"""Neither a start nor a request needs a compiler where machine code is there: numba's import alone
is 64 MiB and half a second, and every client of an engine would wait for what it compiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from server.machine_code import make_ready


def test_every_kind_of_request_is_served_without_a_compiler(
    tmp_path: Path, tiny_folder: Path
) -> None:
    make_ready()
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "TAILOR_CACHE_DIR": str(tmp_path / "cache")}
    words = ["-m", "tests.setup.first_requests", str(tiny_folder), "float32", "int8"]
    done = subprocess.run(
        [sys.executable, *words], cwd=root, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == []
