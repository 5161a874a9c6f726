"""The Triton kernel that accepts trees on the device: server.engine.ahead.resolve, row by row.

One program a sequence. It walks the tree of the step before along the ids that were drawn, notes
which KV entries must move, and writes the rows of the next step: the drawn token's, and those of
the tree that was prepared for it. Only integers are looked at, so the result is the host's to the
bit; the host finds it again when it has the ids.

tests/model/gpu/test_ahead_rows.py compares it with resolve in Triton's interpreter and compiles it
for GPUs; it was not run on one.
"""

# Kernels are untyped by nature, and triton ships no stubs.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl


class RowTensors(NamedTuple):
    """A step's rows as its body reads them: int32 [R], ancestors [R, W] (attention.ancestor_bits).
    R may be larger than the rows of the step."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    prefix_len: torch.Tensor
    ancestors: torch.Tensor


@triton.jit
def _slot(table, position, BLOCK_SIZE: tl.constexpr):
    return tl.load(table + position // BLOCK_SIZE) * BLOCK_SIZE + position % BLOCK_SIZE


_WORDS = tl.constexpr(8)
"""Words of `ancestors` that are written at once."""


# Widths of trees and tables differ from step to step, and no program is compiled anew for them.
@triton.jit(do_not_specialize=("table_stride", "ancestor_stride", "node_words"))
def _accept_trees(
    drawn, root_draws, tree_start, tree_tokens, tree_parents,
    option_start, option_end, option_token, node_start, node_tokens, node_ancestors, node_depths,
    first_positions, row_start, tables, table_stride,
    token_ids, positions, slots, prefix_len, ancestors, ancestor_stride, node_words,
    move_src, move_dst, trash_slot,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Program (sequence)."""
    s = tl.program_id(0)
    table = tables + s * table_stride
    base = tl.load(first_positions + s)
    first = tl.load(tree_start + s)
    draw = tl.load(root_draws + s)
    token = tl.load(drawn + draw)
    end = tl.full((), -1, tl.int32)
    num_accepted = tl.full((), 0, tl.int32)
    for i in range(0, tl.load(tree_start + s + 1) - first):
        is_next = (tl.load(tree_parents + first + i) == end) & (
            tl.load(tree_tokens + first + i) == token
        )
        moves = is_next & (num_accepted != i)
        src, dst = _slot(table, base + i, BLOCK_SIZE), _slot(table, base + num_accepted, BLOCK_SIZE)
        tl.store(move_src + first + i, tl.where(moves, src, trash_slot))
        tl.store(move_dst + first + i, tl.where(moves, dst, trash_slot))
        token = tl.where(is_next, tl.load(drawn + draw + 1 + i), token)
        end = tl.where(is_next, i, end)
        num_accepted += is_next.to(tl.int32)

    option = tl.full((), -1, tl.int32)
    for o in range(tl.load(option_start + s), tl.load(option_start + s + 1)):
        is_met = (tl.load(option_end + o) == end) & (tl.load(option_token + o) == token)
        option = tl.where(is_met, o, option)
    met = tl.maximum(option, 0)
    node = tl.load(node_start + met, mask=option >= 0, other=0)
    num_nodes = tl.load(node_start + met + 1, mask=option >= 0, other=0) - node

    root = base + num_accepted
    row = tl.load(row_start + s)
    tl.store(token_ids + row, tl.maximum(token, 0))
    tl.store(positions + row, root)
    tl.store(slots + row, _slot(table, root, BLOCK_SIZE))
    tl.store(prefix_len + row, root + 1)
    for start in range(0, ancestor_stride, _WORDS):
        word = start + tl.arange(0, _WORDS)
        bits = tl.zeros_like(word)
        tl.store(ancestors + row * ancestor_stride + word, bits, mask=word < ancestor_stride)
    for j in range(0, tl.load(row_start + s + 1) - row - 1):
        at = row + 1 + j
        is_there = j < num_nodes
        depth = tl.load(node_depths + node + j, mask=is_there, other=0)
        new_token = tl.load(node_tokens + node + j, mask=is_there, other=0)
        where = tl.where(is_there, root + 1 + j, root)
        tl.store(token_ids + at, new_token)
        tl.store(positions + at, tl.where(is_there, root + depth, 0))
        tl.store(slots + at, tl.where(is_there, _slot(table, where, BLOCK_SIZE), trash_slot))
        tl.store(prefix_len + at, tl.where(is_there, root + 1, 0))
        num_words = tl.where(is_there, node_words, 0)
        for start in range(0, ancestor_stride, _WORDS):
            word = start + tl.arange(0, _WORDS)
            own = node_ancestors + (node + j) * node_words + word
            bits = tl.load(own, mask=word < num_words, other=0)
            tl.store(ancestors + at * ancestor_stride + word, bits, mask=word < ancestor_stride)


def accept_trees(
    drawn: torch.Tensor,
    arrays: Mapping[str, torch.Tensor],
    block_tables: torch.Tensor,
    rows: RowTensors,
    *,
    block_size: int,
    trash_slot: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the rows of the step in place; int32 slots (src, dst) of the KV to be moved before it,
    both the trash slot where nothing is.

    drawn: int32, what the step before drew, by its draws. arrays: of AheadRows, on the device.
    block_tables: int32 [S or more, blocks].
    """
    src, dst = torch.empty_like(arrays["tree_tokens"]), torch.empty_like(arrays["tree_tokens"])
    num_words = rows.ancestors.shape[1]
    names = (
        "root_draws", "tree_start", "tree_tokens", "tree_parents", "option_start", "option_end",
        "option_token", "node_start", "node_tokens", "ancestors", "depths", "first_positions",
        "row_start",
    )  # fmt: skip
    _accept_trees[(arrays["root_draws"].shape[0],)](
        drawn, *(arrays[name] for name in names), block_tables, block_tables.stride(0),
        rows.token_ids, rows.positions, rows.slots, rows.prefix_len, rows.ancestors, num_words,
        arrays["ancestors"].shape[1], src, dst, trash_slot, BLOCK_SIZE=block_size, num_warps=1,
    )  # fmt: skip
    return src, dst
