"""Compiled functions: how they are declared, and where their machine code comes from.

    @compiled, @allocating, @borrowing, @inlined    called from compiled code
    @entry                                          above one of them: Python calls it, too

numba is only the compiler. It runs in processes of its own (drafters/ahead.py) and leaves object
code, so that a process that drafts or serves imports neither numba nor llvmlite. Where that code
lies is in drafters/library.py.

What Python calls has its signature in its annotations: int and float are 64 bits wide, bool, an
array of drafters.arrays (C order), tuples and NamedTuples of these. Its results are numbers or
tuples of numbers; arrays are written in place. numba knows what a function that is not an entry
takes by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from drafters.library import Door, fail, load

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Function:
    """A function that compiled code calls. flags: numba's. Python runs it as it is written, which
    is slow: for tests and debuggers."""

    def __init__(self, function: Callable[..., Any], **flags: Any) -> None:
        functools.update_wrapper(self, function)
        self.py_func = function
        self._flags = flags

    @functools.cached_property
    def dispatcher(self) -> Any:
        """As numba knows it. Divisions by 0 are those of floats."""
        import numba

        compile_: Any = numba.njit  # its type knows no _nrt
        return compile_(nogil=True, error_model="numpy", **self._flags)(self.py_func)

    @property
    def _numba_type_(self) -> Any:
        """What numba takes the name of the function for."""
        from numba import types

        return types.Dispatcher(self.dispatcher)

    def __call__(self, *arguments: Any) -> Any:
        return self.py_func(*arguments)


class Entry(Door):
    """A function that Python calls. function: None where only its name is known. runs: see
    entry_run_by."""

    def __init__(
        self, module: str, name: str, function: Function | None, runs: Function | None
    ) -> None:
        super().__init__(name, load, fail)
        self.module, self.name, self.function, self.runs = module, name, function, runs
        if function is not None:
            functools.update_wrapper(self, function.py_func)

    @classmethod
    def of(cls, function: Any, runs: Any) -> Entry:
        """The entry of a Function."""
        return cls(function.__module__, function.__qualname__, function, runs)

    @property
    def py_func(self) -> Callable[..., Any]:
        """The function as it is written."""
        assert self.function is not None
        return self.function.py_func

    @property
    def _numba_type_(self) -> Any:
        assert self.function is not None
        return self.function._numba_type_


class Raw:
    """A function made of LLVM IR, called by its address (raw_address). A module has them in a list.

    name: its symbol. define: makes it in an llvmlite module. module: the one that declares it. Its
    code may use all features of a target; that of entries uses those of the target's base.
    """

    def __init__(self, name: str, module: str, define: Callable[[Any], Any]) -> None:
        self.name, self.module, self.define = name, module, define


def compiled(function: Callable[_P, _R], **flags: Any) -> Callable[_P, _R]:
    """A function that compiled code calls. It may make arrays, unless a borrowing one calls it."""
    return cast(Callable[_P, _R], Function(function, **flags))


def allocating(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`compiled`, and it makes arrays, whoever calls it."""
    return compiled(function, _nrt=True)


def borrowing(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`compiled`, and arrays are borrowed: the function must neither make an array nor keep one.

    Numba counts a reference for each array that is taken out of a record, and every count is an
    atomic instruction: these took half of a proposal's time. Such a function calls `inlined` ones.
    """
    return compiled(function, _nrt=False)


def inlined(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`borrowing`, and compiled into each function that calls it.

    For inner functions that take records: a record of ten arrays is eighty words, which every call
    would copy.
    """
    return compiled(function, _nrt=False, forceinline=True)


def entry(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A compiled function that Python calls. Raises what it raises, TypeError for arguments that
    its annotations do not allow. It runs without the interpreter's lock."""
    return cast(Callable[_P, _R], Entry.of(function, None))


def entry_run_by(runs: Callable[..., int]) -> Callable[[Callable[..., Any]], Any]:
    """An entry whose first parameter Python does not give: `runs` (address of the function, address
    of its arguments, the last argument) calls it, as often as it likes, as int64 (arguments, first
    argument), which gives 0 or what failed. It gives what failed, too, or 0."""
    return lambda function: Entry.of(function, runs)


def entry_of(module: str, name: str) -> Any:
    """The entry of that name that a module declares, which is not imported."""
    return Entry(module, name, None, None)
