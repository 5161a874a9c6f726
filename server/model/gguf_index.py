"""GgufIndex: what a GGUF holds and where, with its tensors as views of the mapped file.

The format (docs/gguf.md of ggml), little-endian, versions 2 and 3. A GGUF is a stranger's file:
every length is compared with the file before anything is made of it, and what KEYS names has that
type and lies within those bounds. Lists stay in the file until they are asked for: those of a
tokenizer, 100,000 entries and more, take time and memory as Python objects.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from server.errors import ModelError

_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _LIST = 8, 9
_MOST_KEPT = 1024  # entries of a list that is among the fields
_MOST_FIELDS = _MOST_TENSORS = 1 << 16
_MOST_TEXT = 4 << 20
_MOST_DEEP = 4  # lists in lists
_FLOATS = {"f32": "<f4", "f16": "<f2", "f64": "<f8"}


class Key(NamedTuple):
    """What a key's value must be: its type, and bounds that it may have; a list of such where
    `of_layers`."""

    kind: type
    low: float = -math.inf
    high: float = math.inf
    of_layers: bool = False


_SIZE, _POSITIONS, _HEADS = Key(int, 1, 1 << 20), Key(int, 1, 1 << 28), Key(int, 0, 4096, True)
_FACTOR, _BASE, _EPSILON = Key(float, 0, 1e6), Key(float, 1, 1e12), Key(float, 1e-12, 0.1)
_FLAG, _FLAGS = Key(bool), Key(bool, 0, 1, True)

KEYS: dict[str, Key] = {
    "general.architecture": Key(str),
    "general.name": Key(str),
    "general.alignment": Key(int, 8, 1 << 20),
    "tokenizer.chat_template": Key(str),
    "tokenizer.chat_template.tool_use": Key(str),
    "tokenizer.ggml.model": Key(str),
    "tokenizer.ggml.pre": Key(str),
    "tokenizer.ggml.add_bos_token": _FLAG,
    "tokenizer.ggml.add_space_prefix": _FLAG,
    "attention.causal": _FLAG,
    "attention.head_count": _SIZE,
    "attention.head_count_kv": _HEADS,
    "attention.key_length": Key(int, 1, 4096),
    "attention.layer_norm_epsilon": _EPSILON,
    "attention.layer_norm_rms_epsilon": _EPSILON,
    "attention.recurrent_layers": _FLAGS,
    "attention.scale": Key(float, 1e-6, 1e3),
    "attention.sliding_window": Key(int, 0, 1 << 28),
    "attention.sliding_window_pattern": Key(int, 0, 1024, True),
    "attention.temperature_scale": _FACTOR,
    "attn_logit_softcapping": _FACTOR,
    "block_count": Key(int, 1, 1024),
    "context_length": _POSITIONS,
    "embedding_length": _SIZE,
    "embedding_scale": _FACTOR,
    "expert_count": Key(int, 0),
    "feed_forward_length": _SIZE,
    "final_logit_softcapping": _FACTOR,
    "full_attention_interval": Key(int, 1, 1024),
    "logit_scale": Key(float, 1e-6, 1e6),
    "nextn_predict_layers": Key(int, 0, 64),
    "pooling_type": Key(int),
    "residual_scale": _FACTOR,
    "rope.dimension_count": Key(int, 1, 4096),
    "rope.dimension_sections": Key(int, 0, 4096, True),
    "rope.freq_base": _BASE,
    "rope.freq_base_swa": _BASE,
    "rope.scaling.attn_factor": _FACTOR,
    "rope.scaling.factor": _FACTOR,
    "rope.scaling.finetuned": _FLAG,
    "rope.scaling.original_context_length": _POSITIONS,
    "rope.scaling.type": Key(str),
    "rope.scaling.yarn_attn_factor": _FACTOR,
    "rope.scaling.yarn_beta_fast": _FACTOR,
    "rope.scaling.yarn_beta_slow": _FACTOR,
    "rope.scaling.yarn_log_multiplier": _FACTOR,
    "shortconv.l_cache": Key(int, 2, 64),
    "ssm.conv_kernel": Key(int, 2, 64),
    "ssm.group_count": Key(int, 1, 4096),
    "ssm.inner_size": _SIZE,
    "ssm.state_size": Key(int, 1, 4096),
    "ssm.time_step_rank": Key(int, 1, 4096),
}
"""What is read of a GGUF's metadata; those of an architecture without its name in front. Beside
them stand the lists of a tokenizer (gguf_tokenizer.py)."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """form: ggml's name of its type, in small letters. shape: in numbers, [outputs, inputs]. data:
    floats of that shape, or uint8 [..., bytes of a row]; read-only, paged in by use."""

    name: str
    form: str
    shape: tuple[int, ...]
    data: npt.NDArray[Any]


class _Cursor:
    """Reads values one after the other. Raises ValueError where the file ends before them."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self.at = 0

    def pass_over(self, num_bytes: int) -> int:
        """Go on behind so many bytes; returns where they begin."""
        if num_bytes > self._size - self.at:
            raise ValueError("it ends in its header")
        self.at += num_bytes
        return self.at - num_bytes

    def count(self, form: str = "<Q") -> int:
        found: tuple[int] = struct.unpack_from(
            form, self._data, self.pass_over(struct.calcsize(form))
        )
        return found[0]

    def text(self, most: int = _MOST_TEXT, errors: str = "strict") -> str:
        size = self.count()
        if size > most:
            raise ValueError(f"a text of {size} bytes")
        at = self.pass_over(size)
        return self._data[at : at + size].decode("utf-8", errors)

    def numbers(self, kind: int, num: int) -> npt.NDArray[Any]:
        dtype = np.dtype(_NUMBERS[kind])
        at = self.pass_over(num * dtype.itemsize)
        # A copy of bytes, because numbers of a GGUF lie anywhere; a flag is any byte.
        raw = self._data[at : at + num * dtype.itemsize]
        return np.frombuffer(raw, "u1").astype(bool) if kind == 7 else np.frombuffer(raw, dtype)

    def skip(self, kind: int, num: int, depth: int = 0) -> None:
        """Pass over the entries of a list."""
        if kind in _NUMBERS:
            self.pass_over(num * np.dtype(_NUMBERS[kind]).itemsize)
        elif kind == _STRING:
            data, size, at = self._data, self._size, self.at
            unpack = struct.Struct("<Q").unpack_from
            for _ in range(num):
                if at + 8 > size:
                    break
                at += 8 + unpack(data, at)[0]
            self.at = min(at, size + 1)
            self.pass_over(0)
        elif kind == _LIST and depth < _MOST_DEEP:
            for _ in range(num):
                self.skip(self.count("<I"), self.count(), depth + 1)
        else:
            raise ValueError(f"metadata of type {kind}, {depth} lists deep")


class GgufIndex:
    """An open GGUF. fields: metadata by key, without long lists and lists of texts; those of KEYS
    are as that says. Raises OSError; ModelError for what is no GGUF, is of another version, is cut
    short, or says what cannot be."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        with path.open("rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise ModelError(f"{path.name} is empty") from None
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._lists: dict[str, tuple[int, int, int]] = {}  # type, entries, where they begin
        try:
            self._read()
        except (ValueError, struct.error) as error:
            raise ModelError(f"{path.name} is no complete GGUF: {str(error)[:200]}") from None

    def release_pages(self) -> None:
        """Give back the memory of what was read; it is read from the file again when needed."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def check_layers(self) -> None:
        """Raises ModelError unless there are tensors of as many layers as the metadata says."""
        said = self.fields.get(f"{self.fields.get('general.architecture')}.block_count", 0)
        found = {name.split(".")[1] for name in self.tensors if name.startswith("blk.")}
        if found != {str(i) for i in range(said)}:
            raise ModelError(
                f"{self.name} is no complete GGUF: its block_count is {said}, and it has tensors "
                f"of {len(found)} layers"
            )

    def texts(self, key: str, most: int) -> list[str] | None:
        """A list of texts of at most so many bytes each; None where there is no such key. Raises
        ModelError for another type, longer ones, and what is not UTF-8."""
        found = self._list(key, (_STRING,), "texts")
        if found is None:
            return None
        cursor, _, num = found
        try:
            return [cursor.text(most) for _ in range(num)]
        except ValueError as error:
            raise ModelError(f"{self.name}: {key}: {str(error)[:200]}") from None

    def numbers(self, key: str) -> npt.NDArray[Any] | None:
        """A list of numbers; None where there is no such key. Raises ModelError for another
        type."""
        found = self._list(key, _NUMBERS, "numbers")
        return None if found is None else found[0].numbers(*found[1:])

    def _list(self, key: str, kinds: Container[int], what: str) -> tuple[_Cursor, int, int] | None:
        """(where a list begins, its type, its entries); None where there is no such key."""
        if key not in self._lists and key not in self.fields:
            return None
        kind, num, at = self._lists.get(key, (-1, 0, 0))
        if kind not in kinds:
            raise ModelError(f"{self.name}: {key} is no list of {what}")
        cursor = _Cursor(self._map)
        cursor.at = at
        return cursor, kind, num

    def _read(self) -> None:
        cursor = _Cursor(self._map)
        if self._map[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        cursor.at = 4
        version = cursor.count("<I")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not read, 2 and 3 are")
        num_tensors, num_fields = cursor.count(), cursor.count()
        if num_tensors > _MOST_TENSORS or num_fields > _MOST_FIELDS:
            raise ValueError(f"it says that it has {num_tensors} tensors and {num_fields} keys")
        for _ in range(num_fields):
            key = cursor.text(1 << 16)
            if key in self.fields or key in self._lists:
                raise ValueError(f"the key {key[:80]} stands twice")
            self._read_value(cursor, key, cursor.count("<I"))
        self._check_fields()
        found = []
        for _ in range(num_tensors):
            name, num = cursor.text(1 << 10), cursor.count("<I")
            if not 1 <= num <= 4:
                raise ValueError(f"the tensor {name[:80]} has {num} dimensions")
            sizes = tuple(cursor.count() for _ in range(num))
            found.append((name, sizes[::-1], cursor.count("<I"), cursor.count()))
        unit = self.fields.get("general.alignment", 32)
        start = -(-cursor.at // unit) * unit
        for name, shape, kind, offset in found:
            if name in self.tensors:
                raise ValueError(f"the tensor {name[:80]} stands twice")
            self.tensors[name] = self._tensor(name, shape, kind, start + offset)

    def _read_value(self, cursor: _Cursor, key: str, kind: int) -> None:
        if kind in _NUMBERS:
            self.fields[key] = cursor.numbers(kind, 1)[0].item()
        elif kind == _STRING:
            self.fields[key] = cursor.text(errors="replace")
        elif kind == _LIST:
            inner, num = cursor.count("<I"), cursor.count()
            self._lists[key] = inner, num, cursor.at
            if inner in _NUMBERS and num <= _MOST_KEPT:
                self.fields[key] = tuple(cursor.numbers(inner, num).tolist())
            else:
                cursor.skip(inner, num)
        else:
            raise ValueError(f"metadata of type {kind} is not known")

    def _check_fields(self) -> None:
        prefix = f"{self.fields.get('general.architecture')}."
        for key, value in self.fields.items():
            rule = KEYS.get(key.removeprefix(prefix))
            if rule is None:
                continue
            values = value if rule.of_layers and isinstance(value, tuple) else (value,)
            if not all(_is(one, rule) for one in values):
                told = repr(value)[:60]
                bounds = "" if math.isinf(rule.low) else f" of {rule.low:g} or more"
                bounds += "" if math.isinf(rule.high) else f" and at most {rule.high:g}"
                name = {int: "a whole number", float: "a number", bool: "a flag", str: "a text"}
                raise ValueError(f"{key} is {told}, which is not {name[rule.kind]}{bounds}")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> GgufTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        form = GGMLQuantizationType(kind)
        block, size = GGML_QUANT_SIZES[form]
        if shape[-1] % block or not all(0 < n < 1 << 40 for n in shape):
            raise ValueError(f"{name[:80]} has the shape {shape}")
        row_bytes = shape[-1] // block * size
        num_bytes = row_bytes * math.prod(shape[:-1])
        if begin + num_bytes > len(self._map):
            raise ValueError(f"{name[:80]} ends past the file's end")
        raw = np.frombuffer(self._map, np.uint8, num_bytes, begin)
        kept = form.name.lower()
        if kept in _FLOATS:
            return GgufTensor(name, kept, shape, raw.view(_FLOATS[kept]).reshape(shape))
        return GgufTensor(name, kept, shape, raw.reshape(*shape[:-1], row_bytes))


def _is(value: Any, rule: Key) -> bool:
    """Whether one value is as a Key says. A whole number is a number, and a flag a whole number
    where the file may have either (sliding_window_pattern)."""
    if rule.kind is str:
        return isinstance(value, str)
    if rule.kind is bool:
        return isinstance(value, bool)
    if isinstance(value, bool):
        return rule.of_layers and rule.kind is int
    is_number = isinstance(value, int) or (rule.kind is float and isinstance(value, float))
    return is_number and rule.low <= value <= rule.high
