"""AheadRows: a Batch that hangs on the draws of the step before, in rows whose number is known.

A step launched ahead becomes what server.engine.ahead.resolve makes of it, once the step before is
drawn. A device does that itself (ahead_kernels.py), on arrays that the host has laid out for the
most there may be: a sequence has the row of the drawn token and one for each node of its largest
prepared tree. Rows that the tree it meets does not have read nothing and write to the trash slot,
as those that pad a graph do.

How a step launched ahead runs on a device, as designed; TorchRunner does not do it yet and says so
(FollowingRunner), so behind drafts the engine waits for each step there:

- the padded Batch is planned and uploaded like any other: tiles read its nearest positions and
  longest prefixes, so that windows and splits hold whatever is met, and a graph's bucket follows
  from its number of rows;
- then the kernel writes the rows in place, `KvCache.copy_slots` moves what was accepted, and the
  graph is replayed: three launches more than a step that waits;
- draws that are an argmax need no more. Noise is keyed by the position, so sampled ones need their
  `draw_positions` written too; a step with any of those, penalties or slices waits;
- `previous_ids` must then keep a failed draw's number below 0 (today it is 0), or the device would
  walk on where the host stops;
- `wait` drops the rows that are not there: it knows them by `resolve`, because the step before was
  waited for; and the next step's root_draws are counted in these rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from server.engine.ahead import Ahead
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
