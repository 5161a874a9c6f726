"""Machine code that numba kept is not taken once anything that is compiled into it has changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FILES = {
    "__init__": """
from pathlib import Path
from drafters.jit import keep_while_unchanged
keep_while_unchanged(__name__, Path(__file__).parent)
""",
    "inner": """
from drafters.jit import compiled
@compiled
def inner(x): return x + 1
""",
    "numbers": "STEP = 10\n",
    "outer": """
from drafters.jit import compiled
from rooms.inner import (
    inner,
)
from rooms import numbers
STEP = numbers.STEP
@compiled
def outer(x): return inner(x) * STEP
""",
    "words": "from rooms.outer import outer\n",
}
RUN = """
from rooms.words import outer
print(outer(1), sum(outer.stats.cache_hits.values()))
"""


def test_a_change_in_a_called_file_or_a_constant_compiles_anew(tmp_path: Path) -> None:
    folder = tmp_path / "rooms"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text.lstrip())

    def run() -> str:
        """What another process draws, and how many functions it took from what was kept."""
        root = str(Path(__file__).parents[2])
        code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {root!r}]{RUN}"
        done = subprocess.run(
            [sys.executable, "-B", "-c", code], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def change(name: str, old: str, new: str) -> None:
        path = folder / f"{name}.py"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    assert run() == "20 0"
    change("words", "import outer", "import outer  # nothing is compiled from here")
    assert run() == "20 1"
    change("inner", "x + 1", "x + 2")
    assert run() == "30 0"
    change("numbers", "10", "20")
    assert run() == "60 0"
    assert run() == "60 1"
