"""Named arrays in one file, memory-mapped on reading: the container of what compiled code indexes.

Compiled code checks no index, so a file is checked where it is read: once, whole, before anything
is handed out. Its checksum finds what has changed since it was written; what each array must be
(`Column`) holds also for a file that somebody made on purpose.

Layout: 8 bytes magic, 8 bytes length of the header (little-endian), 4 bytes CRC-32 of all that
follows, 4 bytes of zeros, the header as JSON, then the arrays, each aligned to 64 bytes. The header
holds kind, version, the tokenizer's fingerprint, the writer's own values (`meta`), and each array's
dtype, shape and offset. Files of magic TLRARR01 have no checksum, and are held to their columns.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from drafters.atomic_file import OWNER, replacing
from drafters.json_text import parsed

Array = npt.NDArray[Any]

MAGIC, UNCHECKED_MAGIC = b"TLRARR02", b"TLRARR01"
ALIGN = 64
MAX_HEADER = 1 << 20
DTYPES = ("int32", "int64", "uint64", "float32", "float64", "uint8")
_HEAD = {MAGIC: 24, UNCHECKED_MAGIC: 16}
_MAX_SIZE = 1 << 40
_AT_ONCE = 1 << 20  # numbers that are looked at together


class ArrayFileError(ValueError):
    """The file is not what was asked for: damaged, of another kind, or of another version."""


class FingerprintError(ArrayFileError):
    """The file's ids belong to another tokenizer."""


@dataclass(frozen=True, slots=True)
class Column:
    """What an array must be for others to index with it, or into it.

    shape: of each axis a number, the name of a size ("rows"), one more ("rows+1"), or None for any.
    A size is what the first array says that has it as an axis. low: the least value. high: above
    all values; a number or a size. cuts: the size that it cuts into parts: it ascends from 0 to
    that. ascends: each value is above the one before. Floats are finite.
    """

    dtype: str
    shape: tuple[int | str | None, ...]
    low: int | None = None
    high: int | str | None = None
    cuts: str | None = None
    ascends: bool = False


class ArrayFile(NamedTuple):
    """What a file holds. meta: the writer's values, and the fingerprint under "fingerprint".
    arrays: views of one private mapping: pages are shared by all who read the file, and nothing
    written to them would reach it."""

    meta: dict[str, Any]
    arrays: dict[str, Array]
    mapping: mmap.mmap

    def release_pages(self) -> None:
        """Give back the memory of what was read; it is read from the file again when needed."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class ArrayFormat:
    """One kind of file: how it is written, and what must hold of it where it is read.

    columns: by the array's name, what it must be; a name with an asterisk is for any number of
    arrays, others must be there. Arrays that no column is for are left out.
    """

    kind: str
    version: int
    columns: Mapping[str, Column]

    def write(
        self,
        path: Path | str,
        arrays: Mapping[str, Array],
        *,
        fingerprint: str,
        meta: Mapping[str, Any] = {},
        mode: int = OWNER,
    ) -> None:
        """Write atomically (a temporary beside it, then a rename). Arrays are stored C-contiguous.
        mode: of atomic_file."""
        path = Path(path)
        entries: dict[str, dict[str, Any]] = {}
        flats: list[bytes | memoryview] = []
        offset = 0
        for name, array in arrays.items():
            dtype = array.dtype.name
            if dtype not in DTYPES:
                raise TypeError(f"array {name!r} has dtype {dtype}, not one of {DTYPES}")
            entries[name] = {"dtype": dtype, "shape": list(array.shape), "offset": offset}
            offset += -(-array.nbytes // ALIGN) * ALIGN
            flats.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        header = json.dumps(
            {
                "kind": self.kind,
                "version": self.version,
                "fingerprint": fingerprint,
                "meta": dict(meta),
                "arrays": entries,
            }
        ).encode()
        if len(header) > MAX_HEADER:
            raise ValueError(f"the header of {path} has more than {MAX_HEADER} bytes")
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, mode) as out:
            out.write(MAGIC + len(header).to_bytes(8, "little") + bytes(8))
            checksum = 0
            for flat in (header, *flats):
                pad = bytes(-(out.tell() + len(flat)) % ALIGN)
                out.write(flat)
                out.write(pad)
                checksum = zlib.crc32(pad, zlib.crc32(flat, checksum))
            out.seek(16)
            out.write(checksum.to_bytes(4, "little"))

    def read(self, path: Path | str, *, fingerprint: str | None) -> ArrayFile:
        """Map a file and check all of it: a second for a gigabyte or two.

        Raises OSError; FingerprintError when `fingerprint` is given and differs; ArrayFileError for
        any other fault.
        """
        path = Path(path)
        with path.open("rb") as source:
            size = os.fstat(source.fileno()).st_size
            head = source.read(_HEAD[MAGIC])
            if len(head) < _HEAD[MAGIC] or head[:8] not in _HEAD:
                raise ArrayFileError(f"{path} is not a {self.kind} file")
            begin, length = _HEAD[head[:8]], int.from_bytes(head[8:16], "little")
            if length > min(MAX_HEADER, size - begin):
                raise ArrayFileError(f"{path} has a damaged header")
            # ACCESS_COPY: compiled code sees an ordinary writable array, hence one compilation.
            mapping = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_COPY)
        try:
            header = parsed(mapping[begin : begin + length])
            kind, version = header["kind"], header["version"]
            found, meta = str(header["fingerprint"]), dict(header["meta"])
            entries = dict(header["arrays"])
        except (ValueError, KeyError, TypeError) as error:
            raise ArrayFileError(f"{path} has a damaged header") from error
        if kind != self.kind:
            raise ArrayFileError(f"{path} is of the kind {str(kind)[:40]!r}, not {self.kind!r}")
        if version != self.version:
            raise ArrayFileError(
                f"{path} is version {str(version)[:20]}; this program reads version {self.version}:"
                " build it again"
            )
        if fingerprint is not None and found != fingerprint:
            raise FingerprintError(
                f"{path} was built with tokenizer {found[:80]}, but the model's is"
                f" {fingerprint}: build it again with this model"
            )
        start = -(-(begin + length) // ALIGN) * ALIGN
        arrays: dict[str, Array] = {}
        for name, entry in entries.items():
            problem = f"{path} is cut short or damaged at {name!r}"
            arrays[name] = _array(mapping, start, entry, problem)
        if begin == _HEAD[MAGIC]:
            with memoryview(mapping) as whole, whole[begin:] as payload:
                checksum = zlib.crc32(payload)
            if checksum != int.from_bytes(head[16:20], "little"):
                raise ArrayFileError(f"{path} is damaged: its checksum is another one")
        arrays = _checked(path, self.kind, arrays, self.columns)
        read = ArrayFile({**meta, "fingerprint": found}, arrays, mapping)
        read.release_pages()
        return read


def _array(mapping: mmap.mmap, start: int, entry: Any, problem: str) -> Array:
    try:
        dtype, shape, offset = entry["dtype"], tuple(entry["shape"]), entry["offset"]
        if (
            dtype not in DTYPES
            or not all(type(n) is int and 0 <= n < _MAX_SIZE for n in (*shape, offset))
            or offset % ALIGN
        ):
            raise ValueError
        count = math.prod(shape)
        if count == 0:
            return np.empty(shape, dtype)
        return np.frombuffer(mapping, dtype, count, start + offset).reshape(shape)
    except (KeyError, TypeError, ValueError, OverflowError, MemoryError):
        raise ArrayFileError(problem) from None


def _checked(
    path: Path, kind: str, arrays: Mapping[str, Array], columns: Mapping[str, Column]
) -> dict[str, Array]:
    """The arrays that have a column, each as that says. Raises ArrayFileError."""
    found: dict[str, tuple[Array, Column]] = {}
    for pattern, column in columns.items():
        if "*" in pattern:
            found |= {n: (a, column) for n, a in arrays.items() if fnmatchcase(n, pattern)}
        elif pattern in arrays:
            found[pattern] = arrays[pattern], column
        else:
            raise ArrayFileError(f"{path} lacks a part of a {kind}: {pattern}")
    sizes: dict[str, int] = {}
    for name, (array, column) in found.items():
        fits = array.dtype.name == column.dtype and array.ndim == len(column.shape)
        for length, wanted in zip(array.shape, column.shape, strict=False):
            if isinstance(wanted, str):
                wanted, more = (wanted[:-2], 1) if wanted.endswith("+1") else (wanted, 0)
                wanted = sizes.setdefault(wanted, length - more) + more
            fits = fits and wanted in (None, length)
        if not fits or min(sizes.values(), default=0) < 0:
            raise ArrayFileError(f"{path} is damaged: {name} has another shape or type")
    for name, (array, column) in found.items():
        if not _holds(array, column, sizes):
            raise ArrayFileError(f"{path} is damaged: {name} has values that cannot be")
    return {name: array for name, (array, _) in found.items()}


def _holds(array: Array, column: Column, sizes: Mapping[str, int]) -> bool:
    low, high = column.low, column.high
    if isinstance(high, str):
        high = sizes[high]
    if column.cuts is not None:
        end = sizes[column.cuts]
        if array.shape[0] == 0 or array[0] != 0 or array[-1] != end:
            return False
    for part in blocks(array):
        if part.dtype.kind == "f" and not np.isfinite(part).all():
            return False
        if low is not None and part.min() < low:
            return False
        if high is not None and part.max() >= high:
            return False
    if column.cuts is None and not column.ascends:
        return True
    above = np.greater if column.ascends else np.greater_equal
    return all(above(part[1:], part[:-1]).all() for part in blocks(array, overlap=1))


def blocks(array: Array, overlap: int = 0) -> Iterator[Array]:
    """The rows of an array, some thousand to a million numbers at a time, so that what is computed
    of them stays in a CPU's caches. overlap: rows of one that the one before it ends with."""
    rows = max(1, _AT_ONCE // max(1, math.prod(array.shape[1:])))
    for first in range(0, array.shape[0], rows):
        if array[first : first + rows].size:
            yield array[first : first + rows + overlap]
