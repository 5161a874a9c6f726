"""Whether transformers' forward can be served on our attention: tried when a model is loaded.

    found = inspected(module, ids)      # inspection.py, before its modules are replaced
    called(module, ...)                 # after: what its layers ask the attention for
    check_rows(module, ...)             # the same bits in every batch, and the right ones

A model is refused by name unless all of these hold: every layer calls the attention interface once,
with windows that are those of its own masks; every operation is row by row (Recorder); and on
a short text one row at a time, all rows at once and a draft tree give the same bits, which are
transformers' own logits to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from server.model.cpu.records import Rows
from server.model.inspection import Inspected, check_logits, heads_asked_for, refusal
from server.model.interface import StepHolder

VECTOR = 32
"""Elements that torch's loops take at once at most (AVX-512, unrolled twice). The rest of an array
goes through other functions, whose last bit may differ: so a row must be whole vectors wide."""

# Operations that give a row the same bits whatever rows are beside it. Sums over rows, products and
# anything unknown are refused by name. torch runs them on one thread here, so that an array is not
# cut at places that its number of rows decides.
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
        self._num_rows = num_rows
        self.reasons: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
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


def called(
    module: nn.Module, holder: StepHolder, ids: torch.Tensor, found: Inspected
) -> tuple[int, int, int]:
    """See inspection.heads_asked_for, after a module's modules are replaced. Raises
    UnsupportedModelError, also for operations that are not row by row."""
    heads_asked_for(module, holder, ids, found)  # once for what is computed once (rotary tables)
    with Recorder(ids.shape[1]) as recorder:
        sizes = heads_asked_for(module, holder, ids, found)
    if recorder.reasons:
        raise refusal(module, "; ".join(sorted(set(recorder.reasons))[:3]))
    return sizes


# --- the same bits, and the right ones ------------------------------------------------------------

Forward = Callable[[Any, Rows], Any]
"""Token ids int64 [R] and Rows -> hidden states float32 [R, H], already on the paged cache."""


def _linear_rows(first: int, num: int, table: Any) -> Rows:
    positions = np.arange(first, first + num, dtype=np.int32)
    none = np.zeros(num, np.int32)
    slots = table[0, positions // 16] * 16 + positions % 16
    return Rows(
        num, positions, slots.astype(np.int32), none, positions + 1, none, none,
        np.zeros(0, np.int32), table,
    )  # fmt: skip


def _tree_rows(root: int, num: int, table: Any) -> tuple[Rows, Any]:
    """A chain of num nodes behind position root, each with a wrong sister before it, and the
    chain's rows among them."""
    every = np.arange(2 * num)
    nth = every // 2
    positions = (root + 1 + nth).astype(np.int32)
    at = root + 1 + every
    slots = (table[0, at // 16] * 16 + at % 16).astype(np.int32)
    paths = [[*slots[1 : 2 * n : 2], slots[i]] for i, n in enumerate(nth)]
    lengths = np.array([len(path) for path in paths], np.int32)
    starts = (np.cumsum(lengths) - lengths).astype(np.int32)
    none = np.zeros(2 * num, np.int32)
    rows = Rows(
        2 * num, positions, slots, none, none + root + 1, starts, lengths,
        np.concatenate(paths).astype(np.int32), table,
    )  # fmt: skip
    return rows, every[1::2]


def check_rows(module: nn.Module, forward: Forward, ids: Any, found: Inspected) -> None:
    """One by one, at once, in uneven chunks and as a tree: the same bits; and transformers' own
    log-probabilities. ids: int64 [NUM_PROBED]. Raises UnsupportedModelError."""
    tables = [np.array([[7, 2, 5, 0]], np.int32), np.array([[1, 6, 3, 4]], np.int32)]
    alone = np.concatenate(
        [forward(ids[i : i + 1], _linear_rows(i, 1, tables[0])) for i in range(ids.shape[0])]
    )
    num = ids.shape[0]
    chunks = {"all rows at once": (num,), "chunks": (5, 2, 17, num - 24)}
    for name, lengths in chunks.items():
        got, first = [], 0
        for length in lengths:
            rows = _linear_rows(first, length, tables[1])
            got.append(forward(ids[first : first + length], rows))
            first += length
        _same(module, name, np.concatenate(got), alone)
    root, depth = num - 12, 11
    rows, chain = _tree_rows(root, depth, tables[1])
    drafted = np.repeat(ids[root + 1 : root + 1 + depth], 2)
    drafted[::2] = ids[:depth]
    forward(ids[: root + 1], _linear_rows(0, root + 1, tables[1]))
    _same(module, "a draft tree", forward(drafted, rows)[chain], alone[root + 1 :])
    width = int(module.get_output_embeddings().weight.shape[1])  # type: ignore[operator]
    check_logits(module, torch.from_numpy(alone)[:, :width], found)


def _same(module: nn.Module, name: str, got: Any, want: Any) -> None:
    if not np.array_equal(got, want):
        row = int(np.flatnonzero((got != want).any(axis=1))[0])
        raise refusal(module, f"{name} and one row at a time differ, first at row {row}")
