"""GgufIndex: what a GGUF holds and where, with its tensors as views of the mapped file.

The format (docs/gguf.md of ggml), little-endian, versions 2 and
3. Of lists, only short ones of numbers are kept (a value for each layer): those of a tokenizer,
100,000 entries and more, would take seconds and hundreds of megabytes as Python objects.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from server.errors import ModelError

__all__ = ["GgufIndex", "GgufTensor"]

_NUMBERS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _LIST = 8, 9
_MOST_ENTRIES = 1024  # of a list that is kept
_FLOATS: dict[str, np.dtype[Any]] = {
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "f64": np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """form: ggml's name of its type, in small letters. shape: in numbers, [outputs, inputs]. data:
    floats of that shape, or uint8 [..., bytes of a row]; read-only, paged in by use."""

    name: str
    form: str
    shape: tuple[int, ...]
    data: npt.NDArray[Any]


class _Cursor:
    """Reads values one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self.at)
        self.at += struct.calcsize(form)
        return value

    def text(self) -> str:
        size = self.number("<Q")
        if size > len(self._data) - self.at:
            raise ValueError("a text ends past the file's end")
        self.at += size
        return self._data[self.at - size : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """A number, a text or a tuple of numbers; None for a list that is skipped."""
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _LIST:
            raise ValueError(f"metadata of type {kind} is not known")
        inner, num = self.number("<I"), self.number("<Q")
        if inner in _NUMBERS and num <= _MOST_ENTRIES:
            return tuple(self.number(_NUMBERS[inner]) for _ in range(num))
        if inner in _NUMBERS:
            self.at += num * struct.calcsize(_NUMBERS[inner])
        elif inner == _STRING:
            self._skip_texts(num)
        else:
            for _ in range(num):
                self.value(inner)
        return None

    def _skip_texts(self, num: int) -> None:
        data, at, unpack = self._data, self.at, struct.Struct("<Q").unpack_from
        for _ in range(num):
            at += 8 + unpack(data, at)[0]
        self.at = at


class GgufIndex:
    """An open GGUF. fields: metadata by key, without long lists and lists of texts. Raises
    ModelError for what is no GGUF, is of another version, or is cut short."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise ModelError(f"{path.name} is empty") from None
        try:
            self.fields, self.tensors = self._read()
        except struct.error:
            raise ModelError(f"{path.name} is no complete GGUF: it ends in its header") from None
        except (ValueError, OverflowError, KeyError) as error:
            raise ModelError(f"{path.name} is no complete GGUF: {error}") from None

    def release_pages(self) -> None:
        """Give back the memory of what was read; it is read from the file again when needed."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def _read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        cursor = _Cursor(self._map)
        if self._map[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        cursor.at = 4
        version = cursor.number("<I")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not read, 2 and 3 are")
        num_tensors, num_fields = cursor.number("<Q"), cursor.number("<Q")
        fields = {}
        for _ in range(num_fields):
            key = cursor.text()
            value = cursor.value(cursor.number("<I"))
            if value is not None:
                fields[key] = value
        found = []
        for _ in range(num_tensors):
            name = cursor.text()
            shape = tuple(cursor.number("<Q") for _ in range(cursor.number("<I")))
            found.append((name, shape[::-1], cursor.number("<I"), cursor.number("<Q")))
        unit = int(fields.get("general.alignment", 32))
        start = -(-cursor.at // unit) * unit
        tensors = {}
        for name, shape, kind, offset in found:
            form = GGMLQuantizationType(kind)
            block, size = GGML_QUANT_SIZES[form]
            if not shape or shape[-1] % block:
                raise ValueError(f"{name} has the shape {shape}")
            row_bytes = shape[-1] // block * size
            num_bytes = row_bytes * int(np.prod(shape[:-1], dtype=np.int64))
            if start + offset + num_bytes > len(self._map):
                raise ValueError(f"{name} ends past the file's end")
            raw = np.frombuffer(self._map, np.uint8, num_bytes, start + offset)
            kept = form.name.lower()
            if kept in _FLOATS:
                data: npt.NDArray[Any] = raw.view(_FLOATS[kept]).reshape(shape)
            else:
                data = raw.reshape(*shape[:-1], row_bytes)
            tensors[name] = GgufTensor(name, kept, shape, data)
        return fields, tensors
