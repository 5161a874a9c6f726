"""Named arrays in one file, memory-mapped on reading: the container of corpora and target tables.

Layout: 8 bytes magic, 8 bytes length of the header (little-endian), the header as JSON, then the
arrays, each aligned to 64 bytes. The header holds kind, version, the tokenizer's fingerprint, the
writer's own values (`meta`), and each array's dtype, shape and offset.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drafters.atomic_file import replacing

Array = npt.NDArray[Any]

MAGIC = b"TLRARR01"
ALIGN = 64
MAX_HEADER = 1 << 20
DTYPES = ("int32", "int64", "uint64", "float32", "float64", "uint8")


class ArrayFileError(ValueError):
    """The file is not what was asked for: damaged, of another kind, or of another version."""


class FingerprintError(ArrayFileError):
    """The file's ids belong to another tokenizer."""


def write_arrays(
    path: Path | str,
    *,
    kind: str,
    version: int,
    fingerprint: str,
    meta: Mapping[str, Any],
    arrays: Mapping[str, Array],
) -> None:
    """Write atomically (a temporary beside it, then a rename). Arrays are stored C-contiguous."""
    path = Path(path)
    entries: dict[str, dict[str, Any]] = {}
    offset = 0
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES:
            raise TypeError(f"array {name!r} has dtype {array.dtype}, not one of {DTYPES}")
        entries[name] = {"dtype": array.dtype.name, "shape": list(array.shape), "offset": offset}
        offset += -(-array.nbytes // ALIGN) * ALIGN
    header = json.dumps(
        {
            "kind": kind,
            "version": version,
            "fingerprint": fingerprint,
            "meta": dict(meta),
            "arrays": entries,
        }
    ).encode()
    start = -(-(16 + len(header)) // ALIGN) * ALIGN
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as out:
        out.write(MAGIC + len(header).to_bytes(8, "little") + header)
        for name, array in arrays.items():
            out.seek(start + entries[name]["offset"])
            out.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        out.truncate(start + offset)


def read_arrays(
    path: Path | str, *, kind: str, version: int, fingerprint: str | None
) -> tuple[dict[str, Any], dict[str, Array]]:
    """(meta with the fingerprint under "fingerprint", arrays by name).

    The arrays are views of one private mapping: pages are shared by all who read the file, and
    nothing written to them would reach it. Raises FileNotFoundError; FingerprintError when
    `fingerprint` is given and differs; ArrayFileError for any other fault.
    """
    path = Path(path)
    with path.open("rb") as source:
        size = os.fstat(source.fileno()).st_size
        head = source.read(16)
        if len(head) < 16 or head[:8] != MAGIC:
            raise ArrayFileError(f"{path} is not a {kind} file")
        length = int.from_bytes(head[8:], "little")
        if length > min(MAX_HEADER, size - 16):
            raise ArrayFileError(f"{path} has a damaged header")
        try:
            header = json.loads(source.read(length))
            found_kind, found_version = header["kind"], header["version"]
            found_fingerprint, meta = str(header["fingerprint"]), dict(header["meta"])
            entries = dict(header["arrays"])
        except (ValueError, KeyError, TypeError) as error:
            raise ArrayFileError(f"{path} has a damaged header") from error
        if found_kind != kind:
            raise ArrayFileError(f"{path} is of the kind {found_kind!r}, not {kind!r}")
        if found_version != version:
            raise ArrayFileError(
                f"{path} is version {found_version}; this program reads version {version}:"
                " build it again"
            )
        if fingerprint is not None and found_fingerprint != fingerprint:
            raise FingerprintError(
                f"{path} was built with tokenizer {found_fingerprint}, but the model's is"
                f" {fingerprint}: build it again with this model"
            )
        # ACCESS_COPY: compiled code sees an ordinary writable array, hence one compilation.
        mapping = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_COPY)
    start = -(-(16 + length) // ALIGN) * ALIGN
    arrays: dict[str, Array] = {}
    for name, entry in entries.items():
        try:
            dtype, shape, offset = entry["dtype"], tuple(entry["shape"]), int(entry["offset"])
            good = dtype in DTYPES and all(isinstance(n, int) and n >= 0 for n in shape)
        except (KeyError, TypeError, ValueError) as error:
            raise ArrayFileError(f"{path} has a damaged header") from error
        count = math.prod(shape) if good else 0
        if not good or offset < 0 or start + offset + count * np.dtype(dtype).itemsize > size:
            raise ArrayFileError(f"{path} is cut short or damaged at array {name!r}")
        arrays[name] = np.frombuffer(mapping, dtype, count, start + offset).reshape(shape)
    meta["fingerprint"] = found_fingerprint
    return meta, arrays
