"""Compiled functions: compiled anew where their sources have changed, found by every clone, and
called with what their annotations say, by door.c and by its form in Python alike."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

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
FILES["late"] = FILES["alone"].replace("alone", "late")
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


class Compiled(NamedTuple):
    """A folder of code that has the door and all rooms' but the late one's, and what the compiler
    answered about that."""

    code: Path
    answer: str

    def compiler(self, answer: str = "") -> str:
        """Words that put in the compiler's place what copies the code of `alone`, and answers."""
        (made,) = self.code.glob("rooms.alone-*.o")
        return (
            "import shutil, subprocess; run = subprocess.run\n"
            "def compiled(command, **how):\n"
            "    if command[2:3] != ['drafters.ahead']: return run(command, **how)\n"
            "    module, path = how['input'].split()\n"
            f"    print('made', shutil.copy({str(made)!r}, path))\n"
            f"    return subprocess.CompletedProcess(command, 0, {answer!r} or module, '')\n"
            "subprocess.run = compiled\n"
        )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """One process compiles it: numba takes longer to start than these functions to compile. The
    late room is edited behind the question for its code."""
    folder = tmp_path_factory.mktemp("compiled")
    late = _write(folder) / "late.py"
    words = (
        "from pathlib import Path; from drafters import ahead\n"
        "from drafters.library import object_path; from drafters.target import chosen\n"
        "target, names = chosen().base, ['outer', 'alone', 'kinds', 'late']\n"
        "names = [f'rooms.{name}' for name in names]\n"
        "lines = [f'{name} {object_path(name, target)}\\n' for name in names]\n"
        f"Path({str(late)!r}).write_text(Path({str(late)!r}).read_text().replace('-x', 'x'))\n"
        "sys.argv, sys.stdin = ['ahead', target], lines; ahead.main()"
    )
    *told, answer = _run(folder, folder / "code", words).splitlines()
    assert told == ["rooms.outer", "rooms.alone", "rooms.kinds"]
    return Compiled(folder / "code", answer)


@pytest.mark.slow
def test_a_change_in_a_called_file_or_a_constant_compiles_what_depends_on_it(
    compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms, code = _write(tmp_path), shutil.copytree(compiled.code, tmp_path / "code")
    package = ModuleType("rooms")
    package.__path__ = [str(rooms)]
    monkeypatch.setitem(sys.modules, "rooms", package)

    def missing() -> list[str]:
        """What would be compiled if all were called."""
        library.read_again()
        paths = [library.object_path(f"rooms.{name}", chosen().base) for name in ("outer", "alone")]
        return [path.name.partition("-")[0] for path in paths if not (code / path.name).exists()]

    def change(name: str, old: str, new: str) -> None:
        path = rooms / f"{name}.py"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    change("words", "import outer", "import outer  # nothing is compiled from here")
    assert missing() == []
    change("inner", "x + 1", "x + 2")
    assert missing() == ["rooms.outer"]
    change("inner", "x + 2", "x + 1")
    assert missing() == []
    change("numbers", "10", "20")
    assert missing() == ["rooms.outer"]
    assert _run(tmp_path, code) == "40 -1"
    assert missing() == []
    assert [len([*code.glob(f"rooms.{name}-*.o")]) for name in ("outer", "alone")] == [2, 1]


def test_code_of_an_edited_source_is_not_kept_under_the_digest_of_the_source_before(
    compiled: Compiled, tmp_path: Path
) -> None:
    assert "rooms.late: its sources were edited while they were compiled" in compiled.answer
    assert not [*compiled.code.glob("rooms.late-*.o")]
    _write(tmp_path)
    words = f"{compiled.compiler(compiled.answer)}try: {ALONE.partition('; ')[0]}; alone(1)\n"
    told = _run(tmp_path, tmp_path / "code", f"{words}except RuntimeError as error: print(error)")
    assert f"compiling it failed: {compiled.answer}" in told


def test_damaged_code_is_made_anew(compiled: Compiled, tmp_path: Path) -> None:
    """One bit that is another ends the process, or gives another result."""
    _write(tmp_path)
    code = shutil.copytree(compiled.code, tmp_path / "code")
    paths = [*code.glob("rooms.alone-*.o"), *code.glob("door-*.so")]
    whole = {path: path.read_bytes() for path in paths}
    assert len(whole) == 2
    for path, good in whole.items():
        assert library.is_whole(path)
        for damaged in (good[: len(good) // 2], good[:100] + bytes([good[100] ^ 1]) + good[101:]):
            path.write_bytes(damaged)
            assert not library.is_whole(path) and not path.exists()
            path.write_bytes(damaged)
    told = _run(tmp_path, code, compiled.compiler() + ALONE).splitlines()
    assert told == [f"made {paths[0]}", "-1"]
    for path, good in whole.items():
        assert library.is_whole(path) and path.stat().st_size == len(good)


@pytest.mark.parametrize("is_full", [False, True], ids=["no folder", "full disk"])
def test_code_that_cannot_be_kept_is_made_once_for_the_process(
    compiled: Compiled, tmp_path: Path, is_full: bool
) -> None:
    _write(tmp_path)
    code, spare = tmp_path / "code", tmp_path / "spare"
    spare.mkdir()
    if not is_full:
        code.write_text("in the way")
    words = (
        f"{compiled.compiler()}"
        f"import tempfile; tempfile.tempdir, make = {str(spare)!r}, tempfile.TemporaryFile\n"
        "def full(dir):\n"
        f"    if str(dir) != {str(code)!r}: return make(dir=dir)\n"
        "    raise OSError(28, 'No space left on device')\n"
        f"tempfile.TemporaryFile = full\n{ALONE}"
    )
    first, *others = _run(tmp_path, code, words).splitlines()
    assert first.startswith(f"made {spare}") and others == ["-1"]
    assert not [*tmp_path.glob("code/*.o")] and not [*spare.iterdir()]


def test_a_build_that_is_killed_leaves_nothing_in_the_folder_of_code(tmp_path: Path) -> None:
    build = (
        "import sys; from pathlib import Path; from drafters.library import build\n"
        "build([sys.executable, '-c', 'import os; os.kill(os.getppid(), 9)'], Path('code', 'x.so'))"
    )
    (tmp_path / "code").mkdir()
    environment = {**library.own_path(), "TMPDIR": str(tmp_path)}
    words = [sys.executable, "-c", build]
    assert subprocess.run(words, cwd=tmp_path, env=environment).returncode == -9
    assert not [*tmp_path.glob("code/*")]


def test_the_folder_of_code_may_be_of_the_user_s_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILOR_CODE_DIR", "~/code")
    assert library.code_folder() == Path.home() / "code"


def test_clones_share_code_and_old_versions_of_it_are_removed(
    compiled: Compiled, tmp_path: Path
) -> None:
    """The last eight versions stay, and any that was used this week."""
    code = shutil.copytree(compiled.code, tmp_path / "code")
    (used,) = code.glob("rooms.alone-*.o")
    olds = [code / f"rooms.alone-{chosen().base}-{age_days:024}.o" for age_days in range(12)]
    for age_days, old in enumerate(olds):
        old.touch()
        then = time.time() - 86_400 * age_days
        os.utime(old, (then, then))
    _write(tmp_path / "clone")
    assert _run(tmp_path / "clone", code, ALONE) == "-1"
    assert {*code.glob("rooms.alone-*.o")} == {used, *olds[:7]}


def test_what_is_given_taken_and_raised_is_what_annotations_say(
    compiled: Compiled, tmp_path: Path
) -> None:
    _write(tmp_path)
    told = _run(
        tmp_path, compiled.code,
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


@pytest.mark.parametrize("kind", dict.fromkeys((Door, SlowDoor)))
def test_a_door_takes_what_its_layout_says_and_nothing_else(kind: Any) -> None:
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

    folders = {path.parent for top in ("drafters", "server") for path in (ROOT / top).rglob("*.py")}
    packages = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert {package for package in packages if library.modules_of(package)} == set(PACKAGES)
