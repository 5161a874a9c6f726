"""Vocabulary slices on a device: right, how fast, and with how much memory.

A shape with random weights, its full head on the device ("device"), streamed from CPU memory
("stream") or multiplied there in `verify` ("cpu"). For each: is a slice the full head restricted,
and `verify` the full head; milliseconds of a decode step and of its head for the full head and for
slices of 1 % and 10 %; milliseconds of verifications; and the peak of device memory beside the
body's weights and the KV cache, which is head, embedding and the work on logits.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from loadtest.gpu.correct import BLOCK_SIZE, SHAPES, Asked, build, info_of, run
from loadtest.gpu.correct import Shape as ModelShape
from loadtest.gpu.steps import Case, batch_of
from server.engine.batch import Batch, Drawn, HeadSlice, Int32
from server.model.gpu.runner import TorchModel, TorchRunner

PLACES = ("device", "stream", "cpu")
TOLERANCE = 0.02
"""Most that a logprob may differ between two products of the same numbers in another order."""


@dataclass(frozen=True)
class Shape:
    """A model's shape, and what is asked of it. verified: rows that are verified at once."""

    model: ModelShape
    num_seqs: int
    history: int
    verified: tuple[int, ...]

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size


def shape_of(name: str) -> Shape:
    """What is asked of a shape of that name."""
    if name.startswith("tiny"):
        return Shape(SHAPES[name], 2, 40, (4, 6))
    return Shape(SHAPES[name], 8, 1024, (4, 16, 64))


def build_runner(
    shape: Shape, place: str, device: torch.device, dtype: torch.dtype
) -> tuple[TorchRunner, int]:
    """(a runner with its head there, bytes of the body's weights and the KV cache)."""
    module: Any = build(shape.model, device, dtype)
    model = TorchModel(module)
    if place != "device":
        table = module.lm_head.weight.detach().cpu()
        model = TorchModel(module, table, table, verify_on_cpu=place == "cpu")
        gone = torch.nn.Parameter(torch.empty_like(table, device="meta"), requires_grad=False)
        module.lm_head.weight = module.model.embed_tokens.weight = gone
    embed = module.get_input_embeddings().weight
    body = sum(p.numel() * p.element_size() for p in module.parameters() if p is not embed)
    info = info_of(
        module,
        device,
        num_blocks=shape.num_seqs * -(-(shape.history + 1) // BLOCK_SIZE),
        max_model_len=min(2048, shape.model.max_model_len),
        max_num_seqs=shape.num_seqs,
        max_num_batched_tokens=256,
    )
    runner = TorchRunner(model, info)
    memory = runner._cache.memory
    return runner, body + memory.numel() * memory.element_size()


def decode(shape: Shape, num_seqs: int, *, logprobs: bool = False) -> Batch:
    """A greedy decode step of several sequences over unwritten (zero) keys."""
    batch = batch_of(Case("decode", num_seqs, 1, shape.history), shape.vocab_size)
    if not logprobs:
        return batch
    [params] = batch.params
    told = replace(params, sampling=replace(params.sampling, num_logprobs=1))
    return replace(batch, params=(told,))


def unverified_of(step: Batch, num: int) -> tuple[Batch, Int32]:
    """(a Batch for `verify` of num rows, the kept places it reads in turn)."""
    rows, zeros = np.arange(num, dtype=np.int32), np.zeros(num, np.int32)
    batch = replace(
        step,
        token_ids=zeros,
        draw_rows=rows,
        draw_params=zeros,
        draw_parent=zeros - 1,
        draw_positions=zeros + int(step.draw_positions[0]),
        draw_mask=zeros - 1,
    )
    return batch, (rows % step.num_draws).astype(np.int32)


def load_slices(runner: TorchRunner, shape: Shape, share: float, table: int) -> list[HeadSlice]:
    """One T of a share of the vocabulary and 40 rows of its own for each sequence."""
    rng = np.random.default_rng(table)
    order = rng.permutation(shape.vocab_size).astype(np.int32)
    num = max(8, int(share * shape.vocab_size))
    own = min(40, (shape.vocab_size - num) // shape.num_seqs)
    static = np.sort(order[:num])
    runner.load_table(table, static)
    result = []
    for i in range(shape.num_seqs):
        dynamic = order[num + i * own : num + (i + 1) * own]
        places = np.arange(i * own, (i + 1) * own, dtype=np.int32)
        runner.load_rows(dynamic, places)
        ids = np.concatenate([static, dynamic])
        columns = np.concatenate([np.arange(num, dtype=np.int32), num + places])
        at = np.argsort(ids)
        result.append(HeadSlice(ids[at], columns[at].astype(np.int32), table, num))
    return result


def differences(got: Drawn, want: Drawn) -> dict[str, Any]:
    """How many draws differ, and how far their logprobs are apart."""
    apart = float(np.abs(got.logprobs - want.logprobs).max())
    return {
        "draws": int(got.token_ids.shape[0]),
        "other_ids": int((got.token_ids != want.token_ids).sum()),
        "logprobs_apart": round(apart, 6),
        "ok": bool(apart < TOLERANCE),
    }


class Place:
    """The check of one place of the full head. Its lines are {"what": ..., "place": ..., figures}.
    Close it."""

    def __init__(self, asked: Asked, place: str) -> None:
        self._shape, self._place, self._asked = shape_of(asked.name), place, asked
        self._start = 0
        if self._on_gpu:
            torch.cuda.empty_cache()
            self._start = torch.cuda.memory_allocated(asked.device)
        self._runner, self._other_bytes = build_runner(
            self._shape, place, asked.device, asked.dtype
        )
        counts = sorted({1, self._shape.num_seqs})
        self._steps = {n: decode(self._shape, n) for n in counts}
        self._chosen = {n: np.arange(n, dtype=np.int32) for n in counts}

    @property
    def _on_gpu(self) -> bool:
        return self._asked.device.type == "cuda"

    def close(self) -> None:
        self._runner.close()

    def lines(self) -> Iterator[dict[str, Any]]:
        """Slices first: their peak must not hold what only the full head needs."""
        self._peak()
        for table, (name, share) in enumerate((("slice 1 %", 0.01), ("slice 10 %", 0.1))):
            slices = load_slices(self._runner, self._shape, share, table)
            yield from self._slice_lines(name, slices)
            if table == 0:
                yield from self._verify_lines(slices)
            self._runner.drop_table(table)
        many = self._shape.num_seqs
        want = run(self._runner, decode(self._shape, many, logprobs=True))
        batch, places = unverified_of(decode(self._shape, many, logprobs=True), many)
        found = differences(self._runner.verify(batch, places), want)
        yield {"what": "verify = full", "place": self._place, **found}
        self._peak()
        for step in self._steps.values():
            yield self._timed("full", step)

    def _peak(self) -> float | None:
        """MiB beside the body and the KV cache since the last call; None without CUDA."""
        if not self._on_gpu:
            return None
        device = self._asked.device
        most = torch.cuda.max_memory_allocated(device) - self._start - self._other_bytes
        torch.cuda.reset_peak_memory_stats(device)
        return round(most / 2**20, 1)

    def _timed(self, mode: str, batch: Batch) -> dict[str, Any]:
        walls, heads = [], []
        for i in range(self._asked.repeats + 3):
            began = time.perf_counter()
            drawn = run(self._runner, batch)
            if i >= 3:
                walls.append(1e3 * (time.perf_counter() - began))
                heads.append(1e3 * drawn.head_s)
        return {
            "what": mode,
            "place": self._place,
            "seqs": batch.num_draws,
            "wall_ms": round(statistics.median(walls), 4),
            "head_ms": round(statistics.median(heads), 4),
            "peak_mib": self._peak(),
        }

    def _slice_lines(self, name: str, slices: list[HeadSlice]) -> Iterator[dict[str, Any]]:
        for n, step in self._steps.items():
            seen = replace(step, draw_slice=self._chosen[n], slices=tuple(slices[:n]))
            yield self._timed(name, seen)
        many = self._shape.num_seqs
        scored = replace(decode(self._shape, many, logprobs=True), draw_slice=self._chosen[many])
        got = run(self._runner, replace(scored, slices=tuple(slices)))
        none = np.empty(0, np.int32)
        plain = tuple(HeadSlice(s.ids, none, -1, 0) for s in slices)
        found = differences(got, run(self._runner, replace(scored, slices=plain)))
        inside = all(t in s.ids for t, s in zip(got.token_ids, slices, strict=True))
        found["ok"] = found["ok"] and inside
        yield {"what": f"{name} = full restricted", "place": self._place, **found}
        self._peak()

    def _verify_lines(self, slices: list[HeadSlice]) -> Iterator[dict[str, Any]]:
        many = self._shape.num_seqs
        chosen = self._chosen[many]
        kept = replace(self._steps[many], draw_slice=chosen, slices=tuple(slices), draw_keep=chosen)
        run(self._runner, kept)
        for num in self._shape.verified:
            batch, places = unverified_of(self._steps[many], num)
            self._runner.verify(batch, places)
            seconds = []
            for _ in range(self._asked.repeats):
                run(self._runner, kept)
                stepped = time.perf_counter()
                self._runner.verify(batch, places)
                seconds.append(1e3 * (time.perf_counter() - stepped))
            yield {
                "what": "exact 1 %",
                "place": self._place,
                "seqs": many,
                "window_rows": num,
                "verify_ms": round(statistics.median(seconds), 4),
                "peak_mib": self._peak(),
            }


def check(asked: Asked) -> Iterator[dict[str, Any]]:
    """Lines of every place of the head."""
    for name in PLACES:
        place = Place(asked, name)
        try:
            yield from place.lines()
        finally:
            place.close()
