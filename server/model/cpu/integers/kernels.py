"""The integer kernels: rows of int8 activations against one panel of quantised weights.

What: LLVM IR inside numba intrinsics, one kernel a form (forms.py) and row count, in the words of
the instruction set in use (instructions.py). What not: which panels and rows a thread takes
(product.py), making activations (quantise.py).

The sum of a block (of all inputs, for the form `int8`) is an int32 and exact, so no order, row
count or instruction set can change it. What follows is float32, the same operations in the same
order everywhere:
    int8:    out = float(sum) * (w_scale * x_scale)
    blocks:  acc = 0; for each sub-block in order: acc = fma(float(sum), w_scale * x_scale, acc),
             then, with minima, acc = fma(w_min, x_scale * float(sum of x), acc)
Stored weights are unsigned; the zero is taken off as `-zero * sum of x` before the sum starts.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import cfunc, types

from server.model.cpu.integers.emit import F32, I32, I64, Loop, at, i32, i64, prefetch, splat
from server.model.cpu.integers.forms import BLOCK, FORMS, PANEL, Form
from server.model.cpu.integers.instructions import (
    FLOATS,
    INTS,
    LANES,
    dot,
    fma,
    input_parts,
    ints,
    load_halves,
    load_small,
    load_stored,
    store,
    taken_off,
    weight_parts,
)
from server.model.cpu.vector_ir import intrinsic

__all__ = ["JOB_ITEMS", "call_kernel", "fetch", "kernel_address"]

JOB_ITEMS = 10
"""int64 numbers that tell a kernel what to do: x, bytes between its rows, figures, bytes between
their rows, rows, panel, count, out, bytes between its rows, next panel. x int8 [rows, padded
inputs], figures as quantise.py writes them, out float32; x, figures, panel, out, next panel:
addresses; count: blocks of 32 inputs of the form `int8`, else super-blocks. The next panel, as long
as this one, is fetched from memory while the first rows are multiplied; 0: none."""

# (rows, vectors of outputs) of the kernels, largest first: as many as the registers hold.
_Sizes = tuple[tuple[int, int], ...]
_CHANNEL_SIZES: _Sizes = ((4, 2), (2, 2), (1, 4))
_BLOCK_SIZES: _Sizes = ((3, 2), (2, 2), (1, 4))
if LANES == 16:
    _CHANNEL_SIZES = ((12, 2), (8, 2), (4, 2), (2, 2), (1, 2))
    _BLOCK_SIZES = ((6, 2), (4, 2), (2, 2), (1, 2))
if LANES == 4:
    _CHANNEL_SIZES = ((4, 4), (2, 4), (1, 8))
    _BLOCK_SIZES = ((3, 4), (2, 4), (1, 4))

# --- kernels --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Figures:
    """What a kernel reads of one block of one row's activations: 16 bytes, written by quantise.py.

    first: int32 sum of inputs 0..15. whole: int32 sum of all. scale_sum: scale * float(whole).
    """

    scale: Any
    first: Any
    whole: Any
    scale_sum: Any


def _figures(b: Any, address: Any) -> _Figures:
    return _Figures(
        at(b, address, 0, F32, 4),
        at(b, address, 4, I32, 4),
        at(b, address, 8, I32, 4),
        at(b, address, 12, F32, 4),
    )


def _rows_at(b: Any, address: Any, stride: Any, num_rows: int) -> list[Any]:
    """Addresses of num_rows rows, `stride` bytes apart."""
    return [b.add(address, b.mul(stride, i64(m))) for m in range(num_rows)]


_QUARTERS = 4
"""Parts of a record of the next panel, that the tiles of a panel fetch between them."""


def _fetch(b: Any, following: Any, quarters: Any, offset: Any, num_bytes: int) -> None:
    """Ask memory for some of num_bytes from following + offset, into the L2 cache.

    quarters: a bit for each quarter of the bytes' cache lines.
    """
    first = b.add(following, offset)
    lines = -(-num_bytes // 64)
    each = -(-lines // _QUARTERS)
    for quarter in range(_QUARTERS):
        with b.if_then(b.icmp_signed("!=", b.and_(quarters, i64(1 << quarter)), i64(0))):
            for line in range(quarter * each, min(lines, (quarter + 1) * each)):
                prefetch(b, b.add(first, i64(64 * line)))


class _Kernel:
    """Emits out[m, column : column + LANES * vectors] for m < num_rows.

    Arguments of the emitted function, all int64: x, bytes between its rows, figures, bytes between
    their rows, panel, column, count (blocks of the form `int8`, else super-blocks), out, bytes
    between its rows, next panel, the quarters of it to fetch.
    """

    def __init__(self, form: Form, num_rows: int, vectors: int) -> None:
        self.form, self.num_rows, self.vectors = form, num_rows, vectors
        self.name = f"tailor_integers_{form.name}_{num_rows}_{vectors}"

    def define(self, module: Any) -> Any:
        """The function in a module, made when it is not there."""
        fn = module.globals.get(self.name)
        if fn is None:
            fn = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 11), self.name)
            fn.linkage = "internal"
            fn.attributes.add("noinline")
            b = ir.IRBuilder(fn.append_basic_block("entry"))
            (self._channel if self.form.per_output else self._blocks)(b, fn.args)
            b.ret_void()
        return fn

    def _sums(
        self, b: Any, words: Any, inputs: list[Any], totals: list[Any], steps: range
    ) -> list[Any]:
        """Int32 totals after some groups of 4 inputs of a record that begins at `words`."""
        totals = list(totals)
        for step in steps:
            parts = [
                weight_parts(b, load_stored(b, self.form, words, step, v), self.form)
                for v in range(self.vectors)
            ]
            for m in range(self.num_rows):
                four = input_parts(b, at(b, inputs[m], 4 * step, I32, 4))
                for v in range(self.vectors):
                    i = m * self.vectors + v
                    totals[i] = dot(b, totals[i], parts[v], four)
        return totals

    def _start(self, b: Any, sum_of_inputs: Any) -> list[Any]:
        """Totals of one row before its first product: what the zero point adds, taken off."""
        zero = self.form.zero - taken_off(self.form)
        if not zero:
            return [ints(0)] * self.vectors
        offset = b.mul(sum_of_inputs, i32(-zero))
        return [splat(b, offset, INTS)] * self.vectors

    def _channel(self, b: Any, args: Any) -> None:
        x, ldx, figures, ldf, panel, column, count, out, ldo, following, quarters = args
        rows = _rows_at(b, x, ldx, self.num_rows)
        own = [_figures(b, row) for row in _rows_at(b, figures, ldf, self.num_rows)]
        at_column = b.add(panel, b.mul(column, i64(4)))
        loop = Loop(b, count, [t for f in own for t in self._start(b, f.whole)])
        words = b.add(at_column, i64(self.form.header_bytes))
        words = b.add(words, b.mul(loop.index, i64(self.form.record_bytes)))
        size = self.form.record_bytes
        _fetch(b, following, quarters, b.mul(loop.index, i64(size)), size)
        here = b.mul(loop.index, i64(BLOCK))
        inputs = [b.add(row, here) for row in rows]
        totals = loop.close(self._sums(b, words, inputs, loop.carried, range(8)))
        targets = _rows_at(b, b.add(out, b.mul(column, i64(4))), ldo, self.num_rows)
        for m in range(self.num_rows):
            x_scale = splat(b, own[m].scale, FLOATS)
            for v in range(self.vectors):
                w_scale = at(b, at_column, 4 * LANES * v, FLOATS, 4)
                total = b.sitofp(totals[m * self.vectors + v], FLOATS)
                value = b.fmul(total, b.fmul(w_scale, x_scale))
                store(b, value, targets[m], 4 * LANES * v)

    def _blocks(self, b: Any, args: Any) -> None:
        x, ldx, figures, ldf, panel, column, count, out, ldo, following, quarters = args
        form = self.form
        rows = _rows_at(b, x, ldx, self.num_rows)
        figure_rows = _rows_at(b, figures, ldf, self.num_rows)
        per = form.blocks_per_super
        zeros = [ir.Constant(FLOATS, [0.0] * LANES)] * (self.num_rows * self.vectors)
        outer = Loop(b, count, zeros)
        offset = b.mul(outer.index, i64(form.header_bytes + per * form.record_bytes))
        top = b.add(panel, offset)
        head = self._header(b, b.add(top, b.mul(column, i64(2))))
        block, record = b.mul(outer.index, i64(per)), b.add(top, i64(form.header_bytes))
        inner = Loop(b, i64(per), outer.carried) if per > 1 else None
        if inner is not None:
            offset = b.add(offset, b.mul(inner.index, i64(form.record_bytes)))
            block = b.add(block, inner.index)
            record = b.add(record, b.mul(inner.index, i64(form.record_bytes)))
        _fetch(b, following, quarters, offset, form.record_bytes)
        inputs = [b.add(row, b.mul(block, i64(BLOCK))) for row in rows]
        own = [_figures(b, b.add(row, b.mul(block, i64(16)))) for row in figure_rows]
        acc = self._record(b, record, column, head, inputs, own, (inner or outer).carried)
        if inner is not None:
            acc = inner.close(acc)
        acc = outer.close(acc)
        targets = _rows_at(b, b.add(out, b.mul(column, i64(4))), ldo, self.num_rows)
        for m in range(self.num_rows):
            for v in range(self.vectors):
                store(b, acc[m * self.vectors + v], targets[m], 4 * LANES * v)

    def _header(self, b: Any, halves: Any) -> list[list[Any]]:
        """Of a super-block: [d of each vector], then [dmin of each vector]."""
        if not self.form.two_level:
            return []
        return [
            [load_halves(b, halves, 2 * PANEL * part + 2 * LANES * v) for v in range(self.vectors)]
            for part in range(1 + self.form.has_min)
        ]

    def _record(
        self, b: Any, record: Any, column: Any, head: list[list[Any]], inputs: list[Any],
        own: list[_Figures], acc: list[Any],
    ) -> list[Any]:  # fmt: skip
        """The accumulators after one record."""
        form, vectors = self.form, self.vectors
        acc = list(acc)
        words = b.add(record, b.mul(column, i64(4)))
        tail = b.add(record, i64(form.low_bytes + form.high_bytes))
        tail = b.add(tail, b.mul(column, i64(1 if form.two_level else 2)))
        x_scales = [splat(b, f.scale, FLOATS) for f in own]
        parts = BLOCK // form.sub
        for part in range(parts):
            totals = []
            for f in own:
                part_sum = f.whole
                if parts == 2:
                    part_sum = f.first if part == 0 else b.sub(f.whole, f.first)
                totals += self._start(b, part_sum)
            steps = range(part * 8 // parts, (part + 1) * 8 // parts)
            totals = self._sums(b, words, inputs, totals, steps)
            for v in range(vectors):
                w_scale = self._scale(b, tail, part, v, head)
                for m in range(self.num_rows):
                    i = m * vectors + v
                    factor = b.fmul(w_scale, x_scales[m])
                    acc[i] = fma(b, b.sitofp(totals[i], FLOATS), factor, acc[i])
        for v in range(vectors if form.has_min else 0):
            w_min = self._minimum(b, b.add(tail, i64(form.scale_bytes)), v, head)
            for m in range(self.num_rows):
                i = m * vectors + v
                acc[i] = fma(b, w_min, splat(b, own[m].scale_sum, FLOATS), acc[i])
        return acc

    def _scale(self, b: Any, tail: Any, part: int, v: int, head: list[list[Any]]) -> Any:
        """Scales of a sub-block for one vector of outputs."""
        if not self.form.two_level:
            return load_halves(b, tail, 2 * LANES * v)
        signed = not self.form.has_min
        return b.fmul(head[0][v], load_small(b, tail, PANEL * part + LANES * v, signed))

    def _minimum(self, b: Any, tail: Any, v: int, head: list[list[Any]]) -> Any:
        """What a stored 0 stands for, for one vector of outputs."""
        if not self.form.two_level:
            return load_halves(b, tail, 2 * LANES * v)
        return b.fneg(b.fmul(head[1][v], load_small(b, tail, LANES * v, False)))


def _share_of(b: Any, tile: Any, tiles: Any, following: Any) -> Any:
    """The quarters of the next panel that one of the tiles fetches, as bits: memory is then busy
    for as long as the panel's rows are multiplied, and not only at first."""
    ends = []
    for number in (tile, b.add(tile, i64(1))):
        ends.append(b.shl(i64(1), b.sdiv(b.mul(number, i64(_QUARTERS)), tiles)))
    some = b.sub(ends[1], ends[0])
    return b.select(b.icmp_signed("==", following, i64(0)), i64(0), some)


def _define_rows(module: Any, form: Form) -> Any:
    """A function of the module: all rows against one panel, the largest kernels first."""
    name = f"tailor_integers_{form.name}"
    fn = module.globals.get(name)
    if fn is not None:
        return fn
    fn = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 10), name)
    fn.linkage = "internal"
    fn.attributes.add("noinline")
    x, ldx, figures, ldf, num_rows, panel, count, out, ldo, following = fn.args
    b = ir.IRBuilder(fn.append_basic_block("entry"))
    sizes = _CHANNEL_SIZES if form.per_output else _BLOCK_SIZES
    tiles: Any = i64(0)
    left = num_rows
    for rows, _ in sizes:
        tiles = b.add(tiles, b.sdiv(left, i64(rows)))
        left = b.srem(left, i64(rows))
    done, tile = i64(0), i64(0)
    for rows, vectors in sizes:
        kernel = _Kernel(form, rows, vectors).define(module)
        before = b.block
        test, body, after = (b.append_basic_block(n) for n in ("test", "rows", "after"))
        b.branch(test)
        b.position_at_end(test)
        m, number = b.phi(I64), b.phi(I64)
        m.add_incoming(done, before)
        number.add_incoming(tile, before)
        b.cbranch(b.icmp_signed(">=", b.sub(num_rows, m), i64(rows)), body, after)
        b.position_at_end(body)
        own = [b.add(base, b.mul(m, ld)) for base, ld in ((x, ldx), (figures, ldf), (out, ldo))]
        quarters = _share_of(b, number, tiles, following)
        for column in range(0, PANEL, LANES * vectors):
            last = column + LANES * vectors == PANEL
            arguments = [own[0], ldx, own[1], ldf, panel, i64(column), count, own[2], ldo]
            b.call(kernel, [*arguments, following, quarters if last else i64(0)])
        m.add_incoming(b.add(m, i64(rows)), b.block)
        number.add_incoming(b.add(number, i64(1)), b.block)
        b.branch(test)
        b.position_at_end(after)
        done, tile = m, number
    b.ret_void()
    return fn


def _make_rows(form: Form) -> Any:
    """All rows against one panel of a form: (address of a job)."""

    @intrinsic
    def rows(typingctx: Any, job: Any) -> Any:
        sig = types.void(types.intp)

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            numbers = [at(b, args[0], 8 * i, I64, 8) for i in range(JOB_ITEMS)]
            b.call(_define_rows(b.module, form), numbers)
            return context.get_dummy_value()

        return sig, codegen

    return rows


(_int8_rows, _q8_0_rows, _q4_0_rows, _q4_1_rows, _q5_0_rows, _q5_1_rows, _q4_k_rows, _q5_k_rows,
 _q6_k_rows) = (_make_rows(form) for form in FORMS)  # fmt: skip


# One C function a form, so that each is compiled once, when it is first needed, and not again into
# every numba function that multiplies.


def _int8(job):
    _int8_rows(job)


def _q8_0(job):
    _q8_0_rows(job)


def _q4_0(job):
    _q4_0_rows(job)


def _q4_1(job):
    _q4_1_rows(job)


def _q5_0(job):
    _q5_0_rows(job)


def _q5_1(job):
    _q5_1_rows(job)


def _q4_k(job):
    _q4_k_rows(job)


def _q5_k(job):
    _q5_k_rows(job)


def _q6_k(job):
    _q6_k_rows(job)


_PYTHON = (_int8, _q8_0, _q4_0, _q4_1, _q5_0, _q5_1, _q4_k, _q5_k, _q6_k)
_made: dict[int, Any] = {}  # C functions live as long as the process


def kernel_address(form: Form) -> int:
    """Address of the form's kernel, for call_kernel; compiled when it is first asked for."""
    made = _made.get(form.number)
    if made is None:
        sig = types.void(types.intp)
        made = _made[form.number] = cfunc(sig, cache=True)(_PYTHON[form.number])
    return int(made.address or 0)


@intrinsic
def fetch(typingctx: Any, address: Any, num_bytes: Any) -> Any:
    """Ask memory for num_bytes (at least 1) from an address, into the L2 cache."""
    sig = types.void(types.intp, types.intp)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        loop = Loop(b, args[1], [], step=64)
        prefetch(b, b.add(args[0], loop.index))
        loop.close([])
        return context.get_dummy_value()

    return sig, codegen


@intrinsic
def call_kernel(typingctx: Any, kernel: Any, job: Any) -> Any:
    """Rows of int8 activations against one panel: out[:, 0:PANEL].

    kernel: from kernel_address. job: address of JOB_ITEMS int64.
    """
    sig = types.void(types.intp, types.intp)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64]).as_pointer()
        b.call(b.inttoptr(args[0], kind), [args[1]])
        return context.get_dummy_value()

    return sig, codegen
