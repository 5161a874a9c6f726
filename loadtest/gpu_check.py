"""One command for a machine with a GPU: is the CUDA path right there, and how fast is a step?

    python loadtest/gpu_check.py [--shapes 135m,1b,8b] [--device cuda:0] [--dtype bfloat16]

1. Prints the device's copy bandwidth, then, for Llama shapes with random weights, a table of step
   times beside the memory-bandwidth floor: decode of 1..64 sequences with a row each, trees of
   1..64 rows on one sequence, 8-row trees on several, sampled decode and prompt chunks, over
   histories of 256 to 8192 positions; all but chunks once plainly and once with CUDA graphs.
2. Measures and checks vocabulary slices on a Gemma 3 270M shape (loadtest/gpu_vocabulary.py): the
   full head on the device, streamed from CPU memory and verified on the CPU; device memory of each.
3. Runs tests/gpu (needs pytest), for --tests-timeout seconds at most.
4. Ends in one line of JSON. With --out each result is in a file as soon as it is there.

The floor is the bytes a step must read - every weight but the embedding table once, and the keys
and values of each sequence's history once - over the measured copy bandwidth (bytes read and
written a second). `wall` is the median over launch + wait, `launch` the host's part of it.

Needs torch >= 2.11, transformers, numpy, numba (Python 3.11 or newer) and this repository; none of
the web stack. Exits 1 when a GPU test failed, 2 without a CUDA device. `--device cpu --shapes tiny`
is a dry run of the code on a machine without one. It was written on such a machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from loadtest import gpu_vocabulary  # noqa: E402
from server.engine.batch import Batch, DrawParams  # noqa: E402
from server.model.gpu.kv_cache import bytes_per_block  # noqa: E402
from server.model.gpu.runner import TorchRunner  # noqa: E402
from server.types import SamplingParams  # noqa: E402

BLOCK_SIZE = 16
MAX_ROWS = 1024
KV_HEADROOM = 4 << 30  # bytes left for logits, activations and partial attention results


@dataclass(frozen=True)
class Shape:
    """A Llama shape; vocabulary and heads as the public models of that size have them."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool


SHAPES = {
    "135m": Shape(576, 1536, 30, 9, 3, 64, 49152, True),
    "1b": Shape(2048, 8192, 16, 32, 8, 64, 128256, True),
    "8b": Shape(4096, 14336, 32, 32, 8, 128, 128256, False),
    "tiny": Shape(64, 128, 2, 4, 2, 16, 256, True),
}


@dataclass(frozen=True)
class Case:
    """num_seqs sequences with `rows` rows each over `history` positions. A tree's rows hang off
    one another in chains of four; a chunk's are a prompt's; "sampled" is decode at temperature 0.8
    and top_p 0.9, where the others are greedy."""

    kind: str
    num_seqs: int
    rows: int
    history: int


def cases(shape: str) -> list[Case]:
    """What is timed, in the order of the table."""
    if shape == "tiny":
        kinds = (("decode", 2, 1), ("tree", 1, 5), ("sampled", 2, 1), ("chunk", 1, 8))
        return [Case(kind, seqs, rows, 40) for kind, seqs, rows in kinds]
    histories = (256, 1024, 2048, 4096, 8192)
    counts = (1, 2, 4, 8, 16, 32, 64)
    result = [Case("decode", n, 1, h) for h in histories for n in counts]
    result += [Case("tree", 1, n, h) for h in histories for n in counts[1:]]
    result += [Case("tree", n, 8, h) for h in (256, 2048, 8192) for n in (2, 8, 32)]
    result += [Case("sampled", n, 1, 1024) for n in (1, 8, 64)]
    result += [Case("chunk", 1, 512, h) for h in (0, 2048, 8192 - 512)]
    return result


def build(shape: Shape, device: torch.device, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """Random weights, made on the device."""
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=16384,
        tie_word_embeddings=shape.tied,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            module: transformers.PreTrainedModel = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    module.eval()  # type: ignore[no-untyped-call]
    return module


def weight_bytes(module: transformers.PreTrainedModel) -> int:
    """Bytes of weights that a step reads: all but the embedding table, unless it is the head."""
    head: Any = module.lm_head
    embedding: Any = module.get_input_embeddings()
    total = sum(p.numel() * p.element_size() for p in module.parameters())
    if embedding.weight is head.weight:
        return total
    return total - int(embedding.weight.numel()) * int(embedding.weight.element_size())


def blocks_needed(case: Case) -> int:
    """KV blocks of a case."""
    return case.num_seqs * -(-(case.history + case.rows) // BLOCK_SIZE)


def batch_of(case: Case, vocab_size: int) -> Batch:
    """The step of a case: all its rows, a draw from each (from a chunk's last alone)."""
    n, per = case.num_seqs, case.rows
    blocks = -(-(case.history + per) // BLOCK_SIZE)
    order = np.random.default_rng(0).permutation(n * blocks).astype(np.int32)
    tables = order.reshape(n, blocks)
    seq_ids = np.repeat(np.arange(n, dtype=np.int32), per)
    nth = np.tile(np.arange(per, dtype=np.int32), n)
    at = case.history + nth
    slots = tables[seq_ids, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
    if case.kind == "tree":
        depth = np.where(nth == 0, 0, (nth - 1) % 4 + 1).astype(np.int32)
        path_len = depth
        ends = np.cumsum(path_len).astype(np.int32)
        paths = [slots[i - d + 1 : i + 1] for i, d in enumerate(depth.tolist())]
        path_slots = np.concatenate(paths).astype(np.int32)
        positions = case.history + depth
        prefix_len = np.full(n * per, case.history + 1, np.int32)
    else:
        path_len = np.zeros(n * per, np.int32)
        ends = path_len
        path_slots = np.empty(0, np.int32)
        positions = at
        prefix_len = at + 1
    draw_rows = np.arange(n * per, dtype=np.int32)
    if case.kind == "chunk":
        draw_rows = draw_rows[-1:]
    draws = draw_rows.shape[0]
    none = np.empty(0, np.int32)
    s = SamplingParams(temperature=0.0)
    if case.kind == "sampled":
        s = SamplingParams(temperature=0.8, top_p=0.9)
    params = DrawParams(s, 0, none, none, none, none, 0)
    return Batch(
        token_ids=np.random.default_rng(1).integers(0, vocab_size, n * per).astype(np.int32),
        token_from=np.full(n * per, -1, np.int32),
        positions=positions.astype(np.int32),
        seq_ids=seq_ids,
        slots=slots.astype(np.int32),
        prefix_len=prefix_len.astype(np.int32),
        path_start=ends - path_len,
        path_len=path_len,
        path_slots=path_slots,
        block_tables=tables,
        draw_rows=draw_rows,
        draw_params=np.zeros(draws, np.int32),
        draw_parent=np.full(draws, -1, np.int32),
        draw_positions=(positions[draw_rows] + 1).astype(np.int32),
        draw_mask=np.full(draws, -1, np.int32),
        masks=np.empty((0, 0), np.uint32),
        params=(params,),
        score_rows=none,
        score_targets=none,
        score_top=none,
        num_prefill_rows=n * per if case.kind == "chunk" else 0,
        num_draft_rows=n * (per - 1) if case.kind == "tree" else 0,
    )


def bandwidth(device: torch.device) -> float:
    """Bytes read and written a second by a copy on the device, the best of ten."""
    size = (1 << 30) if device.type == "cuda" else (1 << 26)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(10):
        best = min(best, timed(lambda: target.copy_(source), device))
    return 2 * size / best


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Wall seconds of `work` to its end on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def measure(runner: TorchRunner, batch: Batch, repeats: int) -> tuple[float, float]:
    """(median seconds of launch + wait, median seconds of launch alone)."""
    walls, launches = [], []
    for i in range(repeats + 3):
        begin = time.perf_counter()
        runner.launch(batch)
        launched = time.perf_counter()
        runner.wait()
        if i >= 3:
            walls.append(time.perf_counter() - begin)
            launches.append(launched - begin)
    return statistics.median(walls), statistics.median(launches)


def free_blocks(shape: Shape, device: torch.device, dtype: torch.dtype) -> int:
    """Most KV blocks that fit beside the weights."""
    per_block = bytes_per_block(
        shape.num_layers, shape.num_kv_heads, shape.head_dim, BLOCK_SIZE, dtype
    )
    if device.type != "cuda":
        return 64
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, (free - KV_HEADROOM) // per_block - 1)


def time_shape(
    name: str, device: torch.device, dtype: torch.dtype, bytes_per_s: float, repeats: int
) -> Iterator[dict[str, Any]]:
    """Table rows of one shape; a case that does not fit has wall_ms None."""
    shape = SHAPES[name]
    module = build(shape, device, dtype)
    weights = weight_bytes(module)
    room = free_blocks(shape, device, dtype)
    key_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * dtype.itemsize
    for graphs in (False, True) if device.type == "cuda" else (False,):
        wanted = [c for c in cases(name) if not graphs or c.kind != "chunk"]
        fitting = [blocks_needed(c) for c in wanted if blocks_needed(c) <= room]
        runner = TorchRunner(
            module,
            name=name,
            device=device,
            num_blocks=max(fitting, default=1),
            block_size=BLOCK_SIZE,
            max_model_len=9216,
            max_num_seqs=64,
            max_num_batched_tokens=MAX_ROWS,
            cuda_graphs=graphs,
        )
        for case in wanted:
            read = weights + case.num_seqs * case.history * key_bytes
            row: dict[str, Any] = {
                "shape": name,
                "kind": case.kind,
                "graphs": graphs,
                "num_seqs": case.num_seqs,
                "rows_per_seq": case.rows,
                "history": case.history,
                "floor_ms": round(1e3 * read / bytes_per_s, 4),
                "wall_ms": None,
                "launch_ms": None,
            }
            if blocks_needed(case) <= room:
                try:
                    wall, launch = measure(runner, batch_of(case, shape.vocab_size), repeats)
                    row |= {"wall_ms": round(1e3 * wall, 4), "launch_ms": round(1e3 * launch, 4)}
                except Exception as error:  # Triton's own errors derive from nothing else
                    row["error"] = _named(error)
            yield row
        runner.close()


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


class Results:
    """Results as they come: a line of JSON each, on the disk before the next part begins. What a
    run that is cut off has found is then in the file. path: None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("a", encoding="utf-8")

    def add(self, part: str, values: dict[str, Any]) -> None:
        """Append one result. part: what it is of."""
        if self._file is not None:
            self._file.write(json.dumps({"part": part, **values}) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            self._file.close()


def run_gpu_tests(timeout_s: float) -> dict[str, Any]:
    """Outcome of tests/gpu in a process of its own, ended after timeout_s."""
    if importlib.util.find_spec("pytest") is None:
        return {"ran": False, "reason": "pytest is not installed"}
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-W", "default"]
    try:
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", "tests/gpu"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        told = error.stdout or b""
        print(told if isinstance(told, str) else told.decode(errors="replace"), flush=True)
        return {"ran": True, "exit_code": None, "summary": f"ended after {timeout_s:g} s"}
    print(done.stdout, flush=True)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {
        "ran": True,
        "exit_code": done.returncode,
        "summary": lines[-1] if lines else "",
        "failed": failed[:20],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", "--shape", default="135m,1b,8b", help="of " + ", ".join(SHAPES))
    parser.add_argument("--dtype", default=None, choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--no-tests", action="store_true", help="leave tests/gpu out")
    parser.add_argument("--out", type=Path, help="append each result to this file as it comes")
    parser.add_argument("--tests-timeout", type=float, default=240.0, metavar="S")
    options = parser.parse_args(arguments)
    names = options.shapes.split(",")
    if unknown := [n for n in names if n not in SHAPES]:
        parser.error(f"no shape {unknown[0]!r}: choose from {', '.join(SHAPES)}")
    device = torch.device(options.device)
    report = gpu_vocabulary.begin_report("gpu", device)
    if report is None:
        return 2
    ok = True
    results = Results(options.out)
    if device.type == "cuda":
        report["name"] = torch.cuda.get_device_name(device)
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    bytes_per_s = bandwidth(device)
    report |= {"dtype": str(dtype), "bandwidth_gb_s": round(bytes_per_s / 1e9, 1), "steps": []}
    results.add("device", {k: v for k, v in report.items() if k != "steps"})
    print(f"{report.get('name', device)}: copies {bytes_per_s / 1e9:.0f} GB/s; {dtype}")
    print("shape  kind    graphs  seqs  rows  history  floor ms   wall ms  x floor  launch ms")
    for name in names:
        try:
            for row in time_shape(name, device, dtype, bytes_per_s, options.repeats):
                report["steps"].append(row)
                results.add("step", row)
                ok = ok and "error" not in row
                print(_line(row), flush=True)
        except Exception as error:
            ok = False
            results.add("error", {"of": name, "error": _named(error)})
            report.setdefault("errors", []).append(f"{name}: {_named(error)}")
            print(f"{name}: {_named(error)}", flush=True)
    small = all(name == "tiny" for name in names)
    try:
        report["vocabulary"], right = gpu_vocabulary.check(
            "tiny" if small else "gemma-3-270m", device, dtype, options.repeats
        )
        results.add("vocabulary", {"rows": report["vocabulary"], "ok": right})
    except Exception as error:
        right = False
        results.add("error", {"of": "vocabulary", "error": _named(error)})
        report.setdefault("errors", []).append(f"vocabulary: {_named(error)}")
        print(f"vocabulary: {_named(error)}", flush=True)
    ok = ok and right
    if device.type == "cuda" and not options.no_tests:  # last: compiling may take the time there is
        report["tests"] = run_gpu_tests(options.tests_timeout)
        results.add("tests", report["tests"])
        ok = ok and report["tests"].get("exit_code") == 0
    results.close()
    print(json.dumps(report | {"ok": ok}))
    return 0 if ok else 1


def _line(row: dict[str, Any]) -> str:
    start = (
        f"{row['shape']:<6} {row['kind']:<7} {'yes' if row['graphs'] else 'no':<6} "
        f"{row['num_seqs']:>5} {row['rows_per_seq']:>5} {row['history']:>8} "
        f"{row['floor_ms']:>9.3f} "
    )
    if "error" in row:
        return f"{start}  {row['error']}"
    if row["wall_ms"] is None:
        return start + "  does not fit"
    share = row["wall_ms"] / row["floor_ms"]
    return start + f"{row['wall_ms']:>9.3f} {share:>8.1f} {row['launch_ms']:>10.3f}"


if __name__ == "__main__":
    sys.exit(main())
