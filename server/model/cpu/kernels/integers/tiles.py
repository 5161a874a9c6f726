"""The integer kernels in AMX tiles: 16 rows by 16 outputs at a time, from some rows on.

What: LLVM IR, one function a form and number of row tiles, and the functions that are called: one a
form, void (address of a job, records.JOB_ITEMS), which take tiles or vectors (vectors.py) by the
rows of the job. What not: whether this machine runs tiles at all (cpu/integers/amx.py), which
panels and rows a thread takes (kernels/integer_linear.py).

`tdpbsud` adds 16 x 16 sums of 64 products of int8 activations with stored bytes to a tile of int32.
Both lie in memory as it wants them: rows of activations, and panels, whose groups of 4 inputs by
outputs are its rows of weights. Of `int8` the sums run over all inputs. Of the forms in blocks a
tile holds the inputs that share a scale (32, or 16), so that it is filled in part only; fewer bits
than 8 are spread to bytes once for up to 32 rows. The sums of up to 4 blocks go through memory to
the arithmetic in float32, which is that of vectors.py, operation by operation.

Tiles are laid out as a job begins and released as it ends, by the thread that multiplies: no other
code sees them, and a thread without a job has none for the system to save. Tiles have
as many rows as make all alike: 17 rows are two tiles of 9, one row of them computed twice.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir

from drafters.jit import Raw
from server.model.cpu.integers.forms import BLOCK, FORMS, PANEL, Form, kernel_name
from server.model.cpu.kernels.integers.vectors import (
    FLOATS,
    INTS,
    LANES,
    define_line,
    define_rows,
    fetch_share,
    figures_at,
    header,
    load_stored,
    minimum,
    scale,
    share_of,
    store,
)  # fmt: skip
from server.model.cpu.kernels.ir import (
    I8,
    I64,
    Loop,
    at,
    call,
    const,
    fma,
    function,
    i32,
    i64,
    put,
    splat,
)  # fmt: skip
from server.model.cpu.records import JOB_ITEMS, TILES

_ROWS = 16  # of a tile at most; a row has 64 bytes
_VECTORS = PANEL // _ROWS
_LINE = 4 * PANEL  # bytes of one row of sums or accumulators, and of a group of 4 inputs in a panel
# Tiles by number: 0..3 sums, 2 * row tile (of blocks: each in turn) + vector of outputs; the
# activations of a row tile; the weights of a vector of outputs.
_ACTIVATIONS, _WEIGHTS = 4, 6
# Bytes of a kernel's room: what lies in it, from where on.
_PLANE = 32 * _LINE  # sums of 32 rows
_PLANES = 4  # whose sums are added together: of 4 blocks, or of 2 in 2 parts each
_SUMS = 64  # behind the layout of the tiles
_TOTALS = _SUMS + _PLANES * _PLANE  # accumulators, 32 rows
_SPREAD = _TOTALS + 32 * _LINE  # weights of those blocks as bytes
_ROOM = _SPREAD + _PLANES * BLOCK * PANEL


def _tile(b: Any, name: str, *arguments: Any) -> None:
    """One of the instructions for tiles; a number is a tile's."""
    kind = ir.IntType(8)
    values = [ir.Constant(kind, a) if isinstance(a, int) else a for a in arguments]
    call(b, f"llvm.x86.{name}", ir.VoidType(), values)


def _pointer(b: Any, address: Any) -> Any:
    return b.inttoptr(address, I8.as_pointer())


def _lay_out(b: Any, room: Any, rows: Any, depth: int) -> None:
    """Tiles of `rows` rows of sums and activations, and of `depth` inputs."""
    words = {
        0: i64(1),  # the palette with 8 tiles of up to 16 rows of 64 bytes
        2: i64(0x0040004000400040),
        3: i64(0x0040004000000000 | depth << 16 | depth),
        6: b.or_(b.mul(rows, i64(0x010101010101)), i64((depth // 4) << 56 | (depth // 4) << 48)),
    }
    for i in range(8):
        put(b, words.get(i, i64(0)), room, 8 * i, 8)
    _tile(b, "ldtilecfg", _pointer(b, room))


class _TileKernel:
    """Emits out[m, :PANEL] for m < rows, with one or two tiles of rows.

    Arguments of the emitted function, all int64: x, bytes between its rows, figures, bytes between
    their rows, rows, panel, count, out, bytes between its rows, what to fetch (share_of), room, the
    row with which a second tile begins.
    """

    def __init__(self, form: Form, row_tiles: int) -> None:
        self.form, self.row_tiles = form, row_tiles

    def emit(self, b: Any, args: Any) -> None:
        """What the function does."""
        (self._channel if self.form.per_output else self._blocks)(b, args)

    def _zero(self, b: Any) -> None:
        for number in range(self.row_tiles * _VECTORS):
            _tile(b, "tilezero", number)

    def _multiply(self, b: Any, inputs: Any, ldx: Any, weights: Any, second: Any) -> None:
        """Add the products of the inputs from one address on and the weights at another."""
        for v in range(_VECTORS):
            where = _pointer(b, b.add(weights, i64(64 * v)))
            _tile(b, "tileloadd64", _WEIGHTS + v, where, i64(_LINE))
        for r in range(self.row_tiles):
            where = _pointer(b, b.add(inputs, b.mul(ldx, b.mul(second, i64(r)))))
            _tile(b, "tileloadd64", _ACTIVATIONS + r, where, ldx)
            for v in range(_VECTORS):
                _tile(b, "tdpbsud", _VECTORS * r + v, _ACTIVATIONS + r, _WEIGHTS + v)

    def _store_sums(self, b: Any, sums: Any, second: Any) -> None:
        """Write the tiles of sums to an address, _LINE bytes a row."""
        for r in range(self.row_tiles):
            for v in range(_VECTORS):
                line = b.add(sums, b.mul(second, i64(_LINE * r)))
                where = _pointer(b, b.add(line, i64(64 * v)))
                _tile(b, "tilestored64", _VECTORS * r + v, where, i64(_LINE))

    def _total(self, b: Any, line: Any, v: int, sum_of_inputs: Any) -> Any:
        """Sums of a row at an address, less what the zero point has added, as floats."""
        sums = at(b, line, 64 * v, INTS, 64)
        if self.form.zero:
            offset = b.mul(sum_of_inputs, i32(-self.form.zero))
            sums = b.add(sums, splat(b, offset, INTS))
        return b.sitofp(sums, FLOATS)

    def _channel(self, b: Any, args: Any) -> None:
        x, ldx, figures, ldf, rows, panel, count, out, ldo, *share, room, second = args
        size = 2 * self.form.record_bytes
        self._zero(b)
        loop = Loop(b, b.lshr(count, i64(1)), [])
        offset = b.mul(loop.index, i64(size))
        fetch_share(b, self.form, share, b.mul(loop.index, i64(2)), 2)
        words = b.add(b.add(panel, i64(self.form.header_bytes)), offset)
        self._multiply(b, b.add(x, b.mul(loop.index, i64(2 * BLOCK))), ldx, words, second)
        loop.close([])
        sums = b.add(room, i64(_SUMS))
        self._store_sums(b, sums, second)
        w_scales = [at(b, panel, 4 * LANES * v, FLOATS, 4) for v in range(_VECTORS)]
        row = Loop(b, rows, [])
        figure = figures_at(b, b.add(figures, b.mul(row.index, ldf)))
        x_scale = splat(b, figure.scale, FLOATS)
        line = b.add(sums, b.mul(row.index, i64(_LINE)))
        target = b.add(out, b.mul(row.index, ldo))
        for v in range(_VECTORS):
            total = self._total(b, line, v, figure.whole)
            store(b, b.fmul(total, b.fmul(w_scales[v], x_scale)), target, 64 * v)
        row.close([])

    def _blocks(self, b: Any, args: Any) -> None:
        _, _, _, _, rows, _, count, out, ldo, _, _, room, _ = args
        totals = b.add(room, i64(_TOTALS))
        zeros = const(0.0, FLOATS)
        row = Loop(b, rows, [])
        for v in range(_VECTORS):
            store(b, zeros, b.add(totals, b.mul(row.index, i64(_LINE))), 64 * v)
        row.close([])
        num = b.mul(count, i64(self.form.blocks_per_super))
        group = _PLANES // (BLOCK // self.form.sub)
        whole, rest = b.udiv(num, i64(group)), b.urem(num, i64(group))
        for begin, times, size in ((i64(0), whole, group), (b.sub(num, rest), rest, 1)):
            with b.if_then(b.icmp_signed(">", times, i64(0))):
                loop = Loop(b, times, [])
                self._add_blocks(b, args, b.add(begin, b.mul(loop.index, i64(size))), size)
                loop.close([])
        row = Loop(b, rows, [])
        line = b.add(totals, b.mul(row.index, i64(_LINE)))
        target = b.add(out, b.mul(row.index, ldo))
        for v in range(_VECTORS):
            store(b, at(b, line, 64 * v, FLOATS, 64), target, 64 * v)
        row.close([])

    def _add_blocks(self, b: Any, args: Any, first: Any, num: int) -> None:
        """Add the products of `num` blocks from one on, of one super-block, to the accumulators.

        The sums of all of them are made before any is added: an accumulator is read and written
        once for them.
        """
        x, ldx, figures, ldf, rows, panel, _, _, _, *share, room, second = args
        form, per, parts = self.form, self.form.blocks_per_super, BLOCK // self.form.sub
        size = form.header_bytes + per * form.record_bytes
        offset = b.mul(b.udiv(first, i64(per)), i64(size))
        head = header(b, form, _VECTORS, b.add(panel, offset))
        offset = b.add(offset, b.mul(b.urem(first, i64(per)), i64(form.record_bytes)))
        fetch_share(b, form, share, first, num)
        records = b.add(b.add(panel, offset), i64(form.header_bytes))
        inputs = b.add(x, b.mul(first, i64(BLOCK)))
        blocks = [b.add(records, i64(nth * form.record_bytes)) for nth in range(num)]
        self._block_sums(b, blocks, inputs, ldx, room, second)
        tails = [b.add(record, i64(form.low_bytes + form.high_bytes)) for record in blocks]
        w_scales = [
            [
                [scale(b, form, tail, part, v, head) for v in range(_VECTORS)]
                for part in range(parts)
            ]
            for tail in tails
        ]
        w_mins = []
        if form.has_min:
            behind = [b.add(tail, i64(form.scale_bytes)) for tail in tails]
            w_mins = [[minimum(b, form, one, v, head) for v in range(_VECTORS)] for one in behind]
        row = Loop(b, rows, [])
        line = b.add(room, b.mul(row.index, i64(_LINE)))
        own = b.add(b.add(figures, b.mul(first, i64(16))), b.mul(row.index, ldf))
        totals = [at(b, line, _TOTALS + 64 * v, FLOATS, 64) for v in range(_VECTORS)]
        for nth in range(num):
            figure = figures_at(b, b.add(own, i64(16 * nth)))
            x_scale = splat(b, figure.scale, FLOATS)
            for part in range(parts):
                part_sum = figure.whole
                if parts == 2:
                    part_sum = figure.first if part == 0 else b.sub(figure.whole, figure.first)
                sums = b.add(line, i64(_SUMS + (nth * parts + part) * _PLANE))
                for v in range(_VECTORS):
                    factor = b.fmul(w_scales[nth][part][v], x_scale)
                    totals[v] = fma(b, self._total(b, sums, v, part_sum), factor, totals[v])
            for v in range(_VECTORS if form.has_min else 0):
                scale_sum = splat(b, figure.scale_sum, FLOATS)
                totals[v] = fma(b, w_mins[nth][v], scale_sum, totals[v])
        for v in range(_VECTORS):
            store(b, totals[v], line, _TOTALS + 64 * v)
        row.close([])

    def _block_sums(
        self, b: Any, blocks: list[Any], inputs: Any, ldx: Any, room: Any, second: Any
    ) -> None:
        """The sums of blocks that follow each other, a plane of the room for each part.

        blocks: addresses of their records. Sums are stored while the next ones are multiplied, in
        two other tiles: a tile's sums take 50 cycles and more to come out of it.
        """
        form = self.form
        if form.bits < 8:
            spread = [b.add(room, i64(_SPREAD + nth * BLOCK * PANEL)) for nth in range(len(blocks))]
            for record, words in zip(blocks, spread, strict=True):
                for step in range(BLOCK // 4):
                    for v in range(_VECTORS):
                        four = load_stored(b, form, record, step, v)
                        put(b, four, words, _LINE * step + 64 * v, 64)
            blocks = spread
        waiting: list[tuple[int, Any]] = []  # a tile, the address where its sums go

        def store_sums() -> None:
            for tile, address in waiting:
                _tile(b, "tilestored64", tile, _pointer(b, address), i64(_LINE))

        turn = 0
        for plane in range(len(blocks) * BLOCK // form.sub):
            nth, first = divmod(plane * form.sub, BLOCK)
            words = b.add(blocks[nth], i64(_LINE * first // 4))
            for v in range(_VECTORS):
                where = _pointer(b, b.add(words, i64(64 * v)))
                _tile(b, "tileloadd64", _WEIGHTS + v, where, i64(_LINE))
            for r in range(self.row_tiles):
                row = b.mul(second, i64(r))
                rows = b.add(inputs, b.mul(ldx, row))
                where = _pointer(b, b.add(rows, i64(plane * form.sub)))
                _tile(b, "tileloadd64", _ACTIVATIONS + turn, where, ldx)
                own = range(_VECTORS * turn, _VECTORS * (turn + 1))
                for v, tile in enumerate(own):
                    _tile(b, "tilezero", tile)
                    _tile(b, "tdpbsud", tile, _ACTIVATIONS + turn, _WEIGHTS + v)
                store_sums()
                line = b.add(b.add(room, i64(_SUMS + plane * _PLANE)), b.mul(row, i64(_LINE)))
                waiting = [(tile, b.add(line, i64(64 * v))) for v, tile in enumerate(own)]
                turn = 1 - turn
        store_sums()


def define_tiled_rows(module: Any, form: Form) -> Any:
    """A function of the module: all rows against one panel, by tiles or by vectors.

    Arguments: those of define_rows, and the rows from which on tiles multiply. Of `int8` a tile
    takes two blocks, so that an odd number of them is for vectors.
    """
    define = partial(_tiles_or_vectors, form, define_rows(module, form))
    return function(module, f"tailor_integers_{form.name}_any", 11, define)


def _tiles_or_vectors(form: Form, vectors: Any, b: Any, args: Any) -> None:
    num_rows, count, least = args[4], args[6], args[10]
    many = b.icmp_signed(">=", num_rows, least)
    if form.per_output:
        even = b.icmp_signed("==", b.and_(count, i64(1)), i64(0))
        many = b.and_(many, even)
    memory = b.alloca(ir.ArrayType(I8, _ROOM))
    memory.align = 64
    with b.if_else(many) as (tiles, rest):
        with tiles:
            _all_tiles(b, form, args[:10], b.ptrtoint(memory, I64))
        with rest:
            b.call(vectors, args[:10])


def _all_tiles(b: Any, form: Form, args: Any, room: Any) -> None:
    """All rows, as few at a time as make runs of up to 32 alike, in the tiles' own layout."""
    x, ldx, figures, ldf, num_rows, panel, count, out, ldo, following = args
    one, two = (
        function(b.module, f"tailor_integers_{form.name}_tiles_{n}", 13, _TileKernel(form, n).emit)
        for n in (1, 2)
    )
    runs = b.lshr(b.add(num_rows, i64(2 * _ROWS - 1)), i64(5))
    rows = b.udiv(b.add(num_rows, b.sub(runs, i64(1))), runs)
    is_pair = b.icmp_signed(">", rows, i64(_ROWS))
    half = b.select(is_pair, b.lshr(b.add(rows, i64(1)), i64(1)), rows)
    _lay_out(b, room, half, 2 * BLOCK if form.per_output else form.sub)
    loop = Loop(b, runs, [])
    first, last = b.mul(loop.index, rows), b.sub(num_rows, rows)
    first = b.select(b.icmp_signed("<", first, last), first, last)
    own = [b.add(base, b.mul(first, ld)) for base, ld in ((x, ldx), (figures, ldf), (out, ldo))]
    share = share_of(b, loop.index, runs, following, form, count)
    given = [own[0], ldx, own[1], ldf, rows, panel, count, own[2], ldo, *share, room]
    with b.if_else(is_pair) as (by_two, by_one):
        with by_two:
            b.call(two, [*given, b.sub(rows, half)])
        with by_one:
            b.call(one, [*given, i64(0)])
    loop.close([])
    _tile(b, "tilerelease")


# -- The functions that are called ----------------------------------------------------------------


def _define(form: Form, module: Any) -> None:
    """All rows of a job against its panel, or one row against a line of it."""
    fn = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64]), kernel_name(form))
    b = ir.IRBuilder(fn.append_basic_block("entry"))
    numbers = [at(b, fn.args[0], 8 * i, I64, 8) for i in range(JOB_ITEMS)]
    with b.if_else(b.icmp_signed(">", numbers[4], i64(0))) as (rows, line):
        with rows:
            if TILES:
                b.call(define_tiled_rows(module, form), numbers)
            else:
                b.call(define_rows(module, form), numbers[:-1])
        with line:
            x, ldx, figures, ldf, _, panel, count, out, ldo, _, column = numbers
            given = [x, ldx, figures, ldf, panel, column, count, out, ldo, i64(0), i64(0)]
            b.call(define_line(module, form), given)
    b.ret_void()


KERNELS = [Raw(kernel_name(form), __name__, partial(_define, form)) for form in FORMS]
