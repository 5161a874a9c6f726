"""AheadRows: a Batch that hangs on the draws of the step before, in rows whose number is known.

A step launched ahead becomes what server.engine.ahead.resolve makes of it, once the step before is
drawn. A device does that itself (ahead_kernels.py), on arrays that the host has laid out for the
most there may be: a sequence has the row of the drawn token and one for each node of its largest
prepared tree. Rows that the tree it meets does not have read nothing and write to the trash slot,
as those that pad a graph do.

How such a step runs on a device (following.py):

- the padded Batch is planned and uploaded like any other: tiles read its nearest positions and
  longest prefixes, so that windows and splits hold whatever is met, and a graph's bucket follows
  from its number of rows;
- then the kernel writes the rows in place, `KvCache.copy_slots` moves what was accepted, and the
  graph is replayed: three launches more than a step that waits;
- draws that are an argmax need no more. Noise is made on the device from the position: a sampled
  draw is told the one that the kernel wrote;
- `previous_ids` keeps a failed draw's number below 0, so that the device stops where the host does;
- the slot of rows that are not there is one that their own kind alone writes, with finite numbers:
  it is read with weight 0;
- the host knows by `resolve` which rows are there, once the step before was waited for (`Padded`):
  `wait` gives their draws, and what the next step takes is counted in padded rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from server.engine.ahead import Ahead, resolve
from server.engine.batch import Batch, Int32

WORD = 32  # tree rows of one word of `ancestors`, as in attention.py

UPLOADED = (
    "root_draws", "tree_start", "tree_tokens", "tree_parents",
    "option_start", "option_end", "option_token", "node_start", "node_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class AheadRows:
    """batch: with the most rows, without `ahead`; each row has one draw. Its token ids, slots and
    paths are the device's to write: they only say which rows are a tree's. Its positions are the
    nearest that there may be, its prefixes the longest. arrays: int32, what the device reads:
    fields of Ahead, row_start [S + 1], first_positions [S] of the sequences' first rows, and of the
    prepared nodes `ancestors` [M, W] (attention.ancestor_bits) and `depths` [M].
    """

    batch: Batch
    arrays: dict[str, Int32]


class Padded:
    """Which rows of a step are there, as soon as the host can know.

    batch: as the engine made it, with `ahead`. row_start: of AheadRows. drawn_ids: waits for what
    the step before drew, Drawn.token_ids.
    """

    def __init__(
        self, batch: Batch, row_start: Int32, drawn_ids: Callable[[], Int32], block_size: int
    ) -> None:
        self._batch, self._row_start = batch, row_start
        self._block_size = block_size
        self._drawn_ids: Callable[[], Int32] | None = drawn_ids
        self._places = row_start[:0]

    def places(self) -> Int32:
        """int32, of each row of the resolved Batch its row here. Raises as `resolve` does."""
        if self._drawn_ids is not None:
            made = resolve(self._batch, self._drawn_ids(), self._block_size).batch
            rows, roots = np.arange(made.num_rows), np.flatnonzero(made.draw_parent < 0)
            shift = self._row_start[:-1] - roots
            self._places = (rows + shift[made.seq_ids]).astype(np.int32)
            self._drawn_ids = None  # the step before is not needed any more
        return self._places


def ahead_rows(batch: Batch) -> AheadRows:
    """The rows of a Batch that has `ahead`."""
    ahead = batch.ahead
    assert ahead is not None
    sizes = np.diff(ahead.node_start)
    num_nodes = np.array(
        [
            max(sizes[a:b].tolist(), default=0)
            for a, b in zip(ahead.option_start[:-1], ahead.option_start[1:], strict=True)
        ],
        np.int32,
    )
    row_start = np.concatenate(([0], np.cumsum(1 + num_nodes))).astype(np.int32)
    deepest = np.array(
        [
            max(_depths(ahead.tree_parents[a:b].tolist()), default=0)
            for a, b in zip(ahead.tree_start[:-1], ahead.tree_start[1:], strict=True)
        ],
        np.int32,
    )
    of = np.repeat(np.arange(batch.num_rows, dtype=np.int32), 1 + num_nodes)
    rows = np.arange(of.shape[0], dtype=np.int32)
    is_node = rows > row_start[of]
    longest = (batch.positions + deepest)[of] + np.int32(1)
    made = replace(
        batch,
        token_ids=np.zeros_like(rows),
        token_from=np.full_like(rows, -1),
        positions=batch.positions[of],
        seq_ids=of,
        slots=rows,  # different ones, so that paths may name them
        prefix_len=longest,
        path_start=np.cumsum(is_node, dtype=np.int32) - is_node.astype(np.int32),
        path_len=is_node.astype(np.int32),
        path_slots=rows[is_node],
        draw_rows=rows,
        draw_params=batch.draw_params[of],
        draw_parent=np.where(is_node, row_start[of], -1).astype(np.int32),
        draw_positions=longest,
        draw_mask=np.full_like(rows, -1),
        num_draft_rows=int(num_nodes.sum()),
        ahead=None,
    )
    arrays = {name: getattr(ahead, name) for name in UPLOADED}
    arrays |= {"row_start": row_start, "first_positions": batch.positions}
    arrays["ancestors"], arrays["depths"] = _trees(ahead, int(num_nodes.max(initial=0)))
    return AheadRows(made, arrays)


def _trees(ahead: Ahead, most: int) -> tuple[Int32, Int32]:
    """ancestor bits int32 [M, W] and depths int32 [M] of all prepared nodes."""
    total = int(ahead.node_start[-1])
    bits = np.zeros((total, max(1, -(-most // WORD)) * WORD), np.bool_)
    depths = np.zeros(total, np.int32)
    for first, end in zip(
        ahead.node_start[:-1].tolist(), ahead.node_start[1:].tolist(), strict=True
    ):
        for i, parent in enumerate(ahead.node_parents[first:end].tolist()):
            if parent >= 0:
                bits[first + i] = bits[first + parent]
                depths[first + i] = depths[first + parent]
            bits[first + i, i] = True
            depths[first + i] += 1
    words = np.packbits(bits, axis=1, bitorder="little").view("<i4")
    return words.astype(np.int32, copy=False), depths


def _depths(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths
