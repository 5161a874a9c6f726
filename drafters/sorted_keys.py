"""Looking a key up in an ascending array, in compiled code."""

from __future__ import annotations

from drafters.arrays import Int64
from drafters.jit import compiled, entry


@entry
@compiled
def find_row(keys: Int64, first: int, last: int, key: int) -> int:
    """Index of `key` in the ascending keys[first:last], or -1."""
    low, high = first, last
    while low < high:
        middle = (low + high) // 2
        if keys[middle] < key:
            low = middle + 1
        else:
            high = middle
    if low < last and keys[low] == key:
        return low
    return -1
