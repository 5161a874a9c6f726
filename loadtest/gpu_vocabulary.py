"""Vocabulary slices on a GPU: part of `python loadtest/gpu_check.py`, or alone:

    python loadtest/gpu_vocabulary.py [--device cuda:0] [--dtype bfloat16] [--repeats 20]

A Gemma 3 270M shape with random weights, its full head on the device ("device"), streamed from CPU
memory ("stream") or multiplied there in `verify` ("cpu"). For each: is a slice the full head
restricted, and `verify` the full head; milliseconds of a decode step and of its head for the full
head and for slices of 1 % and 10 %; milliseconds of verifying windows; and the peak of device
memory beside the body's weights and the KV cache, which is head, embedding and the work on logits.
Needs no model. `--device cpu --shape tiny` is a dry run of the code, without memory figures.
Ends in one line of JSON; exits 1 when something is wrong, 2 without a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from server.engine.batch import Batch, Drawn, DrawParams, HeadSlice, Int32  # noqa: E402
from server.model.gpu.runner import TorchRunner  # noqa: E402
from server.types import SamplingParams  # noqa: E402

BLOCK_SIZE = 16
PLACES = ("device", "stream", "cpu")
TOLERANCE = 0.02
"""Most that a logprob may differ between two products of the same numbers in another order."""


@dataclass(frozen=True)
class Shape:
    """A Gemma 3 text model's sizes; every sixth layer attends to everything."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    num_seqs: int
    history: int
    windows: tuple[int, ...]


SHAPES = {
    "gemma-3-270m": Shape(262144, 640, 2048, 18, 4, 256, 8, 1024, (4, 16, 64)),
    "tiny": Shape(1024, 32, 64, 2, 2, 16, 2, 40, (4, 6)),
}


def build(shape: Shape, device: torch.device, dtype: torch.dtype) -> Any:
    """Random weights, the same for every place."""
    config = transformers.Gemma3TextConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=1,
        head_dim=shape.head_dim,
        query_pre_attn_scalar=shape.head_dim,
        sliding_window=512,
        layer_types=[
            "full_attention" if i % 6 == 5 else "sliding_attention" for i in range(shape.num_layers)
        ],
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            module = transformers.Gemma3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return module.eval()  # type: ignore[no-untyped-call]


def build_runner(
    shape: Shape, place: str, device: torch.device, dtype: torch.dtype
) -> tuple[TorchRunner, int]:
    """(a runner with its head there, bytes of the body's weights and the KV cache)."""
    module = build(shape, device, dtype)
    tables: dict[str, Any] = {}
    if place != "device":
        table = module.lm_head.weight.detach().cpu()
        tables = {"embedding": table, "head": table, "verify_on_cpu": place == "cpu"}
        gone = torch.nn.Parameter(torch.empty_like(table, device="meta"), requires_grad=False)
        module.lm_head.weight = module.model.embed_tokens.weight = gone
    embed = module.get_input_embeddings().weight
    body = sum(p.numel() * p.element_size() for p in module.parameters() if p is not embed)
    runner = TorchRunner(
        module,
        name=place,
        device=device,
        num_blocks=shape.num_seqs * -(-(shape.history + 1) // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_model_len=2048,
        max_num_seqs=shape.num_seqs,
        max_num_batched_tokens=256,
        **tables,
    )
    memory = runner._cache.memory
    return runner, body + memory.numel() * memory.element_size()


def decode(shape: Shape, num_seqs: int, *, logprobs: bool = False) -> Batch:
    """A greedy decode step of several sequences over unwritten (zero) keys."""
    blocks = -(-(shape.history + 1) // BLOCK_SIZE)
    tables = np.arange(num_seqs * blocks, dtype=np.int32).reshape(num_seqs, blocks)
    rows, zeros = np.arange(num_seqs, dtype=np.int32), np.zeros(num_seqs, np.int32)
    at, none = shape.history, np.empty(0, np.int32)
    s = SamplingParams(temperature=0.0, num_logprobs=1 if logprobs else None)
    return Batch(
        token_ids=np.random.default_rng(1).integers(9, shape.vocab_size, num_seqs, np.int32),
        token_from=zeros - 1,
        positions=zeros + at,
        seq_ids=rows,
        slots=tables[:, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE,
        prefix_len=zeros + at + 1,
        path_start=zeros,
        path_len=zeros,
        path_slots=none,
        block_tables=tables,
        draw_rows=rows,
        draw_params=zeros,
        draw_parent=zeros - 1,
        draw_positions=zeros + at + 1,
        draw_mask=zeros - 1,
        masks=np.empty((0, 0), np.uint32),
        params=(DrawParams(s, 0, none, none, none, none, 0),),
        score_rows=none,
        score_targets=none,
        score_top=none,
        num_prefill_rows=0,
        num_draft_rows=0,
    )


def windows_of(step: Batch, num: int) -> tuple[Batch, Int32]:
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


def run(runner: TorchRunner, batch: Batch) -> Drawn:
    """One step."""
    runner.launch(batch)
    return runner.wait()


def differences(got: Drawn, want: Drawn) -> dict[str, Any]:
    """How many draws differ, and how far their logprobs are apart."""
    apart = float(np.abs(got.logprobs - want.logprobs).max())
    return {
        "draws": int(got.token_ids.shape[0]),
        "other_ids": int((got.token_ids != want.token_ids).sum()),
        "logprobs_apart": round(apart, 6),
        "ok": bool(apart < TOLERANCE),
    }


def check_place(
    shape: Shape, place: str, device: torch.device, dtype: torch.dtype, repeats: int
) -> Iterator[dict[str, Any]]:
    """Lines of one place of the full head: {"what": ..., "place": ..., figures}."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        start = torch.cuda.memory_allocated(device)
    runner, other_bytes = build_runner(shape, place, device, dtype)

    def peak() -> float | None:
        if not on_gpu:
            return None
        bytes_ = torch.cuda.max_memory_allocated(device) - start - other_bytes
        torch.cuda.reset_peak_memory_stats(device)
        return round(bytes_ / 2**20, 1)

    def timed(mode: str, batch: Batch) -> dict[str, Any]:
        walls, heads = [], []
        for i in range(repeats + 3):
            began = time.perf_counter()
            drawn = run(runner, batch)
            if i >= 3:
                walls.append(1e3 * (time.perf_counter() - began))
                heads.append(1e3 * drawn.head_s)
        return {
            "what": mode,
            "place": place,
            "seqs": batch.num_draws,
            "wall_ms": round(statistics.median(walls), 4),
            "head_ms": round(statistics.median(heads), 4),
            "peak_mib": peak(),
        }

    try:
        peak()
        steps = {n: decode(shape, n) for n in sorted({1, shape.num_seqs})}
        chosen = {n: np.arange(n, dtype=np.int32) for n in steps}
        many = shape.num_seqs
        # Slices first: their peak must not hold what only the full head needs.
        for table, (name, share) in enumerate((("slice 1 %", 0.01), ("slice 10 %", 0.1))):
            slices = load_slices(runner, shape, share, table)
            for n, step in steps.items():
                cut = replace(step, draw_slice=chosen[n], slices=tuple(slices[:n]))
                yield timed(name, cut)
            asked = replace(decode(shape, many, logprobs=True), draw_slice=chosen[many])
            got = run(runner, replace(asked, slices=tuple(slices)))
            none = np.empty(0, np.int32)
            plain = tuple(HeadSlice(s.ids, none, -1, 0) for s in slices)
            found = differences(got, run(runner, replace(asked, slices=plain)))
            inside = all(t in s.ids for t, s in zip(got.token_ids, slices, strict=True))
            found["ok"] = found["ok"] and inside
            yield {"what": f"{name} = full restricted", "place": place, **found}
            peak()
            kept = replace(cut, draw_keep=chosen[many])
            run(runner, kept)
            for num in shape.windows if table == 0 else ():
                batch, places = windows_of(step, num)
                runner.verify(batch, places)
                seconds = []
                for _ in range(repeats):
                    run(runner, kept)
                    stepped = time.perf_counter()
                    runner.verify(batch, places)
                    seconds.append(1e3 * (time.perf_counter() - stepped))
                yield {
                    "what": "exact 1 %",
                    "place": place,
                    "seqs": many,
                    "window_rows": num,
                    "verify_ms": round(statistics.median(seconds), 4),
                    "peak_mib": peak(),
                }
            runner.drop_table(table)
        want = run(runner, decode(shape, many, logprobs=True))
        batch, places = windows_of(decode(shape, many, logprobs=True), many)
        yield {
            "what": "verify = full",
            "place": place,
            **differences(runner.verify(batch, places), want),
        }
        peak()
        for step in steps.values():
            yield timed("full", step)
    finally:
        runner.close()


def check(
    name: str, device: torch.device, dtype: torch.dtype, repeats: int
) -> tuple[list[dict[str, Any]], bool]:
    """(all lines, printed as they come; whether everything was right)."""
    lines: list[dict[str, Any]] = []
    print(f"vocabulary slices, {name}, {dtype}: peak = device memory of head, embedding and logits")
    for place in PLACES:
        for line in check_place(SHAPES[name], place, device, dtype, repeats):
            lines.append(line)
            print("  " + "  ".join(f"{k} {v}" for k, v in line.items()), flush=True)
    return lines, all(line.get("ok", True) for line in lines)


def begin_report(what: str, device: torch.device) -> dict[str, Any] | None:
    """What the JSON line of a check begins with; None, and all is said, without the CUDA device."""
    report: dict[str, Any] = {
        "check": what,
        "device": str(device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    if device.type == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here (torch.cuda.is_available() is False).")
        print(json.dumps(report | {"ok": False, "error": "no CUDA device"}))
        return None
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="gemma-3-270m", choices=tuple(SHAPES))
    parser.add_argument("--dtype", default=None, choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    report = begin_report("gpu vocabulary", device)
    if report is None:
        return 2
    if device.type == "cuda":
        report["name"] = torch.cuda.get_device_name(device)
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    lines, ok = check(options.shape, device, dtype, options.repeats)
    print(json.dumps(report | {"dtype": str(dtype), "vocabulary": lines, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
