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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from loadtest.gpu.correct import SHAPES, Asked, build, run, runner_of
from loadtest.gpu.correct import Shape as ModelShape
from loadtest.gpu.steps import Case, batch_of, blocks_needed, measure
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
    def case(self) -> Case:
        """The decode step of all its sequences."""
        return Case("decode", self.num_seqs, 1, self.history)


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
    runner = runner_of(
        module, device, min(2048, shape.model.max_model_len), model=model,
        num_blocks=blocks_needed(shape.case), num_seqs=shape.num_seqs,
    )  # fmt: skip
    memory = runner._cache.memory
    return runner, body + memory.numel() * memory.element_size()


def decode(shape: Shape, num_seqs: int, *, logprobs: bool = False) -> Batch:
    """A greedy decode step of several sequences over unwritten (zero) keys."""
    batch = batch_of(replace(shape.case, num_seqs=num_seqs), shape.model.vocab_size)
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
    vocab_size = shape.model.vocab_size
    order = rng.permutation(vocab_size).astype(np.int32)
    num = max(8, int(share * vocab_size))
    own = min(40, (vocab_size - num) // shape.num_seqs)
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


class Peak:
    """The device's memory beside what is there when it is made; None without CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.kept = 0
        """Bytes that do not count."""
        if device.type == "cuda":
            torch.cuda.empty_cache()
            self.kept = torch.cuda.memory_allocated(device)

    def mib(self) -> float | None:
        """The most since the last call."""
        if self._device.type != "cuda":
            return None
        most = torch.cuda.max_memory_allocated(self._device) - self.kept
        torch.cuda.reset_peak_memory_stats(self._device)
        return round(most / 2**20, 1)


def sliced(batch: Batch, slices: Sequence[HeadSlice]) -> Batch:
    """The step with a slice for each draw."""
    return replace(batch, draw_slice=np.arange(len(slices), dtype=np.int32), slices=tuple(slices))


def check_place(asked: Asked, place: str) -> Iterator[dict[str, Any]]:
    """Lines {"what": ..., figures} of one place of the full head. Slices first: their peak must not
    hold what only the full head needs."""
    shape, peak = shape_of(asked.name), Peak(asked.device)
    runner, other_bytes = build_runner(shape, place, asked.device, asked.dtype)
    peak.kept += other_bytes
    many = shape.num_seqs
    steps = {num: decode(shape, num) for num in sorted({1, many})}
    scored = decode(shape, many, logprobs=True)
    peak.mib()
    for table, (name, share) in enumerate((("slice 1 %", 0.01), ("slice 10 %", 0.1))):
        slices = load_slices(runner, shape, share, table)
        for num, step in steps.items():
            figures = measure(runner, sliced(step, slices[:num]), asked.repeats)
            yield {"what": name, "seqs": num, **figures, "peak_mib": peak.mib()}
        got = run(runner, sliced(scored, slices))
        none = np.empty(0, np.int32)
        plain = [HeadSlice(s.ids, none, -1, 0) for s in slices]
        found = differences(got, run(runner, sliced(scored, plain)))
        inside = all(t in s.ids for t, s in zip(got.token_ids, slices, strict=True))
        yield {"what": f"{name} = full restricted", **found, "ok": found["ok"] and inside}
        peak.mib()
        if table == 0:
            kept = replace(sliced(steps[many], slices), draw_keep=np.arange(many, dtype=np.int32))
            run(runner, kept)
            for num in shape.verified:
                batch, places = unverified_of(steps[many], num)
                runner.verify(batch, places)
                seconds = []
                for _ in range(asked.repeats):
                    run(runner, kept)
                    stepped = time.perf_counter()
                    runner.verify(batch, places)
                    seconds.append(1e3 * (time.perf_counter() - stepped))
                yield {
                    "what": "exact 1 %",
                    "seqs": many,
                    "window_rows": num,
                    "verify_ms": round(statistics.median(seconds), 4),
                    "peak_mib": peak.mib(),
                }
        runner.drop_table(table)
    want = run(runner, scored)
    found = differences(runner.verify(*unverified_of(scored, many)), want)
    yield {"what": "verify = full", **found}
    peak.mib()
    for num, step in steps.items():
        figures = measure(runner, step, asked.repeats)
        yield {"what": "full", "seqs": num, **figures, "peak_mib": peak.mib()}
    runner.close()


def check(asked: Asked) -> Iterator[dict[str, Any]]:
    """Lines of every place of the head."""
    for place in PLACES:
        for line in check_place(asked, place):
            yield {"place": place, **line}
