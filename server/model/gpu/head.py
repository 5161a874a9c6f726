"""A step's rows through the LM head: slabs of rows by the part that their draws see, and what comes
back.

HeadRun plans on the host, with numpy, before anything is launched, multiplies what is planned, and
queues draws and scores; sampler.py says what a slab's draws need and draws them. Step is one
launched step of TorchRunner, and how its results come back to the host.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from server.engine.batch import (
    NO_TOKEN_LEFT,
    Batch,
    Drawn,
    Int32,
    likeliest_first,
    places_of,
)
from server.model.draws import Answers, Top, allowed_words
from server.model.gpu import sampler
from server.model.gpu.adapters import OwnRows, spans_of
from server.model.gpu.lm_head import LmHead, Placed, TorchSlices
from server.model.gpu.sampler import NAN_LOGITS, DrawPlan, plan_draws, token_logprobs

Array = npt.NDArray[Any]

LOGIT_BYTES = 64
"""Peak bytes of one logit of a slab whose draws are processed: 4 for its float32, float64 copies,
sorted values with their indices and running sums; int64 order keys for logprobs."""

STREAMED_BYTES = 128 << 20
"""Memory of the logits that share one pass over a head in CPU memory."""


@dataclass(frozen=True, slots=True, eq=False)
class SliceView:
    """How a slab's draws see slices: of which table (-1: in the full head's logits), and of each
    draw the row of the slab, the slot of its slice and its number of ids. width: the most ids,
    rounded up; pool_width: dynamic rows of the product."""

    table: int
    rows: Int32
    slots: Int32
    nums: Int32
    width: int
    pool_width: int


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """Rows (ascending, unique) that go through the head together, and what reads their logits.

    start: where its rows begin among the step's head rows; slabs of the same rows have the same.
    view: None for the whole vocabulary. own_places: None; or int32 of the rows, OwnRows.places of
    its heads: the slab's draws and scores see the rows' wide logits.
    """

    rows: Int32
    start: int
    draw_ids: Array
    plan: DrawPlan
    score_ids: Array
    num_score_top: int
    view: SliceView | None = None
    own_places: Int32 | None = None

    @property
    def end(self) -> int:
        return self.start + int(self.rows.shape[0])


@dataclass(frozen=True, slots=True)
class HeadRun:
    """Divides a step's head rows into slabs, and runs them.

    vocab_size: of the head. head_bytes: memory that a slab of logits and the work on it may take;
    more rows go through the head in several slabs. own: adapters' own rows, if there may be some.
    """

    slices: TorchSlices
    vocab_size: int
    head_bytes: int
    own: OwnRows | None
    on_gpu: bool

    def plan(self, batch: Batch) -> tuple[list[Slab], list[Placed]]:
        """(what goes through the head, in order; slices whose slots must be written first)."""
        draws = np.arange(batch.num_draws)
        if batch.draw_slice is None:
            return self.full(batch, draws, 0), []
        cached, new = self.slices.place(batch.slices)
        places = {id(p.slice): p for p in cached}
        by_table: dict[int, list[int]] = {}
        full: list[int] = []
        for d, nth in enumerate(batch.draw_slice.tolist()):
            if nth >= 0 and has_choice(batch, d, batch.slices[nth].ids):
                by_table.setdefault(batch.slices[nth].table, []).append(d)
            else:
                full.append(d)
        slabs = self.full(batch, np.asarray(full, np.int64), 0)
        for table, chosen in sorted(by_table.items()):
            start = slabs[-1].end if slabs else 0
            slabs += self._sliced(batch, table, np.asarray(chosen), places, start)
        return slabs, new

    def full(self, batch: Batch, draws: Array, first: int) -> list[Slab]:
        """Slabs of the draws from the full head and of all scores. Where adapters have own head
        rows, their draws are a slab of their own over the same rows, so that the others' work is
        what it is without them."""
        all_rows = np.unique(np.concatenate([batch.draw_rows[draws], batch.score_rows]))
        places = None
        if self.own is not None:
            places = self.own.places(batch, self.own.heads, all_rows)
        draw_at = np.searchsorted(all_rows, batch.draw_rows[draws])
        score_at = np.searchsorted(all_rows, batch.score_rows)
        width = self.vocab_size
        if self.own is not None and places is not None:
            width += 2 * self.own.width  # logits, and wide ones beside them
        at_once = max(1, self.head_bytes // (width * bytes_per_logit(batch)))
        slabs: list[Slab] = []
        for start in range(0, all_rows.shape[0], at_once):
            rows = all_rows[start : start + at_once].astype(np.int32)

            def add(
                width: int, is_read: Array, own: Int32 | None = None, start: int = start,
                rows: Int32 = rows,
            ) -> None:  # fmt: skip
                """What reads `width` columns of the logits of those rows that is_read says."""

                def those(at: Array) -> Array:
                    inside = (at >= 0) & (at < is_read.shape[0])
                    return np.flatnonzero(inside & is_read[np.where(inside, at, 0)])

                chosen, scores = those(draw_at - start), those(score_at - start)
                plan = plan_draws(batch, draws[chosen], draw_at[chosen] - start, width)
                most = int(batch.score_top[scores].max(initial=0))
                slabs.append(
                    Slab(rows, first + start, draws[chosen], plan, scores, most, own_places=own)
                )

            own = None if places is None else places[start : start + rows.shape[0]]
            if self.own is None or own is None or not (own >= 0).any():
                add(self.vocab_size, np.ones(rows.shape[0], bool))
                continue
            if not (own >= 0).all():
                add(self.vocab_size, own < 0)
            add(self.own.width, own >= 0, own)
        return slabs

    def _sliced(
        self,
        batch: Batch,
        table: int,
        draws: Array,
        places: Mapping[int, Placed],
        first: int,
    ) -> list[Slab]:
        """Slabs of draws from slices of one table, or of none (-1)."""
        assert batch.draw_slice is not None
        own = [places[id(batch.slices[int(batch.draw_slice[d])])] for d in draws]
        most = max(p.num_ids for p in own)
        width = -(-most // 16) * 16
        pool_width = max(p.pool_width for p in own)
        per_row = width * (bytes_per_logit(batch) + 24)
        if table >= 0:
            per_row += 4 * self.slices.num_columns(table, pool_width)
        else:
            per_row += 4 * self.vocab_size
        at_once = max(1, self.head_bytes // per_row)
        order = np.argsort(batch.draw_rows[draws], kind="stable")
        none = np.empty(0, np.int64)
        slabs: list[Slab] = []
        for start in range(0, draws.shape[0], at_once):
            part = order[start : start + at_once]
            rows, at = np.unique(batch.draw_rows[draws[part]], return_inverse=True)
            placed = [own[i] for i in part]
            view = SliceView(
                table,
                at.astype(np.int32),
                np.asarray([p.slot for p in placed], np.int32),
                np.asarray([p.num_ids for p in placed], np.int32),
                width,
                pool_width,
            )
            plan = plan_draws(
                batch, draws[part], np.arange(part.shape[0]), width, [p.slice.ids for p in placed]
            )
            begin = slabs[-1].end if slabs else first
            slabs.append(Slab(rows.astype(np.int32), begin, draws[part], plan, none, 0, view))
        return slabs

    def run(
        self,
        step: Step,
        slabs: Sequence[Slab],
        hidden: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
        head: LmHead,
    ) -> None:
        """Multiply every slab's rows of `hidden` ([rows, hidden_size]) by the head, and draw and
        score."""
        shared: list[Slab] = []
        logits = hidden[:0]
        for i, slab in enumerate(slabs):
            prefix = f"{i}."
            own = {k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)}
            if slab.view is not None and slab.view.table >= 0:
                with self._timed(step):
                    seen = self.slices.logits(
                        rows_of(hidden, [slab], tensors), slab.view.table, slab.view.pool_width
                    )
            else:
                if slab not in shared:
                    shared = sharing(slabs[i:], head)
                    with self._timed(step):
                        logits = head.logits(rows_of(hidden, shared, tensors))
                seen = logits[slab.start - shared[0].start : slab.end - shared[0].start]
                if self.own is not None and slab.own_places is not None:
                    states = rows_of(hidden, [slab], tensors)
                    of_rows = own["own_spans"], own["own_places"]
                    seen = self.own.widened(states, seen, *of_rows, head.cap)
            ids = None
            if slab.view is not None:
                seen, ids = self.slices.pick(
                    seen, own["slice_rows"], own["slice_slots"], own["slice_nums"], slab.view.width
                )
            self._finish(step, slab, seen, ids, own)

    @contextlib.contextmanager
    def _timed(self, step: Step) -> Iterator[None]:
        """Around a product of the head."""
        if self.on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            yield
            end.record()
            step.products.append((begin, end))
        else:
            began = time.perf_counter()
            yield
            step.products.append((began, time.perf_counter()))

    def _finish(
        self,
        step: Step,
        slab: Slab,
        logits: torch.Tensor,
        ids: torch.Tensor | None,
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        """Draw and score on a slab's logits; queue the results for the way back.

        ids: int32 like the logits, the columns' vocabulary ids; None where a column is one."""

        def named(columns: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            """Vocabulary ids of columns [n, k] of these rows."""
            if ids is None:
                return columns
            return ids.index_select(0, rows).gather(1, columns.clamp(min=0).long())

        told = step.segments
        if slab.draw_ids.shape[0]:
            drawn = sampler.draw(logits, slab.plan, tensors, ids)
            token_ids = drawn
            if ids is not None:
                every = torch.arange(drawn.shape[0], device=drawn.device)
                token_ids = torch.where(drawn >= 0, named(drawn[:, None], every)[:, 0], drawn)
            told.append(Segment("draw", slab.draw_ids, (token_ids,)))
            if step.batch.num_likely:
                rows = tensors["likely_rows"]
                columns, chances = likeliest(logits.index_select(0, rows), step.batch.num_likely)
                told.append(Segment("likely", slab.draw_ids, (named(columns, rows), chances)))
            wanted = slab.draw_ids[slab.plan.arrays["logprob_at"]]
            if wanted.shape[0]:
                rows = tensors["logprob_rows"]
                seen = logits.index_select(0, rows)
                own = drawn.index_select(0, tensors["logprob_at"])
                found = token_logprobs(seen, own, slab.plan.num_top)
                found = found._replace(top_ids=named(found.top_ids, rows))
                told.append(Segment("logprob", wanted, found))
                if "named_columns" in tensors:
                    columns = tensors["named_columns"]  # -1: a slice lacks it
                    values = seen.gather(1, columns.clamp(min=0).long())
                    values = values - torch.logsumexp(seen, dim=1)[:, None]
                    values = torch.where(columns >= 0, values, float("-inf"))
                    told.append(Segment("named", wanted, (values,)))
        if slab.score_ids.shape[0]:
            seen = logits.index_select(0, tensors["score_rows"])
            found = token_logprobs(seen, tensors["score_targets"], slab.num_score_top)
            told.append(Segment("score", slab.score_ids, found))


def slab_arrays(batch: Batch, slabs: Sequence[Slab]) -> dict[str, Array]:
    """What the slabs read, by slab."""
    of_slabs = {slab.start: slab.rows for slab in slabs}
    none = np.empty(0, np.int32)
    arrays: dict[str, Array] = {"head_rows": np.concatenate((none, *of_slabs.values()))}
    for i, slab in enumerate(slabs):
        arrays.update({f"{i}.{name}": a for name, a in slab.plan.arrays.items()})
        if slab.own_places is not None:
            arrays[f"{i}.own_places"] = slab.own_places
            arrays[f"{i}.own_spans"] = spans_of(slab.own_places)
        # The columns of logprob_token_ids: -1 where a slice lacks one, and behind the last.
        draws = slab.draw_ids[slab.plan.arrays["logprob_at"]].tolist()
        named = [batch.params[batch.draw_params[d]].sampling.logprob_token_ids for d in draws]
        columns = np.full((len(draws), max(map(len, named), default=0)), -1, np.int32)
        for row, d, token_ids in zip(columns, draws, named, strict=True):
            own = row[: len(token_ids)]
            if slab.view is not None and batch.draw_slice is not None:
                ids = batch.slices[int(batch.draw_slice[d])].ids
                at, found = places_of(ids, np.asarray(token_ids))
                own[found] = at
            else:
                own[:] = token_ids
        if columns.shape[1]:
            arrays[f"{i}.named_columns"] = columns
        if slab.view is not None:
            arrays[f"{i}.slice_rows"] = slab.view.rows
            arrays[f"{i}.slice_slots"] = slab.view.slots
            arrays[f"{i}.slice_nums"] = slab.view.nums
        else:
            rows = batch.score_rows[slab.score_ids]
            arrays[f"{i}.score_rows"] = np.searchsorted(slab.rows, rows).astype(np.int32)
            arrays[f"{i}.score_targets"] = batch.score_targets[slab.score_ids]
        if batch.num_likely and slab.view is not None:  # a row of logits for each draw
            arrays[f"{i}.likely_rows"] = np.arange(slab.draw_ids.shape[0], dtype=np.int32)
        elif batch.num_likely:
            at = np.searchsorted(slab.rows, batch.draw_rows[slab.draw_ids])
            arrays[f"{i}.likely_rows"] = at.astype(np.int32)
    return arrays


def rows_of(
    hidden: torch.Tensor, slabs: Sequence[Slab], tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """The rows of `hidden` that consecutive slabs take, without a copy where they lie together."""
    start, end = slabs[0].start, slabs[-1].end
    first, last = int(slabs[0].rows[0]), int(slabs[-1].rows[-1])
    if slabs[0].start == slabs[-1].start and last - first + 1 == end - start:
        return hidden[first : last + 1]
    return hidden.index_select(0, tensors["head_rows"][start:end])


def sharing(slabs: Sequence[Slab], head: LmHead) -> list[Slab]:
    """The first of these slabs, and those after it that go through the full head with it: those of
    the same rows, others only where a pass over the head costs more than the memory of their
    logits."""
    shared = [slabs[0]]
    for slab in slabs[1:]:
        num_rows = slab.end - shared[0].start
        is_cached = slab.view is not None and slab.view.table >= 0
        has_room = head.is_streamed and 4 * num_rows * head.vocab_size <= STREAMED_BYTES
        if is_cached or not (slab.start == shared[0].start or has_room):
            break
        shared.append(slab)
    return shared


def bytes_per_logit(batch: Batch) -> int:
    """Peak bytes for one logit of a slab: 4 for its float32 where only the argmax is taken, two
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
    """Results of one kind, to be read back: device tensors of 4-byte items, in order."""

    kind: Literal["draw", "logprob", "named", "score", "likely"]
    index: Array
    tensors: tuple[torch.Tensor, ...]


@dataclass(slots=True)
class Step:
    """A launched step until `wait` returns it.

    batch: as it is computed. products: begin and end of each product of the head, as events on a
    GPU, else in seconds. placed: slices that it was the first to see.
    """

    batch: Batch
    begin_s: float
    products: list[tuple[Any, Any]] = field(default_factory=list)
    placed: Sequence[Placed] = ()
    segments: list[Segment] = field(default_factory=list)
    results: torch.Tensor | None = None
    begin: torch.cuda.Event | None = None
    done: torch.cuda.Event | None = None
    model_s: float = 0.0
    error: Exception | None = None

    def mark_begin(self, *, on_gpu: bool) -> None:
        """The device begins with it now."""
        if on_gpu:
            self.begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self.begin.record()

    def mark_end(self, *, on_gpu: bool) -> None:
        """Queue the way back of the results, and the event behind it."""
        if self.segments:
            parts = [t.reshape(-1).view(torch.int32) for s in self.segments for t in s.tensors]
            flat = parts[0] if len(parts) == 1 else torch.cat(parts)
            # A copy without CUDA too: the next step overwrites what its graph gives.
            self.results = torch.empty(flat.shape, dtype=torch.int32, pin_memory=flat.is_cuda)
            self.results.copy_(flat, non_blocking=True)
        if on_gpu:
            self.done = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self.done.record()
        else:
            self.model_s = time.perf_counter() - self.begin_s

    def finish(self) -> Drawn:
        """Its results, once they are there. Raises DrawError when a draw has no answer."""
        if self.done is not None and self.begin is not None:
            self.done.synchronize()
            self.model_s = self.begin.elapsed_time(self.done) / 1e3
            head_s = sum(a.elapsed_time(b) for a, b in self.products) / 1e3
        else:
            head_s = sum(b - a for a, b in self.products)
        batch, told = self.batch, Answers(self.batch)
        flat = np.empty(0, np.int32) if self.results is None else self.results.numpy()
        at = 0
        for segment in self.segments:
            parts = []
            for tensor in segment.tensors:
                size = tensor.numel()
                part = flat[at : at + size].reshape(tuple(tensor.shape))
                parts.append(part.view(np.float32) if tensor.dtype == torch.float32 else part)
                at += size
            index = segment.index
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
            told.failed.append((d, "the model produced NaN logits" if is_nan else NO_TOKEN_LEFT))
        np.maximum(told.token_ids, -1, out=told.token_ids)
        return told.drawn(self.model_s, head_s)


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
