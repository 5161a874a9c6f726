"""Values that files and the command line share: names, devices, amounts of memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[KMGT]i?B?|B)?", re.IGNORECASE)
_UNITS = {
    "": 1, "B": 1,
    "K": 1 << 10, "KB": 10**3, "KI": 1 << 10, "KIB": 1 << 10,
    "M": 1 << 20, "MB": 10**6, "MI": 1 << 20, "MIB": 1 << 20,
    "G": 1 << 30, "GB": 10**9, "GI": 1 << 30, "GIB": 1 << 30,
    "T": 1 << 40, "TB": 10**12, "TI": 1 << 40, "TIB": 1 << 40,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MemorySize:
    """An amount of memory: a fraction of what is free once the weights are loaded, or bytes.

    Exactly one of the two is set.
    """

    fraction: float | None = None
    num_bytes: int | None = None

    def resolve(self, free_bytes: int) -> int:
        """The amount in bytes when `free_bytes` are free."""
        if self.num_bytes is not None:
            return self.num_bytes
        assert self.fraction is not None
        return int(free_bytes * self.fraction)


def parse_memory(value: object) -> MemorySize:
    """0.4, "40%", "2GiB", "500MB" or 2000000000 as a MemorySize.

    A number up to 1 is a fraction, a larger one is bytes. Raises ValueError for anything else.
    """
    if isinstance(value, MemorySize):
        return value
    problem = 'must be a fraction (0.4 or "40%") or an amount ("2GiB", or a number of bytes)'
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(problem)
    text = str(value).strip()
    match = _MEMORY.fullmatch(text)
    if match is None:
        raise ValueError(problem)
    number, unit = float(match[1]), (match[2] or "").upper()
    if unit == "%":
        number, unit = number / 100, ""
        if number > 1:
            raise ValueError("a share of memory is at most 100%")
    if not unit and 0 < number <= 1:
        return MemorySize(fraction=number)
    num_bytes = int(number * _UNITS[unit])
    if num_bytes < 1 << 20:
        raise ValueError("must be at least 1MiB")
    if num_bytes > 1 << 50:
        raise ValueError("must be at most 1024TiB")
    return MemorySize(num_bytes=num_bytes)


def parse_device_list(text: str) -> tuple[str, ...]:
    """ "cuda:0,cuda:1" as ("cuda:0", "cuda:1"). One engine a device; "cpu,cpu" is two engines.

    Raises ValueError for anything but cpu, cuda and cuda:N.
    """
    devices = tuple(part.strip() for part in text.split(","))
    for device in devices:
        check_device(device)
    return devices


def check_device(device: str) -> str:
    if not _DEVICE.fullmatch(device):
        raise ValueError(f"{device[:40]!r} is no device: use cpu, cuda or cuda:N")
    return device


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(
            "a name has 1 to 128 letters, digits and . _ : - and starts with a letter or digit"
        )
    return name


def _from_folder(value: str, info: ValidationInfo) -> str:
    folder: Path | None = (info.context or {}).get("folder")
    return value if folder is None else str(folder / Path(value).expanduser())


def _place(value: str, info: ValidationInfo) -> str:
    return value if "://" in value else _from_folder(value, info)


def _model_path(value: str, info: ValidationInfo) -> str:
    folder: Path | None = (info.context or {}).get("folder")
    is_path = value.startswith((".", "~", "/")) or value.endswith(".gguf")
    is_path = is_path or (folder is not None and (folder / value).exists())
    return _from_folder(value, info) if is_path else value


FilePath = Annotated[str, AfterValidator(_from_folder)]
"""A path that counts from the folder of the file that says it."""
FilePlace = Annotated[str, AfterValidator(_place)]
"""The same, or a URL, which stays as it is."""
ModelPath = Annotated[str, AfterValidator(_model_path)]
"""The same, or a built-in name or a hub's id, which stay as they are."""
Memory = Annotated[MemorySize, BeforeValidator(parse_memory)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
