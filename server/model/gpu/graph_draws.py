"""GraphDraws: the second graph of a step, which draws from the logits that the first one left.

A step whose draws are all an argmax needs no more than the graph of the body and the head
(graph_head.py). Where a row is sampled, or changed by its request, a second graph is replayed
behind it: temperature, top-k, top-p, min-p, noise, biases, penalties, banned and allowed ids and
grammars' masks, a row each, from buffers that the step's upload fills (draw_kernels.py). It is
captured for each bucket of rows, with top-k and top-p and without, whatever the body's history is.

`draw_form` is the one place that says how a step draws. What stays outside both graphs: vocabulary
slices, sampled rows of adapters that have tokens of their own, prompts' chunks and whatever else
has no body graph, several draws from one row (the choices of a prompt), more rows than a slab of
the head, more changed logits than MAX_ENTRIES. Logprobs, scores and likely ids are launched behind
the graphs, and read the same logits and ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from server.model.gpu.draw_plan import DrawPlan
from server.model.gpu.graphs import StepGraphs
from server.model.gpu.head_plan import Slab
from server.model.gpu.transfers import Upload

if TYPE_CHECKING:
    from server.model.gpu.draw_kernels import Changes, Given

Array = npt.NDArray[Any]

MAX_ENTRIES = 1 << 16
"""Logits of one step that biases, bans and penalties change."""

DrawForm = Literal["argmax", "sampled", "eager"]
"""Which ids a step's draws are: those of the first graph, of the second, or of the sampler, which
is launched kernel by kernel."""


class DrawKey(NamedTuple):
    """rows: as padded. has_order: whether a row may have top-k or top-p."""

    rows: int
    has_order: bool


class Drawing(NamedTuple):
    """What one replay reads: one row a draw."""

    key: DrawKey
    given: Given
    changes: Changes


def draw_form(rows: int, slabs: Sequence[Slab], draws: GraphDraws | None) -> DrawForm:
    """How a step draws. rows: of the graph that has the head, 0 without one."""
    if not rows:
        return "eager"
    plan = slabs[0].plan
    if plan.plain_is_all:
        return "argmax"
    fits = draws is not None and max(rows, plan.num_draws) <= draws.num_rows
    fits = fits and plan.in_order and num_entries(plan) <= MAX_ENTRIES
    return "sampled" if fits and slabs[0].own_places is None else "eager"


def num_entries(plan: DrawPlan) -> int:
    """Most logits that a plan's requests change one by one."""
    if "at" not in plan.arrays:
        return 0
    return sum(int(plan.arrays[name].shape[0]) for name in ("bias_row", "ban_row", "penalty_row"))


class GraphDraws:
    """logits: float32 [n, rows of the head], the buffer that graphs with the head write; vocab_size
    of its columns are ids. num_rows: most rows of a graph, at most n. graphs: of its own, or
    a stand-in."""

    def __init__(
        self,
        logits: torch.Tensor,
        vocab_size: int,
        num_rows: int,
        graphs: StepGraphs,
    ) -> None:
        self.num_rows = num_rows
        self.graphs = graphs
        self._logits = logits[:, :vocab_size]
        self._size = vocab_size
        device, num_words = logits.device, -(-vocab_size // 32)
        self.inputs = Upload(device, (1 << 12) + 80 * num_rows)
        # Both are read as far as a step has filled them; what lies behind is of steps before.
        self._mask_upload = Upload(device, 4 * num_rows * num_words)
        self._masks = self._mask_upload({"": np.zeros((num_rows, num_words), np.int32)})[""]
        self._entry_upload = Upload(device, 32 * MAX_ENTRIES)
        self._entries = self._entry_upload({"": np.zeros((MAX_ENTRIES, 4))})[""]

    def upload(self, plan: DrawPlan, rows: int) -> Drawing:
        """Fill what the graph of `rows` rows reads."""
        from server.model.gpu.draw_kernels import Changes, Given

        arrays, masks, entries = padded(plan, rows, self._size)
        if masks.shape[0]:
            self._mask_upload({"": masks})
        if entries.shape[0]:
            self._entry_upload({"": entries})
        there = self.inputs(arrays)
        there |= {"masks": self._masks, "entries": self._entries}
        return Drawing(
            DrawKey(rows, plan.has_order),
            Given(*(there[name] for name in Given._fields)),
            Changes(*(there[name] for name in Changes._fields)),
        )

    def run(self, drawing: Drawing) -> torch.Tensor:
        """int32 [rows]: ids, or why there is none. Overwritten by the next run. drawing:
        uploaded last."""
        from server.model.gpu import draw_kernels

        key, given, changes = drawing
        logits = self._logits[: key.rows]

        def forward() -> tuple[torch.Tensor, ...]:
            x, is_nan = draw_kernels.changed(logits, changes)
            return (draw_kernels.drawn(x, is_nan, given, has_order=key.has_order),)

        return self.graphs.run(key, forward)[0]


def padded(plan: DrawPlan, rows: int, size: int) -> tuple[dict[str, Array], Array, Array]:
    """(arrays of `rows` rows, one a draw; masks int32 [g, words]; entries float64 [e, 4]) of a
    plan, as draw_kernels.Given and Changes describe them. Rows behind the plan's draws, and those
    of an argmax, change nothing. size: ids of a row."""
    arrays: dict[str, Array] = {
        "noise": np.zeros((rows, 3), np.int64),
        "temperature": np.ones(rows),
        "top_k": np.full(rows, size, np.int64),
        "top_p": np.ones(rows),
        "log_min_p": np.full(rows, -np.inf),
        "mask_of": np.full(rows, -1, np.int32),
        "num_entries": np.zeros(1, np.int32),
    }
    own = plan.arrays
    if "at" not in own:
        return arrays, np.zeros((0, 1), np.int32), np.zeros((0, 4))
    for name in ("noise", "temperature", "top_k", "top_p", "log_min_p"):
        arrays[name][own["at"]] = own[name]
    masks = _masks(own, size)
    masked = np.union1d(own["allow_rows"], own["mask_rows"])
    arrays["mask_of"][own["at"][masked]] = np.arange(masked.shape[0])
    entries = _entries(own, size)
    arrays["num_entries"][0] = entries.shape[0]
    return arrays, masks, entries


def _masks(own: Mapping[str, Array], size: int) -> Array:
    """int32 [g, words]: what grammars and allowed ids leave of each row that they restrict, in the
    order of the rows; other bits are 0."""
    rows, num_words = np.union1d(own["allow_rows"], own["mask_rows"]), -(-size // 32)
    words = np.full((rows.shape[0], num_words), 0xFFFFFFFF, np.uint32)
    if own["mask_rows"].shape[0]:
        given = own["masks"].view(np.uint32)[:, :num_words]
        at = np.searchsorted(rows, own["mask_rows"])
        words[at] = 0
        words[at, : given.shape[1]] = given
    if own["allow_rows"].shape[0]:
        bits = np.zeros((rows.shape[0], 32 * num_words), np.uint8)
        bits[np.searchsorted(rows, own["allow_row"]), own["allow_id"]] = 1
        at = np.searchsorted(rows, own["allow_rows"])
        words[at] &= np.packbits(bits[at], axis=1, bitorder="little").view("<u4")
    return words.view(np.int32)


def _entries(own: Mapping[str, Array], size: int) -> Array:
    """float64 [e, 4]: draw_kernels.Changes.entries. A banned id is one whose bias is -inf."""
    at = own["at"].astype(np.int64) * size
    kinds = ("bias", "ban", "penalty")
    places = [at[own[f"{kind}_row"]] + own[f"{kind}_id"] for kind in kinds]
    where = np.unique(np.concatenate(places))
    entries = np.zeros((where.shape[0], 4))
    entries[:, 0], entries[:, 2] = where, 1.0
    bias, ban, penalty = (np.searchsorted(where, place) for place in places)
    entries[bias, 1] = own["bias"]
    entries[ban, 1] = -np.inf
    entries[penalty, 2], entries[penalty, 3] = own["repetition"], own["subtract"]
    return entries
