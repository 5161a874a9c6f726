"""EmbeddingStore: the full embedding table in CPU memory, memory-mapped, gathered by id.

VocabTailor's decoupling (arXiv 2508.15229, section 3): the embedding is a look-up of a few rows a
step, so the table stays in host memory; only the LM head needs to be near the arithmetic. The file
is the model's own safetensors file: mapped read-only, so that every process of a host shares one
copy through the page cache, and nothing is converted or written.

What this is not: it knows nothing of the device. A GPU runner gathers into a pinned buffer and
copies that; a CPU runner gathers into the buffer it feeds to the first layer.

safetensors' layout (its README): 8 bytes little-endian header length, a JSON header of
{name: {dtype, shape, data_offsets}}, then the tensors. bfloat16 has no numpy dtype; its bits are
the upper half of a float32, which is how it is widened here, exactly.
"""

from __future__ import annotations

import difflib
import json
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vocab_store.errors import EmbeddingFileError

StoredDtype = Literal["F32", "BF16", "F16"]
PathLike = str | os.PathLike[str]
Ids = npt.NDArray[np.integer[Any]] | Sequence[int]

_STORED: dict[StoredDtype, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
}
# A header longer than this is a damaged file, not a model (safetensors' own limit is 100 MB).
_MAX_HEADER_BYTES = 100_000_000


def gemma_embedding_scale(hidden_size: int, dtype: StoredDtype = "F32") -> float:
    """sqrt(hidden_size) rounded to the dtype the model computes in, as Gemma multiplies it.

    transformers' Gemma3TextScaledWordEmbedding casts its scale to the weight's dtype first, so
    640 columns give 25.298221... in float32 and 25.25 in bfloat16. Use the dtype of the
    *computation*: "F32" when a bf16 checkpoint is run in fp32.
    """
    value = np.float32(hidden_size**0.5)
    if dtype == "F32":
        return float(value)
    if dtype == "F16":
        return float(np.float16(value))
    bits = int(value.view(np.uint32))
    # Round to nearest even on the 16 bits that bfloat16 drops.
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(np.uint32(bits).view(np.float32))


def read_safetensors_header(path: PathLike) -> tuple[dict[str, Any], int]:
    """The JSON header of a safetensors file and the file offset of its data.

    Raises EmbeddingFileError when the file is no safetensors file, OSError when it cannot be read.
    """
    size = os.stat(path).st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise EmbeddingFileError(f"{path}: not a safetensors file (shorter than its header)")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise EmbeddingFileError(f"{path}: not a safetensors file (header of {length} bytes)")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise EmbeddingFileError(f"{path}: safetensors header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise EmbeddingFileError(f"{path}: safetensors header is not an object")
    header.pop("__metadata__", None)
    return header, 8 + length


def find_shards(path: PathLike) -> tuple[Path, ...]:
    """The safetensors files behind a path: a file itself, or all of a model directory's, sorted."""
    root = Path(path)
    if root.is_dir():
        shards = tuple(sorted(root.glob("*.safetensors")))
        if not shards:
            raise EmbeddingFileError(f"{root}: no *.safetensors file in this directory")
        return shards
    return (root,)


class EmbeddingStore:
    """A [num_rows, width] embedding table on disk, read by row.

    Safe for concurrent reads. Rows at and after `vocab_size` are padding (a table rounded up for
    the hardware): they belong to no token, and gathering one raises.
    """

    def __init__(
        self,
        rows: npt.NDArray[Any],
        stored_dtype: StoredDtype,
        *,
        mapping: mmap.mmap | None = None,
        scale: float = 1.0,
        vocab_size: int | None = None,
    ) -> None:
        """Usually made by `open`. rows: [num_rows, width] in the stored dtype (bf16: uint16)."""
        if rows.ndim != 2:
            raise EmbeddingFileError(f"an embedding table has 2 axes, not {rows.ndim}")
        if rows.dtype != _STORED[stored_dtype]:
            raise EmbeddingFileError(f"{stored_dtype} rows cannot be {rows.dtype}")
        size = rows.shape[0] if vocab_size is None else vocab_size
        if not 0 < size <= rows.shape[0]:
            raise EmbeddingFileError(
                f"vocab_size {size} does not fit a table of {rows.shape[0]} rows"
            )
        self._rows: npt.NDArray[Any] | None = rows
        self._mapping = mapping
        self.num_rows, self.width = int(rows.shape[0]), int(rows.shape[1])
        self.vocab_size = size
        self.stored_dtype: StoredDtype = stored_dtype
        self.scale = float(scale)

    @classmethod
    def open(
        cls,
        paths: PathLike | Sequence[PathLike],
        tensor_name: str,
        *,
        scale: float = 1.0,
        vocab_size: int | None = None,
    ) -> EmbeddingStore:
        """Map `tensor_name` of one safetensors file, of several shards, or of a model directory.

        scale: what every gathered row is multiplied by (gemma_embedding_scale; 1.0 for others).
        vocab_size: ids that are tokens; the rest of the rows is padding. Default: all rows.

        Raises EmbeddingFileError naming the file when the tensor is absent, is not [rows, width],
        is not F32, BF16 or F16, or when the file is cut short; OSError when it cannot be read.
        """
        given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        shards = [shard for path in given for shard in find_shards(path)]
        seen: list[str] = []
        for shard in shards:
            header, data_start = read_safetensors_header(shard)
            if tensor_name in header:
                rows, dtype, mapping = _map_tensor(
                    shard, tensor_name, header[tensor_name], data_start
                )
                return cls(rows, dtype, mapping=mapping, scale=scale, vocab_size=vocab_size)
            seen.extend(header)
        near = difflib.get_close_matches(tensor_name, seen, n=3, cutoff=0.4)
        raise EmbeddingFileError(
            f"no tensor {tensor_name!r} in {', '.join(str(shard) for shard in shards)}"
            + (f"; is it {' or '.join(near)}?" if near else f" ({len(seen)} tensors)")
        )

    @property
    def num_pad_rows(self) -> int:
        """Rows that belong to no token."""
        return self.num_rows - self.vocab_size

    @property
    def num_bytes(self) -> int:
        """Bytes of the table in its stored dtype, padding included."""
        return self.num_rows * self.width * _STORED[self.stored_dtype].itemsize

    @property
    def rows(self) -> npt.NDArray[Any]:
        """The mapped table as stored, read-only [num_rows, width]: <f4, <f2, or bf16 bits as <u2.

        No scale is applied: a tied LM head reads its rows here.
        """
        if self._rows is None:
            raise RuntimeError("the EmbeddingStore is closed")
        return self._rows

    def gather(self, ids: Ids, out: npt.NDArray[np.float32]) -> None:
        """out[i] = scale * table[ids[i]], widened to float32.

        ids: n integers. out: float32 [>= n, width], C-contiguous; rows past n are left alone, so
        that one buffer serves every step. Each product is rounded once, in float32.

        Raises IndexError naming the first id that is negative or >= vocab_size (padding is no
        token), ValueError when `out` does not fit. Nothing is written when it raises.
        """
        self._gather(ids, out, self.vocab_size, self.scale)

    def gather_head(self, ids: Ids, out: npt.NDArray[np.float32]) -> None:
        """Like `gather` without the scale: the rows of a tied LM head for a slice."""
        self._gather(ids, out, self.vocab_size, 1.0)

    def _gather(self, ids: Ids, out: npt.NDArray[np.float32], limit: int, scale: float) -> None:
        rows = self.rows
        wanted = np.asarray(ids)
        if wanted.size == 0:
            return
        if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
            raise ValueError(
                f"ids must be a flat array of integers, not {wanted.dtype} {list(wanted.shape)}"
            )
        num = wanted.shape[0]
        if out.dtype != np.float32 or out.ndim != 2 or out.shape[1] != self.width:
            raise ValueError(
                f"out must be float32 [rows, {self.width}], not {out.dtype} {list(out.shape)}"
            )
        if out.shape[0] < num or not out.flags.c_contiguous:
            raise ValueError(f"out must be C-contiguous with at least {num} rows")
        bad = (wanted < 0) | (wanted >= limit)
        if bad.any():
            raise IndexError(
                f"token id {int(wanted[bad][0])} is outside the vocabulary of {limit} tokens"
            )
        target = out[:num]
        # mode="clip": ids are checked above, and "raise" would gather into a hidden copy first.
        if self.stored_dtype == "F32":
            np.take(rows, wanted, axis=0, out=target, mode="clip")
        elif self.stored_dtype == "BF16":
            np.left_shift(
                np.take(rows, wanted, axis=0, mode="clip"),
                16,
                out=target.view(np.uint32),
                dtype=np.uint32,
            )
        else:
            target[...] = np.take(rows, wanted, axis=0, mode="clip")
        if scale != 1.0:
            np.multiply(target, np.float32(scale), out=target)

    def close(self) -> None:
        """Unmap the file. Idempotent; views that `rows` handed out keep the mapping alive."""
        self._rows = None
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            try:
                mapping.close()
            except BufferError:
                # A view is still held somewhere: the mapping ends with it.
                pass

    def __enter__(self) -> EmbeddingStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _map_tensor(
    path: Path, name: str, entry: dict[str, Any], data_start: int
) -> tuple[npt.NDArray[Any], StoredDtype, mmap.mmap]:
    dtype: StoredDtype = entry["dtype"]
    if dtype not in _STORED:
        raise EmbeddingFileError(
            f"{path}: {name} is {dtype}; an embedding table must be F32, BF16 or F16"
        )
    shape = entry["shape"]
    if len(shape) != 2 or min(shape) < 1:
        raise EmbeddingFileError(f"{path}: {name} has shape {shape}, not [rows, width]")
    start, end = (data_start + offset for offset in entry["data_offsets"])
    wanted = shape[0] * shape[1] * _STORED[dtype].itemsize
    if end - start != wanted:
        raise EmbeddingFileError(f"{path}: {name} holds {end - start} bytes, not {wanted}")
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size < end:
            raise EmbeddingFileError(f"{path}: the file is cut short before the end of {name}")
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    flat = np.frombuffer(mapping, dtype=_STORED[dtype], count=shape[0] * shape[1], offset=start)
    return flat.reshape(shape[0], shape[1]), dtype, mapping
