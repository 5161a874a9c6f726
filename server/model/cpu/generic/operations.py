"""Which of torch's operations give a row the same bits whatever rows are beside it.

A model of the generic path is served when every operation that its forward runs on a CPU is one of
these. Sums over rows, products and anything unknown are refused by name. torch runs them on one
thread here, so that an array is not cut at places that its number of rows decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["VECTOR", "Recorder"]

VECTOR = 32
"""Elements that torch's loops take at once at most (AVX-512, unrolled twice). The rest of an array
goes through other functions, whose last bit may differ: so a row must be whole vectors wide."""

# Copies and views: no arithmetic.
_SHAPES = set(
    """view _unsafe_view reshape transpose permute expand slice select split split_with_sizes chunk
    cat stack unsqueeze squeeze clone _to_copy copy_ alias detach t index index_select embedding
    arange full full_like zeros zeros_like ones ones_like empty empty_like new_empty empty_strided
    as_strided unbind repeat lift_fresh scalar_tensor _reshape_alias new_zeros new_ones""".split()
)
# One rounding each, by IEEE 754, wherever the element lies.
_EXACT = set(
    """add add_ sub sub_ rsub mul mul_ div div_ neg abs relu sqrt rsqrt reciprocal maximum minimum
    clamp clamp_min clamp_max where eq ne lt gt le ge logical_and logical_or logical_not sign
    masked_fill masked_fill_ bitwise_and bitwise_or bitwise_not square hardtanh round
    floor""".split()
)
# Other functions for whole vectors and for the rest of an array.
_CURVES = set(
    """exp expm1 tanh tanh_ sigmoid sigmoid_ silu silu_ gelu gelu_ softplus erf log log1p sin cos
    mish hardswish elu leaky_relu""".split()
)
# Along the last dimension, in an order that its length decides.
_ALONG = set("mean sum amax max native_layer_norm _fused_rms_norm _softmax".split())
_LONGEST = 32768  # a longer sum of one row may be shared between threads


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations that run under it. reasons: what is not allowed, in words.

    num_rows: of the forward, a prime: an array whose size is no multiple of it is of no row.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_on = True
        self._num_rows = num_rows
        self.reasons: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_on:
            name = func.overloadpacket.__name__
            if any(size % self._num_rows == 0 for size in _sizes(args)):
                against = _against(name, args, kwargs or {})
                self.reasons += [f"torch.{name} {why}" for why in against]
        return result


def _sizes(args: tuple[Any, ...]) -> Iterator[int]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg.numel()
        elif isinstance(arg, (list, tuple)):
            yield from (part.numel() for part in arg if isinstance(part, torch.Tensor))


def _against(name: str, args: tuple[Any, ...], kwargs: Any) -> Iterator[str]:
    if name in _SHAPES:
        return
    first = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if first is not None and not first.is_floating_point():
        return  # positions and masks: integers
    if name in _EXACT:
        if kwargs.get("alpha", 1) != 1:
            yield "has a factor"
        return
    if first is None or first.ndim == 0:
        yield "is not known to be computed row by row"
    elif name == "pow":
        if len(args) < 2 or args[1] not in (2, 3, 2.0, 3.0):
            yield f"by {args[1]} has no fixed order"
    elif name in _CURVES:
        if first.shape[-1] % VECTOR:
            yield f"is on {first.shape[-1]} elements a row, not on a multiple of {VECTOR}"
    elif name in _ALONG:
        yield from _against_along(name, first, args)
    else:
        yield "is not known to be computed row by row"


def _against_along(name: str, first: torch.Tensor, args: tuple[Any, ...]) -> Iterator[str]:
    dims = args[1] if len(args) > 1 else None
    last = first.ndim - 1
    if name in ("native_layer_norm", "_fused_rms_norm"):
        dims = [last] if list(dims or ()) == [first.shape[-1]] else None
    along = [dims] if isinstance(dims, int) else list(dims or ())
    if [dim % first.ndim for dim in along] != [last]:
        yield "is not along the last dimension"
    elif first.shape[-1] > _LONGEST or first.stride(-1) != 1:
        yield f"is along {first.shape[-1]} elements that are too many or not neighbours"
