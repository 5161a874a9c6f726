"""DecodeGraphs: CUDA graphs of the model's body for decode-shaped steps.

A decode-shaped step has one row per sequence and no tree. Its row count is padded to a bucket, its
split count to a power of two; for every such pair the body is captured once, at first use, and
replayed afterwards. Padded rows read nothing and write to the cache's trash slot.

What makes this possible lives elsewhere and must stay: all inputs of the body are views into one
device buffer at offsets that a bucket fixes (server.model.gpu.body_run), launches have grids
known on the host, and nothing between the upload and the last hidden state syncs.

Vocabulary slices work beside it: the LM head, the slices' products and the draws are outside the
graph. Embeddings that are gathered in CPU memory are inputs like the others.

The bucket arithmetic is tested on a CPU. Capture and replay have not run on a GPU: tests/gpu
compares them with the plain path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from server.model.gpu import attention as paged

Array = npt.NDArray[Any]

WARM_UP_RUNS = 2


def row_bucket(num_rows: int, largest: int) -> int | None:
    """The padded row count: 1, 2, 4, 8, then multiples of 8 up to 64 and of 32 above; None when
    that is more than `largest`."""
    if num_rows <= 8:
        bucket = 1 << max(0, num_rows - 1).bit_length()
    else:
        step = 8 if num_rows <= 64 else 32
        bucket = -(-num_rows // step) * step
    return bucket if bucket <= largest else None


class DecodeGraphs:
    """Captured graphs by (rows, splits). One memory pool; used from one thread and stream."""

    def __init__(self, device: torch.device, largest: int) -> None:
        self._device = device
        self.largest = largest
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, key: tuple[int, int], forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Hidden states of the bucket's rows.

        forward: runs the body on the step's static inputs; called only when the key is new: first
        plainly, so that Triton compiles and cuBLAS allocates outside the capture, then under it.
        Running a step's body several times is harmless: it writes the same KV to the same slots.
        The returned tensor is overwritten by the key's next run.
        """
        found = self._graphs.get(key)
        if found is None:
            for _ in range(WARM_UP_RUNS):
                forward()
            graph = torch.cuda.CUDAGraph()
            # On the runner's own stream: torch's is one per process, on the device that came first.
            stream = torch.cuda.current_stream(self._device)
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                hidden = forward()
            found = self._graphs[key] = (graph, hidden)
        graph, hidden = found
        graph.replay()
        return hidden

    def forget(self) -> None:
        """Drop all graphs: their input buffer has moved."""
        self._graphs.clear()


def pad_to_bucket(
    arrays: dict[str, Array],
    plan: paged.TilePlan,
    key: tuple[int, int],
    trash_slot: int,
    max_blocks: int,
) -> paged.TilePlan:
    """Pad a decode-shaped step's arrays in place to the bucket's shapes; the padded plan.

    Padded rows have no keys, no tile and the trash slot; every shape depends on the key alone.
    """
    num_rows, num_splits = key
    for name in (
        "token_ids",
        "token_from",
        "positions",
        "seq_ids",
        "slots",
        "prefix_len",
        "path_start",
        "path_len",
    ):
        fill = {"slots": trash_slot, "token_from": -1}.get(name, 0)
        padded = np.full(num_rows, fill, np.int32)
        padded[: arrays[name].shape[0]] = arrays[name]
        arrays[name] = padded
    if "embeds" in arrays:
        embeds = np.zeros((num_rows, arrays["embeds"].shape[1]), arrays["embeds"].dtype)
        embeds[: arrays["embeds"].shape[0]] = arrays["embeds"]
        arrays["embeds"] = embeds
    arrays["path_slots"] = np.zeros(1, np.int32)
    tables = np.zeros((num_rows, max_blocks), np.int32)
    given = arrays["block_tables"]
    tables[: given.shape[0], : given.shape[1]] = given
    arrays["block_tables"] = tables
    tiles = np.zeros((num_rows, paged.TILE_FIELDS), np.int32)
    group = plan.groups[0]
    tiles[: group.tiles.shape[0]] = group.tiles
    split_rows = np.full(num_rows if num_splits > 1 else 0, -1, np.int32)
    split_rows[: plan.split_rows.shape[0]] = plan.split_rows
    return paged.TilePlan(
        (paged.TileGroup(tiles, group.block_m, num_splits),), split_rows, num_splits
    )
