"""Sizes that the kernels and those who lay memory out for them share, by the CPU's registers, and
records: what the compiled functions of the CPU runner are given, as NamedTuples.

CpuRunner builds most of the records once. Arrays are C-contiguous; x2 stands for two axes, and so
on, as the compiled functions take them (drafters/jit.py). L: layers, R: rows of a step, H:
hidden_size.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from drafters.target import chosen

LANES = 16
"""float32 lanes of a vector of IR, and slots of a block of KV."""

WIDE_REGISTERS = "avx512f" in chosen().features
"""Whether there are 32 registers of 512 bits."""

VECTORS_PER_PANEL = 4 if WIDE_REGISTERS else 1
"""Vectors of outputs in a panel of floats. A kernel of 6 rows x 4 vectors fills 32 zmm registers,
one of 6 x 1 (two ymm each) 16 ymm registers."""

PANEL = LANES * VECTORS_PER_PANEL
"""Outputs of a panel of float weights."""

MAX_ROWS = 6
"""Rows of the largest kernel of floats."""

ROW_SPAN = 16 * MAX_ROWS
"""Most rows of one work item: their inputs stay in a core's L2."""

ADAPTER_WIDE = max(2, VECTORS_PER_PANEL)
"""Vectors of a wide kernel of adapters: 4 rows of them fill wide registers, 2 rows narrow ones."""

WIDE_HEADS = 12 if WIDE_REGISTERS else 6
"""Query heads of several rows of one sequence that attention computes together."""

KV_TYPES: dict[str, type[Any]] = {"float32": np.float32, "float16": np.uint16, "int8": np.int8}
"""Type of the KV cache's numbers by the name of `engine.kv_cache_dtype`. A type's place is the
number that kernels know it by."""

KV_BYTES = tuple(np.dtype(kind).itemsize for kind in KV_TYPES.values())


def tile_rows(group: int) -> int:
    """Most rows whose scores and sums are computed together, with `group` query heads a KV head:
    their query heads share each load."""
    most = 12  # as many as WIDE_HEADS, or twice as many
    return most // group if most % group == 0 else 4


def integer_kernel(features: frozenset[str]) -> str:
    """The integer kernel for a CPU: the widest that it has all instructions of."""
    if {"avx512f", "avx512bw", "avx512vnni"} <= features:
        return "avx512-vnni"
    if {"avx2", "avxvnni"} <= features:
        return "avx-vnni"
    if {"avx512f", "avx512bw"} <= features:
        return "avx512"
    if "avx2" in features:
        return "avx2"
    if {"neon", "i8mm"} <= features:
        return "neon-i8mm"
    return "neon-dotprod" if {"neon", "dotprod"} <= features else "plain"


INTEGER_KERNEL = integer_kernel(chosen().features)
"""Name of the kernel in use, for the log and /metrics."""

TILES = INTEGER_KERNEL == "avx512-vnni" and {"amx-tile", "amx-int8"} <= chosen().features
"""Whether kernels have a part for AMX tiles; integers/amx.py finds out whether this machine runs
it."""

SPINS, THREADS, EACH = 8 * 5, 128 * 6, 256
"""Bytes from the start of Work.sync to how often a thread looks at a barrier before it sleeps, and
to the words of the threads; the bytes of each."""

# --- arrays ---------------------------------------------------------------------------------------

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Int8 = npt.NDArray[np.int8]
UInt8 = npt.NDArray[np.uint8]
UInt32 = npt.NDArray[np.uint32]
Bool = npt.NDArray[np.bool_]

Float32x2 = Annotated[Float32, 2]
Float32x3 = Annotated[Float32, 3]
Float32x4 = Annotated[Float32, 4]
Float32x5 = Annotated[Float32, 5]
Int8x2 = Annotated[Int8, 2]
Int32x2 = Annotated[Int32, 2]
Int32x3 = Annotated[Int32, 3]
Int64x2 = Annotated[Int64, 2]
Int64x3 = Annotated[Int64, 3]
Int64x4 = Annotated[Int64, 4]
Int64x5 = Annotated[Int64, 5]
UInt8x2 = Annotated[UInt8, 2]
UInt32x2 = Annotated[UInt32, 2]
UInt8x3 = Annotated[UInt8, 3]
UInt8x4 = Annotated[UInt8, 4]

# --- weights --------------------------------------------------------------------------------------

FLOAT_TYPES = ("float32", "bfloat16", "float16")
"""What floats may be kept in: those of a family's weights the first two, an adapter's matrices all.
"""
FLOAT32, BFLOAT16, FLOAT16, INTEGERS = range(4)
"""Kinds of weights and of embeddings, those of FLOAT_TYPES by their places there. The embeddings of
the last are a GGUF's blocks."""

NO_TILES = 1 << 62
"""More rows than any product has."""

JOB_ITEMS = 11
"""int64 numbers that tell an integer kernel what to do: x, bytes between its rows, figures, bytes
between their rows, rows, panel, count, out, bytes between its rows, next panel, rows from which on
tiles multiply. x int8 [rows, padded inputs], figures as kernels/integer_rows.py writes them, out
float32; x, figures, panel, out, next panel: addresses; count: blocks of 32 inputs of the form
`int8`, else super-blocks. The next panel, as long as this one, is fetched from memory while the
first rows are multiplied; 0: none. With 0 rows one row is multiplied by 16 outputs alone, the first
of which the last number is."""


class Activations(NamedTuple):
    """Rows as integers: q int8 [rows, padded inputs]; figures int32 [rows, blocks, 4]."""

    q: Int8x2
    figures: Int32x3


class Linear(NamedTuple):
    """Matrices of one kind of product, one a layer, in panels that the caller keeps alive.

    kind: FLOAT32, BFLOAT16 (bits in uint16) or INTEGERS. parts: int64 [layers, parts, 6], outputs
    in one form each: address of the panels; of integers the form's kernel, bytes of a panel and
    the kernel's count; first output, outputs. inputs: K. outputs: N; of floats in whole panels.
    Of integers: per_row: bool [layers], whether inputs have one scale a row (`int8`) and not one a
    block. rows: the buffer of quantised inputs, for the most rows that a product may have. factors:
    float32 [layers, inputs], what inputs of a layer that is per_row are spread with; [layers, 0]
    when none is. tile_rows: rows from which on AMX tiles multiply (integers/amx.py).
    """

    kind: int
    parts: Int64x3
    inputs: int
    outputs: int
    per_row: Bool
    rows: Activations
    factors: Float32x2
    tile_rows: int


NO_ROWS = Activations(np.zeros((0, 0), np.int8), np.zeros((0, 0, 4), np.int32))

# --- the forward pass -----------------------------------------------------------------------------


class Rows(NamedTuple):
    """The rows of one step: a Batch's arrays of the same names (engine/batch.py)."""

    num: int
    positions: Int32
    slots: Int32
    seq_ids: Int32
    prefix_len: Int32
    path_start: Int32
    path_len: Int32
    path_slots: Int32
    tables: Int32x2


class Ends(NamedTuple):
    """The rows that are wanted at the end of a step: of the others the last layer makes keys and
    values and no more.

    picks: whether they are fewer than all. table int32 [7, n], used if so: their numbers among the
    step's rows, ascending, then what Rows has of them, from positions to path_len.
    """

    picks: bool
    table: Int32x2


class Shape(NamedTuple):
    """Sizes and switches of a model.

    scale: on attention scores. cap: soft-capping of them, cap * tanh(score / cap), 0 = none.
    norm_after_rope: whether q and k are normed after the rotation. norms_before, norms_after: of
    attention and MLP. residual_scale: on what they add. gelu: the MLP's gate is GELU's tanh form,
    else SiLU.
    """

    num_heads: int
    head_dim: int
    scale: np.float32
    cap: np.float32
    eps: np.float32
    norm_after_rope: bool
    norms_before: bool
    norms_after: bool
    residual_scale: np.float32
    gelu: bool


class Layers(NamedTuple):
    """The weights of all layers.

    Outputs of qkv: q heads, k heads, v heads; gate and up panels of floats alternate. conv_in
    (outputs: B, C, x), conv_out and taps (float32 [convolutions, taps, H], the oldest first): of
    layers with a short convolution instead of attention. kv_ids, conv_ids: int64 [L], a layer's
    place in the cache's keys or inputs, -1 = it has none. norms: float32 [L, 4, H], rows NORM_* of
    kernels/step.py. q_norms, k_norms: float32 [L, head_dim] (each head), [L, all heads' outputs]
    (all at once) or [L, 0]. qkv_bias, out_bias: float32 [L, outputs], or [L, 0]. final_norm:
    float32 [H].
    """

    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    conv_in: Linear
    conv_out: Linear
    taps: Float32x3
    kv_ids: Int64
    conv_ids: Int64
    norms: Float32x3
    q_norms: Float32x2
    k_norms: Float32x2
    qkv_bias: Float32x2
    out_bias: Float32x2
    final_norm: Float32


class Positions(NamedTuple):
    """What a position means in each layer.

    cos, sin: float32 [tables, positions, rotated dimensions / 2]. rope_ids: int64 [L], the table.
    windows: int64 [L], 0 = all positions before. query_scales: float32 [positions], factors on q,
    or [0].
    """

    cos: Float32x3
    sin: Float32x3
    rope_ids: Int64
    windows: Int64
    query_scales: Float32


_OF_ALL = ("taps", "final_norm", "cos", "sin", "query_scales")


def one_layer(record: Any, layer: int) -> Any:
    """Layers, Positions or a Linear, of one layer alone."""
    own = {}
    for name, value in record._asdict().items():
        if isinstance(value, np.ndarray) and name not in _OF_ALL:
            own[name] = value[layer : layer + 1]
        elif isinstance(value, Linear):
            own[name] = one_layer(value, layer)
    return record._replace(**own)


class Cache(NamedTuple):
    """What is kept of each position, in blocks of 16 slots.

    kind: the place of the numbers' type in KV_TYPES. kv: uint8 [attention layers, blocks, kv_heads,
    bytes], of each head its keys [head_dim, 16], its values [16, head_dim rounded up to 16], and of
    int8 what these are multiplied by, float32 scales [16] of keys and [16] of values. So what a
    sequence's rows read of a layer lies in few pages. inputs: float32 [convolutions, blocks, 16,
    H], what a short convolution reads of a position.
    """

    kind: int
    kv: UInt8x4
    inputs: Float32x4


class Scratch(NamedTuple):
    """Buffers of a step, float32, room for the most rows that a Batch may have.

    x [R, H]: the residual stream: embeddings before, used up after. hidden [R, H]: the result,
    final-normed states. queries [threads, tile, head_dim], scores [threads, tile, room], acc
    [threads, tile, value width + 16]: tile: the query heads of attention.tile_rows rows and one KV
    head.
    """

    x: Float32x2
    normed: Float32x2
    qkv: Float32x2
    attended: Float32x2
    projected: Float32x2
    conv_projected: Float32x2
    convolved: Float32x2
    inner: Float32x2
    hidden: Float32x2
    queries: Float32x3
    scores: Float32x3
    acc: Float32x3


class Work(NamedTuple):
    """A team of threads (threads.py), and which of them this is.

    sync: int64, what they share. pairs: float32 [threads, at least 2 * ROW_SPAN * PANEL], a
    thread's gate and up columns, or the row that it makes integers of. thread: 0 <= thread <
    threads.
    """

    sync: Int64
    pairs: Float32x2
    threads: int
    thread: int


class AttentionLayer(NamedTuple):
    """One layer's view of Layers, Positions and Cache."""

    bias: Float32
    q_norm: Float32
    k_norm: Float32
    cos: Float32x2
    sin: Float32x2
    query_scales: Float32
    window: int
    kind: int
    kv: UInt8x3


class AttentionAddresses(NamedTuple):
    """Where attention's arrays begin, and how long their rows are in numbers.

    Those of Rows (int32), qkv and the result [R, stride], and one thread's part of Scratch's
    queries, scores [tile, room] and acc [tile, stride]. All int64.
    """

    positions: Any
    seq_ids: Any
    prefix_len: Any
    path_start: Any
    path_len: Any
    path_slots: Any
    tables: Any
    table_stride: Any
    qkv: Any
    qkv_stride: Any
    out: Any
    out_stride: Any
    queries: Any
    scores: Any
    room: Any
    acc: Any
    acc_stride: Any


class Tile(NamedTuple):
    """Rows first .. first + num - 1, all of one sequence, and one KV head with its `group` query
    heads, which begin at `column` of qkv and of the result.

    Their keys are the positions from `start` to each row's own prefix_len (the shortest and the
    longest of which are here) through the block table at address `table`, and each row's path.
    keys, values: Plane (kernels/attention.py). at: AttentionAddresses. The rest are int64.
    """

    at: Any
    first: Any
    num: Any
    group: Any
    column: Any
    start: Any
    shortest: Any
    longest: Any
    table: Any
    keys: Any
    values: Any


# --- adapters -------------------------------------------------------------------------------------

KINDS = ("qkv", "out", "gate_up", "down", "conv_in", "conv_out")
"""The products of a layer, by the names of Layers."""
QKV, OUT, GATE_UP, DOWN, CONV_IN, CONV_OUT = range(len(KINDS))

ADAPTER_ROWS = 4
"""Most rows of one span: one thread's item."""


class StepAdapters(NamedTuple):
    """The adapters of a step's rows. P: places, L: layers.

    spans: int64 [n, 3]: first row, rows (1 .. ADAPTER_ROWS), place; empty without adapters. inputs:
    int64 [P, L, kinds, 5]: address of A ([K, columns]), address of its scales (float32 [columns]),
    columns (whole vectors; 0: the product has no adapter), K, FLOAT_TYPES' place of A and B. parts:
    int64 [P, L, kinds, 3, 5]: first column of x @ A, rank, address of B (as `adapters.in_blocks`
    gives it), first output, outputs (0: no part). alternate, up: gate and up outputs lie in runs of
    `alternate`, one of each in turn, or one after the other where it is 0; the first of up is `up`.
    inner: outputs of each. wide: float32 [rows, outputs of gate and up], a buffer; [0, 0] while no
    adapter is in memory.
    """

    spans: Int64x2
    inputs: Int64x4
    parts: Int64x5
    alternate: int
    up: int
    inner: int
    wide: Float32x2


# --- a step ---------------------------------------------------------------------------------------


class Table(NamedTuple):
    """An embedding table in memory that the caller keeps alive.

    address: of its first row. row_bytes: from row to row. num_rows: an id past them has row 0.
    kind: of its numbers. scale: factor on the embeddings. form: of INTEGERS (integers/forms.py).
    """

    address: int
    row_bytes: int
    num_rows: int
    kind: int
    scale: np.float32
    form: int = 0


NO_TABLE = Table(0, 0, 0, FLOAT32, np.float32(1.0))
"""Of a runner that puts its embeddings into Scratch.x itself."""


class Screen(NamedTuple):
    """A coarse copy of the LM head, which tells where a row's largest logit may be
    (kernels/screen.py).

    weights: one matrix of `order`'s inputs, in panels uint8 [panels, bytes of a panel]. order:
    int32 [coarse inputs]: which of the head's they are; [0]: there is no Screen. states: float32
    [room, coarse inputs]. bounds: float32 [2, outputs in whole panels]: norms of what the coarse
    weights leave of the head's, and of themselves. row_bounds: float32 [room, 3]: norms of a row's
    inputs and of what rounding adds to them, and a logit that the largest one reaches. less:
    float32 [coarse inputs], by which the first norm of the weights counts an input more, and that
    of a row's less. ones: float32 [inputs of the head], ones, where these are spread, else [0].
    limit: of lines, 16 outputs, that a thread multiplies for each row of a step; with more the
    whole head is multiplied. found: int64 [threads, limit * room]: (line << 32 | row << 16 |
    bits of its outputs), where a largest logit may be. num_found: int64 [8 * threads]: at 8 *
    thread, how many there were in the last step, or more than the limit.
    """

    weights: Linear
    panels: UInt8x2
    order: Int32
    states: Float32x2
    bounds: Float32x2
    row_bounds: Float32x2
    less: Float32
    ones: Float32
    limit: int
    found: Int64x2
    num_found: Int64


class Head(NamedTuple):
    """The LM head. states float32 [room, H], logits float32 [room, outputs in whole panels]: of the
    rows that have logits, in their order. Past vocab_size logits are -inf. cap: soft-capping, 0 =
    none. rows: address of the head's rows as ggml's q8_0, row_bytes apart, which the caller keeps
    alive; 0: there are panels alone. screen: for steps that want no more than each row's largest
    logits."""

    weights: Linear
    states: Float32x2
    logits: Float32x2
    vocab_size: int
    cap: float
    rows: int
    row_bytes: int
    screen: Screen


class Wanted(NamedTuple):
    """What a step gives. rows int32 [n]: those with logits. greedy int32 [n]: filled with the
    likeliest id that each may give, FAILED where there is none or the row is not finite, and a
    Screen may leave all other logits out; [0]: nothing is drawn. words: uint32 [n, words], bit set
    = it may give the id; [0, 0]: any. likely_ids int32, chances float32 [n, K]: filled as a Likely
    (engine/batch.py), with a Screen by the logits that it leaves; [0, 0]: none are wanted. clock
    int64 [2]: filled with nanoseconds of time.perf_counter_ns at the head's beginning and end."""

    rows: Int32
    greedy: Int32
    words: UInt32x2
    likely_ids: Int32x2
    chances: Float32x2
    clock: Int64


ALL_IDS = np.zeros((0, 0), np.uint32)
"""Wanted.words of rows that may give any id."""

NO_LIKELY = (np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32))
"""Wanted.likely_ids and chances where none are wanted."""


class DeltaLayer(NamedTuple):
    """One gated delta net. taps: float32 [taps, 2 key_heads dk + heads dv], the oldest first: of q,
    k, v. rate, shift: float32 [heads], exp(A_log) and dt_bias. key_heads, dk, dv: sizes. inputs:
    float32 [blocks, 16, channels + 2 heads]: of each slot the convolution's inputs, b and a."""

    taps: Float32x2
    rate: Float32
    shift: Float32
    key_heads: int
    dk: int
    dv: int
    inputs: Float32x3


class StatePlan(NamedTuple):
    """What a step's rows begin from, one line a sequence.

    seqs: int64 [S, 9]: source state or -1, destination state or -1, first replayed position, first
    position of its rows, the state to keep before its rows or -1, the state to keep at the
    boundary row or -1, the boundary row, first and end of its rows in `order`. order: int64 [R],
    rows: linear ones by position, then draft nodes depth first. depths: int64 [R], 0 for linear
    ones.
    """

    seqs: Int64x2
    order: Int64
    depths: Int64


# --- draws ----------------------------------------------------------------------------------------


class Constraints(NamedTuple):
    """What a draw adds to ids and which it may give. bias_ids int64 [b], biases float64 [b]. words:
    uint32, bit set = allowed, or empty: all are."""

    bias_ids: Int64
    biases: Float64
    words: UInt32


class Counts(NamedTuple):
    """Penalty counts, int64 [u]: how often ids[i] is in the output and in the prompt."""

    ids: Int64
    out: Int64
    prompt: Int64


FAILED = -1
"""The id of a draw that could not be made: NaN in the row, or no id left to draw."""
