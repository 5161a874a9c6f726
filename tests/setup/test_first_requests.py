"""Neither a start nor a request needs a compiler where machine code is there: numba's import alone
is 64 MiB and half a second, and every client of an engine would wait for what it compiles."""

from __future__ import annotations

import json
from pathlib import Path

from server.machine_code import make_ready
from server.model.loader import open_model
from tests.processes import run_python


def test_every_kind_of_request_is_served_without_a_compiler(
    own_cache: Path, tiny_folder: Path
) -> None:
    open_model(tiny_folder, remembers=True).ropes(256)  # transformers has been asked, here
    make_ready()
    words = ("-m", "tests.setup.first_requests", tiny_folder, "float32", "int8")
    told = run_python(*words)
    assert json.loads(told.splitlines()[-1]) == []
