"""Door in Python (see door.c): for an installation where no C compiler was. A call takes some 50
times as long, a tenth of a millisecond for the arguments of a step."""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

_CALL = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
_NUM_RESULTS = 32


def _write(layout: bytes, at: int, value: Any, words: list[bytes]) -> int:
    """Append a value's words; where the layout goes on."""
    match chr(layout[at]):
        case "i":
            words.append(struct.pack("q", operator.index(value)))
        case "f":
            words.append(struct.pack("d", float(value)))
        case "b":
            words.append(struct.pack("q", bool(value)))
        case "A":
            kind, size, axes = chr(layout[at + 1]), layout[at + 2], layout[at + 3]
            if not isinstance(value, np.ndarray):
                raise TypeError(f"an array is wanted, not {type(value)}")
            known = value.ndim == axes and (value.dtype.kind, value.itemsize) == (kind, size)
            if not known or not value.flags.c_contiguous:
                raise TypeError(
                    f"an array of {axes} axes, kind {kind} of {size} bytes, in C order is wanted"
                )
            words.append(struct.pack(f"{1 + axes}q", value.ctypes.data, *value.shape))
            return at + 4
        case _:
            num = layout[at + 1]
            if not isinstance(value, tuple) or len(value) != num:
                raise TypeError(f"a tuple of {num} is wanted, not {type(value)}")
            at += 2
            for item in value:
                at = _write(layout, at, item, words)
            return at
    return at + 1


def _read(layout: bytes, at: int, words: Any, i: int) -> tuple[Any, int, int]:
    """(a result, where the layout and the words go on)"""
    match chr(layout[at]):
        case "i":
            return words[i], at + 1, i + 1
        case "f":
            return struct.unpack("d", struct.pack("q", words[i]))[0], at + 1, i + 1
        case "b":
            return words[i] != 0, at + 1, i + 1
    items, num = [], layout[at + 1]
    at += 2
    for _ in range(num):
        item, at, i = _read(layout, at, words, i)
        items.append(item)
    return tuple(items), at, i


class Bound:
    """A compiled function and its first arguments; one call at a time."""

    def __init__(self, door: Door, held: tuple[Any, ...], words: list[bytes], at: int) -> None:
        self._door, self._held, self._words, self._at = door, held, words, at

    def _with(self, arguments: tuple[Any, ...]) -> tuple[list[bytes], int]:
        words, at, layout = list(self._words), self._at, self._door._layouts[0]
        for number, value in enumerate(arguments, len(self._held) + 1):
            if at == len(layout):
                raise TypeError(f"{self._door._name} takes {number - 1} arguments")
            try:
                at = _write(layout, at, value, words)
            except TypeError as error:
                raise TypeError(f"{self._door._name}, argument {number}: {error}") from None
        return words, at

    def bound(self, *following: Any) -> Bound:
        """With more arguments."""
        return Bound(self._door, (*self._held, *following), *self._with(following))

    def __call__(self, *arguments: Any) -> Any:
        words, at = self._with(arguments)
        door = self._door
        layout, results = door._layouts
        if at != len(layout):
            raise TypeError(f"{door._name} takes more arguments")
        given = b"".join(words)
        place = (ctypes.c_int64 * (len(given) // 8 + 1)).from_buffer_copy(given + bytes(8))
        found = (ctypes.c_int64 * _NUM_RESULTS)()
        assert door._call is not None
        failed = door._call(place, found)
        if failed:
            door._fail(door._name, failed)
        return _read(results, 0, found, 0)[0] if results else None


class Door:
    """Door(name, load, fail): load(door) is called before the first call; fail(name, code) raises
    what a code stands for."""

    def __init__(
        self, name: str, load: Callable[[Any], None], fail: Callable[[str, int], None]
    ) -> None:
        self._name, self._load, self._fail = name, load, fail
        self._call: Callable[..., int] | None = None
        self._layouts = (b"", b"")

    def load(self, address: int, arguments: bytes, results: bytes) -> None:
        """Where the function lies, and its layouts."""
        self._layouts = (arguments, results)
        self._call = _CALL(address)

    def bound(self, *first: Any) -> Bound:
        """The same function with its first arguments written down."""
        if self._call is None:
            self._load(self)
        return Bound(self, (), [], 0).bound(*first)

    def __call__(self, *arguments: Any) -> Any:
        if self._call is None:
            self._load(self)
        return Bound(self, (), [], 0)(*arguments)
