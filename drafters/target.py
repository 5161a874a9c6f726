"""Which instructions machine code may use: the CPUs that code is made for, and this one.

Machine code comes with the package for the CPUs of TARGETS that are shipped. A CPU that is none of
TARGETS is `native`. Code for others is made where it is needed. TAILOR_CPU names another target,
for code that another CPU of the same architecture would run.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
from typing import NamedTuple

__all__ = ["NATIVE", "TARGETS", "Target", "chosen", "native", "runs_here"]


class Target(NamedTuple):
    """A kind of CPU.

    triple, cpu: LLVM's names; cpu "" is this one. features: LLVM's names of what kernels look for,
    and what a CPU must have. base: the target whose code this one runs too, but for the integer
    kernels, which look at all features. shipped: whether wheels have its code.
    """

    name: str
    triple: str
    cpu: str
    features: frozenset[str]
    base: str
    shipped: bool = True

    @property
    def told(self) -> str:
        """The features as LLVM takes them."""
        return ",".join(f"+{name}" for name in sorted(self.features))


_X86, _ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
_AVX2 = frozenset({"avx", "avx2", "fma", "f16c", "bmi", "bmi2", "popcnt"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
_NEON = frozenset({"neon", "dotprod", "lse", "rdm", "crc"})

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("x86-64", _X86, "x86-64", frozenset({"sse2"}), "x86-64", shipped=False),
        Target("avx2", _X86, "x86-64-v3", _AVX2, "avx2"),
        Target("avx-vnni", _X86, "x86-64-v3", _AVX2 | {"avxvnni"}, "avx2"),
        Target("avx512", _X86, "x86-64-v4", _AVX512, "avx512"),
        Target("avx512-vnni", _X86, "x86-64-v4", _AVX512 | {"avx512vnni"}, "avx512"),
        Target(
            "amx", _X86, "x86-64-v4",
            _AVX512 | {"avx512vnni", "amx-tile", "amx-int8", "amx-bf16"}, "avx512",
        ),
        Target("neon-dotprod", _ARM, "neoverse-n1", _NEON, "neon-dotprod"),
        Target("neon-i8mm", _ARM, "neoverse-n1", _NEON | {"i8mm"}, "neon-dotprod"),
    )
}  # fmt: skip
"""Of each architecture the plainest first."""

NATIVE = "native"

# Linux' names of features that differ from LLVM's.
_LINUX = {
    "avx512_vnni": "avx512vnni", "avx_vnni": "avxvnni", "amx_tile": "amx-tile",
    "amx_int8": "amx-int8", "amx_bf16": "amx-bf16", "bmi1": "bmi", "asimd": "neon",
    "asimddp": "dotprod", "atomics": "lse", "asimdrdm": "rdm", "crc32": "crc",
}  # fmt: skip


def _features() -> frozenset[str]:
    """This CPU's features, as far as the system names them."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, words = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return frozenset(_LINUX.get(word, word) for word in words.split())
    except OSError:
        pass
    return frozenset()


def best(machine: str, features: frozenset[str]) -> str:
    """The name of the last of TARGETS that a CPU has all features of; NATIVE for none."""
    found = NATIVE
    for target in TARGETS.values():
        if target.triple.startswith(machine) and target.features <= features:
            found = target.name
    return found


def native() -> Target:
    """This CPU, whatever it is."""
    features = _features()
    if platform.machine() == "arm64":  # Apple's
        features |= {"neon", "dotprod"}
    return Target(NATIVE, "", "", features, NATIVE, shipped=False)


def runs_here(target: Target) -> bool:
    """Whether this CPU has all that a target's code may use."""
    return target.triple.startswith(platform.machine()) and target.features <= _features()


@functools.cache
def chosen() -> Target:
    """What this process runs. Raises ValueError for a TAILOR_CPU that is not known."""
    name = os.environ.get("TAILOR_CPU")
    if not name:
        name = best(platform.machine(), _features()) if sys.platform == "linux" else NATIVE
    if name == NATIVE:
        return native()
    if name not in TARGETS:
        raise ValueError(f"TAILOR_CPU={name}: there are {', '.join([*TARGETS, NATIVE])}")
    return TARGETS[name]
