"""Step: one launched step of TorchRunner, and how its results come back to the host."""

from __future__ import annotations

import time
from collections.abc import Sequence
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
from server.model.gpu.sampler import NAN_LOGITS
from server.model.gpu.slices import Placed

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
