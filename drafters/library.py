"""Where the machine code of compiled functions lies, and how it is loaded.

Code is taken
  1. from the package: `_code/TARGET.so` beside a package's modules, as a wheel brings it;
  2. from the user's cache folder, by the digest of all sources that it is made of, so that all
     clones, environments and versions of one user share it: a whole package's library, which
     `python -m server.machine_code` makes, or else
  3. one module's, which is compiled when the first of its functions is called. So a function
     that was changed costs the compilation of the modules that it is compiled into.
The cache folder is TAILOR_CODE_DIR, else `tailor/machine-code` in the user's cache folder; code
that was not used for a while is removed from it. door.c, by which Python calls, comes the same way.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import logging
import os
import pickle
import platform
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafters.atomic_file import EVERYBODY, replacing
from drafters.slow_door import Door as SlowDoor
from drafters.target import NATIVE, TARGETS, chosen

_log = logging.getLogger(__name__)

# What finds and loads code changes none, nor does what this package names for those who draft: all
# code would be made anew where a drafter's options change.
_NO_CODE = {__name__, "drafters", "drafters.slow_door"}

_OWN = Path(__file__).parent
_ZIG = {"x86_64": "x86_64-linux-gnu.2.17", "aarch64": "aarch64-linux-gnu.2.17"}


_IMPORT = re.compile(rb"^ *(?:from ([\w.]+) import (\([^)]*\)|.*)|import ([\w.]+))", re.MULTILINE)

_OBJECT_BYTES = 2 << 20  # no module's code is larger
_NUM_KEPT = 8  # versions of a file of code that stay, whatever their age
_KEPT_S = 7 * 86_400.0  # and any that was used in the last seconds


def code_folder() -> Path:
    """Where machine code is kept. Not created."""
    given = os.environ.get("TAILOR_CODE_DIR")
    if given:
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")  # platformdirs is not the drafters' to import
    return (Path(cache) if cache else Path.home() / ".cache") / "tailor" / "machine-code"


def _folder_of(package: str) -> Path:
    """Where a package lies, or a module but for its suffix."""
    top, *rest = package.split(".")
    return Path(next(iter(importlib.import_module(top).__path__))).joinpath(*rest)


@functools.cache
def _text_of(module: str) -> bytes | None:
    """A module's source; None for one that is not there."""
    path = _folder_of(module)
    for found in (path.with_suffix(".py"), path / "__init__.py"):
        with contextlib.suppress(OSError):
            return found.read_bytes()
    return None


@functools.cache
def _imported(module: str) -> frozenset[str]:
    """The modules of the same topmost package, or of this one, that a module may import: `from a
    import b` is a, and a.b."""
    tops = {module.split(".")[0], "drafters"}
    found = set()
    for from_, names, plain in _IMPORT.findall(_text_of(module) or b""):
        name = (from_ or plain).decode()
        if name.split(".")[0] in tops:
            found.add(name)
            found.update(f"{name}.{word.decode()}" for word in re.findall(rb"\w+", names))
    return frozenset(name for name in found - _NO_CODE if _text_of(name) is not None)


def modules_of(package: str) -> list[str]:
    """The modules of a package that declare compiled functions."""
    names = (path.stem for path in sorted(_folder_of(package).glob("*.py")))
    declared = re.compile(rb"^@entry|\bRaw\(", re.MULTILINE)
    found = [f"{package}.{name}" for name in names]
    return [
        name for name in found if name != "drafters.jit" and declared.search(_text_of(name) or b"")
    ]


@functools.cache
def digest(modules: tuple[str, ...]) -> str:
    """Of all sources that the modules' machine code is made of: their own, those of what they
    import, of the same topmost package and of this one, and the compiler's. What else is imported
    changes nothing."""
    waiting = [*modules, "drafters.ahead"]
    wanted = set(waiting)
    while waiting:
        found = _imported(waiting.pop()) - wanted
        wanted |= found
        waiting += found
    told = hashlib.sha256(b"sealed")  # earlier versions kept code that cannot be checked
    for name in sorted(wanted):
        text = _text_of(name) or b""
        told.update(f"{name} {len(text)} ".encode() + text)
    return told.hexdigest()[:24]


def read_again() -> None:
    """Forget the sources: the next digest is of what they are then."""
    for known in (_text_of, _imported, digest):
        known.cache_clear()


def library_path(package: str, target: str) -> Path:
    """Where the cache has all code of a package's sources as they are now."""
    name = f"{package}-{target}-{digest(tuple(modules_of(package)))}.so"
    return code_folder() / name


def object_path(module: str, target: str) -> Path:
    """Where the cache has the code of a module's sources as they are now."""
    return code_folder() / f"{module}-{target}-{digest((module,))}.o"


def mark_used(path: Path) -> None:
    """This code is in use; what other versions of the sources left is removed in time."""
    with contextlib.suppress(OSError):  # another process removes them, too
        os.utime(path)
        others = path.parent.glob(path.name.rpartition("-")[0] + "-*" + path.suffix)
        ages = sorted((time.time() - other.stat().st_mtime, other) for other in others)
        for age, other in ages[_NUM_KEPT:]:
            if age > _KEPT_S:
                other.unlink(missing_ok=True)


_SEAL = b"\nsha256 of all before: "


def sealed(code: bytes) -> bytes:
    """Code as it is kept: what loads it does not read beyond its own end."""
    return code + _SEAL + hashlib.sha256(code).digest()


def is_whole(path: Path) -> bool:
    """Whether code is there as it was kept; one bit that is another may end a process. What is
    damaged is removed, with a line, to be made anew."""
    try:
        code, found, digest_of = path.read_bytes().rpartition(_SEAL)
    except OSError:
        return False
    if found and hashlib.sha256(code).digest() == digest_of:
        return True
    _log.warning("%s is damaged: it is made anew", path)
    with contextlib.suppress(OSError):
        path.unlink()
    return False


# --- loading --------------------------------------------------------------------------------------


def c_compiler(machine: str = platform.machine()) -> list[str]:
    """The command of a C compiler for a machine: ziglang's where it is installed, as it compiles
    for other machines and for C libraries as old as a wheel's; else this one's. Raises
    RuntimeError for none."""
    has_zig = importlib.util.find_spec("ziglang") is not None
    if has_zig and machine in _ZIG and sys.platform == "linux":
        return [sys.executable, "-m", "ziglang", "cc", "-target", _ZIG[machine]]
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if found is None or machine != platform.machine():
        raise RuntimeError(f"no C compiler for {machine} is here; `pip install ziglang` brings one")
    return [found]


def machine_of(target: str) -> str:
    """The machine that runs a target's code, as `platform` names it."""
    return platform.machine() if target == NATIVE else TARGETS[target].triple.split("-")[0]


def build(command: list[str], out: Path) -> None:
    """Have a C compiler write a file, whole. Raises RuntimeError, OSError."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, out.name)
        ended = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
        if ended.returncode != 0:
            raise RuntimeError(f"{out.name} cannot be made: {ended.stderr.strip()[-2000:]}")
        with replacing(out, EVERYBODY) as file:
            file.write(sealed(made.read_bytes()))


def build_door(out: Path, machine: str = platform.machine()) -> None:
    """Compile door.c. Raises RuntimeError, OSError."""
    words = ["-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-s", str(_OWN / "door.c")]
    build([*c_compiler(machine), *words], out)


def _door() -> Any:
    """The class of doors: door.c's; slow_door's where that can neither be found nor compiled."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return SlowDoor
    path = _OWN / "_code" / "door.so"
    try:
        if not path.exists():
            told = hashlib.sha256(b"sealed" + (_OWN / "door.c").read_bytes()).hexdigest()[:24]
            path = code_folder() / f"door-{platform.machine()}-{told}.so"
            if not is_whole(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                build_door(path)
        loader = importlib.machinery.ExtensionFileLoader("drafters.door", str(path))
        spec = importlib.util.spec_from_file_location("drafters.door", path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (OSError, RuntimeError, ImportError) as error:
        _log.info("calls of compiled functions take longer than they need: %s", error)
        return SlowDoor
    return module.Door


class _Code:
    """Loaded code: addresses by symbol, and what each module's entries look like."""

    def __init__(self, address: Callable[[str], int], keeps: Any) -> None:
        self.address = address
        self._keeps = keeps

    def entries(self, module: str) -> dict[str, list[str]]:
        """name -> [symbol, layout of arguments, of results]"""
        told = ctypes.string_at(self.address(f"entries of {module}"))
        found: dict[str, list[str]] = json.loads(told)
        return found


def _library(path: Path) -> _Code:
    library = ctypes.CDLL(str(path))

    def address(symbol: str) -> int:
        return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value or 0

    return _Code(address, library)


def _object(path: Path) -> _Code:
    """An object file, which llvmlite links into this process."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault")
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_path(str(path)))
    engine.finalize_object()

    def address(symbol: str) -> int:
        return int(engine.get_global_value_address(symbol) or engine.get_function_address(symbol))

    return _Code(address, engine)


def find_library(package: str, target: str) -> Path | None:
    """A package's library: that beside its modules, or that of the cache; None without one."""
    shipped = _folder_of(package) / "_code" / f"{target}.so"
    if shipped.exists():
        return shipped
    kept = library_path(package, target)
    return kept if is_whole(kept) else None


def own_path() -> dict[str, str]:
    """The environment of a process that finds the modules that this one finds. What every process
    of this Python finds by itself is left out."""
    usual = [*site.getsitepackages(), sysconfig.get_path("stdlib"), sys.base_prefix, sys.prefix]
    own = [path for path in sys.path if path and not path.startswith(tuple(usual))]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([*own, *filter(None, given)])),
    }


@functools.cache
def _package_code(package: str, target: str) -> _Code | None:
    found = find_library(package, target)
    if found is None:
        return None
    if found.parent == code_folder():
        mark_used(found)
    return _library(found)


_loading = threading.RLock()  # code that two threads load at once would be let go once


def _code_of(module: str, target: str) -> _Code:
    """The code of a module. Raises RuntimeError where it can neither be found nor compiled."""
    with _loading:
        return _loaded(module, target)


@functools.cache
def _loaded(module: str, target: str) -> _Code:
    found = _package_code(module.rpartition(".")[0], target)
    if found is not None:
        return found
    path = object_path(module, target)
    if not is_whole(path):
        path = compile_module(module, target, path)
    mark_used(path)
    return _object(path)


def compile_module(module: str, target: str, path: Path) -> Path:
    """Compile a module's functions into an object file, in a process of its own. Returns where it
    is: in a temporary folder where the one of `path` cannot be written. Raises RuntimeError."""
    what = f"no machine code of {module} for {target} is here"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A folder that takes no object file is found before seconds go into one.
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(bytes(_OBJECT_BYTES))
        with alone(path.with_suffix(".lock")):
            if is_whole(path):  # another process made it meanwhile
                return path
            if target == NATIVE:
                _log.warning("%s: compiling it, once, with numba, into %s", what, path.parent)
            else:
                _log.info("%s: compiling it", what)
            done = subprocess.run(
                [sys.executable, "-m", "drafters.ahead", target], input=f"{module} {path}\n",
                env=own_path(), capture_output=True, text=True,
            )  # fmt: skip
            told = done.stdout.strip()
            if os.strerror(errno.ENOSPC) in told:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    except OSError as error:
        spare = _spare_folder() / path.name
        if path == spare:
            raise RuntimeError(f"{what}, and none can be made: {error}") from error
        _log.warning("%s, and none can be kept: %s. It is made for this process", what, error)
        return spare if is_whole(spare) else compile_module(module, target, spare)
    if told != module:
        why = f"{told}\n{done.stderr[-3000:]}".strip()
        raise RuntimeError(f"{what}, and compiling it failed: {why}")
    return path


@functools.cache
def _spare_folder() -> Path:
    """For code of this process alone."""
    folder = tempfile.mkdtemp(prefix="tailor-code-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold a file's lock where there are such locks."""
    with path.open("w") as file:
        with contextlib.suppress(ImportError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
        path.unlink(missing_ok=True)


def load(door: Any) -> None:
    """Find an entry's code."""
    code = _code_of(door.module, chosen().base)
    symbol, arguments, results = code.entries(door.module)[door.name]
    door.load(code.address(symbol), arguments.encode("latin-1"), results.encode("latin-1"))


class _Failure(ctypes.Structure):
    """What numba leaves of an exception: a pickled (class, arguments, place)."""

    _fields_ = (("pickled", ctypes.c_void_p), ("size", ctypes.c_int32))


def fail(name: str, code: int) -> None:
    """Raise what a compiled function has raised."""
    if code == 1:
        raise RuntimeError(f"{name} failed on another thread, or for want of memory")
    failure = _Failure.from_address(code)
    kind, arguments, _ = pickle.loads(ctypes.string_at(failure.pickled, failure.size))
    raise kind(*arguments)


@functools.cache
def raw_address(module: str, name: str) -> int:
    """Where a module's Raw lies; its code is loaded, or compiled, when this is first asked for."""
    return _code_of(module, chosen().name).address(name)


if TYPE_CHECKING:
    Door = SlowDoor
else:
    Door = _door()
