"""HeadRun: hidden states through the LM head or a slice of it, draws and scores from the logits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from server.model.gpu import sampler
from server.model.gpu.body_run import Computed
from server.model.gpu.head_plan import Slab, rows_of, sharing
from server.model.gpu.lm_head import FullHead
from server.model.gpu.own_rows import OwnRows
from server.model.gpu.results import Segment, Step
from server.model.gpu.sampler import token_logprobs
from server.model.gpu.slices import TorchSlices


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
        computed: Computed,
        tensors: Mapping[str, torch.Tensor],
        head: FullHead,
    ) -> None:
        """Multiply every slab's rows of `hidden` by the head, and draw and score."""
        shared: list[Slab] = []
        hidden = computed.hidden
        logits = hidden[:0]
        for i, slab in enumerate(slabs):
            prefix = f"{i}."
            own = {k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)}
            if computed.logits is not None:  # it was in the graph, for all rows of one slab
                seen = computed.logits[: slab.end]
            elif slab.view is not None and slab.view.table >= 0:
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
            self._finish(step, slab, seen, ids, own, computed.ids)

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
        done: torch.Tensor | None,
    ) -> None:
        """Draw and score on a slab's logits; queue the results for the way back.

        ids: int32 like the logits, the columns' vocabulary ids; None where a column is one. done:
        int32, what the draws are if a graph has drawn."""
        if slab.draw_ids.shape[0]:
            if done is None:
                drawn = sampler.draw(logits, slab.plan, tensors, ids)
            else:
                drawn = done[: slab.plan.num_draws]
            token_ids = drawn
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
