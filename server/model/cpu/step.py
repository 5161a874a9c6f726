"""A step in one call of compiled code: the rows' embeddings, all layers, the LM head, greedy draws.

One job of the team does all of it, so the host is not asked between the parts of a step: what
Python does between two of them takes longer than the arithmetic of a small part, because a step's
weights have pushed its code and data out of the caches.
"""
# numba infers the types of compiled functions; their docstrings give shapes and dtypes.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

import operator
import sys
import time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, typeof, types

from server.model.cpu.forward import forward_share
from server.model.cpu.jobs import ROOM_BYTES, make_kept_job
from server.model.cpu.kernels import borrows, float_at
from server.model.cpu.linear import linear
from server.model.cpu.lora import StepAdapters
from server.model.cpu.records import Ends, Float32, Int32, Int64, Rows, Work
from server.model.cpu.sampler import FAILED, argmax, is_finite_row, likeliest_of
from server.model.cpu.soft_cap import soft_cap
from server.model.cpu.team import barrier, declared, run
from server.model.cpu.vector_ir import F32, I16, I32, I64, LANES, i64, intrinsic

_serial = njit(nogil=True, cache=True, error_model="numpy")

READY, FLOAT32, BFLOAT16, FLOAT16, BLOCKS = -1, 0, 1, 2, 3
"""Where embeddings come from: they are in Scratch.x, or a table of such numbers; BLOCKS: of a
GGUF's blocks of 32."""

_BLOCK = 32
_BLOCK_FORMS = {
    "q8_0": (8, False), "q4_0": (4, False), "q4_1": (4, True), "q5_0": (5, False),
    "q5_1": (5, True),
}  # fmt: skip
"""Bits of a number, and whether a block has a minimum behind its scale."""


class Table(NamedTuple):
    """An embedding table in memory that the caller keeps alive.

    address: of its first row. row_bytes: from row to row. num_rows: an id past them has row 0.
    kind: one of the above. scale: factor on the embeddings. bits, has_minima: of BLOCKS.
    """

    address: int
    row_bytes: int
    num_rows: int
    kind: int
    scale: np.float32
    bits: int = 0
    has_minima: bool = False


NO_TABLE = Table(0, 0, 0, READY, np.float32(1.0))


def float_table(tensor: Any) -> Table:
    """The table that a torch tensor [num_rows, H] is; NO_TABLE for one that no kernel reads."""
    kind = {"torch.float32": FLOAT32, "torch.bfloat16": BFLOAT16, "torch.float16": FLOAT16}
    known = kind.get(str(tensor.dtype))
    if known is None or tensor.stride(1) != 1:
        return NO_TABLE
    row_bytes = tensor.stride(0) * tensor.element_size()
    return Table(tensor.data_ptr(), row_bytes, int(tensor.shape[0]), known, np.float32(1.0))


def block_table(form: str, rows: npt.NDArray[np.uint8]) -> Table:
    """The table that rows of a GGUF are, uint8 [num_rows, bytes of a row]; NO_TABLE for a form that
    no kernel reads. form: as integers/forms.py names it."""
    found = _BLOCK_FORMS.get(form)
    if found is None or rows.strides[1] != 1:
        return NO_TABLE
    address, scale = rows.ctypes.data, np.float32(1.0)
    return Table(address, rows.strides[0], rows.shape[0], BLOCKS, scale, *found)


class Tokens(NamedTuple):
    """The rows' ids. taken int32 [R]: -1, or the index in `drawn`, the ids of the step before, of
    the id that a row takes instead; one below 0 there is nobody's, and taken as 0."""

    ids: Int32
    taken: Int32
    drawn: Int32


class Head(NamedTuple):
    """The LM head. weights: a weight kind's record (linear.py). states float32 [room, H], logits
    float32 [room, outputs in whole panels]: of the rows that have logits, in their order. Past
    vocab_size logits are -inf. cap: soft-capping, 0 = none."""

    weights: Any
    states: Float32
    logits: Float32
    vocab_size: int
    cap: float


class Wanted(NamedTuple):
    """What a step gives. rows int32 [n]: those with logits. greedy int32 [n]: filled with their
    argmax, FAILED for one that is not finite; [0]: nothing is drawn. likely_ids int32, chances
    float32 [n, K]: filled as a Likely (engine/batch.py); [0, 0]: none are wanted. clock int64 [2]:
    filled with nanoseconds of time.perf_counter_ns at the head's beginning and end."""

    rows: Int32
    greedy: Int32
    likely_ids: Int32
    chances: Float32
    clock: Int64


NO_LIKELY = (np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32))
"""Wanted.likely_ids and chances where none are wanted."""

_CLOCK = getattr(time, "CLOCK_MONOTONIC", 1)  # what perf_counter reads, but on macOS


@intrinsic
def _now(typingctx: Any) -> Any:
    """Nanoseconds of the monotonic clock; 0 where the C library has none."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if sys.platform == "win32":
            return i64(0)
        room = b.alloca(I64, 2)
        numbers = [ir.Constant(I32, _CLOCK), b.ptrtoint(room, I64)]
        declared(b, "clock_gettime", I32, [I32, I64], numbers)
        seconds, rest = (b.load(b.gep(room, [ir.Constant(I32, i)])) for i in range(2))
        return b.add(b.mul(seconds, i64(1_000_000_000)), rest)

    return types.intp(), codegen


def _narrow_at(half: bool) -> Any:
    """An intrinsic: number `index` of the 16-bit floats at an address as float32."""

    @intrinsic
    def at(typingctx: Any, address: Any, index: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            bits = b.load(b.gep(b.inttoptr(args[0], I16.as_pointer()), [args[1]]))
            if half:
                return b.fpext(b.bitcast(bits, ir.HalfType()), F32)
            return b.bitcast(b.shl(b.zext(bits, I32), ir.Constant(I32, 16)), F32)

        return types.float32(types.intp, types.intp), codegen

    return at


_half_at, _bfloat_at = _narrow_at(half=True), _narrow_at(half=False)


@intrinsic
def _byte_at(typingctx: Any, address: Any) -> Any:
    """The byte at an address, 0 to 255."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.zext(b.load(b.inttoptr(args[0], ir.IntType(8).as_pointer())), I64)

    return types.intp(types.intp), codegen


@borrows
def _block_row(row, table, out):
    """out = the numbers of a row of blocks: the values, in the order of operations, of
    integers/weights.dequantised. A block: float16 scale; float16 minimum, if it has one; with 5
    bits the fifth of each number in 4 bytes; its numbers, of 16 bytes the low halves first."""
    bits = table.bits
    behind = 4 if table.has_minima else 2
    numbers = behind + (4 if bits == 5 else 0)
    size = numbers + (_BLOCK if bits == 8 else _BLOCK // 2)
    zero = np.float32(0 if table.has_minima else 1 << (bits - 1))
    for b in range(out.shape[0] // _BLOCK):
        at = row + b * size
        scale = _half_at(at, 0)
        for i in range(_BLOCK):
            if bits == 8:
                number = _byte_at(at + numbers + i) ^ 128
            else:
                number = _byte_at(at + numbers + i % 16) >> (i // 16 * 4) & 15
                if bits == 5:
                    number |= (_byte_at(at + behind + i // 8) >> (i % 8) & 1) << 4
            value = (np.float32(number) - zero) * scale
            if table.has_minima:
                value += _half_at(at, 1)
            out[b * _BLOCK + i] = value * table.scale


@borrows
def _embed_share(thread, num, tokens, table, x, threads):
    """x[r] = the embedding of this thread's rows r < num."""
    for r in range(thread, num, threads):
        token = tokens.ids[r]
        if tokens.taken[r] >= 0:
            token = max(tokens.drawn[tokens.taken[r]], 0)
        if token >= table.num_rows:
            token = 0
        row = table.address + token * table.row_bytes
        if table.kind == FLOAT32:
            for j in range(x.shape[1]):
                x[r, j] = float_at(row, j) * table.scale
        elif table.kind == BLOCKS:
            _block_row(row, table, x[r])
        elif table.kind == BFLOAT16:
            for j in range(x.shape[1]):
                x[r, j] = _bfloat_at(row, j) * table.scale
        else:
            for j in range(x.shape[1]):
                x[r, j] = _half_at(row, j) * table.scale


@borrows
def _head_share(hidden, head, wanted, work):
    """This thread's part of the logits, and of what is drawn from them."""
    num = wanted.rows.shape[0]
    for i in range(work.thread, num, work.threads):
        for j in range(hidden.shape[1]):
            head.states[i, j] = hidden[wanted.rows[i], j]
    linear(head.states, num, head.weights, 0, head.logits, work)
    for i in range(work.thread, num, work.threads):
        logits = head.logits[i]
        if head.cap > 0.0:
            soft_cap(
                logits.ctypes.data, logits.shape[0] // LANES, np.float32(1.0), np.float32(head.cap)
            )
        for j in range(head.vocab_size, logits.shape[0]):
            logits[j] = -np.inf
        if wanted.greedy.shape[0] > 0:
            finite = is_finite_row(head.states[i])
            wanted.greedy[i] = argmax(logits) if finite else FAILED
            if wanted.chances.shape[0] > 0:
                ids, chances = wanted.likely_ids[i], wanted.chances[i]
                likeliest_of(finite, logits, ids, chances, work.pairs[work.thread])


@borrows
def _step_share(thread, kept, given):
    """What every thread of the team runs: see forward.forward_share. A row's embedding is written
    by the thread that norms it first."""
    table, layers, memory, shape, adapters, head = kept
    embeds, tokens, rows, ends, spans, wanted, work = given
    scratch = memory[2]
    own = Work(work.sync, work.pairs, work.threads, thread)
    if embeds:
        _embed_share(thread, rows.num, tokens, table, scratch.x, work.threads)
    of_rows = StepAdapters(
        spans, adapters.inputs, adapters.parts, adapters.alternate, adapters.up, adapters.inner,
        adapters.wide,
    )  # fmt: skip
    forward_share(thread, rows, ends, layers, memory, shape, of_rows, work)
    if wanted.rows.shape[0] > 0:
        barrier(own)
        if thread == 0:
            wanted.clock[0] = _now()
        _head_share(scratch.hidden, head, wanted, own)
        if thread == 0:
            wanted.clock[1] = _now()


_keep, _give = make_kept_job(_step_share)


@_serial
def _keep_step(kept, given, room):
    return _keep(kept, given, room.ctypes.data)


_IDS, _FLOATS, _COUNTS = np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int64)
_TABLE = np.zeros((0, 0), np.int32)
GIVEN = (
    True,
    Tokens(_IDS, _IDS, _IDS),
    Rows(0, _IDS, _IDS, _IDS, _IDS, _IDS, _IDS, _IDS, _TABLE),
    Ends(False, _TABLE),
    np.zeros((0, 3), np.int64),
    Wanted(_IDS, _IDS, _TABLE, _FLOATS.reshape(0, 0), _COUNTS),
    Work(_COUNTS, _FLOATS.reshape(0, 0), 1, 0),
)
"""What a step is given, in the types that every step's has."""


@njit(
    types.intp(types.intp, typeof(_COUNTS), typeof(GIVEN)),
    nogil=True, cache=True, error_model="numpy",
)  # fmt: skip
def _compute(share, room, given):
    _, tokens, rows, _, _, wanted, work = given
    for r in range(rows.num):
        if tokens.taken[r] >= tokens.drawn.shape[0]:
            raise IndexError("a row takes its token from a draw that the previous batch lacks")
    wanted.clock[:] = 0
    _give(given, room.ctypes.data)
    run((share, room.ctypes.data), work)
    num_failed = 0
    for i in range(wanted.greedy.shape[0]):
        num_failed += wanted.greedy[i] == FAILED
    return num_failed


class KeptStep:
    """What is the same in every step, as compiled code reads it.

    kept: (Table, Layers, (Positions, Cache, Scratch), Shape, StepAdapters of whatever spans, Head).
    share: address of what each thread runs. room: memory of what it reads, for HeldStep too.
    """

    def __init__(self, kept: tuple[Any, ...]) -> None:
        self._kept = kept
        self.room = np.zeros(ROOM_BYTES // 8, np.int64)
        self.share = _keep_step(kept, GIVEN, self.room)

    def is_of(self, kept: tuple[Any, ...]) -> bool:
        """Whether it was made of these very objects."""
        return all(map(operator.is_, self._kept, kept))

    def compute(
        self, embeds: bool, tokens: Tokens, rows: tuple[Rows, Ends], spans: Int64, wanted: Wanted,
        work: Work,
    ) -> int:  # fmt: skip
        """A whole step: Scratch.hidden of the rows that Ends has, logits of the wanted ones, and
        what is drawn of them; returns how many draws failed.

        embeds: whether rows have their embeddings from the table; else they are in Scratch.x.
        spans: of the rows that have an adapter (lora.StepAdapters). Raises IndexError for a row
        that takes an id that was not drawn, TypeError for arrays of other types than Batch's.
        """
        given = (embeds, tokens, *rows, spans, wanted, work)
        return int(_compute(self.share, self.room, given))
