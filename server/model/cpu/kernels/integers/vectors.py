"""The integer kernels in vector instructions: rows of int8 activations against one panel.

What: LLVM IR, one function a form (cpu/integers/forms.py) and row count. What not: the same with
AMX tiles, the functions that are called (tiles.py).

How u8 x s8 is summed in fours follows from the features of the CPU that is compiled for
(records.integer_kernel): `vpdpbusd` where there is one (AVX-512 VNNI, AVX-VNNI). On AVX2 and
AVX-512BW alone, numbers of less than 8 bits are summed by `vpmaddubsw` in int16, for as many inputs
as cannot overflow it (of 4 bits a whole block); those of 8 bits, whose pairs can, are widened to
int16 for `vpmaddwd`, even bytes and odd ones. On AArch64 `usdot` (i8mm) or `sdot`, which takes
8-bit weights less 128; else plain int32 multiplications, which LLVM makes for any CPU. All give the
same sums.

The sum of a block (of all inputs, for the form `int8`) is an int32 and exact, so no order, row
count or instruction set can change it. What follows is float32, the same operations in the same
order everywhere:
    int8:    out = float(sum) * (w_scale * x_scale)
    blocks:  acc = 0; for each sub-block in order: acc = fma(float(sum), w_scale * x_scale, acc),
             then, with minima, acc = fma(w_min, x_scale * float(sum of x), acc)
Stored weights are unsigned; the zero is taken off as `-zero * sum of x` before the sum starts.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from server.model.cpu.integers.forms import BLOCK, PANEL, Form
from server.model.cpu.kernels.ir import (
    F32,
    I8,
    I16,
    I32,
    I64,
    Loop,
    at,
    call,
    const,
    fma,
    function,
    i32,
    i64,
    keep_order,
    load_halves,
    prefetch,
    put,
    splat,
)  # fmt: skip
from server.model.cpu.records import INTEGER_KERNEL as KERNEL
from server.model.cpu.records import LANES as ROW_LANES

LANES = 16 if KERNEL.startswith("avx512") else 4 if KERNEL.startswith("neon") else 8
"""Outputs of one vector."""

INTS = ir.VectorType(I32, LANES)
FLOATS = ir.VectorType(F32, LANES)
_BYTES = ir.VectorType(I8, 4 * LANES)
_SHORTS = ir.VectorType(I16, 2 * LANES)


def ints(value: int) -> Any:
    """The same int32 in every lane."""
    return const(value - (1 << 32) if value >= 1 << 31 else value, INTS)


def store(b: Any, value: Any, address: Any, offset: int) -> None:
    """Write a vector of floats at address + offset bytes."""
    put(b, value, address, offset, 4)


# --- sums of four products ------------------------------------------------------------------------

_VNNI = KERNEL.endswith("vnni")
_MADD = KERNEL in ("avx512", "avx2")
_NEON = {"neon-i8mm": "usdot", "neon-dotprod": "sdot"}.get(KERNEL)
_OF_BYTES, _OF_SHORTS = "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"
if LANES == 16:
    _OF_BYTES, _OF_SHORTS = "llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"
_HALF_BLOCK = ir.VectorType(I16, BLOCK // 2)


def taken_off(form: Form) -> int:
    """What _weight_parts takes off every stored number: 0 where bytes are multiplied unsigned."""
    return 128 if _NEON == "sdot" and form.bits == 8 else 0


def _in_shorts(form: Form) -> bool:
    """Whether sums begin in int16."""
    return _MADD and form.bits < 8


def _is_widened(form: Form) -> bool:
    """Whether inputs are int16 before they are multiplied."""
    return _MADD and form.bits == 8


def _num_parts(form: Form) -> int:
    """Products that make the sum of four."""
    return 2 if _is_widened(form) else 1 if _MADD or _VNNI or _NEON is not None else 4


def _widen(b: Any, inputs: Any, room: Any) -> None:
    """Write a block of inputs to `room` as int16, its even ones, then its odd ones: made where they
    are multiplied, four at a time, they took a quarter of the time. Both are addresses."""
    pairs, eight = at(b, inputs, 0, _HALF_BLOCK, 1), const(8, _HALF_BLOCK)
    put(b, b.ashr(b.shl(pairs, eight), eight), room, 0, BLOCK)
    put(b, b.ashr(pairs, eight), room, BLOCK, BLOCK)


def _pinned(b: Any, sums: list[Any]) -> list[Any]:
    """The same sums, here, and all in registers. Without it LLVM adds up several products before it
    adds them to a sum, and writes to memory what it has no register for: up to half of the time."""
    num, kinds = len(sums), [value.type for value in sums]
    constraints = ",".join(["=x"] * num + [str(i) for i in range(num)] + ["~{memory}"])
    kind = ir.FunctionType(ir.LiteralStructType(kinds), kinds)
    held = b.call(ir.InlineAsm(kind, "", constraints, side_effect=True), sums)
    return [b.extract_value(held, i) for i in range(num)]


def _weight_parts(b: Any, w: Any, form: Form) -> list[Any]:
    """What _dot needs of LANES x 4 stored bytes (int32 lanes), made once for all rows."""
    if _VNNI:
        return [w]
    if _NEON is not None:
        return [b.bitcast(b.xor(w, ints(0x80808080)) if taken_off(form) else w, _BYTES)]
    if _in_shorts(form):
        return [b.bitcast(w, _BYTES)]
    if _is_widened(form):
        pairs = b.bitcast(w, _SHORTS)
        return [b.and_(pairs, const(0xFF, _SHORTS)), b.lshr(pairs, const(8, _SHORTS))]
    return [b.and_(b.lshr(w, ints(8 * j)), ints(0xFF)) for j in range(4)]


def _input_parts(b: Any, inputs: Any, step: int, form: Form) -> list[Any]:
    """What _dot needs of the activations 4 * step .. 4 * step + 3 of a block at an address."""
    x = at(b, inputs, 4 * step, I32, 4)
    if _VNNI:
        return [splat(b, x, INTS)]
    if _NEON is not None or _in_shorts(form):
        return [b.bitcast(splat(b, x, INTS), _BYTES)]
    if _is_widened(form):
        odd = at(b, inputs, BLOCK + 4 * step, I32, 4)
        return [b.bitcast(splat(b, pair, INTS), _SHORTS) for pair in (x, odd)]
    top = i32(24)
    return [splat(b, b.ashr(b.shl(x, i32(24 - 8 * j)), top), INTS) for j in range(4)]


def _dot(b: Any, total: Any, w: Any, x: Any, form: Form) -> Any:
    """total + the sum of the products of one part in every lane, exact."""
    if _VNNI:
        name = f"llvm.x86.avx512.vpdpbusd.{32 * LANES}"
        # Up to LLVM 20 the bytes were passed as int32 lanes.
        as_bytes = llvm.llvm_version_info[0] > 20
        operands = [b.bitcast(v, _BYTES) if as_bytes else v for v in (w, x)]
        return call(b, name, INTS, [total, *operands])
    if _NEON is not None:
        return call(b, f"llvm.aarch64.neon.{_NEON}.v4i32.v16i8", INTS, [total, w, x])
    if _in_shorts(form):
        return b.add(total, call(b, _OF_BYTES, _SHORTS, [w, x]))
    return b.add(total, call(b, _OF_SHORTS, INTS, [w, x]) if _MADD else b.mul(w, x))


# --- unpacking ------------------------------------------------------------------------------


def load_small(b: Any, address: Any, offset: int, signed: bool) -> Any:
    """LANES 8-bit numbers as floats."""
    raw = at(b, address, offset, ir.VectorType(I8, LANES), 1)
    wide = b.sext(raw, INTS) if signed else b.zext(raw, INTS)
    return b.sitofp(wide, FLOATS)


def _shifted(b: Any, value: Any, left: int) -> Any:
    """value << left, or >> -left, in every int32 lane."""
    if left == 0:
        return value
    return b.shl(value, ints(left)) if left > 0 else b.lshr(value, ints(-left))


def load_stored(b: Any, form: Form, record: Any, step: int, vector: int) -> Any:
    """The stored numbers of inputs 4 * step .. 4 * step + 3: LANES x 4 bytes as int32 lanes."""
    column = 4 * LANES * vector
    if form.bits == 8:
        return at(b, record, 4 * PANEL * step + column, INTS, 4)
    low = at(b, record, 4 * PANEL * (step % 4) + column, INTS, 4)
    value = b.and_(_shifted(b, low, 0 if step < 4 else -4), ints(0x0F0F0F0F))
    if form.bits == 5:
        high = at(b, record, form.low_bytes + column, INTS, 4)
        value = b.or_(value, b.and_(_shifted(b, high, 4 - step), ints(0x10101010)))
    if form.bits == 6:
        high = at(b, record, form.low_bytes + 4 * PANEL * (step // 4) + column, INTS, 4)
        value = b.or_(value, b.and_(_shifted(b, high, 4 - 2 * (step % 4)), ints(0x30303030)))
    return value


# (rows, vectors of outputs) of the kernels, largest first: as many as the registers hold.
_Sizes = tuple[tuple[int, int], ...]
_CHANNEL_SIZES: _Sizes = ((4, 2), (2, 2), (1, 4))
_BLOCK_SIZES: _Sizes = ((3, 2), (2, 2), (1, 4))
if KERNEL == "avx2":
    _CHANNEL_SIZES = ((3, 4), (2, 4), (1, 4))
    _BLOCK_SIZES = ((6, 2), (5, 2), (4, 2), (3, 4), (2, 4), (1, 4))
if LANES == 16:
    _CHANNEL_SIZES = ((12, 2), (8, 2), (4, 2), (2, 2), (1, 2))
    _BLOCK_SIZES = ((6, 2), (4, 2), (2, 2), (1, 2))
if LANES == 4:
    _CHANNEL_SIZES = ((4, 4), (2, 4), (1, 8))
    _BLOCK_SIZES = ((3, 4), (2, 4), (1, 4))


def _sizes(form: Form) -> _Sizes:
    if KERNEL == "avx2" and form.bits == 4:
        return _BLOCK_SIZES[1:]  # the sums of six rows do not fit the registers
    return _CHANNEL_SIZES if form.per_output else _BLOCK_SIZES


# --- kernels --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figures:
    """What a kernel reads of one block of one row's activations: 16 bytes (integer_rows.py).

    first: int32 sum of inputs 0..15. whole: int32 sum of all. scale_sum: scale * float(whole).
    """

    scale: Any
    first: Any
    whole: Any
    scale_sum: Any


def figures_at(b: Any, address: Any) -> Figures:
    return Figures(
        at(b, address, 0, F32, 4),
        at(b, address, 4, I32, 4),
        at(b, address, 8, I32, 4),
        at(b, address, 12, F32, 4),
    )


def rows_at(b: Any, address: Any, stride: Any, num_rows: int) -> list[Any]:
    """Addresses of num_rows rows, `stride` bytes apart."""
    return [b.add(address, b.mul(stride, i64(m))) for m in range(num_rows)]


def _share_bytes(form: Form) -> int:
    """Bytes of a panel for each of its records, with their part of the headers."""
    headers = 0 if form.per_output else form.header_bytes
    return form.record_bytes + -(-headers // form.blocks_per_super)


def fetch_share(b: Any, form: Form, share: list[Any], first: Any, num: int) -> None:
    """Ask memory for what belongs to `num` records from one on of a share, into the L2 cache.

    share: share_of's address, 0 where nothing is to be fetched, and bytes a record, whole lines.
    """
    address, each = share
    with b.if_then(b.icmp_signed("!=", address, i64(0))):
        begin, num_bytes = b.add(address, b.mul(first, each)), b.mul(each, i64(num))
        prefetch(b, begin)
        lines, done = -(-num * _share_bytes(form) // 64), 1
        while done < lines:
            with b.if_then(b.icmp_signed(">", num_bytes, i64(64 * done))):
                for line in range(done, min(lines, 2 * done)):
                    prefetch(b, b.add(begin, i64(64 * line)))
            done *= 2


def header(b: Any, form: Form, vectors: int, halves: Any) -> list[list[Any]]:
    """Of a super-block: [d of each vector], then [dmin of each vector]; [] where there are none."""
    if not form.two_level:
        return []
    return [
        [load_halves(b, halves, 2 * PANEL * part + 2 * LANES * v, LANES) for v in range(vectors)]
        for part in range(1 + form.has_min)
    ]


def scale(b: Any, form: Form, tail: Any, part: int, v: int, head: list[list[Any]]) -> Any:
    """Scales of a sub-block for one vector of outputs."""
    if not form.two_level:
        return load_halves(b, tail, 2 * LANES * v, LANES)
    signed = not form.has_min
    return b.fmul(head[0][v], load_small(b, tail, PANEL * part + LANES * v, signed))


def minimum(b: Any, form: Form, tail: Any, v: int, head: list[list[Any]]) -> Any:
    """What a stored 0 stands for, for one vector of outputs."""
    if not form.two_level:
        return load_halves(b, tail, 2 * LANES * v, LANES)
    return b.fneg(b.fmul(head[1][v], load_small(b, tail, LANES * v, False)))


class _Kernel:
    """Emits out[m, column : column + LANES * vectors] for m < num_rows.

    Arguments of the emitted function, all int64: x, bytes between its rows, figures, bytes between
    their rows, panel, column, count (blocks of the form `int8`, else super-blocks), out, bytes
    between its rows, what to fetch (share_of).
    """

    def __init__(self, form: Form, num_rows: int, vectors: int) -> None:
        self.form, self.num_rows, self.vectors = form, num_rows, vectors
        # In which order a group's products are made, and what is loaded for them together.
        parts, rows, columns = range(_num_parts(form)), range(num_rows), range(vectors)
        self.turns = [list(itertools.product([part], rows, columns)) for part in parts]
        if num_rows < vectors:
            self.turns = [[(p, m, v) for v in columns for p in parts for m in rows]]
        self.pinned = KERNEL == "avx2" and not form.per_output
        self.run = 32767 // (2 * 127 * (2**form.bits - 1))  # groups whose sums int16 holds

    def emit(self, b: Any, args: Any) -> None:
        """What the function does."""
        # Vectors that cross lines of memory took half of the time.
        b.function.attributes.alignstack = 4 * LANES
        self.room = None
        if _is_widened(self.form):
            memory = b.alloca(ir.ArrayType(I8, 2 * BLOCK * self.num_rows))
            memory.align = 64
            self.room = b.ptrtoint(memory, I64)
        (self._channel if self.form.per_output else self._blocks)(b, args)

    def _sums(
        self, b: Any, words: Any, inputs: list[Any], totals: list[Any], steps: range
    ) -> list[Any]:
        """Int32 totals after some groups of 4 inputs of a record that begins at `words`."""
        sums, in_shorts = list(totals), _in_shorts(self.form)
        for nth, step in enumerate(steps):
            if in_shorts and nth % self.run == 0:
                sums = [const(0, _SHORTS)] * len(totals)
            for turn in self.turns:
                weights: dict[int, list[Any]] = {}
                fours: dict[int, list[Any]] = {}
                for part, m, v in turn:
                    if v not in weights:
                        stored = load_stored(b, self.form, words, step, v)
                        weights[v] = _weight_parts(b, stored, self.form)
                    if m not in fours:
                        fours[m] = _input_parts(b, inputs[m], step, self.form)
                    i = m * self.vectors + v
                    sums[i] = _dot(b, sums[i], weights[v][part], fours[m][part], self.form)
                if self.pinned:
                    sums = _pinned(b, sums)
            if self.num_rows == 1 and self.form.bits == 8:
                # One row waits for memory, and the core's prefetcher asks for less of it when
                # lines are read in the compiler's order instead of their own. (Rows more multiply
                # for longer, and forms of fewer bits read lines that are used twice: no gain.)
                keep_order(b)
            if in_shorts and ((nth + 1) % self.run == 0 or nth + 1 == len(steps)):
                ones = const(1, _SHORTS)
                wide = [call(b, _OF_SHORTS, INTS, [short, ones]) for short in sums]
                totals = [b.add(*both) for both in zip(totals, wide, strict=True)]
        return totals if in_shorts else sums

    def _inputs(self, b: Any, rows: list[Any], block: Any) -> list[Any]:
        """Addresses of a block's inputs of all rows, for _input_parts."""
        inputs = [b.add(row, b.mul(block, i64(BLOCK))) for row in rows]
        if self.room is None:
            return inputs
        widened = rows_at(b, self.room, i64(2 * BLOCK), self.num_rows)
        for x, room in zip(inputs, widened, strict=True):
            _widen(b, x, room)
        keep_order(b, self.room)
        return widened

    def _start(self, b: Any, sum_of_inputs: Any) -> list[Any]:
        """Totals of one row before its first product: what the zero point adds, taken off."""
        zero = self.form.zero - taken_off(self.form)
        if not zero:
            return [ints(0)] * self.vectors
        offset = b.mul(sum_of_inputs, i32(-zero))
        return [splat(b, offset, INTS)] * self.vectors

    def _channel(self, b: Any, args: Any) -> None:
        x, ldx, figures, ldf, panel, column, count, out, ldo, *share = args
        rows = rows_at(b, x, ldx, self.num_rows)
        own = [figures_at(b, row) for row in rows_at(b, figures, ldf, self.num_rows)]
        at_column = b.add(panel, b.mul(column, i64(4)))
        loop = Loop(b, count, [t for f in own for t in self._start(b, f.whole)])
        words = b.add(at_column, i64(self.form.header_bytes))
        words = b.add(words, b.mul(loop.index, i64(self.form.record_bytes)))
        fetch_share(b, self.form, share, loop.index, 1)
        inputs = self._inputs(b, rows, loop.index)
        totals = loop.close(self._sums(b, words, inputs, loop.carried, range(8)))
        targets = rows_at(b, b.add(out, b.mul(column, i64(4))), ldo, self.num_rows)
        for m in range(self.num_rows):
            x_scale = splat(b, own[m].scale, FLOATS)
            for v in range(self.vectors):
                w_scale = at(b, at_column, 4 * LANES * v, FLOATS, 4)
                total = b.sitofp(totals[m * self.vectors + v], FLOATS)
                value = b.fmul(total, b.fmul(w_scale, x_scale))
                store(b, value, targets[m], 4 * LANES * v)

    def _blocks(self, b: Any, args: Any) -> None:
        x, ldx, figures, ldf, panel, column, count, out, ldo, *share = args
        form = self.form
        rows = rows_at(b, x, ldx, self.num_rows)
        figure_rows = rows_at(b, figures, ldf, self.num_rows)
        per = form.blocks_per_super
        zeros = [const(0.0, FLOATS)] * (self.num_rows * self.vectors)
        outer = Loop(b, count, zeros)
        offset = b.mul(outer.index, i64(form.header_bytes + per * form.record_bytes))
        top = b.add(panel, offset)
        head = header(b, form, self.vectors, b.add(top, b.mul(column, i64(2))))
        block, record = b.mul(outer.index, i64(per)), b.add(top, i64(form.header_bytes))
        inner = Loop(b, i64(per), outer.carried) if per > 1 else None
        if inner is not None:
            offset = b.add(offset, b.mul(inner.index, i64(form.record_bytes)))
            block = b.add(block, inner.index)
            record = b.add(record, b.mul(inner.index, i64(form.record_bytes)))
        fetch_share(b, form, share, block, 1)
        inputs = self._inputs(b, rows, block)
        own = [b.add(row, b.mul(block, i64(16))) for row in figure_rows]
        acc = self._record(b, record, column, head, inputs, own, (inner or outer).carried)
        if inner is not None:
            acc = inner.close(acc)
        acc = outer.close(acc)
        targets = rows_at(b, b.add(out, b.mul(column, i64(4))), ldo, self.num_rows)
        for m in range(self.num_rows):
            for v in range(self.vectors):
                store(b, acc[m * self.vectors + v], targets[m], 4 * LANES * v)

    def _record(
        self, b: Any, record: Any, column: Any, head: list[list[Any]], inputs: list[Any],
        own: list[Any], acc: list[Any],
    ) -> list[Any]:  # fmt: skip
        """The accumulators after one record."""
        form, vectors = self.form, self.vectors
        acc = list(acc)
        words = b.add(record, b.mul(column, i64(4)))
        tail = b.add(record, i64(form.low_bytes + form.high_bytes))
        tail = b.add(tail, b.mul(column, i64(1 if form.two_level else 2)))
        parts = BLOCK // form.sub
        for part in range(parts):
            totals = []
            for where in own:
                f = figures_at(b, where)
                part_sum = f.whole
                if parts == 2:
                    part_sum = f.first if part == 0 else b.sub(f.whole, f.first)
                totals += self._start(b, part_sum)
            steps = range(part * 8 // parts, (part + 1) * 8 // parts)
            totals = self._sums(b, words, inputs, totals, steps)
            x_scales = [splat(b, figures_at(b, where).scale, FLOATS) for where in own]
            for v in range(vectors):
                w_scale = scale(b, form, tail, part, v, head)
                for m in range(self.num_rows):
                    i = m * vectors + v
                    factor = b.fmul(w_scale, x_scales[m])
                    acc[i] = fma(b, b.sitofp(totals[i], FLOATS), factor, acc[i])
        for v in range(vectors if form.has_min else 0):
            w_min = minimum(b, form, b.add(tail, i64(form.scale_bytes)), v, head)
            for m in range(self.num_rows):
                i = m * vectors + v
                acc[i] = fma(b, w_min, splat(b, figures_at(b, own[m]).scale_sum, FLOATS), acc[i])
        return acc


def share_of(b: Any, tile: Any, tiles: Any, following: Any, form: Form, count: Any) -> list[Any]:
    """[address, bytes a record] of the stretch of the next panel that one of the tiles, or of a
    tile's passes over columns, fetches: memory is then busy for as long as the panel's rows are
    multiplied, and is read in order.

    count: of a panel's records, or super-blocks.
    """
    size, records = _share_bytes(form), b.mul(count, i64(form.blocks_per_super))
    each = b.sdiv(b.add(tiles, i64(size - 1)), tiles)
    each = b.and_(b.add(each, i64(63)), i64(-64))  # whole lines: none is asked for twice
    first = b.mul(tile, b.mul(each, records))
    asked = b.icmp_signed("!=", following, i64(0))
    asked = b.and_(asked, b.icmp_signed("<", first, b.mul(records, i64(size))))
    return [b.select(asked, b.add(following, first), i64(0)), each]


def _num_whole(b: Any, left: Any, rows: int, less: int) -> Any:
    """How many kernels of `rows` take so many rows that are left. less: rows of the next smaller
    kernel. Where that is one row less, all take as many rows as the others or one more: a small
    kernel for what is left behind large ones takes longer."""
    if less != rows - 1:
        return b.sdiv(left, i64(rows))
    kernels = b.sdiv(b.add(left, i64(less)), i64(rows))
    more = b.sub(left, b.mul(kernels, i64(less)))
    return b.select(b.icmp_signed(">", more, i64(0)), more, i64(0))


def _is_twice(b: Any, left: Any, num_rows: Any, rows: int, less: int) -> Any:
    """Whether one kernel of `rows` takes the last rows, fewer than that but too many for the next
    smaller kernel, and some before them a second time: small kernels wait for their own sums."""
    few = b.and_(b.icmp_signed("<", left, i64(rows)), b.icmp_signed(">", left, i64(less)))
    return b.and_(few, b.icmp_signed(">=", num_rows, i64(rows)))


def define_line(module: Any, form: Form) -> Any:
    """A function of the module: one row against 16 outputs of a panel; arguments: _Kernel's."""
    kernel = _Kernel(form, 1, ROW_LANES // LANES)
    return function(module, f"tailor_integers_{form.name}_line", 11, kernel.emit)


def define_rows(module: Any, form: Form) -> Any:
    """A function of the module: all rows against one panel, the largest kernels first."""
    return function(module, f"tailor_integers_{form.name}", 10, partial(_rows, form))


def _rows(form: Form, b: Any, args: Any) -> None:
    x, ldx, figures, ldf, num_rows, panel, count, out, ldo, following = args
    sizes = _sizes(form)
    smaller = [*(rows for rows, _ in sizes[1:]), 0]
    tiles: Any = i64(0)
    left, taken = num_rows, list[Any]()
    for (rows, _), less in zip(sizes, smaller, strict=True):
        whole = _num_whole(b, left, rows, less)
        taken.append(b.mul(whole, i64(rows)))
        rest = b.sub(left, taken[-1])
        twice = _is_twice(b, rest, num_rows, rows, less)
        tiles = b.add(b.add(tiles, whole), b.zext(twice, I64))
        left = b.select(twice, i64(0), rest)
    done, tile = i64(0), i64(0)
    for (rows, vectors), less, own_rows in zip(sizes, smaller, taken, strict=True):
        name = f"tailor_integers_{form.name}_{rows}_{vectors}"
        kernel = function(b.module, name, 11, _Kernel(form, rows, vectors).emit)
        end, before = b.add(done, own_rows), b.block
        test, body, after = (b.append_basic_block(n) for n in ("test", "rows", "after"))
        b.branch(test)
        b.position_at_end(test)
        m, number = b.phi(I64), b.phi(I64)
        m.add_incoming(done, before)
        number.add_incoming(tile, before)
        left = b.sub(num_rows, m)
        twice = _is_twice(b, left, num_rows, rows, less)
        b.cbranch(b.or_(b.icmp_signed("<", m, end), twice), body, after)
        b.position_at_end(body)
        first = b.select(twice, b.sub(num_rows, i64(rows)), m)
        own = [b.add(base, b.mul(first, ld)) for base, ld in ((x, ldx), (figures, ldf), (out, ldo))]
        passes = PANEL // (LANES * vectors)
        for i in range(passes):
            nth = b.add(b.mul(number, i64(passes)), i64(i))
            share = share_of(b, nth, b.mul(tiles, i64(passes)), following, form, count)
            column = i64(LANES * vectors * i)
            arguments = [own[0], ldx, own[1], ldf, panel, column, count, own[2], ldo]
            b.call(kernel, [*arguments, *share])
        m.add_incoming(b.add(first, i64(rows)), b.block)
        number.add_incoming(b.add(number, i64(1)), b.block)
        b.branch(test)
        b.position_at_end(after)
        done, tile = m, number
