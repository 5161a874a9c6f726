"""StepGraphs: CUDA graphs of a step, for decode steps and for trees alike.

A step whose sequences have few rows each (last tokens, trees, ends of prompts) has its number of
rows padded to a bucket and its number of splits to a level; for every such pair the body, with the
full LM head and the argmax behind it (lm_head.GraphHead) or without, is captured once, at first
use, and replayed afterwards. Padded rows read nothing and write to the cache's trash slot. So a
drafted step costs what a decode step of as many rows costs.

What makes this possible lives elsewhere and must stay: all inputs of the body are views into one
device buffer at offsets that a bucket fixes (server.model.gpu.body_run), launches have grids
known on the host, and nothing between the upload and the last hidden state syncs.

Where more is drawn than an argmax, the sampler is launched behind it.

Adapters' rows are in graphs of their own, and so are those of adapters with rows of the embedding:
their tables keep their addresses until larger ones are needed, and the graphs are captured again
then. Their own head rows, like a slice's, are multiplied behind the graph. Vocabulary slices
work beside graphs: theirs ends at the hidden states, their products and draws are outside.
Embeddings that are gathered in CPU memory are inputs like the others.

The bucket arithmetic is tested on a CPU, and so is a replay that calls what was captured first, on
the addresses that it read. Capture itself has not run on a GPU: tests/gpu compares it with the
plain path.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from server.model.gpu import attention as paged
from server.model.gpu.convolution import NOTHING
from server.model.gpu.delta import ITEMS_A_ROW
from server.model.gpu.grouped import SPAN_FIELDS
from server.model.gpu.own_rows import with_no_places

Array = npt.NDArray[Any]

WARM_UP_RUNS = 2
MAX_GRAPH_ROWS = 256
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, MAX_GRAPH_ROWS)


def row_bucket(num_rows: int, largest: int) -> int | None:
    """The padded row count, of ROW_BUCKETS; None when that is more than `largest`."""
    return next((b for b in ROW_BUCKETS if num_rows <= b <= largest), None)


def split_level(num_splits: int, max_splits: int) -> int:
    """The padded number of splits: a power of four, at most max_splits. Splits without keys end at
    once, so that few levels, and few graphs, serve every length."""
    level = 1
    while level < num_splits:
        level *= 4
    return min(level, max_splits)


class GraphKey(NamedTuple):
    """rows, splits: as padded. has_head, has_adapters: whether the full LM head and rows' adapters
    are in the graph. has_own_rows: the adapters' own rows of the embedding."""

    rows: int
    splits: int
    has_head: bool = False
    has_adapters: bool = False
    has_own_rows: bool = False


Outputs = tuple[torch.Tensor, ...]
Forward = Callable[[], Outputs]


class StepGraphs:
    """Captured graphs by their key. One memory pool; used from one thread and stream. largest: most
    rows of a graph."""

    def __init__(self, device: torch.device, largest: int) -> None:
        self._device = device
        self.largest = largest
        self.num_captured = 0
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Outputs]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, key: Hashable, forward: Forward) -> Outputs:
        """What `forward` returns, computed by a replay.

        forward: runs the step on its static inputs; called only when the key is new: first plainly,
        so that Triton compiles and cuBLAS allocates outside the capture, then under it.
        It can run several times: it writes the same KV to the same slots. The returned tensors are
        overwritten by the next run.
        """
        found = self._graphs.get(key)
        if found is None:
            for _ in range(WARM_UP_RUNS):
                forward()
            graph = torch.cuda.CUDAGraph()
            # On the runner's own stream: torch's is one per process, on the device that came first.
            stream = torch.cuda.current_stream(self._device)
            # Another thread's allocation, or a question to the driver, does not end a capture.
            mode = "thread_local"
            with torch.cuda.graph(graph, self._pool, stream, capture_error_mode=mode):
                outputs = forward()
            found = self._graphs[key] = (graph, outputs)
            self.num_captured += 1
        graph, outputs = found
        graph.replay()
        return outputs

    def forget(self) -> None:
        """Drop all graphs: something that they read has moved."""
        self._graphs.clear()
        # torch does not capture into a pool again whose last graph is gone.
        self._pool = torch.cuda.graph_pool_handle()


def pad_to_bucket(
    arrays: dict[str, Array],
    plan: paged.TilePlan,
    key: GraphKey,
    trash_slot: int,
    tables_shape: tuple[int, int],
) -> paged.TilePlan:
    """Pad a step's arrays in place to the bucket's shapes; the padded plan.

    plan: of one group. tables_shape: of the bucket's block tables; entries of the step's own beyond
    it are not read. Padded rows have no keys, no tile and the trash slot; every shape depends on
    the key alone.
    """
    num_rows, num_splits = key.rows, key.splits
    for name in ("token_ids", "positions", "seq_ids", "slots", "prefix_len"):
        fill = trash_slot if name == "slots" else 0
        padded = np.full(num_rows, fill, np.int32)
        padded[: arrays[name].shape[0]] = arrays[name]
        arrays[name] = padded
    if "sources" in arrays:
        sources = np.full((num_rows, arrays["sources"].shape[1]), NOTHING, np.int32)
        sources[: arrays["sources"].shape[0]] = arrays["sources"]
        arrays["sources"] = sources
    if "items" in arrays:
        room = ITEMS_A_ROW * num_rows, arrays["items"].shape[1]
        arrays["items"] = _corner(arrays["items"], room)
        arrays["lines"] = _corner(arrays["lines"], (num_rows, 2))
    num_words = -(-num_rows // paged.WORD)
    arrays["ancestors"] = _corner(arrays["ancestors"], (num_rows, num_words))
    if key.has_adapters:  # a span a row is the most; padded ones have no rows
        arrays["adapters"] = _corner(arrays["adapters"], (num_rows, SPAN_FIELDS))
    if "own_places" in arrays:
        arrays["own_places"] = with_no_places(arrays["own_places"], num_rows)
    if "embeds" in arrays:
        arrays["embeds"] = _corner(arrays["embeds"], (num_rows, arrays["embeds"].shape[1]))
    arrays["block_tables"] = _corner(arrays["block_tables"], tables_shape)
    group = plan.groups[0]
    tiles = _corner(group.tiles, (num_rows, paged.TILE_FIELDS))
    split_rows = np.full(num_rows if num_splits > 1 else 0, -1, np.int32)
    split_rows[: plan.split_rows.shape[0]] = plan.split_rows
    return paged.TilePlan(
        (paged.TileGroup(tiles, group.block_m, num_splits),), split_rows, num_splits
    )


def _corner(array: Array, shape: tuple[int, int]) -> Array:
    """Zeros of a shape, with what fits of the array in their first rows and columns."""
    padded = np.zeros(shape, array.dtype)
    part = array[: shape[0], : shape[1]]
    padded[: part.shape[0], : part.shape[1]] = part
    return padded
