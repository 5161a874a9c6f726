"""HeadRun: hidden states through the LM head or a slice of it, draws and scores from the logits;
Step: one launched step of TorchRunner, and how its results come back to the host."""

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
    DrawError,
    Drawn,
    Likely,
    likeliest_first,
)
from server.model.gpu import sampler
from server.model.gpu.adapters import OwnRows
from server.model.gpu.head_plan import Slab, rows_of, sharing
from server.model.gpu.lm_head import FullHead, Placed, TorchSlices
from server.model.gpu.sampler import NAN_LOGITS, token_logprobs

Array = npt.NDArray[Any]


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
    head_s: float = 0.0
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
        """Its results, once they are there. Raises DrawError."""
        if self.done is not None and self.begin is not None:
            self.done.synchronize()
            self.model_s = self.begin.elapsed_time(self.done) / 1e3
            self.head_s = sum(a.elapsed_time(b) for a, b in self.products) / 1e3
        else:
            self.head_s = sum(b - a for a, b in self.products)
        return read_back(self)


def read_back(step: Step) -> Drawn:
    """Drawn from the downloaded results. Raises DrawError when a draw has no answer."""
    batch = step.batch
    token_ids = np.full(batch.num_draws, -1, np.int32)
    logprobs = np.full(batch.num_draws, np.nan, np.float32)
    ranks = np.zeros(batch.num_draws, np.int32)
    top: list[tuple[tuple[int, float], ...]] = [()] * batch.num_draws
    num_scores = int(batch.score_rows.shape[0])
    score_logprobs = np.full(num_scores, np.nan, np.float32)
    score_ranks = np.zeros(num_scores, np.int32)
    score_top: list[tuple[tuple[int, float], ...]] = [()] * num_scores
    likely = None
    if batch.num_likely:
        shape = (batch.num_draws, batch.num_likely)
        likely = Likely(np.full(shape, -1, np.int32), np.zeros(shape, np.float32))
    flat = np.empty(0, np.int32) if step.results is None else step.results.numpy()
    at = 0
    for segment in step.segments:
        parts = []
        for tensor in segment.tensors:
            size = tensor.numel()
            part = flat[at : at + size].reshape(tuple(tensor.shape))
            parts.append(part.view(np.float32) if tensor.dtype == torch.float32 else part)
            at += size
        index = segment.index
        if segment.kind == "draw":
            token_ids[index] = parts[0]
            continue
        if segment.kind == "likely":
            _tell_likely(likely, index, parts)
            continue
        if segment.kind == "named":
            _tell_named(batch, index.tolist(), parts[0].tolist(), top)
            continue
        if segment.kind == "logprob":
            into = (logprobs, ranks, top)
            num_top = [
                batch.params[p].sampling.num_logprobs or 0
                for p in batch.draw_params[index].tolist()
            ]
        else:
            into = (score_logprobs, score_ranks, score_top)
            num_top = batch.score_top[index].tolist()
        into[0][index], into[1][index] = parts[0], parts[1]
        for i, d in enumerate(index.tolist()):
            count = num_top[i]
            ids, values = parts[2][i, :count].tolist(), parts[3][i, :count].tolist()
            into[2][d] = tuple(zip(ids, values, strict=True))
    failed = tuple(
        (
            d,
            "the model produced NaN logits" if token_ids[d] == NAN_LOGITS else NO_TOKEN_LEFT,
        )
        for d in np.flatnonzero(token_ids < 0).tolist()
    )
    drawn = Drawn(
        np.maximum(token_ids, -1),
        logprobs,
        ranks,
        top,
        score_logprobs,
        score_ranks,
        score_top,
        step.model_s,
        step.head_s,
        likely,
    )
    if failed:
        raise DrawError(failed, drawn)
    return drawn


def _tell_likely(likely: Likely | None, index: Array, parts: Sequence[Array]) -> None:
    """Likeliest ids and their chances into the rows of these draws."""
    assert likely is not None
    num = parts[0].shape[1]  # a slice may have fewer ids than are asked for
    likely.ids[index, :num] = np.where(parts[1] > 0, parts[0], -1)
    likely.chances[index, :num] = np.where(parts[1] > 0, parts[1], 0)


def _tell_named(
    batch: Batch,
    draws: Sequence[int],
    values: Sequence[Sequence[float]],
    top: list[tuple[tuple[int, float], ...]],
) -> None:
    """Logprobs of the ids that these draws' requests name, into `top`."""
    for d, own in zip(draws, values, strict=True):
        ids = batch.params[batch.draw_params[d]].sampling.logprob_token_ids
        if ids:
            top[d] = likeliest_first(ids, own[: len(ids)])


class HeadRun:
    """own: adapters' own rows, if there may be some."""

    def __init__(
        self,
        slices: TorchSlices,
        own: OwnRows | None = None,
        *,
        on_gpu: bool,
    ) -> None:
        self._slices = slices
        self._own = own
        self._on_gpu = on_gpu

    def run(
        self,
        step: Step,
        slabs: Sequence[Slab],
        hidden: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
        head: FullHead,
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
                    seen = self._slices.logits(
                        rows_of(hidden, [slab], tensors), slab.view.table, slab.view.pool_width
                    )
            else:
                if slab not in shared:
                    shared = sharing(slabs[i:], head)
                    with self._timed(step):
                        logits = head.logits(rows_of(hidden, shared, tensors))
                seen = logits[slab.start - shared[0].start : slab.end - shared[0].start]
                if self._own is not None and slab.own_places is not None:
                    states = rows_of(hidden, [slab], tensors)
                    of_rows = own["own_spans"], own["own_places"]
                    seen = self._own.widened(states, seen, *of_rows, head.cap)
            ids = None
            if slab.view is not None:
                seen, ids = self._slices.pick(
                    seen, own["slice_rows"], own["slice_slots"], own["slice_nums"], slab.view.width
                )
            self._finish(step, slab, seen, ids, own)

    @contextlib.contextmanager
    def _timed(self, step: Step) -> Iterator[None]:
        """Around a product of the head."""
        if self._on_gpu:
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
        if slab.draw_ids.shape[0]:
            token_ids = drawn = sampler.draw(logits, slab.plan, tensors, ids)
            if ids is not None:
                named = ids.gather(1, drawn.clamp(min=0).long()[:, None]).squeeze(1)
                token_ids = torch.where(drawn >= 0, named, drawn)
            step.segments.append(Segment("draw", slab.draw_ids, (token_ids,)))
            if step.batch.num_likely:
                rows = tensors["likely_rows"]
                likely = likeliest(logits.index_select(0, rows), step.batch.num_likely)
                if ids is not None:
                    own = ids.index_select(0, rows).gather(1, likely[0].long())
                    likely = own.int(), likely[1]
                step.segments.append(Segment("likely", slab.draw_ids, likely))
            wanted = slab.plan.arrays["logprob_at"]
            if wanted.shape[0]:
                found = token_logprobs(
                    logits.index_select(0, tensors["logprob_rows"]),
                    drawn.index_select(0, tensors["logprob_at"]),
                    slab.plan.num_top,
                )
                top_ids = found.top_ids
                if ids is not None:
                    own = ids.index_select(0, tensors["logprob_rows"])
                    top_ids = own.gather(1, top_ids.long())
                step.segments.append(
                    Segment(
                        "logprob",
                        slab.draw_ids[wanted],
                        (found.logprob, found.rank, top_ids, found.top_logprobs),
                    )
                )
            if "named_columns" in tensors:
                values = _logprobs_at(
                    logits.index_select(0, tensors["logprob_rows"]), tensors["named_columns"]
                )
                step.segments.append(Segment("named", slab.draw_ids[wanted], (values,)))
        if slab.score_ids.shape[0]:
            found = token_logprobs(
                logits.index_select(0, tensors["score_rows"]),
                tensors["score_targets"],
                slab.num_score_top,
            )
            step.segments.append(
                Segment(
                    "score",
                    slab.score_ids,
                    (found.logprob, found.rank, found.top_ids, found.top_logprobs),
                )
            )


def likeliest(logits: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The num likeliest columns of raw logits float32 [n, V]: int32 and float32 [n, min(num, V)],
    columns and their chances; chance 0 where a row is not finite."""
    top = torch.topk(logits, min(num, logits.shape[1]), dim=1)
    chances = (top.values - torch.logsumexp(logits, dim=1)[:, None]).exp()
    return top.indices.int(), chances.nan_to_num(0.0)


def _logprobs_at(logits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """log-softmax of raw logits float32 [n, V] at columns int32 [n, k]; -inf for column -1."""
    values = logits.gather(1, columns.clamp(min=0).long())
    values = values - torch.logsumexp(logits, dim=1)[:, None]
    return torch.where(columns >= 0, values, float("-inf"))
