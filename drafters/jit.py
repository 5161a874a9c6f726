"""How the package compiles: numba in nopython mode, cached on disk where a folder is writable.

numba tries `NUMBA_CACHE_DIR`, then `__pycache__` beside the module, then the user's cache
directory, so a read-only installation still starts from a cache. Where none of these is writable,
numba refuses at decoration time; then the function is compiled anew in each process.

By itself numba reuses cached code as long as the function's own file is unchanged. But called
functions, constants and record fields are compiled in from other files. So `keep_while_unchanged`
makes the cache depend on all sources that a package's machine code is made of: its own, and those
of this package that it calls. Code of other sources lies in another folder; the code of a few
versions before is kept, for processes that still run, and older code is removed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.core import caching

_P = ParamSpec("_P")
_R = TypeVar("_R")

_njit: Any = numba.njit  # its type knows no _nrt

_IMPORT = re.compile(rb"^ *(?:from ([\w.]+) import (\([^)]*\)|.*)|import ([\w.]+))", re.MULTILINE)
_OWN = __name__.rpartition(".")[0]
_packages: dict[Path, str] = {}  # folder: its dotted name

_KEPT = "kept-"  # folders of code, by the digest of its sources
_NUM_BEFORE = 3  # of other sources that are kept beside


def sources(package: str, folder: Path) -> dict[str, bytes]:
    """{module: its text} of the sources that a package's machine code is made of.

    These are the modules that import numba or this one, and what they import of the package and of
    this one. What else the process has imported changes nothing.
    """
    own = _texts(package, folder)
    texts = {**_texts(_OWN, Path(__file__).parent), **own}
    imports = {name: _imported(text) for name, text in texts.items()}
    waiting = [
        name
        for name in own
        if any(other == __name__ or other.split(".")[0] == "numba" for other in imports[name])
    ]
    wanted = set(waiting)
    while waiting:
        found = (imports[waiting.pop()] & texts.keys()) - wanted
        wanted |= found
        waiting += found
    return {name: texts[name] for name in sorted(wanted)}


def _texts(package: str, folder: Path) -> dict[str, bytes]:
    """{module: its text} of a package."""
    found = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        found[".".join((package, *parts)).removesuffix(".__init__")] = path.read_bytes()
    return found


def _imported(text: bytes) -> set[str]:
    """What a module may import: `from a import b` is a, and a.b."""
    found = set()
    for module, names, plain in _IMPORT.findall(text):
        name = (module or plain).decode()
        found.add(name)
        found.update(f"{name}.{word.decode()}" for word in re.findall(rb"\w+", names))
    return found


@functools.cache
def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name, text in sources(_packages[folder], folder).items():
        digest.update(f"{name} {len(text)} ".encode() + text)
    return digest.hexdigest()


class _Fresh:
    """A place of numba's where code of the packages is kept with a digest of all its sources."""

    _py_file: str

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> Any:
        """The place, or None: for another package's function, or where nothing can be written."""
        if not any(folder in Path(py_file).parents for folder in _packages):
            return None
        return super().from_function(py_func, py_file)  # type: ignore[misc]

    def _own_digest(self) -> str:
        return _digest(next(f for f in Path(self._py_file).parents if f in _packages))

    def get_cache_path(self) -> str:
        """The folder of the code that is made of today's sources."""
        around: str = super().get_cache_path()  # type: ignore[misc]
        return os.path.join(around, _KEPT + self._own_digest()[:24])

    def ensure_cache_path(self) -> None:
        """Make the folder. Raises OSError where nothing can be written."""
        folder = Path(self.get_cache_path())
        is_new = not folder.is_dir()
        super().ensure_cache_path()  # type: ignore[misc]
        if is_new:
            _forget_old(folder)

    def get_source_stamp(self) -> tuple[Any, str]:
        """The digest that cached code must have been compiled with."""
        return super().get_source_stamp(), self._own_digest()  # type: ignore[misc]


def _forget_old(folder: Path) -> None:
    """Remove what earlier versions left beside a folder of code, but for the last few."""
    others = [other for other in folder.parent.glob(f"{_KEPT}*") if other != folder]
    with contextlib.suppress(OSError):  # another process removes them, too
        for other in sorted(others, key=lambda other: -other.stat().st_mtime)[_NUM_BEFORE:]:
            shutil.rmtree(other, ignore_errors=True)
        for file in folder.parent.glob("*.nb[ic]"):  # of versions that had no such folders
            file.unlink()


class InCacheFolder(_Fresh, caching.UserProvidedCacheLocator):
    """Cached code in NUMBA_CACHE_DIR."""


class BesideSource(_Fresh, caching.InTreeCacheLocator):
    """Cached code in `__pycache__` beside the module."""


class InUserFolder(_Fresh, caching.UserWideCacheLocator):
    """Cached code in the user's cache directory."""


def keep_while_unchanged(package: str, folder: Path) -> None:
    """Make the cache of a package's functions depend on all its sources. Called before they are
    decorated. folder: that of its `__init__.py`."""
    _packages[folder] = package
    ours = [f"{__name__}.{cls.__name__}" for cls in (InCacheFolder, BesideSource, InUserFolder)]
    theirs = [cls.__name__ for cls in caching.CacheImpl._locator_classes]
    config: Any = numba.config
    if not config.CACHE_LOCATOR_CLASSES.startswith(ours[0]):
        rest = config.CACHE_LOCATOR_CLASSES or ",".join(theirs)
        config.CACHE_LOCATOR_CLASSES = ",".join([*ours, rest])


keep_while_unchanged(_OWN, Path(__file__).parent)


def compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function` compiled on first use, without the GIL, never in object mode."""
    return _compiled(function)


def borrowing(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`compiled`, and arrays are borrowed: the function must neither make an array nor keep one.

    Numba counts a reference for each array that is taken out of a record, and every count is an
    atomic instruction: these took half of a proposal's time. Such a function calls `inlined` ones.
    """
    return _compiled(function, _nrt=False)


def inlined(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`borrowing`, and compiled into each function that calls it.

    For inner functions that take records: a record of ten arrays is eighty words, which every call
    would copy.
    """
    return _compiled(function, _nrt=False, forceinline=True)


def _compiled(function: Callable[_P, _R], **flags: bool) -> Callable[_P, _R]:
    try:
        return cast(Callable[_P, _R], _njit(cache=True, nogil=True, **flags)(function))
    except RuntimeError:  # "cannot cache function: no locator available for file ..."
        return cast(Callable[_P, _R], _njit(cache=False, nogil=True, **flags)(function))
