"""Paged attention of the GPU path and its memory: each row over exactly its own keys.

interface.py says how a module's layers reach a PagedStep, with queries, keys and values. It writes
K and V of the step's rows to their slots and then lets row r attend to the keys that
server.engine.batch defines:

    slots of positions [0, prefix_len[r]) of its sequence through its block table, then
    path_slots[path_start[r] : path_start[r] + path_len[r]]

where a layer with sliding window W keeps the keys whose position is above positions[r] - W (the
i-th of n path keys is at positions[r] - (n - 1 - i)). Softmax and sums are in float32.

Two implementations, one contract, tests on the same cases:
- "torch": the reference. Any device; reads the keys of every row by themselves.
- "triton": server.model.gpu.triton_kernels; tiles and splits planned by `plan_tiles` below.

KvCache is the paged key and value memory of one model on one device: a tensor of shape [num_layers,
2, num_slots + block_size, num_kv_heads, head_dim]. Index 0 of the second axis is keys, 1 is values.
A *slot* is one position's K and V of a layer; slot numbers are those of server.engine.batch (block
* block_size + offset) and are the same in every layer, sliding or global. Layers with a short
convolution keep one vector a slot instead (`inputs`), in a tensor of [convolutions, num_slots +
block_size, width]. The last `block_size` slots belong to no block of the engine: padded rows of a
CUDA graph write there (`trash_slot`), which no row ever reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from server.engine.batch import Batch, Int32
from server.model.gpu.lm_head import soft_capped
from server.model.interface import Call


class Kept(NamedTuple):
    """What a cache keeps of a position. layers: with K and V of `kv_heads` heads. convolutions:
    layers with a vector of `width` numbers instead."""

    layers: int
    kv_heads: int
    head_dim: int
    convolutions: int = 0
    width: int = 0

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of a block."""
        numbers = 2 * self.layers * self.kv_heads * self.head_dim + self.convolutions * self.width
        return numbers * block_size * dtype.itemsize


class KvCache:
    """Owns the KV memory. Every operation is queued on the current stream and does not sync."""

    def __init__(
        self, kept: Kept, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        self._kept, self._dtype, self._device = kept, dtype, device
        self.resize(num_blocks)

    def resize(self, num_blocks: int) -> None:
        """Memory of zeros for so many blocks in the place of what there was, at other addresses."""
        self.num_blocks = num_blocks
        self.num_slots = num_blocks * self.block_size
        self.trash_slot = self.num_slots
        room = self.num_slots + self.block_size
        num_layers, kv_heads, head_dim, num, width = self._kept
        self._layers: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
        self.memory = self.inputs = torch.empty(0)  # given back before there is more
        # Zeros, not empty: masked lanes multiply by exactly 0, which would turn a stale NaN or
        # infinity into a NaN.
        size = (num_layers, 2, room, kv_heads, head_dim)
        self.memory = torch.zeros(size, dtype=self._dtype, device=self._device)
        self.inputs = torch.zeros((num, room, width), dtype=self._dtype, device=self._device)
        self._layers = tuple((self.memory[i, 0], self.memory[i, 1]) for i in range(num_layers))

    def write(
        self, layer_id: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put key and value [R, num_kv_heads, head_dim] of a step's rows into their slots; (keys,
        values) of the layer: views [num_slots + block_size, num_kv_heads, head_dim]."""
        layer = self._layers[layer_id]
        for memory, rows in zip(layer, (key, value), strict=True):
            memory.index_copy_(0, slots.long(), rows)
        return layer

    def move_slots(self, src: Int32, dst: Int32) -> None:
        """memory[..., dst[i]] = memory[..., src[i]] for all i at once; src and dst may overlap.

        Gather to a temporary, then scatter. Raises ValueError when the lengths differ, a slot is
        outside the engine's range, or a destination is named twice.
        """
        if src.shape != dst.shape:
            raise ValueError(f"{src.shape[0]} source slots but {dst.shape[0]} destinations")
        if src.shape[0] == 0:
            return
        for name, slots in (("source", src), ("destination", dst)):
            if int(slots.min()) < 0 or int(slots.max()) >= self.num_slots:
                raise ValueError(f"a {name} slot is outside [0, {self.num_slots})")
        if len(set(dst.tolist())) != dst.shape[0]:
            raise ValueError("a destination slot is named twice")
        both = torch.empty((2, src.shape[0]), dtype=torch.int64)
        both[0] = torch.from_numpy(src)
        both[1] = torch.from_numpy(dst)
        device = self.memory.device
        if device.type == "cuda":
            # Pageable memory is staged before the call returns, so `both` may be freed at once;
            # pinning a few numbers would cost more than the copy.
            both = both.to(device, non_blocking=True)
        self.memory.index_copy_(2, both[1], self.memory.index_select(2, both[0]))
        if self.inputs.shape[0]:
            self.inputs.index_copy_(1, both[1], self.inputs.index_select(1, both[0]))

    def slots_of(self, blocks: Int32) -> Int32:
        """int32: the slots of whole blocks, in order."""
        each = np.arange(self.block_size, dtype=np.int32)
        return (blocks[:, None] * self.block_size + each).reshape(-1)


AttentionName = Literal["torch", "triton"]

# Fields of a tile, int32 each. A tile is up to block_m // group_size consecutive rows of one
# sequence, whose keys are read once for all of them.
TILE_ROW_START = 0
TILE_NUM_ROWS = 1
TILE_SEQ_ID = 2
TILE_MAX_PREFIX = 3  # largest prefix_len of its rows
TILE_MIN_POSITION = 4  # smallest position of its rows: no window begins earlier
TILE_TREE_START = 5  # first row of the tree that its rows are nodes of
TILE_PART_START = 6  # index of its first row among the rows whose keys are split
TILE_NUM_TREE = 7  # rows from there on that its rows may see; 0 without nodes
TILE_FIELDS = 8

SMALL_M = 16  # query vectors of a tile of decode rows and trees: the least a tensor core takes
LARGE_M = 64  # of a tile of a prompt chunk
MAX_TREE_RUN = 64  # a longer run of rows has large tiles, whose keys are not split: it fills the
# device without, and with small ones its keys would be read too often
SPLIT_SIZE = 256  # keys of one split
WORD = 32  # tree rows of one word of `ancestor_bits`
_REFERENCE_ROWS = 16  # rows the reference scores at once: bounds its memory
NOTHING = -1
"""The slot of a position before the text."""


@dataclass(frozen=True, slots=True)
class TilePlan:
    """The work of one step's attention, planned once on the host for all layers.

    short, long: int32 [T, TILE_FIELDS]: tiles of runs of few rows, of TileShape.small_m query
    vectors (rows x query heads of one KV head), and of others, of large_m. num_splits: programs
    that share a short tile's keys, 1 = no split. A row always falls in the same kind of tile with
    the same split boundaries, whatever its neighbours. split_rows: int32 [P]: the rows of short
    tiles with num_splits > 1, in the order of their TILE_PART_START; their partial results are
    combined by a second launch.
    """

    short: Int32
    long: Int32
    num_splits: int
    split_rows: Int32


@dataclass(frozen=True, slots=True)
class TileShape:
    """What planning needs to know of a model and of the memory for partial results.

    group_size: query heads per KV head. split_size: keys of one split, a power of two.
    max_splits: splits of the longest history, a power of two. max_partials: how many (row, split)
    pairs the partial buffer holds. large_m: query vectors of a tile that holds several rows.
    """

    group_size: int
    split_size: int
    max_splits: int
    max_partials: int
    large_m: int = LARGE_M

    @staticmethod
    def of(
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_model_len: int,
        num_bytes: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> TileShape:
        """The shape for a model; num_bytes: memory for partial results. dtype: of keys and values.

        How many programs share a history follows from its own length, not from the longest there
        may be: one sequence of 2,000 keys is eight programs for each KV head. float32 has small
        tiles alone: its large ones do not fit the registers (9 KB a thread were spilled).

        Raises ValueError when more than LARGE_M query heads share a KV head.
        """
        group_size = num_heads // num_kv_heads
        if group_size * num_kv_heads != num_heads or group_size > LARGE_M:
            raise ValueError(f"{num_heads} query heads over {num_kv_heads} KV heads")
        max_splits = power_of_two(-(-max_model_len // SPLIT_SIZE))
        per_partial = num_heads * (head_dim + 2) * 4
        is_wide = dtype.itemsize > 2 and group_size <= SMALL_M
        large_m = SMALL_M if is_wide else LARGE_M
        return TileShape(group_size, SPLIT_SIZE, max_splits, num_bytes // per_partial, large_m)

    @property
    def small_m(self) -> int:
        """Query vectors of a tile of decode rows and trees: at least those of a row."""
        return SMALL_M if self.group_size <= SMALL_M else LARGE_M


def power_of_two(n: int) -> int:
    """The least one that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def run_starts(seq_ids: Int32) -> npt.NDArray[np.int64]:
    """First row of every run of rows of one sequence; seq_ids must not be empty."""
    return np.concatenate(([0], np.flatnonzero(seq_ids[1:] != seq_ids[:-1]) + 1))


def plan_tiles(batch: Batch, shape: TileShape) -> TilePlan:
    """Divide a Batch's rows into tiles.

    Short runs (decode, trees) get small tiles with their keys split over programs, because few
    rows over a long history would leave the device idle; long runs (prompt chunks) get large tiles
    over all their keys. A decoded row and a drafted one are of one kind, so that a tree changes
    nothing for its neighbours. When the partial buffer cannot hold all split rows, the runs that
    come last are as long ones are.
    """
    starts = run_starts(batch.seq_ids)
    lengths = np.diff(np.append(starts, batch.num_rows))
    short = lengths <= MAX_TREE_RUN
    num_splits = 1
    if short.any():
        longest = int(np.maximum.reduceat(batch.prefix_len, starts)[short].max())
        num_splits = max(1, -(-longest // shape.split_size))
    if num_splits > 1:
        room = shape.max_partials // num_splits
        short &= np.cumsum(np.where(short, lengths, 0)) <= room
        num_splits = num_splits if short.any() else 1
    tiles, long = (
        _divide(batch, starts[chosen], lengths[chosen], block_m // shape.group_size)
        for chosen, block_m in ((short, shape.small_m), (~short, shape.large_m))
    )
    split_rows = np.empty(0, np.int32)
    if num_splits > 1:
        rows = tiles[:, TILE_NUM_ROWS]
        tiles[:, TILE_PART_START] = np.cumsum(rows) - rows
        offsets = np.arange(int(rows.sum())) - np.repeat(np.cumsum(rows) - rows, rows)
        split_rows = (np.repeat(tiles[:, TILE_ROW_START], rows) + offsets).astype(np.int32)
    return TilePlan(tiles, long, num_splits, split_rows)


def _divide(
    batch: Batch,
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    rows_per_tile: int,
) -> Int32:
    """Tiles of runs (starts[i], lengths[i]), without TILE_PART_START."""
    if not starts.shape[0]:
        return np.zeros((0, TILE_FIELDS), np.int32)
    counts = -(-lengths // rows_per_tile)
    nth = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    first = np.repeat(starts, counts) + nth * rows_per_tile
    last = np.minimum(first + rows_per_tile, np.repeat(starts + lengths, counts))
    bounds = np.stack([first, last], axis=1).reshape(-1)

    def reduced(ufunc: np.ufunc, values: Int32) -> Int32:
        # A sentinel keeps the end of the last tile a valid index; every second segment is a gap.
        padded = np.append(values, values[-1:])
        return np.asarray(ufunc.reduceat(padded, bounds)[::2], np.int32)

    tiles = np.zeros((first.shape[0], TILE_FIELDS), np.int32)
    tiles[:, TILE_ROW_START] = first
    tiles[:, TILE_NUM_ROWS] = last - first
    tiles[:, TILE_SEQ_ID] = batch.seq_ids[first]
    tiles[:, TILE_MAX_PREFIX] = reduced(np.maximum, batch.prefix_len)
    tiles[:, TILE_MIN_POSITION] = reduced(np.minimum, batch.positions)
    if batch.path_slots.shape[0]:
        tree_start = tree_starts(batch)
        reach = np.where(tree_start >= 0, np.arange(batch.num_rows) - tree_start + 1, 0)
        tiles[:, TILE_TREE_START] = np.maximum(0, reduced(np.maximum, tree_start))
        tiles[:, TILE_NUM_TREE] = reduced(np.maximum, reach.astype(np.int32))
    return tiles


def tree_starts(batch: Batch) -> Int32:
    """int32 [R]: first row of the tree that a row is a node of; -1 for rows that are none.

    The nodes of a sequence's tree are consecutive rows, a parent before its children.
    """
    starts = np.full(batch.num_rows, -1, np.int32)
    nodes = np.flatnonzero(batch.path_len > 0)
    if nodes.shape[0]:
        firsts = run_starts(batch.seq_ids[nodes])
        counts = np.diff(np.append(firsts, nodes.shape[0]))
        starts[nodes] = np.repeat(nodes[firsts], counts)
    return starts


def key_slots(batch: Batch, num: int, block_size: int) -> Int32:
    """int32 [R, num]: the slots of a row's last positions on its path, its own last, or
    NOTHING."""
    last = batch.prefix_len + batch.path_len - 1
    at = last[:, None] - np.arange(num - 1, -1, -1, dtype=np.int32)
    block = np.clip(at // block_size, 0, batch.block_tables.shape[1] - 1)
    slots = batch.block_tables[batch.seq_ids[:, None], block] * block_size + at % block_size
    if batch.path_slots.shape[0]:
        nth = at - batch.prefix_len[:, None]
        which = np.clip(batch.path_start[:, None] + nth, 0, batch.path_slots.shape[0] - 1)
        slots = np.where(nth >= 0, batch.path_slots[which], slots)
    return np.where(at < 0, NOTHING, slots).astype(np.int32)


def ancestor_bits(batch: Batch) -> Int32:
    """int32 [R, W]: bit j of a row's words (bit j % 32 of word j // 32) is set when the j-th row of
    its tree is the row itself or an ancestor; W >= 1. It is Batch's path_slots, read as keys of a
    matrix product instead of one by one (tree attention: SpecInfer, arXiv 2305.09781, section 4.2).

    Raises ValueError when a path names a slot that no earlier node of the row's tree writes.
    """
    nodes = np.flatnonzero(batch.path_len > 0)
    if not nodes.shape[0]:
        return np.zeros((batch.num_rows, 1), np.int32)
    lengths = batch.path_len[nodes]
    row = np.repeat(nodes, lengths)
    nth = np.arange(row.shape[0]) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    slots = batch.path_slots[batch.path_start[row] + nth]
    order = np.argsort(batch.slots[nodes])
    found = np.searchsorted(batch.slots[nodes], slots, sorter=order)
    key_row = nodes[order[np.minimum(found, nodes.shape[0] - 1)]]
    bit = key_row - tree_starts(batch)[row]
    if (batch.slots[key_row] != slots).any() or (bit < 0).any() or (key_row > row).any():
        raise ValueError("a path's slot is not that of an earlier node of its tree")
    num_words = int(bit.max()) // WORD + 1
    dense = np.zeros((batch.num_rows, num_words * WORD), np.bool_)
    dense[row, bit] = True
    return np.packbits(dense, axis=1, bitorder="little").view("<i4").astype(np.int32, copy=False)


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A Batch's row arrays on the device: names and shapes as in Batch, int32, but slots int64, by
    which torch writes rows. ancestors: int32 [R, W], of ancestor_bits, for the kernels. sources:
    int32 [R, taps], of key_slots, in models that have short convolutions."""

    positions: torch.Tensor
    slots: torch.Tensor
    prefix_len: torch.Tensor
    block_tables: torch.Tensor
    ancestors: torch.Tensor | None = None
    sources: torch.Tensor | None = None


class Attention(Protocol):
    """Attends for one step; built once a step, called once a layer."""

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call
    ) -> torch.Tensor:
        """[R, num_heads, head_dim] in query's dtype, contiguous."""


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A Step on the paged cache (interface.py). rows: of the step. recurrence: what a gated delta
    net gives its q, k, v, b and a to, in models that have some."""

    cache: KvCache
    attention: Attention
    rows: StepTensors
    recurrence: Callable[[Any, torch.Tensor], torch.Tensor] | None = None

    def attend(
        self, call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See Step."""
        layer = self.cache.write(call.layer, self.rows.slots, key, value)
        return self.attention.attend(query, *layer, call)

    def recur(self, net: Any, mixed: torch.Tensor) -> torch.Tensor:
        """See Step."""
        assert self.recurrence is not None
        return self.recurrence(net, mixed)


class TorchAttention:
    """The reference: plain torch, some rows at a time. Order of sums is torch's, not fixed."""

    def __init__(self, batch: Batch, block_size: int, device: torch.device) -> None:
        longest = int((batch.prefix_len + batch.path_len).max())
        self._slots = torch.from_numpy(key_slots(batch, longest, block_size)).to(device)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        call: Call,
    ) -> torch.Tensor:
        """See Attention."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        num_kv_heads, head_dim = keys.shape[1:]
        last = self._slots.shape[1]
        first = max(0, last - call.window) if call.window else 0
        for start in range(0, query.shape[0], _REFERENCE_ROWS):
            rows = slice(start, start + _REFERENCE_ROWS)
            own = out[rows]
            slots = self._slots[rows, first:]
            seen = slots >= 0
            # Where there is no key a row reads itself: another row's NaN times 0 is NaN.
            slots = torch.where(seen, slots, slots[:, -1:]).clamp(min=0)
            mask = seen[:, None, None]
            q = query[rows].float().reshape(own.shape[0], num_kv_heads, -1, head_dim)
            score = torch.einsum("nkgd,nlkd->nkgl", q, keys[slots].float()).mul_(call.scaling)
            score = soft_capped(score, call.cap)
            score.masked_fill_(~mask, float("-inf"))
            # A row without any key (padding) gets zeros, not NaN.
            share = torch.softmax(score, dim=-1).masked_fill_(~mask, 0.0)
            result = torch.einsum("nkgl,nlkd->nkgd", share, values[slots].float())
            own.copy_(result.reshape(own.shape))
        return out
