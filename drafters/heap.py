"""A max-heap for compiled code: keys in one array, the places of their values in another.

    keys = np.empty(capacity, ...); places = np.arange(capacity, dtype=np.int32)
    place = push(keys, places, size, key); columns[place] = ...; size += 1
    place = pop(keys, places, size); size -= 1

places is a permutation: its first `size` entries are in use, in the heap's order; the others are
free. So the values of a key are written once, at `place`, and do not move with their key. A popped
place keeps its values until the next push.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from drafters.arrays import Int32
from drafters.jit import inlined


@inlined
def push(keys: npt.NDArray[Any], places: Int32, size: int, key: float) -> int:
    """Put `key` into a heap of `size` keys, below its capacity; returns the place it stands for."""
    place = int(places[size])
    i = size
    while i > 0:
        up = (i - 1) >> 1
        if keys[up] >= key:
            break
        keys[i] = keys[up]
        places[i] = places[up]
        i = up
    keys[i] = key
    places[i] = place
    return place


@inlined
def pop(keys: npt.NDArray[Any], places: Int32, size: int) -> int:
    """Take the largest key out of a heap of `size` >= 1 keys; returns its place, which is free."""
    top = int(places[0])
    last = size - 1
    key = keys[last]
    place = places[last]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= last:
            break
        if child + 1 < last and keys[child + 1] > keys[child]:
            child += 1
        if keys[child] <= key:
            break
        keys[i] = keys[child]
        places[i] = places[child]
        i = child
    keys[i] = key
    places[i] = place
    places[last] = top
    return top
