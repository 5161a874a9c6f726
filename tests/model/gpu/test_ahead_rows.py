"""What a device makes of a step launched ahead, against server.engine.ahead.resolve.

The device's rows are padded, and its moves filled up. The Triton half runs in the interpreter's
process (tests/model/gpu/test_attention.py starts it).
"""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from server.engine.ahead import Ahead, Resolved, resolve
from server.engine.batch import Batch
from server.model.gpu import attention as paged
from server.model.gpu.ahead_rows import WORD, ahead_rows
from server.model.gpu.kv_cache import KvCache
from tests.model.batches import draw_params
from tests.model.gpu.ahead_of_time import compiled, stack_bytes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs under TRITON_INTERPRET=1")
BLOCK_SIZE = 4
TRASH = 800


def _tree(rng: Random, num: int, vocab: int) -> tuple[list[int], list[int]]:
    tokens: list[int] = []
    parents: list[int] = []
    for i in range(num):
        parent = rng.choice([-1, i - 1, i - 1, rng.randrange(-1, i)]) if i else -1
        token = rng.randrange(vocab)
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(min(parent, len(tokens) - 2))
    return tokens, parents


def _step(rng: Random, most_nodes: int) -> tuple[Batch, np.ndarray]:
    """A Batch behind trees of small alphabets, so that paths are long, and what those drew."""
    num, vocab = rng.randint(1, 4), 3
    trees = [_tree(rng, rng.randint(0, most_nodes), vocab) for _ in range(num)]
    options: list[list[tuple[int, int, tuple[list[int], list[int]]]]] = []
    for tokens, _ in trees:
        pairs = {(rng.randrange(-1, len(tokens)), rng.randrange(vocab)) for _ in range(9)}
        pairs = pairs if rng.random() < 0.8 else set()
        options.append([(e, t, _tree(rng, rng.randint(1, most_nodes), 9)) for e, t in pairs])
    flat = [option for of in options for option in of]
    draws, at = [], rng.randrange(3)
    for tokens, _ in trees:
        draws.append(at)
        at += 1 + len(tokens) + rng.randrange(2)
    ids = np.array([rng.choice([-1, 0, 0, 1, 2, 2]) for _ in range(at)], np.int32)

    def starts(lengths: list[int]) -> np.ndarray:
        return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)

    def ints(values: list[int]) -> np.ndarray:
        return np.array(values, np.int32)

    ahead = Ahead(
        root_draws=ints(draws),
        tree_start=starts([len(t) for t, _ in trees]),
        tree_tokens=ints([i for t, _ in trees for i in t]),
        tree_parents=ints([i for _, p in trees for i in p]),
        option_start=starts([len(of) for of in options]),
        option_end=ints([e for e, _, _ in flat]),
        option_token=ints([t for _, t, _ in flat]),
        node_start=starts([len(t) for _, _, (t, _) in flat]),
        node_tokens=ints([i for _, _, (t, _) in flat for i in t]),
        node_parents=ints([i for _, _, (_, p) in flat for i in p]),
    )
    positions = ints([rng.randrange(1, 9) for _ in range(num)])
    blocks = list(range(80))
    rng.shuffle(blocks)
    tables = ints(blocks[: num * 20]).reshape(num, 20)
    rows = np.arange(num, dtype=np.int32)
    zeros = np.zeros(num, np.int32)
    batch = Batch(
        token_ids=zeros, token_from=ahead.root_draws, positions=positions, seq_ids=rows,
        slots=rows, prefix_len=positions + np.int32(1), path_start=zeros, path_len=zeros,
        block_tables=tables, draw_rows=rows, draw_params=rows, draw_parent=zeros - 1,
        draw_positions=positions + np.int32(1), draw_mask=zeros - 1,
        params=tuple(draw_params() for _ in range(num)), ahead=ahead,
    )  # fmt: skip
    return batch, ids


def test_the_rows_hold_whatever_is_drawn() -> None:
    """Every tree that may be met fits, no row is nearer or further than it may be, and the padded
    Batch is one that attention can plan for."""
    rng = Random(1)
    for _ in range(200):
        batch, ids = _step(rng, 7)
        rows, resolved = ahead_rows(batch), resolve(batch, ids, BLOCK_SIZE).batch
        most = np.bincount(rows.batch.seq_ids)
        used = np.bincount(resolved.seq_ids, minlength=most.shape[0])
        assert (used <= most).all()
        of = resolved.seq_ids
        assert (resolved.prefix_len <= rows.batch.prefix_len[rows.arrays["row_start"][of]]).all()
        assert (resolved.positions >= rows.batch.positions[rows.arrays["row_start"][of]]).all()
        words = paged.ancestor_bits(rows.batch).shape[1]
        assert words * WORD >= most.max() - 1


@needs_interpreter
@pytest.mark.parametrize("most_nodes", [3, 9, 40])
def test_triton_accepts_trees_as_the_host_does(most_nodes: int) -> None:
    from server.model.gpu.ahead_kernels import RowTensors, accept_trees

    rng = Random(most_nodes)
    num_accepted = num_met = num_moved = 0
    for _ in range(120 // most_nodes):
        batch, ids = _step(rng, most_nodes)
        if int((batch.positions.max() + 2 * most_nodes + 2) // BLOCK_SIZE) >= 20:
            batch = _far(batch)
        made, want = ahead_rows(batch), resolve(batch, ids, BLOCK_SIZE)
        num = made.batch.num_rows + 2  # a graph's bucket has more
        words = paged.ancestor_bits(made.batch).shape[1]
        columns = [torch.full((num,), 77, dtype=torch.int32) for _ in range(4)]
        rows = RowTensors(*columns, torch.full((num, words), 77, dtype=torch.int32))
        arrays = {name: torch.from_numpy(a.copy()) for name, a in made.arrays.items()}
        src, dst = accept_trees(
            torch.from_numpy(ids), arrays, torch.from_numpy(batch.block_tables), rows,
            block_size=BLOCK_SIZE, trash_slot=TRASH,
        )  # fmt: skip
        moves = [(a, b) for a, b in zip(src.tolist(), dst.tolist(), strict=True) if b != TRASH]
        assert moves == list(zip(want.src.tolist(), want.dst.tolist(), strict=True))
        assert all(
            a == TRASH for a, b in zip(src.tolist(), dst.tolist(), strict=True) if b == TRASH
        )
        check_moves(src, dst, want)
        starts = made.arrays["row_start"]
        places = np.concatenate(
            [
                np.arange(start, start + count)
                for start, count in zip(starts[:-1], np.bincount(want.batch.seq_ids), strict=True)
            ]
        )
        for name in ("token_ids", "positions", "slots", "prefix_len"):
            got = getattr(rows, name).numpy()
            assert (got[places] == getattr(want.batch, name)).all(), name
            rest = np.setdiff1d(np.arange(made.batch.num_rows), places)
            assert (got[rest] == (TRASH if name == "slots" else 0)).all(), name
            assert (got[made.batch.num_rows :] == 77).all()
        bits = paged.ancestor_bits(want.batch)
        got = rows.ancestors.numpy()
        assert (got[places][:, : bits.shape[1]] == bits).all()
        assert (got[places][:, bits.shape[1] :] == 0).all()
        num_accepted += sum(want.num_accepted)
        num_met += sum(option >= 0 for option in want.options)
        num_moved += len(moves)
    assert num_accepted > 3 and num_met > 0 and num_moved > 0, (num_accepted, num_met, num_moved)


def check_moves(src: torch.Tensor, dst: torch.Tensor, want: Resolved) -> None:
    """The KV after the device's moves is that after the host's, outside the trash slot."""
    memories = []
    for _ in range(2):
        cache = KvCache(
            num_layers=2, num_kv_heads=1, head_dim=2, num_blocks=TRASH // BLOCK_SIZE,
            block_size=BLOCK_SIZE, dtype=torch.float32, device=torch.device("cpu"),
        )  # fmt: skip
        cache.memory.copy_(torch.arange(cache.memory.numel()).reshape(cache.memory.shape))
        memories.append(cache)
    device, host = memories
    assert device.trash_slot == TRASH
    device.copy_slots(src.long(), dst.long())
    host.move_slots(want.src, want.dst)
    assert torch.equal(device.memory[:, :, :TRASH], host.memory[:, :, :TRASH])


def _far(batch: Batch) -> Batch:
    """With block tables that are long enough."""
    from dataclasses import replace

    num = batch.num_rows
    tables = np.random.default_rng(0).permutation(num * 40).astype(np.int32).reshape(num, 40)
    return replace(batch, block_tables=tables)


@pytest.mark.skipif(INTERPRETED, reason="compiles for a GPU")
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_the_kernel_compiles_for_a_gpu(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down to machine code, without a GPU; nothing spills."""
    pytest.importorskip("triton")
    from server.model.gpu.ahead_kernels import _accept_trees

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = compiled(
        _accept_trees,
        dict.fromkeys(("table_stride", "ancestor_stride", "node_words", "trash_slot"), "i32"),
        {"BLOCK_SIZE": 16},
        capability=capability, other="*i32", num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    assert stack_bytes(made, tmp_path) == 0
