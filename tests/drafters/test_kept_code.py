"""Machine code that numba kept is not taken once anything that is compiled into it has changed."""

from __future__ import annotations

import shutil
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


def test_code_of_old_versions_is_removed(tmp_path: Path) -> None:
    """A few versions stay, for processes that still run; files outside such folders go."""
    folder = tmp_path / "rooms"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text.lstrip())
    kept = folder / "__pycache__"
    kept.mkdir()
    (kept / "outer.outer-1.py311.nbi").write_bytes(b"of an old version")
    (kept / "words.pyc").write_bytes(b"not ours")
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {root!r}]{RUN}"
    code = code.replace(", sum(outer.stats.cache_hits.values())", "")
    for step in range(6):
        (folder / "numbers.py").write_text(f"STEP = {step}\n")
        done = subprocess.run(
            [sys.executable, "-B", "-c", code], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.stdout.strip() == str(2 * step), done.stderr
    folders = [path for path in kept.iterdir() if path.is_dir()]
    assert len(folders) == 4
    assert all(list(path.glob("*.nbc")) for path in folders)
    assert [path.name for path in kept.iterdir() if path.is_file()] == ["words.pyc"]


EVERY = """
import gc, importlib, pkgutil, sys
import drafters, server.engine, server.model.cpu
for package in (drafters, server.engine, server.model.cpu):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
from numba.core.dispatcher import Dispatcher
from drafters import jit
found = [
    f for f in gc.get_objects()
    if isinstance(f, Dispatcher) and f.py_func.__module__.split(".")[0] in ("drafters", "server")
]
assert len(found) > 100, len(found)
print([
    f"{f.py_func.__module__}.{f.py_func.__qualname__}" for f in found
    if not isinstance(getattr(getattr(f._cache, "_impl", None), "locator", None), jit._Fresh)
])
"""


def test_every_compiled_function_is_kept_with_the_digest_of_its_sources() -> None:
    """One that is not would keep old machine code after an upgrade of what it calls."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", EVERY], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_what_another_package_calls_of_drafters_is_in_its_digest(tmp_path: Path) -> None:
    """Whatever else the process has imported: two processes must not throw out each other's."""
    root = Path(__file__).parents[2]
    for name in ("drafters", "server"):
        shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    code = "import sys; sys.path.insert(0, '.'); from drafters import jit; from pathlib import Path"
    code += "; import {before}server.engine.text_cutter as t"
    code += "; print(jit.__file__, jit._digest(Path(t.__file__).parent))"

    def digest(before: str = "") -> str:
        done = subprocess.run(
            [sys.executable, "-c", code.format(before=before)],
            cwd=tmp_path, capture_output=True, text=True, env={"PATH": "/usr/bin"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert str(tmp_path) in done.stdout
        return done.stdout

    first = digest()
    assert digest("server.model.cpu.linear, ") == first
    for name in ("drafters/corpus.py", "server/engine/engine.py"):
        with (tmp_path / name).open("a") as file:
            file.write("# nothing is compiled from here\n")
    assert digest() == first
    with (tmp_path / "drafters/sorted_keys.py").open("a") as file:
        file.write("# called by text_cutter's compiled code\n")
    assert digest() != first
