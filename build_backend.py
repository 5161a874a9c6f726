"""setuptools' build backend, which for a wheel also needs what compiles its machine code."""

from __future__ import annotations

from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable", "build_sdist", "build_wheel", "get_requires_for_build_editable",
    "get_requires_for_build_sdist", "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable", "prepare_metadata_for_build_wheel",
]  # fmt: skip

COMPILES = ["numba==0.68.1", "llvmlite==0.50.0", "numpy>=2.0", "rich>=13.9", "ziglang==0.16.0"]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """The packages that the build of a wheel needs."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *COMPILES]
