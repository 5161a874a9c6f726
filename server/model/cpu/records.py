"""Records: what the forward pass and the draws on a CPU are given, as NamedTuples.

numba takes NamedTuples as arguments and caches the functions that take them, because these classes
are importable. CpuRunner builds all but Rows once. A weight kind's record is beside its product
(linear.py). Arrays are C-contiguous. L: layers, R: rows of a step, H: hidden_size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt32 = npt.NDArray[np.uint32]
Numbers = npt.NDArray[Any]

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
    tables: Int32


class Ends(NamedTuple):
    """The rows that are wanted at the end of a step: of the others the last layer makes keys and
    values and no more.

    picks: whether they are fewer than all. table int32 [7, n], used if so: their numbers among the
    step's rows, ascending, then what Rows has of them, from positions to path_len.
    """

    picks: bool
    table: Int32


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

    qkv, out, gate_up, down: one record of any weight kind each (linear.py); outputs of qkv: q
    heads, k heads, v heads; gate and up panels alternate. conv_in (outputs: B, C, x), conv_out and
    taps (float32 [convolutions, taps, H], the oldest first): of layers with a short convolution
    instead of attention. kv_ids, conv_ids: int64 [L], a layer's place in the cache's keys or
    inputs, -1 = it has none. norms: float32 [L, 4, H], rows NORM_* of forward.py. q_norms,
    k_norms: float32 [L, head_dim] (each head), [L, all heads' outputs] (all at once) or [L, 0].
    qkv_bias, out_bias: float32 [L, outputs], or [L, 0]. final_norm: float32 [H].
    """

    qkv: Any
    out: Any
    gate_up: Any
    down: Any
    conv_in: Any
    conv_out: Any
    taps: Float32
    kv_ids: Int64
    conv_ids: Int64
    norms: Float32
    q_norms: Float32
    k_norms: Float32
    qkv_bias: Float32
    out_bias: Float32
    final_norm: Float32


class Positions(NamedTuple):
    """What a position means in each layer.

    cos, sin: float32 [tables, positions, rotated dimensions / 2]. rope_ids: int64 [L], the table.
    windows: int64 [L], 0 = all positions before. query_scales: float32 [positions], factors on q,
    or [0].
    """

    cos: Float32
    sin: Float32
    rope_ids: Int64
    windows: Int64
    query_scales: Float32


_OF_ALL = ("taps", "final_norm", "cos", "sin", "query_scales")


def one_layer(record: Any, layer: int) -> Any:
    """Layers, Positions or a weight kind's record, of one layer alone."""
    own = {}
    for name, value in record._asdict().items():
        if isinstance(value, np.ndarray) and name not in _OF_ALL:
            own[name] = value[layer : layer + 1]
        elif isinstance(record, Layers) and name not in _OF_ALL:
            own[name] = one_layer(value, layer)
    return record._replace(**own)


class Cache(NamedTuple):
    """What is kept of each position, in blocks of 16 slots.

    keys [attention layers, kv_heads, blocks, head_dim, 16], values [attention layers, kv_heads,
    blocks, 16, head_dim rounded up to 16]: of a type of attention_kernels.KV_TYPES. key_scales,
    value_scales: float32 [attention layers, kv_heads, blocks, 1, 16], what int8 is multiplied by;
    else [..., 0]. inputs: float32 [convolutions, blocks, 16, H], what a short convolution reads of
    a position.
    """

    keys: Numbers
    values: Numbers
    key_scales: Float32
    value_scales: Float32
    inputs: Float32


class Scratch(NamedTuple):
    """Buffers of a step, float32, room for the most rows that a Batch may have.

    x [R, H]: the residual stream: embeddings before, used up after. hidden [R, H]: the result,
    final-normed states. queries [threads, tile, head_dim], scores [threads, tile, room], acc
    [threads, tile, value width + 16]: tile: the query heads of attention.tile_rows rows and one KV
    head.
    """

    x: Float32
    normed: Float32
    qkv: Float32
    attended: Float32
    projected: Float32
    conv_projected: Float32
    convolved: Float32
    inner: Float32
    hidden: Float32
    queries: Float32
    scores: Float32
    acc: Float32


class Work(NamedTuple):
    """A team of threads (team.py), and which of them this is.

    sync: int64, what they share. pairs: float32 [threads, at least 2 * ROW_SPAN * PANEL], a
    thread's gate and up columns, or the row that it makes integers of. thread: 0 <= thread <
    threads.
    """

    sync: Int64
    pairs: Float32
    threads: int
    thread: int


class AttentionLayer(NamedTuple):
    """One layer's view of Layers, Positions and Cache; forward.py makes it."""

    bias: Float32
    q_norm: Float32
    k_norm: Float32
    cos: Float32
    sin: Float32
    query_scales: Float32
    window: int
    keys: Numbers
    values: Numbers
    key_scales: Float32
    value_scales: Float32


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
    keys, values: attention_kernels.Plane. at: AttentionAddresses. The rest are int64.
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


class Residual(NamedTuple):
    """What happens between a block's product and the next: see forward.residual.

    bias: float32 [H] or [0]. post: the norm before the sum, used if has_post. scale: on what is
    added. following: the norm after it, used if has_following.
    """

    bias: Float32
    has_post: bool
    post: Float32
    scale: np.float32
    has_following: bool
    following: Float32
    eps: np.float32


# --- draws ----------------------------------------------------------------------------------------


class DrawSettings(NamedTuple):
    """A request's numbers for one draw; SamplingParams has their meaning."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition: float
    frequency: float
    presence: float


class Constraints(NamedTuple):
    """What a draw adds to ids and takes away from them.

    bias_ids int64 [b], biases float64 [b] (-100 and less: never). allowed_ids: int64, ascending,
    used if has_allowed. mask: uint32 words, bit set = allowed (grammar), or empty. banned_ids:
    int64.
    """

    bias_ids: Int64
    biases: Float64
    allowed_ids: Int64
    has_allowed: bool
    mask: UInt32
    banned_ids: Int64


class Counts(NamedTuple):
    """Penalty counts, int64 [u]: how often ids[i] is in the output and in the prompt."""

    ids: Int64
    out: Int64
    prompt: Int64
