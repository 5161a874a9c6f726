"""A step's rows through the LM head: slabs of rows by what their draws see, and what comes back.

HeadRun plans on the host, with numpy, before anything is launched, multiplies what is planned, and
queues draws and scores; sampler.py says what a part's draws need and draws them. Step is one
launched step of TorchRunner, and how its results come back to the host.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any, Literal

import numpy as np
import torch

from server.engine.batch import (
    NO_TOKEN_LEFT,
    Batch,
    Drawn,
    Int32,
    likeliest_first,
)
from server.model.draws import Top, allowed_words, undrawn
from server.model.gpu import sampler
from server.model.gpu.adapters import LoraBank
from server.model.gpu.lm_head import LmHead, SliceView, TorchSlices
from server.model.gpu.sampler import NAN_LOGITS, DrawPlan, plan_draws, token_logprobs
from server.model.gpu.transfers import Array

Tensors = Mapping[str, torch.Tensor]

LOGIT_BYTES = 64
"""Peak bytes of one logit of a part whose draws are processed: 4 for its float32, float64 copies,
sorted values with their indices and running sums; int64 order keys for logprobs."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Draws and scores that read the logits of rows first .. last - 1 of a slab.

    plan: its rows begin at `first`; where draws see slices, draw i reads a row i of its own.
    arrays: to copy to the device, by name: the plan's; score_rows, score_targets: int32 of each
    score; own_places: int32 of the rows, of LoraBank.head_places, where what is read
    are the rows' wide logits; slice_rows, slice_places: int32 of each draw that sees a slice: its
    row of the slab, its place in the slab's view.
    """

    first: int
    last: int
    draw_ids: Array
    plan: DrawPlan
    arrays: dict[str, Array]
    score_ids: Array


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """Rows (ascending, unique) that go through the head together, and what reads their logits.
    view: None for the whole vocabulary."""

    rows: Int32
    parts: tuple[Part, ...]
    view: SliceView | None = None


@dataclass(frozen=True, slots=True)
class HeadRun:
    """Divides a step's head rows into slabs, and runs them.

    vocab_size: of the head. head_bytes: memory that the work on the logits of a part may take; a
    quarter of it may be their slab's. adapters: with own rows of the head, if there may be some.
    """

    slices: TorchSlices
    vocab_size: int
    head_bytes: int
    adapters: LoraBank | None
    on_gpu: bool

    def plan(self, batch: Batch) -> list[Slab]:
        """What goes through the head, in order."""
        draws = np.arange(batch.num_draws)
        if batch.draw_slice is None:
            return self.full(batch, draws)
        by_table: dict[int, list[int]] = {}
        full: list[int] = []
        for d, nth in enumerate(batch.draw_slice.tolist()):
            if nth >= 0 and has_choice(batch, d, batch.slices[nth].ids):
                by_table.setdefault(batch.slices[nth].table, []).append(d)
            else:
                full.append(d)
        slabs = self.full(batch, np.asarray(full, np.int64))
        for table, chosen in sorted(by_table.items()):
            slabs += self._sliced(batch, table, np.asarray(chosen))
        return slabs

    def full(self, batch: Batch, draws: Array) -> list[Slab]:
        """Slabs of the draws from the full head and of all scores. Where adapters have own head
        rows, their draws are a part of their own over the same rows, so that the others' work is
        what it is without them."""
        all_rows = np.unique(np.concatenate([batch.draw_rows[draws], batch.score_rows]))
        places = None
        if self.adapters is not None:
            places = self.adapters.head_places(batch, all_rows)
        draw_at = np.searchsorted(all_rows, batch.draw_rows[draws])
        score_at = np.searchsorted(all_rows, batch.score_rows)
        wide = 0 if self.adapters is None or places is None else self.adapters.width
        at_once = max(1, self.head_bytes // ((self.vocab_size + wide) * bytes_per_logit(batch)))
        together = max(1, self.head_bytes // (16 * self.vocab_size) // at_once) * at_once
        slabs: list[Slab] = []
        for start in range(0, all_rows.shape[0], together):
            rows = all_rows[start : start + together].astype(np.int32)
            parts: list[Part] = []
            for first in range(0, rows.shape[0], at_once):
                last = min(first + at_once, rows.shape[0])
                own = None if places is None else places[start + first : start + last]
                is_own = np.zeros(last - first, np.bool_) if own is None else own >= 0
                for kind in np.unique(is_own):
                    chosen, scores = (
                        _reading(at - start - first, is_own == kind) for at in (draw_at, score_at)
                    )
                    at = draw_at[chosen] - start - first
                    width = wide if kind else self.vocab_size
                    plan = plan_draws(batch, draws[chosen], at, width)
                    arrays = dict(plan.arrays)
                    arrays["score_rows"] = (score_at[scores] - start - first).astype(np.int32)
                    arrays["score_targets"] = batch.score_targets[scores]
                    if own is not None and kind:
                        arrays["own_places"] = own
                    parts.append(Part(first, last, draws[chosen], plan, arrays, scores))
            slabs.append(Slab(rows, tuple(parts)))
        return slabs

    def _sliced(self, batch: Batch, table: int, draws: Array) -> list[Slab]:
        """Slabs of draws from slices of one table, or of none (-1)."""
        assert batch.draw_slice is not None
        known = [i for i, one in enumerate(batch.slices) if one.table == table]
        view = self.slices.view([batch.slices[i] for i in known])
        which = np.searchsorted(known, batch.draw_slice[draws]).astype(np.int32)
        at_once = max(1, self.head_bytes // (view.width * (bytes_per_logit(batch) + 8)))
        order = np.argsort(batch.draw_rows[draws], kind="stable")
        none = np.empty(0, np.int64)
        slabs: list[Slab] = []
        for start in range(0, draws.shape[0], at_once):
            some = order[start : start + at_once]
            rows, at = np.unique(batch.draw_rows[draws[some]], return_inverse=True)
            own = np.arange(some.shape[0])
            plan = plan_draws(batch, draws[some], own, view.width, view.ids)
            seen = {"slice_rows": at.astype(np.int32), "slice_places": which[some]}
            arrays = {**plan.arrays, **seen}
            part = Part(0, rows.shape[0], draws[some], plan, arrays, none)
            slabs.append(Slab(rows.astype(np.int32), (part,), view))
        return slabs

    def run(
        self,
        step: Step,
        slabs: Sequence[Slab],
        hidden: torch.Tensor,
        tensors: Tensors,
        head: LmHead,
    ) -> None:
        """Multiply every slab's rows of `hidden` ([rows, hidden_size]) by the head, and draw and
        score."""
        of_parts: defaultdict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for key, tensor in tensors.items():
            prefix, _, name = key.rpartition(".")
            of_parts[prefix][name] = tensor
        for i, slab in enumerate(slabs):
            states, view = rows_of(hidden, slab.rows, of_parts[str(i)]), slab.view
            began = mark(on_gpu=self.on_gpu)
            if view is None or view.ids is None:
                logits = head.logits(states)
            else:
                logits = self.slices.logits(states, view)
            step.products.append((began, mark(on_gpu=self.on_gpu)))
            for j, part in enumerate(slab.parts):
                own, seen = of_parts[f"{i}.{j}"], logits[part.first : part.last]
                if view is not None:
                    seen = logits.index_select(0, own["slice_rows"]).masked_fill_(
                        ~view.seen.index_select(0, own["slice_places"]), float("-inf")
                    )
                elif self.adapters is not None and "own_places" in own:
                    places = part.arrays["own_places"]
                    held = np.unique(places[places >= 0]).tolist()
                    seen = self.adapters.widened(
                        states[part.first : part.last], seen, held, own["own_places"], head.cap
                    )
                self._finish(step, part, seen, view, own)

    def _finish(
        self,
        step: Step,
        part: Part,
        logits: torch.Tensor,
        view: SliceView | None,
        tensors: Tensors,
    ) -> None:
        """Draw and score on a part's logits; queue the results for the way back."""
        told = step.segments

        def named(columns: torch.Tensor) -> torch.Tensor:
            return columns if view is None else view.named(columns)

        if part.draw_ids.shape[0]:
            column_ids = None if view is None else view.ids_there
            drawn = sampler.draw(logits, part.plan, tensors, column_ids)
            told.append(
                Segment("draw", part.draw_ids, (torch.where(drawn >= 0, named(drawn), drawn),))
            )
            if step.batch.num_likely:
                rows = logits.index_select(0, tensors["likely_rows"])
                columns, chances = likeliest(rows, step.batch.num_likely)
                told.append(Segment("likely", part.draw_ids, (named(columns), chances)))
            wanted = part.draw_ids[part.plan.arrays["logprob_at"]]
            if wanted.shape[0]:
                seen = logits.index_select(0, tensors["logprob_rows"])
                own = drawn.index_select(0, tensors["logprob_at"])
                found = token_logprobs(seen, own, part.plan.num_top)
                told.append(
                    Segment("logprob", wanted, found._replace(top_ids=named(found.top_ids)))
                )
                if "named_columns" in tensors:
                    columns = tensors["named_columns"]  # -1: a slice lacks it
                    values = seen.gather(1, columns.clamp(min=0).long())
                    values = values - torch.logsumexp(seen, dim=1)[:, None]
                    values = torch.where(columns >= 0, values, float("-inf"))
                    told.append(Segment("named", wanted, (values,)))
        if part.score_ids.shape[0]:
            seen = logits.index_select(0, tensors["score_rows"])
            most = int(step.batch.score_top[part.score_ids].max())
            found = token_logprobs(seen, tensors["score_targets"], most)
            told.append(Segment("score", part.score_ids, found))


def _reading(at: Array, is_read: Array) -> Array:
    """Which of `at` are one of the rows that is_read says."""
    inside = (at >= 0) & (at < is_read.shape[0])
    return np.flatnonzero(inside & is_read[np.where(inside, at, 0)])


def slab_arrays(slabs: Sequence[Slab]) -> dict[str, Array]:
    """What the slabs read: "slab.rows" and "slab.part.name"."""
    arrays: dict[str, Array] = {}
    for i, slab in enumerate(slabs):
        arrays[f"{i}.rows"] = slab.rows
        for j, part in enumerate(slab.parts):
            arrays |= {f"{i}.{j}.{name}": array for name, array in part.arrays.items()}
    return arrays


def rows_of(hidden: torch.Tensor, rows: Int32, tensors: Tensors) -> torch.Tensor:
    """A slab's rows of `hidden`, without a copy where they lie together."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == rows.shape[0]:
        return hidden[first : last + 1]
    return hidden.index_select(0, tensors["rows"])


def bytes_per_logit(batch: Batch) -> int:
    """Peak bytes for one logit of a part: 4 for its float32 where only the argmax is taken, two
    more float32 where the likeliest ids are wanted; LOGIT_BYTES where draws are processed."""
    params = (p.sampling for p in batch.params)
    only_argmax = all(s.takes_likeliest and s.num_logprobs is None for s in params)
    least = 12 if batch.num_likely else 4
    return least if only_argmax and batch.score_rows.shape[0] == 0 else LOGIT_BYTES


def has_choice(batch: Batch, draw: int, ids: Int32) -> bool:
    """Whether a draw's constraints leave any of these ids (of a slice).

    Where they leave none the full head draws. The host can tell, because nothing but ids decides.
    """
    words = allowed_words(batch, draw, batch.path_tokens(draw), int(ids[-1]) + 1)
    return words is None or bool(((words[ids >> 5] >> (ids & 31).astype(np.uint32)) & 1).any())


@dataclass(slots=True)
class Segment:
    """Results of one kind: of draws or scores `index`, one tensor a field; on the host once their
    step has ended."""

    kind: Literal["draw", "logprob", "named", "score", "likely"]
    index: Array
    tensors: tuple[torch.Tensor, ...]


@dataclass(slots=True)
class Step:
    """A launched step until `wait` returns it.

    batch: as it is computed. begin, done: marks. products: those around each product of the head.
    """

    batch: Batch
    begin: Any = 0.0
    done: Any = 0.0
    products: list[tuple[Any, Any]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    error: Exception | None = None

    def mark_end(self, *, on_gpu: bool) -> None:
        """Queue the way back of the results, and the mark behind it."""
        for segment in self.segments:
            # A copy without CUDA too: the next step overwrites what its graph gives.
            segment.tensors = tuple(
                torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda).copy_(
                    t, non_blocking=True
                )
                for t in segment.tensors
            )
        self.done = mark(on_gpu=on_gpu)

    def finish(self) -> Drawn:
        """Its results, once they are there."""
        if not isinstance(self.done, float):
            self.done.synchronize()
        batch, told = self.batch, undrawn(self.batch)
        for segment in self.segments:
            index, parts = segment.index, [tensor.numpy() for tensor in segment.tensors]
            if segment.kind == "draw":
                told.token_ids[index] = parts[0]
            elif segment.kind == "likely":
                assert told.likely is not None
                num = parts[0].shape[1]  # a slice may have fewer ids than are asked for
                told.likely.ids[index, :num] = np.where(parts[1] > 0, parts[0], -1)
                told.likely.chances[index, :num] = np.where(parts[1] > 0, parts[1], 0)
            elif segment.kind == "named":
                for d, values in zip(index.tolist(), parts[0].tolist(), strict=True):
                    ids = batch.params[batch.draw_params[d]].sampling.logprob_token_ids
                    if ids:
                        told.top[d] = likeliest_first(ids, values[: len(ids)])
            elif segment.kind == "logprob":
                told.logprobs[index], told.ranks[index] = parts[:2]
                asked = [batch.params[p].sampling for p in batch.draw_params[index].tolist()]
                _tell_top(index, parts, [one.num_logprobs or 0 for one in asked], told.top)
            else:
                told.score_logprobs[index], told.score_ranks[index] = parts[:2]
                _tell_top(index, parts, batch.score_top[index].tolist(), told.score_top)
        for d in np.flatnonzero(told.token_ids < 0).tolist():
            is_nan = told.token_ids[d] == NAN_LOGITS
            told.problems[d] = "the model produced NaN logits" if is_nan else NO_TOKEN_LEFT
        np.maximum(told.token_ids, -1, out=told.token_ids)
        told.model_s = _between(self.begin, self.done)
        told.head_s = sum(starmap(_between, self.products))
        return told


def mark(*, on_gpu: bool) -> Any:
    """Now: on a GPU an event behind what is queued, else seconds."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _between(begin: Any, end: Any) -> float:
    """Seconds between two marks; the device has come to both."""
    return float(end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3)


def _tell_top(index: Array, parts: Sequence[Array], nums: Sequence[int], top: list[Top]) -> None:
    """The `nums` likeliest ids and their logprobs, parts 2 and 3, into `top` at `index`."""
    for i, (at, num) in enumerate(zip(index.tolist(), nums, strict=True)):
        top[at] = tuple(zip(*(part[i, :num].tolist() for part in parts[2:]), strict=True))


def likeliest(logits: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The num likeliest columns of raw logits float32 [n, V]: int32 and float32 [n, min(num, V)],
    columns and their chances; chance 0 where a row is not finite."""
    top = torch.topk(logits, min(num, logits.shape[1]), dim=1)
    chances = (top.values - torch.logsumexp(logits, dim=1)[:, None]).exp()
    return top.indices.int(), chances.nan_to_num(0.0)
