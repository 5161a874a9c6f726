"""Compiled functions: compiled anew where their sources have changed, found by every clone, and
called with what their annotations say, by door.c and by its form in Python alike."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafters import library
from drafters.library import Door
from drafters.slow_door import Door as SlowDoor
from drafters.target import chosen
from tests.processes import run_python

ROOT = Path(__file__).parents[2]
FILES = {
    "__init__": "",
    "inner": """
from drafters.jit import compiled
@compiled
def inner(x): return x + 1
""",
    "numbers": "STEP = 10\n",
    "outer": """
from drafters.jit import compiled, entry
from rooms.inner import (
    inner,
)
from rooms import numbers
STEP = numbers.STEP
@entry
@compiled
def outer(x: int) -> int: return inner(x) * STEP
""",
    "kinds": """
from typing import NamedTuple
import numpy as np
from drafters.arrays import Float32x2, Int32
from drafters.jit import allocating, compiled, entry
class Pair(NamedTuple):
    left: int
    right: np.float32
@entry
@allocating
def everything(
    pair: Pair, told: tuple[bool, Float32x2], ids: Int32
) -> tuple[int, tuple[float, bool], np.float32]:
    sums = np.zeros(ids.shape[0])
    for i in range(ids.shape[0]):
        sums[i] = told[1][1, i] * pair.left
        ids[i] += pair.left
    return ids.shape[0], (sums.sum(), not told[0]), pair.right
@entry
@compiled
def fails(x: int) -> None:
    if x > 2:
        raise IndexError("x is too large")
""",
    "alone": """
from drafters.jit import compiled, entry
@entry
@compiled
def alone(x: int) -> int: return -x
""",
    "words": "from rooms.outer import outer\n",
}
RUN = "from rooms.words import outer; from rooms.alone import alone; print(outer(1), alone(1))"
ALONE = "from rooms.alone import alone; print(alone(1))"
"""What is compiled in no time."""


def _write(folder: Path) -> Path:
    rooms = folder / "rooms"
    rooms.mkdir(parents=True)
    for name, text in FILES.items():
        (rooms / f"{name}.py").write_text(text.lstrip())
    return rooms


def _run(folder: Path, code: Path, words: str = RUN) -> str:
    """What another process prints that finds the rooms in a folder."""
    words = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]; {words}"
    return run_python("-B", "-c", words, cwd=folder, TAILOR_CODE_DIR=str(code)).strip()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of code that has all rooms' and the door."""
    folder = tmp_path_factory.mktemp("compiled")
    _write(folder)
    assert _run(folder, folder / "code", f"{RUN}; import rooms.kinds as k; k.fails(1)") == "20 -1"
    return folder / "code"


@pytest.mark.slow
def test_a_change_in_a_called_file_or_a_constant_compiles_what_depends_on_it(
    compiled: Path, tmp_path: Path
) -> None:
    rooms, code = _write(tmp_path), shutil.copytree(compiled, tmp_path / "code")

    def objects() -> dict[str, int]:
        names = [path.name.partition("-")[0] for path in code.glob("*.o")]
        return {name: names.count(f"rooms.{name}") for name in ("outer", "alone")}

    def change(name: str, old: str, new: str) -> None:
        path = rooms / f"{name}.py"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    assert objects() == {"outer": 1, "alone": 1}
    change("words", "import outer", "import outer  # nothing is compiled from here")
    assert _run(tmp_path, code) == "20 -1"
    assert objects() == {"outer": 1, "alone": 1}
    change("inner", "x + 1", "x + 2")
    assert _run(tmp_path, code) == "30 -1"
    assert objects() == {"outer": 2, "alone": 1}
    change("numbers", "10", "20")
    assert _run(tmp_path, code) == "60 -1"
    assert objects() == {"outer": 3, "alone": 1}


@pytest.mark.slow
def test_code_of_an_edited_source_is_not_kept_under_the_digest_of_the_source_before(
    tmp_path: Path,
) -> None:
    rooms, code = _write(tmp_path), tmp_path / "code"
    inner = rooms / "inner.py"
    words = (
        "from pathlib import Path; from drafters import library; "
        "library.object_path('rooms.outer', 'native'); "
        f"path = Path({str(inner)!r}); path.write_text(path.read_text().replace('+ 1', '+ 2'))\n"
        "from rooms.words import outer\n"
        "try: outer(1)\n"
        "except RuntimeError as error: print(error)"
    )
    told = _run(tmp_path, code, f"import os; os.environ['TAILOR_CPU'] = 'native'\n{words}")
    assert "rooms.outer: its sources were edited while they were compiled" in told
    assert not list(code.glob("rooms.*"))


@pytest.mark.slow
def test_damaged_code_is_made_anew(compiled: Path, tmp_path: Path) -> None:
    """One bit that is another ends the process, or gives another result."""
    _write(tmp_path)
    code = shutil.copytree(compiled, tmp_path / "code")
    paths = [*code.glob("rooms.alone-*.o"), *code.glob("door-*.so")]
    whole = {path: path.read_bytes() for path in paths}
    assert len(whole) == 2
    for damage in (
        lambda good: good[: len(good) // 2],
        lambda good: good[:100] + bytes([good[100] ^ 1]) + good[101:],
    ):
        for path, good in whole.items():
            path.write_bytes(damage(good))
        assert _run(tmp_path, code, ALONE) == "-1"
        assert {path: path.stat().st_size for path in whole} == {
            path: len(good) for path, good in whole.items()
        }


@pytest.mark.slow
def test_code_that_cannot_be_kept_is_made_for_the_process(tmp_path: Path) -> None:
    _write(tmp_path)
    code = tmp_path / "code"
    code.write_text("in the way")
    (tmp_path / "spare").mkdir()
    words = f"import tempfile; tempfile.tempdir = {str(tmp_path / 'spare')!r}; {ALONE}"
    assert _run(tmp_path, code, words) == "-1"
    assert not list((tmp_path / "spare").iterdir())


@pytest.mark.slow
def test_on_a_full_disk_a_module_is_compiled_once(tmp_path: Path) -> None:
    _write(tmp_path)
    code, spare = tmp_path / "code", tmp_path / "spare"
    spare.mkdir()
    words = (
        f"import subprocess, tempfile; tempfile.tempdir = {str(spare)!r}; run = subprocess.run\n"
        "make = tempfile.TemporaryFile\n"
        "def compiled(command, **how):\n"
        "    print(*command[2:3])\n"
        "    return run(command, **how)\n"
        "def full(dir):\n"
        f"    if str(dir) != {str(code)!r}: return make(dir=dir)\n"
        "    raise OSError(28, 'No space left on device')\n"
        f"subprocess.run, tempfile.TemporaryFile = compiled, full\n{ALONE}"
    )
    told = _run(tmp_path, code, words).splitlines()
    assert [line for line in told if line in ("drafters.ahead", "-1")] == ["drafters.ahead", "-1"]
    assert not [path for path in code.iterdir() if path.suffix == ".o"]
    assert not list(spare.iterdir())


@pytest.mark.slow
def test_clones_share_code_and_old_versions_of_it_are_removed(tmp_path: Path) -> None:
    """The last eight versions stay, and any that was used this week."""
    code = tmp_path / "code"
    code.mkdir()
    target = chosen().base
    for age_days in range(12):
        old = code / f"rooms.alone-{target}-{age_days:024}.o"
        old.touch()
        then = time.time() - 86_400 * age_days
        os.utime(old, (then, then))
    for clone in ("a", "b"):
        _write(tmp_path / clone)
        assert _run(tmp_path / clone, code, ALONE) == "-1"
    left = sorted(path.name for path in code.glob("rooms.alone-*.o"))
    assert len(left) == 1 + 7
    assert left[:7] == [f"rooms.alone-{target}-{age:024}.o" for age in range(7)]


@pytest.mark.slow
def test_what_is_given_taken_and_raised_is_what_annotations_say(
    compiled: Path, tmp_path: Path
) -> None:
    _write(tmp_path)
    told = _run(
        tmp_path, compiled,
        "import numpy as np; from rooms.kinds import everything, fails; "
        "ids = np.array([4, 5], np.int32); floats = np.ones((2, 2), np.float32); "
        "print(everything((3, np.float32(0.1)), (True, floats), ids), ids); fails(2)\n"
        "try: fails(3)\n"
        "except IndexError as error: print(error)\n"
        "try: everything((3, 0.1), (True, floats.T), ids)\n"
        "except TypeError as error: print(error)\n"
        "print('numba' in sys.modules)",
    )  # fmt: skip
    lines = told.splitlines()
    assert lines[0] == "(2, (6.0, False), 0.10000000149011612) [7 8]"
    assert lines[1] == "x is too large"
    assert lines[2].startswith("everything, argument 2: an array of 2 axes, kind f of 4 bytes")
    assert lines[3] == "False"


def _doors() -> list[Any]:
    return list(dict.fromkeys((Door, SlowDoor)))


@pytest.mark.parametrize("kind", _doors())
def test_a_door_takes_what_its_layout_says_and_nothing_else(kind: Any) -> None:
    import ctypes

    seen: list[tuple[int, ...]] = []

    @ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.POINTER(ctypes.c_int64), ctypes.c_void_p)
    def called(words: Any, _: Any) -> int:
        seen.append(tuple(words[:7]))
        return 0

    def load(door: Any) -> None:
        address = ctypes.cast(called, ctypes.c_void_p).value
        door.load(address, b"i(\x02fb" + b"Af\x04\x02", b"")

    def fail(name: str, code: int) -> None:
        raise AssertionError((name, code))

    door = kind("told", load, fail)
    floats = np.zeros((2, 3), np.float32)
    assert door(np.int32(-7), (2.5, True), floats) is None
    half = door.bound(-7)
    half.bound((2.5, True))(floats)
    half((2.5, True), floats)
    half.bound((2.5, 1), floats)()
    two_and_a_half = int(np.float64(2.5).view(np.int64))
    assert seen == [(-7, two_and_a_half, 1, floats.ctypes.data, 2, 3, seen[0][6])] * 4 or {
        one[:6] for one in seen
    } == {(-7, two_and_a_half, 1, floats.ctypes.data, 2, 3)}
    wrong: list[tuple[Any, ...]] = [
        (1.5, (2.5, True), floats), (1, (2.5,), floats), (1, [2.5, True], floats),
        (1, (2.5, True), floats.T), (1, (2.5, True), floats.astype(np.float64)),
        (1, (2.5, True), floats[0]), (1, (2.5, True), 3), (1, (2.5, True)),
        (1, (2.5, True), floats, 4),
    ]  # fmt: skip
    for arguments in wrong:
        with pytest.raises(TypeError, match="told"):
            door(*arguments)
    assert len(seen) == 4


def test_every_package_with_compiled_functions_is_compiled_ahead() -> None:
    from server.machine_code import PACKAGES

    found = set()
    for top in ("drafters", "server"):
        for path in (ROOT / top).rglob("*.py"):
            package = ".".join(path.parent.relative_to(ROOT).parts)
            if f"{package}.{path.stem}" in library.modules_of(package):
                found.add(package)
    assert found == set(PACKAGES)
