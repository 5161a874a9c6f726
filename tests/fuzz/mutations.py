"""How hostile inputs are made of good ones: bytes, numbers, JSON and text that somebody changed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

NUMBERS = (
    0, 1, -1, 2, -2, 3, 7, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 31, -(1 << 31), (1 << 32) - 1,
    1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, -(1 << 63), (1 << 64) - 1, 10**18, 10**30,
)  # fmt: skip
FLOATS = (0.0, -0.0, 0.5, -1.5, 1e-320, 1e38, -1e38, 1e308, float("inf"), float("nan"))
TEXTS = (
    "", " ", "a", "\0", "\ud800", "../../x", "/dev/zero", "a" * 5000, "é" * 300, "%s%n", "{{x}}",
    "<|im_end|>", "*" * 100, "([a-z]+)+!", "null", "1e999", "\r\n", "__class__", "\U0001d518" * 40,
)  # fmt: skip
_BYTES = (b"\0", b"\xff", b"\xff" * 8, b"{", b"[" * 20_000, b'"', b"\n", b"\r", b"\xef\xbb\xbf")


def mutate_bytes(chance: random.Random, data: bytes) -> bytes:
    """One to four changes anywhere: bits, bytes, runs, ends."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(changed) + 1)
        end = min(len(changed), at + chance.choice((1, 2, 4, 8, 64, 512)))
        kind = chance.randrange(6)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            changed[at:end] = chance.randbytes(end - at)
        elif kind == 2:
            del changed[at:end]
        elif kind == 3:
            changed[at:at] = chance.choice(_BYTES)
        elif kind == 4:
            del changed[at:]
        else:
            changed[at:at] = changed[at:end] * chance.choice((1, 2, 50))
    return bytes(changed)


def hostile_value(chance: random.Random, depth: int = 0) -> Any:
    """Any value of JSON, and some that JSON has no words for."""
    kind = chance.randrange(8)
    if kind == 0:
        return chance.choice((None, True, False))
    if kind in (1, 2):
        return chance.choice(NUMBERS)
    if kind == 3:
        return chance.choice(FLOATS)
    if kind == 4:
        return chance.choice(TEXTS)
    if depth > 2:
        return chance.choice(([], {}))
    many = chance.choice((0, 1, 2, 5))
    if kind == 5:
        return [hostile_value(chance, depth + 1) for _ in range(many)]
    if kind == 6:
        return {chance.choice(TEXTS): hostile_value(chance, depth + 1) for _ in range(many)}
    return nested(chance.choice((3, 100, 5000)), chance.choice(("list", "dict")))


def nested(depth: int, kind: str = "list") -> Any:
    """A value in so many lists or objects."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    return value


def mutate_json(chance: random.Random, value: Any) -> Any:
    """A copy with one to three of its values, anywhere, taken out, replaced, doubled or renamed."""
    value = copy.deepcopy(value)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        places: list[tuple[Any, Any]] = []
        _places(value, places)
        if not places:
            return hostile_value(chance)
        owner, key = chance.choice(places)
        kind = chance.randrange(8)
        if kind == 0:
            del owner[key]
        elif kind == 1 and isinstance(owner, dict):
            owner[chance.choice((*TEXTS, f"{key}x"))] = owner.pop(key)
        elif kind == 2 and isinstance(owner, list):
            owner.extend([owner[key]] * chance.choice((1, 20)))
        elif kind == 3 and type(owner[key]) is int:
            owner[key] += chance.choice((-1, 1, 1000))
        elif kind == 4:
            other_owner, other_key = chance.choice(places)
            owner[key] = copy.deepcopy(other_owner[other_key])
        else:
            owner[key] = hostile_value(chance)
    return value


def _places(value: Any, found: list[tuple[Any, Any]]) -> None:
    stack = [value]
    while stack:
        one = stack.pop()
        items = one.items() if isinstance(one, dict) else enumerate(one)
        for key, inner in items:
            found.append((one, key))
            if isinstance(inner, dict | list):
                stack.append(inner)


def one_of(
    *ways: Callable[[random.Random, bytes], bytes],
) -> Callable[[random.Random, bytes], bytes]:
    """A mutation that goes one of these ways, each as often."""

    def mutate(chance: random.Random, data: bytes) -> bytes:
        return chance.choice(ways)(chance, data)

    return mutate
